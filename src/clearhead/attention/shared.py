"""Rows that share their past: keys and values exist once, and a table says where.

The beams of a search, the samples of a prompt and the candidates of a step begin alike. Their keys
and values lie in one row of the buffers, their home, and every row knows in which slot of its home
each of its positions is:

    home 0   the cat sat ran on in .        row 0   0 1 2 4    the cat sat on
              0   1   2   3  4  5           row 1   0 1 2 5    the cat sat in
                                            row 2   0 1 3 4    the cat ran on

A new token takes a slot that no row of its home looks at any more: what a search has dropped is
written over, and homes grow only when all of their slots are in use.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

GROWTH = 4  # a home that is full becomes larger by this part of it


class Shared:
    """Which home each row has, and where in it its positions are."""

    def __init__(self, homes: Int[Tensor, " rows"], count: int, size: int, used: int) -> None:
        """Rows whose first `used` positions are in the slots of that number, in some of `count`
        homes with `size` slots.
        """
        self.homes, self.count, self.size = homes, count, size
        device = homes.device
        slots = torch.arange(size, device=device)
        self.table = slots.where(slots < used, 0).repeat(len(homes), 1)
        self.free = torch.arange(used, size, device=device).expand(count, -1)
        self.taken = 0  # so many of the free slots of every home are not free any more
        self.turn, self.most = _turns(homes)

    def in_order(self, used: int) -> bool:
        """Whether the first positions are in the slots of their numbers."""
        slots = torch.arange(used, device=self.table.device)
        return torch.equal(self.table[:, :used], slots.expand(len(self.homes), -1))

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Row i becomes what row rows[i] was."""
        self.table, homes = self.table[rows], self.homes[rows]
        if not torch.equal(homes, self.homes):
            self.homes = homes
            self.turn, self.most = _turns(homes)

    def make_room(self, filled: Bool[Tensor, "rows used"]) -> int:
        """See that every row finds a free slot, where `filled` are the positions that rows have;
        returns how many slots a home must have for it.
        """
        if self.taken + self.most <= self.free.shape[1]:
            return self.size
        self._look_for_free_slots(filled)
        if self.free.shape[1] < self.most:
            self.size += max(self.most, -(-self.size // GROWTH))
            self._look_for_free_slots(filled)
        return self.size

    def place(self, pos: Int[Tensor, " rows"]) -> None:
        """Give a free slot to the next position of every row; `make_room` came before."""
        rows = torch.arange(len(pos), device=pos.device)
        self.table[rows, pos] = self.free[self.homes, self.taken + self.turn]
        self.taken += self.most

    def leave(self) -> Int[Tensor, " kept"]:
        """Give up homes in which no row is; returns the numbers of those that stay."""
        kept, self.homes = self.homes.unique(return_inverse=True)
        self.free, self.count = self.free[kept], len(kept)
        return kept

    def _look_for_free_slots(self, filled: Bool[Tensor, "rows used"]) -> None:
        used = filled.new_zeros(self.count * self.size + 1)
        slots = self.homes.unsqueeze(1) * self.size + self.table[:, : filled.shape[1]]
        used[slots.where(filled, self.count * self.size)] = True
        used = used[:-1].view(self.count, self.size)
        fewest = self.size - int(used.sum(dim=1).max())
        self.free = used.to(torch.uint8).argsort(dim=1, stable=True)[:, :fewest]
        self.taken = 0


def _turns(homes: Int[Tensor, " rows"]) -> tuple[Int[Tensor, " rows"], int]:
    """How many rows before each have its home, and the most rows of one."""
    ordered, order = homes.sort(stable=True)
    number = torch.arange(len(homes), device=homes.device)
    turn = torch.empty_like(homes)
    turn[order] = number - torch.searchsorted(ordered, ordered)
    return turn, int(turn.max()) + 1 if len(homes) else 0
