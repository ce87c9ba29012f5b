"""Memory that a run will need, predicted before its first step and held against what is free.

state         the weights; for those that learn a gradient, two moments and an average
activations   what a batch keeps for the backward pass, from `measure.cost`
output        the head's, three times: itself, its log-softmax and the gradient

Nothing is allocated to find out, so that a batch that cannot fit is refused and not tried.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from clearhead.attention.softmax import Kernel
from clearhead.errors import ClearheadError, require
from clearhead.measure.cost import Cost, predict
from clearhead.measure.hardware import read_memory, read_processor
from clearhead.measure.machine import crash
from clearhead.measure.roofs import measure
from clearhead.models.base import EncoderDecoder, Net

if TYPE_CHECKING:
    from clearhead.training.job import Job
    from clearhead.training.recipe import MachineConfig, Recipe

MARGIN = 0.9  # of what is free; the rest is for what the prediction leaves out


@dataclass(frozen=True)
class Need:
    """Bytes that training takes in one process."""

    state: int
    """Whatever the batch is."""
    row: int
    """For each row of a batch."""
    rows: int
    """Rows of a batch, in this process."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.row * self.rows

    def rows_within(self, free: int) -> int:
        """How many rows there is room for; 0: for none."""
        return max(0, int((MARGIN * free - self.state) // self.row))


def predict_need(job: Job, device: torch.device, processes: int = 1) -> Need:
    """What a job takes, at its longest examples."""
    recipe, net, length = job.recipe, job.model.net, job.length
    learning = sum(p.numel() for p in net.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in net.parameters())
    copies = 3 if recipe.train.average is None else 5  # averaging swaps the weights for a while
    state = 4 * (everything + copies * learning)
    if recipe.train.machine.shard:
        state //= processes
    rows = rows_of(recipe, length)
    both = {"source_length": length} if isinstance(net, EncoderDecoder) else {}
    cost = predict(net, batch=1, length=length, dtype=torch.float32, **both)
    row = _kept(recipe, cost, device, job) + 3 * cost.memory.logits
    row *= 2 if recipe.optim.rdrop else 1
    return Need(state, max(1, row), -(-rows // processes))


def rows_of(recipe: Recipe, length: int) -> int:
    """Rows of a batch, where it is counted in tokens: of the longest examples."""
    batch = recipe.train.batch
    return max(1, batch // length) if recipe.data.by == "tokens" else batch


def _kept(recipe: Recipe, cost: Cost, device: torch.device, job: Job) -> int:
    machine = recipe.train.machine
    kernels = [part for part in job.model.net.modules() if isinstance(part, Kernel)]
    written = device.type == "cpu" and any(kernel.dropout for kernel in kernels)
    name = "activations_written" if written else "activations"
    layers = [getattr(share, name) for layer, share in cost.by_layer().items() if layer]
    kept = int(getattr(cost.memory, name))
    if machine.recompute and layers:
        width = getattr(job.model.config, "d_model", 0)
        kept = kept - sum(layers) + max(layers) + 4 * cost.tokens * width * len(layers)
    return kept if machine.precision == "fp32" else kept // 2


def free_memory(device: torch.device) -> int | None:
    """Bytes that one process may still take; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = read_memory().available
    return None if available is None else available // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_room(job: Job, device: torch.device, processes: int = 1) -> Need:
    """Refuse a batch that does not fit into memory, and name the largest that does."""
    need, free = predict_need(job, device, processes), free_memory(device)
    if free is None or need.total <= free:
        return need
    fits = need.rows_within(free) * processes
    says = (
        f"Training takes about {_size(need.total)} of memory ({_size(need.state)} for the model "
        f"and its optimiser, {_size(need.row)} for each row of a batch), and {_size(free)} are "
        "free."
    )
    require(
        fits > 0,
        f"{says} Not even one row fits: choose a smaller model (model.d_model, model.n_layers) or "
        "a shorter data.length.",
    )
    recipe = job.recipe
    batch = fits * job.length if recipe.data.by == "tokens" else fits
    parts = -(-recipe.train.batch // batch) * recipe.train.accumulate
    whole = recipe.train.batch * recipe.train.accumulate
    even = max(1, whole // parts)
    same = "the same" if even * parts == whole else "nearly the same"
    raise ClearheadError(
        f"{says} The largest train.batch that fits is {batch}; train.batch={even} "
        f"train.accumulate={parts} is a step of {same} size."
    )


def check_precision(config: MachineConfig, device: torch.device) -> None:
    """Refuse a type of numbers whose instructions end the program here; a child process tries."""
    if device.type != "cpu" or config.precision == "fp32":
        return
    report = measure((config.precision,))
    if report.died_in:
        problem = crash(report, read_processor())
        raise ClearheadError(
            f"train.machine.precision is {config.precision}. {problem.what} {problem.mend}."
        )


def check_weights(net: Net) -> None:
    """Refuse a model whose weights alone are more than the memory; `net` is on the meta device."""
    count = sum(p.numel() for p in net.parameters())
    need, free = 16 * count, free_memory(torch.device("cpu"))
    require(
        free is None or need <= free,
        f"A model of {count:,} parameters takes {_size(need)} of memory to train, batch not "
        f"counted, and {_size(free or 0)} are free: choose a smaller one.",
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
