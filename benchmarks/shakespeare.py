"""Seconds of training to a validation loss on tiny Shakespeare: nanoGPT's CPU run and our recipe.

    python benchmarks/shakespeare.py --nanogpt path/to/nanoGPT

nanoGPT: its model.py, its optimiser and the hyper-parameters that its README gives for a CPU
(4 layers x 128, context 64, batch 12, 2000 steps, no torch.compile), in the loop of its train.py.
Ours: the recipe `shakespeare`, in our own loop.

The two train in one process, a slice of a few seconds each in turn, so that a disturbance of the
machine meets both. The clock of each runs in its own steps only, with the making of its batches;
building the models, evaluations and checkpoints are outside, for both. Behind every slice the loss
on the whole validation text (the last tenth of the characters) is measured: windows of the model's
own context one behind the other, every character but the first asked for once. So "seconds to" a
loss is the time of the first evaluation that is there: late by up to a slice, for both.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from train_step import load_nanogpt

from clearhead.data.corpus import open_corpus
from clearhead.training.budget import fit_budget
from clearhead.training.events import Evaluated, Stopped
from clearhead.training.job import prepare
from clearhead.training.loop import Trainer
from clearhead.training.recipe import Characters
from clearhead.training.run import read_recipe, settle_arithmetic
from clearhead.training.world import World

OURS, THEIRS = "clearhead", "nanoGPT"
# nanoGPT's README, "I only have a macbook", over config/train_shakespeare_char.py over train.py
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 128, 4, 64, 12
RATE, LEAST_RATE, WARMUP, BETAS, DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0
SEED = 1337
EVAL_ROWS = 128  # windows in a batch of evaluation


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    nanogpt: Path | None = None
    """The folder of a nanoGPT checkout (with model.py); left out: ours runs alone."""
    recipe: str = "shakespeare"
    """Our recipe: a name or a YAML file."""
    target: float = 1.88
    """The validation loss to reach: nanoGPT's published figure."""
    steps: int = 2000
    """nanoGPT's steps, over which its rate falls."""
    our_steps: int | None = None
    """Our steps; None: those of the recipe."""
    slice: float = 2.5
    """Seconds of training in a turn; each turn ends with an evaluation."""
    seed: int = 0
    """Of ours; added to nanoGPT's own, 1337."""
    threads: int = 2
    """PyTorch's threads."""
    json: bool = False
    """Print JSON, with the curves."""


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    seconds: float
    """Of training until here."""
    steps: int
    """Done."""
    characters: int
    """Seen in training, repetitions counted."""
    loss: float
    """On the whole validation text."""


class Run(Protocol):
    """A run that stops behind every step."""

    parameters: int
    """How many, tied ones once."""

    def step(self) -> bool:
        """Take a step; whether there is another."""
        ...

    def aside(self) -> float:
        """Seconds within the steps so far that do not count: evaluations."""
        ...

    def seen(self) -> tuple[int, int]:
        """Steps and characters so far."""
        ...

    def loss(self) -> float:
        """On the whole validation text, with the weights as they are."""
        ...


@dataclass
class Lap:
    """A run and its clock."""

    run: Run
    """The run."""
    seconds: float = 0.0
    """Of training."""
    going: bool = True
    """Whether it has steps left."""
    curve: list[Point] = field(default_factory=list)
    """All evaluations."""

    def turn(self, longest: float) -> None:
        """Train for a slice, then measure."""
        end = self.seconds + longest
        while self.going and self.seconds < end:
            start, before = time.perf_counter(), self.run.aside()
            self.going = self.run.step()
            self.seconds += time.perf_counter() - start - (self.run.aside() - before)
        self.curve.append(Point(self.seconds, *self.run.seen(), self.run.loss()))

    def reached(self, target: float) -> Point | None:
        """The first evaluation at or below a loss."""
        return next((point for point in self.curve if point.loss <= target), None)

    def at(self, seconds: float) -> Point | None:
        """The last evaluation that is not later than this."""
        return next((p for p in reversed(self.curve) if p.seconds <= seconds), None)


@dataclass(frozen=True)
class Result:
    """What came of one run."""

    parameters: int
    """How many, tied ones once."""
    seconds_to_target: float | None
    """Until the first evaluation at or below the target; None: it never was."""
    characters_to_target: int | None
    """Seen until then."""
    seconds: float
    """Of the whole run."""
    loss: float
    """At its end."""
    steps: int
    """In all."""
    characters: int
    """Seen in all."""
    curve: list[Point]
    """All evaluations."""


