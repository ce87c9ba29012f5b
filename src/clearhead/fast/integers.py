"""The product of int8, and what it shares with that of int4 (`nibbles`): whole numbers times whole
numbers.

    x [m, k]   every 64 numbers of a row are rounded to -127 .. 127, with a scale of their own
    W [n, k]   stored as 1 .. 255, which is q + 128, with a scale a row of W

    y[i, j] = scale_j  sum over groups g of  scale_ig  (q_ig . w_jg - 128 sum q_ig)  + bias_j

A processor multiplies four bytes in each lane of a vector with four others, and adds them to the
lane, in one instruction (VNNI), or in four (AVX2): so up to some rows of x memory is what is waited
for, and a long prompt is read faster than in fp32. Sums of whole numbers are exact: the result is
the same on every processor that has compiled code.

A lane is an output. So W lies in blocks of 64 rows, in which four weights of a row stand beside
those of the next row, and four numbers of x are spread over all lanes:

    block of W     row 0: k0 k1 k2 k3 | row 1: k0 k1 k2 k3 | ... | row 63 | row 0: k4 k5 k6 k7 | ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast import emit
from clearhead.fast.formats import BESIDE, OFFSET, QUAD, READ, TINY
from clearhead.fast.words import F32, I8, I16, I32, LINE, Function, Shape

AHEAD = 2  # blocks
ZERO = 0x4B400000  # the bits of `Function.whole` for 0
SCALE, BESIDES = 0, 4  # what is known of a group of x: its scale, and what a form makes of its sum


@dataclass(frozen=True)
class Lay:
    """What is a form's own."""

    column: int
    """Bytes of a column of a block, over all its rows."""
    note: Callable[[Function, Any, Any], Any]
    """Of a group of x, from the sum of its whole numbers and its scale."""
    group: Callable[[Function, Tile, Any, Any, list[Any]], None]
    """A group's products added to the outputs, given where its weights are, those that will be
    needed later (None: nothing is to be asked for), and what is known of the group of each row.
    """
    scaled: bool
    """Whether a row of W has a scale."""


