"""Attention that learns, head by head, as vector instructions: forward and backward.

    P = softmax(q k^T scale),  out = P v
    dv = P^T dout,  dP = dout v^T,  dS = P (dP - sum of dout out) scale,  dq = dS k,  dk = dS^T q

A head's scores are never kept: for each query its largest score and 1 / the sum of its exponents
are, from which the backward pass computes P again (Dao et al. 2022, Flash Attention, appendix B).
Products are sums of lines as in `panels`: queries in tiles, keys (and values, for dP) turned into
columns first. Where a query sees the keys up to its own alone (causal), tiles pass over no others.
Whoever sees nothing gets zeros. The slow twin is `Kernel.forward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast.bends import exp, larger, largest
from clearhead.fast.compile import HEAD_FACTS, TENSORS
from clearhead.fast.panels import VECTORS, multiplied, room, turn_tokens
from clearhead.fast.words import F32, I32, I64, Function


@dataclass(frozen=True)
class _Head:
    """One head of one sequence."""

    at: dict[str, Any]
    """Where its first token is in each tensor."""
    token: dict[str, Any]
    """Bytes to the next token."""
    queries: Any
    """How many it has; those behind them see nothing."""
    keys: Any
    """How many can be seen."""
    causal: Any
    """Whether a query sees keys up to its own alone."""
    d: Any
    """Its width."""
    scale: Any
    """Of the scores, in all lanes."""
    tops: Any
    """Where the largest scores of its queries are."""
    shares: Any
    """Where 1 / their sums are."""


def _heads(f: Function, body: Callable[[_Head, dict[str, Any]], None]) -> None:
    """`body` for all heads from `first` to before `last`, counted through all sequences."""
    told, first, last = (f.args[i] for i in (0, 8, 9))
    fact = {
        name: f.load(f.add(told, 8 * i), I64, 8)
        for i, name in enumerate(HEAD_FACTS)
        if name != "scale"
    }
    scale = f.load(f.add(told, 8 * HEAD_FACTS.index("scale")), F32, 4)
    with f.loop(first, last) as unit:
        row, number = f.b.sdiv(unit, fact["heads"]), f.b.srem(unit, fact["heads"])
        place = f.times(f.times(unit, fact["queries"]), 4)
        at = {
            name: f.add(
                fact[name],
                f.times(row, fact[f"{name}_row"]),
                f.times(number, fact[f"{name}_head"]),
            )
            for name in TENSORS
        }
        asking, seen = (
            f.load(f.add(fact[name], f.times(row, 8)), I64, 8) for name in ("asking", "seen")
        )
        head = _Head(
            at=at,
            token={name: fact[f"{name}_token"] for name in TENSORS},
            queries=asking,
            keys=seen,
            causal=f.b.icmp_signed("!=", fact["causal"], f.const(0)),
            d=fact["d"],
            scale=f.everywhere(scale),
            tops=f.add(fact["tops"], place),
            shares=f.add(fact["shares"], place),
        )
        body(head, fact)


def _rounded(f: Function, count: Any) -> Any:
    """Up to whole panels."""
    columns = VECTORS * f.shape.lanes
    return f.b.and_(f.add(count, columns - 1), f.const(-columns))


def write_forward(f: Function) -> None:
    """(facts, 0, 0, 0, 0, 0, sequences * heads)"""
    told = f.args[0]
    keys, d = (f.load(f.add(told, 8 * HEAD_FACTS.index(n)), I64, 8) for n in ("keys", "d"))
    wide = _rounded(f, keys)
    turned, scores = room(f, f.times(wide, d)), room(f, f.times(wide, f.shape.tile))

    def one(head: _Head, fact: dict[str, Any]) -> None:
        turn_tokens(f, (head.at["k"], head.token["k"]), head.keys, head.d, turned)
        rooms = turned, scores, f.times(wide, 4)
        _tiles(f, head.queries, lambda n, first: _forward_tile(f, n, first, head, rooms))
        _clear(f, head, "out", head.queries, fact["queries"])

    _heads(f, one)


def write_backward(f: Function) -> None:
    """(facts, 0, 0, 0, 0, 0, sequences * heads)"""
    told = f.args[0]
    queries, keys, d = (
        f.load(f.add(told, 8 * HEAD_FACTS.index(n)), I64, 8) for n in ("queries", "keys", "d")
    )
    wide = _rounded(f, keys)
    columns = [room(f, f.times(wide, d)) for _ in range(2)]
    weights = [room(f, f.times(wide, queries)) for _ in range(2)]  # P, dS

    def one(head: _Head, fact: dict[str, Any]) -> None:
        for name, place in zip(("k", "v"), columns, strict=True):
            turn_tokens(f, (head.at[name], head.token[name]), head.keys, head.d, place)
        rooms = (*columns, *weights, f.times(wide, 4))
        _tiles(f, head.queries, lambda n, first: _backward_tile(f, n, first, head, rooms))
        _tiles(f, head.keys, lambda n, first: _key_tile(f, n, first, head, rooms))
        _clear(f, head, "dq", head.queries, fact["queries"])
        for name in ("dk", "dv"):
            _clear(f, head, name, head.keys, fact["keys"])

    _heads(f, one)


# --- parts of both ---


def _tiles(f: Function, count: Any, write: Callable[[int, Any], None]) -> None:
    """All rows, in tiles that are all full but the last."""
    most = f.shape.tile
    with f.loop(f.const(0), count, most) as first:
        cases = {n: partial(write, n, first) for n in range(1, most + 1)}
        f.choose(f.least(f.b.sub(count, first), f.const(most)), cases, lambda: None)


def _clear(f: Function, head: _Head, name: str, first: Any, last: Any) -> None:
    """Zeros for the tokens from `first` to before `last`."""
    with f.loop(first, last) as i, f.loop(f.const(0), head.d, f.shape.lanes) as at:
        place = f.add(head.at[name], f.times(i, head.token[name]), f.times(at, 4))
        f.store(f.spread(0.0), place)


def _rows(f: Function, head: _Head, name: str, first: Any, count: int) -> list[Any]:
    """Where some tokens are."""
    return [f.add(head.at[name], f.times(f.add(first, i), head.token[name])) for i in range(count)]


def _seen(f: Function, head: _Head, first: Any, count: int) -> list[Any]:
    """How many keys each of some queries sees; the last of them sees most."""
    return [
        f.b.select(head.causal, f.least(f.add(first, i + 1), head.keys), head.keys)
        for i in range(count)
    ]


def _allowed(f: Function, key: Any, count: Any) -> Any:
    """Which lanes of a vector that begins with a key are before `count`."""
    kind = ir.VectorType(I32, f.shape.lanes)
    left = f.spread_out(f.b.trunc(f.b.sub(count, key), I32), kind)
    return f.b.icmp_signed("<", ir.Constant(kind, list(range(f.shape.lanes))), left)


def _by_width(f: Function, d: Any, columns: Callable[[Any, int], None]) -> None:
    """`columns(at, vectors)` for all of a head's width."""
    lanes = f.shape.lanes
    whole = f.b.sub(d, f.b.srem(d, f.const(VECTORS * lanes)))
    with f.loop(f.const(0), whole, VECTORS * lanes) as at:
        columns(at, VECTORS)
    with f.loop(whole, d, lanes) as at:
        columns(at, 1)


