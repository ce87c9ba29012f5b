"""Kill a run at random moments and take it up again, until it ends: is it still the same run?

    python benchmarks/kills.py --kills 100

A short run (tiny model, dropout, EMA, Muon) goes on in a process of its own and is killed by
SIGKILL, every second time inside a save: the killer waits until the folder that a checkpoint is
written into appears, then a random moment of about as long as a save takes. Every fourth dies while
it begins or is taken up, before its first step, and the rest anywhere between that and the end.
After every kill the run is taken up again. In the end its losses and the hash of its weights must
be those of the run that nobody killed.

The processes are forked from one that has PyTorch imported and has trained nothing, because
importing it takes several times as long as a life.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from clearhead.training.folder import RunFolder
from clearhead.training.recipe import Recipe
from clearhead.training.run import open_run

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "far"]
SAVE = 0.012  # seconds that a save of this model takes, about
BEGINNING = 0.06  # and how long it takes to begin


@dataclass
class Count:
    """What became of the kills."""

    inside: int = 0
    """The folder of an unfinished checkpoint was left behind."""
    early: int = 0
    """The first step was not reached."""
    between: int = 0
    """No save was under way."""
    passed_over: int = 0
    """Times that a torn checkpoint was passed over with a message."""


def settings(folder: Path, steps: int) -> dict:
    """The recipe; checkpoints are so many that half of the time is spent on them."""
    source = folder / "text.txt"
    if not source.exists():
        dice = random.Random(0)
        source.write_text(" ".join(dice.choice(WORDS) for _ in range(800)))
    size = {"n_layers": 2, "d_model": 16, "n_heads": 2, "max_len": 16, "dropout": 0.1}
    return {
        "data": {"source": str(source), "length": 16},
        "tokenizer": "characters",
        "model": {"family": "llama", **size},
        "train": {
            "steps": steps,
            "batch": 4,
            "accumulate": 2,
            "checkpoint_every": 3,
            "eval_every": steps,
            "average": {"kind": "ema", "decay": 0.99},
            "machine": {"device": "cpu", "threads": 1},
        },
        "optim": {"name": "muon", "lr": 0.01, "warmup": 5},
        "eval": {"limit": 8},
    }


def child(folder: str, recipe: str) -> None:
    """Begin or take up the run in a folder and go on to its end."""
    said: list[str] = []
    begun = (Path(folder) / "recipe.yaml").exists()
    read = Recipe.from_dict(json.loads(Path(recipe).read_text()))
    trainer = open_run(read, RunFolder(folder), begun, said.append)
    for line in said:
        print(line, flush=True)
    print(f"begins at {trainer.done}", flush=True)
    for _ in trainer.steps():
        pass
    trainer.finish()
    print("ended", flush=True)


class Life:
    """One process of the run."""

    def __init__(self, home: Path, run: Path) -> None:
        self.runs = run / "checkpoints"
        self.code: int | None = None
        self.said: list[str] = []
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(writing, 1)
            try:
                child(str(run), str(home / "recipe.json"))
                sys.stdout.flush()
            except BaseException:
                print(traceback.format_exc(), flush=True)
                os._exit(1)
            os._exit(0)
        os.close(writing)
        self.output = os.fdopen(reading)

    def begin(self) -> None:
        """Wait for the first step; errors end everything."""
        for line in self.output:
            self.said.append(line.strip())
            if line.startswith("begins"):
                return
        raise SystemExit(f"The run did not begin:\n{self.said}")

    def kill_early(self, dice: random.Random) -> None:
        """SIGKILL while it begins."""
        time.sleep(dice.uniform(0, BEGINNING))
        if not self.over():
            os.kill(self.pid, signal.SIGKILL)

    def over(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def saving(self) -> bool:
        """Whether the folder of an unfinished checkpoint is there."""
        try:
            return any(name.startswith(".step-") for name in os.listdir(self.runs))
        except FileNotFoundError:
            return False

    def wait_for(self, saving: bool) -> bool:
        """Wait until a save is under way, or none; False if the process ends first."""
        while self.saving() != saving:
            if self.over():
                return False
        return True

    def kill(self, dice: random.Random, inside: bool) -> None:
        """SIGKILL inside a save, or anywhere; nothing if it ended before."""
        if inside:
            late = True
            while late:  # what the last kill left is cleared away by the next save
                if not self.wait_for(False) or not self.wait_for(True):
                    return
                time.sleep(dice.uniform(0, SAVE))
                late = not self.saving()
        else:
            time.sleep(dice.uniform(0, 0.25))
        if not self.over():
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> bool:
        """Wait; whether it reached its end by itself."""
        self.said += self.output.read().split("\n")
        self.output.close()
        while not self.over():
            time.sleep(0.001)
        return self.code == 0


def digest(run: Path) -> str:
    """A hash of all that a finished run is: weights, averages, optimisers, losses."""
    found = hashlib.sha256()
    newest = run / "checkpoints" / (run / "latest").read_text().strip()
    for path in [*sorted(newest.glob("*.safetensors")), run / "model" / "model.safetensors"]:
        found.update(path.name.encode() + path.read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.update(json.dumps([entry.get(k) for k in ("step", "loss", "valid")]).encode())
    return found.hexdigest()


def survive(home: Path, kills: int, steps: int, seed: int = 0) -> tuple[bool, Count, int]:
    """Whether a run with so many kills is the run without; how they went; processes started."""
    dice, count = random.Random(seed), Count()
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # it imports much when first made
    os.environ["CLEARHEAD_CACHE"] = str(home / "cache")
    (home / "recipe.json").write_text(json.dumps(settings(home, steps)))
    whole = Life(home, home / "whole")
    whole.begin()
    if not whole.end():
        raise SystemExit(f"The run without kills failed: {whole.said}")
    lives, run, number = 0, 0, None
    same, done = True, 0
    while done < kills or number is not None:
        if number is None:  # the run before reached its end: begin another one
            run, number = run + 1, run + 1
        life = Life(home, home / f"run-{number}")
        lives += 1
        early = done < kills and done % 4 == 1
        if early:
            life.kill_early(dice)
        else:
            life.begin()
            if done < kills:
                life.kill(dice, inside=done % 2 == 0)
        ended = life.end()
        count.passed_over += sum("passed over" in line for line in life.said)
        if ended:
            same = same and digest(home / f"run-{number}") == digest(home / "whole")
            number = None
            continue
        if life.code != -signal.SIGKILL:
            raise SystemExit(f"It could not be taken up: {life.said}")
        done += 1
        if early and not any(line.startswith("begins") for line in life.said):
            count.early += 1
        elif life.saving():
            count.inside += 1
        else:
            count.between += 1
    return same, count, lives


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--steps", type=int, default=400, help="of the run; more: fewer runs")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        same, count, lives = survive(Path(home), given.kills, given.steps, given.seed)
    print(
        f"{given.kills} kills: {count.inside} inside a save, {count.early} before "
        f"the first step, {count.between} elsewhere"
    )
    print(f"{lives} processes, {count.passed_over} torn checkpoints passed over")
    print(f"{time.perf_counter() - start:.0f} s")
    print("weights and losses are " + ("those of the run without kills" if same else "OTHERS"))
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
