"""The guard: which steps are not taken, because a number is not finite or far out of line.

A spike is a gradient more than ten times as long as the middle one of the last fifty, in a step
whose loss is also more than half, and 0.5, above their mean. Such a step changes nothing; five in a
row stop the run, and the first layer whose output is not finite is named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

REMEMBERED, SETTLED, IN_A_ROW = 50, 20, 5
LENGTH, HEIGHT = 10.0, 1.5  # of a spike: gradient against the middle one, loss against the mean
LEAST = 0.5  # and so much above it: where nearly all is learnt, small losses jump by themselves


class Guard:
    """Looks at each step's loss and gradient norm; what it remembers is part of a run's state."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.row = 0  # bad steps one behind the other

    def fault(self, loss: float, norm: float, scale: float = 1.0) -> str | None:
        """What is wrong with a step, or None; good steps are remembered.

        `scale` is what fp16 multiplied the loss by: while it can be less, a gradient that is too
        large says nothing about the run.
        """
        if scale > 1 and math.isfinite(loss) and not math.isfinite(norm):
            return f"fp16 cannot hold the gradient times {scale:g}; it is scaled less from now on"
        wrong = self._fault(loss, norm)
        self.row = self.row + 1 if wrong else 0
        if not wrong:
            self.losses = [*self.losses, loss][-REMEMBERED:]
            self.norms = [*self.norms, norm][-REMEMBERED:]
        return wrong

    def _fault(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        if len(self.norms) < SETTLED:
            return None
        usual, level = statistics.median(self.norms), statistics.fmean(self.losses)
        if norm > LENGTH * usual and loss > HEIGHT * level + LEAST:
            return (
                f"a spike: loss {loss:.3g} where {level:.3g} is usual, gradient {norm:.3g} where "
                f"{usual:.3g} is"
            )
        return None

    def state(self) -> dict[str, Any]:
        """As plain data."""
        return {"losses": self.losses, "norms": self.norms, "row": self.row}

    def restore(self, state: dict[str, Any]) -> None:
        """As `state` gave it."""
        self.losses, self.norms = list(state["losses"]), list(state["norms"])
        self.row = int(state["row"])


def first_bad_layer(net: nn.Module, call: Callable[[], Any]) -> str | None:
    """The first parameter that is not finite, or else the first module whose output is not, or else
    the last parameter whose gradient is not: a bad gradient spreads towards the input.
    """
    for name, parameter in net.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"{name} (its weights)"
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            floats = isinstance(output, Tensor) and output.is_floating_point()
            if floats and not found and not bool(output.isfinite().all()):
                found.append(name)

        return hook

    handles = [part.register_forward_hook(look(name)) for name, part in net.named_modules() if name]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"{found[0]} (its output)"
    for name, parameter in reversed(list(net.named_parameters())):
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"{name} (its gradient)"
    return None
