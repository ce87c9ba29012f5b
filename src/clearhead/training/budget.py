"""A budget of minutes as a number of steps: rates depend on it, so it is known before the first.

Real steps are taken on a copy of the model with optimisers of its own, which is then thrown away;
the run itself has not moved. What evaluations and checkpoints will take is part of the budget.
What is decided goes into the recipe of the run, so that taking it up again measures nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from dataclasses import dataclass

import torch

from clearhead.errors import require
from clearhead.model import Model
from clearhead.training.job import Job
from clearhead.training.loop import Trainer
from clearhead.training.loss import batch_loss
from clearhead.training.reached import measured_already
from clearhead.training.recipe import Recipe

MEASURED = 2.5  # seconds of steps, and a second of evaluation; less where the budget is short
EVALUATIONS = (5, 20)  # in a run, fewest and most
EVALUATING = 0.2  # the part of the time that evaluations may take
WRITING = 200e6  # bytes a second that a checkpoint is written at, hashes and all; roughly
MARGIN = 0.97  # of the budget; pictures, samples and the end take a little
NEVER = 1 << 40  # steps


@dataclass(frozen=True)
class Speed:
    """What was measured, the same in all processes of a run."""

    step: float
    """Seconds a step takes."""
    evaluation: float
    """Seconds an evaluation takes."""
    checkpoint: float
    """Seconds a checkpoint takes."""
    spent: float
    """Seconds that measuring took."""


def fit_budget(job: Job) -> tuple[Job, str]:
    """The job with its steps decided, and a sentence about it; as it is if it has no `minutes`."""
    minutes = job.recipe.train.minutes
    if minutes is None:
        return job, ""
    speed = measure_speed(job, 60 * minutes)
    recipe = decide(job.recipe, speed, 60 * minutes)
    train = recipe.train
    said = (
        f"{minutes:g} minute{'' if minutes == 1 else 's'} here are about {train.steps:,} steps of "
        f"{_milliseconds(speed.step)}, evaluated every {train.eval_every:,}"
    )
    if not measured_already(recipe):
        said += f", plus measuring {recipe.eval.metric} at the end"
    return dataclasses.replace(job, recipe=recipe), said


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def decide(recipe: Recipe, speed: Speed, seconds: float) -> Recipe:
    """The recipe with as many steps as the time holds, evaluated at least five times."""
    left = MARGIN * (seconds - speed.spent)
    train, optim = recipe.train, recipe.optim
    fewest, most = EVALUATIONS
    wished = max(fewest, min(most, int(left / speed.step) // train.eval_every))
    one = speed.evaluation + speed.checkpoint  # there is a checkpoint at each, or more
    evaluations = min(wished, max(1, int(EVALUATING * left / max(one, 1e-9))))
    saved = speed.step + speed.checkpoint / train.checkpoint_every  # where they are more
    steps = int(
        min(
            (left - evaluations * one) / speed.step,
            (left - evaluations * speed.evaluation) / saved,
        )
    )
    require(
        steps >= 1,
        f"{seconds / 60:g} minutes are too few here: a step takes {speed.step:.2g} s and an "
        f"evaluation {speed.evaluation:.2g} s.",
    )
    every = max(1, math.ceil(steps / evaluations))
    return dataclasses.replace(
        recipe,
        train=dataclasses.replace(
            train,
            steps=steps,
            minutes=None,
            eval_every=every,
            checkpoint_every=min(train.checkpoint_every, every),
        ),
        optim=dataclasses.replace(optim, warmup=min(optim.warmup, steps // 5)),
    )


def measure_speed(job: Job, budget: float) -> Speed:
    """Take real steps with a copy of the job; `budget` is how many seconds there are in all."""
    begun = time.perf_counter()
    trainer = Trainer(_copied(job))
    longest = min(MEASURED, 0.05 * budget)
    steps = trainer.steps()
    next(steps)  # memory is allocated, kernels are chosen or compiled
    start, count = time.perf_counter(), 0
    while count == 0 or trainer.world.agree(time.perf_counter() - start < longest):
        next(steps)
        count += 1
    step = (time.perf_counter() - start) / count
    steps.close()
    evaluation = _evaluation(trainer, longest / 2)
    numbers = sum(p.numel() for p in trainer.net.parameters())
    spent = time.perf_counter() - begun
    mean = trainer.world.mean
    times = [mean(torch.tensor(t, device=trainer.device)) for t in (step, evaluation, spent)]
    return Speed(times[0], times[1], 12 * numbers / WRITING, times[2])


def _copied(job: Job) -> Job:
    """The same job with a model of its own and without anything that comes between steps."""
    own = job.model
    model = Model(copy.deepcopy(own.net), own.config, own.tokenizer, own.companions)
    train = dataclasses.replace(
        job.recipe.train, steps=NEVER, eval_every=NEVER, checkpoint_every=NEVER
    )
    recipe = dataclasses.replace(job.recipe, train=train)
    return dataclasses.replace(job, model=model, recipe=recipe)


def _evaluation(trainer: Trainer, longest: float) -> float:
    """Seconds of a whole evaluation, from the first batches of one."""
    job, limit = trainer.job, trainer.recipe.eval.limit
    sizes = job.objective.lengths(job.valid).max(axis=1)
    total = float(sizes.sum())
    if limit is not None:
        rows = total / job.length if job.objective.stream else len(sizes)
        total *= min(1.0, limit / max(rows, 1))
    seen, start = 0, time.perf_counter()
    with torch.inference_mode(), trainer.net.at_rest():
        for batch in job.validation(limit):
            batch_loss(trainer.net, batch.to(trainer.device), job.objective.ask)
            seen += batch.inputs[-1].numel()
            if time.perf_counter() - start > longest:
                break
    return (time.perf_counter() - start) * max(1.0, total / max(seen, 1))
