"""Recurrent encoder-decoders: a state hands the source over, and attention looks back at it
(Sutskever et al. 2014, Bahdanau et al. 2015).

The encoder reads in both directions. The decoder begins with the state in which the encoder ended:
without attention that one vector a layer is all it knows of the source, the bottleneck for which
attention was invented. With additive attention every step also looks at all of the source's states.

Differs from the papers: the decoder's layers begin with the encoder's last states of both
directions, unchanged; attention stands behind the last layer and does not feed the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from clearhead.attention.positions import Positions
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.init import Init
from clearhead.layers.recurrent import CellName, RecurrentStack
from clearhead.layers.stack import Memory
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Ids, Ties
from clearhead.models.family import FamilyConfig, Shape
from clearhead.models.heads import HeadStyle, LMConfig


class RecurrentEncoder(Encoder):
    """An encoder that also hands over the state in which it ended."""

    def encode(
        self, inputs: Tensor, at: Positions | None = None, types: Ids | None = None
    ) -> Memory:
        at = self.embed.place(inputs, at)
        x, final = self.stack.run(self.embed(inputs, at, types), at)
        return Memory(x, at, final)


@dataclass(frozen=True)
class Config(FamilyConfig, kind="rnn_seq2seq"):
    """A recurrent encoder-decoder; the defaults are GRUs with additive attention."""

    shape: ClassVar[Shape] = "encoder-decoder"
    init: ClassVar[Init] = "xavier"

    vocab_size: int = 10000
    """How many tokens there are (of the source, where the two differ)."""
    target_vocab_size: int | None = None
    """How many tokens the target has; None: one vocabulary, and one matrix, for both."""
    d_model: int = 512
    """Width of the embedding and of every layer's state; each direction of the encoder has half."""
    n_layers: int = 1
    """Recurrent layers in the encoder, and as many in the decoder."""
    cell: CellName = "gru"
    """What carries the state: rnn, lstm or gru."""
    attention: Literal["additive", "none"] = "additive"
    """Whether the decoder looks back at the source, or has its last state alone."""
    max_len: int = 512
    """How many tokens of a text are read in one go; the state itself has no limit."""
    dropout: float = 0.1
    """On the embeddings and behind every layer."""
    head: LMConfig = LMConfig()
    """The output projection, tied to the target's embedding or not."""

    def to_embed(self, vocab_size: int) -> EmbedConfig:
        """Tokens; their order needs no positions."""
        return EmbedConfig(vocab_size, self.d_model, dropout=self.dropout)

    def to_stack(self, decoder: bool) -> RecurrentStack:
        """The layers of one side."""
        return RecurrentStack(
            self.cell,
            self.n_layers,
            self.d_model,
            bidirectional=not decoder,
            attends=decoder and self.attention == "additive",
            dropout=self.dropout,
        )

    def network(self) -> EncoderDecoder:
        vocab = self.target_vocab_size or self.vocab_size
        encoder = RecurrentEncoder(self.to_embed(self.vocab_size).build(), self.to_stack(False))
        decoder = Decoder(self.to_embed(vocab).build(), self.to_stack(True), None)
        ties: Ties = ()
        if self.target_vocab_size is None:
            ties = (("decoder.embed.tokens.weight", "encoder.embed.tokens.weight"),)
        if self.head.tied:
            ties = (*ties, ("head.proj.weight", "decoder.embed.tokens.weight"))
        head = self.head.build(HeadStyle(self.d_model, vocab))
        return EncoderDecoder(encoder, decoder, head, ties)
