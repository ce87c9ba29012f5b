"""ViT: an encoder whose tokens are patches of an image (Dosovitskiy et al. 2021).

Quirks: a CLS token before the patches speaks for the image; positions are one learned table over
both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.attention.spec import AttentionConfig, Biases, Geometry
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.patch import PatchEmbedding
from clearhead.layers.position import Learned
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Encoder
from clearhead.models.family import FamilyConfig, Shape
from clearhead.models.heads import ClassificationConfig, HeadConfig, HeadStyle
from clearhead.models.hf import (
    head_of,
    hf_activation,
    hf_value,
    linear_keys,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, Stacked, Table


@dataclass(frozen=True)
class Config(FamilyConfig, kind="vit"):
    """A ViT; the defaults are the published base model with patches of 16."""

    shape: ClassVar[Shape] = "encoder"
    init: ClassVar[Init] = "gpt2"

    image_size: int = 224
    """Pixels of a side."""
    patch_size: int = 16
    """Pixels of a patch's side."""
    channels: int = 3
    """Colours."""
    d_model: int = 768
    """Width of the residual stream."""
    n_layers: int = 12
    """How many blocks."""
    n_heads: int = 12
    """Attention heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 4 d_model."""
    dropout: float = 0.0
    """On embeddings, sublayers and attention weights."""
    qkv_bias: bool = True
    """Whether queries, keys and values have bias vectors."""
    norm: LayerNormConfig = LayerNormConfig(1e-12)
    """The normalisation."""
    activation: Activation = "gelu"
    """The bend of the feed-forward."""
    head: HeadConfig | None = ClassificationConfig(1000)
    """What the last states are turned into."""

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """There are no tokens to choose from."""
        return 0

    @property
    def max_len(self) -> int:  # type: ignore[override]
        """Patches and the CLS token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    def to_stack(self) -> StackConfig:
        """The blocks."""
        biases = Biases(self.qkv_bias, self.qkv_bias, self.qkv_bias)
        geometry = Geometry(self.d_model, self.n_heads)
        return StackConfig(
            self.n_layers,
            (AttentionConfig(geometry, biases=biases, dropout=self.dropout),),
            PlainFFNConfig(self.d_ff or 4 * self.d_model, self.activation),
            self.norm,
            dropout=self.dropout,
        )

    def network(self) -> Encoder:
        embed = PatchEmbedding(
            self.d_model,
            self.image_size,
            self.patch_size,
            channels=self.channels,
            position=Learned(self.d_model, self.max_len),
            dropout=self.dropout,
        )
        style = HeadStyle(self.d_model, 0, "first")
        head = self.head.build(style) if self.head else None
        return Encoder(embed, build_stack(self.to_stack()), head)


PREFIX = "vit."
HEADS = {"classification": "ViTForImageClassification", "none": "ViTModel", "pooling": "ViTModel"}


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    layer, block = "vit.encoder.layer.{i}.", "stack.blocks.{i}."
    table: dict[str, Any] = {
        "vit.embeddings.cls_token": Stacked("embed.cls", 2),
        "vit.embeddings.position_embeddings": Stacked("embed.position.table.weight", 1),
        "vit.embeddings.mask_token": Dropped(
            "for masked pretraining, which this model does not do"
        ),
    }
    for theirs, ours in {
        "vit.embeddings.patch_embeddings.projection": "embed.proj",
        layer + "attention.attention.query": block + "self_attn.q_proj",
        layer + "attention.attention.key": block + "self_attn.k_proj",
        layer + "attention.attention.value": block + "self_attn.v_proj",
        layer + "attention.output.dense": block + "self_attn.out_proj",
        layer + "layernorm_before": block + "self_residual.norm",
        layer + "layernorm_after": block + "ffn_residual.norm",
        layer + "intermediate.dense": block + "ffn.in_proj",
        layer + "output.dense": block + "ffn.out_proj",
        "vit.layernorm": "stack.norm",
    }.items():
        table |= linear_keys(theirs, ours)
    kind = "none" if config.head is None else config.head.kind
    pooler: dict[str, Any] = linear_keys("vit.pooler.dense", "head.dense")
    if kind != "pooling" or not config.head.dense:  # type: ignore[union-attr]
        pooler = dict.fromkeys(pooler, Dropped("of a head that this model does not have"))
    labels = linear_keys("classifier", "head.proj") if kind == "classification" else {}
    return table | pooler | labels


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    return Config(
        image_size=hf["image_size"],
        patch_size=hf["patch_size"],
        channels=hf_value(hf, "num_channels", default=3),
        d_model=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        d_ff=hf["intermediate_size"],
        dropout=hf_value(hf, "hidden_dropout_prob", default=0.0),
        qkv_bias=hf_value(hf, "qkv_bias", default=True),
        norm=LayerNormConfig(hf_value(hf, "layer_norm_eps", default=1e-12)),
        activation=hf_activation(hf_value(hf, "hidden_act", default="gelu")),
        head=head_of(hf, HEADS, "none", False),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    return write_head(config.head, HEADS, "ViT") | {
        "model_type": "vit",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "qkv_bias": config.qkv_bias,
        "layer_norm_eps": config.norm.eps,
        "hidden_act": to_hf_activation(config.activation),
    }
