"""BERT: an encoder with post-norm, learned positions and segments (Devlin et al. 2019).

Quirks: a norm on the
embeddings, a pooler, a masked-LM head with a transform of its own; GELU is the exact one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.attention.spec import AttentionConfig, AttentionPosition, Geometry
from clearhead.errors import ClearheadError
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.position import AddedPosition, LearnedConfig
from clearhead.layers.stack import StackConfig
from clearhead.models.base import Encoder
from clearhead.models.family import FamilyConfig, Shape, encoder, split_position
from clearhead.models.heads import HeadConfig, HeadStyle, MaskedLMConfig
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
class Config(FamilyConfig, kind="bert"):
    """A BERT; the defaults are the published base model."""

    shape: ClassVar[Shape] = "encoder"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 30522
    """How many tokens there are."""
    d_model: int = 768
    """Width of the residual stream."""
    n_layers: int = 12
    """How many blocks."""
    n_heads: int = 12
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    max_len: int = 512
    """How many positions the model has."""
    dropout: float = 0.1
    """On embeddings, sublayers and attention weights."""
    token_types: int = 2
    """How many segments; 0: none (DistilBERT)."""
    position: AddedPosition | AttentionPosition | None = LearnedConfig()
    """How positions enter."""
    norm: LayerNormConfig = LayerNormConfig(1e-12)
    """The normalisation."""
    activation: Activation = "gelu"
    """The bend of the feed-forward."""
    head: HeadConfig | None = MaskedLMConfig()
    """What the last states are turned into."""

    def to_embed(self) -> EmbedConfig:
        """Tokens, segments, positions, normalised."""
        added, _ = split_position(self.position, self.max_len)
        return EmbedConfig(
            self.vocab_size,
            self.d_model,
            added,
            token_types=self.token_types,
            norm=self.norm,
            dropout=self.dropout,
        )

    def to_stack(self) -> StackConfig:
        """The blocks."""
        _, inside = split_position(self.position, self.max_len)
        geometry = Geometry(self.d_model, self.n_heads)
        return StackConfig(
            self.n_layers,
            (AttentionConfig(geometry, position=inside, dropout=self.dropout),),
            PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation),
            self.norm,
            placement="post",
            final_norm=False,
            dropout=self.dropout,
        )

    def network(self) -> Encoder:
        style = HeadStyle(
            self.d_model,
            self.vocab_size,
            dense="tanh",
            activation=self.activation,
            norm=self.norm,
            dropout=self.dropout,
        )
        return encoder(self.to_embed(), self.to_stack(), self.head, style)


PREFIX = "bert."
BLOCK = "stack.blocks.{i}."
HEADS = {
    "masked_lm": "BertForMaskedLM",
    "none": "BertModel",
    "pooling": "BertModel",
    "classification": "BertForSequenceClassification",
    "tagging": "BertForTokenClassification",
    "span": "BertForQuestionAnswering",
}
OPENED_AS = {"BertForPreTraining": "BertForMaskedLM"}
UNUSED = Dropped("of a head that this model does not have")


def body_keys(prefix: str) -> dict[str, Any]:
    """Their names for the parameters of a body, the same in BERT and RoBERTa."""
    layer, embeddings = prefix + "encoder.layer.{i}.", prefix + "embeddings."
    table: dict[str, Any] = {
        embeddings + "word_embeddings.weight": "embed.tokens.weight",
        embeddings + "position_embeddings.weight": "embed.position.table.weight",
        embeddings + "token_type_embeddings.weight": "embed.types.weight",
        embeddings + "position_ids": Dropped("0, 1, 2, ..., which are computed here"),
    }
    for theirs, ours in {
        layer + "attention.self.query": BLOCK + "self_attn.q_proj",
        layer + "attention.self.key": BLOCK + "self_attn.k_proj",
        layer + "attention.self.value": BLOCK + "self_attn.v_proj",
        layer + "attention.output.dense": BLOCK + "self_attn.out_proj",
        layer + "intermediate.dense": BLOCK + "ffn.in_proj",
        layer + "output.dense": BLOCK + "ffn.out_proj",
    }.items():
        table |= linear_keys(theirs, ours)
    for theirs, ours in {
        layer + "attention.output.LayerNorm": BLOCK + "self_residual.norm",
        layer + "output.LayerNorm": BLOCK + "ffn_residual.norm",
        embeddings + "LayerNorm": "embed.norm",
    }.items():
        table |= norm_keys(theirs, ours)
    return table


def norm_keys(theirs: str, ours: str) -> dict[str, Any]:
    """A norm's gain and bias, under today's names (which are written) and the first ones."""
    old = {f"{theirs}.gamma": f"{ours}.weight", f"{theirs}.beta": f"{ours}.bias"}
    return linear_keys(theirs, ours) | old


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    kind = "none" if config.head is None else config.head.kind
    mlm: dict[str, Any] = {
        "cls.predictions.decoder.weight": "head.proj.weight",
        "cls.predictions.bias": "head.proj.bias",  # the name that files have; the first is written
        "cls.predictions.decoder.bias": "head.proj.bias",
        **linear_keys("cls.predictions.transform.dense", "head.dense"),
        **norm_keys("cls.predictions.transform.LayerNorm", "head.norm"),
    }
    pooler: dict[str, Any] = linear_keys("bert.pooler.dense", "head.pooling.dense")
    if kind == "pooling":
        pooler = linear_keys("bert.pooler.dense", "head.dense")
    if kind not in ("pooling", "classification") or (kind == "pooling" and not config.head.dense):  # type: ignore[union-attr]
        pooler = dict.fromkeys(pooler, UNUSED)
    if kind != "masked_lm":
        mlm = dict.fromkeys(mlm, UNUSED)
    label = "qa_outputs" if kind == "span" else "classifier"
    labels = (
        linear_keys(label, "head.proj") if kind in ("classification", "tagging", "span") else {}
    )
    next_sentence = dict.fromkeys(linear_keys("cls.seq_relationship", ""), UNUSED)
    return body_keys("bert.") | mlm | pooler | labels | next_sentence


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    return Config(**body_from_hf(hf, HEADS))


def body_from_hf(hf: Mapping[str, Any], heads: Mapping[str, str]) -> dict[str, Any]:
    """The settings that BERT and RoBERTa share."""
    hf_only(hf, is_decoder=False, position_embedding_type="absolute")
    return {
        "vocab_size": hf["vocab_size"],
        "d_model": hf["hidden_size"],
        "n_layers": hf["num_hidden_layers"],
        "n_heads": hf["num_attention_heads"],
        "d_ff": hf["intermediate_size"],
        "max_len": hf["max_position_embeddings"],
        "dropout": hf_value(hf, "hidden_dropout_prob", default=0.1),
        "token_types": hf_value(hf, "type_vocab_size", default=2),
        "norm": LayerNormConfig(hf_value(hf, "layer_norm_eps", default=1e-12)),
        "activation": hf_activation(hf_value(hf, "hidden_act", default="gelu")),
        "head": head_of(hf, heads, "none", hf_value(hf, "tie_word_embeddings", default=True)),
    }


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    if config.position != LearnedConfig() or config.token_types == 0:
        raise ClearheadError(
            f"Hugging Face's BERT has learned positions and segments; this model differs. "
            f"{OUR_LAYOUT}"
        )
    return body_to_hf(config, HEADS, "BERT") | {"model_type": "bert"}


def body_to_hf(config: Config, heads: Mapping[str, str], name: str) -> dict[str, Any]:
    """The settings that BERT and RoBERTa share, in their words."""
    return write_head(config.head, heads, name) | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "max_position_embeddings": config.max_len,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm.eps,
        "hidden_act": to_hf_activation(config.activation),
        "tie_word_embeddings": config.head is None
        or config.head.kind != "masked_lm"
        or config.head.tied,
    }
