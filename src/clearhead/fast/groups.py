"""How a group of weights is stored, and becomes vectors of fp32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from clearhead.fast.formats import GROUP
from clearhead.fast.words import I16, I32, Function


def group(f: Function, address: Any, k: Any, which: range | None = None) -> list[Any]:
    """The vectors of the group that starts at weight k of the row at `address`; all of them, or
    those that are named.
    """
    lanes, start = f.shape.lanes, f.add(address, f.size(k))

    def one(number: int) -> Any:
        first = number * lanes
        if f.form == "fp32":
            return f.floats(f.add(start, 4 * first))
        # bf16: the upper half of an fp32 number
        half = f.load(f.add(start, 2 * first), ir.VectorType(I16, lanes), 2)
        word = f.b.zext(half, ir.VectorType(I32, lanes))
        return f.b.bitcast(f.b.shl(word, f.spread(16, I32)), f.vector)

    return [one(number) for number in which or range(GROUP // lanes)]
