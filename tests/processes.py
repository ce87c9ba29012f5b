"""Runs for the tests of resuming and of several processes, and the program that torchrun starts.

    python -m torch.distributed.run --nproc-per-node 2 --standalone tests/processes.py plan.json

`plan.json` is a list of scenarios, carried out one behind the other because starting a process
takes longer than any of them. What each gave goes to its `result`: losses, events, and the weights.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from clearhead.errors import ClearheadError
from clearhead.training.events import Evaluated, Skipped, Step, Stopped
from clearhead.training.folder import RunFolder
from clearhead.training.loop import Trainer
from clearhead.training.recipe import Recipe, merge
from clearhead.training.run import open_run
from clearhead.training.world import restarted

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "far", "away"]


def text(length: int = 4000) -> str:
    """A text that is not all the same."""
    words, number = [], 7
    while sum(map(len, words)) + len(words) < length:
        number = (number * 1103515245 + 12345) % 2**31
        words.append(WORDS[(number >> 8) % len(WORDS)])
    return " ".join(words)


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """A tiny run on a text of its own: 12 steps, dropout, checkpoints every 4."""
    source = folder / "text.txt"
    if not source.exists():
        source.write_text(text())
    plain = {
        "data": {"source": str(source), "length": 16},
        "tokenizer": "characters",
        "model": {
            "family": "llama",
            "n_layers": 2,
            "d_model": 16,
            "n_heads": 2,
            "max_len": 16,
            "dropout": 0.1,
        },
        "train": {
            "steps": 12,
            "batch": 6,
            "checkpoint_every": 4,
            "eval_every": 6,
            "machine": {"device": "cpu", "threads": 1},
        },
        "optim": {"lr": 3e-3, "warmup": 3},
        "eval": {"limit": 20},
    }
    return Recipe.from_dict(merge(plain, changes)).to_dict()


@dataclass
class Result:
    """What a run gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    stopped: str = ""
    error: str = ""
    said: list[str] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def hear(self, step: Step) -> None:
        self.losses.append(step.loss)
        self.norms.append(step.grad_norm)
        for event in step.events:
            if isinstance(event, Evaluated):
                self.valid.append(event.scores["loss"])
            elif isinstance(event, Skipped):
                self.skipped.append(step.number)
            elif isinstance(event, Stopped):
                self.stopped = event.why

    def save(self, path: Path) -> None:
        save_file({**self.weights, "": torch.zeros(1)}, path.with_suffix(".safetensors"))
        path.write_text(json.dumps({**vars(self), "weights": {}}))

    @staticmethod
    def read(path: Path) -> Result:
        found = Result(**json.loads(path.read_text()))
        found.weights = load_file(path.with_suffix(".safetensors"))
        found.weights.pop("")
        return found


@contextlib.contextmanager
def precision(double: bool):
    """Networks that are made within compute in fp64, if they shall."""
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def run(recipe: dict[str, Any], *more: Any, double: bool = False, **settings: Any) -> Result:
    """Train, and tell what happened; `double`: in fp64, where the order of sums is no matter."""
    with precision(double):
        return train(recipe, *more, **settings)


def train(
    recipe: dict[str, Any],
    out: Path | None = None,
    resume: bool = False,
    stop: int | None = None,
    leave: int | None = None,
    poison: tuple[int, ...] = (),
    die: int | None = None,
    again: bool = False,
) -> Result:
    """The same in the present precision.

    `stop`: the last process asks for the end at this step; `leave`: the loop is left there without
    a word, as by a kill; `poison`: steps whose loss is not a number in the last process; `die`: the
    last process kills itself there, unless it was started again; `again`: it alone believes that
    torchrun started it again.
    """
    result = Result()
    if again and os.environ.get("RANK", "0") != "0":
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    folder = None if out is None else RunFolder(out)
    try:
        trainer = open_run(Recipe.from_dict(recipe), folder, resume, result.said.append)
    except ClearheadError as error:
        result.error = str(error)
        return result
    finally:
        if again:
            os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    last = trainer.world.rank == trainer.world.size - 1
    with poisoned(trainer, poison if last else ()):
        try:
            for step in trainer.steps():
                result.hear(step)
                if step.number == leave:
                    return result
                if last and step.number == die and not restarted():
                    os.kill(os.getpid(), signal.SIGKILL)
                if last and stop is not None and step.number == stop - 1:
                    trainer.stop("it was asked for")
        except ClearheadError as error:
            result.error = str(error)
            return result
    if not trainer.interrupted:
        net = trainer.finish().net
        result.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    return result


@contextlib.contextmanager
def poisoned(trainer: Trainer, steps: tuple[int, ...]):
    """Losses that are not a number at these steps."""
    real = trainer.loss

    def spoilt(net: Any, *more: Any) -> torch.Tensor:
        bad = trainer.done + 1 in steps
        return real(net, *more) * (math.nan if bad else 1.0)

    trainer.loss = spoilt
    try:
        yield
    finally:
        trainer.loss = real


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A hash of weights to the bit."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def environment(folder: Path) -> dict[str, str]:
    """One thread a process, a cache of their own, and nothing but this machine."""
    here = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "PYTEST"))}
    return {**kept, **here, "OMP_NUM_THREADS": "1", "CLEARHEAD_CACHE": str(folder / "cache")}


def spawn(
    folder: Path, scenarios: list[dict[str, Any]], processes: int = 2, restarts: int = 0
) -> list[Result]:
    """What the scenarios give in several processes."""
    named = [{**one, "result": str(folder / f"result-{n}.json")} for n, one in enumerate(scenarios)]
    plan = folder / "plan.json"
    plan.write_text(json.dumps(named, default=str))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    log = folder / "log.txt"
    with log.open("w") as file:
        started = subprocess.Popen(
            [*command, __file__, str(plan)],
            env=environment(folder),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | str = started.wait(150)
        except subprocess.TimeoutExpired:
            code = "it does not end"
        finally:
            started.terminate()  # it ends its processes too
            started.wait(60)
    assert code == 0, f"{code}: {log.read_text()[-8000:]}"
    return [Result.read(Path(one["result"])) for one in named]


def main() -> None:
    faulthandler.dump_traceback_later(120)  # should they ever wait for each other for ever
    torch.set_num_threads(1)
    for scenario in json.loads(Path(sys.argv[1]).read_text()):
        path = Path(scenario.pop("result"))
        if scenario.get("out"):
            scenario["out"] = Path(scenario["out"])
        result = run(**scenario)
        if os.environ.get("RANK", "0") == "0":
            result.save(path)


if __name__ == "__main__":
    main()
