"""One batch: what the network takes, where its slots stand, and what is asked of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a target that is not asked for (PyTorch's own choice for cross-entropy)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """What one forward and its loss need; made by an objective's `collate`."""

    inputs: tuple[Tensor, ...]
    """What the network takes: (ids,), or (source, target) for an encoder-decoder."""
    targets: Tensor
    """What is asked, in the objective's own form: ids or labels, IGNORED where nothing is."""
    places: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The network's keywords: `at`, or `source_at` and `target_at`; `types`. Nothing where every
    slot is filled."""
    count: int = 0
    """How many targets are asked for: the loss of a step is a sum divided by the step's count, so
    that cutting a batch into parts, or sharing it among processes, changes nothing."""
    slots: int = 0
    """How many slots the inputs have, padding included."""
    tokens: int = 0
    """How many of them hold a token."""

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        if torch.device(device).type == "cpu":
            return self
        moved = {
            name: value.to(device)
            if isinstance(value, Tensor)
            else dataclasses.replace(value, pos=value.pos.to(device))
            for name, value in self.places.items()
        }
        inputs = tuple(tensor.to(device, non_blocking=True) for tensor in self.inputs)
        targets = self.targets.to(device, non_blocking=True)
        return dataclasses.replace(self, inputs=inputs, targets=targets, places=moved)

    def part(self, rank: int, size: int) -> Batch:
        """Every `size`-th row from row `rank` on: what one of several processes works on.

        `count` stays that of the whole batch, by which its loss is divided. Where there are more
        processes than rows, some have none: such a part is row 0 again with a count of 0, so that
        its process does what the others do and its loss can be multiplied by 0.
        """
        if size == 1:
            return self
        asked = self.targets.shape[0]
        count = self.count if rank < asked else 0
        own = torch.arange(rank if count else 0, asked if count else 1, size)
        blocks = range(0, self.inputs[0].shape[0], asked)  # two where texts come in pairs
        rows = torch.cat([own + first for first in blocks])
        places = {name: _rows(value, rows) for name, value in self.places.items()}
        inputs = tuple(tensor[rows] for tensor in self.inputs)
        return dataclasses.replace(
            self, inputs=inputs, targets=self.targets[own], places=places, count=count
        )

    def twice(self) -> Batch:
        """Every row a second time, behind all the others; what is asked stays as it is."""
        rows = torch.arange(self.inputs[0].shape[0], device=self.inputs[0].device).repeat(2)
        places = {name: _rows(value, rows) for name, value in self.places.items()}
        inputs = tuple(tensor[rows] for tensor in self.inputs)
        return dataclasses.replace(self, inputs=inputs, places=places)


def _rows(value: Any, rows: Tensor) -> Any:
    """Some rows of a tensor, or of positions (of which one row may stand for all)."""
    if isinstance(value, Tensor):
        return value if value.shape[0] == 1 else value[rows]
    fields = ("pos", "segment", "prefix", "pairs")
    cut = {f: _rows(t, rows) for f in fields if (t := getattr(value, f)) is not None}
    ends = value.ends
    if ends is not None and len(ends) > 1:
        ends = tuple(ends[row] for row in rows.tolist())
    return dataclasses.replace(value, **cut, ends=ends)
