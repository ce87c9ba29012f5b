"""The list of calls that a decoding step of a stack is: what `Program` writes down for a cache.

    q k v -> put into the cache -> attend to all that it holds
    norm -> q -> attend to the source -> out -> add

Where keys and values are, which a search may change, is looked up each time (`fits`).
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.cache import Cache
from clearhead.attention.positions import Positions
from clearhead.fast import compile as compiled
from clearhead.fast.between import own_rows
from clearhead.fast.calls import Calls, bits
from clearhead.fast.compile import ARGUMENTS, FACTS
from clearhead.fast.linear import FastLinear
from clearhead.layers.stack import Stack

MOST, ASKED, LIES, STEP = (FACTS.index(name) for name in ("most", "queries", "lies", "k_row"))
THREADS = 1 + 8  # where a call of attention has them


class StepCalls(Calls):
    """The calls of a step, for one cache."""

    def __init__(self, stack: Stack, cache: Cache, lengths: array[int] | None) -> None:
        super().__init__(stack, cache.rows, compiled.threads())
        self.marks, self.lie = _marks(cache), _lie(cache)
        self.moving: list[tuple[int, int]] = []  # a place in the list, and whose address is there
        self.attending: list[int] = []  # where the threads of attention to the past stand
        states: list[Any] = list(cache.states)
        self.layers, self.sizes = len(stack.blocks), [state.slots.size for state in states]
        self.seen, self.own = array("q", [0] * self.rows), own_rows(self.rows)
        self.kept.append(own_rows(cache.memory.rows) if cache.memory is not None else None)
        self.facts = [
            _facts(block.self_attn, state, self.seen, 1)
            for block, state in zip(stack.blocks, cache.states, strict=True)
        ]
        self.strides = [state.k.stride()[:3] for state in states]
        self.sources: list[array[int]] = []
        if lengths is not None and cache.memory is not None:
            beams = self.rows // cache.memory.rows
            self.kept += [cache.memory, lengths]
            self.sources = [
                _facts(block.cross_attn, state, lengths, beams)
                for block, state in zip(stack.blocks, cache.cross, strict=True)
            ]
        self._write(stack)
        self._write_places(_places(cache))

    def fits(self, cache: Cache) -> bool:
        """Whether the list is still one for this cache, and has where keys and values are now."""
        if self.marks != _marks(cache):
            return False
        now = _places(cache)
        if now != self.places:
            if self.lie != _lie(cache):
                return False
            self._write_places(now)
        return True

    def run(self, x: Tensor, seen: list[int], cache: Cache) -> Tensor:
        """The stream behind all blocks, with so many keys to be seen by each row."""
        x = x.contiguous()
        ctypes.memmove(self.stream.data_ptr(), x.data_ptr(), x.nbytes)
        self.seen[:] = array("q", seen)
        keys = max(seen)
        table = self._find_keys(cache, keys)
        threads = self._threads(keys * self.width)
        if self.list[self.attending[0]] != threads:
            for place in self.attending:
                self.list[place] = threads
        start, size = self.list.buffer_info()
        self.steps["run"](start, size // (1 + ARGUMENTS), *[0] * 8)
        del table
        out = torch.empty_like(x)
        ctypes.memmove(out.data_ptr(), self.stream.data_ptr(), out.nbytes)
        return out

    def _write_places(self, places: list[int]) -> None:
        self.places = places
        for place, whose in self.moving:
            self.list[place] = places[whose]

    def _find_keys(self, cache: Cache, keys: int) -> Tensor | None:
        """Tell attention how many keys there are at most, and where; to be kept while it is used.

        A key is in its row at the place of its number; or a table has for each where it is,
        counted in slots from the start of the buffers.
        """
        shared, flat = cache.shared, None
        lies = array("q", (self.own.buffer_info()[0], self.own.itemsize, 0))
        if shared is not None:
            first: Any = cache.states[0]
            heads, size = first.k.shape[1:3]
            flat = shared.table[:, :keys] + (shared.homes * (heads * size)).unsqueeze(1)
            lies = array("q", (flat.data_ptr(), flat.element_size() * keys, flat.element_size()))
        for facts, (row, head, key) in zip(self.facts, self.strides, strict=True):
            facts[MOST] = keys
            facts[LIES : LIES + 3] = lies
            steps = (row, head, key) if shared is None else (key, head, 0)
            facts[STEP : STEP + 3] = array("q", steps)
        return flat

    # -- attention

    def _positions(self, number: int) -> tuple[int, int]:
        return self._told(number), self.sizes[number]

    def _mix(self, attn: Any, number: int, q: int, k: int, v: int) -> None:
        for i, place in enumerate((k, v)):
            self.moving.append((len(self.list) + 2, 2 * number + i))
            count = self.rows * attn.n_kv_heads * attn.head_dim
            ends = self.rows, 0, self._few(count)
            self._step("put", place, 0, self._told(number), 0, 0, 0, *ends)
        self.attending.append(len(self.list) + THREADS)
        self._attend(q, self._told(number), self.rows * attn.n_heads, number)

    def _look(self, attn: Any, number: int, x: Tensor) -> None:
        heads, q = attn.n_heads, self.wide.data_ptr()
        self._product(attn.q_proj, x, self.wide)
        if attn.q_norm is not None:
            self._norm_at(attn.q_norm, q, q, self.rows * heads)
        facts = self.sources[number]
        count = self.rows // facts[ASKED] * heads
        threads = self._threads(heads * attn.head_dim * facts[MOST])
        self._attend(q, facts.buffer_info()[0], count, self.layers + number, threads)

    def _told(self, number: int) -> int:
        return self.facts[number].buffer_info()[0]

    def _attend(self, q: int, told: int, count: int, number: int, threads: int = 1) -> None:
        """Attention to the keys and values of a state."""
        self.moving += [(len(self.list) + 2 + i, 2 * number + i) for i in (0, 1)]
        self._step("attend", q, 0, 0, self.far.data_ptr(), told, 0, count, 0, threads)


def _marks(cache: Cache) -> tuple[Any, ...]:
    """What a list is written for."""
    # A list keeps its memory, so that no other one has its number.
    return compiled.threads(), FastLinear.moves, cache.rows, id(cache.memory)


def _places(cache: Cache) -> list[int]:
    """Where keys and values are."""
    states: list[Any] = [*cache.states, *cache.cross]
    return [place for s in states for place in (s.k.data_ptr(), s.v.data_ptr())]


def _lie(cache: Cache) -> list[Any]:
    """How they lie there."""
    states: list[Any] = [*cache.states, *cache.cross]
    return [(s.k.shape, s.k.stride(), s.v.stride()) for s in states]


def row_lengths(at: Positions, rows: int) -> array[int] | None:
    """How many tokens each of so many rows has, if they stand at its start and there is one at
    least.
    """
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
    own = own_rows(len(seen))
    told = {
        "heads": heads,
        "group": heads // attn.n_kv_heads,
        "d": d,
        "seen": seen.buffer_info()[0],
        "each": seen.itemsize,
        "most": max(seen),
        "queries": queries,
        "lies": own.buffer_info()[0],
        "lies_row": own.itemsize,
        "lies_key": 0,
        "q_row": queries * heads * d,
        "q_head": d,
        "q_query": heads * d,
        "k_row": k.stride(0),
        "k_head": k.stride(1),
        "k_key": k.stride(2),
        "scale": bits(attn.kernel.scale),
    }
    return array("q", [told[name] for name in FACTS])
