"""A step of decoding as one call: all that its blocks do, written down once, worked off at once.

Python takes longer to ask for the parts of a small block than the block takes, and a tenth to a
third of the time of a large one in few bits. So for the steps of a decode (one new token a row) the
calls are written into a list (`stepping`), which compiled code works off (`rows.run`). The list is
kept for its cache, and written anew when keys and values lie otherwise or modules were moved.

Whatever is not so (several tokens, a window, rows with gaps, sources that do not stand at their
start, more than 8 beams of one, somebody who listens at a tap or by a hook, a part that is not
known here) goes the ordinary way, block by block: that is the slow twin. Modules that are exchanged
inside a network that has a program are not noticed by lists that were written before: make its
run-time form anew. Nor are weights that are exchanged and not changed in place, until the next
text (cache), or `form.refresh`; moving a network does that.
"""

from __future__ import annotations

from array import array
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from clearhead.attention.cache import KV, Cache, CrossKV
from clearhead.attention.mask import All, Causal
from clearhead.attention.positions import Positions
from clearhead.fast.between import KEYS, QUERIES
from clearhead.fast.known import Watch, known_stack
from clearhead.fast.stepping import StepCalls, row_lengths
from clearhead.layers.stack import Memory, Stack

MASKS = (Causal, All)  # of those who see all of the past


class Program:
    """What `Stack.step` is in the run-time form: the stream behind all blocks, or None where it
    does not know the way.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._watch: Watch | None = None  # made when it is first asked: a copy is not whole before
        self._lists: WeakKeyDictionary[Cache, StepCalls] = WeakKeyDictionary()
        self._lengths: WeakKeyDictionary[Memory, array[int] | None] = WeakKeyDictionary()

    def __call__(
        self, x: Tensor, at: Positions, cache: Cache, memory: Memory | None
    ) -> Tensor | None:
        now = at.hi
        if (
            x.shape[1] != 1
            or x.shape[0] != cache.rows
            or not 0 <= now < KEYS
            or x.shape[2] != self.stack.blocks[0].self_attn.q_proj.in_features
            or type(cache) is not Cache
            or any(slots.reach is not None or now >= slots.size for slots in cache.kinds)
            or not x.is_cpu
            or x.dtype != torch.float32
            or (torch.is_grad_enabled() and x.requires_grad)
            or not self._known_sources(memory, cache)
            or self._watched().heard()
        ):
            return None
        seen = _seen(at, cache)
        if seen is None:
            return None
        cache.make_room()
        known = self._lists.get(cache)
        if known is None or not known.fits(cache):
            self._watch = None  # modules may be others
            if self._watched().heard() or not self._can_write(cache):
                return None
            lengths = None if memory is None else self._lengths[memory]
            known = self._lists[cache] = StepCalls(self.stack, cache, lengths)
        cache.begin(at, follow=True)
        if cache.shared is None:
            for state in cache.states:
                state.settle()
        return known.run(x, seen, cache)

    def _known_sources(self, memory: Memory | None, cache: Cache) -> bool:
        """Whether the keys of all sources are known, and stand at their start; or there is none to
        be seen.
        """
        looks = self.stack.blocks[0].cross_attn is not None
        if memory is None or not looks:
            return memory is None and not looks
        if not cache.cross or any(state.k is None for state in cache.cross):
            return False
        if cache.rows // memory.rows > QUERIES or memory.at.length > KEYS:
            return False
        if memory not in self._lengths:
            self._lengths[memory] = row_lengths(memory.at, memory.rows)
        return self._lengths[memory] is not None

    def _can_write(self, cache: Cache) -> bool:
        """Whether all of it is as compiled code takes it for, now."""
        plain = all(_plain(state) for state in (*cache.states, *cache.cross))
        return plain and known_stack(self.stack, MASKS) and self._watched().writable()

    def _watched(self) -> Watch:
        watch = self._watch = self._watch or Watch(self.stack)
        return watch  # another thread may begin anew meanwhile

    def __getstate__(self) -> dict[str, Any]:
        return {"stack": self.stack}  # a copy writes lists of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        Program.__init__(self, state["stack"])


def program(stack: Stack) -> Program | None:
    """The program of a stack whose blocks it can write down."""
    return Program(stack) if known_stack(stack, MASKS) else None


def _seen(at: Positions, cache: Cache) -> list[int] | None:
    """How many keys each row will see, if it has all positions up to its new one."""
    if at.dense and all(slots.even and slots.top == at.hi for slots in cache.kinds):
        return [at.hi + 1] * cache.rows
    new = at.pos.expand(cache.rows, -1)[:, 0].tolist()
    if at.holes or tuple(new) != cache.ends:
        return None
    filled = [(slots.where[:, : slots.used] >= 0).sum(dim=1).tolist() for slots in cache.kinds]
    if any(counts != new for counts in filled):
        return None
    return [position + 1 for position in new]


def _plain(state: Any) -> bool:
    """Whether keys and values lie as the compiled code expects them."""
    if type(state) not in (KV, CrossKV):
        return False
    k, v = state.k, state.v
    alike = k.stride() == v.stride() and k.stride(3) == 1
    return alike and all(t.dtype == torch.float32 and t.is_cpu for t in (k, v))
