"""Gradients and updates by layer: does every layer learn, and at a similar pace?

Gradients that shrink or grow from block to block do so exponentially, so the ratio of the first
block's to the last one's tells (Glorot and Bengio 2010; He et al. 2016 for residual networks). How
far a step moves a matrix, |change| / |matrix|, is usually near 1e-3; Muon's steps are about ten
times as long.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.data.batch import Batch
from clearhead.models.base import Net
from clearhead.training.finding import Finding, Level, listed
from clearhead.training.guard import first_bad_layer
from clearhead.training.loss import batch_loss
from clearhead.training.optim import BLOCK, set_rates
from clearhead.training.schedule import Schedule

UNEQUAL, VERY_UNEQUAL = 100.0, 10_000.0  # first block's gradient against the last one's, or back
STILL, FAST, WILD = 1e-5, 0.1, 0.5  # what a step changes of a matrix


def compute_gradients(net: Net, batch: Batch, ask: str) -> None:
    """The mean loss's gradient, left in the parameters; without dropout, so without dice."""
    net.zero_grad(set_to_none=True)
    with torch.enable_grad(), net.at_rest():
        (batch_loss(net, batch, ask) / max(1, batch.count)).backward()


def check_numbers(net: Net, batch: Batch) -> list[Finding]:
    """Weights, outputs and gradients (where there are any) must be finite."""
    with net.at_rest():
        layer = first_bad_layer(net, lambda: net(*batch.inputs, **batch.places))
    if layer is None:
        return [Finding("numbers", "good", "All weights, outputs and gradients are finite.")]
    return [
        Finding(
            "numbers",
            "bad",
            f"Some numbers are not finite, first in {layer}.",
            suggestion="Go back to an earlier checkpoint; lower optim.lr, raise optim.warmup, or "
            "set train.machine.precision=fp32.",
        )
    ]


def check_gradients(net: nn.Module) -> list[Finding]:
    """The gradients that lie in the parameters: by layer, and where there are none."""
    norms = _norms({n: p.grad for n, p in net.named_parameters() if p.requires_grad})
    wrong = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if wrong:
        text = f"The gradient is not finite in {listed(wrong)}."
        mend = "Lower optim.lr or raise optim.warmup; with fp16 try bf16 or fp32."
        return [Finding("gradients", "bad", text, suggestion=mend)]
    layers = _by_layer(norms)
    return [*_depth(layers), *_dead([name for name, norm in norms.items() if norm == 0.0])]


def _depth(layers: dict[str, float]) -> list[Finding]:
    """First block against last, in each stack."""
    found = []
    for stack, blocks in _stacks(layers).items():
        first, last = blocks[0], blocks[-1]
        if len(blocks) < 2 or not (first > 0 and last > 0):
            continue
        ratio = first / last
        off = max(ratio, 1 / ratio)
        level: Level = "bad" if off > VERY_UNEQUAL else "warning" if off > UNEQUAL else "good"
        text = f"The first block's gradient is {ratio:.2g} x the last one's ({stack})."
        mend = ""
        if level != "good":
            word = "vanish" if ratio < 1 else "explode"
            text = f"Gradients {word} on the way down: the first block's is {ratio:.2g} x the last "
            text += f"one's ({stack})."
            mend = "Use pre-norm blocks, more optim.warmup, or fewer layers."
        found.append(Finding("gradients", level, text, ratio, mend, {"layers": layers}))
    return found


def _dead(dead: list[str]) -> list[Finding]:
    if not dead:
        return []
    text = f"Parameters without any gradient: {listed(dead)}."
    mend = (
        "They learn nothing. Something cuts them off: a dead ReLU, a part that is never called, or "
        "a detached tensor. If they are meant to stay, name them in optim.freeze."
    )
    return [Finding("gradients", "warning", text, float(len(dead)), mend, {"dead": dead})]


