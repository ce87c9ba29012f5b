"""Relative positions whose bias depends on the content of the query: Shaw's and Transformer-XL's.

A layer owns these, because they read its queries. The result is added to the scores as a bias.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.softmax import each_head
from clearhead.attention.view import View


class Shaw(nn.Module):
    """A learned vector for each clipped distance: bias = scale * q . a(distance).

    Shaw et al. 2018, section 3.2. Differs from the paper: no vectors on the values (their section
    4.3 finds no gain from them, and without them the fused kernels still apply).
    """

    def __init__(self, head_dim: int, max_distance: int, scale: float) -> None:
        super().__init__()
        self.max_distance, self.scale = max_distance, scale
        self.table = nn.Embedding(2 * max_distance + 1, head_dim)

    def forward(
        self, q: Float[Tensor, "b h q d"], k: Float[Tensor, "b g k d"], view: View
    ) -> Float[Tensor, "b h q k"]:
        by_distance = q @ self.table.weight.T * self.scale  # [b, h, q, distances]
        index = view.distances().clamp(-self.max_distance, self.max_distance) + self.max_distance
        return _pick(by_distance, index)


class TransformerXL(nn.Module):
    """Sinusoids of the distance, projected, and two learned vectors.

    These stand in the place of the query's own position.

    score = scale * ((q + u) . k + (q + v) . W_R sinusoid(distance)); the kernel adds q . k itself.
    Dai et al. 2019, section 3.3.
    """

    def __init__(self, d_model: int, n_heads: int, head_dim: int, scale: float) -> None:
        super().__init__()
        self.n_heads, self.head_dim, self.scale = n_heads, head_dim, scale
        self.d_model = d_model
        self.r_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.u = nn.Parameter(torch.zeros(n_heads, head_dim))
        self.v = nn.Parameter(torch.zeros(n_heads, head_dim))

    def forward(
        self, q: Float[Tensor, "b h q d"], k: Float[Tensor, "b g k d"], view: View
    ) -> Float[Tensor, "b h q k"]:
        # Every distance between filled slots; empty ones are forbidden anyway, so theirs may be any
        # of these.
        lowest, highest = view.q.lo - view.k.hi, view.q.hi - view.k.lo
        distances = torch.arange(lowest, max(highest, lowest) + 1, device=q.device)
        r = self.r_proj(_sinusoid(distances, self.d_model).to(q.dtype))
        r = r.view(-1, self.n_heads, self.head_dim).transpose(0, 1)  # [h, distances, d]
        by_distance = (q + self.v.unsqueeze(1)) @ r.transpose(1, 2)  # [b, h, q, distances]
        by_key = self.u.unsqueeze(1) @ each_head(k, self.n_heads).transpose(2, 3)  # [b, h, 1, k]
        index = (view.distances() - lowest).clamp(0, distances.shape[0] - 1)
        return self.scale * (_pick(by_distance, index) + by_key)


def _sinusoid(p: Tensor, width: int) -> Tensor:
    """sin | cos of each distance, [n, width]."""
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2, device=p.device).float() / width)
    angles = p.float().unsqueeze(1) * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :width]


def _pick(by_distance: Float[Tensor, "b h q n"], index: Tensor) -> Float[Tensor, "b h q k"]:
    """For every (query, key) the number of its distance."""
    b, h = by_distance.shape[:2]
    return by_distance.gather(3, index.unsqueeze(1).expand(b, h, -1, -1))
