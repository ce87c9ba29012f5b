"""The feed-forward sublayer: the same small network at every position.

    plain  act(x W_in + b) W_out + b            Vaswani et al. 2017, section 3.3
    gated  (act(x W_gate) * (x W_in)) W_out     Shazeer 2020 (SwiGLU with silu, GEGLU with gelu)

Position-wise means: two convolutions of width 1 (`as_convolutions` is that twin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.config import Spec
from clearhead.errors import require
from clearhead.tap import Tap

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu_squared"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "quick_gelu": _quick_gelu,
    "relu_squared": _relu_squared,
}


class FFN(nn.Module):
    """Widen, bend, narrow."""

    def __init__(
        self, d_model: int, d_ff: int, activation: Activation = "relu", bias: bool = True
    ) -> None:
        super().__init__()
        self.in_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.out_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.hidden = Tap()

    def forward(self, x: Float[Tensor, "b t m"]) -> Float[Tensor, "b t m"]:
        return self.out_proj(self.hidden(self.activation(self.in_proj(x))))

    def as_convolutions(self) -> nn.Sequential:
        """The same function on [b, m, t] as two 1x1 convolutions with these weights.

        It is the proof of the equality.
        """
        layers = []
        for linear in (self.in_proj, self.out_proj):
            conv = nn.Conv1d(
                linear.in_features, linear.out_features, 1, bias=linear.bias is not None
            )
            conv.weight.data.copy_(linear.weight.data.unsqueeze(2))
            if linear.bias is not None and conv.bias is not None:
                conv.bias.data.copy_(linear.bias.data)
            layers.append(conv)
        return nn.Sequential(layers[0], _Elementwise(self.activation), layers[1])


class GatedFFN(nn.Module):
    """Widen twice; the one decides how much of the other passes."""

    joint: Callable[[Tensor], Sequence[Tensor]] | None = None
    """x -> both in one product, in the run-time form."""

    def __init__(
        self, d_model: int, d_ff: int, activation: Activation = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.in_proj = nn.Linear(d_model, d_ff, bias=bias)
        self.out_proj = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.hidden = Tap()

    def forward(self, x: Float[Tensor, "b t m"]) -> Float[Tensor, "b t m"]:
        gate, value = (self.gate_proj(x), self.in_proj(x)) if self.joint is None else self.joint(x)
        return self.out_proj(self.hidden(self.activation(gate) * value))


class FFNConfig(Spec):
    """Which feed-forward sublayer."""

    def build(self, d_model: int) -> nn.Module:
        """The module for a stream of this width."""
        return FFN(d_model, 4 * d_model)


@dataclass(frozen=True)
class PlainFFNConfig(FFNConfig, kind="plain"):
    """act(x W_in) W_out."""

    d_ff: int
    """Width inside."""
    activation: Activation = "relu"
    """The bend."""
    bias: bool = True
    """Whether the projections have bias vectors."""

    def __post_init__(self) -> None:
        require(self.d_ff >= 1, f"d_ff must be 1 or more, not {self.d_ff}.")

    def build(self, d_model: int) -> nn.Module:
        return FFN(d_model, self.d_ff, self.activation, self.bias)


@dataclass(frozen=True)
class GatedFFNConfig(FFNConfig, kind="gated"):
    """(act(x W_gate) * x W_in) W_out."""

    d_ff: int
    """Width inside."""
    activation: Activation = "silu"
    """The bend of the gate."""
    bias: bool = False
    """Whether the projections have bias vectors."""

    def __post_init__(self) -> None:
        require(self.d_ff >= 1, f"d_ff must be 1 or more, not {self.d_ff}.")

    def build(self, d_model: int) -> nn.Module:
        return GatedFFN(d_model, self.d_ff, self.activation, self.bias)


class _Elementwise(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
