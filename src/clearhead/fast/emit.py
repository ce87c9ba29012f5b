"""The products y = x W^T + b as vector instructions, written for LLVM.

At a few rows of x a product is bound by memory: every weight is read once, turned into fp32 and
multiplied with all rows. (int8 and int4 have products of their own: `integers`, `nibbles`.)

    W [n, k]  a strip of 4 rows      x [m, k]  a tile of some rows
    group | group | group | ...      group | group | group | ...      sums: rows x 4 vectors

A thread takes whole strips. Up to `Shape.direct` rows of x, weights go from memory straight into
the sums, which are kept in registers; from there on a strip is unpacked into a buffer of fp32
first, which stays in the nearest cache while all tiles of x pass over it. What will be needed soon
is asked for in time: without that half of the bandwidth is reached, since a processor looks ahead
by instructions and not by bytes. How soon, `Shape.ahead` says: processors differ.

Up to `formats.MANY` rows, every row of x goes through the same additions in the same order however
many there are, so that in fp32 a text does not depend on the texts beside it; from there on it does
in `panels`.

A loop in Python through numba was measured, too: its compiler takes vectors of half the width where
there are wider ones, cannot keep the sums of groups in vectors, and costs half a second at every
start, against 0.1 to 0.3 for LLVM alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast import panels
from clearhead.fast.compile import FORK, TEAM, WHO
from clearhead.fast.formats import GROUP, MANY, STRIP
from clearhead.fast.groups import group
from clearhead.fast.words import (
    F32,
    I32,
    I64,
    LINE,
    POINTER,
    VOID,
    Function,
    Shape,
)

# name -> how much a thread takes at a time at least, and what it does from `first` to before `last`
Parts = dict[str, tuple[int, Callable[[Function], None]]]
PART = 1024  # weights of a row that are worked on at a time, where there are many rows of x
AHEAD = 2  # strips


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text for fp32 or bf16, with two functions.

    <name>(x, w, scales, bias, out, m, n, k, threads, scratch)      the product, on so many threads
    <name>_several(x, table, count, 0, out, m, 0, k, threads, 0)    several products of one x
    """
    module = ir.Module(name)
    many = Function(module, f"{name}_panels", 10, shape, name)
    many.write(panels.write_panels)
    strips = Function(module, f"{name}_strips", 10, shape, name)
    strips.write(partial(_strips, many=many.function))
    worker = Function(module, f"{name}_worker", 1, shape, name)
    worker.write(lambda f: write_worker(f, strips.function))
    product = Function(module, name, 10, shape, name)
    product.write(lambda f: write_product(f, strips.function, worker.function))
    worker_of_each, each = write_each(module, strips, STRIP)
    several = Function(module, f"{name}_several", 10, shape, name)
    several.write(lambda f: write_several(f, each, worker_of_each))
    return str(module)


# --- unpacking ---


def _unpack(f: Function, w: Any, out: Any, count: Any, later: Any = None) -> None:
    """So many weights, whole groups, in fp32; what stands `later` bytes behind is asked for."""
    with f.loop(f.const(0), count, GROUP) as k:
        for i, v in enumerate(group(f, w, k)):
            f.store(v, f.add(out, f.times(f.add(k, i * f.shape.lanes), 4)))
        if later is not None:
            _ask_for(f, f.add(w, f.size(k), later), GROUP)


def _ask_for(f: Function, start: Any, weights: int) -> None:
    """Let the memory fetch so many packed weights."""
    for line in range(0, weights * f.form_bytes, LINE):
        f.ask_for(f.add(start, line))


# --- tiles ---


@dataclass(frozen=True)
class _Strip:
    """Four rows of W, or a part of their length."""

    w: Any
    """Where its weights start."""
    n: Any
    """Its first row."""
    row: Any
    """Weights from the start of a row to that of the next."""
    first: Any
    """Where the part begins in a row of x."""
    last: Any
    """One past its end."""
    kept: Any = None
    """Where accumulators stay between the parts; None: there is one part."""
    asks: bool = True
    """Whether weights of later on are asked for."""


def _tile(f: Function, form: str, rows: int, m: Any, strip: _Strip) -> None:
    """out[m + i, n + j] = x[m + i] . W[n + j] + bias, for `rows` i and the 4 j of a strip."""
    x, bias, out, width, depth = (f.args[i] for i in (0, 3, 4, 6, 7))
    f = f.reading(form)
    xs_at = [
        f.add(x, f.times(f.add(f.times(f.add(m, i), depth), strip.first), 4)) for i in range(rows)
    ]
    ws_at = [f.add(strip.w, f.size(f.times(strip.row, j))) for j in range(STRIP)]
    sums = [[f.variable(f.vector) for _ in range(STRIP)] for _ in range(rows)]
    kept = None
    if strip.kept is not None:
        kept = f.add(strip.kept, f.times(m, 4 * STRIP * f.shape.lanes))
        with f.b.if_then(f.b.icmp_signed(">", strip.first, f.const(0))):
            _keep(f, sums, kept, back=True)
    with f.loop(f.const(0), f.b.sub(strip.last, strip.first), GROUP) as k:
        own = [4 * step for step in range(0, GROUP, f.shape.lanes)]
        xs = [[f.floats(f.add(row, f.times(k, 4), step)) for step in own] for row in xs_at]
        for j in range(STRIP):
            ws = group(f, ws_at[j], k)
            for i in range(rows):
                _accumulate(f, sums[i][j], ws, xs[i])
        if strip.asks:
            _look_ahead(f, strip, ws_at, k)
    if kept is None:
        _finish(f, sums, m, strip, (bias, out, width))
        return
    with f.b.if_else(f.b.icmp_signed("<", strip.last, depth)) as (more, done):
        with more:
            _keep(f, sums, kept, back=False)
        with done:
            _finish(f, sums, m, strip, (bias, out, width))


