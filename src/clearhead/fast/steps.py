"""What stands between the products of a step, as vector instructions: attention and activations.

A step of decoding asks few queries of many keys, and PyTorch's fused attention is made for many
queries; its tanh takes five times as long as it must.

    attend                          softmax(q k^T scale) v, a row sees its first keys
    gelu_tanh, quick_gelu, silu     x / (1 + exp(-u)), u a polynomial of x
    gelu, relu                      for `calls`; elsewhere PyTorch's own are as quick

The slow twins are `Kernel.forward` and `ACTIVATIONS`. exp is 2^n times a polynomial on
[-ln 2 / 2, ln 2 / 2] (Cephes' coefficients), off by at most some units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast import emit, rows
from clearhead.fast.compile import FACTS
from clearhead.fast.words import F32, I32, I64, LINE, Function, Shape

POINTWISE = ("gelu_tanh", "quick_gelu", "silu", "gelu", "relu")
CHUNK = 1024  # numbers of an activation that a thread takes at a time
WIDE = 4  # keys, and vectors of a value, that are worked on at a time
TAIL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
LEAST, MOST = -87.3365478515625, 88.3762626647949  # whose exp is a normal number
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text, with attention, the activations and those of `rows`.

    <name>_attend(q, k, v, out, facts, 0, rows * heads, 0, threads, 0)
    <name>_silu(x, 0, 0, 0, out, 0, count, 0, threads, 0)
    and those of `rows`
    """
    module = ir.Module(name)
    functions = _gelu_tanh, _quick_gelu, _silu, _gelu, _relu
    pairs = zip(POINTWISE, functions, strict=True)
    bends = [(own, CHUNK, partial(_pointwise, function=bend)) for own, bend in pairs]
    parts: list[tuple[str, int, Callable[[Function], None]]] = [("attend", 1, _attend), *bends]
    for own, unit, body in parts:
        part = Function(module, f"{name}_{own}_part", 10, shape, "fp32")
        part.write(body)
        worker = Function(module, f"{name}_{own}_worker", 1, shape, "fp32")
        worker.write(partial(emit.write_worker, strips=part.function, unit=unit))
        whole = Function(module, f"{name}_{own}", 10, shape, "fp32")
        whole.write(
            partial(emit.write_product, strips=part.function, worker=worker.function, unit=unit)
        )
    for own, write in rows.BODIES.items():
        Function(module, f"{name}_{own}", rows.ARGUMENTS, shape, "fp32").write(write)
    return str(module)


# --- functions of a vector ---


def _exp(f: Function, x: Any) -> Any:
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
    found = f.b.fdiv(x, f.b.fadd(f.spread(1.0), _exp(f, f.b.fneg(u))))
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
    far = f.b.fmul(f.b.fmul(found, t), _exp(f, f.b.fmul(f.b.fmul(x, x), f.spread(-0.5))))
    near = f.b.fsub(f.spread(1.0), far)
    return f.b.fmul(x, f.b.select(f.b.fcmp_ordered("<", x, f.spread(0.0)), far, near))


def _relu(f: Function, x: Any) -> Any:
    return f.b.select(f.b.fcmp_ordered("<", x, f.spread(0.0)), f.spread(0.0), x)


# --- activations ---


def _pointwise(f: Function, function: Callable[[Function, Any], Any]) -> None:
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


# --- attention ---


def _attend(f: Function) -> None:
    """The heads from `first` to before `last`, counted through all rows."""
    q, k, v, out, told, first, last = (f.args[i] for i in (0, 1, 2, 3, 4, 8, 9))
    facts = {name: f.load(f.add(told, 8 * i), I64, 8) for i, name in enumerate(FACTS[:-1])}
    scale = f.load(f.add(told, 8 * FACTS.index("scale")), F32, 4)
    heads, queries, d = facts["heads"], facts["queries"], facts["d"]
    lanes = f.shape.lanes
    weights = f.b.ptrtoint(f.b.alloca(F32, f.add(facts["most"], lanes)), I64)
    with f.loop(first, last) as unit:
        row, head = f.b.sdiv(unit, heads), f.b.srem(unit, heads)
        own = f.add(
            f.times(row, facts["k_row"]),
            f.times(f.b.sdiv(head, facts["group"]), facts["k_head"]),
        )
        keys, values = (f.add(each, f.times(own, 4)) for each in (k, v))
        facts["keys"] = rows.seen_by(f, told, row)
        room = f.b.and_(f.add(facts["keys"], lanes - 1), f.const(-lanes))
        with f.loop(f.const(0), queries) as number:
            at = f.add(
                f.times(row, facts["q_row"]),
                f.times(head, facts["q_head"]),
                f.times(number, facts["q_query"]),
            )
            most = _scores(f, (f.add(q, f.times(at, 4)), keys, values, weights), facts, scale)
            total = _exponents(f, weights, most, facts["keys"], room)
            to = f.add(f.times(f.add(f.times(row, queries), number), heads), head)
            ends = weights, values, f.add(out, f.times(f.times(to, d), 4))
            _weighted_sum(f, ends, total, facts)


