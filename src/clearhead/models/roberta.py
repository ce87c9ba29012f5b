"""RoBERTa: BERT with another head layout and a position table that starts two rows in (Liu et al.
2019).

Quirks: rows 0 and 1 of the table belong to padding; the classifier has its own dense layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.attention.spec import AttentionPosition
from clearhead.errors import ClearheadError
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.position import AddedPosition, LearnedConfig
from clearhead.models import bert
from clearhead.models.hf import OUR_LAYOUT, hf_value, linear_keys
from clearhead.models.keys import Table

OFFSET = 2


@dataclass(frozen=True)
class Config(bert.Config, kind="roberta"):
    """A RoBERTa; the defaults are the published base model."""

    vocab_size: int = 50265
    """How many tokens there are."""
    token_types: int = 1
    """How many segments: one, which is added everywhere."""
    position: AddedPosition | AttentionPosition | None = LearnedConfig(offset=OFFSET)
    """How positions enter."""
    norm: LayerNormConfig = LayerNormConfig(1e-5)
    """The normalisation."""


PREFIX = "roberta."
FIXED_IDS = ("pad_token_id",)
HEADS = {
    "masked_lm": "RobertaForMaskedLM",
    "none": "RobertaModel",
    "pooling": "RobertaModel",
    "classification": "RobertaForSequenceClassification",
    "tagging": "RobertaForTokenClassification",
    "span": "RobertaForQuestionAnswering",
}


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    kind = "none" if config.head is None else config.head.kind
    mlm: dict[str, Any] = {
        "lm_head.decoder.weight": "head.proj.weight",
        "lm_head.bias": "head.proj.bias",  # the name that files have; the first is written
        "lm_head.decoder.bias": "head.proj.bias",
        **linear_keys("lm_head.dense", "head.dense"),
        **linear_keys("lm_head.layer_norm", "head.norm"),
    }
    pooler: dict[str, Any] = linear_keys("roberta.pooler.dense", "head.dense")
    if kind != "pooling" or not config.head.dense:  # type: ignore[union-attr]
        pooler = dict.fromkeys(pooler, bert.UNUSED)
    if kind != "masked_lm":
        mlm = dict.fromkeys(mlm, bert.UNUSED)
    labels: dict[str, Any] = {
        "classification": linear_keys("classifier.dense", "head.pooling.dense")
        | linear_keys("classifier.out_proj", "head.proj"),
        "tagging": linear_keys("classifier", "head.proj"),
        "span": linear_keys("qa_outputs", "head.proj"),
    }
    return bert.body_keys("roberta.") | mlm | pooler | labels.get(kind, {})


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    body = bert.body_from_hf(hf, HEADS)
    offset = hf_value(hf, "pad_token_id", default=1) + 1  # positions stand behind that of padding
    return Config(
        **body | {"max_len": body["max_len"] - offset, "position": LearnedConfig(offset=offset)}
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    offset = getattr(config.position, "offset", 0)
    if config.position != LearnedConfig(offset=offset) or offset < 1 or config.token_types == 0:
        raise ClearheadError(
            f"Hugging Face's RoBERTa has learned positions and segments; this model differs. "
            f"{OUR_LAYOUT}"
        )
    return bert.body_to_hf(config, HEADS, "RoBERTa") | {
        "model_type": "roberta",
        "max_position_embeddings": config.max_len + offset,
        "pad_token_id": offset - 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
