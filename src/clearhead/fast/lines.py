"""Sums of lines, the other products of a layer that learns:

    out[i] = sum over d of a[i, d] * b[d]        dx = dy W:     a = dy,    b = W
                                                 dW = dy^T x:   a = dy^T,  b = x

A number of `a` is spread over the lanes and multiplied with the numbers of a line of `b`, as in
`panels`; but here the lines lie as they are needed, and nothing is turned over: `a` may lie either
way, since its numbers are loaded one by one. Some lines, and of long ones a part, are taken at a
time: they stay in the second cache while all rows of `a` pass over them, and a chain of additions
is no longer than they are many. The slow twin is `a @ b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from clearhead.fast.panels import VECTORS, multiplied, room
from clearhead.fast.words import Function

LINES, WIDTH = 256, 384  # lines at a time, and numbers of each


@dataclass(frozen=True)
class _Block:
    """Some lines, or parts of them."""

    first: Any
    """The first of them."""
    count: Any
    """How many."""
    left: Any
    """Where the part begins in a line."""
    right: Any
    """One past its end."""
    nothing: Any
    """Zeros, from which the sums of the first block go on."""


def write_lines(f: Function) -> None:
    """(a, b, row, step, out, depth, rows, width): the tiles of rows of `a` from `first` to before
    `last`; `row` and `step` are the bytes from a row of `a` and from a number of it to the next.
    """
    depth, rows, width, first, last = (f.args[i] for i in (5, 6, 7, 8, 9))
    tile = f.shape.tile
    top, bottom = f.times(first, tile), f.least(f.times(last, tile), rows)
    nothing = room(f, VECTORS * f.shape.lanes)
    for i in range(VECTORS):
        f.store(f.spread(0.0), f.add(nothing, 4 * f.shape.lanes * i))
    with f.loop(f.const(0), width, WIDTH) as left, f.loop(f.const(0), depth, LINES) as line:
        right = f.least(f.add(left, WIDTH), width)
        count = f.least(f.b.sub(depth, line), f.const(LINES))
        block = _Block(line, count, left, right, nothing)
        with f.loop(top, bottom, tile) as row:
            cases = {n: partial(_tile, f, n, row, block) for n in range(1, tile + 1)}
            f.choose(f.least(f.b.sub(bottom, row), f.const(tile)), cases, lambda: None)


def _tile(f: Function, rows: int, row: Any, block: _Block) -> None:
    """`rows` rows of `a` from `row` on over a block."""
    a, b, apart, step, out, width = (f.args[i] for i in (0, 1, 2, 3, 4, 7))
    lanes = f.shape.lanes
    start = f.add(a, f.times(row, apart), f.times(block.first, step))
    numbers = [f.add(start, f.times(apart, i)) for i in range(rows)]
    begins = f.b.icmp_signed("==", block.first, f.const(0))

    def columns(at: Any, vectors: int) -> None:
        line = f.add(b, f.times(f.add(f.times(block.first, width), at), 4))
        lines = line, f.times(width, 4)
        found = multiplied(f, numbers, lines, block.count, vectors, apart=step)
        for i, own in enumerate(found):
            to = f.add(out, f.times(f.add(f.times(f.add(row, i), width), at), 4))
            before = f.b.select(begins, block.nothing, to)
            for j, total in enumerate(own):
                place = 4 * lanes * j
                total = f.b.fadd(total, f.floats(f.add(before, place)))
                f.store(total, f.add(to, place))

    odd = f.b.srem(f.b.sub(block.right, block.left), f.const(VECTORS * lanes))
    whole = f.b.sub(block.right, odd)
    with f.loop(block.left, whole, VECTORS * lanes) as at:
        columns(at, VECTORS)
    with f.loop(whole, block.right, lanes) as at:
        columns(at, 1)
