"""What an attention sublayer is made from: heads, kernel, mask, position, as one frozen spec.

`AttentionConfig.build` is the only reader; the module it returns has the values, not the spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from clearhead.attention.attention import Attention
from clearhead.attention.bias import ALiBi, T5Buckets
from clearhead.attention.mask import All, Mask
from clearhead.attention.relative import Shaw, TransformerXL
from clearhead.attention.rms import RMSNorm
from clearhead.attention.rotary import RopeScaling, Rotary, Rotary2D
from clearhead.attention.softmax import KernelConfig, SoftmaxConfig
from clearhead.config import Spec
from clearhead.errors import ClearheadError, require


@dataclass(frozen=True)
class Geometry(Spec, kind="geometry"):
    """Widths and heads."""

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int | None = None
    """Key/value heads: n_heads (None), fewer (grouped), or 1 (multi-query)."""
    head_dim: int | None = None
    """Width of a head; None: d_model / n_heads."""

    def __post_init__(self) -> None:
        require(self.d_model >= 1 and self.n_heads >= 1, "d_model and n_heads must be 1 or more.")
        require(
            self.head_dim is None or self.head_dim >= 1,
            f"head_dim must be 1 or more, not {self.head_dim}.",
        )
        if self.head_dim is None and self.d_model % self.n_heads != 0:
            steps = range(min(self.n_heads, 1000))  # enough to look, however large the numbers
            near = (n for i in steps for n in (self.n_heads - i, self.n_heads + i))
            best = next((n for n in near if self.d_model % n == 0), 1)
            wide = -(-self.d_model // self.n_heads) * self.n_heads
            # No word of head_dim: not every family has it.
            raise ClearheadError(
                f"d_model = {self.d_model} does not divide by n_heads = {self.n_heads}: for "
                f"example n_heads = {best}, or d_model = {wide}."
            )

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.n_heads


@dataclass(frozen=True)
class Biases(Spec, kind="biases"):
    """Which of the four projections have a bias vector."""

    q: bool = True
    """Queries."""
    k: bool = True
    """Keys."""
    v: bool = True
    """Values."""
    out: bool = True
    """The output."""


class AttentionPosition(Spec):
    """A position that enters inside attention: by rotation, a bias, or relative to the content."""

    rotates: ClassVar[bool] = False  # otherwise it needs a kernel that takes a bias on the scores

    def rotary(self, geometry: Geometry) -> Rotary | Rotary2D | None:
        """The tables that the stack computes once a call, if it enters by rotation."""
        return None

    def bias(self, geometry: Geometry, causal: bool) -> nn.Module | None:
        """The bias that the stack computes once a call, if it enters so."""
        return None

    def relative(self, geometry: Geometry, scale: float) -> nn.Module | None:
        """What each layer owns, if it depends on the content."""
        return None


@dataclass(frozen=True)
class RopeConfig(AttentionPosition, kind="rope"):
    """Rotary positions."""

    rotates: ClassVar[bool] = True

    theta: float = 10000.0
    """Base of the angles: larger turns slower."""
    fraction: float = 1.0
    """Which part of a head is turned (GPT-NeoX: 0.25)."""
    scaling: RopeScaling | None = None
    """How to stretch the angles for longer texts."""

    def rotary(self, geometry: Geometry) -> Rotary | Rotary2D | None:
        return Rotary(geometry.width, self.theta, self.fraction, self.scaling)


@dataclass(frozen=True)
class Rope2DConfig(AttentionPosition, kind="rope_2d"):
    """Rotary positions of a grid: half a head for rows, half for columns."""

    rotates: ClassVar[bool] = True

    columns: int
    """Columns of the grid; position p stands in row p // columns."""
    theta: float = 10000.0
    """Base of the angles."""
    first: int = 0
    """The position of the first cell (a CLS token stands before it)."""

    def rotary(self, geometry: Geometry) -> Rotary | Rotary2D | None:
        return Rotary2D(geometry.width, self.columns, self.theta, self.first)


@dataclass(frozen=True)
class ALiBiConfig(AttentionPosition, kind="alibi"):
    """A penalty that grows with the distance."""

    def bias(self, geometry: Geometry, causal: bool) -> nn.Module | None:
        return ALiBi(geometry.n_heads)


@dataclass(frozen=True)
class T5BucketsConfig(AttentionPosition, kind="t5_buckets"):
    """A learned bias for each bucket of distances."""

    buckets: int = 32
    """How many."""
    max_distance: int = 128
    """Further than this is all the same bucket."""

    def __post_init__(self) -> None:
        require(self.buckets >= 4, f"T5 position buckets: {self.buckets} is too few, 4 at least.")
        require(
            self.max_distance > self.buckets // 2,
            f"max_distance = {self.max_distance} must be beyond the {self.buckets // 2} exact "
            "buckets.",
        )

    def bias(self, geometry: Geometry, causal: bool) -> nn.Module | None:
        return T5Buckets(geometry.n_heads, self.buckets, self.max_distance, causal)


@dataclass(frozen=True)
class ShawConfig(AttentionPosition, kind="shaw"):
    """A learned vector for each clipped distance."""

    max_distance: int = 16
    """Further than this is all the same vector."""

    def __post_init__(self) -> None:
        require(self.max_distance >= 0, f"max_distance must be 0 or more: {self.max_distance}.")

    def relative(self, geometry: Geometry, scale: float) -> nn.Module | None:
        return Shaw(geometry.width, self.max_distance, scale)


@dataclass(frozen=True)
class TransformerXLConfig(AttentionPosition, kind="transformer_xl"):
    """Projected sinusoids of the distance with two learned vectors."""

    def relative(self, geometry: Geometry, scale: float) -> nn.Module | None:
        return TransformerXL(geometry.d_model, geometry.n_heads, geometry.width, scale)


@dataclass(frozen=True)
class AttentionConfig(Spec, kind="attention"):
    """One attention sublayer."""

    geometry: Geometry
    """Widths and heads."""
    kernel: KernelConfig = SoftmaxConfig()
    """How (q, k, v) become the output."""
    mask: Mask = All()
    """Who may look at whom."""
    position: AttentionPosition | None = None
    """The position that enters here, if any."""
    biases: Biases = Biases()
    """Which projections have a bias vector."""
    qk_norm: float | None = None
    """RMS-normalise each head's queries and keys with this epsilon; None: not."""
    scale: float | None = None
    """Multiplies the scores; None: 1 / sqrt(head_dim). T5 has 1."""
    dropout: float = 0.0
    """Probability that an attention weight is dropped in training."""

    @property
    def score_scale(self) -> float:
        """What the scores are multiplied by."""
        return self.geometry.width**-0.5 if self.scale is None else self.scale

    def build(self, rotary: Rotary | Rotary2D | None = None) -> Attention:
        """The sublayer; `rotary` is the stack's, shared by its layers."""
        g, scale = self.geometry, self.score_scale
        norms = None
        if self.qk_norm is not None:
            norms = (RMSNorm(g.width, self.qk_norm), RMSNorm(g.width, self.qk_norm))
        return Attention(
            g.d_model,
            g.n_heads,
            n_kv_heads=g.n_kv_heads,
            head_dim=g.head_dim,
            biases=(self.biases.q, self.biases.k, self.biases.v, self.biases.out),
            kernel=self.kernel.build(scale, self.dropout),
            norms=norms,
            rotary=rotary,
            relative=None if self.position is None else self.position.relative(g, scale),
        )
