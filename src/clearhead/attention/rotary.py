"""Rotary positions (RoPE): pairs of numbers in q and k are turned by the position's angle.

angle(p, i) = p / theta^(2i/d), and <rotate(q, m), rotate(k, n)> depends on m - n alone. Su et al.
2021, section 3. Scalings stretch the angles so that a model reads further than it was trained:
linear (Chen et al. 2023), NTK (theta grown instead), YaRN (Peng et al. 2023, section 3), and Llama
3's.

Differs from the paper: the two numbers of a pair stand half a head apart (i and i + d/2), not side
by side, as in the weights people have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.positions import Positions
from clearhead.config import Spec
from clearhead.errors import require


class RopeScaling(Spec):
    """How to stretch the angles beyond the length a model was trained with."""

    def stretch(self, frequencies: Tensor, theta: float, width: int) -> tuple[Tensor, float]:
        """New frequencies, and what cosines and sines are multiplied by."""
        return frequencies, 1.0


@dataclass(frozen=True)
class LinearScaling(RopeScaling, kind="linear"):
    """Positions divided by a factor: every angle turns that much slower."""

    factor: float
    """How many times longer."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def stretch(self, frequencies: Tensor, theta: float, width: int) -> tuple[Tensor, float]:
        return frequencies / self.factor, 1.0