@dataclass(frozen=True)
class Comparison:
    """Ours against theirs."""

    part: float | None
    """Our seconds to the target as a part of theirs; None if ours was never there."""
    at_most: bool
    """Whether theirs was never there, so that its whole run stands for it."""
    seconds: float
    """How long their run took."""
    our_loss: float | None
    """Our loss at that moment: of the last evaluation before it."""


def main(args: Args) -> None:
    """Run and print."""
    torch.set_num_threads(args.threads)
    torch.ones(512, 512) @ torch.ones(512, 512)  # starts the threads, outside of both clocks
    laps = {OURS: Lap(Ours(args))}
    if args.nanogpt is None:
        say(args, "nanoGPT is left out: --nanogpt names no checkout of it")
    else:
        laps[THEIRS] = Lap(NanoGPT(args, args.nanogpt))
    turn = 0
    while any(lap.going for lap in laps.values()):
        names = list(laps) if turn % 2 == 0 else list(reversed(laps))
        for name in names:
            if laps[name].going:
                laps[name].turn(args.slice)
                show(args, name, laps[name].curve[-1])
        turn += 1
    report(args, {name: judge(lap, args.target) for name, lap in laps.items()}, compare(args, laps))


# --- ours ---


class Timed(Trainer):
    """Our trainer; it knows how long its own evaluations took."""

    aside = 0.0

    def evaluate(self) -> Evaluated:
        start = time.perf_counter()
        found = super().evaluate()
        self.aside += time.perf_counter() - start
        return found


class Ours:
    """The recipe, without a folder: nothing is written."""

    def __init__(self, args: Args) -> None:
        changes: dict[str, Any] = {"eval.limit": None, "train.seed": args.seed}
        if args.our_steps is not None:
            changes["train.steps"] = args.our_steps
        recipe = read_recipe(args.recipe, changes)
        assert recipe.data.source == "tinyshakespeare", "the recipe must be of the same text"
        assert isinstance(recipe.tokenizer, Characters), "losses are compared by character"
        assert recipe.train.patience is None, "more evaluations would be less patience"
        job = settle_arithmetic(prepare(recipe), torch.device("cpu"), World())
        job, _ = fit_budget(job)
        self._trainer = Timed(job)
        self._steps = self._trainer.steps()
        self.parameters = sum(p.numel() for p in self._trainer.net.parameters())

    def step(self) -> bool:
        step = next(self._steps)
        stopped = any(isinstance(event, Stopped) for event in step.events)
        return not stopped and step.number < step.total

    def aside(self) -> float:
        return self._trainer.aside

    def seen(self) -> tuple[int, int]:
        return self._trainer.done, self._trainer.tokens

    def loss(self) -> float:
        """With the average of the weights, where the recipe has one (EMA)."""
        return self._trainer.evaluate().scores["loss"]


# --- theirs ---


class NanoGPT:
    """nanoGPT's train.py on a CPU, without its log; the text lies in memory, not in a file."""

    def __init__(self, args: Args, folder: Path) -> None:
        module = load_nanogpt(folder)
        train, valid = ("".join(r["text"] for r in texts(split)) for split in ("train", "valid"))
        letters = {letter: i for i, letter in enumerate(sorted(set(train + valid)))}
        self._train, self._valid = (
            np.array([letters[letter] for letter in text], dtype=np.uint16)
            for text in (train, valid)
        )
        torch.manual_seed(SEED + args.seed)
        config = module.GPTConfig(
            block_size=CONTEXT,
            vocab_size=len(letters),
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            dropout=0.0,
            bias=False,  # train.py's choice
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it announces its parameters
            self._net = module.GPT(config).train()
            self._optimiser = self._net.configure_optimizers(DECAY, RATE, BETAS, "cpu")
        self.parameters = sum(p.numel() for p in self._net.parameters())
        self._dice = torch.Generator().manual_seed(SEED + args.seed)
        self._done, self._total = 0, args.steps
        self._next = self._batch()

    def step(self) -> bool:
        for group in self._optimiser.param_groups:
            group["lr"] = rate(self._done, self._total)
        _, loss = self._net(*self._next)
        self._next = self._batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._net.parameters(), CLIP)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._done += 1
        return self._done < self._total

    def aside(self) -> float:
        return 0.0

    def seen(self) -> tuple[int, int]:
        return self._done, self._done * BATCH * CONTEXT

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Random windows, as get_batch() makes them."""
        data = self._train
        starts = torch.randint(len(data) - CONTEXT, (BATCH,), generator=self._dice)
        shown = [torch.from_numpy(data[i : i + CONTEXT].astype(np.int64)) for i in starts]
        asked = [torch.from_numpy(data[i + 1 : i + 1 + CONTEXT].astype(np.int64)) for i in starts]
        return torch.stack(shown), torch.stack(asked)

    @torch.no_grad()
    def loss(self) -> float:
        self._net.eval()
        total, count = 0.0, 0
        for ids, targets in self._windows():
            logits, _ = self._net(ids, targets)
            total += float(
                F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            )
            count += targets.numel()
        self._net.train()
        assert count == len(self._valid) - 1
        return total / count

    def _windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of the validation text, one behind the other, the shorter last one alone."""
        ids = torch.from_numpy(self._valid.astype(np.int64))
        whole = (len(ids) - 1) // CONTEXT * CONTEXT
        shown, asked = ids[:whole].view(-1, CONTEXT), ids[1 : whole + 1].view(-1, CONTEXT)
        yield from zip(shown.split(EVAL_ROWS), asked.split(EVAL_ROWS), strict=True)
        if whole < len(ids) - 1:
            yield ids[None, whole:-1], ids[None, whole + 1 :]


