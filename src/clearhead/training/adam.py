"""Adam and AdamW as torch has them, fused, with their lists kept from step to step.

torch gathers parameters, averages and counts anew for every step, and counts every parameter's
steps in a tensor of its own: in a small model on a CPU that is some hundredths of the step. Here
the lists are made once, and one count serves them all. Whatever is not the plain case (a parameter
without a gradient, another device, a scaler of gradients) goes torch's own way, which is also the
slow twin.
What is remembered is changed by `load_state_dict` alone: the lists do not look at `state` again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Kept:
    """What a group of parameters has in every step."""

    params: list[Tensor]
    """The parameters."""
    means: list[Tensor]
    """Their averaged gradients."""
    squares: list[Tensor]
    """Their averaged squares."""
    counts: list[Tensor]
    """How many steps each has made, as it stands in the optimiser's state."""
    count: Tensor
    """The same for all of them, which is the one that is counted on."""


class Adam(torch.optim.Adam):
    """Kingma and Ba 2015; with `decoupled_weight_decay` AdamW, Loshchilov and Hutter 2019."""

    kept: list[Kept] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move all parameters once."""
        if self.kept is None:
            self.kept = self._gather()
        grads = [[p.grad for p in group["params"]] for group in self.param_groups]
        missing = any(grad is None for found in grads for grad in found)
        scaled = getattr(self, "grad_scale", None) is not None
        if closure or not self.kept or missing or scaled or hasattr(self, "found_inf"):
            self._put_counts()
            self.kept = None
            return _torch_step()(self, closure)
        for group, kept, found in zip(self.param_groups, self.kept, grads, strict=True):
            _move(group, kept, found)
        return None

    def state_dict(self) -> dict[str, Any]:
        """All that it remembers."""
        self._put_counts()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._put_counts()  # for copies
        return super().__getstate__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember this instead."""
        super().load_state_dict(state_dict)
        self.kept = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Move these parameters, too."""
        self._put_counts()
        super().add_param_group(param_group)
        self.kept = None

    def _gather(self) -> list[Kept]:
        """The lists of all groups; none where something in them is not the plain case."""
        found = []
        for group in self.param_groups:
            params = group["params"]
            if not group["fused"] or group["amsgrad"] or group["maximize"]:
                return []
            if not all(type(p) is torch.nn.Parameter and p.is_cpu for p in params):
                return []
            states = [self.state[p] for p in params if self.state.get(p)]
            counts = [state["step"] for state in states]
            if len(states) < len(params) or len({float(count) for count in counts}) != 1:
                return []
            means, squares = ([state[n] for state in states] for n in ("exp_avg", "exp_avg_sq"))
            found.append(Kept(params, means, squares, counts, counts[0].clone()))
        return found

    def _put_counts(self) -> None:
        """Let every parameter's own count say what the common one says."""
        for kept in self.kept or ():
            for count in kept.counts:
                count.copy_(kept.count)


def _torch_step() -> Callable[..., Any]:
    """torch's own step without its hooks, which ours has called already."""
    step = torch.optim.Adam.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


@torch.no_grad()
def _move(group: dict[str, Any], kept: Kept, grads: list[Any]) -> None:
    kept.count += 1
    move = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    move(
        kept.params,
        grads,
        kept.means,
        kept.squares,
        [],
        [kept.count] * len(grads),
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