def _look_ahead(f: Function, strip: _Strip, ws_at: list[Any], k: Any) -> None:
    """Ask for as many weights of later on as are worked on now; strips lie in a row."""
    if not f.shape.ahead:
        at = f.add(f.times(strip.row, STRIP * AHEAD), f.times(k, STRIP))
        _ask_for(f, f.add(strip.w, f.size(at)), STRIP * GROUP)
        return
    row, at = f.size(strip.row), f.add(f.size(k), f.shape.ahead)
    over = f.b.icmp_signed(">=", f.add(f.size(strip.first), at), row)
    at = f.add(at, f.b.select(over, f.times(row, STRIP - 1), f.const(0)))  # in the next strip
    for w in ws_at:
        _ask_for(f, f.add(w, at), GROUP)


def _finish(f: Function, sums: list[Any], m: Any, strip: _Strip, ends: tuple[Any, ...]) -> None:
    """The lanes of all accumulators summed, and written."""
    bias, out, width = ends
    for j in range(STRIP):
        column = f.add(strip.n, j)
        start = f.load(f.add(bias, f.times(column, 4)), F32, 4)
        for i, row in enumerate(sums):
            total = f.b.fadd(f.total(f.b.load(row[j], typ=f.vector)), start)
            place = f.add(f.times(f.add(m, i), width), column)
            f.store(total, f.add(out, f.times(place, 4)))


def _keep(f: Function, sums: list[Any], kept: Any, back: bool) -> None:
    """The accumulators of a tile to memory, from one part of a strip to the next, or back."""
    for number, place in enumerate(place for row in sums for place in row):
        address = f.add(kept, 4 * f.shape.lanes * number)
        if back:
            f.b.store(f.floats(address), place)
        else:
            f.store(f.b.load(place, typ=f.vector), address)


def _accumulate(f: Function, place: Any, ws: list[Any], xs: list[Any]) -> None:
    """sum += w_1 x_1 + ..., lane by lane."""
    total = f.b.load(place, typ=f.vector)
    for w, x in zip(ws, xs, strict=True):
        total = f.fma(w, x, total)
    f.b.store(total, place)


# --- the functions ---


def _strips(f: Function, many: ir.Function) -> None:
    """The product for the strips from `first` to before `last`; `many` is for many rows of x."""
    _, w, _, _, _, m, n, k, first, last = f.args
    with f.b.if_then(f.b.icmp_signed(">", m, f.const(MANY))):
        f.b.call(many, f.args)
        f.b.ret_void()
    buffer = f.b.ptrtoint(f.b.alloca(F32, f.const(STRIP * PART)), I64)
    kept = f.b.ptrtoint(f.b.alloca(F32, f.times(m, STRIP * f.shape.lanes)), I64)
    with f.loop(first, last) as number:
        # The last strip may overlap the one before: what both write is the same.
        end = f.add(n, -STRIP)
        row = f.times(number, STRIP)
        row = f.b.select(f.b.icmp_signed("<", row, end), row, end)
        strip = _Strip(f.add(w, f.size(f.times(row, k))), row, k, f.const(0), k)
        cases = {
            rows: partial(_tile, f, f.form, rows, f.const(0), strip)
            for rows in range(1, f.direct + 1)
        }
        f.choose(m, cases, lambda: _parts(f, strip, buffer, kept))


def _parts(f: Function, strip: _Strip, buffer: Any, kept: Any) -> None:
    """All rows of x over a strip, part by part, so that both stay in the nearest cache."""
    with f.loop(f.const(0), strip.row, PART) as first:
        last = f.add(first, PART)
        last = f.b.select(f.b.icmp_signed("<", last, strip.row), last, strip.row)
        if f.form == "fp32":
            w = f.add(strip.w, f.times(first, 4))
            part = _Strip(w, strip.n, strip.row, first, last, kept, bool(f.shape.ahead))
        else:
            later = f.shape.ahead or f.size(f.times(strip.row, STRIP * AHEAD))
            for j in range(STRIP):
                own = f.add(strip.w, f.size(f.add(f.times(strip.row, j), first)))
                to = f.add(buffer, 4 * j * PART)
                _unpack(f, own, to, f.b.sub(last, first), later)
            part = _Strip(buffer, strip.n, f.const(PART), first, last, kept, False)
        _tiles(f, part)


