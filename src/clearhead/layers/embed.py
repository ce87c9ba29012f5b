"""Token embeddings: x = dropout(norm(E[id] * scale + position + segment)).

Vaswani et al. 2017, section 3.4 (scale sqrt(m), head tied to E); Devlin et al. 2019 add segments
and a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.cache import Cache
from clearhead.attention.dropout import Dropout
from clearhead.attention.positions import Positions
from clearhead.config import Spec
from clearhead.errors import ClearheadError, require
from clearhead.layers.norm import NormConfig
from clearhead.layers.position import AddedPosition
from clearhead.tap import Tap


class Embedding(nn.Module):
    """Ids to vectors, with their positions."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        position: nn.Module | None = None,
        beside: int = 0,
        token_types: int = 0,
        scale: float = 1.0,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.scale, self.beside = vocab_size, scale, beside
        self.tokens = nn.Embedding(vocab_size, d_model - beside)
        self.position = position
        self.types = nn.Embedding(token_types, d_model) if token_types else None
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.out = Tap()

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        at: Positions,
        types: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b t m"]:
        x = self._look_up(ids)
        if self.position is not None:
            place = self.position(at).to(x.dtype)
            x = (
                x + place
                if not self.beside
                else torch.cat((x, place.expand(x.shape[0], -1, -1)), 2)
            )
        if self.types is None:
            require(types is None, "This model has no segments, so it takes no types.")
        else:
            x = x + (
                self.types.weight[0] if types is None else look_up(self.types, types, "Segment")
            )
        if self.norm is not None:
            x = self.norm(x)
        return self.out(self.dropout(x))

    def place(self, ids: Tensor, at: Positions | None, cache: Cache | None = None) -> Positions:
        """Where the tokens stand: as given, or behind what the cache holds, or 0, 1, 2, ..."""
        self.check(ids)
        length = ids.shape[-1]
        require(length > 0, "There are no tokens: a sequence needs at least one.")
        if at is None:
            if cache is not None:
                return cache.next(length, ids.device)
            return Positions.span(0, length, ids.device)
        require(
            at.length == length and at.pos.shape[0] in (1, ids.shape[0]),
            f"Positions of shape {tuple(at.pos.shape)} do not fit ids of shape {tuple(ids.shape)}.",
        )
        return at

    def check_room(self, max_len: int) -> None:
        """Refuse a cache that is longer than the table of positions, before it is filled."""
        limit = getattr(self.position, "max_len", None)
        require(
            limit is None or max_len <= limit,
            f"A cache for {max_len} positions is longer than this model's table of {limit}: make "
            f"it with max_len={limit} or less.",
        )

    @staticmethod
    def check(ids: Tensor) -> None:
        """Refuse what are no ids by their rank and type, which takes no look at the numbers."""
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ClearheadError(
                f"Token ids are whole numbers of shape [batch, length]; these are {ids.dtype} of "
                f"shape {tuple(ids.shape)}."
                + (" For a single sequence write ids.unsqueeze(0)." if ids.dim() == 1 else "")
                + (" For other whole numbers write ids.long()." if ids.dim() == 2 else "")
            )

    def _look_up(self, ids: Tensor) -> Float[Tensor, "b t w"]:
        self.check(ids)
        x = look_up(self.tokens, ids)
        return x if self.scale == 1.0 else x * self.scale


def check_ids(ids: Tensor, vocab_size: int, what: str = "Token") -> None:
    """Refuse ids outside the vocabulary.

    It reads the tensor, so it stands at the surface and not in a forward.
    """
    if ids.numel() and ids.dtype in (torch.int64, torch.int32):
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0 and high < vocab_size, _outside(low, high, vocab_size, what))


def look_up(table: nn.Embedding, ids: Tensor, what: str = "Token") -> Float[Tensor, "b t w"]:
    """The rows of a table.

    Ids are not checked first, which would read them in every step; torch's error is made readable.
    """
    try:
        return table(ids)
    except IndexError as error:  # on a CPU; a GPU stops by itself, without a word about the id
        message = _outside(int(ids.min()), int(ids.max()), table.num_embeddings, what)
        raise ClearheadError(message) from error


def _outside(low: int, high: int, size: int, what: str) -> str:
    return (
        f"{what} id {low if low < 0 else high} is outside the vocabulary of {size} (0 to "
        f"{size - 1}): was the text encoded with this model's tokenizer?"
    )


@dataclass(frozen=True)
class EmbedConfig(Spec, kind="embed"):
    """How ids become the residual stream."""

    vocab_size: int
    """How many tokens there are."""
    d_model: int
    """Width of the residual stream."""
    position: AddedPosition | None = None
    """The position that enters here, if any."""
    token_types: int = 0
    """How many segments (BERT: 2); 0: none."""
    scale: float = 1.0
    """Multiplies the token vectors (2017: sqrt(d_model))."""
    norm: NormConfig | None = None
    """Normalises the sum (BERT, BART), if given."""
    dropout: float = 0.0
    """Probability that a number of the sum is dropped in training."""

    def __post_init__(self) -> None:
        require(self.vocab_size >= 1, f"vocab_size must be 1 or more, not {self.vocab_size}.")
        require(self.d_model >= 1, f"d_model must be 1 or more, not {self.d_model}.")
        require(self.token_types >= 0, f"token_types must be 0 or more, not {self.token_types}.")
        require(0 <= self.dropout < 1, f"dropout must be in [0, 1), not {self.dropout}.")
        beside = self.position.beside if self.position else 0
        require(
            0 <= beside < self.d_model,
            f"Positions of width {beside} leave no room for tokens in a stream of {self.d_model}.",
        )

    def build(self) -> Embedding:
        """The module."""
        position, norm = self.position, self.norm
        return Embedding(
            self.vocab_size,
            self.d_model,
            position=position.build(self.d_model) if position else None,
            beside=position.beside if position else 0,
            token_types=self.token_types,
            scale=self.scale,
            norm=norm.build(self.d_model) if norm else None,
            dropout=self.dropout,
        )
