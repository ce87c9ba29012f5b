"""What the figures of a run say: how it started, spikes, where it is going, how well it fits.

Every check takes the lines of metrics.jsonl, or those that a run has so far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clearhead.training.finding import Finding, Level

Lines = Sequence[Mapping[str, Any]]

HISTORY, SETTLED = 50, 20  # steps a spike is compared with, and how many there must be
SOME = 40  # steps below which a curve says nothing
KNOWN = 0.001  # of the first loss: what is left of it when nothing is left to learn
MANY = 10  # times more: the figure says nothing then


def step_losses(lines: Lines) -> list[tuple[int, float]]:
    """Step and training loss, of the steps that were taken."""
    return [
        (int(line["step"]), float(line["loss"]))
        for line in lines
        if "loss" in line and "skipped" not in line and math.isfinite(line["loss"])
    ]


def valid_losses(lines: Lines) -> list[tuple[int, float]]:
    """Step and validation loss."""
    found = [(line["step"], line["valid"].get("loss")) for line in lines if "valid" in line]
    return [(int(step), float(loss)) for step, loss in found if loss is not None]


def check_start(lines: Lines, choices: int | None, pretrained: bool = False) -> list[Finding]:
    """A new network knows nothing: its first loss is near that of guessing, ln(choices)."""
    losses = step_losses(lines)
    if pretrained or not choices or choices < 2 or not losses or losses[0][0] != 1:
        return []
    first, guess = losses[0][1], math.log(choices)
    text = f"The first loss was {first:.3g}; guessing among {choices:,} gives {guess:.3g}."
    level: Level = "good"
    mend = ""
    if first > 1.4 * guess + 0.5:
        level = "warning"
        mend = "The new weights are too large: a smaller initialisation, or a norm before the head."
    elif first < 0.6 * guess:
        level = "warning"
        mend = (
            "It knew too much before it learnt anything: can it see the answer (leaks, labels), or "
            "is nearly all of the data one token?"
        )
    return [Finding("start", level, text, first / guess, mend)]


def check_spikes(lines: Lines) -> list[Finding]:
    """Steps whose loss stands out of those before, and steps that were not taken."""
    skipped = [line for line in lines if "skipped" in line]
    losses = step_losses(lines)
    spikes = find_spikes(losses)
    total = len(losses) + len(skipped)
    if not total:
        return []
    details = {"spikes": spikes, "skipped": [line["step"] for line in skipped]}
    mend = "Lower optim.lr, raise optim.warmup, or lower optim.clip; look at the data of that step."
    found = []
    if skipped:
        share = len(skipped) / total
        text = f"{len(skipped)} of {total:,} steps were skipped, the last at step "
        text += f"{skipped[-1]['step']}: {skipped[-1]['skipped']}."
        level: Level = "warning" if share > 0.01 else "note"
        found.append(Finding("spikes", level, text, share, mend, details))
    if spikes:
        step, loss, usual = max(spikes, key=lambda spike: spike[1] - spike[2])
        often = len(spikes) > max(1, 0.01 * total)
        text = f"{_times(len(spikes), 'spike')}; the highest at step {step}: {loss:.3g}, where "
        text += f"{usual:.3g} was usual."
        level = "warning" if often or loss > 2 * usual else "note"
        found.append(Finding("spikes", level, text, float(len(spikes)), mend, details))
    return found or [Finding("spikes", "good", f"No spike in {total:,} steps, none skipped.", 0.0)]


def find_spikes(losses: list[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """(step, loss, what was usual), for every loss far above the middle one of those before."""
    spikes: list[tuple[int, float, float]] = []
    usual: list[float] = []
    for step, loss in losses:
        if len(usual) >= SETTLED:
            middle = statistics.median(usual)
            spread = statistics.median(abs(other - middle) for other in usual)
            if loss > middle + max(8 * spread, 0.3 * middle, 0.05):
                spikes.append((step, loss, middle))
        usual = [*usual, loss][-HISTORY:]
    return spikes


def check_curve(lines: Lines) -> list[Finding]:
    """Is the training loss still falling over the last quarter of the steps so far?"""
    losses = step_losses(lines)
    if len(losses) < SOME:
        text = f"{_times(len(losses), 'step')}: too few to say where the loss is going."
        return (
            [Finding("curve", "note", text, None, "Train longer: train.steps.")] if losses else []
        )
    part = np.array(losses[-max(SOME // 2, len(losses) // 4) :])
    change, error = _change(part)
    level_now = float(part[:, 1].mean())
    start = statistics.fmean(loss for _, loss in losses[:5])
    relative = change / max(level_now, 1e-9)
    shown = f"{abs(relative):.1%} over the last {len(part):,} steps"
    sure = abs(change) > 3 * error and abs(relative) > 0.02
    if sure and change > 0:
        text, level = f"The training loss rises: {shown}.", "warning"
        mend = "Lower optim.lr, or let it fall over the run (optim.schedule=cosine)."
    elif level_now > 0.95 * start:
        text, level = (
            f"It has hardly learnt: loss {start:.3g} at first, {level_now:.3g} now.",
            "bad",
        )
        mend = "Try optim.lr ten times higher and ten times lower; look at labels and gradients."
    elif level_now < KNOWN * start:
        text, level, mend = f"The training data are learnt: loss {level_now:.2g}.", "good", ""
    elif sure:
        text, level = f"The training loss is still falling: {shown}.", "note"
        mend = "Train longer (train.steps, train.minutes): there is more to learn."
        if _rising(valid_losses(lines)):
            mend = "The validation loss is not: longer alone does not help."
    else:
        text, level = f"The training loss has levelled off at {level_now:.3g}.", "good"
        mend = ""
    return [Finding("curve", level, text, relative, mend)]  # type: ignore[arg-type]


def _change(part: np.ndarray) -> tuple[float, float]:
    """By how much a straight line through these points goes up, and its standard error."""
    x = part[:, 0] - part[:, 0].mean()
    y = part[:, 1] - part[:, 1].mean()
    spread = float((x * x).sum())
    slope = float((x * y).sum()) / spread
    rest = y - slope * x
    error = math.sqrt(float((rest * rest).sum()) / max(1, len(part) - 2) / spread)
    width = float(part[-1, 0] - part[0, 0])
    return slope * width, error * width


def check_fit(lines: Lines, smoothing: float = 0.0) -> list[Finding]:
    """Validation loss against its own best (overfitting), and against the training loss."""
    valid = valid_losses(lines)
    if not valid:
        return [Finding("fit", "note", "The validation data were not measured yet.")]
    found = [*_rising(valid), *([] if smoothing else _gap(lines, valid))]
    worst = [finding for finding in found if finding.level != "good"]
    return worst or found or [Finding("fit", "good", f"Validation loss {valid[-1][1]:.4g}.")]


def _rising(valid: list[tuple[int, float]]) -> list[Finding]:
    if not valid:
        return []
    step, best = min(valid, key=lambda pair: pair[1])
    last, now = valid[-1]
    rise = (now - best) / max(best, 1e-9)
    if rise < 0.01 or now - best < 0.005:
        return []
    text = (
        f"Overfitting: the validation loss was best at step {step} ({best:.4g}) and is {now:.4g} "
    )
    text += f"at step {last}, {f'{rise:.1%} more' if rise < MANY else 'many times as much'}."
    mend = "Stop earlier (train.patience=5 keeps the best), raise dropout, or give more data."
    return [Finding("fit", "warning" if rise > 0.03 else "note", text, rise, mend)]


def _gap(lines: Lines, valid: list[tuple[int, float]]) -> list[Finding]:
    """Training loss just before the last evaluation, against its result."""
    last, now = valid[-1]
    before = [loss for step, loss in step_losses(lines) if step <= last]
    if len(before) < SOME:
        return []
    train = statistics.fmean(before[-max(10, len(before) // 20) :])
    gap = now - train
    text = f"Training loss {train:.4g}, validation loss {now:.4g}."
    if gap > max(0.1, 0.2 * now):
        mend = "It learns its data by heart: more data, dropout, weight decay, or a smaller model."
        return [Finding("fit", "warning", f"{text} The gap is wide.", gap, mend)]
    if gap < -max(0.2, 0.25 * now):
        mend = (
            "Dropout may be too strong, or the validation data are easier than the training data."
        )
        return [Finding("fit", "note", f"{text} Training is the harder one.", gap, mend)]
    if gap < 0.02 * now and check_curve(lines)[0].level == "note":
        mend = "It has room: a larger model, less dropout, or a longer training fit better."
        text = f"Underfitting: {text[0].lower()}{text[1:-1]}, both still falling."
        return [Finding("fit", "note", text, gap, mend)]
    return [Finding("fit", "good", text, gap)]


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
