"""DistilBERT: half of BERT's layers, no segments, no pooler (Sanh et al. 2019).

Quirks: other names throughout; the classifier's dense layer bends with ReLU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.layers.position import LearnedConfig
from clearhead.models import bert
from clearhead.models.base import Encoder
from clearhead.models.family import encoder
from clearhead.models.heads import HeadStyle, PoolingConfig
from clearhead.models.hf import (
    OUR_LAYOUT,
    head_of,
    hf_activation,
    hf_only,
    hf_value,
    linear_keys,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, Table


@dataclass(frozen=True)
class Config(bert.Config, kind="distilbert"):
    """A DistilBERT; the defaults are the published base model."""

    n_layers: int = 6
    """How many blocks."""
    token_types: int = 0
    """How many segments: none."""

    def network(self) -> Encoder:
        style = HeadStyle(
            self.d_model,
            self.vocab_size,
            dense="relu",
            activation=self.activation,
            norm=self.norm,
            dropout=self.dropout,
        )
        return encoder(self.to_embed(), self.to_stack(), self.head, style)


PREFIX = "distilbert."
HEADS = {
    "masked_lm": "DistilBertForMaskedLM",
    "none": "DistilBertModel",
    "pooling": "DistilBertModel",  # of sentence-transformers: it has no pooler of its own
    "classification": "DistilBertForSequenceClassification",
    "tagging": "DistilBertForTokenClassification",
    "span": "DistilBertForQuestionAnswering",
}


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    kind = "none" if config.head is None else config.head.kind
    layer, block = "distilbert.transformer.layer.{i}.", "stack.blocks.{i}."
    table: dict[str, Any] = {
        "distilbert.embeddings.word_embeddings.weight": "embed.tokens.weight",
        "distilbert.embeddings.position_embeddings.weight": "embed.position.table.weight",
        "distilbert.embeddings.position_ids": Dropped("0, 1, 2, ..., which are computed here"),
    }
    for theirs, ours in {
        "distilbert.embeddings.LayerNorm": "embed.norm",
        layer + "attention.q_lin": block + "self_attn.q_proj",
        layer + "attention.k_lin": block + "self_attn.k_proj",
        layer + "attention.v_lin": block + "self_attn.v_proj",
        layer + "attention.out_lin": block + "self_attn.out_proj",
        layer + "sa_layer_norm": block + "self_residual.norm",
        layer + "ffn.lin1": block + "ffn.in_proj",
        layer + "ffn.lin2": block + "ffn.out_proj",
        layer + "output_layer_norm": block + "ffn_residual.norm",
    }.items():
        table |= linear_keys(theirs, ours)
    mlm: dict[str, Any] = (
        linear_keys("vocab_projector", "head.proj")
        | linear_keys("vocab_transform", "head.dense")
        | linear_keys("vocab_layer_norm", "head.norm")
    )
    if kind != "masked_lm":
        mlm = dict.fromkeys(mlm, bert.UNUSED)
    labels: dict[str, Any] = {
        "classification": linear_keys("pre_classifier", "head.pooling.dense")
        | linear_keys("classifier", "head.proj"),
        "tagging": linear_keys("classifier", "head.proj"),
        "span": linear_keys("qa_outputs", "head.proj"),
    }
    return table | mlm | labels.get(kind, {})


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    hf_only(
        hf, sinusoidal_pos_embds=False
    )  # such files have a table as well, but the setting is rare
    return Config(
        vocab_size=hf["vocab_size"],
        d_model=hf["dim"],
        n_layers=hf["n_layers"],
        n_heads=hf["n_heads"],
        d_ff=hf["hidden_dim"],
        max_len=hf["max_position_embeddings"],
        dropout=hf_value(hf, "dropout", default=0.1),
        activation=hf_activation(hf_value(hf, "activation", default="gelu")),
        head=head_of(hf, HEADS, "none", hf_value(hf, "tie_word_embeddings", default=True)),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    pooler = isinstance(config.head, PoolingConfig) and config.head.dense
    plain = config.position == LearnedConfig() and not config.token_types
    if not plain or config.norm.eps != 1e-12 or pooler:
        raise ClearheadError(
            "Hugging Face's DistilBERT has learned positions, no segments, no pooler and an "
            f"epsilon of 1e-12; this model differs. {OUR_LAYOUT}"
        )
    return write_head(config.head, HEADS, "DistilBERT") | {
        "model_type": "distilbert",
        "vocab_size": config.vocab_size,
        "dim": config.d_model,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "hidden_dim": config.d_ff or 4 * config.d_model,
        "max_position_embeddings": config.max_len,
        "dropout": config.dropout,
        "attention_dropout": config.dropout,
        "activation": to_hf_activation(config.activation),
        "tie_word_embeddings": config.head is None
        or config.head.kind != "masked_lm"
        or config.head.tied,
    }
