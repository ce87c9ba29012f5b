"""RMSNorm: x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019).

While a model learns on a CPU PyTorch makes it and its gradient of a dozen passes over the numbers.
Here they are five, twice as fast: with r = 1 / sqrt(mean(x^2) + eps), g the gradient that comes in
and n the width,

    y = x r w      dx = g w r - x r^3 sum(g w x) / n      dw = sum over rows of g x r

Everywhere else, and at rest, it is PyTorch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Learning(torch.autograd.Function):
    """The norm with a gradient in few passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, r = ctx.saved_tensors
        n = x.shape[-1]
        products = (grad * x).reshape(-1, n)
        along = (products @ weight).view(r.shape).mul_(r.pow(3)).div_(-n)
        dx = (grad * weight).mul_(r).addcmul_(x, along)
        return dx, products.T @ r.reshape(-1), None


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, which learns faster on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and x.requires_grad
        quick = learns and x.device.type == "cpu" and x.dtype == torch.float32
        whole = self.weight is not None and self.eps is not None
        if not quick or not whole or torch.compiler.is_compiling():
            return super().forward(x)
        return _Learning.apply(x, self.weight, self.eps)
