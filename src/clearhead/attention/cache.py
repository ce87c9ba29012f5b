"""Caches: what a decode remembers. The caller owns one; the model keeps nothing between calls.

A `Cache` holds one `State` a layer, and one `Slots` for each kind of layer that knows where every
slot stands. The token at position p is kept in slot p (full), or in slot p modulo the size (ring,
where a window lets the past be forgotten), or, in rows that share their past, where `shared` says.
So every row is compact however ragged the prompts were, and going back is forgetting positions.

    cache.begin(at)      once a call: where the new tokens go        full    0 1 2 3 4 5 . .
    state.update(k, v)   in every layer: write, give all to see      ring    6 7 2 3 4 5
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.attention.positions import Positions
from clearhead.attention.shared import Shared
from clearhead.errors import require


class Slots:
    """Where every slot of one kind of layer stands, shared by all layers of that kind."""

    def __init__(
        self, rows: int, size: int, reach: int | None, device: torch.device | str | None
    ) -> None:
        self.size = size
        self.reach = (
            reach  # how far back a query of these layers sees; None: the whole past, so no ring
        )
        self.where = torch.full((rows, size), -1, dtype=torch.long, device=device)
        self.top = 0  # one past the last position of any row
        self.even = True  # every row holds the same positions, and new ones follow the last
        self.torn = 0  # a ring that went back has gaps until it stands here again
        self.used = 0  # slots that the layers show, and before this call:
        self.used_before = 0
        self.beside = False  # this call's keys stand beside the ring and are written behind it
        self.slot: slice | tuple[Tensor, Tensor, Tensor] = slice(0, 0)

    @property
    def solid(self) -> bool:
        """Whether every row holds the same last positions, without a gap."""
        return self.even and self.top >= self.torn

    def check_room(self, at: Positions) -> None:
        """Refuse tokens beyond the last slot, before anything is written."""
        require(
            self.reach is not None or at.hi < self.size,
            f"The cache holds {self.size} positions, and position {at.hi} was asked for: make a "
            "longer one, new_cache(..., max_len=...).",
        )

    def begin(self, at: Positions) -> Positions:
        """Make room for the new tokens; returns where the keys of this call stand."""
        # A ring must not overwrite what the first of the new queries still sees.
        self.beside = self.reach is not None and at.length > self.size - self.reach + 1
        keys = self._joined(at) if self.beside else None
        self.take(at)
        return self._seen() if keys is None else keys

    def take(self, at: Positions) -> None:
        """Make room for the new tokens, where a ring need not keep what they overwrite."""
        self.even = self.even and at.dense and at.lo == self.top
        self.top = max(self.top, at.hi + 1)
        self.used_before, self.used = self.used, max(self.used, min(self.top, self.size))
        self._place(at)

    def _seen(self) -> Positions:
        """Where the slots in use stand."""
        if self.solid and self.top <= self.size:
            return Positions.span(0, self.used, self.where.device)
        lo = self.top - self.used if self.solid else 0
        return Positions(
            self.where[:, : self.used], lo, self.top - 1, dense=False, holes=not self.solid
        )

    def _joined(self, at: Positions) -> Positions:
        """Where the old slots and the new tokens stand."""
        old, rows = self._seen(), self.where.shape[0]
        if old.length == 0:
            return at
        pos = torch.cat((old.pos.expand(rows, -1), at.pos.expand(rows, -1)), dim=1)
        dense = old.dense and at.dense and at.lo == old.hi + 1
        lo, hi = min(old.lo, at.lo), max(old.hi, at.hi)
        return Positions(pos, lo, hi, dense=dense, holes=old.holes or at.holes)

    def _place(self, at: Positions) -> None:
        """Write the new positions, and remember their slots for the layers' keys and values."""
        first = at.lo % self.size
        if at.dense and first + at.length <= self.size:
            self.slot = slice(first, first + at.length)
            self.where[:, self.slot] = at.pos
            return
        pos = at.pos.expand(self.where.shape[0], -1)
        # Of the tokens that share a slot of a ring the last one stays, so no slot is written twice.
        kept = (pos >= 0) & (pos > pos.amax(dim=1, keepdim=True) - self.size)
        row, column = kept.nonzero(as_tuple=True)
        self.slot = (row, column, pos[row, column] % self.size)
        self.where[row, self.slot[2]] = pos[row, column]

    def put(self, buffer: Float[Tensor, "b g size d"], new: Float[Tensor, "b g t d"]) -> None:
        """Write one layer's new keys or values at this call's slots."""
        if isinstance(self.slot, slice):
            buffer[:, :, self.slot] = new
        else:
            row, column, slot = self.slot
            buffer[row, :, slot] = new[row, :, column]

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Keep these rows, in this order."""
        self.where = self.where.index_select(0, rows)

    def check_trim(self, ends: tuple[int, ...], peaks: tuple[int, ...]) -> None:
        """Refuse to go back further than a ring can, where row i once stood at peaks[i]."""
        for end, top in zip(ends, peaks, strict=True):
            lost = top - self.size  # a ring no longer has the positions before this
            require(
                self.reach is None or lost <= 0 or end >= top or end - self.reach + 1 >= lost,
                f"A ring of {self.size} slots that stands at position {top} cannot go back to "
                f"{end} and still show a window of {self.reach}: make the cache with "
                f"slack={top - end} or more.",
            )

    def trim(self, ends: tuple[int, ...]) -> None:
        """Forget every position from ends[row] on."""
        wrapped = self.top > self.size
        limit = torch.tensor(ends, device=self.where.device).unsqueeze(1)
        self.where = torch.where(self.where < limit, self.where, -1)
        self.even = self.even and len(set(ends)) == 1
        self.torn = max(self.torn, self.top) if wrapped else self.torn
        self.top = min(self.top, max(ends))
        self.used = self.size if wrapped else self.top


class State:
    """What one layer remembers. `trims` says whether it can go back."""

    trims = True

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Keep these rows, in this order."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.index_select(0, rows))

    def settle(self) -> None:
        """Make ready what came with this call, before somebody writes into it from outside."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


