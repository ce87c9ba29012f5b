"""The list of calls that a decoding step of a stack is: what `Program` writes down for a cache.

    norm -> q k v -> (norms of q, k) -> (rotate) -> put into the cache -> attend -> out -> add
    norm -> q -> attend to the source -> out -> add
    norm -> in -> activation -> out -> add                      and so on, and then the last norm

A call is a function's address and its ten arguments: addresses of weights, of the places below, and
sizes. Keys and values, which beams move at every step, are looked up each time.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention.cache import Cache
from clearhead.attention.rotary import Rotary
from clearhead.fast import compile as compiled
from clearhead.fast.between import FEW, name_of
from clearhead.fast.compile import ARGUMENTS, FACTS
from clearhead.fast.formats import scratch_bytes
from clearhead.fast.linear import SMALL, FastLinear
from clearhead.layers.block import ParallelBlock, PostNorm, SandwichNorm
from clearhead.layers.ffn import GatedFFN
from clearhead.layers.stack import Memory, Stack

MOST, ASKED = FACTS.index("most"), FACTS.index("queries")
THREADS = 1 + 8  # where a call of attention has them

Sublayer = Callable[[Tensor, Tensor], None]  # from where, to where


class Calls:
    """The calls of a step, for one cache."""

    def __init__(
        self, stack: Stack, cache: Cache, marks: tuple[Any, ...], lengths: array[int] | None
    ) -> None:
        self.marks, self.rows, self.threads = marks, cache.rows, compiled.threads()
        self.steps = compiled.steps()
        self.list = array("q")
        self.kept: list[Any] = []  # what the addresses belong to
        self.moving: list[tuple[int, int]] = []  # a place in the list, and whose address is there
        self.attending: list[int] = []  # where the threads of attention to the past stand
        self.known: list[int] = []  # where keys and values were
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}  # the angles of each kind of layer
        self._make_places(stack, cache, lengths)
        for i, block in enumerate(stack.blocks):
            self._block(block, i, stack.kinds[i % len(stack.kinds)].rotary, cache.states[i])
        if stack.norm is not None:
            self._norm(stack.norm, self.stream, self.stream)

    def _make_places(self, stack: Stack, cache: Cache, lengths: array[int] | None) -> None:
        """Room for the stream, for what stands beside it, and the facts that attention is told."""
        first = stack.blocks[0]
        self.width = first.self_attn.q_proj.in_features
        crosses = [block.cross_attn for block in stack.blocks if block.cross_attn is not None]
        attns = [*(block.self_attn for block in stack.blocks), *crosses]
        heads = max(attn.out_proj.in_features for attn in attns)
        wide = [sum(block.self_attn.joint.widths) for block in stack.blocks]
        wide += [2 * block.ffn.in_proj.out_features for block in stack.blocks]
        wide += [cross.q_proj.out_features for cross in crosses]
        self.stream, self.near, self.beside, self.far, self.wide = (
            torch.empty(self.rows * n, dtype=torch.float32, device="cpu")
            for n in (self.width, self.width, self.width, heads, max(wide))
        )
        room = scratch_bytes(self.rows, max(self.width, heads, *wide))
        self.scratch = torch.empty(room, dtype=torch.uint8, device="cpu")
        self.layers = len(stack.blocks)
        self.seen = array("q", [0] * self.rows)
        self.facts = [
            _facts(block.self_attn, state, self.seen, 1)
            for block, state, _ in zip(stack.blocks, cache.states, stack.kinds, strict=False)
        ]
        self.sources: Any = None
        if lengths is not None and cache.memory is not None:
            beams = self.rows // cache.memory.rows
            self.kept += [cache.memory, lengths]
            self.sources = _facts(first.cross_attn, cache.cross[0], lengths, beams)

    def run(self, x: Tensor, seen: list[int], cache: Cache) -> Tensor:
        """The stream behind all blocks, with so many keys to be seen by each row."""
        x = x.contiguous()
        ctypes.memmove(self.stream.data_ptr(), x.data_ptr(), x.nbytes)
        self.seen[:] = array("q", seen)
        keys = max(seen)
        for facts in self.facts:
            facts[MOST] = keys
        states: list[Any] = [*cache.states, *cache.cross]
        now = [place for s in states for place in (s.k.data_ptr(), s.v.data_ptr())]
        if now != self.known:
            self.known = now
            for place, whose in self.moving:
                self.list[place] = now[whose]
        threads = self._threads(keys * self.width)
        if self.list[self.attending[0]] != threads:
            for place in self.attending:
                self.list[place] = threads
        start, size = self.list.buffer_info()
        self.steps["run"](start, size // (1 + ARGUMENTS), *[0] * 8)
        out = torch.empty_like(x)
        ctypes.memmove(out.data_ptr(), self.stream.data_ptr(), out.nbytes)
        return out

    # -- blocks

    def _block(self, block: Any, number: int, rotary: Rotary | None, state: Any) -> None:
        def attend(x: Tensor, out: Tensor) -> None:
            self._self_attention(block.self_attn, number, (rotary, state.k.shape[2]), x, out)

        def look(x: Tensor, out: Tensor) -> None:
            self._cross_attention(block.cross_attn, number, x, out)

        def feed(x: Tensor, out: Tensor) -> None:
            self._feed_forward(block.ffn, x, out)

        if type(block) is ParallelBlock:
            self._norm(block.self_residual.norm, self.stream, self.near)
            attend(self.near, self.beside)
            self._norm(block.ffn_residual.norm, self.stream, self.near)
            feed(self.near, self.near)
            self._add(self.beside, self.near)
            self._add(self.stream, self.beside)
            return
        self._residual(block.self_residual, attend)
        if block.cross_attn is not None:
            self._residual(block.cross_residual, look)
        self._residual(block.ffn_residual, feed)

    def _residual(self, residual: Any, sublayer: Sublayer) -> None:
        if type(residual) is PostNorm:
            sublayer(self.stream, self.near)
            self._add(self.stream, self.near)
            self._norm(residual.norm, self.stream, self.stream)
            return
        self._norm(residual.norm, self.stream, self.near)
        sublayer(self.near, self.near)
        if type(residual) is SandwichNorm:
            self._norm(residual.norm_out, self.near, self.near)
        self._add(self.stream, self.near)

    def _self_attention(
        self, attn: Any, number: int, turned: tuple[Rotary | None, int], x: Tensor, out: Tensor
    ) -> None:
        heads, own, d = attn.n_heads, attn.n_kv_heads, attn.head_dim
        told = self.facts[number % len(self.facts)].buffer_info()[0]
        self._several(attn.joint, x, self.wide)
        q = self.wide.data_ptr()
        k = q + 4 * self.rows * heads * d
        v = k + 4 * self.rows * own * d
        for norm, place, count in ((attn.q_norm, q, heads), (attn.k_norm, k, own)):
            if norm is not None:
                self._norm_at(norm, place, place, self.rows * count)
        rotary, size = turned
        if rotary is not None:
            tables = self._tables(rotary, size)
            for place, count in ((q, heads), (k, own)):
                self._step("rotate", place, *tables, told, self.rows, count, d, rotary.width)
        for i, place in enumerate((k, v)):
            self.moving.append((len(self.list) + 2, 2 * number + i))
            self._step("put", place, 0, told, self.rows)
        self.attending.append(len(self.list) + THREADS)
        self._attend(q, told, self.rows * heads, number)
        self._product(attn.out_proj, self.far, out)

    def _cross_attention(self, attn: Any, number: int, x: Tensor, out: Tensor) -> None:
        heads, q = attn.n_heads, self.wide.data_ptr()
        self._product(attn.q_proj, x, self.wide)
        if attn.q_norm is not None:
            self._norm_at(attn.q_norm, q, q, self.rows * heads)
        sources = self.rows // self.sources[ASKED]
        threads = self._threads(heads * attn.head_dim * self.sources[MOST])
        told = self.sources.buffer_info()[0]
        self._attend(q, told, sources * heads, self.layers + number, threads)
        self._product(attn.out_proj, self.far, out)

    def _feed_forward(self, ffn: Any, x: Tensor, out: Tensor) -> None:
        inside, wide = self.rows * ffn.in_proj.out_features, self.wide.data_ptr()
        if type(ffn) is GatedFFN:
            self._several(ffn.joint, x, self.wide)
        else:
            self._product(ffn.in_proj, x, self.wide)
        threads = 1 if inside < FEW else self.threads
        name = str(name_of(ffn.activation))
        self._step(name, wide, 0, 0, 0, wide, 0, inside, 0, threads)
        if type(ffn) is GatedFFN:
            self._step("times", wide, wide + 4 * inside, inside)
        self._product(ffn.out_proj, self.wide, out)

    # -- single calls

    def _call(self, function: Any, *given: int) -> None:
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.list.extend((address, *given, *[0] * (ARGUMENTS - len(given))))

    def _step(self, name: str, *given: int) -> None:
        self._call(self.steps[name], *given)

    def _attend(self, q: int, told: int, count: int, number: int, threads: int = 1) -> None:
        """Attention to the keys and values of a state."""
        self.moving += [(len(self.list) + 2 + i, 2 * number + i) for i in (0, 1)]
        self._step("attend", q, 0, 0, self.far.data_ptr(), told, 0, count, 0, threads)

    def _product(self, linear: FastLinear, x: Tensor, out: Tensor) -> None:
        n, k = linear.out_features, linear.in_features
        product = compiled.product(linear.form)
        self.kept += [product, linear.tensors]
        ends = out.data_ptr(), self.rows, n, k, self._threads(n * k), self.scratch.data_ptr()
        self._call(product.run, x.data_ptr(), *linear.addresses, *ends)

    def _several(self, joint: Any, x: Tensor, out: Tensor) -> None:
        k, table = joint.first.in_features, joint.table()
        product = compiled.product(joint.first.form)
        self.kept += [product, table, *(linear.tensors for linear in joint.linears)]
        threads = self._threads(sum(joint.widths) * k)
        ends = out.data_ptr(), self.rows, 0, k, threads, self.scratch.data_ptr()
        place = table.buffer_info()[0]
        self._call(product.several, x.data_ptr(), place, len(joint.linears), 0, *ends)

    def _norm(self, norm: Any, x: Tensor, out: Tensor) -> None:
        self._norm_at(norm, x.data_ptr(), out.data_ptr(), self.rows)

    def _norm_at(self, norm: Any, x: int, out: int, rows: int) -> None:
        weight, bias = norm.weight.detach(), getattr(norm, "bias", None)
        bias = torch.zeros_like(weight) if bias is None else bias.detach()
        self.kept += [weight, bias]
        name = "layer_norm" if isinstance(norm, nn.LayerNorm) else "rms_norm"
        sizes = rows, weight.numel(), _bits(norm.eps)
        self._step(name, x, weight.data_ptr(), bias.data_ptr(), out, *sizes)

    def _add(self, x: Tensor, y: Tensor) -> None:
        self._step("add", x.data_ptr(), y.data_ptr(), self.rows * self.width)

    def _tables(self, rotary: Rotary, size: int) -> tuple[int, int]:
        """Cosines and sines of all positions of the cache."""
        if id(rotary) not in self.turns:
            every = torch.arange(size, device="cpu").unsqueeze(0)
            self.turns[id(rotary)] = rotary.angles(every, torch.float32)
        cos, sin = self.turns[id(rotary)]
        return cos.data_ptr(), sin.data_ptr()

    def _threads(self, numbers: int) -> int:
        return 1 if self.rows * numbers < SMALL else self.threads


def row_lengths(memory: Memory) -> array[int] | None:
    """How many tokens each source has, if they stand at its start and there is one at least."""
    at, rows = memory.at, memory.rows
    if not at.holes:
        return array("q", [at.length] * rows)
    filled = at.filled().expand(rows, -1)
    lengths = filled.sum(dim=1, keepdim=True)
    first = torch.arange(at.length, device=filled.device) < lengths
    if not filled.equal(first) or int(lengths.min()) < 1:
        return None
    return array("q", lengths.flatten().tolist())


def _facts(attn: Any, state: Any, seen: array[int], queries: int) -> array[int]:
    """What attention is told of heads, widths and steps; a source's beams ask together."""
    heads, d, k = attn.n_heads, attn.head_dim, state.k
    told = {
        "heads": heads,
        "group": heads // attn.n_kv_heads,
        "d": d,
        "seen": seen.buffer_info()[0],
        "each": seen.itemsize,
        "most": max(seen),
        "queries": queries,
        "q_row": queries * heads * d,
        "q_head": d,
        "q_query": heads * d,
        "k_row": k.stride(0),
        "k_head": k.stride(1),
        "k_key": k.stride(2),
        "scale": _bits(attn.kernel.scale),
    }
    return array("q", [told[name] for name in FACTS])


def _bits(number: float) -> int:
    """Those of an fp32 number."""
    return struct.unpack("<i", struct.pack("<f", number))[0]
