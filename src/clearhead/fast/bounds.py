"""Which tokens may have the largest logit of a row, when each is known but for an error that has a
bound, as vector instructions.

    bound of token j in row i = reach[i] * own[j] + lost[i] * length[j] + spare[j]

    lows     of every chunk of `TOKENS` tokens the largest (logit - bound) of each row
    above    for every token whether (logit + bound) of some row is at or above what that row asks

What is no number is left out of the first, and is above in the second. The slow twin is
`likeliest.plain_candidates`.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from clearhead.fast.bends import larger, largest
from clearhead.fast.compile import TOKENS
from clearhead.fast.words import F32, I8, I32, Function


def write_lows(f: Function) -> None:
    """(logits, bounds, reaches, 0, out, width, chunks, rows): bounds [3, width] are own, length and
    spare, reaches [rows, 2] are reach and lost, out is [rows, chunks].
    """
    logits, bounds, reaches, out, width, chunks, rows, first, last = (
        f.args[i] for i in (0, 1, 2, 4, 5, 6, 7, 8, 9)
    )
    with f.loop(first, last) as chunk, f.loop(f.const(0), rows) as row:
        reach = _reaches(f, reaches, row)
        start = f.add(logits, f.times(f.times(row, width), 4))
        most = f.variable(f.vector, f.spread(-math.inf))
        with f.loop(
            f.times(chunk, 4 * TOKENS), f.times(f.add(chunk, 1), 4 * TOKENS), _step(f)
        ) as at:
            low = f.b.fsub(f.floats(f.add(start, at)), _bound(f, bounds, width, reach, at))
            f.b.store(larger(f, low, f.b.load(most, typ=f.vector)), most)
        found = largest(f, f.b.load(most, typ=f.vector))
        place = f.add(out, f.times(f.add(f.times(row, chunks), chunk), 4))
        f.store(f.b.extract_element(found, ir.Constant(I32, 0)), place)


def write_above(f: Function) -> None:
    """(logits, bounds, reaches, least, out, width, chunks, rows): least [rows] is what each row
    asks, out [width] has a byte a token.
    """
    logits, bounds, reaches, least, out, width, _, rows, first, last = f.args
    marks = ir.VectorType(I8, f.shape.lanes)
    with f.loop(first, last) as chunk:
        begin, end = f.times(chunk, 4 * TOKENS), f.times(f.add(chunk, 1), 4 * TOKENS)
        with f.loop(begin, end, _step(f)) as at:
            place = f.add(out, f.b.lshr(at, f.const(2)))
            f.b.store(ir.Constant(marks, None), f.pointer(place), align=1)
        with f.loop(f.const(0), rows) as row:
            reach = _reaches(f, reaches, row)
            start = f.add(logits, f.times(f.times(row, width), 4))
            asked = f.everywhere(f.load(f.add(least, f.times(row, 4)), F32, 4))
            with f.loop(begin, end, _step(f)) as at:
                high = f.b.fadd(f.floats(f.add(start, at)), _bound(f, bounds, width, reach, at))
                found = f.b.zext(f.b.fcmp_unordered(">=", high, asked), marks)
                place = f.pointer(f.add(out, f.b.lshr(at, f.const(2))))
                before = f.b.load(place, typ=marks, align=1)
                f.b.store(f.b.or_(before, found), place, align=1)


def _reaches(f: Function, reaches: Any, row: Any) -> tuple[Any, Any]:
    """Those of a row, in all lanes."""
    start = f.add(reaches, f.times(row, 8))
    reach, lost = (f.everywhere(f.load(f.add(start, at), F32, 4)) for at in (0, 4))
    return reach, lost


def _bound(f: Function, bounds: Any, width: Any, reach: tuple[Any, Any], at: Any) -> Any:
    """Of some tokens, which stand `at` bytes behind the first."""
    own, length, spare = (f.floats(f.add(bounds, f.times(width, 4 * i), at)) for i in range(3))
    return f.fma(reach[0], own, f.fma(reach[1], length, spare))


def _step(f: Function) -> int:
    return 4 * f.shape.lanes
