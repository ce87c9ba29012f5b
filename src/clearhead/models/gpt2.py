"""GPT-2: a decoder with pre-norm, learned positions and a tied head (Radford et al. 2019).

Quirks: their matrices are stored [in, out] and queries, keys, values in one; only the key table
knows. The same file serves its relatives that differ in position or norm alone (Megatron-LM, GPT-3
dense, Gopher).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.attention.mask import Causal
from clearhead.attention.spec import AttentionConfig, AttentionPosition, Geometry
from clearhead.errors import ClearheadError
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import LayerNormConfig, NormConfig
from clearhead.layers.position import AddedPosition, LearnedConfig
from clearhead.layers.stack import StackConfig
from clearhead.models.base import Decoder
from clearhead.models.family import FamilyConfig, Shape, decoder, split_position
from clearhead.models.heads import HeadConfig, HeadStyle, LMConfig
from clearhead.models.hf import (
    OUR_LAYOUT,
    head_keys,
    head_of,
    hf_activation,
    hf_only,
    hf_value,
    linear_keys,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, Fused, Table, Transposed


@dataclass(frozen=True)
class Config(FamilyConfig, kind="gpt2"):
    """A GPT-2; the defaults are the published 124M one."""

    shape: ClassVar[Shape] = "decoder"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 50257
    """How many tokens there are."""
    d_model: int = 768
    """Width of the residual stream."""
    n_layers: int = 12
    """How many blocks."""
    n_heads: int = 12
    """Attention heads."""
    n_kv_heads: int | None = None
    """Key/value heads; None: n_heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    max_len: int = 1024
    """How many positions the model has."""
    dropout: float = 0.0
    """On embeddings, sublayers and attention weights."""
    position: AddedPosition | AttentionPosition | None = LearnedConfig()
    """How positions enter."""
    norm: NormConfig = LayerNormConfig()
    """The normalisation."""
    activation: Activation = "gelu_tanh"
    """The bend of the feed-forward."""
    head: HeadConfig | None = LMConfig()
    """What the last states are turned into."""

    def to_embed(self) -> EmbedConfig:
        """Tokens and positions."""
        added, _ = split_position(self.position, self.max_len)
        return EmbedConfig(self.vocab_size, self.d_model, added, dropout=self.dropout)

    def to_stack(self) -> StackConfig:
        """The blocks."""
        _, inside = split_position(self.position, self.max_len)
        attention = AttentionConfig(
            Geometry(self.d_model, self.n_heads, self.n_kv_heads),
            mask=Causal(),
            position=inside,
            dropout=self.dropout,
        )
        ffn = PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation)
        return StackConfig(self.n_layers, (attention,), ffn, self.norm, dropout=self.dropout)

    def network(self) -> Decoder:
        style = HeadStyle(self.d_model, self.vocab_size, "last", bias=False, dropout=self.dropout)
        return decoder(self.to_embed(), self.to_stack(), self.head, style)


PREFIX = "transformer."
HEADS = {
    "lm": "GPT2LMHeadModel",
    "none": "GPT2Model",
    "classification": "GPT2ForSequenceClassification",
    "tagging": "GPT2ForTokenClassification",
    "span": "GPT2ForQuestionAnswering",
}
HEAD_KEYS = {
    "lm": {"lm_head.weight": "head.proj.weight"},
    "classification": {"score.weight": "head.proj.weight"},
    "tagging": linear_keys("classifier", "head.proj"),
    "span": linear_keys("qa_outputs", "head.proj"),
}
BLOCK = "stack.blocks.{i}."


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    table: dict[str, Any] = {
        "transformer.wte.weight": "embed.tokens.weight",
        "transformer.wpe.weight": "embed.position.table.weight",
        "transformer.h.{i}.ln_1.weight": BLOCK + "self_residual.norm.weight",
        "transformer.h.{i}.ln_1.bias": BLOCK + "self_residual.norm.bias",
        "transformer.h.{i}.attn.c_attn.weight": Fused(
            BLOCK + "self_attn.{}_proj.weight", transposed=True
        ),
        "transformer.h.{i}.attn.c_attn.bias": Fused(BLOCK + "self_attn.{}_proj.bias"),
        "transformer.h.{i}.attn.c_proj.weight": Transposed(BLOCK + "self_attn.out_proj.weight"),
        "transformer.h.{i}.attn.c_proj.bias": BLOCK + "self_attn.out_proj.bias",
        "transformer.h.{i}.attn.bias": Dropped("the causal mask, which is a formula here"),
        "transformer.h.{i}.attn.masked_bias": Dropped("a constant of the causal mask"),
        "transformer.h.{i}.ln_2.weight": BLOCK + "ffn_residual.norm.weight",
        "transformer.h.{i}.ln_2.bias": BLOCK + "ffn_residual.norm.bias",
        "transformer.h.{i}.mlp.c_fc.weight": Transposed(BLOCK + "ffn.in_proj.weight"),
        "transformer.h.{i}.mlp.c_fc.bias": BLOCK + "ffn.in_proj.bias",
        "transformer.h.{i}.mlp.c_proj.weight": Transposed(BLOCK + "ffn.out_proj.weight"),
        "transformer.h.{i}.mlp.c_proj.bias": BLOCK + "ffn.out_proj.bias",
        "transformer.ln_f.weight": "stack.norm.weight",
        "transformer.ln_f.bias": "stack.norm.bias",
    }
    return table | head_keys(config.head, HEAD_KEYS)


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    hf_only(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    rate = hf_value(hf, "resid_pdrop", default=0.1)
    return Config(
        vocab_size=hf["vocab_size"],
        d_model=hf["n_embd"],
        n_layers=hf["n_layer"],
        n_heads=hf["n_head"],
        d_ff=hf_value(hf, "n_inner"),
        max_len=hf["n_positions"],
        dropout=rate,
        norm=LayerNormConfig(hf_value(hf, "layer_norm_epsilon", default=1e-5)),
        activation=hf_activation(hf_value(hf, "activation_function", default="gelu_new")),
        head=head_of(hf, HEADS, "lm", hf_value(hf, "tie_word_embeddings", default=True)),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    norm = config.norm
    if (
        config.position != LearnedConfig()
        or not isinstance(norm, LayerNormConfig)
        or not norm.bias
        or config.n_kv_heads not in (None, config.n_heads)
    ):
        raise ClearheadError(
            "Hugging Face's GPT-2 has learned positions, LayerNorm and one key/value head a query "
            f"head; this model differs. {OUR_LAYOUT}"
        )
    return write_head(config.head, HEADS, "GPT-2") | {
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "n_positions": config.max_len,
        "n_ctx": config.max_len,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": norm.eps,
        "activation_function": to_hf_activation(config.activation),
        "tie_word_embeddings": config.head is None or config.head.tied,
    }