def _scores(f: Function, places: tuple[Any, ...], facts: dict[str, Any], scale: Any) -> Any:
    """q . k * scale for every key, some keys at a time, and the largest of them."""
    q, keys, values, weights = places
    apart = f.b.sub(values, keys)
    most = f.variable(F32, ir.Constant(F32, -math.inf))

    def some(first: Any, count: int) -> None:
        step = f.times(facts["k_key"], 4)
        at = [f.add(keys, f.times(step, f.add(first, j))) for j in range(count)]
        totals = [f.variable(f.vector) for _ in at]
        with f.loop(f.const(0), f.times(facts["d"], 4), LINE) as line:
            for key in at:  # its value is needed as soon as all scores are there
                f.ask_for(f.add(key, apart, line))
        with f.loop(f.const(0), facts["d"], f.shape.lanes) as i:
            asked = f.floats(f.add(q, f.times(i, 4)))
            for key, total in zip(at, totals, strict=True):
                numbers = f.floats(f.add(key, f.times(i, 4)))
                f.b.store(f.fma(asked, numbers, f.b.load(total, typ=f.vector)), total)
        for j, total in enumerate(totals):
            score = f.b.fmul(f.total(f.b.load(total, typ=f.vector)), scale)
            f.store(score, f.add(weights, f.times(f.add(first, j), 4)))
            before = f.b.load(most, typ=F32)
            f.b.store(f.b.select(f.b.fcmp_unordered(">", score, before), score, before), most)

    whole = f.b.and_(facts["keys"], f.const(-WIDE))
    with f.loop(f.const(0), whole, WIDE) as j:
        some(j, WIDE)
    with f.loop(whole, facts["keys"]) as j:
        some(j, 1)
    return f.b.load(most, typ=F32)


def _exponents(f: Function, weights: Any, most: Any, keys: Any, room: Any) -> Any:
    """exp(score - largest) in the place of every score, and their sum."""
    with f.loop(keys, room) as j:  # behind the last key
        f.store(ir.Constant(F32, -math.inf), f.add(weights, f.times(j, 4)))
    total, top = f.variable(f.vector), f.everywhere(most)
    with f.loop(f.const(0), room, f.shape.lanes) as j:
        at = f.add(weights, f.times(j, 4))
        score = f.floats(at)
        found = _exp(f, f.b.fsub(score, top))
        empty = f.b.fcmp_ordered("==", score, f.spread(-math.inf))
        found = f.b.select(empty, f.spread(0.0), found)
        f.store(found, at)
        f.b.store(f.b.fadd(f.b.load(total, typ=f.vector), found), total)
    return f.total(f.b.load(total, typ=f.vector))


def _weighted_sum(
    f: Function, places: tuple[Any, Any, Any], total: Any, facts: dict[str, Any]
) -> None:
    """The values by their weights, some vectors of their width at a time."""
    weights, values, out = places
    share = f.everywhere(f.b.fdiv(ir.Constant(F32, 1.0), total))
    lanes, d = f.shape.lanes, facts["d"]

    def columns(first: Any, vectors: int) -> None:
        sums = [f.variable(f.vector) for _ in range(vectors)]
        with f.loop(f.const(0), facts["keys"]) as j:
            weight = f.everywhere(f.load(f.add(weights, f.times(j, 4)), F32, 4))
            value = f.add(values, f.times(f.add(f.times(j, facts["k_key"]), first), 4))
            for i, place in enumerate(sums):
                numbers = f.floats(f.add(value, 4 * lanes * i))
                f.b.store(f.fma(weight, numbers, f.b.load(place, typ=f.vector)), place)
        for i, place in enumerate(sums):
            to = f.add(out, f.times(f.add(first, lanes * i), 4))
            f.store(f.b.fmul(f.b.load(place, typ=f.vector), share), to)

    whole = f.b.sub(d, f.b.srem(d, f.const(WIDE * lanes)))
    with f.loop(f.const(0), whole, WIDE * lanes) as first:
        columns(first, WIDE)
    with f.loop(whole, d, lanes) as first:
        columns(first, 1)
