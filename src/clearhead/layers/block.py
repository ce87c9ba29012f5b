"""Blocks: residual branches around sublayers, on one residual stream.

    pre        x + f(norm(x))                     post       norm(x + f(x))
    sandwich   x + norm(f(norm(x)))               parallel   x + attention(norm(x)) + ffn(norm(x))

       x ----+-----------------------(+)----+----------------(+)---> x
             +-> norm -> attention ---^     +-> norm -> ffn --^           (pre, in sequence)

`Block` does not know which placement it holds: a residual is an object. Post: Vaswani et al. 2017;
pre: Xiong et al. 2020; sandwich: Ding et al. 2021; parallel: GPT-J, GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.attention import Attention
from clearhead.attention.cache import CrossKV, State
from clearhead.attention.dropout import Dropout
from clearhead.attention.view import View
from clearhead.errors import require
from clearhead.layers.norm import NormConfig
from clearhead.tap import Tap

Stream = Float[Tensor, "b t m"]
Sublayer = Callable[[Tensor], Tensor]
Placement = Literal["pre", "post", "sandwich"]


class Residual(nn.Module):
    """A branch around a sublayer; where the norm stands is what the subclasses differ in."""

    def __init__(self, norm: NormConfig, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = norm.build(width)
        self.dropout = Dropout(dropout)
        self.branch = Tap()

    def delta(self, x: Stream, f: Sublayer) -> Stream:
        """What the sublayer writes into the stream."""
        return self.branch(self.dropout(f(self.norm(x))))

    def forward(self, x: Stream, f: Sublayer) -> Stream:
        return x + self.delta(x, f)


class PreNorm(Residual):
    """x + f(norm(x)): the stream itself is never normalised."""


class PostNorm(Residual):
    """norm(x + f(x)): every sublayer leaves a normalised stream."""

    def delta(self, x: Stream, f: Sublayer) -> Stream:
        """What the sublayer writes into the stream, before the norm over both."""
        return self.branch(self.dropout(f(x)))

    def forward(self, x: Stream, f: Sublayer) -> Stream:
        return self.norm(x + self.delta(x, f))


class SandwichNorm(Residual):
    """x + norm(f(norm(x))): what is written is normalised too."""

    def __init__(self, norm: NormConfig, width: int, dropout: float) -> None:
        super().__init__(norm, width, dropout)
        self.norm_out = norm.build(width)

    def delta(self, x: Stream, f: Sublayer) -> Stream:
        """What the sublayer writes into the stream."""
        return self.branch(self.dropout(self.norm_out(f(self.norm(x)))))


RESIDUALS: dict[str, type[Residual]] = {
    "pre": PreNorm,
    "post": PostNorm,
    "sandwich": SandwichNorm,
}


@dataclass(frozen=True, eq=False)
class Look:
    """What one block sees in one call."""

    view: View
    """What self-attention may see."""
    state: State | None = None
    """What self-attention remembers."""
    source: Float[Tensor, "s k m"] | None = None
    """The encoder's states, for cross-attention."""
    source_view: View | None = None
    """What cross-attention may see."""
    source_state: CrossKV | None = None
    """The source's keys and values, once they are projected."""


class Block(nn.Module):
    """Self-attention, cross-attention where there is a source, feed-forward, in sequence.

    Each stands in its residual.
    """

    def __init__(
        self,
        self_attn: Attention,
        ffn: nn.Module,
        cross_attn: Attention | None,
        residual: Callable[[], Residual],
    ) -> None:
        super().__init__()
        self.enter, self.leave = Tap(), Tap()
        self.self_attn, self.self_residual = self_attn, residual()
        self.cross_attn = cross_attn
        self.cross_residual = residual() if cross_attn is not None else None
        self.ffn, self.ffn_residual = ffn, residual()

    def branches(self, look: Look) -> list[tuple[Residual, Sublayer]]:
        """Each residual with the sublayer it goes around, in order."""
        pairs: list[tuple[Residual, Sublayer]] = [
            (self.self_residual, lambda x: self.self_attn(x, look.view, look.state))
        ]
        if self.cross_attn is not None and self.cross_residual is not None:
            require(
                look.source is not None,
                "This decoder looks at a source in every block: give it what encode returned, "
                "decode(target, memory).",
            )
            cross = self.cross_attn
            pairs.append(
                (
                    self.cross_residual,
                    lambda x: cross(x, look.source_view, look.source_state, look.source),
                )
            )
        return [*pairs, (self.ffn_residual, self.ffn)]

    def forward(self, x: Stream, look: Look) -> Stream:
        x = self.enter(x)
        for residual, sublayer in self.branches(look):
            x = residual(x, sublayer)
        return self.leave(x)


class ParallelBlock(Block):
    """The same sublayers, all reading the stream as it enters."""

    def forward(self, x: Stream, look: Look) -> Stream:
        x = self.enter(x)
        # What they write is summed before it meets the stream, so that the rounding is that of the
        # references.
        written = sum(residual.delta(x, sublayer) for residual, sublayer in self.branches(look))
        return self.leave(x + written)
