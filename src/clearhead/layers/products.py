"""The products of a training step through oneDNN, where it is quicker than what PyTorch takes.

    y = x W^T + b,   dx = dy W,   dW = dy^T x,   db = sum of dy

PyTorch hands fp32 products on x86 to MKL, which has its AVX-512 code for Intel's processors alone:
on others it multiplies with half of their width. oneDNN, which is in every such PyTorch as well,
asks for the instructions and not for the maker. `clearhead doctor` measures both.

dW is the gradient of the weights of a 1x1 convolution (position-wise means just that): oneDNN has
it for x and dy as they lie, where its product would first have to turn one of them over.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST = 2**14  # weights of a layer; with fewer the call takes longer than the product
NONE: tuple[str, list[Any], str] = ("none", [], "")  # nothing is done behind the product


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of rows x; the weight may lie either way."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, *NONE)


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, bias: bool) -> tuple[Tensor, Any]:
    """dy^T x, and the sum of dy if there is a bias: [rows, out], [rows, in] -> [out, in], [out]."""
    found, sums = torch.ops.aten.convolution_backward(
        *(_picture(dy), _picture(x), weight[:, :, None, None], [len(weight)] if bias else None),
        *([1, 1], [0, 0], [1, 1], False, [0, 0], 1),  # stride, padding, dilation, ..., groups
        [False, True, bias],
    )[1:]
    return found[:, :, 0, 0], sums


def _picture(x: Tensor) -> Tensor:
    """Rows as the pixels of one picture, where they lie."""
    return x[None, :, None].permute(0, 3, 1, 2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = product(rows, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            flat = x.reshape(-1, x.shape[-1])
            dw, db = weight_gradient(rows, flat, weight, ctx.bias)
        elif ctx.bias and ctx.needs_input_grad[2]:
            db = rows.sum(0)
        return dx, dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, which is its slow twin."""
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel()
    return _Linear.apply(x, weight, bias) if plain else F.linear(x, weight, bias)


def use_onednn(net: nn.Module) -> None:
    """Let all larger plain layers of a network multiply so; they stay what and where they are."""
    for layer in _large(net):
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def any_large(net: nn.Module) -> bool:
    """Whether there is a layer for which it matters."""
    return next(_large(net), None) is not None


def _large(net: nn.Module) -> Iterator[nn.Linear]:
    for module in net.modules():
        if type(module) is nn.Linear and module.weight.numel() >= LEAST:
            yield module


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
