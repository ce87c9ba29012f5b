"""What `clearhead train` prints: choices, a line of progress, figures, samples, and the end.

On a terminal the line moves; elsewhere there is a plain line every ten seconds, so that a log stays
short.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from clearhead.cli.units import short, size
from clearhead.errors import ClearheadError
from clearhead.training.figures import LOWER

if TYPE_CHECKING:
    from clearhead.model import Model
    from clearhead.training.events import Evaluated, Step
    from clearhead.training.folder import RunFolder
    from clearhead.training.loop import Trainer
    from clearhead.training.sample import Sample

LINES = 10.0  # seconds between two plain lines
SAMPLES = 15.0  # seconds between two samples at least, and thirty times what one takes
RECENT = 50  # steps over which loss and speed are averaged
# objective -> the command that uses such a model, what it takes, what it gives
USES = {
    "next_token": ("generate", '"..."', "what follows a text"),
    "seq2seq": ("translate", '"..."', "or lines of a file: --file"),
    "masked": ("fill", '"... [MASK] ..."', "what stands behind a mask"),
    "classification": ("classify", '"..."', "the label of a text"),
    "tagging": ("tag", '"..."', "the label of every word"),
    "span_qa": ("answer", '"...?" --context "..."', "the piece of a text"),
    "pairs": ("embed", '"..." "..."', "how alike texts are"),
}


class _Console(Console):
    """One that falls silent when its reader has left (`| head`): a run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Talk:
    """Prints; a process that is not the first of several is quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = _Console(highlight=False, markup=False, emoji=False, quiet=quiet)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=RECENT)
        self._begun = time.monotonic()
        self._first = 0  # the step the run was at when it was opened
        self._line = self._sample = 0.0  # not before these times

    def say(self, text: str) -> None:
        """A sentence."""
        self.console.print(Text(text), soft_wrap=True)

    # --- before the first step ---

    def opening(self, folder: RunFolder, resume: bool) -> None:
        """Where the run goes, before its data are read."""
        self.say(f"{'going on with' if resume else 'run'} {folder.path}")

    def choices(self, trainer: Trainer, resume: bool) -> None:
        """What the run is made from, and what was chosen for this machine."""
        for name, text in _choices(trainer):
            line = Text(f"{name:<10} ", style="cyan").append(text, style="default")
            self.console.print(line, soft_wrap=True)
        if resume:
            self.say(_resumed(trainer))

    # --- steps ---

    @contextmanager
    def progress(self, trainer: Trainer) -> Iterator[None]:
        """Within it a line shows how far the run is."""
        self._begun, self._first = time.monotonic(), trainer.done
        self._line = self._begun + 2
        self._sample = self._begun
        if not self.console.is_terminal or self._quiet:
            yield
            return
        columns = (
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self.console, expand=True) as self._bar:
            total = trainer.recipe.train.steps
            self._task = self._bar.add_task("...", total=total, completed=trainer.done)
            yield
        self._bar = None

    def step(self, trainer: Trainer, step: Step) -> None:
        """Show a step, and what happened at it."""
        from clearhead.training.events import Evaluated, Found, Shortened, Skipped, Stopped

        self._recent.append((step.loss, step.tokens, step.seconds))
        for event in step.events:
            if isinstance(event, Evaluated):
                self._evaluated(trainer, step, event)
            elif isinstance(event, Skipped):
                self.say(f"step {step.number:,} was skipped: {event.why}")
            elif isinstance(event, Stopped):
                self.say(f"stopped at step {step.number:,}: {event.why}")
            elif isinstance(event, Found | Shortened):
                self.console.print(Text(str(event), style="yellow"), soft_wrap=True)
        if self._quiet:
            return
        if self._bar is not None:
            total = trainer.recipe.train.steps
            said = self._state(step)
            self._bar.update(self._task, completed=step.number, total=total, description=said)
        elif time.monotonic() >= self._line:
            self._plain(step)

    def _plain(self, step: Step) -> None:
        self._line = time.monotonic() + LINES
        self.say(f"step {step.number:,}/{step.total:,}  {self._state(step)}")

    def _state(self, step: Step) -> str:
        losses = [loss for loss, _, _ in self._recent if math.isfinite(loss)]
        loss = sum(losses) / len(losses) if losses else math.nan
        rate = sum(r[1] for r in self._recent) / max(sum(r[2] for r in self._recent), 1e-9)
        gone = (time.monotonic() - self._begun) / max(1, step.number - self._first)
        left = duration((step.total - step.number) * gone)
        return f"loss {loss:.3f}  {rate:,.0f} tokens/s  {left} left  {size(memory())}"

    def _evaluated(self, trainer: Trainer, step: Step, event: Evaluated) -> None:
        if self._quiet:
            return
        if self._bar is None:
            self._plain(step)
        scores = "  ".join(f"{name} {value:.4f}" for name, value in event.scores.items())
        line = Text(f"step {step.number:,}  validation {scores}", style="bold")
        self.console.print(line.append("  best so far" if event.best else "", style="green"))
        self._maybe_sample(trainer, step)

    def _maybe_sample(self, trainer: Trainer, step: Step) -> None:
        from clearhead.training.sample import draw_sample

        start = time.monotonic()
        if start < self._sample and step.number < step.total:
            return
        sample = draw_sample(trainer)
        took = time.monotonic() - start
        self._sample = start + max(SAMPLES, 30 * took)
        if sample is not None:
            self._print_sample(sample)

    def _print_sample(self, sample: Sample) -> None:
        if sample.right:
            for name, text in (
                ("source", sample.given),
                ("model", sample.made),
                ("right", sample.right),
            ):
                line = Text(f"  {name:<8}", style="dim").append(text, style="default")
                self.console.print(line, soft_wrap=True)
            return
        whole = Text(sample.given, style="cyan").append(sample.made, style="default")
        for piece in whole.split("\n"):
            self.console.print(Text("  | ", style="dim").append_text(piece), soft_wrap=True)

    # --- the end ---

    def stopped(self, trainer: Trainer, command: str) -> None:
        """The run was interrupted: what goes on with it."""
        total = trainer.recipe.train.steps
        self.say(f"Saved at step {trainer.done:,} of {total:,}. To go on: {command}")

    def finished(self, trainer: Trainer, model: Model) -> None:
        """What was reached, how that compares, where it is, what to do next."""
        from clearhead.training.curves import PICTURE, can_draw

        assert trainer.folder is not None
        folder = trainer.folder.path
        self.say("")
        self.say(
            f"{trainer.done:,} steps, {short(trainer.tokens)} tokens, {duration(trainer.seconds)}"
        )
        for line in _reached(trainer, self._measured(trainer, model)):
            self.console.print(Text(line, style="bold"), soft_wrap=True)
        self.say(f"model      {trainer.folder.model}")
        if can_draw():
            self.say(f"curves     {folder / PICTURE}")
        else:
            self.say("curves     none: pip install 'clearhead[plot]' draws them")
        self.say("")
        self.say("What next:")
        for line in _next_steps(trainer):
            self.console.print(Text(f"  {line}"), soft_wrap=True)

    def _measured(self, trainer: Trainer, model: Model) -> dict[str, float]:
        from clearhead.training.reached import measure_end

        try:
            if self.console.is_terminal:
                with self.console.status("measuring what came out ..."):
                    return measure_end(trainer, model)
            return measure_end(trainer, model)
        except ClearheadError as error:  # sacrebleu is not installed, say; the model is there
            self.say(str(error))
            return {}


# --- words ---


def _choices(trainer: Trainer) -> Iterator[tuple[str, str]]:
    import torch

    from clearhead.training.machine import describe_choice

    job, recipe, train = trainer.job, trainer.recipe, trainer.recipe.train
    tokenizer = job.model.tokenizer
    parameters = sum(p.numel() for p in trainer.net.parameters())
    learning = sum(p.numel() for p in trainer.net.parameters() if p.requires_grad)
    yield "recipe", f"{recipe.name}: {job.objective.kind}, {recipe.data.source}"
    yield "data", _data(trainer)
    if tokenizer is not None:
        kind = recipe.tokenizer.kind if not recipe.model.source else recipe.model.source
        yield "tokeniser", f"{kind}, {tokenizer.vocab_size:,} tokens"
    some = "" if learning == parameters else f", {short(learning)} of them learn"
    config = job.model.config
    layers, width = config.n_layers, getattr(config, "d_model", "?")
    deep = f"{_plural(layers, 'layer')} x {width}"
    what = f"{config.kind}, {deep}, context {job.length}"
    yield "model", f"{what}, {short(parameters)} parameters{some}"
    batch = f"{train.batch:,} {recipe.data.by}"
    batch += f" x {train.accumulate}" if train.accumulate > 1 else ""
    yield "steps", f"{train.steps:,} of {batch}, {recipe.optim.name}, lr {recipe.optim.lr:g}"
    machine = train.machine
    count = torch.get_num_threads()
    threads = f", {_plural(count, 'thread')}" if trainer.device.type == "cpu" else ""
    many = f", {trainer.world.size} processes" if trainer.world.size > 1 else ""
    chosen = describe_choice(machine, trainer.device) + (", recompute" * machine.recompute)
    yield (
        "machine",
        f"{trainer.device.type}{threads}, {chosen}{many} (--set train.machine...)",
    )
    if trainer.device.type == "cpu" and count > 1:
        yield from _busy(count)


def _busy(threads: int) -> Iterator[tuple[str, str]]:
    """A warning where others keep cores busy that this run's threads would need."""
    from clearhead.measure.hardware import busy_cores, read_processor

    processor = read_processor()
    if processor.allowed < processor.logical or processor.quota is not None:
        return  # what is busy there may be other cores than ours
    busy, cores = busy_cores(), processor.logical
    if busy > cores - threads + 0.5:
        left = max(1, int(cores - busy))
        yield (
            "note",
            f"other programs keep {busy:.1f} of {cores} cores busy: threads that wait for each "
            f"other are many times slower then. Stop them, or take fewer: "
            f"--set train.machine.threads={left}",
        )


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _data(trainer: Trainer) -> str:
    job, train = trainer.job, trainer.recipe.train
    lengths = job.objective.lengths(job.valid)
    held = f"{len(job.valid):,} examples validate"
    if job.objective.stream:
        held = f"{int(lengths.sum()):,} tokens validate"
    if job.batches.per_epoch is None:
        return f"made without end; {held}"
    epochs = train.steps * train.accumulate / job.batches.per_epoch
    batches = math.ceil(job.batches.per_epoch)
    shown = f"{batches:,} batch shows" if batches == 1 else f"{batches:,} batches show"
    return f"{shown} all once, the run shows it {epochs:.2g} times; {held}"


