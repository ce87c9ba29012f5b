"""Whisper: an encoder of sound and a decoder of text (Radford et al. 2022).

Quirks: a stem of two convolutions; keys have no bias; the encoder's positions are sines kept as a
table; pre-norm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.attention.mask import All, Causal
from clearhead.attention.spec import AttentionConfig, Biases, Geometry
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.position import Learned, LearnedConfig
from clearhead.layers.sound import SoundEmbedding
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Net
from clearhead.models.family import FamilyConfig, Shape
from clearhead.models.heads import HeadStyle, LMConfig
from clearhead.models.hf import (
    hf_activation,
    hf_only,
    hf_value,
    linear_keys,
    read_head,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Table, block_keys

ENGLISH_TOKENS = 51864  # of the models that know English alone


@dataclass(frozen=True)
class Config(FamilyConfig, kind="whisper"):
    """A Whisper; the defaults are the published tiny one."""

    shape: ClassVar[Shape] = "encoder-decoder"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 51865
    """How many tokens there are."""
    n_mels: int = 80
    """Bands of the spectrogram."""
    d_model: int = 384
    """Width of the residual stream."""
    n_layers: int = 4
    """Blocks in the encoder."""
    n_decoder_layers: int | None = None
    """Blocks in the decoder; None: as many."""
    n_heads: int = 6
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    source_len: int = 1500
    """Positions of the encoder: half the frames of 30 seconds."""
    max_len: int = 448
    """Positions of the decoder."""
    dropout: float = 0.0
    """On embeddings, sublayers and attention weights."""
    activation: Activation = "gelu"
    """The bend of the feed-forward."""

    @property
    def multilingual(self) -> bool:
        """Whether it knows more than English: such models have at least one token more."""
        return self.vocab_size > ENGLISH_TOKENS

    def to_embed(self) -> EmbedConfig:
        """The decoder's tokens and positions."""
        position = LearnedConfig(self.max_len)
        return EmbedConfig(self.vocab_size, self.d_model, position, dropout=self.dropout)

    def to_stack(self, decoder: bool) -> StackConfig:
        """The blocks of one side."""
        geometry, biases = Geometry(self.d_model, self.n_heads), Biases(k=False)
        mask = Causal() if decoder else All()
        cross = AttentionConfig(geometry, biases=biases, dropout=self.dropout)
        return StackConfig(
            (self.n_decoder_layers or self.n_layers) if decoder else self.n_layers,
            (AttentionConfig(geometry, mask=mask, biases=biases, dropout=self.dropout),),
            PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation),
            cross=cross if decoder else None,
            dropout=self.dropout,
        )

    def network(self) -> EncoderDecoder:
        sound = SoundEmbedding(
            self.d_model, self.n_mels, Learned(self.d_model, self.source_len), self.dropout
        )
        encoder = Encoder(sound, build_stack(self.to_stack(False)))
        decoder = Decoder(self.to_embed().build(), build_stack(self.to_stack(True)), None)
        head = LMConfig().build(HeadStyle(self.d_model, self.vocab_size))
        ties = (("head.proj.weight", "decoder.embed.tokens.weight"),)
        return EncoderDecoder(encoder, decoder, head, ties)

    def build(self, generator: torch.Generator | None = None) -> Net:
        """The network; the encoder's table starts as sines and cosines."""
        net = super().build(generator)
        table = net.get_parameter("encoder.embed.position.table.weight")
        if not table.is_meta:
            with torch.no_grad():
                table.copy_(_sines(self.source_len, self.d_model))
        return net