class KV(State):
    """Keys and values in slots: all of the past (full), or as much as a window needs (ring)."""

    def __init__(
        self,
        slots: Slots,
        n_kv_heads: int,
        head_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        self.slots = slots
        shape = (slots.where.shape[0], n_kv_heads, slots.size, head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.bare = False  # whether unused slots may hold anything

    def update(
        self, k: Float[Tensor, "b g t d"], v: Float[Tensor, "b g t d"]
    ) -> tuple[Float[Tensor, "b g seen d"], Float[Tensor, "b g seen d"]]:
        """Write the new keys and values; returns all that this call may see."""
        self.settle()
        if self.slots.beside:
            old = self.slots.used_before
            seen = torch.cat((self.k[:, :, :old], k), 2), torch.cat((self.v[:, :, :old], v), 2)
            self.slots.put(self.k, k)
            self.slots.put(self.v, v)
            return seen
        self.slots.put(self.k, k)
        self.slots.put(self.v, v)
        used = self.slots.used
        return self.k[:, :, :used], self.v[:, :, :used]

    def settle(self) -> None:
        """Make numbers of the slots that came with this call: a row may now be shown one that only
        others fill, if only to multiply it by 0.
        """
        if self.bare and not self.slots.even and self.slots.used_before < self.slots.used:
            for buffer in (self.k, self.v):
                buffer[:, :, self.slots.used_before : self.slots.used] = 0.0

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Keep these rows, in this order; slots that nobody has used yet are not copied."""
        if self.slots.used == self.slots.size or self.k.requires_grad or self.v.requires_grad:
            super().select(rows)
            return
        heads = torch.arange(self.k.shape[1], device=rows.device)
        each = (rows.unsqueeze(1) * len(heads) + heads).flatten()
        self.k, self.v = (self._filled_rows(buffer, each) for buffer in (self.k, self.v))
        self.bare = True

    def grow(self, size: int, used: int) -> None:
        """Have so many slots, of which the first are used."""
        rows, heads, _, d = self.k.shape
        k, v = (old.new_empty((rows, heads, size, d)) for old in (self.k, self.v))
        k[:, :, :used], v[:, :, :used] = self.k[:, :, :used], self.v[:, :, :used]
        self.k, self.v, self.bare = k, v, True

    def leave(self, homes: Int[Tensor, " kept"]) -> None:
        """Keep these homes with all of their slots."""
        super().select(homes)

    def part(self, shared: Shared) -> None:
        """Give every row a copy of what it shares with others."""
        used = self.slots.used
        homes, table = shared.homes, shared.table[:, :used]
        if shared.size == self.slots.size and shared.in_order(used):
            self.select(homes)
            return
        for name in ("k", "v"):
            old = getattr(self, name)
            new = old.new_zeros((len(homes), old.shape[1], self.slots.size, old.shape[3]))
            new[:, :, :used] = old[homes.unsqueeze(1), :, table].transpose(1, 2)
            setattr(self, name, new)
        self.bare = False

    def _filled_rows(
        self, buffer: Float[Tensor, "b g size d"], each: Int[Tensor, " n"]
    ) -> Float[Tensor, "c g size d"]:
        """A buffer that has these of all heads of all rows."""
        _, g, size, d = buffer.shape
        new = buffer.new_empty((len(each) // g, g, size, d))
        filled = self.slots.used * d
        flat = buffer.view(-1, size * d)[:, :filled]
        torch.index_select(flat, 0, each, out=new.view(-1, size * d)[:, :filled])
        return new


class CrossKV(State):
    """Keys and values of a source: projected once, then shared by all its beams and steps."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None


class Cache:
    """All that one decode remembers: made by `new_cache`, owned by the caller."""

    def __init__(
        self,
        rows: int,
        kinds: Sequence[Slots],
        states: Sequence[State],
        cross: Sequence[CrossKV] = (),
        memory: Any = None,
    ) -> None:
        self.kinds, self.states, self.cross = list(kinds), list(states), list(cross)
        self.memory = memory  # what `encode` returned, for decoders that look at a source
        self.shared: Shared | None = None  # where rows find what they share: see `reorder`
        self.ends: tuple[int, ...] = (0,) * rows
        self.peaks = self.ends  # the furthest each row ever stood: what a ring overwrote stays lost

    @property
    def rows(self) -> int:
        """How many sequences are decoded."""
        return len(self.ends)

    @property
    def length(self) -> int:
        """One past the last position of any row."""
        return max(self.ends, default=0)

    @property
    def trims(self) -> bool:
        """Whether every layer can go back."""
        return all(state.trims for state in self.states)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(state.nbytes for state in (*self.states, *self.cross))

    def next(self, length: int, device: torch.device | str | None = None) -> Positions:
        """The positions that follow in every row."""
        if len(set(self.ends)) == 1:
            return Positions.span(self.ends[0], length, device)
        return Positions.ragged([length] * self.rows, start=self.ends, device=device)

    def begin(self, at: Positions, follow: bool = False) -> list[Positions]:
        """Make room for a call's tokens; returns, for each kind of layer, where its keys stand.

        `follow`: the caller finds keys and values by `shared`, so that rows need no copies, and is
        not told where they stand; it has called `make_room`, has one new token a row and no ring.
        """
        require(
            at.pos.shape[0] in (1, self.rows),
            f"The cache was made for {self.rows} rows, and the call has {at.pos.shape[0]}.",
        )
        require(
            at.segment is None and at.prefix is None and at.pairs is None,
            "Masks that need data of the call (segments, prefix, adjacency) have no cached form.",
        )
        for slots in self.kinds:
            slots.check_room(at)
        if not follow:
            self.gather()
        elif self.shared is not None:
            self.shared.place(at.pos.expand(self.rows, -1)[:, 0])
        keys = []
        for slots in self.kinds:
            if follow:
                slots.take(at)
            else:
                keys.append(slots.begin(at))
        now = at.row_ends(self.rows)
        self.ends = tuple(max(old, new) for old, new in zip(self.ends, now, strict=True))
        self.peaks = tuple(max(old, new) for old, new in zip(self.peaks, now, strict=True))
        return keys

    def reorder(self, rows: Int[Tensor, " n"]) -> None:
        """Row i becomes what row rows[i] was; with several beams, rows stay inside their source.

        Rows on a CPU are checked; to look at those on another device would mean to wait for it.
        There keys and values stay where they are, if they can: `shared` says where, until the next
        call of somebody who cannot follow that (`begin`), or `gather`.
        """
        beams = self._beams()
        if rows.device.type == "cpu":
            self._check_rows(rows, beams)
        self._select_rows(rows)
        if beams == 1:
            self._select_sources(rows)

    def fan_out(self, beams: int, device: torch.device | str | None = None) -> None:
        """Every row becomes so many, one behind the other, that share its source."""
        require(beams >= 1, f"A row becomes 1 row or more, not {beams}.")
        if beams > 1:
            self._select_rows(torch.arange(self.rows, device=device).repeat_interleave(beams))

    def reserve(self, tokens: int) -> None:
        """Give every row slots for so many tokens more, before it is read and becomes several
        (`fan_out`): to find out later that they are needed takes old and new ones at once.
        """
        self.gather()
        if self._may_share():
            for state in self._kv():
                state.grow(state.slots.size + tokens, state.slots.used)

    def make_room(self) -> None:
        """See that rows that share their past have a slot for one token more."""
        if self.shared is None:
            return
        slots = self.kinds[0]
        size = self.shared.make_room(slots.where[:, : slots.used] >= 0)
        for state in self._kv():
            if state.k.shape[2] < size:  # of each, or one that failed before would stay small
                state.grow(size, state.k.shape[2])

    def gather(self) -> None:
        """Bring keys and values to the rows that they belong to."""
        if self.shared is None:
            return
        shared, self.shared = self.shared, None
        for state in self._kv():
            state.part(shared)

    def keep(self, sources: Int[Tensor, " n"]) -> None:
        """Keep these sources with all their beams, and drop the rest (finished ones)."""
        beams = self._beams()
        if sources.device.type == "cpu":
            _check_inside(sources, self.rows // beams, "source")
        steps = torch.arange(beams, device=sources.device)
        self._select_rows((sources.unsqueeze(1) * beams + steps).flatten())
        self._select_sources(sources)

    def trim(self, ends: int | Sequence[int]) -> None:
        """Go back: every row, or each row by itself, forgets its positions from `ends` on."""
        ends = (ends,) * self.rows if isinstance(ends, int) else tuple(ends)
        require(len(ends) == self.rows, f"trim was given {len(ends)} lengths for {self.rows} rows.")
        require(min(ends) >= 0, f"trim cannot go back before the start: {min(ends)}.")
        require(
            self.trims,
            "This model's state is a summary of the past and cannot go back: take a snapshot() "
            "first.",
        )
        for slots in self.kinds:
            slots.check_trim(ends, self.peaks)
        self.gather()
        for slots in self.kinds:
            slots.trim(ends)
        self.ends = tuple(min(old, new) for old, new in zip(self.ends, ends, strict=True))

    def snapshot(self) -> Cache:
        """An independent copy of everything remembered; the source, never written to, is shared."""
        self.gather()
        parts = (*self.kinds, *self.states, *self.cross)
        tensors = [x for part in parts for x in vars(part).values() if isinstance(x, Tensor)]
        # Without their history: deepcopy refuses a tensor that an operation made under autograd.
        copies = {id(x): x.detach().clone() for x in tensors}
        return copy.deepcopy(self, {id(self.memory): self.memory, **copies})

    def restore(self, snapshot: Cache) -> None:
        """Go back to what `snapshot` returned; it may be restored again."""
        vars(self).update(vars(snapshot.snapshot()))

    def _beams(self) -> int:
        return 1 if self.memory is None else self.rows // self.memory.rows

    def _check_rows(self, rows: Int[Tensor, " n"], beams: int) -> None:
        _check_inside(rows, self.rows, "row")
        if beams == 1:
            return
        home = torch.arange(self.rows) // beams
        require(
            len(rows) == self.rows and torch.equal(rows // beams, home),
            f"Each source has {beams} beams here, whose rows may change places only among "
            f"themselves: rows {rows.tolist()} leave their source. To drop sources use keep.",
        )

    def _select_rows(self, rows: Int[Tensor, " n"]) -> None:
        if self._can_share(rows):
            self._share(rows)
        else:
            self.gather()
            for state in self.states:
                state.select(rows)
        for slots in self.kinds:
            slots.select(rows)
        if len(set(self.ends)) == len(set(self.peaks)) == 1:
            # Then the order does not matter, and no device is waited for.
            self.ends, self.peaks = self.ends[:1] * len(rows), self.peaks[:1] * len(rows)
        else:
            order = rows.tolist()
            self.ends = tuple(self.ends[i] for i in order)
            self.peaks = tuple(self.peaks[i] for i in order)

    def _may_share(self) -> bool:
        """Whether rows could have keys and values in common."""
        if not self.states or not all(type(state) is KV for state in self.states):
            return False
        states = self._kv()
        return (
            all(state.k.is_cpu and state.slots.reach is None for state in states)
            and len({(state.slots.size, *state.k.shape[1:]) for state in states}) == 1
            and not any(state.k.requires_grad or state.v.requires_grad for state in states)
        )

    def _can_share(self, rows: Int[Tensor, " n"]) -> bool:
        """Whether rows that become alike can have one copy; else each has its own."""
        return (
            rows.device.type == "cpu"  # first: whoever asks another device for its rows waits
            and self._may_share()
            and (self.shared is not None or len(rows.unique()) < len(rows))
        )

    def _share(self, rows: Int[Tensor, " n"]) -> None:
        if self.shared is None:
            slots, own = self.kinds[0], torch.arange(self.rows)
            size = self._kv()[0].k.shape[2]
            self.shared = Shared(own, self.rows, size, slots.used)
        self.shared.select(rows)
        if 2 * len(self.shared.homes.unique()) <= self.shared.count:
            kept = self.shared.leave()  # half of the memory is free then
            for state in self._kv():
                state.leave(kept)

    def _kv(self) -> list[KV]:
        return [state for state in self.states if isinstance(state, KV)]

    def _select_sources(self, sources: Int[Tensor, " n"]) -> None:
        for state in self.cross:
            state.select(sources)
        if self.memory is not None:
            self.memory = self.memory.select(sources)


def _check_inside(rows: Int[Tensor, " n"], count: int, what: str) -> None:
    """Refuse rows that are not there, before anything is moved."""
    require(
        not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < count),
        f"There are {count} {what}s in this cache (0 to {count - 1}), not {rows.tolist()}.",
    )
