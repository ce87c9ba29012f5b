"""Positions that enter as a bias on the scores: ALiBi and T5's buckets.

The bias is the same whatever the query's content.

    scores = q k^T * scale + bias(query position - key position)

The stack owns the bias and computes it once a call for all its layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.view import View
from clearhead.errors import require


class ALiBi(nn.Module):
    """A penalty that grows with the distance, its slope a power of two for each head.

    bias = -slope(h) * |distance|. Press et al. 2022, section 3.
    """

    slopes: Tensor

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.register_buffer("slopes", torch.empty(n_heads), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Compute the slopes (again: a model that was made on the meta device has none)."""
        self.slopes = torch.tensor(alibi_slopes(self.n_heads), device=self.slopes.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moved like any module, but never cast: half precision would round the slopes."""
        super()._apply(fn, recurse)
        if self.slopes.dtype != torch.float32 and not self.slopes.is_meta:
            self.slopes = self.slopes.float()
            self.reset()
        return self

    def forward(self, view: View) -> Float[Tensor, "b h q k"]:
        distance = view.q.distance(view.k).abs()
        return -self.slopes.view(1, -1, 1, 1) * distance.unsqueeze(1)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ..., one for each head.

    Where n is no power of two, the next ones are taken from twice as many heads.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    between = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + between[: n_heads - power]


class T5Buckets(nn.Module):
    """One learned number for each head and each bucket of distances.

    Buckets are exact when near, logarithmic when far.

    Raffel et al. 2020, section 2.1.
    """

    def __init__(
        self, n_heads: int, buckets: int = 32, max_distance: int = 128, causal: bool = False
    ) -> None:
        super().__init__()
        require(buckets >= 4, f"T5 position buckets: {buckets} is too few, 4 at least.")
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.table = nn.Embedding(buckets, n_heads)

    def forward(self, view: View) -> Float[Tensor, "b h q k"]:
        return self.table(self.bucket(view.q.distance(view.k))).permute(0, 3, 1, 2)

    def bucket(self, distance: Int[Tensor, "b q k"]) -> Int[Tensor, "b q k"]:
        """The bucket of each distance (query - key); a decoder spends none on the future."""
        n = self.buckets if self.causal else self.buckets // 2
        back = distance.clamp(min=0) if self.causal else distance.abs()
        exact = n // 2
        # fp32, and in this order of operations: another rounding moves distances across bucket
        # borders.
        far = torch.log(back.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = exact + (far * (n - exact)).long()
        index = torch.where(back < exact, back, far.clamp(max=n - 1))
        return index if self.causal else index + (distance < 0) * n
