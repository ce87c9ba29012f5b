"""The folder of a run: its recipe, its figures line by line, its checkpoints, its model.

recipe.yaml       what the run is made from, complete
env.json          on what it ran
tokenizer/        how its text became tokens
metrics.jsonl     one line a step, an evaluation or an event
checkpoints/      see `checkpoint.py`; `latest` names the newest
curves.png        losses, rate and speed over the steps (where matplotlib is installed)
model/            what came out
.lock             held by the process that trains here, as long as it lives
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from clearhead.errors import ClearheadError, require
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.recipe import Recipe
from clearhead.training.world import launch

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

RECIPE, METRICS, ENV, LATEST = "recipe.yaml", "metrics.jsonl", "env.json", "latest"
CHECKPOINTS, MODEL, BEST, TOKENIZER = "checkpoints", "model", "best", "tokenizer"
LOCK = ".lock"
NOTHING = {LOCK, f".{RECIPE}.new"}  # all that a kill before the recipe was written can leave
_HELD: dict[Path, int] = {}  # the locks of this process, as open files


class RunFolder:
    """Where one run writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        """The folder of the model that came out."""
        return self.path / MODEL

    @property
    def best(self) -> Path:
        """The folder of the best model so far."""
        return self.path / BEST

    @property
    def begun(self) -> bool:
        """Whether a run was started here."""
        return (self.path / RECIPE).is_file()

    def refuse_used(self) -> None:
        """A folder that holds anything is never written into."""
        require(
            not self.path.exists()
            or (self.path.is_dir() and {inner.name for inner in self.path.iterdir()} <= NOTHING),
            f"{self.path} exists already: go on with it (--resume), or choose another folder "
            "(--out)."
            if self.begun
            else f"{self.path} exists already and is no run: choose another folder (--out).",
        )

    def start(self, recipe: Recipe, tokenizer: Tokenizer | None = None) -> None:
        """Begin a run."""
        self.refuse_used()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            self.refuse_used()  # by another process, a moment ago
            self.write_recipe(recipe)  # first: with it, whatever else is missing, a run can go on
            self.write(ENV, json.dumps(environment(), indent=1) + "\n")
            self.keep_tokenizer(tokenizer)
        except OSError as error:
            raise ClearheadError(
                f"{self.path} cannot be written to: {error.strerror or error}."
            ) from error

    def lock(self) -> None:
        """Refuse a run that another process trains; its lock goes with it, however it ends.

        The lock is the process's: it may take the run up again, and its forks do not inherit it.
        """
        place = (self.path / LOCK).resolve()
        if fcntl is None or place in _HELD:
            return
        handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "another"
            os.close(handle)
            raise ClearheadError(
                f"{self.path}: this run is training already, in process {owner}."
            ) from error
        except OSError:  # a disk without locks
            os.close(handle)
            return
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        _HELD[place] = handle

    def release(self) -> None:
        """Let other processes go on with the run."""
        handle = _HELD.pop((self.path / LOCK).resolve(), None)
        if handle is not None:
            os.close(handle)

    @property
    def running(self) -> bool:
        """Whether another process trains here."""
        place = (self.path / LOCK).resolve()
        if fcntl is None or place in _HELD or not place.is_file():
            return False
        handle = os.open(place, os.O_RDONLY)
        try:
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:
            return False
        finally:
            os.close(handle)
        return False

    @property
    def launch(self) -> str | None:
        """Which launch of torchrun the run began in."""
        try:
            launched = json.loads((self.path / ENV).read_text(encoding="utf-8")).get("launch")
        except (OSError, ValueError):
            return None
        return None if launched is None else str(launched)

    def clear(self) -> None:
        """Clear away what kills in the middle of a save left; what stood there before is back."""
        for name in (BEST, MODEL):
            for old in self.path.glob(f".{name}-*-old"):
                if not (self.path / name).exists():
                    old.rename(self.path / name)
            for left in self.path.glob(f".{name}-*"):
                shutil.rmtree(left, ignore_errors=True)

    def keep_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Write the run's tokeniser, unless it is there."""
        if tokenizer is not None and self.tokenizer() is None:
            tokenizer.save(self.path / TOKENIZER)

    def tokenizer(self) -> Tokenizer | None:
        """The tokeniser the run began with, so that taking it up does not learn another."""
        folder = self.path / TOKENIZER
        return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None

    def write_recipe(self, recipe: Recipe) -> None:
        """What the run is made from, complete."""
        self.write(RECIPE, yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True))

    def read_recipe(self) -> Recipe:
        """The recipe of a run that was begun."""
        path = self.path / RECIPE
        require(path.is_file(), f"{self.path} is no run: it has no {RECIPE}.")
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ClearheadError(f"{path} cannot be read: {error}.") from error
        require(isinstance(data, dict), f"{path} is no recipe.")
        return Recipe.from_dict(data, self.path.name)

    def write(self, name: str, text: str) -> None:
        """A small file, whole or not at all."""
        new = self.path / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.path / name)

    def log(self, **line: Any) -> None:
        """One more line of figures."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(_line(line))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines so far; one that a kill cut in half is left out, and null is NaN."""
        path = self.path / METRICS
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield dict(_swap(json.loads(line), lambda x: x is None, math.nan))
                except (ValueError, TypeError):
                    continue

    def rewind(self, step: int) -> None:
        """Forget figures of steps that will be taken again."""
        kept = [line for line in self.metrics() if line.get("step", 0) <= step]
        if (self.path / METRICS).is_file():
            self.write(METRICS, "".join(map(_line, kept)))


def _line(entry: dict[str, Any]) -> str:
    """As JSON, which has no word for what is not finite but null."""
    plain = _swap(entry, lambda x: isinstance(x, float) and not math.isfinite(x), None)
    return json.dumps(plain, allow_nan=False) + "\n"


def _swap(value: Any, wanted: Callable[[Any], bool], other: float | None) -> Any:
    """The same, with another value in place of those that are wanted, however deep."""
    if isinstance(value, dict):
        return {key: _swap(inner, wanted, other) for key, inner in value.items()}
    return other if wanted(value) else value


def environment() -> dict[str, Any]:
    """What a run ran on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "launch": launch(),
    }
