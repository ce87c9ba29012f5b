"""A step of decoding as one call: all that its blocks do, written down once, worked off at once.

Python takes longer to ask for the parts of a small block than the block takes, and a tenth to a
third of the time of a large one in few bits. So for the steps of a decode (one new token a row) the
calls are written into a list (`calls`), which compiled code works off (`rows.run`). The list is
kept for its cache, and written anew when weights are not where they were.

Whatever is not so (several tokens, a window, rows with gaps, sources that do not stand at their
start, more than 8 beams of one, somebody who listens at a tap or by a hook, a part that is not
known here) goes the ordinary way, block by block: that is the slow twin. Modules that are exchanged
inside a network that has a program are not noticed by lists that were written before: make its
run-time form anew.
"""

from __future__ import annotations

import weakref
from array import array
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from clearhead.attention.attention import Attention
from clearhead.attention.cache import KV, Cache, CrossKV
from clearhead.attention.mask import All, Causal
from clearhead.attention.positions import Positions
from clearhead.attention.rotary import Rotary
from clearhead.fast import compile as compiled
from clearhead.fast.between import KEYS, LANES, QUERIES, FastSoftmax, Joint, name_of
from clearhead.fast.calls import Calls, row_lengths
from clearhead.fast.linear import FastLinear
from clearhead.layers.block import Block, ParallelBlock, PostNorm, PreNorm, SandwichNorm
from clearhead.layers.ffn import FFN, GatedFFN
from clearhead.layers.stack import Kind, Memory, Stack
from clearhead.tap import taps


class Program:
    """What `Stack.step` is in the run-time form: the stream behind all blocks, or None where it
    does not know the way.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._watched: tuple[list[Any], list[Any], list[Any]] | None = None  # taps, hooks, norms
        self._lists: WeakKeyDictionary[Cache, Calls] = WeakKeyDictionary()
        self._sources: tuple[Any, array[int] | None] = (None, None)  # the last memory, its lengths

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
            or self._heard()
        ):
            return None
        seen = _seen(at, cache)
        if seen is None:
            return None
        marks = self._marks(cache)
        known = self._lists.get(cache)
        if known is None or known.marks != marks:
            self._watched = None  # modules may be others
            if self._heard() or not self._can_write(cache):
                return None
            lengths = self._sources[1]
            known = self._lists[cache] = Calls(self.stack, cache, self._marks(cache), lengths)
        cache.begin(at)
        for state in cache.states:
            state.settle()
        return known.run(x, seen, cache)

    def _known_sources(self, memory: Memory | None, cache: Cache) -> bool:
        """Whether the keys of all sources are known, and stand at their start; or there is none to
        be seen.
        """
        looks = self.stack.blocks[0].cross_attn is not None
        if memory is None or not looks:
            self._sources = (None, None)
            return memory is None and not looks
        if not cache.cross or any(state.k is None for state in cache.cross):
            return False
        if cache.rows // memory.rows > QUERIES or memory.at.length > KEYS:
            return False
        if self._sources[0] is None or self._sources[0]() is not memory:
            self._sources = weakref.ref(memory), row_lengths(memory)
        return self._sources[1] is not None

    def _heard(self) -> bool:
        """Whether somebody looks into the blocks."""
        if self._watched is None:
            modules = list(self.stack.modules())
            hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
            norms = [m for m in modules if isinstance(m, (nn.LayerNorm, nn.RMSNorm))]
            self._watched = list(taps(self.stack).values()), hooks, norms
        listened, hooks, _ = self._watched
        everywhere = module._global_forward_hooks or module._global_forward_pre_hooks
        return any(tap.listeners for tap in listened) or any(hooks) or bool(everywhere)

    def _can_write(self, cache: Cache) -> bool:
        """Whether all of it is as compiled code takes it for, now."""
        linears = [part for part in self.stack.modules() if isinstance(part, FastLinear)]
        return (
            _known_stack(self.stack)
            and all(linear.here for linear in linears)
            and all(_plain(state) for state in (*cache.states, *cache.cross))
            and all(_here(weight) for weight in self._norm_weights())
        )

    def _marks(self, cache: Cache) -> tuple[Any, ...]:
        """What a list is written for."""
        norms = [weight.data_ptr() for weight in self._norm_weights()]
        states: list[Any] = [*cache.states, *cache.cross]
        lie = [(s.k.shape, s.k.stride(), s.v.stride()) for s in states]
        # A list keeps its memory, so that no other one has its number.
        return compiled.threads(), FastLinear.moves, cache.rows, id(cache.memory), lie, norms

    def _norm_weights(self) -> list[Tensor]:
        assert self._watched is not None
        both = [p for norm in self._watched[2] for p in norm._parameters.values()]
        return [p for p in both if p is not None]

    def __getstate__(self) -> dict[str, Any]:
        return {"stack": self.stack}  # a copy writes lists of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        Program.__init__(self, state["stack"])


def program(stack: Stack) -> Program | None:
    """The program of a stack whose blocks it can write down."""
    return Program(stack) if _known_stack(stack) else None


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


def _here(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()


# --- what can be written down ---


def _known_stack(stack: Stack) -> bool:
    return (
        all(_known_kind(kind) for kind in stack.kinds)
        and all(_known_block(block) for block in stack.blocks)
        and len({block.cross_attn is None for block in stack.blocks}) == 1
        and (stack.norm is None or _known_norm(stack.norm))
    )


def _known_kind(kind: Kind) -> bool:
    """One that sees all of the past, and knows no positions but rotary ones."""
    past = type(kind.mask) in (Causal, All)
    turned = type(kind.rotary) in (Rotary, type(None))
    return past and turned and kind.bias is None and not kind.distances


def _known_block(block: Any) -> bool:
    if type(block) not in (Block, ParallelBlock):
        return False
    cross, residuals = block.cross_attn, [block.self_residual, block.ffn_residual]
    if cross is not None:
        residuals.append(block.cross_residual)
    parallel = type(block) is ParallelBlock
    placements = (PreNorm,) if parallel else (PreNorm, PostNorm, SandwichNorm)
    return (
        not (parallel and cross is not None)
        and all(type(residual) in placements for residual in residuals)
        and all(_known_norm(norm) for residual in residuals for norm in _norms(residual))
        and _known_attention(block.self_attn)
        and isinstance(getattr(block.self_attn, "joint", None), Joint)
        and (cross is None or (_known_attention(cross) and _packed(cross.q_proj)))
        and _known_ffn(block.ffn)
    )


def _known_attention(attn: Attention) -> bool:
    return (
        type(attn) is Attention
        and type(attn.kernel) is FastSoftmax
        and attn.relative is None
        and attn.head_dim % LANES == 0
        and _packed(attn.out_proj)
        and all(norm is None or _known_norm(norm) for norm in (attn.q_norm, attn.k_norm))
    )


def _known_ffn(ffn: Any) -> bool:
    if type(ffn) is GatedFFN:
        inside = isinstance(ffn.joint, Joint)
    else:
        inside = type(ffn) is FFN and _packed(ffn.in_proj)
    return inside and _packed(ffn.out_proj) and name_of(ffn.activation) is not None


def _known_norm(norm: Any) -> bool:
    whole = isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) and norm.weight is not None
    return whole and norm.weight.numel() % LANES == 0 and norm.eps is not None


def _norms(residual: Any) -> list[Any]:
    return [residual.norm, *([residual.norm_out] if type(residual) is SandwichNorm else [])]


def _packed(linear: Any) -> bool:
    return isinstance(linear, FastLinear) and linear.compilable
