"""Normalisation over the width: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019).

LayerNorm(x) = (x - mean) / sqrt(var + eps) * gain + bias;  RMSNorm(x) = x / sqrt(mean(x^2) + eps) *
gain
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from clearhead.attention.rms import RMSNorm
from clearhead.config import Spec
from clearhead.errors import require


class NormConfig(Spec):
    """Which normalisation."""

    def build(self, width: int) -> nn.Module:
        """The module for a stream of this width."""
        return nn.LayerNorm(width)


@dataclass(frozen=True)
class LayerNormConfig(NormConfig, kind="layer_norm"):
    """Mean 0, variance 1, then a gain and a bias."""

    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = True
    """Whether there is a bias beside the gain."""

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"The epsilon of a norm must be 0 or more, not {self.eps}.")

    def build(self, width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNormConfig(NormConfig, kind="rms_norm"):
    """Root mean square 1, then a gain."""

    eps: float = 1e-6
    """Added to the mean square."""

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"The epsilon of a norm must be 0 or more, not {self.eps}.")

    def build(self, width: int) -> nn.Module:
        return RMSNorm(width, eps=self.eps)
