"""Learning rates over a run: a factor of the base rate for every step.

constant        1
linear          from 1 down to `to`
cosine          to + (1 - to) (1 + cos(pi p)) / 2             Loshchilov and Hutter 2017
inverse_sqrt    sqrt(warmup / step)
noam            m^-1/2 min(step^-1/2, step warmup^-3/2)       Vaswani et al. 2017, section 5.3
wsd             1, then down to `to` over the last `decay`    Hu et al. 2024; `again`: see there

p is how much of the run behind the warm-up was over before a step: 0 at its first, and at the last
not quite 1, so that the last step moves, too. Every schedule but noam, which has its own, rises in
a straight line over the warm-up first. Steps count from 1. wsd: warm-up, stable, decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from clearhead.config import Spec
from clearhead.errors import ClearheadError, require


class Schedule(Spec):
    """A learning rate over a run."""

    def factor(self, step: int, total: int, warmup: int) -> float:
        """What the base rate is multiplied by at a step (from 1) of `total`."""
        if step <= warmup:
            return step / warmup
        return self.after(step, total, warmup)

    def after(self, step: int, total: int, warmup: int) -> float:
        """The factor once the warm-up is over."""
        return 1.0


def _gone(step: int, total: int, warmup: int) -> float:
    """How much of the run behind the warm-up was over before this step, from 0 to 1."""
    return min(1.0, (step - 1 - warmup) / max(1, total - warmup))


def _check_to(to: float) -> None:
    require(0 <= to <= 1, f"A schedule ends at a part of the base rate from 0 to 1, not at {to}.")


@dataclass(frozen=True)
class Constant(Schedule, kind="constant"):
    """The base rate to the end."""


@dataclass(frozen=True)
class Linear(Schedule, kind="linear"):
    """A straight line down."""

    to: float = 0.0
    """Where it ends, as a part of the base rate."""

    def __post_init__(self) -> None:
        _check_to(self.to)

    def after(self, step: int, total: int, warmup: int) -> float:
        return 1.0 - (1.0 - self.to) * _gone(step, total, warmup)


@dataclass(frozen=True)
class Cosine(Schedule, kind="cosine"):
    """Half a cosine down."""

    to: float = 0.1
    """Where it ends, as a part of the base rate."""

    def __post_init__(self) -> None:
        _check_to(self.to)

    def after(self, step: int, total: int, warmup: int) -> float:
        bend = (1.0 + math.cos(math.pi * _gone(step, total, warmup))) / 2
        return self.to + (1.0 - self.to) * bend


@dataclass(frozen=True)
class InverseSqrt(Schedule, kind="inverse_sqrt"):
    """Falls with the square root of the step; needs no end."""

    def after(self, step: int, total: int, warmup: int) -> float:
        return math.sqrt(max(warmup, 1) / step)


@dataclass(frozen=True)
class Noam(Schedule, kind="noam"):
    """The schedule of 2017, whose height follows from the width; its base rate is 1 unless set."""

    d_model: int | None = None
    """Width of the model; None: a run fills in its own."""

    def __post_init__(self) -> None:
        require(
            self.d_model is None or self.d_model >= 1,
            f"d_model must be 1 or more, not {self.d_model}.",
        )

    def factor(self, step: int, total: int, warmup: int) -> float:
        if self.d_model is None:
            raise ClearheadError("noam does not know the width of the model: Noam(d_model=512).")
        warmup = max(warmup, 1)
        return float(self.d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))


@dataclass(frozen=True)
class WarmupStableDecay(Schedule, kind="wsd"):
    """Stays up, then goes down in a straight line; a longer run shares the stable part."""

    decay: float = 0.2
    """The part of all steps that goes down."""
    to: float = 0.0
    """Where it ends, as a part of the base rate."""
    again: float = 0.0
    """The last part of all steps, in which it goes down once more from the base rate; `decay` is
    then a part of the steps before. The loss rises first, which `train.patience` may take for the
    end. Wen et al. 2024; differs from the paper: it is not stable once more before it falls.
    """

    def __post_init__(self) -> None:
        require(0 < self.decay <= 1, f"decay is a part of the run, in (0, 1], not {self.decay}.")
        require(0 <= self.again < 1, f"again is a part of the run, in [0, 1), not {self.again}.")
        _check_to(self.to)

    def after(self, step: int, total: int, warmup: int) -> float:
        first = total - round(self.again * total)
        end, falling = (first, self.decay * first) if step <= first else (total, total - first)
        left = min(1.0, max(0.0, (end - step + 1) / max(1.0, falling)))
        return self.to + (1.0 - self.to) * left
