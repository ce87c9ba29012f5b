"""The product of int8: whole numbers times whole numbers.

    x [m, k]   every 256 numbers of a row are rounded to -127 .. 127, with a scale of their own
    W [n, k]   stored as -127 .. 127, a scale a row

    y[i, j] = scale_j  sum over groups g of  scale_ig  (q_ig . w_jg)  + bias_j

A processor multiplies and adds four bytes in each lane of a vector at once (VNNI), or two (AVX2):
a quarter of the instructions that fp32 takes, so that up to some dozens of rows of x memory is what
is waited for, and a long prompt is read several times as fast. Sums of whole numbers are exact: the
result is the same on every processor.

VNNI takes one side without sign. There W gets 128 added, which is a flipped bit, and what that adds
to a sum, 128 times the sum of x, is taken away before it starts.

A thread takes strips of 4 rows of W, as in `emit`, and all rows of x pass over a strip.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from clearhead.fast import emit
from clearhead.fast.emit import STRIP
from clearhead.fast.formats import READ, WIDTH
from clearhead.fast.words import F32, I8, I16, I32, Function, Shape

AHEAD = 2  # strips
SCALE, LESS = 0, 4  # a group of x: its scale, and what its sums start with


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text, with one function: <name>(x, w, scales, bias, out, m, n, k, threads, scratch).

    `scratch` has room for `formats.scratch_bytes(m, k)`.
    """
    module = ir.Module(name)
    read = Function(module, f"{name}_read", 4, shape, name)
    read.write(_read)
    strips = Function(module, f"{name}_strips", 10, shape, name)
    strips.write(_strips)
    worker = Function(module, f"{name}_worker", 1, shape, name)
    worker.write(lambda f: emit.write_worker(f, strips.function))
    product = Function(module, name, 10, shape, name)
    product.write(lambda f: _product(f, read.function, strips.function, worker.function))
    return str(module)


def _product(f: Function, read: ir.Function, strips: ir.Function, worker: ir.Function) -> None:
    """x is read on this thread; the strips are shared out."""
    x, m, k, scratch = f.args[0], f.args[5], f.args[7], f.args[9]
    f.b.call(read, [x, scratch, m, k])
    f.args[0] = scratch
    emit.write_product(f, strips, worker)


# --- x as whole numbers: a row's bytes, then the scale and the correction of each group ---


def _sizes(f: Function, k: Any) -> tuple[Any, Any]:
    """Bytes of a row of W or x, and from a row of x to the next."""
    width = f.b.and_(f.add(k, WIDTH - 1), f.const(-WIDTH))
    groups = f.b.sdiv(f.add(width, READ - 1), f.const(READ))
    return width, f.add(width, f.times(groups, 8))


def _read(f: Function) -> None:
    x, scratch, m, k = f.args
    width, row = _sizes(f, k)
    with f.loop(f.const(0), m) as i:
        start, to = f.add(x, f.times(f.times(i, k), 4)), f.add(scratch, f.times(i, row))
        with f.loop(k, width) as rest:  # behind its end a row has zeros
            f.b.store(ir.Constant(I8, 0), f.pointer(f.add(to, rest)))
        with f.loop(f.const(0), k, READ) as first:
            _read_group(f, (start, to, f.add(to, width)), first, f.least(k, f.add(first, READ)))


def _read_group(f: Function, places: tuple[Any, Any, Any], first: Any, last: Any) -> None:
    """Up to 256 numbers; what is no number makes the scale none either."""
    start, to, facts = places
    lanes = f.shape.lanes
    words = ir.VectorType(I32, lanes)
    most = f.variable(f.vector)
    with f.loop(first, last, lanes) as k:
        size = f.call("llvm.fabs", f.vector, f.floats(f.add(start, f.times(k, 4))))
        f.b.store(f.call("llvm.maximum", f.vector, size, f.b.load(most, typ=f.vector)), most)
    name = f"llvm.vector.reduce.fmaximum.v{lanes}f32"
    largest = f.b.call(f.outside(name, F32, [f.vector]), [f.b.load(most, typ=f.vector)])
    zero = f.b.fcmp_ordered("==", largest, ir.Constant(F32, 0.0))
    steps = f.b.fdiv(ir.Constant(F32, 127.0), largest)
    steps = f.everywhere(f.b.select(zero, ir.Constant(F32, 0.0), steps))
    total = f.variable(words)
    with f.loop(first, last, lanes) as k:
        numbers = f.b.fmul(f.floats(f.add(start, f.times(k, 4))), steps)
        whole = f.call("llvm.rint", f.vector, numbers)
        name = f"llvm.fptosi.sat.v{lanes}i32.v{lanes}f32"
        whole = f.b.call(f.outside(name, words, [f.vector]), [whole])
        f.b.store(f.b.add(whole, f.b.load(total, typ=words)), total)
        small = f.b.trunc(whole, ir.VectorType(I8, lanes))
        f.b.store(small, f.pointer(f.add(to, k)), align=1)
    name = f"llvm.vector.reduce.add.v{lanes}i32"
    sum_ = f.b.call(f.outside(name, I32, [words]), [f.b.load(total, typ=words)])
    fact = f.add(facts, f.times(f.b.sdiv(first, f.const(READ)), 8))
    f.store(f.b.fdiv(largest, ir.Constant(F32, 127.0)), f.add(fact, SCALE))
    f.store(f.b.mul(sum_, ir.Constant(I32, -_offset(f.shape))), f.add(fact, LESS))


