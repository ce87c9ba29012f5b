"""Attention within whole sequences that lie one behind the other, nothing between them.

    keys of a head   turned, 2 vectors at a time     a tile of some queries
    q . k            as the products of `panels`:    scores [tile, keys]
    softmax          row by row                      in the place of the scores
    weights . v      as the products of `panels`     out [tile, d]

A sequence's turned keys and the scores of a tile stay in the nearest caches: PyTorch's fused
attention, made for long sequences, takes three times as long for those of some dozens of tokens,
and needs them padded. The slow twin is `Softmax.forward`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from clearhead.fast.bends import exponents, larger, largest
from clearhead.fast.compile import FACTS
from clearhead.fast.panels import VECTORS, multiplied, room, turn_tokens
from clearhead.fast.words import F32, I64, Function


@dataclass(frozen=True)
class _Head:
    """One head of one sequence."""

    q: Any
    """Where its first query is."""
    k: Any
    """Where its first key is."""
    v: Any
    """Where its first value is."""
    out: Any
    """Where its first output is."""
    length: Any
    """How many tokens the sequence has."""
    apart: tuple[Any, Any]
    """Bytes from a query (and output) to the next, and from a key (and value)."""


@dataclass(frozen=True)
class _Rooms:
    """What is on the stack, for the longest sequence."""

    turned: Any
    """Keys, in panels [d, columns]."""
    scores: Any
    """Of a tile of queries, [tile, keys]."""
    row: Any
    """Bytes from a row of the scores to the next."""


def write_sequences(f: Function) -> None:
    """(q, k, v, out, facts, starts): the heads from `first` to before `last`, counted through all
    sequences; `starts` has the first token of each, and one past the last.
    """
    q, k, v, out, told, starts, _, _, first, last = f.args
    heads, group, d, most = (_fact(f, told, name) for name in ("heads", "group", "d", "most"))
    rooms = _Rooms(
        room(f, f.times(most, d)),
        room(f, f.times(most, f.shape.tile)),
        f.times(most, 4),
    )
    own = f.b.sdiv(heads, group)
    apart = f.times(f.times(heads, d), 4), f.times(f.times(own, d), 4)
    with f.loop(first, last) as unit:
        row, number = f.b.sdiv(unit, heads), f.b.srem(unit, heads)
        start, end = (f.load(f.add(starts, f.times(f.add(row, i), 8)), I64, 8) for i in (0, 1))
        asked = f.add(f.times(start, apart[0]), f.times(f.times(number, d), 4))
        seen = f.add(f.times(start, apart[1]), f.times(f.times(f.b.sdiv(number, group), d), 4))
        places = f.add(q, asked), f.add(k, seen), f.add(v, seen), f.add(out, asked)
        head = _Head(*places, f.b.sub(end, start), apart)
        turn_tokens(f, (head.k, head.apart[1]), head.length, d, rooms.turned)
        _tiles(f, head, rooms)


def _fact(f: Function, told: Any, name: str) -> Any:
    return f.load(f.add(told, 8 * FACTS.index(name)), I64, 8)


def _tiles(f: Function, head: _Head, rooms: _Rooms) -> None:
    """All queries, in tiles as even as can be."""
    most = f.shape.tile
    count = f.b.sdiv(f.add(head.length, most - 1), f.const(most))
    with f.loop(f.const(0), count) as number:
        first, last = (f.b.sdiv(f.times(head.length, f.add(number, i)), count) for i in (0, 1))
        cases = {n: partial(_tile, f, n, first, head, rooms) for n in range(1, most + 1)}
        f.choose(f.b.sub(last, first), cases, lambda: None)


def _tile(f: Function, rows: int, first: Any, head: _Head, rooms: _Rooms) -> None:
    """`rows` queries from `first` on."""
    weights = [f.add(rooms.scores, f.times(rooms.row, i)) for i in range(rows)]
    tops = _scores(f, weights, first, head, rooms)
    shares = exponents(f, weights, tops, head.length)
    _values(f, weights, shares, first, head)


def _scores(f: Function, weights: list[Any], first: Any, head: _Head, rooms: _Rooms) -> list[Any]:
    """q . k * scale, and the largest of each row."""
    told = f.args[4]
    d = _fact(f, told, "d")
    scale = f.everywhere(f.load(f.add(told, 8 * FACTS.index("scale")), F32, 4))
    columns, step = VECTORS * f.shape.lanes, 4 * f.shape.lanes
    qs = [f.add(head.q, f.times(f.add(first, i), head.apart[0])) for i in range(len(weights))]
    tops = [f.variable(f.vector, f.spread(-math.inf)) for _ in weights]
    with f.loop(f.const(0), head.length, columns) as key:
        panel = f.add(rooms.turned, f.times(f.times(key, d), 4))
        found = multiplied(f, qs, (panel, 4 * columns), d, VECTORS)
        for row, own, top in zip(weights, found, tops, strict=True):
            for j, total in enumerate(own):
                score = f.b.fmul(total, scale)
                f.store(score, f.add(row, f.times(key, 4), step * j))
                f.b.store(larger(f, score, f.b.load(top, typ=f.vector)), top)
    return [largest(f, f.b.load(top, typ=f.vector)) for top in tops]


def _values(f: Function, weights: list[Any], shares: list[Any], first: Any, head: _Head) -> None:
    """The values by their weights."""
    d, lanes = _fact(f, f.args[4], "d"), f.shape.lanes
    outs = [f.add(head.out, f.times(f.add(first, i), head.apart[0])) for i in range(len(weights))]

    def columns(at: Any, vectors: int) -> None:
        lines = f.add(head.v, f.times(at, 4)), head.apart[1]
        found = multiplied(f, weights, lines, head.length, vectors)
        for out, own, share in zip(outs, found, shares, strict=True):
            for j, total in enumerate(own):
                to = f.add(out, f.times(f.add(at, lanes * j), 4))
                f.store(f.b.fmul(total, share), to)

    whole = f.b.sub(d, f.b.srem(d, f.const(VECTORS * lanes)))
    with f.loop(f.const(0), whole, VECTORS * lanes) as at:
        columns(at, VECTORS)
    with f.loop(whole, d, lanes) as at:
        columns(at, 1)
