"""A list of calls that the blocks of a stack are: what `stepping` and `reading` write down.

    norm -> q k v -> (norms of q, k) -> (rotate) -> attend -> out -> add
    norm -> in -> activation -> out -> add                      and so on, and then the last norm

A call is a function's address and its ten arguments: addresses of weights, of the places below, and
sizes.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention.rotary import Rotary
from clearhead.fast import compile as compiled
from clearhead.fast.between import FEW, name_of
from clearhead.fast.compile import ARGUMENTS
from clearhead.fast.formats import scratch_bytes
from clearhead.fast.linear import SMALL, FastLinear
from clearhead.layers.block import ParallelBlock, PostNorm, SandwichNorm
from clearhead.layers.ffn import GatedFFN
from clearhead.layers.stack import Stack

Sublayer = Callable[[Tensor, Tensor], None]  # from where, to where


class Calls:
    """The calls of all blocks for so many rows; subclasses differ in how rows attend."""

    def __init__(self, stack: Stack, rows: int, threads: int) -> None:
        self.rows, self.threads = rows, threads
        self.steps = compiled.steps()
        self.list = array("q")
        self.kept: list[Any] = []  # what the addresses belong to
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}  # the angles of each kind of layer
        self._make_places(stack)

    def _make_places(self, stack: Stack) -> None:
        """Room for the stream, and for what stands beside it."""
        self.width = stack.blocks[0].self_attn.q_proj.in_features
        crosses = [block.cross_attn for block in stack.blocks if block.cross_attn is not None]
        attns = [*(block.self_attn for block in stack.blocks), *crosses]
        heads = max(attn.out_proj.in_features for attn in attns)
        wide = [sum(block.self_attn.joint.widths) for block in stack.blocks]
        for block in stack.blocks:
            gates = 2 if type(block.ffn) is GatedFFN else 1
            wide.append(gates * block.ffn.in_proj.out_features)
        wide += [cross.q_proj.out_features for cross in crosses]
        self.stream, self.near, self.beside, self.far, self.wide = (
            torch.empty(self.rows * n, dtype=torch.float32, device="cpu")
            for n in (self.width, self.width, self.width, heads, max(wide))
        )
        room = scratch_bytes(self.rows, max(self.width, heads, *wide))
        self.scratch = torch.empty(room, dtype=torch.uint8, device="cpu")

    def _write(self, stack: Stack) -> None:
        """All blocks, and the norm behind them."""
        for i, block in enumerate(stack.blocks):
            self._block(block, i, stack.kinds[i % len(stack.kinds)].rotary)
        if stack.norm is not None:
            self._norm(stack.norm, self.stream, self.stream)

    # -- what the subclasses know

    def _mix(self, attn: Any, number: int, q: int, k: int, v: int) -> None:
        """Self-attention of a block, from these places to `far`."""
        raise NotImplementedError

    def _positions(self, number: int) -> tuple[int, int]:
        """For a block that rotates: the facts that say where each row stands, and how far at most
        it can.
        """
        raise NotImplementedError

    def _look(self, attn: Any, number: int, x: Tensor) -> None:
        """Cross-attention of a block, to `far`."""
        raise NotImplementedError

    # -- blocks

    def _block(self, block: Any, number: int, rotary: Rotary | None) -> None:
        def attend(x: Tensor, out: Tensor) -> None:
            self._self_attention(block.self_attn, number, rotary, x, out)

        def look(x: Tensor, out: Tensor) -> None:
            self._look(block.cross_attn, number, x)
            self._product(block.cross_attn.out_proj, self.far, out)

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
        self, attn: Any, number: int, rotary: Rotary | None, x: Tensor, out: Tensor
    ) -> None:
        heads, own, d = attn.n_heads, attn.n_kv_heads, attn.head_dim
        self._several(attn.joint, x, self.wide)
        q = self.wide.data_ptr()
        k = q + 4 * self.rows * heads * d
        v = k + 4 * self.rows * own * d
        for norm, place, count in ((attn.q_norm, q, heads), (attn.k_norm, k, own)):
            if norm is not None:
                self._norm_at(norm, place, place, self.rows * count)
        if rotary is not None:
            told, size = self._positions(number)
            tables = self._tables(rotary, size)
            for place, count in ((q, heads), (k, own)):
                ends = self.rows, rotary.width, self._few(self.rows * count * d)
                self._step("rotate", place, *tables, told, count, d, *ends)
        self._mix(attn, number, q, k, v)
        self._product(attn.out_proj, self.far, out)

    def _feed_forward(self, ffn: Any, x: Tensor, out: Tensor) -> None:
        inside, wide = self.rows * ffn.in_proj.out_features, self.wide.data_ptr()
        if type(ffn) is GatedFFN:
            self._several(ffn.joint, x, self.wide)
        else:
            self._product(ffn.in_proj, x, self.wide)
        ends = inside, 0, self._few(inside)
        self._step(str(name_of(ffn.activation)), wide, 0, 0, 0, wide, 0, *ends)
        if type(ffn) is GatedFFN:
            self._step("times", wide, wide + 4 * inside, 0, 0, 0, 0, *ends)
        self._product(ffn.out_proj, self.wide, out)

    # -- single calls

    def _call(self, function: Any, *given: int) -> None:
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.list.extend((address, *given, *[0] * (ARGUMENTS - len(given))))

    def _step(self, name: str, *given: int) -> None:
        self._call(self.steps[name], *given)

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
        width = weight.numel()
        ends = width, bits(norm.eps), rows, 0, self._few(rows * width)
        self._step(name, x, weight.data_ptr(), bias.data_ptr(), out, *ends)

    def _add(self, x: Tensor, y: Tensor) -> None:
        count = self.rows * self.width
        self._step("add", x.data_ptr(), y.data_ptr(), 0, 0, 0, 0, count, 0, self._few(count))

    def _tables(self, rotary: Rotary, size: int) -> tuple[int, int]:
        """Cosines and sines of so many positions."""
        if id(rotary) not in self.turns:
            every = torch.arange(size, device="cpu").unsqueeze(0)
            self.turns[id(rotary)] = rotary.angles(every, torch.float32)
        cos, sin = self.turns[id(rotary)]
        return cos.data_ptr(), sin.data_ptr()

    def _few(self, numbers: int) -> int:
        """Threads for something that is done with so many numbers one by one."""
        return 1 if numbers < FEW else self.threads

    def _threads(self, numbers: int) -> int:
        return 1 if self.rows * numbers < SMALL else self.threads


def bits(number: float) -> int:
    """Those of an fp32 number."""
    return struct.unpack("<i", struct.pack("<f", number))[0]