def check_updates(before: Mapping[str, Tensor], net: nn.Module, slow: bool = True) -> list[Finding]:
    """How far a step moved each matrix, as a part of its length, by layer.

    Not `slow`: a small step is as well, as when the rate is rising or has come down.
    """
    after = {name: p.detach() for name, p in net.named_parameters() if name in before}
    lengths = _norms(before)
    moves = _norms({name: after[name] - old for name, old in before.items()})
    used = [name for name, length in lengths.items() if length > 0]
    if not used:
        return []
    moved = _by_layer({name: moves[name] for name in used})
    length = _by_layer({name: lengths[name] for name in used})
    ratios = {layer: moved[layer] / length[layer] for layer in moved}
    usual = statistics.median(ratios.values())
    details = {"layers": ratios}
    found = []
    fast = [layer for layer, ratio in ratios.items() if not ratio <= FAST]  # NaN is fast, too
    still = [layer for layer, ratio in ratios.items() if slow and ratio < STILL]
    if fast:
        most = max((ratios[layer] for layer in fast), key=lambda r: r if r == r else math.inf)
        level: Level = "warning" if most <= WILD else "bad"
        text = f"A step moves {listed(fast)} by up to {most:.2g} of its length (usual: 0.001)."
        mend = "The learning rate is too high there: lower optim.lr (or optim.adam_lr, with Muon)."
        found.append(Finding("updates", level, text, most, mend, details))
    if still:
        least = min(ratios[layer] for layer in still)
        text = f"A step moves {listed(still)} by {least:.1g} of its length only (usual: 0.001)."
        mend = "Raise optim.lr, or look at optim.layer_decay and the gradients of these layers."
        found.append(Finding("updates", "warning", text, least, mend, details))
    text = f"A step moves a layer by {usual:.2g} of its length (Adam: about 0.001; Muon: 0.01)."
    return found or [Finding("updates", "good", text, usual, "", details)]


def weights_to_watch(net: nn.Module) -> dict[str, Tensor]:
    """A copy of the matrices that learn, for `check_updates`."""
    return {
        name: p.detach().clone()
        for name, p in net.named_parameters()
        if p.requires_grad and p.dim() >= 2
    }


def try_step(
    net: Net, optimisers: Sequence[Optimizer], batch: Batch, ask: str, factor: float, clip: float
) -> list[Finding]:
    """`check_updates` of one real step, on a copy of network and optimisers."""
    net, optimisers = copy.deepcopy((net, list(optimisers)))  # one call: they share parameters
    compute_gradients(net, batch, ask)
    torch.nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)
    before = weights_to_watch(net)
    set_rates(list(optimisers), factor)
    for optimiser in optimisers:
        optimiser.step()
    return check_updates(before, net)


def mean_factor(schedule: Schedule, steps: int, warmup: int) -> float:
    """The learning rate of the whole run in the middle: at its end it is often 0."""
    some = range(1, steps + 1, max(1, steps // 1000))
    return statistics.fmean(schedule.factor(step, steps, warmup) for step in some)


def _norms(tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The length of each; nothing is 0 long. Shards of several processes are put together."""
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    lengths = (torch.linalg.vector_norm(tensor.detach().float()) for tensor in there.values())
    whole = [getattr(length, "full_tensor", lambda x=length: x)() for length in lengths]
    found = dict(zip(there, torch.stack(whole).tolist() if whole else [], strict=True))
    return {name: found.get(name, 0.0) for name in tensors}


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """The length of all parameters of a block (or of what lies outside of blocks) together."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        block = BLOCK.search(name)
        layer = name[: block.end() - 1] if block else name.rpartition(".")[0] or name
        squares[layer] = squares.get(layer, 0.0) + norm**2
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def _stacks(layers: Mapping[str, float]) -> dict[str, list[float]]:
    """The blocks' values in order, for each stack: encoder.stack.blocks, decoder.stack.blocks."""
    stacks: dict[str, dict[int, float]] = {}
    for layer, value in layers.items():
        if found := BLOCK.search(f"{layer}."):
            stack = layer.rpartition(".")[0]
            stacks.setdefault(stack, {})[int(found.group(1))] = value
    return {stack: [blocks[i] for i in sorted(blocks)] for stack, blocks in stacks.items()}
