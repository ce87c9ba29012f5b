"""Checkpoints: whole or not there at all, hashed, and pruned only when the next one is complete.

checkpoints/step-N/
  config.json model.safetensors tokenizer.json   a model's folder: `ch.load` opens it
  shards/                                        or all tensors in pieces, see `sharded.py`
  optim.safetensors                              what the optimisers remember, by parameter
  ema.safetensors                                the running average, where there is one
  state.json                                     step, guard, best score: all that is no tensor
  MANIFEST.json                                  size and sha256 of each of them, written last

A folder is written under another name, flushed to the disk and renamed. Random states are not in it
because there is nothing to keep: the dice of a step are thrown from (seed, step), see `loop.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.optim import Optimizer

from clearhead.errors import ClearheadError
from clearhead.training.world import World

MANIFEST, STATE = "MANIFEST.json", "state.json"
OPTIM, EMA_FILE = "optim.safetensors", "ema.safetensors"
NAME = re.compile(r"step-(\d+)")
ALONE = World()


def write_checkpoint(
    runs: Path, step: int, fill: Callable[[Path], None], world: World = ALONE
) -> Path:
    """Make `runs/step-N`: `fill` writes its files into a folder that is renamed when all is done.

    Every process calls it and fills the one folder; the first one seals it. If it fails in one, it
    fails in all.
    """
    final, new = runs / f"step-{step}", runs / f".step-{step}-new"
    try:
        _together(world, lambda: _make(new) if world.first else None)
        _together(world, lambda: fill(new))
        _together(world, lambda: _seal(new, final, step) if world.first else None)
    except (OSError, SafetensorError, ClearheadError) as error:
        why = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise ClearheadError(
            f"The checkpoint of step {step} could not be written ({why}). The one before it "
            "is whole: make room, then go on with --resume."
        ) from error
    finally:
        if world.first:
            shutil.rmtree(new, ignore_errors=True)
    return final


def _together(world: World, act: Callable[[], None]) -> None:
    """Act, then wait for the others; what goes wrong in one process goes wrong in all."""
    wrong: Exception | None = None
    try:
        act()
    except (OSError, SafetensorError, ClearheadError) as error:
        wrong = error
    if world.agree(wrong is not None):
        raise wrong or OSError("another process could not write")


def _make(new: Path) -> None:
    """An empty folder, whatever a run that was killed left there."""
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)


def _seal(new: Path, final: Path, step: int) -> None:
    """Hash and flush all files, list them, and give the folder its name."""
    files = sorted(path for path in new.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    described = {
        path.relative_to(new).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }
    (new / MANIFEST).write_text(json.dumps({"step": step, "files": described}, indent=1) + "\n")
    for path in (new / MANIFEST, *(p for p in new.rglob("*") if p.is_dir()), new):
        _flush(path)
    if final.exists():  # left by a run that went this way before
        shutil.rmtree(final)
    new.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def steps_of(runs: Path) -> list[tuple[int, Path]]:
    """The checkpoints there are, the newest first; whether they are whole is not looked at."""
    if not runs.is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in runs.iterdir()]
    return sorted(((int(m.group(1)), path) for m, path in found if m), reverse=True)


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, said in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != said["bytes"]:
                return f"{name} has {path.stat().st_size} bytes and should have {said['bytes']}"
            if sha256(path) != said["sha256"]:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    return None


def newest(runs: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint; `say` hears why others are passed over."""
    for step, path in steps_of(runs):
        wrong = fault(path)
        if wrong is None:
            return path
        say(f"The checkpoint of step {step} is passed over: {wrong}.")
    return None


def step_of(folder: Path) -> int:
    """The number in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def regular(runs: Path, every: int, last: int) -> list[Path]:
    """The checkpoints that were due, the newest first, and not those of a run that was asked to
    stop: an average of checkpoints must not depend on where a run was interrupted.
    """
    return [path for step, path in steps_of(runs) if step % every == 0 or step == last]


def prune(runs: Path, keep: int, also: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` and those in `also`, and what unfinished writing left."""
    for _, path in steps_of(runs)[keep:]:
        if path not in also:
            (path / MANIFEST).unlink(missing_ok=True)  # so that half a deletion is no checkpoint
            shutil.rmtree(path, ignore_errors=True)
    for path in runs.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def optimiser_tensors(optimisers: list[Optimizer]) -> dict[str, Tensor]:
    """Everything the optimisers remember, under "optimiser.parameter.name"."""
    return {
        f"{o}.{index}.{name}": value.contiguous()
        for o, optimiser in enumerate(optimisers)
        for index, state in optimiser.state_dict()["state"].items()
        for name, value in state.items()
    }


def optimiser_parameter(optimisers: list[Optimizer], key: str) -> Tensor:
    """The parameter that a name of `optimiser_tensors` belongs to."""
    o, index, _ = key.split(".", 2)
    every = [p for group in optimisers[int(o)].param_groups for p in group["params"]]
    return every[int(index)]


def restore_optimisers(optimisers: list[Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put back what `optimiser_tensors` gave."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimisers]
    for key, value in tensors.items():
        o, index, name = key.split(".", 2)
        states[int(o)].setdefault(int(index), {})[name] = value
    for optimiser, state in zip(optimisers, states, strict=True):
        optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    try:
        return dict(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ClearheadError(f"{folder / STATE} cannot be read ({error}).") from error
