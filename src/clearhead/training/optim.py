"""Optimisers from a recipe: which parameters go where, at which rate.

adamw   Loshchilov and Hutter 2019, fused                    betas (0.9, 0.95)
adam    Vaswani et al. 2017, section 5.3: no decay           betas (0.9, 0.98), eps 1e-9
muon    matrices inside the blocks; AdamW for all the rest   (`muon.py`)

Weight decay is for matrices only: norms, biases and other vectors have none. `layer_decay` makes
the rate of a block that much smaller than that of the block above it (fine-tuning), and what
`freeze` names has no gradient at all.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.config import Spec
from clearhead.errors import did_you_mean, require
from clearhead.training.adam import Adam
from clearhead.training.muon import Muon
from clearhead.training.schedule import Schedule, WarmupStableDecay

BETAS = {"adamw": (0.9, 0.95), "adam": (0.9, 0.98), "muon": (0.9, 0.95)}
EPS = {"adamw": 1e-8, "adam": 1e-9, "muon": 1e-10}
BLOCK = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@dataclass(frozen=True)
class OptimConfig(Spec, kind="optim"):
    """How the weights move."""

    name: Literal["adamw", "adam", "muon"] = "adamw"
    """The optimiser."""
    lr: float = 1e-3
    """The base learning rate (of the matrices, for Muon)."""
    schedule: Schedule = WarmupStableDecay()
    """How the rate goes over the run."""
    warmup: int = 0
    """Steps of rise at the start."""
    weight_decay: float = 0.1
    """How strongly matrices are pulled to 0 (decoupled; Adam of 2017 has none)."""
    clip: float = 1.0
    """The gradient is scaled down to this norm where it is longer; 0: never."""
    betas: tuple[float, ...] = ()
    """Adam's two averages; none: those of the optimiser's paper."""
    adam_lr: float = 3e-3
    """With Muon: the rate of what is no matrix inside a block."""
    layer_decay: float = 1.0
    """The rate of each block as a part of that of the block above."""
    rdrop: float = 0.0
    """How strongly two passes with other dropout are drawn together (R-Drop's alpha); 0: one."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as they are: names or globs, `embed.*`, `stack.blocks.[0-3].*`."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be above 0, not {self.lr}.")
        require(self.adam_lr > 0, f"optim.adam_lr must be above 0, not {self.adam_lr}.")
        require(self.warmup >= 0, f"optim.warmup must be 0 or more steps, not {self.warmup}.")
        require(self.weight_decay >= 0, "optim.weight_decay must be 0 or more.")
        require(self.clip >= 0, f"optim.clip must be 0 (never) or more, not {self.clip}.")
        require(self.rdrop >= 0, f"optim.rdrop must be 0 or more, not {self.rdrop}.")
        require(len(self.betas) in (0, 2), f"optim.betas are two numbers, not {self.betas}.")
        require(
            all(0 <= beta < 1 for beta in self.betas), f"optim.betas are in [0, 1): {self.betas}."
        )
        require(
            0 < self.layer_decay <= 1, f"optim.layer_decay is in (0, 1], not {self.layer_decay}."
        )


def freeze(net: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Take the gradient from what the globs name, and say which parameters those are."""
    names = [name for name, _ in net.named_parameters()]
    frozen: list[str] = []
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        require(
            bool(found),
            f'optim.freeze: no parameter is called "{pattern}".{did_you_mean(pattern, names)} '
            f"The first of {len(names)}: {', '.join(names[:4])}.",
        )
        frozen += found
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    require(
        any(parameter.requires_grad for parameter in net.parameters()),
        "optim.freeze leaves nothing to train.",
    )
    return frozen


def build_optimisers(
    net: nn.Module, config: OptimConfig, compiled: bool = False
) -> list[Optimizer]:
    """One optimiser, or two for Muon; each group knows its base rate (`base_lr`)."""
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            inside = config.name == "muon" and parameter.dim() == 2 and bool(BLOCK.search(name))
            key = (inside, parameter.dim() >= 2, _depth_factor(net, name, config.layer_decay))
            groups.setdefault(key, []).append(parameter)
    plain = [_group(config, *key, found) for key, found in groups.items() if not key[0]]
    turned = [_group(config, *key, found) for key, found in groups.items() if key[0]]
    return [
        *_adam(config, plain),
        *([Muon(turned, config.lr, compiled=compiled)] if turned else []),
    ]


def _group(
    config: OptimConfig, inside: bool, matrix: bool, factor: float, parameters: list[Tensor]
) -> dict[str, Any]:
    lr = config.adam_lr if config.name == "muon" and not inside else config.lr
    decay = config.weight_decay if matrix and config.name != "adam" else 0.0
    return {
        "params": parameters,
        "lr": lr * factor,
        "base_lr": lr * factor,
        "weight_decay": decay,
    }


def _adam(config: OptimConfig, groups: list[dict[str, Any]]) -> Iterator[Optimizer]:
    if not groups:
        return
    betas = config.betas or BETAS[config.name]
    device = groups[0]["params"][0].device.type
    more: dict[str, Any] = {
        "lr": config.lr,
        "betas": (betas[0], betas[1]),
        "eps": EPS[config.name],
        "fused": device in ("cpu", "cuda", "mps"),
    }
    yield Adam(groups, decoupled_weight_decay=config.name != "adam", **more)


def _depth_factor(net: nn.Module, name: str, decay: float) -> float:
    """The rate of a parameter by its depth: the head 1, the top block `decay`, the next decay^2."""
    if decay == 1.0 or name.startswith("head."):
        return 1.0
    found = BLOCK.search(name)
    stem = name[: found.start()] if found else ""
    blocks = [m for n, m in net.named_modules() if n.endswith("blocks") and n.startswith(stem)]
    count = max((len(m) for m in blocks if isinstance(m, nn.ModuleList)), default=0)
    if found:
        return decay ** (count - int(found.group(1)))
    last = ".norm." in name and "embed." not in name  # the norm behind all blocks
    return 1.0 if last else decay ** (count + 1)  # and the embeddings


def set_rates(optimisers: list[Optimizer], factor: float) -> None:
    """Every group's rate at this step."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["base_lr"] * factor
