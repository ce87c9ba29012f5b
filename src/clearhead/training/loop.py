"""The training loop: a generator of steps.

    for step in Trainer(prepare(recipe), folder).steps(): ...

The state of a run is (weights, what the optimisers remember, how many steps are done). Everything
else is a function of the seed and the step: which batches it sees, the dice of its dropout, its
learning rate. So a run that is stopped and taken up again is the same run, to the bit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clearhead.data.batch import Batch
from clearhead.data.batches import prefetch
from clearhead.errors import ClearheadError, require
from clearhead.fast.products import use_compiled
from clearhead.memory import keep_freed_memory
from clearhead.model import Model
from clearhead.training.average import EMA, EMAConfig, LastConfig, swapped
from clearhead.training.checkpoint import newest, prune, regular, step_of, write_checkpoint
from clearhead.training.dice import thrown
from clearhead.training.events import Evaluated, Event, Saved, Shortened, Skipped, Step, Stopped
from clearhead.training.folder import LATEST, RunFolder
from clearhead.training.guard import IN_A_ROW, Guard, first_bad_layer
from clearhead.training.job import Job
from clearhead.training.live import LiveDiagnosis
from clearhead.training.loss import batch_loss
from clearhead.training.machine import autocast, loss_scaler, pick_device, recompute_blocks
from clearhead.training.optim import build_optimisers, set_rates
from clearhead.training.sharded import share_out, whole
from clearhead.training.state import (
    check_processes,
    chosen_weights,
    model_with,
    read_into,
    write_state,
)
from clearhead.training.world import World, own_device

LOOK, SLOW = 25, 0.8  # how often the clock is looked at; steps that fit, of those planned
KEEP = 2  # checkpoints, where no average wants more


class Trainer:
    """One run: its model, its optimisers, and how far it is."""

    def __init__(self, job: Job, folder: RunFolder | None = None) -> None:
        self.job, self.folder, self.recipe = job, folder, job.recipe
        train = self.recipe.train
        self.device = own_device(pick_device(train.machine))
        self.world = World.join(self.device)
        check_processes(job, self.world)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.net = job.model.net.to(self.device)
        if train.machine.shard and self.world.size > 1:
            share_out(self.net, train)
        compiled = train.machine.products == "compiled" and self.device.type == "cpu"
        if compiled:
            use_compiled(self.net)
        self.optimisers = build_optimisers(self.net, self.recipe.optim, compiled)
        self.guard = Guard()
        self.live = LiveDiagnosis(train.eval_every, train.label_smoothing)
        self.ema = (
            EMA(self.net, train.average.decay) if isinstance(train.average, EMAConfig) else None
        )
        self.scaler = loss_scaler(train.machine, self.device)
        if train.machine.recompute:
            recompute_blocks(self.net)
        self.forward: Any = self.world.copied(self.net, self.device)
        # Kernels that are made for the network have its loss in them.
        self.loss: Any = torch.compile(batch_loss) if train.machine.compile else batch_loss
        self.done = 0
        self.tokens = 0
        self.seconds = 0.0
        self.best = math.inf
        self.waited = 0  # evaluations since the best one
        self.deadline: float | None = None  # seconds of training after which it should be over
        self.interrupted = False  # asked to end by any process, before its end
        self._stop = ""

    def stop(self, why: str) -> None:
        """Finish the step that is under way, save, and end."""
        self._stop = why

    # -- the steps

    def steps(self) -> Generator[Step]:
        """Train from where the run is to its end."""
        train = self.recipe.train
        stream = prefetch(self.job.batches, self.done * train.accumulate, self.recipe.data.workers)
        if self.folder is not None and self.world.first:
            self.folder.lock()
        try:
            while self.done < self.recipe.train.steps and not self.patience_is_over():
                step = self._one(stream)
                yield step
                # Asked to stop between two steps, the run takes one more: only there is it saved.
                if any(isinstance(event, Stopped) for event in step.events):
                    return
        finally:
            stream.close()
            if self.folder is not None and self.world.first:
                self.folder.release()  # nobody trains here now: another process may go on

    def _one(self, stream: Iterator[Batch]) -> Step:
        start = time.perf_counter()
        train = self.recipe.train
        batches = [next(stream) for _ in range(train.accumulate)]
        number = self.done + 1
        factor = self.recipe.optim.schedule.factor(number, train.steps, self.recipe.optim.warmup)
        set_rates(self.optimisers, factor)
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        loss, norm = self._gradients(batches, number)
        events: list[Event] = []
        wrong = self.guard.fault(loss, norm, scale)
        if wrong:
            events.append(Skipped(wrong))
            if self.scaler is not None:
                self.scaler.update()  # scales less where the scaled numbers were too large
            self._check_row(batches, wrong)
        else:
            self.live.before_update(self.net, number)
            self._update()
            self.live.after_update(self.net)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        self.done = number
        tokens, slots = sum(b.tokens for b in batches), sum(b.slots for b in batches)
        self.tokens += tokens
        seconds = time.perf_counter() - start
        self.seconds += seconds
        step = Step(
            number, train.steps, loss, self.recipe.optim.lr * factor, norm, tokens, slots, seconds
        )
        self._log(step, events)
        events += self._after(number)
        events += self.live.report(step, events)
        self.seconds += time.perf_counter() - start - seconds
        events += self._keep_time(number)
        return dataclasses.replace(step, events=tuple(events))

    def _keep_time(self, number: int) -> list[Event]:
        """Plan fewer steps where the machine has become so slow that the time will not do."""
        steps = self.recipe.train.steps
        if self.deadline is None or number % LOOK != 0 or number >= steps:
            return []
        left = (self.deadline - self.seconds) * number / self.seconds
        # Late rather than with a rate that falls off: a fifth of what was done brings it down.
        fits = number + max(round(left), number // 5, 1)
        if fits > SLOW * steps:
            return []
        self.recipe = self.recipe.with_steps(fits)
        if self.folder is not None:
            self.folder.write_recipe(self.recipe)
        return [Shortened(fits)]

    def _gradients(self, batches: list[Batch], number: int) -> tuple[float, float]:
        """Loss and gradient of a step; the gradient is left in the parameters, clipped."""
        train, world = self.recipe.train, self.world
        self.net.train()
        count = sum(batch.count for batch in batches)
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            part = batch.part(world.rank, world.size).to(self.device)
            last = i == len(batches) - 1
            dice = thrown(train.seed, number * train.accumulate + i, world.rank, self.device)
            with torch.enable_grad(), self._exchange(last), dice:
                with autocast(train.machine, self.device):
                    loss = self.loss(
                        self.forward,
                        part,
                        self.job.objective.ask,
                        train.label_smoothing,
                        self.recipe.optim.rdrop,
                    )
                # The processes' gradients are averaged: times their number that is a sum.
                loss = loss * (world.size / count if part.count else 0.0)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.detach()
        return world.mean(total), self._clip()

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged between processes behind the last batch of a step only."""
        return nullcontext() if last else self.world.quiet(self.forward)

    def _clip(self) -> float:
        """The length of the gradient, which is shortened if it is too long."""
        if self.scaler is not None:
            for optimiser in self.optimisers:
                self.scaler.unscale_(optimiser)
        most, own = self.recipe.optim.clip or math.inf, list(self.net.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
        length = float(whole(norm))
        if math.isfinite(length):  # else all gradients would be spoilt, and none told from others
            torch.nn.utils.clip_grads_with_norm_(own, most, norm)
        return length

    def _update(self) -> None:
        for optimiser in self.optimisers:
            if self.scaler is None:
                optimiser.step()
            else:
                self.scaler.step(optimiser)
        if self.scaler is not None:
            self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.net)

    def _check_row(self, batches: list[Batch], wrong: str) -> None:
        """Stop the run after five bad steps one behind the other."""
        if self.guard.row < IN_A_ROW:
            return
        layer = first_bad_layer(self.net, lambda: self._see(batches))
        where = f" The first bad numbers are in {layer}." if layer else ""
        raise ClearheadError(
            f"The run stops at step {self.done + 1}: {IN_A_ROW} steps in a row could not be taken, "
            f"the last because {wrong}.{where} Try a smaller optim.lr, more optim.warmup, or "
            "train.machine.precision=fp32; the last checkpoint is as it was."
        )

    def _see(self, batches: list[Batch]) -> None:
        """All that the step saw, in parts as large as it saw them."""
        machine, size = self.recipe.train.machine, self.world.size
        with autocast(machine, self.device), self.net.at_rest():
            for batch in batches:
                for rank in range(size):
                    part = batch.part(rank, size).to(self.device)
                    self.net(*part.inputs, **part.places)

    def _after(self, number: int) -> list[Event]:
        """What is due behind a step: evaluation, checkpoint, stopping."""
        train = self.recipe.train
        events: list[Event] = []
        end = number == train.steps
        if end or number % train.eval_every == 0:
            events.append(self.evaluate())
            if self.patience_is_over() and not end:
                self._stop = f"{self.waited} evaluations brought nothing better"
        asked = self.world.agree(bool(self._stop))
        if asked:
            self._stop = self._stop or "another process asked for it"
        if self.folder is not None and (end or asked or number % train.checkpoint_every == 0):
            events.append(Saved(self.save()))
        self.interrupted = asked and not end and not self.patience_is_over()
        if asked and not end:
            events.append(Stopped(self._stop))
        return events

    def patience_is_over(self) -> bool:
        """Whether so many evaluations brought nothing better that the run ends."""
        patience = self.recipe.train.patience
        return patience is not None and self.waited >= patience

    # -- measuring

    def evaluate(self) -> Evaluated:
        """The loss on the validation data, with the averaged weights where there is an average."""
        weights = self.ema.weights if self.ema is not None else None
        if weights is None:
            scores = {"loss": self._valid_loss()}
        else:
            with swapped(self.net, weights):
                scores = {"loss": self._valid_loss()}
        best = scores["loss"] < self.best
        self.waited = 0 if best else self.waited + 1
        if best:
            self.best = scores["loss"]
            if self.folder is not None and self.recipe.train.patience:
                model = model_with(self, weights)
                if self.world.first:
                    model.save(self.folder.best)
        if self.folder is not None and self.world.first:
            self.folder.log(step=self.done, valid=scores)
        return Evaluated(scores, best)

    def _valid_loss(self) -> float:
        total, count, world = 0.0, 0, self.world
        with torch.no_grad(), self.net.at_rest():
            for batch in self.job.validation(self.recipe.eval.limit):
                part = batch.part(world.rank, world.size).to(self.device)
                loss = batch_loss(self.net, part, self.job.objective.ask)
                total += float(loss) if part.count else 0.0
                count += batch.count
        require(count > 0, "The validation data ask for nothing: give more of them.")
        return world.total(total) / count

    # -- state

    def save(self) -> Path:
        """Write a checkpoint; older ones go when it is complete."""
        assert self.folder is not None
        runs, train = self.folder.checkpoints, self.recipe.train
        path = write_checkpoint(runs, self.done, partial(write_state, self), self.world)
        if self.world.first:
            self.folder.write(LATEST, f"step-{self.done}\n")
            count = train.average.count if isinstance(train.average, LastConfig) else 0
            prune(runs, KEEP, regular(runs, train.checkpoint_every, train.steps)[:count])
        return path

    def resume(self, say: Callable[[str], None]) -> bool:
        """Take up the newest whole checkpoint of the folder; `say` hears what is passed over."""
        assert self.folder is not None
        found = newest(self.folder.checkpoints, say) if self.world.first else None
        step = self.world.told(-1 if found is None else step_of(found))
        if step >= 0:
            read_into(self, self.folder.checkpoints / f"step-{step}")
        if self.world.first:
            self.folder.clear()
            self.folder.rewind(self.done)
        self.live.remember(self.folder.metrics())
        return step >= 0

    def finish(self) -> Model:
        """The model the run gives (averaged, the best, or the last), saved where there is a
        folder.
        """
        model = model_with(self, chosen_weights(self))
        if self.folder is not None and self.world.first:
            model.save(self.folder.model)
        return model

    def _log(self, step: Step, events: list[Event]) -> None:
        if self.folder is None or not self.world.first:
            return
        skipped = [event.why for event in events if isinstance(event, Skipped)]
        line: dict[str, Any] = {
            "step": step.number,
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
        }
        self.folder.log(**line, **({"skipped": skipped[0]} if skipped else {}))