# --- sums of products, as processors have them ---


def _offset(shape: Shape) -> int:
    """What is added to weights."""
    return 128 if shape.dot.startswith("vnni") else 0


def _step(shape: Shape) -> int:
    """Weights that are multiplied at once."""
    return {"vnni": 4, "madd": 2, "plain": 1}[shape.dot] * shape.lanes


def _weights(f: Function, address: Any) -> Any:
    """Some weights of a row, as `_dot` takes them."""
    found = f.load(address, ir.VectorType(I8, _step(f.shape)), 1)
    if f.shape.dot == "vnni":
        flip = ir.Constant(found.type, [-128] * found.type.count)
        return f.b.bitcast(f.b.xor(found, flip), ir.VectorType(I32, f.shape.lanes))
    return f.b.sext(found, _wide(f.shape))


def _numbers(f: Function, address: Any) -> Any:
    """As many of x."""
    found = f.load(address, ir.VectorType(I8, _step(f.shape)), 1)
    if f.shape.dot == "vnni":
        return f.b.bitcast(found, ir.VectorType(I32, f.shape.lanes))
    return f.b.sext(found, _wide(f.shape))


def _wide(shape: Shape) -> ir.Type:
    return ir.VectorType(I16 if shape.dot == "madd" else I32, _step(shape))


def _dot(f: Function, sums: Any, w: Any, x: Any) -> Any:
    """Every lane of the sums with the products of its bytes added."""
    lanes, kind = f.shape.lanes, ir.VectorType(I32, f.shape.lanes)
    if f.shape.dot == "vnni":
        call = f.outside(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", kind, [kind, kind, kind])
        return f.b.call(call, [sums, w, x])
    if f.shape.dot == "madd":
        name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return f.b.add(sums, f.b.call(f.outside(name, kind, [w.type, w.type]), [w, x]))
    return f.b.add(sums, f.b.mul(w, x))


# --- strips ---


def _strips(f: Function) -> None:
    """The product for the strips from `first` to before `last`; x is the scratch."""
    _, w, _, _, _, m, n, k, first, last = f.args
    width, row = _sizes(f, k)
    rows = f.shape.rows
    left = f.b.srem(m, f.const(rows))
    whole = f.b.sub(m, left)
    with f.loop(first, last) as number:
        # The last strip may overlap the one before: what both write is the same.
        start, end = f.times(number, STRIP), f.add(n, -STRIP)
        start = f.least(start, end)
        strip = start, f.add(w, f.times(start, width)), width, row
        with f.loop(f.const(0), whole, rows) as i:
            _tile(f, rows, i, strip)
        cases = {rest: partial(_tile, f, rest, whole, strip) for rest in range(1, rows)}
        f.choose(left, cases, lambda: None)


def _tile(f: Function, rows: int, m: Any, strip: tuple[Any, Any, Any, Any]) -> None:
    """out[m + i, n + j] for `rows` i and the 4 j of a strip."""
    n, w, width, row = strip
    x, scales, bias, out, columns = (f.args[i] for i in (0, 2, 3, 4, 6))
    kind, step = ir.VectorType(I32, f.shape.lanes), _step(f.shape)
    xs_at = [f.add(x, f.times(f.add(m, i), row)) for i in range(rows)]
    ws_at = [f.add(w, f.times(width, j)) for j in range(STRIP)]
    totals = [[f.variable(f.vector) for _ in range(STRIP)] for _ in range(rows)]
    with f.loop(f.const(0), width, READ) as first:
        fact = f.add(width, f.times(f.b.sdiv(first, f.const(READ)), 8))
        sums = []
        for at in xs_at:
            less = f.load(f.add(at, fact, LESS), I32, 4)
            begin = f.b.insert_element(ir.Constant(kind, None), less, ir.Constant(I32, 0))
            sums.append([f.variable(kind, begin) for _ in range(STRIP)])
        with f.loop(first, f.least(width, f.add(first, READ)), step) as k:
            ws = [_weights(f, f.add(at, k)) for at in ws_at]
            for at in ws_at:
                f.ask_for(f.add(at, k, f.times(width, STRIP * AHEAD)))
            for i, at in enumerate(xs_at):
                numbers = _numbers(f, f.add(at, k))
                for j in range(STRIP):
                    found = _dot(f, f.b.load(sums[i][j], typ=kind), ws[j], numbers)
                    f.b.store(found, sums[i][j])
        for i, at in enumerate(xs_at):
            scale = f.everywhere(f.load(f.add(at, fact, SCALE), F32, 4))
            for j in range(STRIP):
                part = f.b.sitofp(f.b.load(sums[i][j], typ=kind), f.vector)
                before = f.b.load(totals[i][j], typ=f.vector)
                f.b.store(f.fma(part, scale, before), totals[i][j])
    for j in range(STRIP):
        column = f.add(n, j)
        scale, start = (f.load(f.add(at, f.times(column, 4)), F32, 4) for at in (scales, bias))
        for i in range(rows):
            found = f.b.fmul(f.total(f.b.load(totals[i][j], typ=f.vector)), scale)
            place = f.add(f.times(f.add(m, i), columns), column)
            f.store(f.b.fadd(found, start), f.add(out, f.times(place, 4)))
