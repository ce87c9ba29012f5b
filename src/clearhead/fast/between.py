"""The run-time form of what is between the products, and of products that share their input.

Each does what its plain twin does, and is that twin wherever the compiled code has no place: other
types and devices, masks, many queries.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.attention.softmax import Heads, Keys, Pattern, Softmax
from clearhead.attention.view import View
from clearhead.fast import compile as compiled
from clearhead.fast.formats import WHOLE, scratch_bytes
from clearhead.fast.linear import SMALL, FastLinear
from clearhead.layers.ffn import ACTIVATIONS
from clearhead.tap import hooked

QUERIES = 8  # of a head; from there on torch's kernel is as quick
KEYS = 2**14  # each has a number on the stack
FEW = 2**14  # numbers that one thread has done before another one is there
LANES = 16  # a head's width is a multiple of the widest vector
COMPILED = ("gelu_tanh", "quick_gelu", "silu")


class FastSoftmax(Softmax):
    """Full attention of a few queries."""

    def __init__(self, like: Softmax) -> None:
        super().__init__(like.scale, like.dropout)
        self.train(like.training)

    def forward(self, q: Heads, k: Keys, v: Keys, view: View, bias: Pattern | None = None) -> Heads:
        """[b, h, q, d]."""
        rows, heads, queries, d = q.shape
        keys, steps, last = k.shape[2], q.stride(), k.stride()
        if (
            view.plain != "all"
            or queries > QUERIES
            or not 0 < keys <= KEYS
            or bias is not None
            or view.bias is not None
            or (self.training and self.dropout)
            or d % LANES
            or steps[3] != 1
            or last[3] != 1
            or k.shape[0] != rows
            or heads % k.shape[1]
            or k.shape[3] != d
            or (v.shape, v.stride()) != (k.shape, last)
            or not q.dtype == k.dtype == v.dtype == torch.float32
            or not (q.is_cpu and k.is_cpu and v.is_cpu)
            or _learning(q, k, v)
        ):
            return super().forward(q, k, v, view, bias)
        (scale,) = struct.unpack("<i", struct.pack("<f", self.scale))  # its bits
        seen = array("q", (keys,))
        own = seen.buffer_info()[0], 0, keys  # the same for all rows
        table = own_rows(rows)
        lies = table.buffer_info()[0], table.itemsize, 0
        told = (heads, heads // k.shape[1], d, *own, queries, *lies, *steps[:3], *last[:3], scale)
        facts = array("q", told)
        out = q.new_empty((rows, queries, heads, d))
        ends = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), facts.buffer_info()[0]
        count = rows * heads
        threads = 1 if count * queries * keys * d < SMALL else compiled.threads()
        compiled.steps()["attend"](*ends, 0, count, 0, threads, 0)
        return out.transpose(1, 2)


@functools.lru_cache(maxsize=64)
def own_rows(rows: int) -> array[int]:
    """A table for keys that lie in the rows they belong to."""
    return array("q", range(rows))


@dataclass(frozen=True)
class FastActivation:
    """One of `ACTIVATIONS`."""

    name: str
    """Which."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or not x.is_cpu or not x.is_contiguous() or _learning(x):
            return ACTIVATIONS[self.name](x)
        out, count = torch.empty_like(x), x.numel()
        threads = 1 if count < FEW else compiled.threads()
        run = compiled.steps()[self.name]
        run(x.data_ptr(), 0, 0, 0, out.data_ptr(), 0, count, 0, threads, 0)
        return out


def fast_activation(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The compiled form of an activation that has one, else itself."""
    for name in COMPILED:
        if activation is ACTIVATIONS[name]:
            return FastActivation(name)
    return activation


def name_of(activation: Callable[[Tensor], Tensor]) -> str | None:
    """What the compiled code calls an activation; None: it has none."""
    if isinstance(activation, FastActivation):
        return activation.name
    return next((name for name in ("gelu", "relu") if activation is ACTIVATIONS[name]), None)


class Joint:
    """Several linear layers that read the same x, in one call; those that it was made for, even if
    another one is put in the place of one of them.
    """

    def __init__(self, *linears: FastLinear) -> None:
        self.linears = linears
        self.widths = tuple(linear.out_features for linear in linears)
        self.first = linears[0]
        self._made: tuple[Any, array[int]] | None = None  # where the tensors are, and the table

    def __call__(self, x: Float[Tensor, "*b k"]) -> list[Tensor]:
        """The output of each."""
        first, k = self.first, self.first.in_features
        rows = x.numel() // k
        if (
            rows == 0
            or not all(linear.here and not hooked(linear) for linear in self.linears)
            or x.dtype != torch.float32
            or x.shape[-1] != k
            or not x.is_cpu
            or _learning(x)
        ):
            return [linear(x) for linear in self.linears]
        x = x.contiguous()
        total = sum(self.widths)
        out = x.new_empty(rows * total)
        threads = 1 if rows * total * k < SMALL else compiled.threads()
        scratch = None
        if first.form in WHOLE:
            scratch = x.new_empty(scratch_bytes(rows, k), dtype=torch.uint8)
        place = 0 if scratch is None else scratch.data_ptr()
        table = self.table()
        ends = x.data_ptr(), table.buffer_info()[0], len(self.linears), 0, out.data_ptr()
        compiled.product(first.form).several(*ends, rows, 0, k, threads, place)
        shape = x.shape[:-1]
        parts = out.split([rows * width for width in self.widths])
        return [part.view(*shape, n) for part, n in zip(parts, self.widths, strict=True)]

    def table(self) -> array[int]:
        """Where the product finds the tensors of each layer; to be kept while it is used."""
        made, now = self._made, [linear.addresses for linear in self.linears]
        if made is None or made[0] != now:
            rows = [(*at, n) for at, n in zip(now, self.widths, strict=True)]
            made = self._made = now, array("q", [number for row in rows for number in row])
        return made[1]


def _learning(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def joint(*layers: Any) -> Joint | None:
    """One call for these layers, if they are packed alike."""
    packed = all(isinstance(layer, FastLinear) and layer.compilable for layer in layers)
    if not packed or len({(layer.form, layer.in_features) for layer in layers}) != 1:
        return None
    return Joint(*layers)