def _tiles(f: Function, part: _Strip) -> None:
    """All rows of x over a part of a strip, in fp32."""
    m, rows = f.args[5], f.shape.rows
    left = f.b.srem(m, f.const(rows))
    whole = f.b.sub(m, left)
    _tile(f, "fp32", rows, f.const(0), part)  # there are so many, or weights were read at once
    part = replace(part, asks=False)
    with f.loop(f.const(rows), whole, rows) as row:
        _tile(f, "fp32", rows, row, part)
    cases = {rest: partial(_tile, f, "fp32", rest, whole, part) for rest in range(1, rows)}
    f.choose(left, cases, lambda: None)


def _count(f: Function, n: Any, unit: int) -> Any:
    return f.b.sdiv(f.add(n, unit - 1), f.const(unit))


def write_product(f: Function, strips: ir.Function, worker: ir.Function, unit: int = STRIP) -> None:
    """On this thread alone, or through OpenMP; a strip has `unit` rows of W."""
    _shared_out(f, worker, strips, [f.const(0), _count(f, f.args[6], unit)])


def write_several(f: Function, each: ir.Function, worker: ir.Function) -> None:
    """The same for several W, whose outputs stand behind each other: a part of each a thread.

    The table has (w, scales, bias, n) of each.
    """
    _shared_out(f, worker, each, [f.const(0), f.const(1)])


def _shared_out(f: Function, worker: ir.Function, whole: ir.Function, ends: list[Any]) -> None:
    threads, given = f.args[8], f.args[:8]
    with f.b.if_else(f.b.icmp_signed("<=", threads, f.const(1))) as (alone, together):
        with alone:
            f.b.call(whole, [*given, *ends])
        with together:
            shared = f.b.ptrtoint(f.b.alloca(I64, f.const(8)), I64)
            for i, value in enumerate(given):
                f.b.store(value, f.b.inttoptr(f.add(shared, 8 * i), POINTER))
            fork = f.outside(FORK, VOID, [POINTER, I64, I32, I32])
            count = f.b.trunc(threads, I32)
            f.b.call(fork, [worker, shared, count, ir.Constant(I32, 0)])


def write_worker(f: Function, strips: ir.Function, unit: int = STRIP) -> None:
    """The part of one thread, of those that came: they may be fewer than were asked for."""
    given, number, threads = _part(f)
    f.b.call(strips, [*given, *_share(f, _count(f, given[6], unit), number, threads)])


def write_each(module: ir.Module, strips: Function, unit: int) -> tuple[ir.Function, ir.Function]:
    """What a thread does for several products, and the part of one that knows its number."""
    name, shape, form = strips.function.name, strips.shape, strips.form
    each = Function(module, f"{name}_each", 10, shape, form)
    each.write(lambda f: _each(f, strips.function, unit))

    def write(f: Function) -> None:
        given, number, threads = _part(f)
        f.b.call(each.function, [*given, number, threads])

    worker = Function(module, f"{name}_each_worker", 1, shape, form)
    worker.write(write)
    return worker.function, each.function


def _each(f: Function, strips: ir.Function, unit: int) -> None:
    x, table, count, _, out, m, _, k, number, threads = f.args
    place = f.variable(I64, out)
    with f.loop(f.const(0), count) as i:
        at, to = f.add(table, f.times(i, 32)), f.b.load(place, typ=I64)
        w, scales, bias, n = (f.load(f.add(at, 8 * j), I64, 8) for j in range(4))
        ends = _share(f, _count(f, n, unit), number, threads)
        f.b.call(strips, [x, w, scales, bias, to, m, n, k, *ends])
        f.b.store(f.add(to, f.times(f.times(m, n), 4)), place)


def _part(f: Function) -> tuple[list[Any], Any, Any]:
    """What a thread was given, its number, and how many there are."""
    given = [f.load(f.add(f.args[0], 8 * i), I64, 8) for i in range(8)]
    number, threads = (
        f.b.sext(f.b.call(f.outside(name, I32, []), []), I64) for name in (WHO, TEAM)
    )
    return given, number, threads


def _share(f: Function, count: Any, number: Any, threads: Any) -> list[Any]:
    """From where to where a thread goes."""
    return [f.b.sdiv(f.times(count, f.add(number, i)), threads) for i in (0, 1)]


def write_parts(module: ir.Module, shape: Shape, parts: Parts) -> None:
    """Functions that are shared out among threads: <module>_<name>(10 numbers), of which the
    seventh says how much there is to do, and the ninth how many threads do it.
    """
    for name, (unit, body) in parts.items():
        own = f"{module.name}_{name}"
        part = Function(module, f"{own}_part", 10, shape, "fp32")
        part.write(body)
        worker = Function(module, f"{own}_worker", 1, shape, "fp32")
        worker.write(partial(write_worker, strips=part.function, unit=unit))
        whole = Function(module, own, 10, shape, "fp32")
        whole.write(partial(write_product, strips=part.function, worker=worker.function, unit=unit))
