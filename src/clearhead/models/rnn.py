"""Recurrent language models: RNN, LSTM and GRU, the Transformer's ancestors (Mikolov et al. 2010,
Sundermeyer et al. 2012).

A state is carried from token to token, so what a model remembers while it writes does not grow with
the text. There are no positions: the order of reading tells them.

Differs from the papers: the head is tied to the embedding (Press and Wolf 2017) unless asked
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clearhead.layers.embed import EmbedConfig
from clearhead.layers.init import Init
from clearhead.layers.recurrent import CellName, RecurrentStack
from clearhead.models.base import Decoder, Ties
from clearhead.models.family import FamilyConfig, Shape
from clearhead.models.heads import HeadStyle, LMConfig


@dataclass(frozen=True)
class Config(FamilyConfig, kind="rnn"):
    """A recurrent language model; the defaults are an LSTM of two layers."""

    shape: ClassVar[Shape] = "decoder"
    init: ClassVar[Init] = "xavier"

    vocab_size: int = 10000
    """How many tokens there are."""
    d_model: int = 512
    """Width of the embedding and of every layer's state."""
    n_layers: int = 2
    """Recurrent layers."""
    cell: CellName = "lstm"
    """What carries the state: rnn, lstm or gru."""
    max_len: int = 512
    """How many tokens of a text are read in one go; the state itself has no limit."""
    dropout: float = 0.1
    """On the embedding and behind every layer."""
    head: LMConfig = LMConfig()
    """The output projection, tied to the embedding or not."""

    def network(self) -> Decoder:
        embed = EmbedConfig(self.vocab_size, self.d_model, dropout=self.dropout)
        stack = RecurrentStack(self.cell, self.n_layers, self.d_model, dropout=self.dropout)
        head = self.head.build(HeadStyle(self.d_model, self.vocab_size))
        ties: Ties = (("head.proj.weight", "embed.tokens.weight"),) if self.head.tied else ()
        return Decoder(embed.build(), stack, head, ties)
