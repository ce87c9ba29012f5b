"""LoRA: a matrix learns by a product of two thin ones that is added to it (Hu et al. 2021).

    y = x W^T + (alpha / rank) (x A^T) B^T,   W frozen, A drawn, B = 0 at the start

So the first step starts from the pretrained model exactly, and `merge_lora` adds the product into W
for good: what is saved and exported is an ordinary model.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.config import Spec
from clearhead.errors import require
from clearhead.fast.products import drop_compiled


@dataclass(frozen=True)
class LoRAConfig(Spec, kind="lora"):
    """Thin additions to matrices."""

    rank: int = 8
    """Width of the thin matrices."""
    alpha: float = 16.0
    """The product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*.q_proj", "*.v_proj")
    """Which matrices: globs over the names of linear layers."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"A LoRA's rank must be 1 or more, not {self.rank}.")


class LoRALinear(nn.Linear):
    """A linear layer with a thin addition; its own weight keeps its name."""

    def __init__(self, inner: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False, device="meta")
        self.weight, self.bias = inner.weight, inner.bias
        self.scale = scale
        place: Any = {"device": inner.weight.device, "dtype": inner.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(rank, inner.in_features, **place))
        self.lora_b = nn.Parameter(torch.zeros(inner.out_features, rank, **place))

    def forward(self, x: Tensor) -> Tensor:
        thin = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.scale * thin

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The ordinary layer that gives the same."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight + self.scale * self.lora_b @ self.lora_a)
        plain.bias = self.bias
        return plain


def add_lora(net: nn.Module, config: LoRAConfig, generator: torch.Generator) -> list[str]:
    """Freeze the network but for its head, and add thin matrices to what the globs name."""
    layers = [name for name, part in net.named_modules() if type(part) is nn.Linear]
    layers = [name for name in layers if not name.startswith("head.")]
    chosen = [
        name for name in layers if any(fnmatch.fnmatchcase(name, glob) for glob in config.targets)
    ]
    require(
        bool(chosen),
        f"train.lora.targets {list(config.targets)} name no linear layer. There are: "
        f"{', '.join(sorted({'*.' + name.rpartition('.')[2] for name in layers}))}.",
    )
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith("head."))
    for name in chosen:
        layer = LoRALinear(net.get_submodule(name), config.rank, config.alpha / config.rank)  # type: ignore[arg-type]
        bound = 1 / math.sqrt(layer.in_features)
        with torch.no_grad():
            layer.lora_a.uniform_(-bound, bound, generator=generator)
        net.set_submodule(name, layer)
    return chosen


def merge_lora(net: nn.Module) -> None:
    """Make ordinary layers of all that were added to."""
    for name, part in list(net.named_modules()):
        if isinstance(part, LoRALinear):
            net.set_submodule(name, part.merged())


@torch.no_grad()
def merged_copy(net: nn.Module, weights: Mapping[str, Tensor] | None) -> nn.Module:
    """An ordinary network that gives the same, of these weights or of those of now."""
    new = copy.deepcopy(net)
    added = weights is None or any(name.endswith(".lora_a") for name in weights)
    if not added:  # they were merged when they were saved
        merge_lora(new)
    for name, parameter in new.named_parameters():
        if weights is not None:
            parameter.copy_(weights[name])
    merge_lora(new)
    drop_compiled(new)
    return new.requires_grad_(True).eval()
