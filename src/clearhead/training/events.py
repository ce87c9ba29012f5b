"""What a run tells whoever iterates over it: a `Step`, with the events that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clearhead.training.finding import Finding

Say = Callable[[str], None]


def silent(message: str) -> None:
    """Hear a message and say nothing."""


@dataclass(frozen=True)
class Event:
    """Something that happened at a step."""


@dataclass(frozen=True)
class Evaluated(Event):
    """The validation data were measured."""

    scores: dict[str, float]
    """Name -> value: loss and what follows from it."""
    best: bool
    """Whether this is the best so far."""


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is complete."""

    path: Path
    """Its folder."""


@dataclass(frozen=True)
class Skipped(Event):
    """The step was not taken; weights and optimiser are as before."""

    why: str
    """What was wrong."""


@dataclass(frozen=True)
class Shortened(Event):
    """The run is slower than when it was planned, and gets fewer steps to keep its time."""

    steps: int
    """How many there will be now."""

    def __str__(self) -> str:
        return f"slower than planned: {self.steps:,} steps now, to keep the time that was given"


@dataclass(frozen=True)
class Stopped(Event):
    """The run ends here, before its last step."""

    why: str
    """For what reason."""


@dataclass(frozen=True)
class Found(Event):
    """The diagnosis has something to say."""

    finding: Finding
    """What it found."""

    def __str__(self) -> str:
        return str(self.finding)


@dataclass(frozen=True)
class Step:
    """One update."""

    number: int
    """Which one, from 1."""
    total: int
    """How many there will be."""
    loss: float
    """The mean over all targets of the step (with label smoothing, where there is any)."""
    lr: float
    """The base learning rate at this step."""
    grad_norm: float
    """Length of the whole gradient, before it was clipped."""
    tokens: int
    """How many tokens the step saw."""
    slots: int
    """How many slots, padding included."""
    seconds: float
    """How long it took."""
    events: tuple[Event, ...] = field(default=())
    """What else happened."""
