"""Functions that are no sums and products, as vector instructions: exp, and what activations are of
it.

exp is 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' coefficients), off by at most some
units in the last place. The slow twins are `ACTIVATIONS` and torch.softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from clearhead.fast.words import F32, I32, Function

CHUNK = 1024  # numbers of an activation that a thread takes at a time
TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
LEAST, MOST = -87.3365478515625, 88.3762626647949  # whose exp is a normal number
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


def exp(f: Function, x: Any) -> Any:
    """Of every lane; beyond the normal numbers it stays at the last of them."""
    for sign, end in (("<", LEAST), (">", MOST)):  # what is none stays
        x = f.b.select(f.b.fcmp_ordered(sign, x, f.spread(end)), f.spread(end), x)
    n, bits = f.whole(f.b.fmul(x, f.spread(1.44269504088896341)), 127)
    x = f.fma(n, f.spread(-0.693359375), x)
    x = f.fma(n, f.spread(2.12194440e-4), x)
    found = f.spread(EXP[0])
    for number in EXP[1:]:
        found = f.fma(found, x, f.spread(number))
    found = f.fma(found, f.b.fmul(x, x), f.b.fadd(x, f.spread(1.0)))
    power = f.b.shl(bits, f.spread(23, I32))  # n + 127 is the exponent of 2^n
    return f.b.fmul(found, f.b.bitcast(power, f.vector))


def _swish(f: Function, x: Any, u: Any) -> Any:
    """x / (1 + exp(-u)); nothing is left of x where exp has come to its end."""
    found = f.b.fdiv(x, f.b.fadd(f.spread(1.0), exp(f, f.b.fneg(u))))
    return f.b.select(f.b.fcmp_ordered("<", u, f.spread(-MOST)), f.b.fmul(x, f.spread(0.0)), found)


def _silu(f: Function, x: Any) -> Any:
    return _swish(f, x, x)


def _quick_gelu(f: Function, x: Any) -> Any:
    return _swish(f, x, f.b.fmul(x, f.spread(1.702)))


def _gelu_tanh(f: Function, x: Any) -> Any:
    """(1 + tanh u) / 2 is 1 / (1 + exp(-2 u))."""
    twice = 2 * math.sqrt(2 / math.pi)
    cubic = f.fma(f.b.fmul(x, x), f.spread(0.044715 * twice), f.spread(twice))
    return _swish(f, x, f.b.fmul(x, cubic))


def _gelu(f: Function, x: Any) -> Any:
    """x Phi(x): 1 - Phi of |x| is P(t) exp(-x^2 / 2) / 2, t = 1 / (1 + p |x| / sqrt 2), off by at
    most 1e-7 (Abramowitz and Stegun 7.1.26).
    """
    size = f.call("llvm.fabs", f.vector, x)
    t = f.fma(size, f.spread(0.3275911 / math.sqrt(2)), f.spread(1.0))
    t = f.b.fdiv(f.spread(1.0), t)
    found = f.spread(TAIL[0] / 2)
    for number in TAIL[1:]:
        found = f.fma(found, t, f.spread(number / 2))
    far = f.b.fmul(f.b.fmul(found, t), exp(f, f.b.fmul(f.b.fmul(x, x), f.spread(-0.5))))
    near = f.b.fsub(f.spread(1.0), far)
    return f.b.fmul(x, f.b.select(f.b.fcmp_ordered("<", x, f.spread(0.0)), far, near))


def _relu(f: Function, x: Any) -> Any:
    return f.b.select(f.b.fcmp_ordered("<", x, f.spread(0.0)), f.spread(0.0), x)


BENDS: dict[str, Callable[[Function, Any], Any]] = {
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
}


def pointwise(f: Function, function: Callable[[Function, Any], Any]) -> None:
    """The chunks from `first` to before `last`; behind the last whole vector number by number."""
    x, out, count, first, last = (f.args[i] for i in (0, 4, 6, 8, 9))
    start, end = f.times(first, CHUNK), f.least(f.times(last, CHUNK), count)
    lanes = f.shape.lanes
    whole = f.add(start, f.b.and_(f.b.sub(end, start), f.const(-lanes)))
    with f.loop(start, whole, lanes) as i:
        at = f.times(i, 4)
        f.store(function(f, f.floats(f.add(x, at))), f.add(out, at))
    with f.loop(whole, end) as i:
        at = f.times(i, 4)
        one = function(f, f.everywhere(f.load(f.add(x, at), F32, 4)))
        f.store(f.b.extract_element(one, ir.Constant(I32, 0)), f.add(out, at))


def exponents(f: Function, rows: list[Any], tops: list[Any], keys: Any) -> list[Any]:
    """exp(score - largest) in the place of every score of some rows, and for each 1 / their sum;
    `tops` are in all lanes.
    """
    lanes = f.shape.lanes
    totals = [f.variable(f.vector) for _ in rows]

    def vectors(at: Any, counts: Any = None) -> None:
        for row, top, total in zip(rows, tops, totals, strict=True):
            place = f.add(row, f.times(at, 4))
            found = exp(f, f.b.fsub(f.floats(place), top))
            f.store(found, place)
            found = found if counts is None else f.b.select(counts, found, f.spread(0.0))
            f.b.store(f.b.fadd(f.b.load(total, typ=f.vector), found), total)

    whole = f.b.and_(keys, f.const(-lanes))
    with f.loop(f.const(0), whole, lanes) as at:
        vectors(at)
    with f.b.if_then(f.b.icmp_signed("<", whole, keys)):  # behind the last key stands anything
        kind = ir.VectorType(I32, lanes)
        rest = f.spread_out(f.b.trunc(f.b.sub(keys, whole), I32), kind)
        vectors(whole, f.b.icmp_signed("<", ir.Constant(kind, list(range(lanes))), rest))
    sums = [f.total(f.b.load(total, typ=f.vector)) for total in totals]
    return [f.everywhere(f.b.fdiv(ir.Constant(F32, 1.0), total)) for total in sums]


def write_peaks(f: Function) -> None:
    """(x, tops, 0, 0, sums, width, rows, part): of the rows from `first` to before `last` the
    largest number of each whole part, of the row, and the sum of exp(number - the row's largest).
    """
    x, tops, sums, width, part, first, last = (f.args[i] for i in (0, 1, 4, 5, 7, 8, 9))
    lanes = f.shape.lanes
    count = f.b.sdiv(width, part)
    whole = f.times(count, part)
    with f.loop(first, last) as row:
        start = f.add(x, f.times(f.times(row, width), 4))
        to = f.add(tops, f.times(f.times(row, f.add(count, 1)), 4))
        best = f.variable(f.vector, f.spread(-math.inf))
        with f.loop(f.const(0), count) as i:
            own = f.variable(f.vector, f.spread(-math.inf))
            with f.loop(f.times(i, part), f.times(f.add(i, 1), part), lanes) as at:
                number = f.floats(f.add(start, f.times(at, 4)))
                f.b.store(larger(f, number, f.b.load(own, typ=f.vector)), own)
            found = largest(f, f.b.load(own, typ=f.vector))
            f.store(_first(f, found), f.add(to, f.times(i, 4)))
            f.b.store(larger(f, found, f.b.load(best, typ=f.vector)), best)
        with f.loop(whole, width) as at:
            number = f.everywhere(f.load(f.add(start, f.times(at, 4)), F32, 4))
            f.b.store(larger(f, number, f.b.load(best, typ=f.vector)), best)
        top = f.b.load(best, typ=f.vector)
        f.store(_first(f, top), f.add(to, f.times(count, 4)))
        total, rest = f.variable(f.vector), f.variable(F32)
        with f.loop(f.const(0), whole, lanes) as at:
            found = exp(f, f.b.fsub(f.floats(f.add(start, f.times(at, 4))), top))
            f.b.store(f.b.fadd(f.b.load(total, typ=f.vector), found), total)
        with f.loop(whole, width) as at:
            number = f.everywhere(f.load(f.add(start, f.times(at, 4)), F32, 4))
            found = _first(f, exp(f, f.b.fsub(number, top)))
            f.b.store(f.b.fadd(f.b.load(rest, typ=F32), found), rest)
        total = f.b.fadd(f.total(f.b.load(total, typ=f.vector)), f.b.load(rest, typ=F32))
        f.store(total, f.add(sums, f.times(row, 4)))


def _first(f: Function, vector: Any) -> Any:
    return f.b.extract_element(vector, ir.Constant(I32, 0))


def larger(f: Function, x: Any, y: Any) -> Any:
    """The larger one of every lane; `y` where one is no number."""
    return f.b.select(f.b.fcmp_ordered(">", x, y), x, y)


def largest(f: Function, vector: Any) -> Any:
    """The largest lane, in all lanes."""
    lanes = f.shape.lanes
    apart = lanes // 2
    while apart:
        vector = larger(f, vector, f.shuffle(vector, vector, [i ^ apart for i in range(lanes)]))
        apart //= 2
    return vector
