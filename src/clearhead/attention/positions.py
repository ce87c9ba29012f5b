"""Positions are data: where each slot of a batch stands, -1 where a slot holds nothing.

Masks, rotations and biases are functions of (query position, key position), never of array indices.
So left padding, right padding, ragged batches, half-filled caches and ring buffers are no special
cases. Beside the numbers a `Positions` carries facts its maker knew (Python values): whoever asks
them waits for no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.errors import require


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Where the slots of one call stand, and what the call knows about them."""

    pos: Int[Tensor, "#b t"]
    """The position of each slot, -1 if it is empty; one row stands for every row of the batch."""
    lo: int
    """No filled slot stands before this."""
    hi: int
    """The last filled slot stands here (-1: nothing is filled)."""
    dense: bool
    """Every row is lo, lo + 1, ..., hi."""
    holes: bool
    """Some slots may be empty."""
    ends: tuple[int, ...] | None = None
    """The position that follows each row's last; None: hi + 1 in every row."""
    segment: Int[Tensor, "#b t"] | None = None
    """The document each slot belongs to, for the `Segments` mask."""
    prefix: Int[Tensor, " #b"] | None = None
    """How many positions at the start see each other whole, for the `Prefix` mask."""
    pairs: Bool[Tensor, "#b n n"] | None = None
    """Which position may look at which, for the `Adjacency` mask (graphs)."""

    @staticmethod
    def span(start: int, length: int, device: torch.device | str | None = None) -> Positions:
        """start, start + 1, ..., the same in every row."""
        pos = torch.arange(start, start + length, device=device).unsqueeze(0)
        return Positions(pos, lo=start, hi=start + length - 1, dense=True, holes=False)

    @staticmethod
    def ragged(
        lengths: Sequence[int],
        side: Literal["left", "right"] = "right",
        start: int | Sequence[int] = 0,
        width: int | None = None,
        device: torch.device | str | None = None,
    ) -> Positions:
        """Rows of different lengths, the empty slots on one side.

        Each row counts from its own start.
        """
        lengths = list(lengths)
        starts = [start] * len(lengths) if isinstance(start, int) else list(start)
        require(
            len(lengths) > 0 and min(lengths) >= 0, f"lengths must be 0 or more, not {lengths}."
        )
        require(side in ("left", "right"), f'side must be "left" or "right", not {side!r}.')
        require(
            len(starts) == len(lengths),
            f"{len(lengths)} rows were given {len(starts)} starts: one a row.",
        )
        width = max(lengths) if width is None else width
        require(
            width >= max(lengths), f"a row of {max(lengths)} slots does not fit a width of {width}."
        )
        if len(set(lengths)) == 1 == len(set(starts)) and lengths[0] == width > 0:
            return Positions.span(starts[0], width, device)
        rows = []
        for length, first in zip(lengths, starts, strict=True):
            filled, empty = list(range(first, first + length)), [-1] * (width - length)
            rows.append(empty + filled if side == "left" else filled + empty)
        ends = tuple(first + length for first, length in zip(starts, lengths, strict=True))
        return Positions(
            torch.tensor(rows, device=device, dtype=torch.long).reshape(len(lengths), width),
            lo=min(starts),
            hi=max((end - 1 for end, n in zip(ends, lengths, strict=True) if n), default=-1),
            dense=False,
            holes=min(lengths) < width,
            ends=ends,
        )

    @staticmethod
    def of(pos: Int[Tensor, "b t"]) -> Positions:
        """Any positions at all; the facts are read off the tensor (on a GPU that waits for it)."""
        require(
            pos.dim() == 2 and not pos.is_floating_point(),
            f"Positions are whole numbers of shape [batch, length], not {pos.dtype} "
            f"{tuple(pos.shape)}.",
        )
        require(pos.numel() > 0, "Positions.of needs at least one slot.")
        filled = pos[pos >= 0]
        lo, hi = (int(filled.min()), int(filled.max())) if filled.numel() else (0, -1)
        return Positions(
            pos.long(),
            lo=lo,
            hi=hi,
            dense=False,
            holes=filled.numel() < pos.numel(),
            ends=tuple((pos.amax(dim=1) + 1).clamp(min=0).tolist()),
        )

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device | str | None = None) -> Positions:
        """Documents one behind the other in a single row, each counting from 0.

        Use it with `Segments`.
        """
        require(
            len(lengths) > 0 and min(lengths) > 0, f"documents need at least one slot: {lengths}."
        )
        pos = torch.cat([torch.arange(n, device=device) for n in lengths]).unsqueeze(0)
        numbers = torch.arange(len(lengths), device=device)
        segment = numbers.repeat_interleave(torch.tensor(lengths, device=device)).unsqueeze(0)
        hi = max(lengths) - 1
        return Positions(pos, lo=0, hi=hi, dense=False, holes=False, segment=segment)

    def with_data(
        self,
        segment: Int[Tensor, "#b t"] | None = None,
        prefix: Int[Tensor, " #b"] | None = None,
        pairs: Bool[Tensor, "#b n n"] | None = None,
    ) -> Positions:
        """The same positions with what a mask of this call needs to know."""
        given = {"segment": segment, "prefix": prefix, "pairs": pairs}
        return dataclasses.replace(self, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """How many slots a row has, empty ones included."""
        return self.pos.shape[1]

    def filled(self) -> Bool[Tensor, "b t"]:
        """Which slots hold something."""
        return self.pos >= 0

    def row_ends(self, rows: int) -> tuple[int, ...]:
        """For each of so many rows, the position that follows its last."""
        if self.ends is None:
            return (self.hi + 1,) * rows
        return self.ends * rows if len(self.ends) == 1 else self.ends

    def distance(self, keys: Positions) -> Int[Tensor, "b q k"]:
        """query position - key position, for every pair (an empty slot counts as -1)."""
        return self.pos.unsqueeze(2) - keys.pos.unsqueeze(1)
