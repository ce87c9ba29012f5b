"""A view: all that the layers of a kind need to know about one call, computed once.

Reading positions in every layer costs a fifth of a decoding step; made once a call it costs little,
and from facts nothing. A view is made eagerly, before the first block: a lazy one inside a
checkpointed block would be computed twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.attention.mask import All, Mask, Plain
from clearhead.attention.positions import Positions


@dataclass(frozen=True, eq=False)
class View:
    """What the queries of one call may see, and from where."""

    q: Positions
    """Where the queries stand."""
    k: Positions
    """Where the keys stand: those of this call, or all that the cache holds with them."""
    mask: Mask
    """The formula that `allowed` was made from."""
    plain: Plain
    """What the facts say: "all", "causal", or None where it takes a tensor."""
    allowed: Bool[Tensor, "b q k"] | None
    """True = may attend; None if `plain` says it all."""
    bias: Float[Tensor, "b h q k"] | None = None
    """Added to the scores in every layer of this kind, -inf where attention is forbidden."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines at the query positions, [b, 1, t, d]."""
    distance: Int[Tensor, "b q k"] | None = None
    """query position - key position, where a layer of this kind asks for it."""

    @staticmethod
    def of(mask: Mask | None, q: Positions, k: Positions | None = None) -> View:
        """The view of one mask, without biases and rotations."""
        mask = mask or All()
        k = q if k is None else k
        plain = mask.plain(q, k)
        return View(q, k, mask, plain, None if plain else mask.allowed(q, k))

    @staticmethod
    def across(k: Positions) -> View:
        """The view of a source from another sequence.

        Everything in it is seen, whoever asks, however many ask.
        """
        allowed = k.filled().unsqueeze(1) if k.holes else None  # [b, 1, k]
        return View(k, k, All(), None if k.holes else "all", allowed)

    def distances(self) -> Int[Tensor, "b q k"]:
        """query position - key position, computed already where the stack knew of the need."""
        return self.q.distance(self.k) if self.distance is None else self.distance

    def booleans(self) -> Bool[Tensor, "b q k"] | None:
        """The mask as a tensor even where the fused kernel needs none.

        None if nothing is forbidden.
        """
        if self.plain == "causal":
            return self.mask.allowed(self.q, self.k)
        return self.allowed


def merge(
    allowed: Bool[Tensor, "#b #q k"] | None, bias: Float[Tensor, "#b h q k"] | None
) -> Float[Tensor, "_ h q k"] | None:
    """The bias with -inf where attention is forbidden.

    The only place in this library that makes -inf.
    """
    if bias is None or allowed is None:
        return bias
    return bias.masked_fill(~allowed.unsqueeze(1), -math.inf)
