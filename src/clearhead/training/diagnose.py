"""The lectures' checklist, run for you on the folder of a run: its newest checkpoint, its data, its
figures.

numbers     is every weight and output finite?
gradients   do they vanish or explode with depth; which parameters have none?
updates     how far does a step move each layer?
attention   collapsed, uniform and dead heads
start       was the first loss that of guessing?
spikes      in the loss; steps that were skipped
curve       is the loss still falling?
fit         over- and underfitting
leaks       does the future change the past?
padding     does the content of empty slots matter?
labels      is the next token asked for, or the one that is shown?
waste       how much of the batches is padding?
context     would a longer one help; is anything left out?
tokens      unknown ones, unused ones

`live.py` runs the cheap ones while a run is under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.data.batch import Batch
from clearhead.errors import ClearheadError
from clearhead.training.checkpoint import newest
from clearhead.training.checks_attention import check_attention
from clearhead.training.checks_curves import check_curve, check_fit, check_spikes, check_start
from clearhead.training.checks_data import (
    check_context,
    check_labels,
    check_leaks,
    check_left_out,
    check_padding,
    check_tokens,
    check_waste,
)
from clearhead.training.checks_weights import (
    check_gradients,
    check_numbers,
    compute_gradients,
    mean_factor,
    try_step,
)
from clearhead.training.events import Say, silent
from clearhead.training.finding import LEVELS, Finding
from clearhead.training.folder import RunFolder
from clearhead.training.job import prepare
from clearhead.training.loop import Trainer
from clearhead.training.recipe import Recipe
from clearhead.training.state import read_into

BATCHES = 50  # of the training stream
CONTEXT_TOKENS = 32_768  # of the validation data, for the loss by position


@dataclass(frozen=True)
class Diagnosis:
    """What was found in a run."""

    run: str
    """Its folder."""
    step: int
    """The step of the checkpoint that was looked at; 0: there is none."""
    total: int
    """How many steps the recipe asks for."""
    findings: tuple[Finding, ...]
    """The worst first."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = [finding.to_dict() for finding in self.findings]
        return {"run": self.run, "step": self.step, "steps": self.total, "findings": found}


def diagnose(run: str | Path, say: Say = silent) -> Diagnosis:
    """Every check on the folder of a run, which stays as it is."""
    folder = RunFolder(run)
    recipe = folder.read_recipe()
    findings: list[Finding] = []
    choices, step = None, 0
    try:
        trainer = _trainer(recipe, folder)
    except ClearheadError as error:
        mend = "Bring the data back, and diagnose again: without them only the figures can be read."
        findings.append(Finding("data", "warning", str(error), suggestion=mend))
    else:
        checkpoint = newest(folder.checkpoints, say)
        if checkpoint is None:
            text = "There is no whole checkpoint: the model is looked at as it was before training."
            findings.append(
                Finding("checkpoint", "note", text, suggestion="Let the run reach one.")
            )
        else:
            read_into(trainer, checkpoint)
            step = trainer.done
        findings += check_trainer(trainer)
        choices = _choices(trainer)
    lines = list(folder.metrics())
    findings += check_start(lines, choices, bool(recipe.model.source))
    findings += check_spikes(lines)
    findings += check_curve(lines)
    findings += check_fit(lines, recipe.train.label_smoothing)
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return Diagnosis(str(run), step, recipe.train.steps, tuple(findings))


def _trainer(recipe: Recipe, folder: RunFolder) -> Trainer:
    """The run as it would step on, in plain arithmetic."""
    machine = replace(
        recipe.train.machine, precision="fp32", compile=False, recompute=False, shard=False
    )
    plain = replace(recipe, train=replace(recipe.train, machine=machine))
    return Trainer(prepare(plain, folder.tokenizer()), folder)


def check_trainer(trainer: Trainer) -> list[Finding]:
    """The checks of a model and its data."""
    job = trainer.job
    batches = [job.batches.batch(n) for n in range(BATCHES)]
    findings = [*_data_checks(trainer, batches)]
    moved = batches[0].to(trainer.device)
    numbers = check_numbers(trainer.net, moved)
    findings += numbers
    if numbers[0].level == "good":  # what is computed with NaN says nothing
        findings += _model_checks(trainer, moved, batches)
    trainer.net.zero_grad(set_to_none=True)
    return findings


def _data_checks(trainer: Trainer, batches: list[Batch]) -> Iterator[Finding]:
    job, recipe = trainer.job, trainer.recipe
    if job.objective.ask == "tokens":
        yield from check_labels(batches, job.objective.shape != "encoder")
    yield from check_waste(batches, recipe.data.by == "tokens")
    yield from check_left_out(job)
    yield from check_tokens(job, batches)


def _model_checks(trainer: Trainer, batch: Batch, batches: list[Batch]) -> Iterator[Finding]:
    job, net, optim = trainer.job, trainer.net, trainer.recipe.optim
    if job.objective.shape != "encoder":
        yield from check_leaks(net, batch)
    yield from check_padding(net, (b.to(trainer.device) for b in batches))
    compute_gradients(net, batch, job.objective.ask)
    yield from check_gradients(net)
    steps = trainer.recipe.train.steps
    factor = mean_factor(optim.schedule, steps, optim.warmup)
    yield from try_step(net, trainer.optimisers, batch, job.objective.ask, factor, optim.clip)
    yield from check_attention(net, batch)
    if job.objective.stream and job.objective.shape == "decoder":
        rows = max(8, CONTEXT_TOKENS // job.length)
        valid = (b.to(trainer.device) for b in job.validation(rows))
        yield from check_context(net, valid, job.length)


@torch.inference_mode()
def _choices(trainer: Trainer) -> int | None:
    """Among how many answers the network chooses; None: it gives no probabilities."""
    if trainer.job.objective.ask not in ("tokens", "label", "tags"):
        return None
    batch = trainer.job.batches.batch(0).to(trainer.device)
    return int(trainer.net(*batch.inputs, **batch.places).shape[-1])
