"""A stack: equal blocks one above the other, built from one frozen spec.

`build_stack` is the only reader of a `StackConfig`: what a layer asks of its kernel, mask and
position is checked there, once, with a sentence; a forward has nothing left to decide. What follows
from positions is computed once a call for each kind of layer (the tuple of attention specs, cycled
over the layers) and handed down as a `View`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.cache import KV, Cache, CrossKV, Slots
from clearhead.attention.mask import All, Mask
from clearhead.attention.positions import Positions
from clearhead.attention.rotary import Rotary, Rotary2D
from clearhead.attention.spec import AttentionConfig
from clearhead.attention.view import View, merge
from clearhead.config import Spec
from clearhead.errors import require
from clearhead.layers.block import RESIDUALS, Block, Look, ParallelBlock, Placement, Residual
from clearhead.layers.ffn import FFNConfig
from clearhead.layers.norm import LayerNormConfig, NormConfig

Topology = Literal["sequence", "parallel"]


@dataclass(frozen=True, eq=False)
class Memory:
    """What `encode` returns: a source's states and where they stand."""

    x: Float[Tensor, "s k m"]
    """The encoder's last states."""
    at: Positions
    """Where they stand; empty slots are not attended to."""
    final: Float[Tensor, "s n m"] | None = None
    """What a recurrent encoder carried when it had read all: a decoder begins with it."""

    @property
    def rows(self) -> int:
        """How many sources."""
        return self.x.shape[0]

    def select(self, sources: Int[Tensor, " n"]) -> Memory:
        """These sources, in this order."""
        at = self.at
        if at.pos.shape[0] > 1:
            ends = None if at.ends is None else tuple(at.ends[i] for i in sources.tolist())
            at = replace(at, pos=at.pos.index_select(0, sources), ends=ends)
        final = None if self.final is None else self.final.index_select(0, sources)
        return Memory(self.x.index_select(0, sources), at, final)


class Kind(nn.Module):
    """What all layers of one kind share: the mask's formula and the stack-owned positions."""

    def __init__(
        self,
        mask: Mask,
        rotary: Rotary | Rotary2D | None,
        bias: nn.Module | None,
        distances: bool,
    ) -> None:
        super().__init__()
        self.mask, self.distances = mask, distances
        self.rotary: Rotary | Rotary2D | None = rotary
        self.bias: nn.Module | None = bias

    def view(self, q: Positions, k: Positions, dtype: torch.dtype) -> View:
        """All that these layers need to know about the call."""
        view = View.of(self.mask, q, k)
        bias = None
        if self.bias is not None:
            bias = merge(view.booleans(), self.bias(view).to(dtype))
        return replace(
            view,
            bias=bias,
            rotary=None if self.rotary is None else self.rotary.tables(q, dtype),
            distance=q.distance(k) if self.distances else None,
        )


class Stack(nn.Module):
    """Blocks on one residual stream."""

    blocks: Any  # nn.ModuleList of Block
    kinds: Any  # nn.ModuleList of Kind
    step: Callable[[Tensor, Positions, Cache, Memory | None], Tensor | None] | None = None
    """A decoding step of all blocks in one call, in the run-time form; None: not this one."""
    read: Callable[[Tensor, Positions], Tensor | None] | None = None
    """The same for whole sequences that nobody remembers."""

    def __init__(self, blocks: list[Block], kinds: list[Kind], norm: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.kinds = nn.ModuleList(kinds)
        self.norm = norm

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        at: Positions,
        cache: Cache | None = None,
        memory: Memory | None = None,
    ) -> Float[Tensor, "b t m"]:
        if self.step is not None and cache is not None:
            done = self.step(x, at, cache, memory)
            if done is not None:
                return done
        if self.read is not None and cache is None and memory is None:
            done = self.read(x, at)
            if done is not None:
                return done
        for block, look in zip(self.blocks, self.looks(x, at, cache, memory), strict=True):
            x = block(x, look)
        return x if self.norm is None else self.norm(x)

    def looks(
        self, x: Tensor, at: Positions, cache: Cache | None, memory: Memory | None
    ) -> list[Look]:
        """For every block what it sees; views are made once for each kind."""
        if cache is not None:
            require(
                x.shape[0] == cache.rows,
                f"The cache was made for {cache.rows} rows, and the call has {x.shape[0]}.",
            )
        keys = [at] * len(self.kinds) if cache is None else cache.begin(at)
        views = [kind.view(at, k, x.dtype) for kind, k in zip(self.kinds, keys, strict=True)]
        across = None if memory is None else View.across(memory.at)
        looks = []
        for i in range(len(self.blocks)):
            looks.append(
                Look(
                    views[i % len(views)],
                    None if cache is None else cache.states[i],
                    None if memory is None else memory.x,
                    across,
                    cache.cross[i] if cache is not None and cache.cross else None,
                )
            )
        return looks

    def new_cache(
        self, rows: int, max_len: int, memory: Memory | None = None, slack: int = 0, **place: Any
    ) -> Cache:
        """An empty cache for so many rows.

        Layers with a window get a ring of it and `slack` positions to go back.
        """
        require(rows >= 1, f"A cache is for 1 row or more, not {rows}.")
        require(max_len >= 1, f"A cache is for 1 position or more: max_len is {max_len}.")
        require(slack >= 0, f"slack is {slack}: how many positions a ring can go back, 0 or more.")
        kinds = []
        for kind in self.kinds:
            reach = kind.mask.reach if kind.mask.causal else None
            if reach is None or reach + slack >= max_len:
                kinds.append(Slots(rows, max_len, None, place.get("device")))
            else:
                kinds.append(Slots(rows, reach + slack, reach, place.get("device")))
        states = []
        for i, block in enumerate(self.blocks):
            attn = block.self_attn
            states.append(KV(kinds[i % len(kinds)], attn.n_kv_heads, attn.head_dim, **place))
        cross = [CrossKV() for _ in self.blocks] if memory is not None else []
        return Cache(rows, kinds, states, cross, memory)


