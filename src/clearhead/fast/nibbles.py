"""The product of int4: whole numbers of 4 bits times whole numbers of 8.

    x [m, k]   every 32 numbers of a row are rounded to -127 .. 127, with a scale of their own
    W [n, k]   every 32 weights of a row are scale * q + low, q from 0 to 15

    y[i, j] = sum over groups g of  scale_ig (scale_jg (q_ig . q_jg) + low_jg sum q_ig)  + bias_j

As in int8 a lane is an output, and W lies in blocks of 64 rows. Of a group a row has five words of
32 bits, which stand beside those of the next row: its scale and low (the upper and the lower half),
then eight codes each, k0 .. k3 in the lower halves of the bytes and k4 .. k7 in the upper ones:

    group of a block    scales of rows 0 .. 63 | k0 .. k7 of rows 0 .. 63 | k8 .. k15 | ... | .. k31

So a word is two operands of the instruction that multiplies four bytes in each lane: weights are
not turned into fp32, which took longer than the memory does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from clearhead.fast.formats import BESIDE, GROUP, QUAD, WORDS
from clearhead.fast.integers import (
    BESIDES,
    SCALE,
    Lay,
    Tile,
    ask_for,
    dot,
    numbers,
    write_blocks,
)
from clearhead.fast.words import F32, I8, I16, I32, Function, Shape

PLANE = 4 * BESIDE  # bytes of a word of all rows of a block
LOWER = 0x0F0F0F0F
UPPER = -(1 << 16)


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text, with the functions of `integers.write_blocks`."""
    return write_blocks(name, shape, Lay(WORDS * PLANE // GROUP, _sum, _group, scaled=False))


def _sum(f: Function, sum_: Any, scale: Any) -> Any:
    """What the low of a group of W is multiplied with: the sum of the numbers of x."""
    return f.b.fmul(f.b.sitofp(sum_, F32), scale)


def _group(f: Function, tile: Tile, start: Any, later: Any, facts: list[Any]) -> None:
    """32 columns."""
    count = len(tile.totals[0])
    sums: list[list[Any]] = [[None] * count for _ in facts]
    for word in range(1, WORDS):
        both = [_word(f, start, word, j) for j in range(count)]
        for half in range(2):
            fours = [_codes(f, one, half) for one in both]
            quad = 2 * QUAD * (word - 1) + QUAD * half
            for own, x in zip(sums, tile.xs, strict=True):
                at = numbers(f, f.add(x, quad))
                for j, four in enumerate(fours):
                    own[j] = _added(f, own[j], four, at)
    if later is not None:
        for word in range(WORDS):
            ask_for(f, f.add(later, PLANE * word), count)
    scales = [_halves(f, _word(f, start, 0, j)) for j in range(count)]
    for fact, own, totals in zip(facts, sums, tile.totals, strict=True):
        step, sum_ = (f.everywhere(f.load(f.add(fact, at), F32, 4)) for at in (SCALE, BESIDES))
        for (scale, low), one, total in zip(scales, own, totals, strict=True):
            part = f.b.fmul(f.b.sitofp(_finished(f, one), f.vector), step)
            before = f.fma(sum_, low, f.b.load(total, typ=f.vector))
            f.b.store(f.fma(part, scale, before), total)


def _word(f: Function, start: Any, word: int, vector: int) -> Any:
    """A word of each output of a vector."""
    at = f.add(start, PLANE * word + 4 * f.shape.lanes * vector)
    return f.load(at, ir.VectorType(I32, f.shape.lanes), 4)


def _halves(f: Function, both: Any) -> tuple[Any, Any]:
    """(scale, low) of each output."""
    upper = f.b.and_(both, f.spread(UPPER, I32))
    lower = f.b.shl(both, f.spread(16, I32))
    return f.b.bitcast(upper, f.vector), f.b.bitcast(lower, f.vector)


def _codes(f: Function, word: Any, half: int) -> Any:
    """Four codes of each output, a byte each."""
    own = f.b.and_(f.b.lshr(word, f.spread(4 * half, I32)), f.spread(LOWER, I32))
    if f.shape.dot == "vnni":
        return own
    found = f.b.bitcast(own, ir.VectorType(I8, QUAD * f.shape.lanes))
    return found if f.shape.dot == "sign" else f.b.zext(found, ir.VectorType(I32, found.type.count))


def _added(f: Function, sums: Any, codes: Any, x: Any) -> Any:
    """The sums with the products of four codes added; None: there are none yet.

    AVX2 multiplies bytes without a sign by those with one and adds pairs; all that a group adds to
    a half of a lane is 16 * 15 * 127 at the most, which 16 bits hold.
    """
    lanes = f.shape.lanes
    if f.shape.dot != "sign":
        return dot(
            f, ir.Constant(ir.VectorType(I32, lanes), None) if sums is None else sums, codes, x
        )
    halves = ir.VectorType(I16, 2 * lanes)
    pairs = f.outside("llvm.x86.avx2.pmadd.ub.sw", halves, [codes.type, codes.type])
    found = f.b.call(pairs, [codes, x])
    return found if sums is None else f.b.add(sums, found)


def _finished(f: Function, sums: Any) -> Any:
    """Whole numbers of 32 bits, one a lane."""
    if f.shape.dot != "sign":
        return sums
    fours = f.outside(
        "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, f.shape.lanes), [sums.type, sums.type]
    )
    return f.b.call(fours, [sums, ir.Constant(sums.type, [1] * sums.type.count)])
