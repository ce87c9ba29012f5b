"""T5: an encoder-decoder whose positions are learned biases for buckets of distances (Raffel et al.
2020).

Quirks: RMSNorm, no bias vectors anywhere, scores are not scaled, a head width of its own. The first
generation ties the head to the embedding and divides by sqrt(d_model) before it; version 1.1 and
Flan untie it and gate the feed-forward.

Differs from the paper: no dropout behind the last norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from clearhead.attention.mask import All, Causal
from clearhead.attention.spec import (
    AttentionConfig,
    AttentionPosition,
    Biases,
    Geometry,
    T5BucketsConfig,
)
from clearhead.errors import ClearheadError, require
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import FFNConfig, GatedFFNConfig, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import RMSNormConfig
from clearhead.layers.position import AddedPosition
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Ties
from clearhead.models.family import FamilyConfig, Shape, split_position
from clearhead.models.heads import HeadConfig, HeadStyle, LMHead
from clearhead.models.hf import (
    OUR_LAYOUT,
    hf_activation,
    hf_value,
    read_head,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, Table


@dataclass(frozen=True)
class T5LMConfig(HeadConfig, kind="t5_lm"):
    """The next token, as the two generations do it."""

    tied: bool = True
    """Whether the projection is the token embedding (v1.0)."""
    scaled: bool = True
    """Whether the states are divided by sqrt(d_model) first (v1.0)."""

    def build(self, style: HeadStyle) -> nn.Module:
        scale = style.d_model**-0.5 if self.scaled else 1.0
        return LMHead(style.d_model, style.vocab_size, scale=scale)


@dataclass(frozen=True)
class Config(FamilyConfig, kind="t5"):
    """A T5; the defaults are the published small one."""

    shape: ClassVar[Shape] = "encoder-decoder"
    init: ClassVar[Init] = "t5"

    vocab_size: int = 32128
    """How many tokens there are."""
    d_model: int = 512
    """Width of the residual stream."""
    n_layers: int = 6
    """Blocks in the encoder."""
    n_decoder_layers: int | None = None
    """Blocks in the decoder; None: as many."""
    n_heads: int = 8
    """Attention heads."""
    head_dim: int | None = None
    """Width of a head; None: d_model / n_heads."""
    ffn: FFNConfig = PlainFFNConfig(2048, "relu", bias=False)
    """The feed-forward: plain (first generation) or gated (v1.1, Flan)."""
    max_len: int = 512
    """How many positions the model was trained with; it has no limit of its own."""
    dropout: float = 0.1
    """On embeddings, sublayers and attention weights."""
    position: AddedPosition | AttentionPosition | None = T5BucketsConfig()
    """How positions enter."""
    eps: float = 1e-6
    """Of the norms."""
    head: T5LMConfig = T5LMConfig()
    """The output projection: tied and scaled in the first generation."""

    def to_embed(self) -> EmbedConfig:
        """Tokens, without positions unless one is added."""
        added, _ = split_position(self.position, self.max_len)
        return EmbedConfig(self.vocab_size, self.d_model, added, dropout=self.dropout)

    def to_stack(self, decoder: bool) -> StackConfig:
        """The blocks of one side."""
        _, inside = split_position(self.position, self.max_len)
        geometry = Geometry(self.d_model, self.n_heads, None, self.head_dim)
        bare = Biases(False, False, False, False)
        cross = AttentionConfig(geometry, biases=bare, scale=1.0, dropout=self.dropout)
        attention = AttentionConfig(
            geometry,
            mask=Causal() if decoder else All(),
            position=inside,
            biases=bare,
            scale=1.0,
            dropout=self.dropout,
        )
        return StackConfig(
            (self.n_decoder_layers or self.n_layers) if decoder else self.n_layers,
            (attention,),
            self.ffn,
            RMSNormConfig(self.eps),
            cross=cross if decoder else None,
            dropout=self.dropout,
        )

    def network(self) -> EncoderDecoder:
        encoder = Encoder(self.to_embed().build(), build_stack(self.to_stack(False)))
        decoder = Decoder(self.to_embed().build(), build_stack(self.to_stack(True)), None)
        head = self.head.build(HeadStyle(self.d_model, self.vocab_size))
        ties: Ties = (("decoder.embed.tokens.weight", "encoder.embed.tokens.weight"),)
        if self.head.tied:
            ties = (*ties, ("head.proj.weight", "encoder.embed.tokens.weight"))
        return EncoderDecoder(encoder, decoder, head, ties)


PREFIX = ""
HEADS = {"t5_lm": "T5ForConditionalGeneration"}
OPENED_AS = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}  # its first name


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    table: dict[str, Any] = {
        "shared.weight": "encoder.embed.tokens.weight",
        "encoder.embed_tokens.weight": "encoder.embed.tokens.weight",
        "decoder.embed_tokens.weight": "decoder.embed.tokens.weight",
        "lm_head.weight": "head.proj.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": Dropped(
            "positions of cross-attention, which the first files have and no model uses"
        ),
    }
    for side in ("encoder", "decoder"):
        layer, block = side + ".block.{i}.layer.", side + ".stack.blocks.{i}."
        table[f"{side}.final_layer_norm.weight"] = f"{side}.stack.norm.weight"
        table[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (
            f"{side}.stack.kinds.0.bias.table.weight"
        )
        sublayers = [("0.SelfAttention", "self_attn", "self_residual")]
        if side == "decoder":
            sublayers.append(("1.EncDecAttention", "cross_attn", "cross_residual"))
        for theirs, attn, residual in sublayers:
            for a, b in {"q": "q", "k": "k", "v": "v", "o": "out"}.items():
                table[f"{layer}{theirs}.{a}.weight"] = f"{block}{attn}.{b}_proj.weight"
            table[f"{layer}{theirs[0]}.layer_norm.weight"] = f"{block}{residual}.norm.weight"
        last = f"{layer}{len(sublayers)}."
        table[f"{last}layer_norm.weight"] = f"{block}ffn_residual.norm.weight"
        names = {"wi": "in", "wo": "out"}
        if config.ffn.kind == "gated":
            names = {"wi_0": "gate", "wi_1": "in", "wo": "out"}
        for a, b in names.items():
            table[f"{last}DenseReluDense.{a}.weight"] = f"{block}ffn.{b}_proj.weight"
    return table


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    read_head(hf, HEADS, "t5_lm")
    style = hf_value(hf, "feed_forward_proj", default="relu")
    gated, name = style.startswith("gated-"), style.removeprefix("gated-")
    # Theirs says "gated-gelu" and means the tanh form.
    activation = hf_activation("gelu_new" if gated and name == "gelu" else name)
    ffn = GatedFFNConfig if gated else PlainFFNConfig
    return Config(
        vocab_size=hf["vocab_size"],
        d_model=hf["d_model"],
        n_layers=hf["num_layers"],
        n_decoder_layers=hf_value(hf, "num_decoder_layers"),
        n_heads=hf["num_heads"],
        head_dim=hf["d_kv"],
        ffn=ffn(hf["d_ff"], activation, bias=False),
        max_len=hf_value(hf, "n_positions", default=512),
        dropout=hf_value(hf, "dropout_rate", default=0.1),
        position=T5BucketsConfig(
            hf_value(hf, "relative_attention_num_buckets", default=32),
            hf_value(hf, "relative_attention_max_distance", default=128),
        ),
        eps=hf_value(hf, "layer_norm_epsilon", default=1e-6),
        # Newer configs say "tied" always: the file decides, and another setting tells the
        # generations apart.
        head=T5LMConfig(
            tied="lm_head.weight" not in names,
            scaled=hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False),
        ),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    position, ffn = config.position, config.ffn
    if (
        not isinstance(position, T5BucketsConfig)
        or not isinstance(ffn, (PlainFFNConfig, GatedFFNConfig))
        or ffn.bias
    ):
        raise ClearheadError(
            "Hugging Face's T5 has positions in buckets and a feed-forward without bias vectors; "
            f"this model differs. {OUR_LAYOUT}"
        )
    gated = isinstance(ffn, GatedFFNConfig)
    require(
        not (gated and ffn.activation == "gelu"),
        "Hugging Face's T5 has gates with the tanh form of GELU, not with the exact one. "
        + OUR_LAYOUT,
    )
    name = to_hf_activation(ffn.activation)
    if gated and name == "gelu_new":
        name = "gelu"
    return write_head(config.head, HEADS, "T5") | {
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "num_layers": config.n_layers,
        "num_decoder_layers": config.n_decoder_layers or config.n_layers,
        "num_heads": config.n_heads,
        "d_kv": config.head_dim or config.d_model // config.n_heads,
        "d_ff": ffn.d_ff,
        "feed_forward_proj": f"gated-{name}" if gated else name,
        "n_positions": config.max_len,
        "dropout_rate": config.dropout,
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.max_distance,
        "layer_norm_epsilon": config.eps,
        "tie_word_embeddings": config.head.scaled,
        "scale_decoder_outputs": config.head.scaled,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
