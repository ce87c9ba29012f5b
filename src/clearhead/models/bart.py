"""BART and Marian: encoder-decoders with post-norm, one matrix for both embeddings and the output.

BART (Lewis et al. 2020): learned positions that start two rows in, a norm on the embeddings. Marian
(Junczys-Dowmunt et al. 2018): sinusoidal positions, sines before cosines, token vectors times
sqrt(d_model). Quirks: the logits have a bias; a Marian starts from its padding token, a BART from
its end token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.attention.mask import All, Causal
from clearhead.attention.spec import AttentionConfig, AttentionPosition, Geometry
from clearhead.errors import ClearheadError
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.position import AddedPosition, LearnedConfig, SinusoidalConfig
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Ties
from clearhead.models.family import FamilyConfig, Shape, split_position
from clearhead.models.heads import HeadStyle, LMConfig
from clearhead.models.hf import (
    OUR_LAYOUT,
    hf_activation,
    hf_only,
    hf_value,
    linear_keys,
    read_head,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, Stacked, Table, block_keys

OFFSET = 2
MARIAN = SinusoidalConfig(layout="halves")


@dataclass(frozen=True)
class Config(FamilyConfig, kind="bart"):
    """A BART; the defaults are the published base model."""

    shape: ClassVar[Shape] = "encoder-decoder"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 50265
    """How many tokens there are."""
    d_model: int = 768
    """Width of the residual stream."""
    n_layers: int = 6
    """Blocks in the encoder."""
    n_decoder_layers: int | None = None
    """Blocks in the decoder; None: as many."""
    n_heads: int = 12
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    max_len: int = 1024
    """How many positions the model has."""
    dropout: float = 0.1
    """On embeddings, sublayers and attention weights."""
    position: AddedPosition | AttentionPosition | None = LearnedConfig(offset=OFFSET)
    """How positions enter: a table (BART) or sines (Marian)."""
    activation: Activation = "gelu"
    """The bend of the feed-forward."""
    scaled: bool = False
    """Whether token vectors are multiplied by sqrt(d_model) (Marian)."""
    embed_norm: bool = True
    """Whether the embeddings are normalised (BART)."""

    def to_embed(self) -> EmbedConfig:
        """Tokens and positions."""
        added, _ = split_position(self.position, self.max_len)
        return EmbedConfig(
            self.vocab_size,
            self.d_model,
            added,
            scale=math.sqrt(self.d_model) if self.scaled else 1.0,
            norm=LayerNormConfig() if self.embed_norm else None,
            dropout=self.dropout,
        )

    def to_stack(self, decoder: bool) -> StackConfig:
        """The blocks of one side."""
        _, inside = split_position(self.position, self.max_len)
        geometry = Geometry(self.d_model, self.n_heads)
        mask = Causal() if decoder else All()
        return StackConfig(
            (self.n_decoder_layers or self.n_layers) if decoder else self.n_layers,
            (AttentionConfig(geometry, mask=mask, position=inside, dropout=self.dropout),),
            PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation),
            placement="post",
            cross=AttentionConfig(geometry, dropout=self.dropout) if decoder else None,
            final_norm=False,
            dropout=self.dropout,
        )

    def network(self) -> EncoderDecoder:
        encoder = Encoder(self.to_embed().build(), build_stack(self.to_stack(False)))
        decoder = Decoder(self.to_embed().build(), build_stack(self.to_stack(True)), None)
        head = LMConfig(tied=True, bias=True).build(HeadStyle(self.d_model, self.vocab_size))
        shared = "encoder.embed.tokens.weight"
        ties: Ties = (("decoder.embed.tokens.weight", shared), ("head.proj.weight", shared))
        return EncoderDecoder(encoder, decoder, head, ties)


PREFIX = "model."
HEADS = {"lm": "BartForConditionalGeneration"}
MARIAN_HEADS = {"lm": "MarianMTModel"}
# A body alone has all that the head needs but the bias of its logits.
OPENED_AS = {"BartModel": "BartForConditionalGeneration", "MarianModel": "MarianMTModel"}
ZEROS = ("head.proj.bias",)


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    table: dict[str, Any] = {
        "model.shared.weight": "encoder.embed.tokens.weight",
        "model.encoder.embed_tokens.weight": "encoder.embed.tokens.weight",
        "model.decoder.embed_tokens.weight": "decoder.embed.tokens.weight",
        "lm_head.weight": "head.proj.weight",
        "final_logits_bias": Stacked("head.proj.bias"),
    }
    for side in ("encoder", "decoder"):
        table |= block_keys(f"model.{side}", f"{side}.stack", cross=side == "decoder")
        table[f"model.{side}.version"] = Dropped("the version of the program that wrote the file")
        place = f"model.{side}.embed_positions.weight"
        if isinstance(config.position, LearnedConfig):
            table[place] = f"{side}.embed.position.table.weight"
        else:
            table[place] = Dropped("sines and cosines, which are computed here")
        if config.embed_norm:
            table |= linear_keys(f"model.{side}.layernorm_embedding", f"{side}.embed.norm")
    return table


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words, of either kind; `names` are the keys of the file."""
    marian = hf["model_type"] == "marian"
    read_head(hf, MARIAN_HEADS if marian else HEADS, "lm")
    hf_only(
        hf,
        share_encoder_decoder_embeddings=True,
        normalize_before=False,
        decoder_ffn_dim=hf["encoder_ffn_dim"],
        decoder_attention_heads=hf["encoder_attention_heads"],
        tie_word_embeddings=True,
    )
    return Config(
        vocab_size=hf["vocab_size"],
        d_model=hf["d_model"],
        n_layers=hf["encoder_layers"],
        n_decoder_layers=hf["decoder_layers"],
        n_heads=hf["encoder_attention_heads"],
        d_ff=hf["encoder_ffn_dim"],
        max_len=hf["max_position_embeddings"],
        dropout=hf_value(hf, "dropout", default=0.1),
        position=MARIAN if marian else LearnedConfig(offset=OFFSET),
        activation=hf_activation(hf_value(hf, "activation_function", default="gelu")),
        scaled=hf_value(hf, "scale_embedding", default=False),
        embed_norm=not marian,
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as the config of the one or the other."""
    marian = config.position == MARIAN and not config.embed_norm
    if not marian and (config.position != LearnedConfig(offset=OFFSET) or not config.embed_norm):
        raise ClearheadError(
            "Hugging Face's BART has learned positions and a norm on the embeddings, its Marian "
            f"sines and no norm; this model has another combination. {OUR_LAYOUT}"
        )
    layers, ff = config.n_decoder_layers or config.n_layers, config.d_ff or 4 * config.d_model
    pad = config.vocab_size - 1 if marian else 1  # their own defaults may be beyond the vocabulary
    start = pad if marian else 2
    return write_head(LMConfig(), MARIAN_HEADS if marian else HEADS, "BART") | {
        "model_type": "marian" if marian else "bart",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.n_layers,
        "decoder_layers": layers,
        "encoder_attention_heads": config.n_heads,
        "decoder_attention_heads": config.n_heads,
        "encoder_ffn_dim": ff,
        "decoder_ffn_dim": ff,
        "max_position_embeddings": config.max_len,
        "dropout": config.dropout,
        "activation_function": to_hf_activation(config.activation),
        "scale_embedding": config.scaled,
        "is_encoder_decoder": True,
        "pad_token_id": pad,
        "decoder_start_token_id": start,
        "eos_token_id": 0 if marian else 2,
        "tie_word_embeddings": True,
    }
