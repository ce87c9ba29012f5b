"""The Transformer of 2017: an encoder and a decoder, sinusoidal positions, post-norm (Vaswani et
al. 2017).

Quirks: token vectors are multiplied by sqrt(d_model), and one matrix serves as source embedding,
target embedding and output projection where the vocabulary is shared. Dropout leaves attention
weights alone (section 5.4). Pre-norm, which trains more easily, is a choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from clearhead.attention.mask import All, Causal
from clearhead.attention.spec import AttentionConfig, AttentionPosition, Geometry
from clearhead.errors import require
from clearhead.layers.block import Placement
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.position import AddedPosition, SinusoidalConfig
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Ties
from clearhead.models.family import FamilyConfig, Shape, split_position
from clearhead.models.heads import HeadStyle, LMConfig


@dataclass(frozen=True)
class Config(FamilyConfig, kind="transformer"):
    """A 2017 Transformer; the defaults are the published base model."""

    shape: ClassVar[Shape] = "encoder-decoder"
    init: ClassVar[Init] = "xavier"

    vocab_size: int = 37000
    """How many tokens there are (of the source, where the two differ)."""
    target_vocab_size: int | None = None
    """How many tokens the target has; None: one vocabulary, and one matrix, for both."""
    d_model: int = 512
    """Width of the residual stream."""
    n_layers: int = 6
    """Blocks in the encoder, and as many in the decoder."""
    n_heads: int = 8
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    max_len: int = 512
    """How many positions the model is made for."""
    dropout: float = 0.1
    """On embeddings and sublayers, as in the paper; not on attention weights."""
    position: AddedPosition | AttentionPosition | None = SinusoidalConfig()
    """How positions enter."""
    placement: Placement = "post"
    """Where the norm stands in a residual."""
    activation: Activation = "relu"
    """The bend of the feed-forward."""
    head: LMConfig = LMConfig()
    """The output projection, tied to the target's embedding or not."""

    def to_embed(self, vocab_size: int) -> EmbedConfig:
        """Tokens, times sqrt(d_model), and positions."""
        added, _ = split_position(self.position, self.max_len)
        require(
            not self.head.tied or added is None or added.beside == 0,
            "Positions beside the tokens make the embedding narrower than the stream, so the head "
            "cannot be "
            'tied to it: use head={"kind": "lm", "tied": false}.',
        )
        scale = math.sqrt(self.d_model)
        return EmbedConfig(vocab_size, self.d_model, added, scale=scale, dropout=self.dropout)

    def to_stack(self, decoder: bool) -> StackConfig:
        """The blocks of one side."""
        _, inside = split_position(self.position, self.max_len)
        geometry = Geometry(self.d_model, self.n_heads)
        mask = Causal() if decoder else All()
        attention = AttentionConfig(geometry, mask=mask, position=inside)
        return StackConfig(
            self.n_layers,
            (attention,),
            PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation),
            placement=self.placement,
            cross=AttentionConfig(geometry) if decoder else None,
            final_norm=self.placement != "post",
            dropout=self.dropout,
        )

    def network(self) -> EncoderDecoder:
        vocab = self.target_vocab_size or self.vocab_size
        encoder = Encoder(self.to_embed(self.vocab_size).build(), build_stack(self.to_stack(False)))
        decoder = Decoder(self.to_embed(vocab).build(), build_stack(self.to_stack(True)), None)
        ties: Ties = ()
        if self.target_vocab_size is None:
            ties = (("decoder.embed.tokens.weight", "encoder.embed.tokens.weight"),)
        if self.head.tied:
            ties = (*ties, ("head.proj.weight", "decoder.embed.tokens.weight"))
        return EncoderDecoder(
            encoder, decoder, self.head.build(HeadStyle(self.d_model, vocab)), ties
        )
