"""Softmax attention kernels: pattern = softmax(q k^T * scale + bias), out = pattern v.

Vaswani et al. 2017, section 3.2.1. The scale 1/sqrt(d) returns the variance of scores of
unit-variance q and k to 1. A kernel takes (q, k, v) and a view, and knows nothing of projections.
`Softmax.forward` is the fused twin of `attend`; what a tap or a test wants to see is computed by
`pattern`, beside it.

    grouped heads: 4 query heads on 2 key/value heads      q0 q1 q2 q3
                                                            \\ /   \\ /
                                                            kv0   kv1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.attention.dropout import draws_here, drop
from clearhead.attention.view import View, merge
from clearhead.config import Spec
from clearhead.errors import require

Heads = Float[Tensor, "b h q d"]
Keys = Float[Tensor, "b g k d"]
Pattern = Float[Tensor, "b h q k"]


def scores(q: Heads, k: Keys, scale: float) -> Pattern:
    """q k^T * scale, grouped heads included."""
    return (q * scale) @ each_head(k, q.shape[1]).transpose(2, 3)


def softmax(scores: Pattern, view: View, bias: Pattern | None = None) -> Pattern:
    """Rows that sum to 1 over what may be attended to.

    A row with nothing to attend to is all zeros.
    """
    allowed = view.booleans()
    for extra in (bias, view.bias):
        scores = scores if extra is None else scores + extra.to(scores.dtype)
    if allowed is None:
        return scores.softmax(dim=-1)
    pattern = merge(allowed, scores).softmax(dim=-1)  # type: ignore[union-attr]
    # softmax of nothing but -inf is 0/0: where nothing is allowed the weights are 0, and so are
    # their gradients.
    return pattern.masked_fill(~allowed.unsqueeze(1), 0.0)


def attend(pattern: Pattern, v: Keys) -> Heads:
    """The weighted sum of the values."""
    return pattern @ each_head(v, pattern.shape[1])


class Kernel(nn.Module):
    """(q, k, v) -> out under a view; `pattern` draws the weights for those who want to see them."""

    def __init__(self, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout

    def pattern(self, q: Heads, k: Keys, view: View, bias: Pattern | None = None) -> Pattern:
        """The attention weights, without dropout."""
        return softmax(scores(q, k, self.scale), view, bias)

    def attend(self, pattern: Pattern, v: Keys) -> Heads:
        """The weighted sum under given weights, with dropout on them."""
        return attend(drop(pattern, self.dropout) if self.training else pattern, v)

    def forward(self, q: Heads, k: Keys, v: Keys, view: View, bias: Pattern | None = None) -> Heads:
        """[b, h, q, d]: the slow twin, which writes the pattern down."""
        return self.attend(self.pattern(q, k, view, bias), v)


class Softmax(Kernel):
    """Full attention through PyTorch's fused kernel, which never writes the pattern down."""

    can = frozenset({"causal", "window", "bias", "cross", "grouped"})

    def forward(self, q: Heads, k: Keys, v: Keys, view: View, bias: Pattern | None = None) -> Heads:
        """[b, h, q, d], the same as `attend(pattern(...), v)`."""
        if self.training and self.dropout and draws_here(q):
            # With dropout PyTorch writes the pattern down too on a CPU, and draws slowly.
            return super().forward(q, k, v, view, bias)
        causal = view.plain == "causal" and bias is None and view.bias is None
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if causal else self._mask(q, view, bias),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _mask(self, q: Heads, view: View, bias: Pattern | None) -> Tensor | None:
        """What the fused kernel is told: booleans, or a float bias with the mask inside."""
        if bias is not None:
            bias = bias if view.bias is None else bias + view.bias
            return merge(view.booleans(), bias.to(q.dtype))
        if view.bias is not None:
            return view.bias.to(q.dtype)
        return None if view.allowed is None else view.allowed.unsqueeze(1)


class TopK(Kernel):
    """Softmax over the k best scores of every query alone.

    A soft dictionary that answers with few entries.
    """

    can = Softmax.can

    def __init__(self, scale: float, dropout: float = 0.0, k: int = 8) -> None:
        super().__init__(scale, dropout)
        require(k >= 1, f"Top-k attention keeps at least one score: k is {k}.")
        self.k = k

    def pattern(self, q: Heads, k: Keys, view: View, bias: Pattern | None = None) -> Pattern:
        """The attention weights, without dropout. Ties with the k-th best stay in."""
        full = softmax(
            scores(q, k, self.scale), view, bias
        )  # softmax keeps the order of the scores
        if self.k >= full.shape[-1]:
            return full
        least = full.topk(self.k, dim=-1).values[..., -1:]
        kept = full.masked_fill(full < least, 0.0)
        return kept / kept.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)


class KernelConfig(Spec):
    """How (q, k, v) become the output; `can` says what a stack may ask of it."""

    can: ClassVar[frozenset[str]] = Softmax.can

    def build(self, scale: float, dropout: float) -> Kernel:
        """The kernel."""
        return Softmax(scale, dropout)


@dataclass(frozen=True)
class SoftmaxConfig(KernelConfig, kind="softmax"):
    """Full softmax attention."""

    temperature: float = 1.0
    """Divides the scores: towards 0 the hard look-up of the best key, above 1 a flatter pattern."""

    def __post_init__(self) -> None:
        require(
            self.temperature > 0,
            f"The temperature of attention is {self.temperature}, and must be above 0.",
        )

    def build(self, scale: float, dropout: float) -> Kernel:
        return Softmax(scale / self.temperature, dropout)


@dataclass(frozen=True)
class TopKConfig(KernelConfig, kind="top_k"):
    """Softmax over the best scores alone."""

    k: int = 8
    """How many keys a query may take from."""

    def __post_init__(self) -> None:
        require(self.k >= 1, f"Top-k attention keeps at least one score: k is {self.k}.")

    def build(self, scale: float, dropout: float) -> Kernel:
        return TopK(scale, dropout, self.k)


def each_head(x: Keys, n_heads: int) -> Tensor:
    """Key/value heads repeated so that every query head has one."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)