@dataclass(frozen=True)
class Tile:
    """Some rows of x and some outputs, at a group."""

    xs: list[Any]
    """Where each row of x is."""
    totals: list[list[Any]]
    """The outputs of each, vectors."""


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text for int8."""
    return write_blocks(name, shape, Lay(BESIDE, _less, _group, scaled=True))


def write_blocks(name: str, shape: Shape, lay: Lay) -> str:
    """LLVM's text, with the functions of `emit`.

    `scratch` has room for `formats.scratch_bytes(m, k)`.
    """
    module = ir.Module(name)
    read = Function(module, f"{name}_read", 4, shape, name)
    read.write(partial(_read, note=lay.note))
    blocks = Function(module, f"{name}_blocks", 10, shape, name)
    blocks.write(partial(_blocks, lay=lay))
    worker = Function(module, f"{name}_worker", 1, shape, name)
    worker.write(lambda f: emit.write_worker(f, blocks.function, BESIDE))
    product = Function(module, name, 10, shape, name)
    with_x = partial(_x_as_whole_numbers, read=read.function)
    product.write(lambda f: emit.write_product(with_x(f), blocks.function, worker.function, BESIDE))
    worker_of_each, each = emit.write_each(module, blocks, BESIDE)
    several = Function(module, f"{name}_several", 10, shape, name)
    several.write(lambda f: emit.write_several(with_x(f), each, worker_of_each))
    return str(module)


def _x_as_whole_numbers(f: Function, read: ir.Function) -> Function:
    """x is read on this thread; the blocks are shared out."""
    x, m, k, scratch = f.args[0], f.args[5], f.args[7], f.args[9]
    f.b.call(read, [x, scratch, m, k])
    f.args[0] = scratch
    return f


# --- x as whole numbers: a row's bytes, then what is known of each group ---


def _sizes(f: Function, k: Any) -> tuple[Any, Any]:
    """Numbers of a row of W or x, and bytes from a row of x to the next."""
    size = READ[f.form]
    width = f.b.and_(f.add(k, size - 1), f.const(-size))
    facts = f.times(f.b.sdiv(width, f.const(size)), 8)
    return width, f.add(width, f.b.and_(f.add(facts, BESIDE - 1), f.const(-BESIDE)))


def _read(f: Function, note: Callable[[Function, Any, Any], Any]) -> None:
    x, scratch, m, k = f.args
    width, row = _sizes(f, k)
    size = READ[f.form]
    with f.loop(f.const(0), m) as i:
        start, to = f.add(x, f.times(f.times(i, k), 4)), f.add(scratch, f.times(i, row))
        with f.loop(k, width) as rest:  # behind its end a row has zeros
            f.b.store(ir.Constant(I8, 0), f.pointer(f.add(to, rest)))
        with f.loop(f.const(0), k, size) as first:
            fact = f.add(to, width, f.times(f.b.sdiv(first, f.const(size)), 8))
            sum_, scale = _read_group(f, (start, to), first, f.least(k, f.add(first, size)))
            f.store(scale, f.add(fact, SCALE))
            f.store(note(f, sum_, scale), f.add(fact, BESIDES))


def _read_group(f: Function, places: tuple[Any, Any], first: Any, last: Any) -> tuple[Any, Any]:
    """The sum and the scale of some numbers; what is no number makes the scale none either."""
    start, to = places
    lanes = f.shape.lanes
    words = ir.VectorType(I32, lanes)
    most = f.variable(f.vector)
    with f.loop(first, last, lanes) as k:
        size = f.call("llvm.fabs", f.vector, f.floats(f.add(start, f.times(k, 4))))
        f.b.store(f.call("llvm.maximum", f.vector, size, f.b.load(most, typ=f.vector)), most)
    name = f"llvm.vector.reduce.fmaximum.v{lanes}f32"
    largest = f.b.call(f.outside(name, F32, [f.vector]), [f.b.load(most, typ=f.vector)])
    zero = f.b.fcmp_ordered("<", largest, ir.Constant(F32, TINY))
    steps = f.b.fdiv(ir.Constant(F32, 127.0), largest)
    steps = f.everywhere(f.b.select(zero, ir.Constant(F32, 0.0), steps))
    total = f.variable(words)
    with f.loop(first, last, lanes) as k:
        numbers = f.b.fmul(f.floats(f.add(start, f.times(k, 4))), steps)
        _, bits = f.whole(numbers)
        less = f.b.sub(bits, f.spread(ZERO, I32))
        f.b.store(f.b.add(less, f.b.load(total, typ=words)), total)
        small = f.b.trunc(bits, ir.VectorType(I8, lanes))
        f.b.store(small, f.pointer(f.add(to, k)), align=1)
    name = f"llvm.vector.reduce.add.v{lanes}i32"
    sum_ = f.b.call(f.outside(name, I32, [words]), [f.b.load(total, typ=words)])
    # Where the largest is infinite its steps are none, and the scale must not be a number either.
    none = f.b.fmul(largest, ir.Constant(F32, 0.0))
    return sum_, f.b.fadd(f.b.fdiv(largest, ir.Constant(F32, 127.0)), none)


def _less(f: Function, sum_: Any, scale: Any) -> Any:
    """What sums of products begin with, whose weights are 128 too large."""
    return f.b.mul(sum_, ir.Constant(I32, -OFFSET))


# --- sums of products, as processors have them: a lane is an output ---


def _rows(shape: Shape) -> int:
    """Rows of x in a tile: so many that the sums, and what they are made of, fit the registers."""
    return 4 if shape.dot == "sign" else 6 if shape.lanes == 16 else 2


def _vectors(shape: Shape, rows: int) -> int:
    """Vectors of outputs in a tile of so many rows."""
    few = {1: 8, 2: 4}.get(rows, 2)
    return {"vnni": 4, "sign": few, "plain": 2}[shape.dot]


def _weights(f: Function, start: Any, number: int) -> Any:
    """Four weights for each output of one vector of sums."""
    lanes = f.shape.lanes
    at = f.add(start, QUAD * lanes * number)
    if f.shape.dot == "vnni":
        return f.load(at, ir.VectorType(I32, lanes), 1)
    found = f.load(at, ir.VectorType(I8, QUAD * lanes), 1)
    if f.shape.dot == "plain":
        return f.b.zext(found, ir.VectorType(I32, QUAD * lanes))
    own = f.b.xor(found, ir.Constant(found.type, [OFFSET - 256] * (QUAD * lanes)))
    call = f.outside(f"llvm.abs.v{QUAD * lanes}i8", own.type, [own.type, ir.IntType(1)])
    return own, f.b.call(call, [own, ir.Constant(ir.IntType(1), 0)])


def numbers(f: Function, address: Any) -> Any:
    """Four numbers of x, as often as there are outputs in a vector."""
    lanes = f.shape.lanes
    if f.shape.dot == "plain":
        found = f.b.sext(f.load(address, ir.VectorType(I8, QUAD), 4), ir.VectorType(I32, QUAD))
        return f.shuffle(found, found, [0, 1, 2, 3] * lanes)
    four = f.spread_out(f.load(address, I32, 4), ir.VectorType(I32, lanes))
    return four if f.shape.dot == "vnni" else f.b.bitcast(four, ir.VectorType(I8, QUAD * lanes))


def dot(f: Function, sums: Any, w: Any, x: Any) -> Any:
    """The sums with their products added."""
    kind = sums.type
    if f.shape.dot == "vnni":
        name = f"llvm.x86.avx512.vpdpbusd.{32 * f.shape.lanes}"
        return f.b.call(f.outside(name, kind, [kind, kind, kind]), [sums, w, x])
    if f.shape.dot == "plain":
        return f.b.add(sums, _paired(f, _paired(f, f.b.mul(w, x))))
    # w x is |w| times x with the sign of w: AVX2 multiplies bytes without a sign by those with one.
    # Two products come to 2 * 127 * 127 at the most, which 16 bits hold.
    own, size = w
    halves = ir.VectorType(I16, 2 * f.shape.lanes)
    sign = f.outside("llvm.x86.avx2.psign.b", own.type, [own.type, own.type])
    pairs = f.outside("llvm.x86.avx2.pmadd.ub.sw", halves, [own.type, own.type])
    fours = f.outside("llvm.x86.avx2.pmadd.wd", kind, [halves, halves])
    two = f.b.call(pairs, [size, f.b.call(sign, [x, own])])
    return f.b.add(sums, f.b.call(fours, [two, ir.Constant(halves, [1] * halves.count)]))


def _paired(f: Function, vector: Any) -> Any:
    """Neighbours added."""
    even, odd = (f.shuffle(vector, vector, list(range(i, vector.type.count, 2))) for i in (0, 1))
    return f.b.add(even, odd)


def _group(f: Function, tile: Tile, start: Any, later: Any, facts: list[Any]) -> None:
    """64 columns of int8."""
    kind, count = ir.VectorType(I32, f.shape.lanes), len(tile.totals[0])
    less = f.shape.dot != "sign"  # who has signs has the weights themselves
    begins = [
        f.spread_out(f.load(f.add(fact, BESIDES), I32, 4), kind) if less else None for fact in facts
    ]
    sums = [[f.variable(kind, begin) for _ in range(count)] for begin in begins]
    with f.loop(f.const(0), f.const(READ[f.form]), QUAD) as k:
        at = f.times(k, BESIDE)
        ws = [_weights(f, f.add(start, at), j) for j in range(count)]
        if later is not None:
            ask_for(f, f.add(later, at), count)
        for own, x in zip(sums, tile.xs, strict=True):
            four = numbers(f, f.add(x, k))
            for one, weights in zip(own, ws, strict=True):
                f.b.store(dot(f, f.b.load(one, typ=kind), weights, four), one)
    for fact, own, found in zip(facts, sums, tile.totals, strict=True):
        scale = f.everywhere(f.load(f.add(fact, SCALE), F32, 4))
        for total, one in zip(found, own, strict=True):
            part = f.b.sitofp(f.b.load(one, typ=kind), f.vector)
            f.b.store(f.fma(part, scale, f.b.load(total, typ=f.vector)), total)


def ask_for(f: Function, start: Any, vectors: int) -> None:
    """Let the memory fetch so many vectors of weights."""
    for line in range(0, vectors * f.shape.lanes * QUAD, LINE):
        f.ask_for(f.add(start, line))


# --- blocks ---


def _blocks(f: Function, lay: Lay) -> None:
    """The product for the blocks from `first` to before `last`; x is the scratch."""
    _, w, _, _, _, m, _, k, first, last = f.args
    width, row = _sizes(f, k)
    rows = _rows(f.shape)
    left = f.b.srem(m, f.const(rows))
    whole = f.b.sub(m, left)
    with f.loop(first, last) as number:
        block = f.add(w, f.times(number, f.times(width, lay.column)))
        _all_rows(f, lay, (rows, whole, left), (f.times(number, BESIDE), block, width, row))


def _all_rows(f: Function, lay: Lay, m: tuple[int, Any, Any], place: tuple[Any, ...]) -> None:
    """All rows of x; the first tiles ask for weights of a later block."""
    rows, whole, left = m

    def rest(at: Any, ahead: bool) -> None:
        cases = {some: partial(_tiles, f, lay, some, at, place, ahead) for some in range(1, rows)}
        f.choose(left, cases, lambda: None)

    with f.b.if_else(f.b.icmp_signed(">", whole, f.const(0))) as (many, few):
        with many:
            _tiles(f, lay, rows, f.const(0), place, True)
            with f.loop(f.const(rows), whole, rows) as i:
                _tiles(f, lay, rows, i, place, False)
            rest(whole, False)
        with few:
            rest(f.const(0), True)


def _tiles(f: Function, lay: Lay, rows: int, m: Any, place: tuple[Any, ...], ahead: bool) -> None:
    """All outputs of a block, of `rows` rows."""
    column, block, width, row = place
    together = _vectors(f.shape, rows) * f.shape.lanes
    with f.loop(f.const(0), f.const(BESIDE), together) as start:
        at = f.add(block, f.times(start, QUAD))
        _tile(f, lay, rows, m, (f.add(column, start), at, width, row), ahead)


def _tile(f: Function, lay: Lay, rows: int, m: Any, place: tuple[Any, ...], ahead: bool) -> None:
    """Some outputs of `rows` rows."""
    column, w, width, row = place
    xs_at = [f.add(f.args[0], f.times(f.add(m, i), row)) for i in range(rows)]
    count, size = _vectors(f.shape, rows), READ[f.form]
    totals = [[f.variable(f.vector) for _ in range(count)] for _ in range(rows)]
    with f.loop(f.const(0), width, size) as first:
        facts = [f.add(at, width, f.times(f.b.sdiv(first, f.const(size)), 8)) for at in xs_at]
        start = f.add(w, f.times(first, lay.column))
        far = f.shape.ahead or f.times(width, lay.column * AHEAD)
        later = f.add(start, far) if ahead else None
        lay.group(f, Tile([f.add(at, first) for at in xs_at], totals), start, later, facts)
    full = f.b.icmp_signed("<=", f.add(column, count * f.shape.lanes), f.args[6])
    with f.b.if_else(full) as (inside, over):
        with inside:
            _write(f, lay, m, totals, column)
        with over:
            _write_some(f, lay, m, totals, column)


def _write(f: Function, lay: Lay, m: Any, totals: list[list[Any]], column: Any) -> None:
    """Outputs times their scales, and their biases."""
    _, _, scales, bias, out, _, n = f.args[:7]
    for j in range(len(totals[0])):
        at = f.times(f.add(column, j * f.shape.lanes), 4)
        start = f.floats(f.add(bias, at))
        scale = f.floats(f.add(scales, at)) if lay.scaled else f.spread(1.0)
        for i, row in enumerate(totals):
            to = f.add(out, f.times(f.times(f.add(m, i), n), 4), at)
            f.store(f.fma(f.b.load(row[j], typ=f.vector), scale, start), to)


def _write_some(f: Function, lay: Lay, m: Any, totals: list[list[Any]], column: Any) -> None:
    """The same one by one, for the last rows of W, behind which is nothing to write to."""
    _, _, scales, bias, out, _, n = f.args[:7]
    lanes = f.shape.lanes
    for i, row in enumerate(totals):
        for j, total in enumerate(row):
            vector = f.b.load(total, typ=f.vector)
            first = f.add(column, j * lanes)
            for lane in range(lanes):
                one = f.add(first, lane)
                with f.b.if_then(f.b.icmp_signed("<", one, n)):
                    at = f.times(one, 4)
                    start, scale = f.load(f.add(bias, at), F32, 4), ir.Constant(F32, 1.0)
                    if lay.scaled:
                        scale = f.load(f.add(scales, at), F32, 4)
                    found = f.b.extract_element(vector, ir.Constant(I32, lane))
                    to = f.add(out, f.times(f.times(f.add(m, i), n), 4), at)
                    f.store(f.one_fma(found, scale, start), to)