@dataclass(frozen=True)
class NTKScaling(RopeScaling, kind="ntk"):
    """A larger theta: slow angles are stretched, fast ones keep their resolution."""

    factor: float
    """How many times longer."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def stretch(self, frequencies: Tensor, theta: float, width: int) -> tuple[Tensor, float]:
        require(width > 2, "NTK scaling spreads over several pairs: a width of 2 has only one.")
        theta = theta * self.factor ** (width / (width - 2))
        return _frequencies(theta, width, frequencies.device), 1.0


@dataclass(frozen=True)
class YarnScaling(RopeScaling, kind="yarn"):
    """Fast angles kept, slow ones divided, a ramp between them.

    Scores are sharpened a little to make up for it.
    """

    factor: float
    """How many times longer."""
    trained_len: int
    """The length the model was trained with."""
    beta_fast: float = 32.0
    """Angles that turn more often than this over `trained_len` are kept."""
    beta_slow: float = 1.0
    """Angles that turn less often than this are divided by `factor`."""
    attention_factor: float | None = None
    """What cosines and sines are multiplied by; None: 0.1 ln(factor) + 1, the paper's."""
    truncate: bool = True
    """Round the ends of the ramp to whole indices."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        require(self.trained_len >= 1, f"trained_len must be 1 or more, not {self.trained_len}.")
        require(
            self.beta_fast > 0 and self.beta_slow > 0,
            f"beta_fast = {self.beta_fast} and beta_slow = {self.beta_slow} must be above 0.",
        )

    def stretch(self, frequencies: Tensor, theta: float, width: int) -> tuple[Tensor, float]:
        require(theta > 1, f"YaRN scaling needs a theta above 1, not {theta}.")

        def index(turns: float) -> float:
            return (
                width * math.log(self.trained_len / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        steps = torch.arange(width // 2, dtype=torch.float32, device=frequencies.device)
        ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
        mixed = frequencies / self.factor * ramp + frequencies * (1 - ramp)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return mixed, factor


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling, kind="llama3"):
    """Waves beyond the trained length are stretched, short ones kept, those between blended."""

    factor: float = 8.0
    """How many times longer."""
    low_factor: float = 1.0
    """Waves longer than trained_len / low_factor are divided by `factor`."""
    high_factor: float = 4.0
    """Waves shorter than trained_len / high_factor are kept."""
    trained_len: int = 8192
    """The length the model was trained with."""

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        require(self.trained_len >= 1, f"trained_len must be 1 or more, not {self.trained_len}.")
        require(
            0 < self.low_factor < self.high_factor,
            f"low_factor = {self.low_factor} must be above 0 and below high_factor = "
            f"{self.high_factor}.",
        )

    def stretch(self, frequencies: Tensor, theta: float, width: int) -> tuple[Tensor, float]:
        waves = 2 * math.pi / frequencies
        blend = (self.trained_len / waves - self.low_factor) / (self.high_factor - self.low_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / self.factor + blend * frequencies, 1.0


def _check_factor(factor: float) -> None:
    require(factor > 0, f"The factor of a rotary scaling must be above 0, not {factor}.")


class Rotary(nn.Module):
    """Cosine and sine tables at given positions, and the rotation itself."""

    frequencies: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float = 10000.0,
        fraction: float = 1.0,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        require(theta > 0, f"The base of rotary angles, theta, must be above 0, not {theta}.")
        width = int(head_dim * fraction)
        require(
            0 < width <= head_dim and width % 2 == 0,
            f"Rotary positions turn pairs of numbers: {fraction} of a head of {head_dim} is "
            f"{width}, which must be even and at least 2. Change head_dim (d_model / n_heads) or "
            "the fraction.",
        )
        self.width, self.whole = width, width == head_dim
        self.theta, self.scaling = theta, scaling
        self.factor = 1.0
        self.register_buffer("frequencies", torch.empty(width // 2), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Compute the frequencies (again: a model that was made on the meta device has none)."""
        frequencies = _frequencies(self.theta, self.width, self.frequencies.device)
        if self.scaling is not None:
            frequencies, self.factor = self.scaling.stretch(frequencies, self.theta, self.width)
        self.frequencies = frequencies

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moved like any module, but never cast: angles in half precision are wrong far out."""
        super()._apply(fn, recurse)
        if self.frequencies.dtype != torch.float32 and not self.frequencies.is_meta:
            self.frequencies = self.frequencies.float()
            self.reset()
        return self

    def tables(self, at: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [b, 1, t, width], computed in fp32 and cast once a call."""
        return self.angles(at.pos, dtype)

    def angles(self, pos: Int[Tensor, "b t"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same for bare numbers."""
        angles = pos.unsqueeze(2).float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)

    def rotate(
        self, x: Float[Tensor, "b h t d"], tables: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "b h t d"]:
        """Turn every pair of x by the angle of its position."""
        if self.whole:
            return _turn(x, tables)
        turned, kept = x[..., : self.width], x[..., self.width :]
        return torch.cat((_turn(turned, tables), kept), dim=-1)


class Rotary2D(nn.Module):
    """The first half of a head turns with the row of a grid, the second half with the column."""

    def __init__(self, head_dim: int, columns: int, theta: float = 10000.0, first: int = 0) -> None:
        super().__init__()
        require(columns >= 1, f"A grid has 1 column or more, not {columns}.")
        require(
            head_dim % 4 == 0,
            f"2-D rotary positions need a head width that divides by 4, not {head_dim}.",
        )
        self.columns, self.first = columns, first
        self.line = Rotary(head_dim // 2, theta)

    def reset(self) -> None:
        """Compute the frequencies again."""
        self.line.reset()

    def tables(self, at: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [b, 1, t, d]: rows, then columns.

        Slots before the grid are not turned.
        """
        cell = (at.pos - self.first).clamp(min=0)
        rows, columns = cell // self.columns, cell % self.columns
        halves = [self.line.angles(p, dtype) for p in (rows, columns)]
        return torch.cat([c for c, _ in halves], dim=-1), torch.cat([s for _, s in halves], dim=-1)

    def rotate(
        self, x: Float[Tensor, "b h t d"], tables: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "b h t d"]:
        """Turn each half of x by its own angles."""
        cos, sin = tables
        half = x.shape[-1] // 2
        rows = _turn(x[..., :half], (cos[..., :half], sin[..., :half]))
        return torch.cat((rows, _turn(x[..., half:], (cos[..., half:], sin[..., half:]))), dim=-1)


def _frequencies(theta: float, width: int, device: torch.device) -> Tensor:
    if device.type == "meta":  # without numbers; arange would import a compiler there
        return torch.empty(width // 2, device=device)
    return 1.0 / theta ** (
        torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    )


def _turn(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = tables
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
