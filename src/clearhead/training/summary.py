"""Runs side by side: how far each came, and in what their recipes differ.

Read from what is on the disk; a folder that is damaged is listed as broken and not an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from clearhead.errors import ClearheadError, require
from clearhead.recipes import recipe_names
from clearhead.training.checkpoint import MANIFEST, steps_of
from clearhead.training.folder import RECIPE, RunFolder
from clearhead.training.reached import END, measured_already
from clearhead.training.recipe import Recipe
from clearhead.training.run import read_recipe

# Settings that say where and how often something is done, not what comes out.
MACHINE = tuple(
    f"train.machine.{key}" for key in ("device", "threads", "products", "compile", "recompute")
)
ASIDE = (*MACHINE, "train.eval_every", "train.checkpoint_every", "train.keep", "eval.prompt")
State = Literal["running", "finished", "stopped", "begun", "broken"]


@dataclass(frozen=True)
class Summary:
    """One run."""

    path: str
    """Its folder."""
    state: State
    """Running in another process; finished; stopped with a checkpoint; begun, without one yet;
    broken: it cannot go on.
    """
    done: int = 0
    """Steps that were taken."""
    total: int | None = None
    """Steps that it has."""
    best: float | None = None
    """The best validation loss."""
    loss: float | None = None
    """The last training loss."""
    tokens: int = 0
    """Tokens seen."""
    seconds: float = 0.0
    """Time it took."""
    metric: str | None = None
    """What its recipe measures at the end."""
    reached: float | None = None
    """How much of it there was; None: that was not measured yet."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its recipe by dotted keys."""


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The runs among these folders and right inside them, by name."""
    found: list[Path] = []
    for place in places:
        path = Path(place)
        require(path.is_dir(), f"There is no folder {path}.")
        if (path / RECIPE).is_file():
            found.append(path)
            continue
        inside = sorted(inner for inner in path.iterdir() if (inner / RECIPE).is_file())
        found += inside
    return list(dict.fromkeys(found))


def summarise(path: Path) -> Summary:
    """What is known of a run."""
    folder = RunFolder(path)
    settings = _settings(path / RECIPE)
    done, tokens, seconds = 0, 0, 0.0
    loss = best = reached = None
    metric = (settings or {}).get("eval.metric")
    enough = _enough(folder)
    for line in folder.metrics():
        done = max(done, int(line.get("step", 0)))
        if "loss" in line:
            loss, tokens, seconds = line["loss"], line["tokens"], line["seconds"]
        score = line.get("valid", {}).get("loss")
        if score is not None and math.isfinite(score):
            best = score if best is None else min(best, score)
        reached = line.get("valid" if enough else END, {}).get(metric, reached)
    total = (settings or {}).get("train.steps")
    state = "broken" if settings is None else _state(folder, done, total)
    return Summary(
        str(path),
        state,
        done=done,
        total=total,
        best=best,
        loss=_finite(loss),
        tokens=tokens,
        seconds=seconds,
        metric=metric,
        reached=_finite(reached) if state == "finished" else None,
        settings=settings or {},
    )


def _enough(folder: RunFolder) -> bool:
    """Whether the last evaluation is what the run reached, and no line of the end follows."""
    try:
        return measured_already(folder.read_recipe())
    except ClearheadError:
        return False


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _state(folder: RunFolder, done: int, total: int | None) -> State:
    there = steps_of(folder.checkpoints)
    if folder.running:
        return "running"
    if folder.model.is_dir() and (total is None or done >= total or not _behind(folder)):
        return "finished"
    if not there:
        return "begun"
    return "stopped" if any((path / MANIFEST).is_file() for _, path in there) else "broken"


def _behind(folder: RunFolder) -> bool:
    """Whether a checkpoint is younger than the model: a run that was made longer and stopped."""
    there = steps_of(folder.checkpoints)
    return bool(there) and there[0][1].stat().st_mtime > folder.model.stat().st_mtime


def _settings(path: Path) -> dict[str, Any] | None:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return dict(flat(data)) if isinstance(data, dict) else None


def flat(table: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys and their values."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def differences(runs: Iterable[Summary]) -> dict[str, list[Any]]:
    """Settings that are not the same in all: key -> its value in each run."""
    runs = list(runs)
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    table = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: row for key, row in table.items() if any(value != row[0] for value in row)}


def changed_settings(recipe: Recipe) -> list[str]:
    """In what a run differs from the recipe that it is named after, as dotted keys."""
    if recipe.name not in recipe_names():
        return []
    own, shipped = (dict(flat(r.to_dict())) for r in (recipe, read_recipe(recipe.name)))
    if own.get("eval.expect") != shipped.get("eval.expect"):
        return []  # somebody's own, which has that name by chance
    # What minutes became; and a tokeniser that came with the model the run starts from.
    timed = ("train.steps", "train.minutes", "optim.warmup") if shipped["train.minutes"] else ()
    aside = (*ASIDE, *timed, *(("tokenizer",) if recipe.model.source else ()))
    keys = [key for key in {**own, **shipped} if not key.startswith(aside)]
    changed = [key for key in keys if own.get(key) != shipped.get(key)]
    return sorted(changed, key=lambda key: key not in ("model.from", "train.steps"))
