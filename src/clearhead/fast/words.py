"""A function for LLVM under construction: the few phrases that the products are written in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from llvmlite import ir

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
POINTER, VOID = ir.PointerType(), ir.VoidType()
LINE = 64  # bytes that the memory delivers at once
MAGIC = 3 << 22  # from here to 2^24, fp32 has the whole numbers alone
BYTES = {"fp32": 4, "bf16": 2}  # of a weight; int8 and int4 have blocks of their own


@dataclass(frozen=True)
class Shape:
    """What suits a processor."""

    lanes: int
    """fp32 numbers in a vector register."""
    rows: int
    """Rows of x in a tile: rows x 4 accumulators, and what they are made of, fit the registers."""
    direct: int
    """Up to so many rows of x, packed weights are not unpacked into a buffer first."""
    dot: Literal["vnni", "sign", "plain"] = "plain"
    """How four bytes in a lane are multiplied and added: at once, in steps, or each by itself."""
    tile: int = 6
    """Rows of x in a tile of `panels`: rows x 2 accumulators, and 3 registers more."""
    ahead: int = 0
    """Bytes before a weight is needed that it is asked for, in fp32 and bf16 up to `formats.MANY`
    rows of x; 0: two strips, or blocks.
    """

    def __post_init__(self) -> None:
        assert self.direct + 1 >= self.rows  # or a tile would have more rows than there are


class Function:
    """One function under construction, and the few phrases that all of them are made of.

    All arguments are whole numbers of 64 bits, addresses too.
    """

    def __init__(
        self, module: ir.Module, name: str, arguments: int, shape: Shape, form: str
    ) -> None:
        self.function = ir.Function(module, ir.FunctionType(VOID, [I64] * arguments), name)
        self.module, self.shape, self.form = module, shape, form
        self.args = list(self.function.args)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.vector = ir.VectorType(F32, shape.lanes)

    def write(self, body: Callable[[Function], None]) -> None:
        body(self)
        self.b.ret_void()

    # -- numbers and memory

    def const(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def spread(self, value: float, kind: ir.Type = F32) -> ir.Constant:
        """A constant in all lanes."""
        return ir.Constant(ir.VectorType(kind, self.shape.lanes), [value] * self.shape.lanes)

    def add(self, *terms: Any) -> Any:
        total = terms[0]
        for term in terms[1:]:
            total = self.b.add(total, self.const(term) if isinstance(term, int) else term)
        return total

    def times(self, value: Any, factor: Any) -> Any:
        return self.b.mul(value, self.const(factor) if isinstance(factor, int) else factor)

    def size(self, count: Any) -> Any:
        """The bytes of so many packed weights."""
        return self.times(count, self.form_bytes)

    @property
    def form_bytes(self) -> int:
        """The bytes of a packed weight."""
        return BYTES[self.form]

    @property
    def direct(self) -> int:
        """Up to so many rows of x a strip is read from where it is."""
        return self.shape.rows if self.form == "fp32" else self.shape.direct

    def reading(self, form: str) -> Function:
        """The same function, which now takes its weights for some of this form."""
        new = copy.copy(self)
        new.form = form
        return new

    def in_vectors_of(self, lanes: int) -> Function:
        """The same function, whose vectors now have so many lanes."""
        new = copy.copy(self)
        new.shape, new.vector = replace(self.shape, lanes=lanes), ir.VectorType(F32, lanes)
        return new

    def least(self, x: Any, y: Any) -> Any:
        """The smaller of two whole numbers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def pointer(self, address: Any) -> Any:
        return self.b.inttoptr(address, POINTER)

    def load(self, address: Any, kind: ir.Type, align: int) -> Any:
        return self.b.load(self.pointer(address), typ=kind, align=align)

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.pointer(address), align=4)

    def floats(self, address: Any) -> Any:
        return self.load(address, self.vector, 4)

    def ask_for(self, address: Any, far: bool = False) -> None:
        """Let the memory fetch a line of which nothing is needed yet, into the nearest cache or
        (far) the next one; any address is allowed.
        """
        call = self.outside("llvm.prefetch.p0", VOID, [POINTER, I32, I32, I32])
        read, near, data = (ir.Constant(I32, value) for value in (0, 2 if far else 3, 1))
        self.b.call(call, [self.b.inttoptr(address, POINTER), read, near, data])

    # -- vectors

    def call(self, name: str, kind: ir.Type, *values: Any) -> Any:
        """A function of LLVM's on vectors of fp32, lane by lane."""
        whole = f"{name}.v{self.shape.lanes}f32"
        return self.b.call(self.outside(whole, kind, [kind] * len(values)), list(values))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("llvm.fma", self.vector, x, y, z)

    def whole(self, vector: Any, more: int = 0) -> tuple[Any, Any]:
        """The nearest whole numbers (below 2^22) as fp32, and as bits whose lower 22 are the number
        and `more`: added to so much, fp32 has no room for anything behind the point. (What LLVM has
        for it goes lane by lane.)
        """
        large = self.spread(float(MAGIC + more))
        sum_ = self.b.fadd(vector, large)
        words = ir.VectorType(I32, self.shape.lanes)
        return self.b.fsub(sum_, large), self.b.bitcast(sum_, words)

    def total(self, vector: Any) -> Any:
        """The sum of all lanes, in whatever order is quickest."""
        name = f"llvm.vector.reduce.fadd.v{self.shape.lanes}f32"
        call = self.outside(name, F32, [F32, self.vector])
        return self.b.call(call, [ir.Constant(F32, 0.0), vector], fastmath=("reassoc",))

    def one_fma(self, x: Any, y: Any, z: Any) -> Any:
        """The same of single numbers."""
        return self.b.call(self.outside("llvm.fma.f32", F32, [F32, F32, F32]), [x, y, z])

    def everywhere(self, value: Any) -> Any:
        """A number in all lanes."""
        return self.spread_out(value, self.vector)

    def spread_out(self, value: Any, kind: ir.VectorType) -> Any:
        """A value in all lanes of a vector."""
        empty = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(empty, value, ir.Constant(I32, 0))
        return self.shuffle(first, empty, [0] * kind.count)

    def shuffle(self, first: Any, second: Any, lanes: list[int]) -> Any:
        """These lanes of two vectors behind each other."""
        chosen = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return self.b.shuffle_vector(first, second, chosen)

    def variable(self, kind: ir.Type, value: Any = None) -> Any:
        """A place for a number; LLVM makes a register of it."""
        with self.b.goto_entry_block():
            place = self.b.alloca(kind)
        self.b.store(ir.Constant(kind, None) if value is None else value, place)
        return place

    # -- loops and choices

    def choose(
        self, value: Any, cases: Mapping[int, Callable[[], None]], other: Callable[[], None]
    ) -> None:
        """What stands beside the value, or the other."""
        done, otherwise = (self.function.append_basic_block() for _ in range(2))
        choice = self.b.switch(value, otherwise)
        for case, write in cases.items():
            block = self.function.append_basic_block()
            choice.add_case(self.const(case), block)
            self.b.position_at_end(block)
            write()
            self.b.branch(done)
        self.b.position_at_end(otherwise)
        other()
        self.b.branch(done)
        self.b.position_at_end(done)

    @contextmanager
    def loop(self, first: Any, last: Any, step: int = 1) -> Iterator[Any]:
        """For i from `first` to before `last`."""
        counter = self.variable(I64, first)
        head, body, done = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.load(counter, typ=I64)
        self.b.cbranch(self.b.icmp_signed("<", i, last), body, done)
        self.b.position_at_end(body)
        yield i
        self.b.store(self.add(i, step), counter)
        self.b.branch(head)
        self.b.position_at_end(done)

    def outside(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        """A function of LLVM's, or of OpenMP's."""
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(result, arguments), name)
