"""Heads: what the last states are turned into.

lm              [b, t, v]       logits over the vocabulary
masked_lm       [b, t, v]       the same behind a small transform
pooling         [b, m]          one vector a text
classification  [b, labels]     one logit a label
tagging         [b, t, labels]  the same for every token
span            [b, t, 2]       where an answer starts and ends
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.cache import Cache
from clearhead.attention.dropout import Dropout
from clearhead.attention.positions import Positions
from clearhead.config import Spec
from clearhead.errors import require
from clearhead.layers.ffn import ACTIVATIONS, Activation
from clearhead.layers.norm import LayerNormConfig, NormConfig

Pool = Literal["first", "last", "mean", "max"]
Dense = Literal["tanh", "relu"]
DENSE: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": F.relu}
States = Float[Tensor, "b t m"]


def pool(x: States, at: Positions, mode: Pool) -> Float[Tensor, "b m"]:
    """One vector a row, of the filled slots only; a row with none gives zeros."""
    filled = at.filled().expand(x.shape[0], -1).unsqueeze(2)
    if mode == "mean":
        return (x * filled).sum(dim=1) / filled.sum(dim=1).clamp(min=1)
    if mode == "max":
        # The least number there is stands in for empty slots, so that it wins only in a row of
        # nothing.
        least = torch.finfo(x.dtype).min
        return x.masked_fill(~filled, least).amax(dim=1) * filled.any(dim=1)
    order = at.pos.expand(x.shape[0], -1)
    if mode == "first":
        order = -torch.where(order >= 0, order, torch.iinfo(order.dtype).max)
    picked = order.argmax(dim=1).view(-1, 1, 1).expand(-1, 1, x.shape[2])
    return x.gather(1, picked).squeeze(1) * filled.any(dim=1)


class LMHead(nn.Module):
    """Logits over the vocabulary; `proj` is often tied to the token embedding."""

    def __init__(
        self, d_model: int, vocab_size: int, bias: bool = False, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, vocab_size, bias=bias)
        self.scale = scale
        self.likeliest: Any = None  # `fast.likeliest`, in the run-time form

    def forward(self, x: States, at: Positions) -> Float[Tensor, "b t v"]:
        return self.proj(self._scaled(x))

    def best(
        self, x: Float[Tensor, "b m"], cache: Cache
    ) -> tuple[Float[Tensor, "b few"], Int[Tensor, " few"]] | None:
        """Logits of some tokens, among which is the best one of each row, and which these are; or
        None, where the way through all logits is the shorter one. For heads with `likeliest`.
        """
        return self.likeliest(self._scaled(x), cache)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class MaskedLMHead(nn.Module):
    """Dense, activation, norm, then logits. Devlin et al. 2019."""

    def __init__(
        self, d_model: int, vocab_size: int, activation: Activation, norm: nn.Module
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, d_model)
        self.activation = ACTIVATIONS[activation]
        self.norm = norm
        self.proj = nn.Linear(d_model, vocab_size)

    def forward(self, x: States, at: Positions) -> Float[Tensor, "b t v"]:
        return self.proj(self.norm(self.activation(self.dense(x))))


class PoolingHead(nn.Module):
    """One vector a text, through a dense layer if it is BERT's pooler, of length 1 if asked."""

    def __init__(
        self, d_model: int, mode: Pool, dense: Dense | None = None, normalise: bool = False
    ) -> None:
        super().__init__()
        self.mode, self.normalise = mode, normalise
        self.dense = nn.Linear(d_model, d_model) if dense else None
        self.activation = DENSE[dense or "tanh"]

    def forward(self, x: States, at: Positions) -> Float[Tensor, "b m"]:
        vector = pool(x, at, self.mode)
        if self.dense is not None:
            vector = self.activation(self.dense(vector))
        return F.normalize(vector, dim=-1) if self.normalise else vector


