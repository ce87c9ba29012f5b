"""Whole sequences through all blocks in one call, without their padding.

What an encoder reads comes as rows of different lengths. Here the empty slots are left out: the
tokens of all rows lie one behind the other (`sequences`), the calls of all blocks are written into
a list (`calls`), and compiled code works it off. Where there is enough to read every thread has
rows and a list of its own, from the first norm to the last, and nobody waits for anybody.

Whatever is not so (masks, biases, long sequences, somebody who listens at a tap or by a hook, a
part that is not known here) goes the ordinary way, block by block: that is the slow twin. Empty
slots come out as zeros.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.mask import All
from clearhead.attention.positions import Positions
from clearhead.fast import compile as compiled
from clearhead.fast.calls import Calls, bits
from clearhead.fast.compile import ARGUMENTS, FACTS
from clearhead.fast.known import Watch, known_stack
from clearhead.fast.stepping import row_lengths
from clearhead.layers.stack import Stack

PANEL = 32  # keys of the widest one: room is made for whole panels
ROOM = 2**15  # numbers of a head's keys that are turned on the stack
ENOUGH = 128  # tokens a thread, so that the weights are worth bringing to each


class Reader:
    """What `Stack.read` is in the run-time form: the stream behind all blocks, or None where it
    does not know the way.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def __call__(self, x: Tensor, at: Positions) -> Tensor | None:
        rows, slots, width = x.shape
        if (
            not x.is_cpu
            or x.dtype != torch.float32
            or (torch.is_grad_enabled() and x.requires_grad)
            or rows * slots == 0
            or at.length != slots
            or not self._known(width)
        ):
            return None
        lengths = row_lengths(at, rows)
        widest = max(block.self_attn.head_dim for block in self.stack.blocks)
        if lengths is None or _whole(max(lengths)) * widest > ROOM:
            return None
        turns = any(kind.rotary is not None for kind in self.stack.kinds)
        every = at.pos.expand(rows, -1)
        if turns and int(every.amax()) >= ROOM:
            return None
        parts, each = shared_out(lengths, compiled.threads())
        tokens = x.reshape(-1, width)
        out = torch.zeros_like(tokens)
        lists, places = [], []
        for part in parts:
            own = [lengths[row] for row in part]
            places.append(_places(part, own, slots))
            seen = every.flatten()[places[-1]] + 1 if turns else None
            calls = ReadCalls(self.stack, own, each, seen)
            torch.index_select(tokens, 0, places[-1], out=calls.stream.view(-1, width))
            lists.append(calls)
        _run(lists)
        for calls, place in zip(lists, places, strict=True):
            out.index_copy_(0, place, calls.stream.view(-1, width))
        return out.view(rows, slots, width)

    def _known(self, width: int) -> bool:
        """Whether the stack, as it is now, can be written down, and nobody looks into it."""
        if not can_read(self.stack) or width != self.stack.blocks[0].self_attn.q_proj.in_features:
            return False
        watch = Watch(self.stack)
        return not watch.heard() and watch.writable()


class ReadCalls(Calls):
    """The calls of all blocks for sequences of these lengths."""

    def __init__(
        self, stack: Stack, lengths: Sequence[int], threads: int, seen: Tensor | None
    ) -> None:
        super().__init__(stack, sum(lengths), threads)
        self.starts = array("q", accumulate(lengths, initial=0))
        self.seen = array("q", [] if seen is None else seen.tolist())
        self.longest = max(lengths)
        self.facts = [self._facts(block.self_attn) for block in stack.blocks]
        self._write(stack)

    def _facts(self, attn: Any) -> array[int]:
        known = {
            "heads": attn.n_heads,
            "group": attn.n_heads // attn.n_kv_heads,
            "d": attn.head_dim,
            "seen": self.seen.buffer_info()[0],
            "each": self.seen.itemsize,
            "most": _whole(self.longest),
            "scale": bits(attn.kernel.scale),
        }
        return array("q", [known.get(name, 0) for name in FACTS])

    def _told(self, number: int) -> int:
        return self.facts[number].buffer_info()[0]

    def _positions(self, number: int) -> tuple[int, int]:
        return self._told(number), max(self.seen)

    def _mix(self, attn: Any, number: int, q: int, k: int, v: int) -> None:
        count = (len(self.starts) - 1) * attn.n_heads
        ends = self.far.data_ptr(), self._told(number), self.starts.buffer_info()[0]
        self._step("sequences", q, k, v, *ends, count, 0, self.threads)


def _run(lists: list[ReadCalls]) -> None:
    """All of them, at the same time."""
    table = array("q")
    for calls in lists:
        start, size = calls.list.buffer_info()
        table.extend((start, size // (1 + ARGUMENTS)))
    ends = len(lists), 0, len(lists), 0
    lists[0].steps["run_each"](table.buffer_info()[0], 0, 0, 0, 0, 0, *ends)


def reader(stack: Stack) -> Reader | None:
    """The reader of a stack whose blocks it can write down."""
    return Reader(stack) if can_read(stack) else None


def can_read(stack: Stack) -> bool:
    """Whether the blocks can be written down: they see everything, and no source."""
    known = len(stack.blocks) > 0 and known_stack(stack, (All,))
    return known and stack.blocks[0].cross_attn is None


def shared_out(lengths: Sequence[int], threads: int) -> tuple[list[list[int]], int]:
    """Rows for each thread, and 1; or all rows in one part, and how many threads they are for."""
    total = sum(lengths)
    parts: list[list[int]] = [[] for _ in range(threads)]
    loads = [0] * threads
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        least = loads.index(min(loads))
        parts[least].append(row)
        loads[least] += lengths[row]
    if min(loads) < ENOUGH or max(loads) * threads > 1.1 * total:
        return [list(range(len(lengths)))], threads
    return parts, 1


def _places(rows: list[int], lengths: list[int], slots: int) -> Tensor:
    """Where the tokens of these rows are among all slots."""
    starts = torch.tensor(rows, device="cpu").unsqueeze(1) * slots
    numbers = torch.arange(slots, device="cpu")
    filled = numbers < torch.tensor(lengths, device="cpu").unsqueeze(1)
    return (starts + numbers)[filled]


def _whole(keys: int) -> int:
    return -(-keys // PANEL) * PANEL
