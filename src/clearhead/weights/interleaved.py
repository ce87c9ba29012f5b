"""A rule for key tables: rotary pairs that stand side by side in somebody else's weights.

Meta's Llama code, llama2.c and GGUF's "llama" turn the numbers 2i and 2i + 1 of a head together;
here, as in Hugging Face, it is i and i + d/2. So the rows of the query and key projections of each
head are in another order:

    theirs   a0 b0 a1 b1 a2 b2          ours   a0 a1 a2 b0 b1 b2

The other rules live in models/keys.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from clearhead.models.keys import Rule


@dataclass(frozen=True)
class Interleaved(Rule):
    """A query or key projection (weight or bias) with each head's rows in pairs."""

    name: str
    """Our name."""
    n_heads: int
    """How many heads its rows are."""

    @property
    def ours(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def to_ours(self, tensor: Tensor) -> list[Tensor]:
        return [self._reordered(tensor, (self.n_heads, -1, 2))]

    def to_theirs(self, tensors: list[Tensor]) -> Tensor:
        return self._reordered(tensors[0], (self.n_heads, 2, -1))

    def _reordered(self, tensor: Tensor, split: tuple[int, int, int]) -> Tensor:
        if tensor.shape[0] % (2 * self.n_heads):
            return tensor  # of a wrong shape, which `fill` reports with all the others
        return tensor.unflatten(0, split).transpose(1, 2).flatten(0, 2).contiguous()