@dataclass(frozen=True)
class StackConfig(Spec, kind="stack"):
    """All that a stack is made from."""

    n_layers: int
    """How many blocks."""
    attention: tuple[AttentionConfig, ...]
    """Self-attention, one spec a layer, cycled: local and global layers may alternate."""
    ffn: FFNConfig
    """The feed-forward sublayer."""
    norm: NormConfig = LayerNormConfig()
    """The normalisation."""
    placement: Placement = "pre"
    """Where the norm stands in a residual."""
    topology: Topology = "sequence"
    """Sublayers one after the other, or all on the entering stream."""
    cross: AttentionConfig | None = None
    """Cross-attention to a source, if there is one."""
    final_norm: bool = True
    """Whether the stream is normalised at the end (pre-norm stacks need it)."""
    dropout: float = 0.0
    """Probability that a number written by a sublayer is dropped in training."""

    def __post_init__(self) -> None:
        require(self.n_layers >= 1, f"n_layers must be 1 or more, not {self.n_layers}.")
        require(len(self.attention) >= 1, "A stack needs at least one attention spec.")
        specs = (*self.attention, *([self.cross] if self.cross else []))
        widths = {a.geometry.d_model for a in specs}
        require(
            len(widths) == 1,
            f"All layers share one residual stream, but d_model differs: {widths}.",
        )
        for rate in (self.dropout, *(a.dropout for a in specs)):
            require(0 <= rate < 1, f"dropout must be in [0, 1), not {rate}.")
        require(
            self.topology == "sequence" or self.placement != "post",
            "A parallel block has no post-norm form (there is no one sum to normalise): "
            'use placement="pre".',
        )

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.attention[0].geometry.d_model


def build_stack(config: StackConfig) -> Stack:
    """The stack, or a sentence that says what its parts cannot do."""
    for attention in config.attention:
        _check(attention, cross=False)
    if config.cross is not None:
        _check(config.cross, cross=True)
    kinds = [_build_kind(attention) for attention in config.attention]

    def residual() -> Residual:
        return RESIDUALS[config.placement](config.norm, config.d_model, config.dropout)

    blocks = []
    for i in range(config.n_layers):
        n = i % len(kinds)
        block = Block if config.topology == "sequence" else ParallelBlock
        blocks.append(
            block(
                config.attention[n].build(kinds[n].rotary),
                config.ffn.build(config.d_model),
                config.cross.build() if config.cross else None,
                residual,
            )
        )
    norm = config.norm.build(config.d_model) if config.final_norm else None
    return Stack(blocks, kinds, norm)


def _build_kind(config: AttentionConfig) -> Kind:
    position, g = config.position, config.geometry
    if position is None:
        return Kind(config.mask, None, None, distances=False)
    relative = position.relative(g, 1.0) is not None
    return Kind(config.mask, position.rotary(g), position.bias(g, config.mask.causal), relative)


def _check(config: AttentionConfig, cross: bool) -> None:
    """Refuse what the kernel or the position cannot do, before anything is built."""
    can, name = config.kernel.can, config.kernel.kind
    asked = {
        "causal": config.mask.causal,
        "window": config.mask.reach is not None,
        "cross": cross,
        "bias": config.position is not None and not config.position.rotates,
        "grouped": config.geometry.n_kv_heads not in (None, config.geometry.n_heads),
    }
    for ability, wanted in asked.items():
        require(
            not wanted or ability in can,
            f'The "{name}" kernel cannot do {_ABILITIES[ability]}: choose another kernel, or '
            "change the stack.",
        )
    require(
        not cross or config.position is None,
        f'The position "{config.position.kind if config.position else ""}" means nothing between '
        "two sequences: cross-attention takes none.",
    )
    require(
        not cross or config.mask == All(),
        f'Cross-attention sees the whole source, so the mask "{config.mask.kind}" has no place '
        "there: leave it out.",
    )


_ABILITIES = {
    "causal": "causal attention",
    "window": "a window",
    "cross": "cross-attention",
    "bias": "a bias on the scores (ALiBi, T5, Shaw, Transformer-XL)",
    "grouped": "grouped heads",
}