def _panel(f: Function, turned: Any, key: Any, d: Any) -> tuple[Any, int]:
    """The lines of a panel of columns."""
    return f.add(turned, f.times(f.times(key, d), 4)), 4 * VECTORS * f.shape.lanes


# --- forward ---


def _forward_tile(
    f: Function, count: int, first: Any, head: _Head, rooms: tuple[Any, Any, Any]
) -> None:
    turned, scores, row = rooms
    lanes, step = f.shape.lanes, 4 * f.shape.lanes
    seen = _seen(f, head, first, count)
    weights = [f.add(scores, f.times(row, i)) for i in range(count)]
    qs = _rows(f, head, "q", first, count)
    tops = [f.variable(f.vector, f.spread(-math.inf)) for _ in weights]
    with f.loop(f.const(0), seen[-1], VECTORS * lanes) as key:
        found = multiplied(f, qs, _panel(f, turned, key, head.d), head.d, VECTORS)
        for i, own in enumerate(found):
            for j, total in enumerate(own):
                at = f.add(key, lanes * j)
                score = f.b.fmul(total, head.scale)
                score = f.b.select(_allowed(f, at, seen[i]), score, f.spread(-math.inf))
                f.store(score, f.add(weights[i], f.times(key, 4), step * j))
                f.b.store(larger(f, score, f.b.load(tops[i], typ=f.vector)), tops[i])
    shares = [
        _exponents(f, head, (weights[i], tops[i]), seen[i], seen[-1], f.add(first, i))
        for i in range(count)
    ]
    outs = _rows(f, head, "out", first, count)

    def columns(at: Any, vectors: int) -> None:
        lines = f.add(head.at["v"], f.times(at, 4)), head.token["v"]
        for i, own in enumerate(multiplied(f, weights, lines, seen[-1], vectors)):
            for j, total in enumerate(own):
                place = f.add(outs[i], f.times(at, 4), step * j)
                f.store(f.b.fmul(total, shares[i]), place)

    _by_width(f, head.d, columns)


