"""Softmax attention of short sequences in training, on a CPU: the weights are written down.

    pattern = softmax(q k^T * scale), out = pattern v

PyTorch's fused kernel computes the weights again in its backward pass, in blocks that are larger
than a sentence. Where they are few and padding must be masked, it takes less time to keep them (a
tenth of a translation model's step); with its own causal mask the fused kernel is the quicker one.
The slow twin is `softmax.Kernel.forward`, of which autograd remembers more steps than are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.attention.view import merge

SHORT = 128  # keys; from about twice as many on the fused kernel is as quick

Heads = Float[Tensor, "b h q d"]
Keys = Float[Tensor, "b h k d"]


def suits(q: Tensor, k: Tensor) -> bool:
    """Whether such heads are worked on here: there is something to learn, on a CPU, in fp32, by
    plain autograd; compilers and torch.func have ways of their own.
    """
    return (
        torch.is_grad_enabled()
        and q.requires_grad
        and k.shape[2] <= SHORT
        and q.shape[1] == k.shape[1]
        and q.is_cpu
        and q.dtype == k.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def attend_short(
    q: Heads, k: Keys, v: Keys, allowed: Bool[Tensor, "#b #q k"] | None, scale: float
) -> Heads:
    """The output; a row with nothing to attend to gives zeros."""
    return _Short.apply(q, k, v, allowed, scale)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float
    ) -> Tensor:
        q = q * scale
        scores = q @ k.transpose(2, 3)
        if allowed is None:
            pattern = scores.softmax(dim=-1)
        else:
            pattern = merge(allowed, scores).softmax(dim=-1)  # type: ignore[union-attr]
            pattern = pattern.masked_fill_(~allowed.unsqueeze(1), 0.0)
        ctx.save_for_backward(q, k, v, pattern)
        ctx.scale = scale
        return pattern @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,) = grads
        q, k, v, pattern = ctx.saved_tensors
        grad_v = pattern.transpose(2, 3) @ grad
        grad_pattern = grad @ v.transpose(2, 3)
        grad_scores = torch._softmax_backward_data(grad_pattern, pattern, -1, pattern.dtype)
        return (
            (grad_scores @ k).mul_(ctx.scale),
            grad_scores.transpose(2, 3) @ q,
            grad_v,
            None,
            None,
        )
