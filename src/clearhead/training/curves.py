"""A picture of a run: its losses, its learning rate and its speed over the steps.

Drawn from metrics.jsonl with matplotlib (extra `plot`), into `curves.png` of the run's folder. The
training loss is drawn twice: faint as it is, and smoothed over about a fiftieth of the run.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError
from clearhead.training.folder import RunFolder

PICTURE = "curves.png"
PAUSE = 30.0  # seconds between two pictures at least, and fifty times what one takes
TRAIN, VALID, RATE, SPEED, INK = "#4c78a8", "#e45756", "#54a24b", "#8a6fb0", "#444444"


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass
class Figures:
    """What is drawn: numbers by step."""

    steps: list[int] = field(default_factory=list)
    """The steps."""
    losses: list[float] = field(default_factory=list)
    """The training loss of each."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each."""
    tokens: list[int] = field(default_factory=list)
    """Tokens seen until then."""
    seconds: list[float] = field(default_factory=list)
    """Seconds gone until then."""
    valid: dict[int, float] = field(default_factory=dict)
    """Step -> validation loss."""


def read_figures(folder: RunFolder) -> Figures:
    """The numbers of a run's folder."""
    figures = Figures()
    for line in folder.metrics():
        step = int(line.get("step", 0))
        if "loss" in line:
            figures.steps.append(step)
            figures.losses.append(float(line["loss"]))
            figures.rates.append(float(line["lr"]))
            figures.tokens.append(int(line["tokens"]))
            figures.seconds.append(float(line["seconds"]))
        elif "loss" in line.get("valid", {}):
            figures.valid[step] = float(line["valid"]["loss"])
    return figures


def smoothed(values: np.ndarray, span: int) -> np.ndarray:
    """The mean of the last `span` finite values at each place, of fewer at the start."""
    good = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - span, 0)
    with np.errstate(invalid="ignore"):
        return (sums[ends] - sums[starts]) / (counts[ends] - counts[starts])


def draw_curves(folder: RunFolder) -> str:
    """Write `curves.png` into a run's folder and return its path."""
    if not can_draw():
        raise ClearheadError("Curves are drawn with matplotlib: pip install 'clearhead[plot]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = read_figures(folder)
    picture = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(picture)
    grid = picture.add_gridspec(2, 2, height_ratios=(2.2, 1))
    _losses(picture.add_subplot(grid[0, :]), figures, folder.path.resolve().name)
    _line(picture.add_subplot(grid[1, 0]), figures.steps, figures.rates, "learning rate", RATE)
    _speed(picture.add_subplot(grid[1, 1]), figures)
    final = folder.path / PICTURE
    new = folder.path / f".{PICTURE}.new"
    canvas.print_figure(new, format="png", dpi=110)
    os.replace(new, final)
    return str(final)


def _losses(axes: Any, figures: Figures, name: str) -> None:
    losses = np.asarray(figures.losses)
    if len(losses):
        span = max(1, len(losses) // 50)
        axes.plot(figures.steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
        label = f"training, mean of {span} steps" if span > 1 else "training"
        axes.plot(figures.steps, smoothed(losses, span), color=TRAIN, linewidth=1.6, label=label)
    if figures.valid:
        steps, values = list(figures.valid), list(figures.valid.values())
        axes.plot(steps, values, "o-", color=VALID, markersize=4, linewidth=1.6, label="validation")
        best = int(np.nanargmin(values)) if np.isfinite(values).any() else 0
        axes.annotate(
            f"{values[best]:.4g}",
            (steps[best], values[best]),
            textcoords="offset points",
            xytext=(0, 9),
            ha="right" if best else "left",
            color=VALID,
            fontweight="bold",
        )
    axes.set_title(name, loc="left", fontweight="bold", color=INK)
    axes.set_ylabel("loss")
    _limit(axes, figures.losses, list(figures.valid.values()))
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")
    _plain(axes)


def _limit(axes: Any, losses: Sequence[float], valid: Sequence[float]) -> None:
    """The first steps of a run are so high that nothing else could be seen: they leave the top.
    What was validated stays, but for the first time.
    """
    good = np.asarray([value for value in (*losses, *valid) if np.isfinite(value)])
    if len(good) > 20:
        shown = [value for value in valid[1:] if np.isfinite(value)]
        low, high = good.min(), max(np.quantile(good, 0.98), *shown, -np.inf)
        room = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - room, high + room)


def _speed(axes: Any, figures: Figures) -> None:
    if len(figures.steps) > 1:
        # The middle one of several steps: a step with an evaluation behind it is no slower.
        span = min(len(figures.steps) - 1, max(5, len(figures.steps) // 50))
        seconds = np.maximum(np.diff(figures.seconds), 1e-9)
        windows = np.lib.stride_tricks.sliding_window_view(np.diff(figures.tokens) / seconds, span)
        _line(axes, figures.steps[span:], np.median(windows, axis=1), "tokens a second", SPEED)
    else:
        _line(axes, [], [], "tokens a second", SPEED)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _line(axes: Any, steps: Any, values: Any, name: str, colour: str) -> None:
    axes.plot(steps, values, color=colour, linewidth=1.4)
    axes.set_title(name, loc="left", fontsize=10, color=INK)
    axes.set_ylim(bottom=0)
    _plain(axes)


def _plain(axes: Any) -> None:
    """Few lines, and none that does not help."""
    axes.set_xlabel("step")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)


class Curves:
    """Keeps the picture of a run up to date; a picture that fails is no reason to stop a run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._next = 0.0

    def update(self, last: bool = False) -> None:
        """Draw anew, unless that was done a moment ago."""
        start = time.monotonic()
        if not can_draw() or (start < self._next and not last):
            return
        try:
            draw_curves(self.folder)
        except Exception:  # whatever it is: a full disk is told at the next checkpoint
            return
        took = time.monotonic() - start
        self._next = start + max(PAUSE, 50 * took)
