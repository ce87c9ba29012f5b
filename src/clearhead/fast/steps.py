"""What stands between the products, as vector instructions: attention and activations.

A step of decoding asks few queries of many keys, and PyTorch's fused attention is made for many
queries; its tanh takes five times as long as it must.

    attend                          softmax(q k^T scale) v, a row sees its first keys
    gelu_tanh, quick_gelu, silu     x / (1 + exp(-u)), u a polynomial of x
    gelu, relu                      for `calls`; elsewhere PyTorch's own are as quick
    sequences                       attention within whole sequences: see the file of that name
    peaks                           the largest of a row and of its parts, and its sum of exp
    lows, above                     which tokens may be the best: see `bounds`
    run_each                        several lists of calls at once, a thread each

The slow twins are `Kernel.forward` and `ACTIVATIONS`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast import emit, rows
from clearhead.fast.bends import BENDS, CHUNK, exponents, pointwise, write_peaks
from clearhead.fast.bounds import write_above, write_lows
from clearhead.fast.compile import FACTS
from clearhead.fast.sequences import write_sequences
from clearhead.fast.words import F32, I64, LINE, Function, Shape

WIDE = 4  # keys, and vectors of a value, that are worked on at a time


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text, with attention, the activations and those of `rows`.

    <name>_attend(q, k, v, out, facts, 0, rows * heads, 0, threads, 0)
    <name>_sequences(q, k, v, out, facts, starts, sequences * heads, 0, threads, 0)
    <name>_silu(x, 0, 0, 0, out, 0, count, 0, threads, 0)
    <name>_peaks(x, tops, 0, 0, sums, width, rows, part, threads, 0)
    <name>_lows(logits, bounds, reaches, 0, out, width, chunks, rows, threads, 0)
    <name>_above(logits, bounds, reaches, least, out, width, chunks, rows, threads, 0)
    <name>_run_each(lists, 0, 0, 0, 0, 0, count, 0, threads, 0)
    and those of `rows`, whose arguments stand there
    """
    module = ir.Module(name)
    parts: emit.Parts = {
        "attend": (1, _attend),
        "sequences": (1, write_sequences),
        "run_each": (1, rows.run_each),
        "peaks": (1, write_peaks),
        "lows": (1, write_lows),
        "above": (1, write_above),
        **rows.BODIES,
    }
    for own, bend in BENDS.items():
        parts[own] = CHUNK, partial(pointwise, function=bend)
    emit.write_parts(module, shape, parts)
    Function(module, f"{name}_run", rows.ARGUMENTS, shape, "fp32").write(rows.run)
    return str(module)


# --- attention of few queries ---


def _attend(f: Function) -> None:
    """The heads from `first` to before `last`, counted through all rows."""
    q, k, v, out, told, first, last = (f.args[i] for i in (0, 1, 2, 3, 4, 8, 9))
    facts = {name: f.load(f.add(told, 8 * i), I64, 8) for i, name in enumerate(FACTS[:-1])}
    scale = f.load(f.add(told, 8 * FACTS.index("scale")), F32, 4)
    heads, queries, d = facts["heads"], facts["queries"], facts["d"]
    weights = f.b.ptrtoint(f.b.alloca(F32, f.add(facts["most"], f.shape.lanes)), I64)
    with f.loop(first, last) as unit:
        row, head = f.b.sdiv(unit, heads), f.b.srem(unit, heads)
        own = f.times(f.times(f.b.sdiv(head, facts["group"]), facts["k_head"]), 4)
        keys, values = f.add(k, own), f.add(v, own)
        facts["table"] = f.add(facts["lies"], f.times(row, facts["lies_row"]))
        facts["keys"] = rows.seen_by(f, told, row)
        with f.loop(f.const(0), queries) as number:
            at = f.add(
                f.times(row, facts["q_row"]),
                f.times(head, facts["q_head"]),
                f.times(number, facts["q_query"]),
            )
            most = _scores(f, (f.add(q, f.times(at, 4)), keys, values, weights), facts, scale)
            (share,) = exponents(f, [weights], [f.everywhere(most)], facts["keys"])
            to = f.add(f.times(f.add(f.times(row, queries), number), heads), head)
            ends = weights, values, f.add(out, f.times(f.times(to, d), 4))
            _weighted_sum(f, ends, share, facts)


def _scores(f: Function, places: tuple[Any, ...], facts: dict[str, Any], scale: Any) -> Any:
    """q . k * scale for every key, some keys at a time, and the largest of them."""
    q, keys, values, weights = places
    apart = f.b.sub(values, keys)
    most = f.variable(F32, ir.Constant(F32, -math.inf))

    def some(first: Any, count: int) -> None:
        at = [f.add(keys, rows.key_place(f, facts, f.add(first, j))) for j in range(count)]
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


def _weighted_sum(
    f: Function, places: tuple[Any, Any, Any], share: Any, facts: dict[str, Any]
) -> None:
    """The values by their weights, some vectors of their width at a time."""
    weights, values, out = places
    lanes, d = f.shape.lanes, facts["d"]

    def columns(first: Any, vectors: int) -> None:
        sums = [f.variable(f.vector) for _ in range(vectors)]
        with f.loop(f.const(0), facts["keys"]) as j:
            weight = f.everywhere(f.load(f.add(weights, f.times(j, 4)), F32, 4))
            value = f.add(values, rows.key_place(f, facts, j), f.times(first, 4))
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
