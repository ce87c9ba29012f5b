"""The small operations of a decoding step, row by row, and what works off a list of calls.

    layer_norm, rms_norm    as the modules of these names
    rotate                  rotary positions, as `Rotary.rotate`, a row at its own position
    put                     new keys and values into their slots of a cache
    add, times              x += y, x *= y
    run                     one call after the other: a row of the list is a function's address and
                            its ten arguments; `run_each`: several such lists

All but `run` are shared out among threads by their rows (or numbers), where there are many: the
seventh argument says how many, the ninth among how many threads. All addresses and sizes are whole
numbers of 64 bits; widths are multiples of a vector, but for the pairs of `rotate`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast.compile import ARGUMENTS, FACTS
from clearhead.fast.words import F32, I32, I64, VOID, Function

CALL = 8 * (1 + ARGUMENTS)  # bytes of a call in a list
CHUNK = 1024  # numbers of `add` and `times` that a thread takes at a time


def _number(f: Function, bits: Any) -> Any:
    """The fp32 number whose bits an argument is."""
    return f.b.bitcast(f.b.trunc(bits, I32), F32)


def _fact(f: Function, facts: Any, name: str) -> Any:
    """One of those that attention is told."""
    return f.load(f.add(facts, 8 * FACTS.index(name)), I64, 8)


def seen_by(f: Function, facts: Any, row: Any) -> Any:
    """How many keys a row sees, the new one included."""
    return f.load(f.add(_fact(f, facts, "seen"), f.times(row, _fact(f, facts, "each"))), I64, 8)


def _norm(f: Function, centred: bool) -> None:
    """(x, weight, bias, out, width, eps, rows)"""
    x, weight, bias, out, width, eps, _, _, first, last = f.args
    lanes, size = f.shape.lanes, f.times(width, 4)
    count = f.b.sitofp(width, F32)

    def mean_of(start: Any, less: Any = None, squared: bool = False) -> Any:
        total = f.variable(f.vector)
        with f.loop(f.const(0), size, 4 * lanes) as at:
            v = f.floats(f.add(start, at))
            v = v if less is None else f.b.fsub(v, less)
            before = f.b.load(total, typ=f.vector)
            f.b.store(f.fma(v, v, before) if squared else f.b.fadd(v, before), total)
        return f.b.fdiv(f.total(f.b.load(total, typ=f.vector)), count)

    with f.loop(first, last) as row:
        start, to = (f.add(place, f.times(row, size)) for place in (x, out))
        mean = f.everywhere(mean_of(start)) if centred else None
        spread = f.b.fadd(mean_of(start, mean, squared=True), _number(f, eps))
        root = f.b.call(f.outside("llvm.sqrt.f32", F32, [F32]), [spread])
        factor = f.everywhere(f.b.fdiv(ir.Constant(F32, 1.0), root))
        with f.loop(f.const(0), size, 4 * lanes) as at:
            v = f.floats(f.add(start, at))
            v = v if mean is None else f.b.fsub(v, mean)
            v, gain = f.b.fmul(v, factor), f.floats(f.add(weight, at))
            v = f.fma(v, gain, f.floats(f.add(bias, at))) if centred else f.b.fmul(v, gain)
            f.store(v, f.add(to, at))


def _rotate(f: Function) -> None:
    """(x, cos, sin, facts, heads, d, rows, width): the tables have a row a position."""
    x, cos, sin, facts, heads, d, _, width, first, last = f.args
    half = f.b.lshr(width, f.const(1))
    with f.loop(first, last) as row:
        here = f.times(f.times(f.add(seen_by(f, facts, row), -1), width), 4)
        tables = f.add(cos, here), f.add(sin, here)
        with f.loop(f.const(0), heads) as head:
            start = f.add(x, f.times(f.times(f.add(f.times(row, heads), head), d), 4))
            with f.loop(f.const(0), half) as i:
                _turn_pair(f, start, tables, (f.times(i, 4), f.times(f.add(i, half), 4)))


def _turn_pair(f: Function, start: Any, tables: tuple[Any, Any], pair: tuple[Any, Any]) -> None:
    near, far = pair
    a, b = (f.load(f.add(start, at), F32, 4) for at in pair)
    turned = []
    for own, other, at in ((a, f.b.fneg(b), near), (b, a, far)):
        c, s = (f.load(f.add(table, at), F32, 4) for table in tables)
        turned.append(f.b.fadd(f.b.fmul(own, c), f.b.fmul(other, s)))
    for value, at in zip(turned, pair, strict=True):
        f.store(value, f.add(start, at))


def key_place(f: Function, facts: dict[str, Any], number: Any) -> Any:
    """Where a key lies, in bytes from the start of the buffers; `facts["table"]` is where the table
    has its row.
    """
    start = f.load(f.add(facts["table"], f.times(number, facts["lies_key"])), I64, 8)
    return f.times(f.add(f.times(start, facts["k_row"]), f.times(number, facts["k_key"])), 4)


def _put(f: Function) -> None:
    """(new, slots, facts, 0, 0, 0, rows): [rows, heads, d] go to where each row's last key is."""
    new, slots, told, _, _, _, _, _, first, last = f.args
    facts = {name: _fact(f, told, name) for name in FACTS[:-1]}
    d, own = facts["d"], f.b.sdiv(facts["heads"], facts["group"])
    with f.loop(first, last) as row:
        facts["table"] = f.add(facts["lies"], f.times(row, facts["lies_row"]))
        place = f.add(slots, key_place(f, facts, f.add(seen_by(f, told, row), -1)))
        with f.loop(f.const(0), own) as head:
            start = f.add(new, f.times(f.times(f.add(f.times(row, own), head), d), 4))
            to = f.add(place, f.times(f.times(head, facts["k_head"]), 4))
            with f.loop(f.const(0), f.times(d, 4), 4 * f.shape.lanes) as at:
                f.store(f.floats(f.add(start, at)), f.add(to, at))


