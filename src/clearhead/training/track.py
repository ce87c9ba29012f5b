"""Figures of a run for programs that show them: tensorboard and trackio (extra `track`).

tracker = open_tracker("tensorboard", folder, recipe, after=0)
for step in ...: tracker.log(step.number, figures_of(step))
tracker.close()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.training.events import Evaluated, Step
from clearhead.training.folder import RunFolder
from clearhead.training.recipe import Recipe

PROJECT = "clearhead"


@runtime_checkable
class Tracker(Protocol):
    """Something that takes figures by step."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Take some."""

    def close(self) -> None:
        """Take no more."""


class Tensorboard:
    """Event files in the run's folder: tensorboard --logdir runs"""

    def __init__(self, folder: RunFolder, recipe: Recipe, after: int) -> None:
        module = _module("torch.utils.tensorboard", "tensorboard")
        place = str(folder.path / "tensorboard")
        self._writer = module.SummaryWriter(place, purge_step=after + 1 if after else None)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """One point on each curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Trackio:
    """trackio's data base of this computer: trackio show"""

    def __init__(self, folder: RunFolder, recipe: Recipe, after: int) -> None:
        self._module = _module("trackio", "trackio")
        name = folder.path.resolve().name
        more = {"resume": "allow"} if after else {}
        self._module.init(project=PROJECT, name=name, config=recipe.to_dict(), **more)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """One point on each curve."""
        self._module.log(dict(figures), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._module.finish()


TRACKERS: dict[str, Callable[[RunFolder, Recipe, int], Tracker]] = {
    "tensorboard": Tensorboard,
    "trackio": Trackio,
}


def _module(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ClearheadError(
            f"{package} is not installed: pip install 'clearhead[track]'"
        ) from error


def check_tracker(name: str) -> None:
    """Refuse a tracker that is unknown or not installed, before a run begins."""
    require(
        name in TRACKERS,
        f'There is no tracker "{name}".{did_you_mean(name, TRACKERS)} There are: '
        f"{', '.join(TRACKERS)}.",
    )
    _module("torch.utils.tensorboard" if name == "tensorboard" else name, name)


def open_tracker(name: str, folder: RunFolder, recipe: Recipe, after: int = 0) -> Tracker:
    """Begin; `after` is the step behind which a run goes on."""
    check_tracker(name)
    return TRACKERS[name](folder, recipe, after)


def figures_of(step: Step) -> dict[str, Any]:
    """What is worth a curve."""
    figures = {
        "train/loss": step.loss,
        "train/lr": step.lr,
        "train/grad_norm": step.grad_norm,
        "train/tokens_per_second": step.tokens / max(step.seconds, 1e-9),
    }
    for event in step.events:
        if isinstance(event, Evaluated):
            figures |= {f"valid/{name}": value for name, value in event.scores.items()}
    return figures
