"""Averages of weights: along the run (EMA), or of its last checkpoints.

ema    E <- d E + (1 - d) W after every step, d growing from 0: min(decay, (1 + n) / (10 + n))
last   the mean of the weights at the last `count` checkpoints (Vaswani et al. 2017, section 6.1)

Both are often a little better than the last weights, and both are part of the state of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.config import Spec
from clearhead.errors import require


class AverageConfig(Spec):
    """Which weights a run gives in the end."""


@dataclass(frozen=True)
class EMAConfig(AverageConfig, kind="ema"):
    """A running average."""

    decay: float = 0.999
    """How much of the average stays at each step."""

    def __post_init__(self) -> None:
        require(0 < self.decay < 1, f"An EMA's decay is in (0, 1), not {self.decay}.")


@dataclass(frozen=True)
class LastConfig(AverageConfig, kind="last"):
    """The mean of the last checkpoints."""

    count: int = 10
    """How many."""

    def __post_init__(self) -> None:
        require(self.count >= 1, f"The average is of 1 checkpoint or more, not {self.count}.")


class EMA:
    """The running average of a network's parameters."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights = {name: p.detach().clone() for name, p in net.named_parameters()}

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        """Move a little towards the network."""
        self.updates += 1
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        new = [p.detach() for _, p in net.named_parameters()]
        torch._foreach_lerp_(list(self.weights.values()), new, 1.0 - keep)


@contextmanager
def swapped(net: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The network with other weights within the block, then with its own."""
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    try:
        _put(net, weights)
        yield
    finally:
        _put(net, own)


@torch.no_grad()
def _put(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.copy_(weights[name])


def mean_weights(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, added up in double precision, one set at a time."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for state in states:
        require(
            not total or total.keys() == state.keys(),
            "These checkpoints are of different models and have no average.",
        )
        count += 1
        for name, tensor in state.items():
            dtypes[name] = tensor.dtype
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    require(count > 0, "There is no checkpoint to average.")
    return {name: (tensor / count).to(dtypes[name]) for name, tensor in total.items()}