def texts(split: str) -> Iterator[Any]:
    """The same split as ours: the last tenth of the characters validates."""
    return open_corpus("tinyshakespeare").records(split)


def rate(step: int, total: int) -> float:
    """train.py's get_lr: a rise, then half a cosine down to the least."""
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    part = (step - WARMUP) / (total - WARMUP)
    return LEAST_RATE + 0.5 * (1.0 + math.cos(math.pi * part)) * (RATE - LEAST_RATE)


# --- what is said ---


def judge(lap: Lap, target: float) -> Result:
    """What came of a run."""
    there, last = lap.reached(target), lap.curve[-1]
    return Result(
        lap.run.parameters,
        there.seconds if there else None,
        there.characters if there else None,
        last.seconds,
        last.loss,
        last.steps,
        last.characters,
        lap.curve,
    )


def compare(args: Args, laps: dict[str, Lap]) -> Comparison | None:
    """Ours against theirs, if theirs took part."""
    if THEIRS not in laps:
        return None
    mine, theirs = (laps[name].reached(args.target) for name in (OURS, THEIRS))
    whole = laps[THEIRS].curve[-1].seconds
    until = theirs.seconds if theirs else whole
    then = laps[OURS].at(whole)
    return Comparison(
        mine.seconds / until if mine else None, theirs is None, whole, then.loss if then else None
    )


def say(args: Args, message: str) -> None:
    """While it runs; JSON is printed alone."""
    if not args.json:
        print(message, flush=True)


def show(args: Args, name: str, point: Point) -> None:
    """One evaluation."""
    line = f"{name:10} {point.seconds:7.1f} s  step {point.steps:5}  {point.characters:10,} "
    say(args, f"{line}characters  loss {point.loss:.4f}")


def report(args: Args, results: dict[str, Result], comparison: Comparison | None) -> None:
    """As JSON or as a table."""
    if args.json:
        facts = {
            **{name: getattr(args, name) for name in ("recipe", "target", "slice", "threads")},
            "torch": torch.__version__,
            "results": {name: asdict(result) for name, result in results.items()},
            "comparison": None if comparison is None else asdict(comparison),
        }
        print(json.dumps(facts, indent=1))
        return
    print(f"\nrecipe {args.recipe}, {args.threads} threads, torch {torch.__version__}")
    to = f"s to {args.target:g}"
    print(f"{'':10}{'parameters':>12}{to:>12}{'s in all':>10}{'loss':>9}{'steps':>7}  characters")
    for name, r in results.items():
        seconds = "never" if r.seconds_to_target is None else f"{r.seconds_to_target:.1f}"
        print(f"{name:10}{r.parameters:12,}{seconds:>12}{r.seconds:10.1f}{r.loss:9.4f}", end="")
        print(f"{r.steps:7}{r.characters:12,}")
    if comparison is not None:
        print(verdict(args, comparison))


def verdict(args: Args, c: Comparison) -> str:
    """Two sentences."""
    if c.part is None:
        first = f"Ours never reached {args.target:g}."
    elif c.at_most:
        first = (
            f"Ours reached {args.target:g} in at most {c.part:.3f} of nanoGPT's time: nanoGPT did "
            "not reach it in its whole run, which is taken for it."
        )
    else:
        first = f"Ours reached {args.target:g} in {c.part:.3f} of nanoGPT's time."
    loss = "unknown (no evaluation before)" if c.our_loss is None else f"{c.our_loss:.4f}"
    return f"{first}\nAfter the {c.seconds:.1f} s of nanoGPT's run our loss was {loss}."


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