class ClassificationHead(nn.Module):
    """Pool, drop out, one logit a label."""

    def __init__(
        self, pooling: PoolingHead, d_model: int, n_labels: int, dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.dropout = Dropout(dropout)
        self.proj = nn.Linear(d_model, n_labels, bias=bias)

    def forward(self, x: States, at: Positions) -> Float[Tensor, "b labels"]:
        return self.proj(self.dropout(self.pooling(x, at)))


class TokenHead(nn.Module):
    """The same few logits at every token: labels of a tagger, or start and end of a span."""

    def __init__(self, d_model: int, n_out: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.proj = nn.Linear(d_model, n_out)

    def forward(self, x: States, at: Positions) -> Float[Tensor, "b t n"]:
        return self.proj(self.dropout(x))


@dataclass(frozen=True)
class HeadStyle:
    """What a family knows about its heads."""

    d_model: int
    """Width of the states."""
    vocab_size: int
    """How many tokens."""
    pooling: Pool = "first"
    """Which state speaks for the text (a causal model: the last)."""
    dense: Dense | None = None
    """The bend of a dense layer behind the pooling (BERT tanh, DistilBERT relu); None: no such
    layer.
    """
    activation: Activation = "gelu"
    """Of the masked LM's transform."""
    norm: NormConfig = LayerNormConfig()
    """Of the masked LM's transform."""
    dropout: float = 0.0
    """Before a classifier."""
    bias: bool = True
    """Whether the classifier has a bias vector."""


class HeadConfig(Spec):
    """Which head."""

    tied = False  # whether its projection is the token embedding

    def build(self, style: HeadStyle) -> nn.Module:
        """The module."""
        return LMHead(style.d_model, style.vocab_size)


@dataclass(frozen=True)
class LMConfig(HeadConfig, kind="lm"):
    """The next token."""

    tied: bool = True
    """Whether the projection is the token embedding."""
    bias: bool = False
    """Whether the logits have a bias (Marian, BART)."""

    def build(self, style: HeadStyle) -> nn.Module:
        return LMHead(style.d_model, style.vocab_size, self.bias)


@dataclass(frozen=True)
class MaskedLMConfig(HeadConfig, kind="masked_lm"):
    """The masked tokens."""

    tied: bool = True
    """Whether the projection is the token embedding."""

    def build(self, style: HeadStyle) -> nn.Module:
        norm = style.norm.build(style.d_model)
        return MaskedLMHead(style.d_model, style.vocab_size, style.activation, norm)


@dataclass(frozen=True)
class PoolingConfig(HeadConfig, kind="pooling"):
    """One vector a text."""

    mode: Pool | None = None
    """Which states it is made of; None: the family's own choice."""
    dense: bool = False
    """Whether tanh(dense) stands behind (BERT's pooler)."""
    normalise: bool = False
    """Whether the vector gets length 1."""

    def build(self, style: HeadStyle) -> nn.Module:
        dense: Dense | None = "tanh" if self.dense else None
        return PoolingHead(style.d_model, self.mode or style.pooling, dense, self.normalise)


@dataclass(frozen=True)
class ClassificationConfig(HeadConfig, kind="classification"):
    """A label for the text."""

    n_labels: int = 2
    """How many labels."""
    true: Literal["one", "several", "none"] = "one"
    """How many labels are true of a text: one of all, several (each for itself), or none: the
    numbers measure something. A single one measures unless it is "several".
    """

    def __post_init__(self) -> None:
        require(self.n_labels >= 1, f"n_labels must be 1 or more, not {self.n_labels}.")

    def build(self, style: HeadStyle) -> nn.Module:
        pooling = PoolingHead(style.d_model, style.pooling, style.dense)
        return ClassificationHead(pooling, style.d_model, self.n_labels, style.dropout, style.bias)


@dataclass(frozen=True)
class TaggingConfig(HeadConfig, kind="tagging"):
    """A label for every token."""

    n_labels: int = 2
    """How many labels."""

    def __post_init__(self) -> None:
        require(self.n_labels >= 1, f"n_labels must be 1 or more, not {self.n_labels}.")

    def build(self, style: HeadStyle) -> nn.Module:
        return TokenHead(style.d_model, self.n_labels, style.dropout)


@dataclass(frozen=True)
class SpanConfig(HeadConfig, kind="span"):
    """Where an answer starts and ends."""

    def build(self, style: HeadStyle) -> nn.Module:
        return TokenHead(style.d_model, 2)