def _resumed(trainer: Trainer) -> str:
    import json

    import torch

    total = trainer.recipe.train.steps
    if trainer.done >= total:
        return f"all {total:,} steps are done already (--steps makes the run longer)"
    if trainer.patience_is_over():
        return (
            f"stopped early at step {trainer.done:,} of {total:,}: {trainer.waited} evaluations "
            "brought nothing better (--steps makes the run longer)"
        )
    said = f"from step {trainer.done:,} of {total:,}"
    assert trainer.folder is not None
    try:
        before = json.loads((trainer.folder.path / "env.json").read_text()).get("threads")
    except (OSError, ValueError):
        return said
    now = torch.get_num_threads()
    if before in (None, now):
        return said
    return (
        f"{said}; it began with {_plural(before, 'thread')} and has {now}: last digits may differ"
    )


def _reached(trainer: Trainer, scores: dict[str, float]) -> Iterator[str]:
    """The figures of the model that came out, and the recipe's own beside them."""
    from clearhead.training.summary import changed_settings

    wanted = trainer.recipe.eval
    where = "test" if wanted.split == "test" else "validation"
    if "loss" in scores:
        more = f" (perplexity {math.exp(min(scores['loss'], 50)):.4g})" if _writes(trainer) else ""
        yield f"{where} loss {scores['loss']:.4f}{more}"
    if wanted.metric in scores and wanted.metric != "loss":
        yield f"{where} {wanted.metric} {scores[wanted.metric]:.4f}"
    if wanted.expect is None:
        return
    if wanted.metric not in scores:
        yield f"expected of this recipe: {wanted.metric} {wanted.expect:g} ({where})"
        return
    found = scores[wanted.metric]
    better = (found - wanted.expect) * (-1 if wanted.metric in LOWER else 1)
    near = abs(better) <= 0.01 * max(abs(wanted.expect), 1e-9)
    word = "as expected" if near else "better than expected" if better > 0 else "short of it"
    changes = changed_settings(trainer.recipe)
    if changes:
        with_others = f"{', '.join(changes[:3])}{' and more' if len(changes) > 3 else ''}"
        yield (
            f"expected of this recipe as it stands: {wanted.metric} {wanted.expect:g}; here, with "
            f"{with_others} changed, {found:.4g}"
        )
        return
    yield f"expected of this recipe: {wanted.metric} {wanted.expect:g}, here {found:.4g}: {word}"


