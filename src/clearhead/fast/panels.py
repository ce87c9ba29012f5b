"""The same products for many rows of x: bound by arithmetic, not by memory.

    W [n, k]   a panel: 2 vectors of rows, turned      x [m, k]   a tile of some rows
    k0: row 0 1 2 ... 15                               row 0: k0 k1 ...
    k1: row 0 1 2 ... 15                               row 1: k0 k1 ...      sums: rows x 2 vectors

A number of x is spread over the lanes and multiplied with the weights of as many outputs, so that
nothing is added across lanes, and each load is used several times. Weights lie in rows, as the
network has them: a panel is turned (and unpacked) into a buffer in the nearest caches, once for
some dozens of rows of x, while the memory fetches the next one. To lay them so once and for all
would be 5 % quicker, and take their memory again. Tiles of x are turned as well, once for all
panels of a thread; it needs some 400 KB of stack (OMP_STACKSIZE, if that was made smaller).

Differs from a library's product: a row of x goes through the same additions however many rows there
are, from `formats.MANY` on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from clearhead.fast.formats import GROUP, STRIP
from clearhead.fast.groups import group
from clearhead.fast.words import F32, I64, LINE, Function

VECTORS = 2  # of outputs in a panel
DEPTH = 512  # weights of a row that are turned at a time
HEIGHT = 144  # rows of x, at most, that pass over a panel: they stay in the second cache
SQUARE = 8  # rows and columns that are turned at a time
OFTEN = 2  # numbers of a row of x between two lines of memory that are asked for


@dataclass(frozen=True)
class _Panel:
    """Some columns of the output, and a part of the depth."""

    turned: Any
    """Where its weights are, [depth, columns]."""
    laid: Any
    """Where the tiles of x are."""
    depth: Any
    """How long it is."""
    start: Any
    """Where the outputs of row 0 of x are, or what stands for them."""
    row: Any
    """Bytes from a row of outputs to the next."""
    bias: Any
    """What sums begin with."""
    later: Any
    """Where the weights of the next one are."""


def write_panels(f: Function) -> None:
    """The product for the strips from `first` to before `last`."""
    _, w, _, bias, out, m, n, k, first, last = f.args
    assert HEIGHT % f.shape.tile == 0  # or the tiles of x would not have room
    columns = VECTORS * f.shape.lanes
    turned, beside, begin, laid = (
        room(f, count)
        for count in (DEPTH * columns, HEIGHT * columns, columns, HEIGHT * DEPTH + SQUARE)
    )
    left = f.times(first, STRIP)
    right = f.least(f.times(last, STRIP), n)
    floors = f.b.sdiv(f.add(m, HEIGHT - 1), f.const(HEIGHT))
    with f.loop(f.const(0), floors) as floor, f.loop(f.const(0), k, DEPTH) as deep:
        top, end = (f.b.sdiv(f.times(m, f.add(floor, i)), floors) for i in (0, 1))
        rows = f.b.sub(end, top)
        depth = f.least(f.b.sub(k, deep), f.const(DEPTH))
        _lay(f, f.add(deep, f.times(top, k)), rows, depth, laid)
        with f.loop(left, right, columns) as column:
            count = f.least(f.b.sub(right, column), f.const(columns))
            at = f.add(f.times(column, k), deep)
            _turn(f, f.add(w, f.size(at)), count, depth, turned)
            with f.loop(f.const(0), count) as i:
                one = f.load(f.add(bias, f.times(f.add(column, i), 4)), F32, 4)
                f.store(one, f.add(begin, f.times(i, 4)))
            # A panel that is not full has its sums beside, and gives what it has at the end.
            full = f.b.icmp_signed("==", count, f.const(columns))
            to = f.add(out, f.times(f.add(f.times(top, n), column), 4))
            place = f.b.select(full, to, beside)
            step = f.times(f.b.select(full, n, f.const(columns)), 4)
            later = f.add(w, f.size(f.add(at, f.times(k, columns))))
            panel = _Panel(turned, laid, depth, place, step, begin, later)
            _tiles(f, panel, rows, f.b.icmp_signed("==", deep, f.const(0)))
            done = f.b.icmp_signed(">=", f.add(deep, DEPTH), k)
            with f.b.if_then(f.b.and_(done, f.b.not_(full))):
                _give(f, beside, to, (rows, count, columns))


def room(f: Function, count: Any) -> Any:
    """So many numbers on the stack, at the start of a line."""
    place = f.b.alloca(F32, f.const(count) if isinstance(count, int) else count)
    place.align = LINE
    return f.b.ptrtoint(place, I64)


def _give(f: Function, beside: Any, out: Any, sizes: tuple[Any, Any, int]) -> None:
    """The outputs of a panel that is not full to their places."""
    rows, count, columns = sizes
    width = f.args[6]
    with f.loop(f.const(0), rows) as i, f.loop(f.const(0), count) as j:
        one = f.load(f.add(beside, f.times(f.add(f.times(i, columns), j), 4)), F32, 4)
        f.store(one, f.add(out, f.times(f.add(f.times(i, width), j), 4)))


# --- panels ---


def _turn(f: Function, w: Any, count: Any, depth: Any, to: Any) -> None:
    """Rows of W as columns in fp32; where rows are missing the last one stands again."""
    row, columns, last = f.args[7], VECTORS * f.shape.lanes, f.add(count, -1)
    starts = [f.times(row, f.least(f.const(i), last)) for i in range(columns)]
    rows = [f.add(w, f.size(i)) for i in starts]
    eights = f.in_vectors_of(SQUARE)
    # Line by line of a few rows: the nearest cache has no places for those of all.
    with f.loop(f.const(0), depth, GROUP) as k:
        for first, part in product(range(0, columns, SQUARE), range(GROUP // SQUARE)):
            which = range(part, part + 1)
            square = [group(eights, one, k, which)[0] for one in rows[first : first + SQUARE]]
            for i, vector in enumerate(transposed(f, square)):
                place = f.times(f.add(k, SQUARE * part + i), columns)
                f.store(vector, f.add(to, f.times(f.add(place, first), 4)))


def turn_tokens(f: Function, tokens: tuple[Any, Any], count: Any, d: Any, to: Any) -> None:
    """The keys or values of a head, given by where the first is and how many bytes behind it the
    next, as columns, in panels; behind the last one it stands again.
    """
    start, apart = tokens
    columns, last = VECTORS * f.shape.lanes, f.add(count, -1)
    eights = f.in_vectors_of(SQUARE)
    with f.loop(f.const(0), count, columns) as first:
        panel = f.add(to, f.times(f.times(first, d), 4))
        rows = [
            f.add(start, f.times(f.least(f.add(first, i), last), apart)) for i in range(columns)
        ]
        with f.loop(f.const(0), d, SQUARE) as at:
            for left in range(0, columns, SQUARE):
                own = rows[left : left + SQUARE]
                square = [eights.floats(f.add(row, f.times(at, 4))) for row in own]
                for i, vector in enumerate(transposed(f, square)):
                    place = f.add(f.times(f.add(at, i), columns), left)
                    f.store(vector, f.add(panel, f.times(place, 4)))


def transposed(f: Function, rows: list[Any]) -> list[Any]:
    """Eight vectors of eight, columns as rows: pairs change places, then fours, then halves."""
    for size in (1, 2, 4):
        low = [i for i in range(SQUARE) if not i & size]
        for i in low:
            first, second = rows[i], rows[i + size]
            # lane j of `first` stays where j has no `size` in it, else it goes to `second`
            near = [j if not j & size else SQUARE + j - size for j in range(SQUARE)]
            far = [j + size if not j & size else SQUARE + j for j in range(SQUARE)]
            rows[i], rows[i + size] = f.shuffle(first, second, near), f.shuffle(first, second, far)
    return rows


# --- tiles ---


def _lay(f: Function, first: Any, rows: Any, depth: Any, to: Any) -> None:
    """A part of the length of some rows of x, from this number of it on, as tiles: number by
    number, those of all rows of a tile beside each other. (Rows stand some power of 2 apart as a
    rule, where the nearest cache has few places for them.)
    """
    x, k, most = f.args[0], f.args[7], f.shape.tile
    eights, lefts = f.in_vectors_of(SQUARE), range(0, most, SQUARE)
    with f.loop(f.const(0), _count_tiles(f, rows)) as number:
        low, high = _tile_ends(f, rows, number)
        tile, last = f.add(to, f.times(number, 4 * most * DEPTH)), f.add(high, -1)
        starts = [
            f.add(x, f.times(f.add(first, f.times(f.least(f.add(low, i), last), k)), 4))
            for i in range(lefts[-1] + SQUARE)
        ]
        with f.loop(f.const(0), depth, SQUARE) as at:
            squares = [
                transposed(f, [eights.floats(f.add(row, f.times(at, 4))) for row in own])
                for own in (starts[left : left + SQUARE] for left in lefts)
            ]
            # What a vector has beyond its tile is written over by the next one.
            for i, left in product(range(SQUARE), lefts):
                place = f.add(f.times(f.add(at, i), most), left)
                f.store(squares[left // SQUARE][i], f.add(tile, f.times(place, 4)))


def _count_tiles(f: Function, rows: Any) -> Any:
    return f.b.sdiv(f.add(rows, f.shape.tile - 1), f.const(f.shape.tile))


def _tile_ends(f: Function, rows: Any, number: Any) -> tuple[Any, Any]:
    """The first row of a tile, and one past its last: tiles are as even as can be."""
    count = _count_tiles(f, rows)
    first, last = (f.b.sdiv(f.times(rows, f.add(number, i)), count) for i in (0, 1))
    return first, last


def _tiles(f: Function, panel: _Panel, rows: Any, begins: Any) -> None:
    """All tiles of x over a panel; each asks for a part of the next panel."""
    most, count = f.shape.tile, _count_tiles(f, rows)
    with f.loop(f.const(0), count) as number:
        first, last = _tile_ends(f, rows, number)
        ask = _asker(f, panel, number, count)
        x = f.add(panel.laid, f.times(number, 4 * most * DEPTH))
        cases = {n: partial(_tile, f, n, x, first, panel, begins, ask) for n in range(1, most + 1)}
        f.choose(f.b.sub(last, first), cases, lambda: None)


def _asker(f: Function, panel: _Panel, number: Any, count: Any) -> Callable[[Any], None]:
    """What asks for a line of the next panel, this tile's part of it in even steps: a processor
    that is asked for many at once waits for them.
    """
    columns, row = VECTORS * f.shape.lanes, f.form_bytes * DEPTH
    joined = f.b.icmp_signed("==", panel.depth, f.args[7])  # rows stand behind each other
    whole = f.times(f.b.select(joined, f.size(panel.depth), f.const(row)), columns)
    start = f.b.sdiv(f.times(whole, number), count)
    step = f.add(f.b.sdiv(f.const(f.form_bytes * columns), count), 1)
    apart = f.size(f.args[7])

    def ask(k: Any) -> None:
        at = f.add(start, f.times(k, step))
        line = f.times(f.b.lshr(at, f.const(row.bit_length() - 1)), apart)
        parted = f.add(line, f.b.and_(at, f.const(row - 1)))
        f.ask_for(f.add(panel.later, f.b.select(joined, at, parted)), far=True)

    return ask


def _tile(
    f: Function,
    rows: int,
    x: Any,
    first: Any,
    panel: _Panel,
    begins: Any,
    ask: Callable[[Any], None],
) -> None:
    """Sums of `rows` rows of x from `first` on, added to the bias or to those of the parts before:
    a chain of additions is no longer than a part.
    """
    xs = [f.add(x, 4 * i) for i in range(rows)]
    outs = [f.add(panel.start, f.times(f.add(first, i), panel.row)) for i in range(rows)]
    step = 4 * f.shape.lanes
    found = multiplied(
        f, xs, (panel.turned, VECTORS * step), panel.depth, VECTORS, ask, 4 * f.shape.tile
    )
    for out, own in zip(outs, found, strict=True):
        before = f.b.select(begins, panel.bias, out)
        for i, total in enumerate(own):
            total = f.b.fadd(total, f.floats(f.add(before, step * i)))
            f.store(total, f.add(out, step * i))


def multiplied(
    f: Function,
    xs: list[Any],
    lines: tuple[Any, Any],
    depth: Any,
    vectors: int,
    ask: Callable[[Any], None] | None = None,
    apart: Any = 4,
) -> list[list[Any]]:
    """For each row of x the sum over `depth` of its numbers, which are so many bytes `apart`, by
    some vectors of the lines, which are given by where the first is and how many bytes behind it
    the next. `ask` may ask for memory meanwhile; the depth is even then.
    """
    start, step = lines
    sums = [[f.variable(f.vector) for _ in range(vectors)] for _ in xs]

    def one(k: Any) -> None:
        at = f.add(start, f.times(k, step))
        ws = [f.floats(f.add(at, 4 * f.shape.lanes * j)) for j in range(vectors)]
        for x, own in zip(xs, sums, strict=True):
            number = f.everywhere(f.load(f.add(x, f.times(k, apart)), F32, 4))
            for w, place in zip(ws, own, strict=True):
                f.b.store(f.fma(number, w, f.b.load(place, typ=f.vector)), place)

    with f.loop(f.const(0), depth, OFTEN if ask else 1) as k:
        if ask is not None:
            ask(k)
        for i in range(OFTEN if ask else 1):
            one(f.add(k, i))
    return [[f.b.load(place, typ=f.vector) for place in own] for own in sums]
