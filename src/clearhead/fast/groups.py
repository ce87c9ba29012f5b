"""How a group of weights is stored, and becomes vectors of fp32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from clearhead.fast.formats import GROUP
from clearhead.fast.words import F32, I8, I16, I32, Function


def group(f: Function, address: Any, k: Any, which: range | None = None) -> list[Any]:
    """The vectors of the group that starts at weight k of the row at `address`, as they are
    stored, without their scale; all of them, or those that are named.
    """
    lanes, start = f.shape.lanes, f.add(address, f.size(k))
    words = ir.VectorType(I32, lanes)

    def one(number: int) -> Any:
        first = number * lanes
        if f.form == "fp32":
            return f.floats(f.add(start, 4 * first))
        if f.form == "bf16":  # the upper half of an fp32 number
            half = f.b.zext(f.load(f.add(start, 2 * first), ir.VectorType(I16, lanes), 2), words)
            return f.b.bitcast(f.b.shl(half, f.spread(16, I32)), f.vector)
        # int4: a byte holds weight i of the group's first half and weight i of its second
        at = f.add(start, first % (GROUP // 2))
        pair = f.b.zext(f.load(at, ir.VectorType(I8, lanes), 1), words)
        lower = first < GROUP // 2
        own = f.b.and_(pair, f.spread(15, I32)) if lower else f.b.lshr(pair, f.spread(4, I32))
        return f.b.sitofp(own, f.vector)

    return [one(number) for number in which or range(GROUP // lanes)]


def scale(f: Function, scales: Any, index: Any) -> tuple[Any, Any]:
    """(scale, low) of a group of int4: w = scale * q + low."""
    both = f.load(f.add(scales, f.times(index, 4)), I32, 4)  # two numbers of 16 bits
    upper = f.b.and_(both, ir.Constant(I32, 0xFFFF0000))
    lower = f.b.shl(both, ir.Constant(I32, 16))
    return f.everywhere(f.b.bitcast(upper, F32)), f.everywhere(f.b.bitcast(lower, F32))


def scaled(f: Function) -> bool:
    """Whether groups have a scale of their own."""
    return f.form == "int4"


def unpacked(f: Function, w: Any, scales: Any, k: Any, which: range | None = None) -> list[Any]:
    """The same with its scale: the numbers that the weights stand for."""
    vectors = group(f, w, k, which)
    if not scaled(f):
        return vectors
    step, low = scale(f, scales, f.groups(k))
    return [f.fma(v, step, low) for v in vectors]