def _writes(trainer: Trainer) -> bool:
    return trainer.job.objective.ask == "tokens"


def _next_steps(trainer: Trainer) -> Iterator[str]:
    from clearhead.data.objectives import NextToken, Seq2seq
    from clearhead.training.sample import prompt_of

    assert trainer.folder is not None
    folder, objective = trainer.folder.path, trainer.job.objective
    opened = f"ch.load({str(folder)!r})"
    if isinstance(objective, NextToken):
        prompt = prompt_of(trainer)
        yield f"import clearhead as ch; print({opened}.generate({prompt!r}, max_new_tokens=100))"
    elif isinstance(objective, Seq2seq):
        yield f"import clearhead as ch; print({opened}.translate('...'))"
    else:
        yield f"import clearhead as ch; model = {opened}"
    commands = list(_commands(trainer))
    width = max(len(command) for command, _ in commands)
    for command, why in commands:
        yield f"{command:<{width}}  {why}"


def _commands(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """What can be done with a run, and what for."""
    from clearhead.models.family import family

    assert trainer.folder is not None
    folder, kind = trainer.folder.path, trainer.job.model.config.kind
    if trainer.job.objective.kind in USES:
        verb, words, why = USES[trainer.job.objective.kind]
        yield f"clearhead {verb} {folder} {words}", why
    yield f"clearhead eval {folder}", "figures with their uncertainty"
    yield f"clearhead diagnose {folder}", "what went well, what to change"
    if hasattr(family(kind), "to_hf"):
        yield f"clearhead export {folder} OUT", "for transformers (--to: others)"
    elif not kind.startswith("rnn"):
        yield f"clearhead export {folder} OUT --to onnx", "for ONNX runtimes"
    yield "clearhead runs", "all runs side by side"
    steps, optim = trainer.recipe.train.steps, trainer.recipe.optim
    now, then = (optim.schedule.factor(steps, n, optim.warmup) for n in (steps, 2 * steps))
    jump = f" (its rate goes up again, from {optim.lr * now:.2g} to {optim.lr * then:.2g})"
    longer = f"clearhead train {folder} --resume --steps {2 * steps}"
    yield longer, f"twice as long{jump if then > now else ''}"


def duration(seconds: float) -> str:
    """1:05 or 2:03:07."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory() -> int:
    """Bytes of memory that this process holds; at most so far, where only that is known."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource
        import sys

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
