"""Prompts that begin alike are read once: keys and values kept by the tokens they stand for.

The keys and values at a position depend on the tokens up to there alone, so those of a common start
may be copied instead of computed. A store keeps the last few starts that were read; what a new
prompt shares with one of them is copied into its cache.

Only caches that hold the whole past of plain keys and values are kept: a ring (a model with a
window) has lost its start, and such a model simply reads again. A store forgets everything when the
model's weights have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.attention.cache import KV, Cache
from clearhead.attention.positions import Positions
from clearhead.errors import require

LEAST = 4  # fewer common tokens are read faster than found


@dataclass(frozen=True, eq=False)
class Prefix:
    """A start that was read."""

    ids: tuple[int, ...]
    """Its tokens."""
    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values [g, t, d] of every layer."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers)


class Prefixes:
    """The starts that were read last, at most so many bytes of them."""

    def __init__(self, most_bytes: int = 1 << 28) -> None:
        require(most_bytes >= 0, f"most_bytes is {most_bytes}: give a number of bytes.")
        self.most_bytes = most_bytes
        self.kept: list[Prefix] = []  # the one that was used last stands last
        self.spared = 0  # tokens that did not have to be read
        self._of: Any = None

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(one.nbytes for one in self.kept)

    def clear(self) -> None:
        """Forget everything."""
        self.kept = []

    def recall(self, net: Any, cache: Cache, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Copy what is known of the prompts into a new cache; returns how many tokens of each.

        The last token of a prompt is never taken as known: its logits are wanted. A start that all
        prompts share and that is not known is read here, once.
        """
        if not _plain(cache):
            return [0] * len(prompts)
        if (now := _weights(net)) != self._of:
            self.clear()
            self._of = now
        if len(prompts) > 1:
            self._read_common(net, prompts)
        found = [self._longest(prompt) for prompt in prompts]
        if any(length for _, length in found):
            _fill(cache, found)
        self.spared += sum(length for _, length in found)
        return [length for _, length in found]

    def keep(self, cache: Cache, prompts: Sequence[Sequence[int]]) -> None:
        """Remember what a cache has read, if it is one prompt's; of many only their start is."""
        if len(prompts) == 1 and _plain(cache):
            self._add(cache, prompts[0])

    def _read_common(self, net: Any, prompts: Sequence[Sequence[int]]) -> None:
        start = prompts[0]
        for prompt in prompts[1:]:
            start = start[: _shared(start, prompt[:-1])]
        start = start[: len(prompts[0]) - 1]
        if len(start) < LEAST or self._longest([*start, -1])[1] == len(start):
            return
        cache = net.new_cache(1, len(start))
        ids = torch.tensor([list(start)], device=next(net.parameters()).device)
        net.decode(ids, at=Positions.span(0, len(start), ids.device), cache=cache)
        self._add(cache, start)

    def _longest(self, prompt: Sequence[int]) -> tuple[Prefix | None, int]:
        """The kept start that shares most with a prompt, and how much."""
        best, length = None, LEAST - 1
        for one in self.kept:
            shared = _shared(one.ids, prompt[:-1])
            if shared > length:
                best, length = one, shared
        if best is None:
            return None, 0
        self.kept.remove(best)
        self.kept.append(best)
        return best, length

    def _add(self, cache: Cache, ids: Sequence[int]) -> None:
        n = len(ids)
        if n < LEAST:
            return
        cache.gather()
        states = [state for state in cache.states if isinstance(state, KV)]
        layers = tuple((s.k[0, :, :n].clone(), s.v[0, :, :n].clone()) for s in states)
        # What is a part of the new one is not kept twice.
        self.kept = [one for one in self.kept if _shared(one.ids, ids) < len(one.ids)]
        self.kept.append(Prefix(tuple(ids), layers))
        while self.kept and self.nbytes > self.most_bytes:
            self.kept.pop(0)


def _plain(cache: Cache) -> bool:
    """Whether a cache has the whole past of every layer, as keys and values."""
    return (
        type(cache) is Cache
        and cache.memory is None
        and all(type(state) is KV for state in cache.states)
        and all(slots.reach is None for slots in cache.kinds)
    )


def _fill(cache: Cache, found: Sequence[tuple[Prefix | None, int]]) -> None:
    """Let an empty cache stand where it would if it had read these starts."""
    ends = tuple(length for _, length in found)
    for row, (prefix, n) in enumerate(found):
        if prefix is None:
            continue
        for slots in cache.kinds:
            slots.where[row, :n] = torch.arange(n, device=slots.where.device)
        for state, (k, v) in zip(cache.states, prefix.layers, strict=True):
            assert isinstance(state, KV)
            state.k[row, :, :n] = k[:, :n]
            state.v[row, :, :n] = v[:, :n]
    for slots in cache.kinds:
        slots.top = slots.used = max(ends)
        slots.even = len(set(ends)) == 1
    cache.ends = cache.peaks = ends


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)


def _weights(net: Any) -> tuple[Any, ...]:
    """What changes when weights are replaced or changed in place (but through `.data`)."""
    return tuple(
        (p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype) for p in net.parameters()
    )