def _both(f: Function, how: str) -> None:
    """(x, y, 0, 0, 0, 0, count)"""
    x, y, count, first, last = (f.args[i] for i in (0, 1, 6, 8, 9))
    start, end = f.times(first, 4 * CHUNK), f.least(f.times(last, 4 * CHUNK), f.times(count, 4))
    with f.loop(start, end, 4 * f.shape.lanes) as at:
        place = f.add(x, at)
        values = f.floats(place), f.floats(f.add(y, at))
        f.store(getattr(f.b, how)(*values), place)


def run(f: Function) -> None:
    """(list, count)"""
    _work_off(f, *f.args[:2])


def run_each(f: Function) -> None:
    """The lists from `first` to before `last`: a table has where each is, and its count."""
    table, first, last = (f.args[i] for i in (0, 8, 9))
    with f.loop(first, last) as i:
        at = f.add(table, f.times(i, 16))
        _work_off(f, *(f.load(f.add(at, 8 * j), I64, 8) for j in (0, 1)))


def _work_off(f: Function, calls: Any, count: Any) -> None:
    kind = ir.FunctionType(VOID, [I64] * ARGUMENTS)
    with f.loop(f.const(0), count) as i:
        at = f.add(calls, f.times(i, CALL))
        function = f.b.inttoptr(f.load(at, I64, 8), ir.PointerType(kind))
        given = [f.load(f.add(at, 8 * (1 + j)), I64, 8) for j in range(ARGUMENTS)]
        f.b.call(function, given)


# name -> how many rows (or numbers) a thread takes at a time at least, and what it does with them
BODIES: dict[str, tuple[int, Callable[[Function], None]]] = {
    "layer_norm": (1, partial(_norm, centred=True)),
    "rms_norm": (1, partial(_norm, centred=False)),
    "rotate": (1, _rotate),
    "put": (1, _put),
    "add": (CHUNK, partial(_both, how="fadd")),
    "times": (CHUNK, partial(_both, how="fmul")),
}
