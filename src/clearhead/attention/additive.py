"""Additive attention, the one that recurrent networks had: score(s, h_j) = w . tanh(W1 s + W2 h_j).

Bahdanau et al. 2015, section 3.1. It works where queries and keys have different widths, and alone:
no heads, and the values are the keys themselves unless others are given.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.cache import CrossKV
from clearhead.attention.softmax import softmax
from clearhead.attention.view import View
from clearhead.tap import Tap


class AdditiveAttention(nn.Module):
    """Context vectors for queries [b, q, query_dim] over keys [b, k, key_dim]."""

    def __init__(self, query_dim: int, key_dim: int, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(query_dim, width, bias=False)
        self.k_proj = nn.Linear(key_dim, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.pattern = Tap()

    def forward(
        self,
        queries: Float[Tensor, "b q dq"],
        keys: Float[Tensor, "b k dk"],
        view: View,
        values: Float[Tensor, "b k dv"] | None = None,
        kept: CrossKV | None = None,
    ) -> Float[Tensor, "b q dv"]:
        """sum_j pattern_j value_j; `kept` remembers W2 h_j, which is the same at every step."""
        known = self.k_proj(keys) if kept is None or kept.k is None else kept.k
        if kept is not None:
            kept.k = known
        hidden = torch.tanh(self.q_proj(queries).unsqueeze(2) + known.unsqueeze(1))
        scores = self.score(hidden).squeeze(3).unsqueeze(1)  # [b, 1, q, k]
        pattern = self.pattern(softmax(scores, view)).squeeze(1)
        return pattern @ (keys if values is None else values)
