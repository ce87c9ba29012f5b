"""The products of a training step in compiled code, where that is quicker than what PyTorch takes.

    y = x W^T + b    as in the run-time form (`panels`)
    dx = dy W,  dW = dy^T x    sums of lines (`lines`)

PyTorch hands fp32 products on x86 to MKL, which has its AVX-512 code for Intel's processors alone:
on others it multiplies with half of their width. The slow twin is `F.linear`; `clearhead doctor`
measures both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clearhead.attention.softmax import Softmax
from clearhead.fast import compile as compiled
from clearhead.fast.attending import attend
from clearhead.fast.formats import GROUP

LEAST = 2**14  # weights of a layer; with fewer the call takes longer than the product
STRIP = 4  # rows of W, at least
FEW = 2**18  # multiplications that one thread does sooner than two agree about them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, in compiled code where it can be."""
    return _Linear.apply(x, weight, bias) if _fit(x, weight, bias) else F.linear(x, weight, bias)


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether all of it is as compiled code, which is given addresses alone, takes it for."""
    n, k = weight.shape
    own = (weight,) if bias is None else (weight, bias)
    return (
        all(t.dtype == torch.float32 and t.is_cpu for t in (x, *own))
        and all(t.is_contiguous() for t in own)
        and (bias is None or bias.shape == (n,))
        and x.shape[-1] == k
        and k % GROUP == 0
        and n >= STRIP
        and x.numel() > 0
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(flat, weight)
        ctx.bias = bias is not None
        # In its last shape: what a function returns must be no view of something of its own.
        return product(flat, weight, bias, x.new_empty(*x.shape[:-1], len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1]).contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = lines(flat, weight, dy.new_empty(*dy.shape[:-1], weight.shape[1]))
        if ctx.needs_input_grad[1]:
            dw = lines(flat.t(), x)
        if ctx.bias and ctx.needs_input_grad[2]:
            db = flat.sum(0)
        return dx, dw, db


def product(
    x: Float[Tensor, "m k"],
    weight: Float[Tensor, "n k"],
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x W^T + b [m, n], of tensors that lie in rows; `out` has room for it, in any shape."""
    (m, k), n = x.shape, len(weight)
    out = x.new_empty(m, n) if out is None else out
    zeros = x.new_zeros(n) if bias is None else bias
    ends = zeros.data_ptr(), out.data_ptr(), m, n, k, _threads(m * n * k), 0
    compiled.product("fp32").run(x.data_ptr(), weight.data_ptr(), 0, *ends)
    return out


def fit_lines(b: Tensor) -> bool:
    """Whether `lines` and `product` take matrices of this kind."""
    return b.dtype == torch.float32 and b.is_cpu and all(n % GROUP == 0 for n in b.shape)


def lines(a: Float[Tensor, "n d"], b: Float[Tensor, "d k"], out: Tensor | None = None) -> Tensor:
    """a b [n, k], where b lies in rows of whole vectors, and `a` in any way; `out` as above."""
    (n, depth), k = a.shape, b.shape[1]
    out = b.new_empty(n, k) if out is None else out
    ends = out.data_ptr(), depth, n, k, _threads(n * depth * k), 0
    steps = 4 * a.stride(0), 4 * a.stride(1)
    compiled.learning()["lines"](a.data_ptr(), b.data_ptr(), *steps, *ends)
    return out


def _threads(multiplications: int) -> int:
    return 1 if multiplications < FEW else compiled.threads()


def use_compiled(net: nn.Module) -> None:
    """Let all larger plain layers of a network multiply so, and its attention; they stay what and
    where they are.
    """
    for layer in _large(net):
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    for kernel in net.modules():
        if type(kernel) is Softmax:
            kernel.forward = partial(attend, kernel)  # type: ignore[method-assign]


def drop_compiled(net: nn.Module) -> None:
    """Let all layers multiply as they came."""
    for module in net.modules():
        own = vars(module).get("forward")
        if isinstance(own, partial) and own.func in (_forward, attend):
            del module.forward


def any_large(net: nn.Module) -> bool:
    """Whether there is a layer for which it matters."""
    return next(_large(net), None) is not None


def _large(net: nn.Module) -> Iterator[nn.Linear]:
    for module in net.modules():
        if type(module) is nn.Linear and module.weight.numel() >= LEAST:
            yield module


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
