"""Attention of a network that learns, in compiled code (`heads`), where it can be.

That is: fp32 on a CPU, as many heads of keys as of queries, no bias and no dropout on the weights,
sequences of some hundreds of tokens at most that stand at the start of their rows, and a mask that
shows everything, or everything up to a query's own position. PyTorch's fused kernel, which is made
for long sequences and multiplies as its other products do, has all else; the slow twin is
`Kernel.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.attention.mask import All, Causal
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Softmax
from clearhead.attention.view import View
from clearhead.fast import compile as compiled
from clearhead.fast.calls import bits
from clearhead.fast.compile import TENSORS

LANES = 16  # of the widest vector
PANEL = 32  # keys of the widest panel
ROOM = 2**19  # numbers on the stack of a thread in the backward pass: two megabytes
Heads = Float[Tensor, "_ _ _ _"]


@dataclass(frozen=True)
class Seen:
    """Who sees what."""

    asking: Int[Tensor, " b"]
    """How many queries of each sequence see anything."""
    keys: Int[Tensor, " b"]
    """How many keys of each can be seen."""
    causal: bool
    """Whether a query sees those up to its own alone."""


# One view serves all layers; and calls of other sizes, too.
_known: WeakKeyDictionary[View, dict[tuple[int, ...], Seen | None]] = WeakKeyDictionary()


def attend(
    kernel: Softmax,
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b g k d"],
    v: Float[Tensor, "b g k d"],
    view: View,
    bias: Tensor | None = None,
) -> Float[Tensor, "b h q d"]:
    """What `Softmax.forward` gives."""
    seen = None if bias is not None else _seen(kernel, q, k, v, view)
    if seen is None:
        return Softmax.forward(kernel, q, k, v, view, bias)
    return _Attend.apply(q, k, v, seen, kernel.scale).transpose(1, 2)


def _seen(kernel: Softmax, q: Tensor, k: Tensor, v: Tensor, view: View) -> Seen | None:
    """Who sees what, if compiled code knows such a call."""
    (rows, heads, queries, d), keys = q.shape, k.shape[2]
    if (
        view.bias is not None
        or (kernel.training and kernel.dropout > 0)
        or any(x.dtype != torch.float32 or not x.is_cpu for x in (q, k, v))
        or k.shape != (rows, heads, keys, d)
        or v.shape != k.shape
        or d % LANES
        or q.numel() * k.numel() == 0
        or 2 * (-(-keys // PANEL) * PANEL) * (d + max(queries, PANEL)) > ROOM
    ):
        return None
    sizes, known = (rows, queries, keys), _known.setdefault(view, {})
    if sizes not in known:
        known[sizes] = _read(view, *sizes)
    return known[sizes]


def _read(view: View, rows: int, queries: int, keys: int) -> Seen | None:
    """The same from a view."""
    asking, every = (torch.full((rows,), n, device="cpu") for n in (queries, keys))
    if view.plain == "all":
        return Seen(asking, every, False)
    if view.plain == "causal":
        return Seen(asking, every, True) if queries == keys else None
    if type(view.mask) not in (All, Causal) or view.q is not view.k or view.allowed is None:
        return None
    # A view across has one row for all queries, however many; that of one token has one, too.
    across = view.allowed.shape[1] == 1 and view.k.length > 1
    lengths = _lengths(view.k, rows, keys)
    if lengths is None or (type(view.mask) is Causal if across else queries != keys):
        return None
    return Seen(asking if across else lengths, lengths, type(view.mask) is Causal)


def _lengths(at: Positions, rows: int, slots: int) -> Int[Tensor, " b"] | None:
    """How many tokens each row has, if they stand at 0, 1, 2, ... in its first slots."""
    every = torch.arange(slots, device="cpu")
    pos = at.pos.expand(rows, -1)
    filled = pos >= 0
    lengths = filled.sum(dim=1)
    if pos.shape[1] != slots or int(lengths.min()) < 1:
        return None
    return lengths if pos.equal(torch.where(every < lengths.unsqueeze(1), every, -1)) else None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Heads, k: Heads, v: Heads, seen: Seen, scale: float) -> Tensor:
        """[b, q, h, d]: a token's heads beside each other, as the next layer reads them."""
        q, k, v = (_in_lines(x) for x in (q, k, v))
        out = q.new_empty([q.shape[i] for i in (0, 2, 1, 3)])
        tops, shares = (q.new_zeros(q.shape[:3]) for _ in range(2))
        ctx.save_for_backward(q, k, v, out, tops, shares)
        ctx.seen, ctx.scale = seen, scale
        _run("forward", seen, scale, (tops, shares), q=q, k=k, v=v, out=out.transpose(1, 2))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, tops, shares = ctx.saved_tensors
        dq, dk, dv = (_like(x) for x in (q, k, v))
        out, dout = out.transpose(1, 2), _in_lines(dout).transpose(1, 2)
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
        ends = {"dq": dq, "dk": dk, "dv": dv}
        _run("backward", ctx.seen, ctx.scale, (tops, shares), **given, **ends)
        return dq, dk, dv, None, None


def _in_lines(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _like(x: Heads) -> Heads:
    """Room for as much; a token's heads stand beside each other, as the next layer reads them."""
    rows, heads, tokens, d = x.shape
    return x.new_empty((rows, tokens, heads, d)).transpose(1, 2)


def _run(
    name: str, seen: Seen, scale: float, sums: tuple[Tensor, Tensor], **tensors: Tensor
) -> None:
    """Forward or backward of all heads."""
    rows, heads, queries, d = tensors["q"].shape
    told = [heads, d, queries, tensors["k"].shape[2], int(seen.causal), bits(scale)]
    told += [place.data_ptr() for place in (seen.asking, seen.keys, *sums)]
    for own in TENSORS:
        x = tensors.get(own)
        told += [0] * 4 if x is None else [x.data_ptr(), *(4 * step for step in x.stride()[:3])]
    facts = torch.tensor(told, device="cpu")
    ends = rows * heads, 0, compiled.threads(), 0
    compiled.learning()[name](facts.data_ptr(), 0, 0, 0, 0, 0, *ends)
