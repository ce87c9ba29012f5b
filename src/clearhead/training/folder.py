"""The folder of a run: its recipe, its figures line by line, its checkpoints, its model.

recipe.yaml       what the run is made from, complete
env.json          on what it ran
tokenizer/        how its text became tokens
metrics.jsonl     one line a step, an evaluation or an event
checkpoints/      see `checkpoint.py`; `latest` names the newest
curves.png        losses, rate and speed over the steps (where matplotlib is installed)
model/            what came out
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from clearhead.errors import ClearheadError, require
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.recipe import Recipe

RECIPE, METRICS, ENV, LATEST = "recipe.yaml", "metrics.jsonl", "env.json", "latest"
CHECKPOINTS, MODEL, BEST, TOKENIZER = "checkpoints", "model", "best", "tokenizer"


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
            not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())),
            f"{self.path} exists already: go on with it (--resume), or choose another folder "
            "(--out).",
        )

    def start(self, recipe: Recipe, tokenizer: Tokenizer | None = None) -> None:
        """Begin a run."""
        self.refuse_used()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if tokenizer is not None:
                tokenizer.save(self.path / TOKENIZER)
            self.write_recipe(recipe)
            self.write(ENV, json.dumps(environment(), indent=1) + "\n")
        except OSError as error:
            raise ClearheadError(
                f"{self.path} cannot be written to: {error.strerror or error}."
            ) from error

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
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines so far; one that a kill cut in half is left out."""
        path = self.path / METRICS
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield dict(json.loads(line))
                except (ValueError, TypeError):
                    continue

    def rewind(self, step: int) -> None:
        """Forget figures of steps that will be taken again."""
        kept = [line for line in self.metrics() if line.get("step", 0) <= step]
        if (self.path / METRICS).is_file():
            self.write(METRICS, "".join(json.dumps(line) + "\n" for line in kept))


def environment() -> dict[str, Any]:
    """What a run ran on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