def _exponents(
    f: Function, head: _Head, row: tuple[Any, Any], seen: Any, last: Any, number: Any
) -> Any:
    """exp(score - largest) in the place of a query's scores, 0 where it sees nothing; keeps the
    largest and 1 / the sum, and returns that in all lanes.
    """
    weights, place = row
    top = largest(f, f.b.load(place, typ=f.vector))
    total = f.variable(f.vector)
    with f.loop(f.const(0), last, f.shape.lanes) as key:
        at = f.add(weights, f.times(key, 4))
        found = exp(f, f.b.fsub(f.floats(at), top))
        found = f.b.select(_allowed(f, key, seen), found, f.spread(0.0))
        f.store(found, at)
        f.b.store(f.b.fadd(found, f.b.load(total, typ=f.vector)), total)
    share = f.b.fdiv(ir.Constant(F32, 1.0), f.total(f.b.load(total, typ=f.vector)))
    f.store(f.b.extract_element(top, ir.Constant(I32, 0)), f.add(head.tops, f.times(number, 4)))
    f.store(share, f.add(head.shares, f.times(number, 4)))
    return f.everywhere(share)


# --- backward ---


def _backward_tile(
    f: Function, count: int, first: Any, head: _Head, rooms: tuple[Any, ...]
) -> None:
    """P and dS of some queries, and their dq."""
    keys, values, *kept, row = rooms
    lanes, step = f.shape.lanes, 4 * f.shape.lanes
    seen = _seen(f, head, first, count)
    qs, dos = (_rows(f, head, name, first, count) for name in ("q", "dout"))
    each = [f.times(f.add(first, i), 4) for i in range(count)]
    tops, shares = (
        [f.everywhere(f.load(f.add(place, at), F32, 4)) for at in each]
        for place in (head.tops, head.shares)
    )
    outs = _rows(f, head, "out", first, count)
    means = [_dot(f, *pair, head.d) for pair in zip(dos, outs, strict=True)]
    ps, ds = ([f.add(one, f.times(row, f.add(first, i))) for i in range(count)] for one in kept)
    with f.loop(f.const(0), seen[-1], VECTORS * lanes) as key:
        scores = multiplied(f, qs, _panel(f, keys, key, head.d), head.d, VECTORS)
        for i, own in enumerate(scores):
            for j, total in enumerate(own):
                found = exp(f, f.b.fsub(f.b.fmul(total, head.scale), tops[i]))
                found = f.b.fmul(found, shares[i])
                at = f.add(key, lanes * j)
                found = f.b.select(_allowed(f, at, seen[i]), found, f.spread(0.0))
                f.store(found, f.add(ps[i], f.times(key, 4), step * j))
        gradients = multiplied(f, dos, _panel(f, values, key, head.d), head.d, VECTORS)
        for i, own in enumerate(gradients):
            for j, total in enumerate(own):
                at = f.add(f.times(key, 4), step * j)
                weight = f.b.fmul(f.floats(f.add(ps[i], at)), head.scale)
                f.store(f.b.fmul(weight, f.b.fsub(total, means[i])), f.add(ds[i], at))
    _sum(f, ds, 4, (head, "k", "dq"), (f.const(0), first), seen[-1])


def _key_tile(f: Function, count: int, first: Any, head: _Head, rooms: tuple[Any, ...]) -> None:
    """dk and dv of some keys, from the first query that sees them on."""
    _, _, weights, gradients, row = rooms
    start = f.b.select(head.causal, f.least(first, head.queries), f.const(0))
    depth = f.b.sub(head.queries, start)
    for place, lines, to in ((weights, "dout", "dv"), (gradients, "q", "dk")):
        column = f.add(place, f.times(row, start), f.times(first, 4))
        numbers = [f.add(column, 4 * i) for i in range(count)]
        _sum(f, numbers, row, (head, lines, to), (start, first), depth)


def _sum(
    f: Function,
    numbers: list[Any],
    apart: Any,
    what: tuple[_Head, str, str],
    firsts: tuple[Any, Any],
    depth: Any,
) -> None:
    """Some tokens of a tensor as sums of those of another, from a first one on, by numbers that are
    so many bytes `apart`.
    """
    head, source, target = what
    start, outs = firsts[0], _rows(f, head, target, firsts[1], len(numbers))
    begin = f.add(head.at[source], f.times(start, head.token[source]))

    def columns(at: Any, vectors: int) -> None:
        lines = f.add(begin, f.times(at, 4)), head.token[source]
        for i, own in enumerate(multiplied(f, numbers, lines, depth, vectors, apart=apart)):
            for j, total in enumerate(own):
                f.store(total, f.add(outs[i], f.times(at, 4), 4 * f.shape.lanes * j))

    _by_width(f, head.d, columns)


def _dot(f: Function, x: Any, y: Any, d: Any) -> Any:
    """x . y, in all lanes."""
    total = f.variable(f.vector)
    with f.loop(f.const(0), d, f.shape.lanes) as i:
        at = f.times(i, 4)
        pair = f.floats(f.add(x, at)), f.floats(f.add(y, at))
        f.b.store(f.fma(*pair, f.b.load(total, typ=f.vector)), total)
    return f.everywhere(f.total(f.b.load(total, typ=f.vector)))