def _sines(length: int, width: int) -> Tensor:
    """Whisper's own spacing: wave lengths reach 10000 at the last pair, not just before it."""
    steps = torch.arange(width // 2) * -(math.log(10000) / (width // 2 - 1))
    angles = torch.arange(length).unsqueeze(1) * steps.exp()
    return torch.cat((angles.sin(), angles.cos()), dim=1)


PREFIX = "model."
HEADS = {"lm": "WhisperForConditionalGeneration"}


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    table: dict[str, Any] = {
        "model.encoder.embed_positions.weight": "encoder.embed.position.table.weight",
        "model.decoder.embed_positions.weight": "decoder.embed.position.table.weight",
        "model.decoder.embed_tokens.weight": "decoder.embed.tokens.weight",
        "proj_out.weight": "head.proj.weight",
    }
    for conv in ("conv1", "conv2"):
        table |= linear_keys(f"model.encoder.{conv}", f"encoder.embed.{conv}")
    for side in ("encoder", "decoder"):
        table |= block_keys(f"model.{side}", f"{side}.stack", cross=side == "decoder")
        table |= linear_keys(f"model.{side}.layer_norm", f"{side}.stack.norm")
    return table


def openai_keys(config: Config) -> Table:
    """The names in the official .pt files."""
    table: dict[str, Any] = {
        "encoder.positional_embedding": "encoder.embed.position.table.weight",
        "decoder.positional_embedding": "decoder.embed.position.table.weight",
        "decoder.token_embedding.weight": "decoder.embed.tokens.weight",
    }
    names = {"encoder.ln_post": "encoder.stack.norm", "decoder.ln": "decoder.stack.norm"}
    names |= {f"encoder.{conv}": f"encoder.embed.{conv}" for conv in ("conv1", "conv2")}
    for side in ("encoder", "decoder"):
        theirs, ours = side + ".blocks.{i}.", side + ".stack.blocks.{i}."
        sublayers = {"attn": "self"} | ({"cross_attn": "cross"} if side == "decoder" else {})
        for attn, kind in sublayers.items():
            names[f"{theirs}{attn}_ln"] = f"{ours}{kind}_residual.norm"
            for a, b in {"query": "q", "key": "k", "value": "v", "out": "out"}.items():
                names[f"{theirs}{attn}.{a}"] = f"{ours}{kind}_attn.{b}_proj"
        names |= {
            f"{theirs}mlp_ln": f"{ours}ffn_residual.norm",
            f"{theirs}mlp.0": f"{ours}ffn.in_proj",
            f"{theirs}mlp.2": f"{ours}ffn.out_proj",
        }
    for theirs, ours in names.items():
        table |= linear_keys(theirs, ours)
    return table


def from_openai(dims: Mapping[str, int]) -> Config:
    """The dimensions in an official .pt file in our words."""
    return Config(
        vocab_size=dims["n_vocab"],
        n_mels=dims["n_mels"],
        d_model=dims["n_audio_state"],
        n_layers=dims["n_audio_layer"],
        n_decoder_layers=dims["n_text_layer"],
        n_heads=dims["n_audio_head"],
        source_len=dims["n_audio_ctx"],
        max_len=dims["n_text_ctx"],
    )


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    read_head(hf, HEADS, "lm")
    hf_only(
        hf,
        decoder_ffn_dim=hf["encoder_ffn_dim"],
        decoder_attention_heads=hf["encoder_attention_heads"],
        scale_embedding=False,
        tie_word_embeddings=True,
    )
    return Config(
        vocab_size=hf["vocab_size"],
        n_mels=hf["num_mel_bins"],
        d_model=hf["d_model"],
        n_layers=hf["encoder_layers"],
        n_decoder_layers=hf["decoder_layers"],
        n_heads=hf["encoder_attention_heads"],
        d_ff=hf["encoder_ffn_dim"],
        source_len=hf["max_source_positions"],
        max_len=hf["max_target_positions"],
        dropout=hf_value(hf, "dropout", default=0.0),
        activation=hf_activation(hf_value(hf, "activation_function", default="gelu")),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    ff, last = config.d_ff or 4 * config.d_model, config.vocab_size - 1
    end = min(50257 if config.multilingual else 50256, last)
    return write_head(LMConfig(), HEADS, "Whisper") | {
        "model_type": "whisper",
        "vocab_size": config.vocab_size,
        "num_mel_bins": config.n_mels,
        "d_model": config.d_model,
        "encoder_layers": config.n_layers,
        "decoder_layers": config.n_decoder_layers or config.n_layers,
        "num_hidden_layers": config.n_layers,
        "encoder_attention_heads": config.n_heads,
        "decoder_attention_heads": config.n_heads,
        "encoder_ffn_dim": ff,
        "decoder_ffn_dim": ff,
        "max_source_positions": config.source_len,
        "max_target_positions": config.max_len,
        "dropout": config.dropout,
        "activation_function": to_hf_activation(config.activation),
        "is_encoder_decoder": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
        "decoder_start_token_id": min(end + 1, last),
        "tie_word_embeddings": True,
    }
