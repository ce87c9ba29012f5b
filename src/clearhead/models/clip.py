"""CLIP: two towers, one for text and one for images, whose vectors meet in one space (Radford et
al. 2021).

similarity = exp(temperature) * text_vector . image_vector, both of length 1. Quirks: the text tower
is causal and its last token speaks for the text; the image tower has a norm before its first block,
its projection of patches no bias.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.mask import All, Causal
from clearhead.attention.positions import Positions
from clearhead.attention.spec import AttentionConfig, Geometry
from clearhead.config import Spec
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, PlainFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.patch import PatchEmbedding
from clearhead.layers.position import Learned, LearnedConfig
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Encoder, Net
from clearhead.models.family import FamilyConfig, Shape
from clearhead.models.heads import PoolingHead
from clearhead.models.hf import hf_activation, hf_value, linear_keys, read_head, to_hf_activation
from clearhead.models.keys import Dropped, Table


class TwoTowers(Net):
    """A text encoder, an image encoder, and the space both project into."""

    def __init__(
        self, text: Encoder, image: Encoder, text_width: int, image_width: int, width: int
    ) -> None:
        super().__init__()
        self.text, self.image = text, image
        self.text_proj = nn.Linear(text_width, width, bias=False)
        self.image_proj = nn.Linear(image_width, width, bias=False)
        self.temperature = nn.Parameter(torch.tensor(2.6592))  # ln(1 / 0.07)

    def embed_text(
        self, ids: Int[Tensor, "b t"], at: Positions | None = None
    ) -> Float[Tensor, "b w"]:
        """Vectors of length 1."""
        return F.normalize(self.text_proj(self.text(ids, at)), dim=-1)

    def embed_image(self, pixels: Float[Tensor, "b c height width"]) -> Float[Tensor, "b w"]:
        """Vectors of length 1."""
        return F.normalize(self.image_proj(self.image(pixels)), dim=-1)

    def forward(
        self,
        ids: Int[Tensor, "texts t"],
        pixels: Float[Tensor, "images c height width"],
        at: Positions | None = None,
    ) -> Float[Tensor, "texts images"]:
        """How well every text fits every image."""
        similarity = self.embed_text(ids, at) @ self.embed_image(pixels).T
        return similarity * self.temperature.exp()


@dataclass(frozen=True)
class Tower(Spec, kind="tower"):
    """One of the two."""

    d_model: int = 512
    """Width of the residual stream."""
    n_layers: int = 12
    """How many blocks."""
    n_heads: int = 8
    """Attention heads."""
    d_ff: int = 2048
    """Width inside the feed-forward."""
    activation: Activation = "quick_gelu"
    """The bend of the feed-forward."""
    eps: float = 1e-5
    """Of the norms."""

    def to_stack(self, causal: bool) -> StackConfig:
        """The blocks."""
        geometry = Geometry(self.d_model, self.n_heads)
        attention = AttentionConfig(geometry, mask=Causal() if causal else All())
        ffn = PlainFFNConfig(self.d_ff, self.activation)
        return StackConfig(self.n_layers, (attention,), ffn, LayerNormConfig(self.eps))


@dataclass(frozen=True)
class Config(FamilyConfig, kind="clip"):
    """A CLIP; the defaults are the published ViT-B/32 one."""

    shape: ClassVar[Shape] = "two-tower"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 49408
    """How many tokens there are."""
    max_len: int = 77
    """How many positions the text tower has."""
    text: Tower = Tower()
    """The text tower."""
    image: Tower = Tower(d_model=768, n_heads=12, d_ff=3072)
    """The image tower."""
    image_size: int = 224
    """Pixels of a side."""
    patch_size: int = 32
    """Pixels of a patch's side."""
    channels: int = 3
    """Colours."""
    width: int = 512
    """Width of the common space."""

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        """Blocks of the higher tower."""
        return max(self.text.n_layers, self.image.n_layers)

    def network(self) -> TwoTowers:
        t, i = self.text, self.image
        words = EmbedConfig(self.vocab_size, t.d_model, LearnedConfig(self.max_len)).build()
        text = Encoder(words, build_stack(t.to_stack(True)), PoolingHead(t.d_model, "last"))
        patches = PatchEmbedding(
            i.d_model,
            self.image_size,
            self.patch_size,
            channels=self.channels,
            bias=False,
            position=Learned(i.d_model, (self.image_size // self.patch_size) ** 2 + 1),
            norm=LayerNormConfig(i.eps).build(i.d_model),
        )
        image = Encoder(patches, build_stack(i.to_stack(False)), PoolingHead(i.d_model, "first"))
        return TwoTowers(text, image, t.d_model, i.d_model, self.width)


PREFIX = ""
HEADS = {"none": "CLIPModel"}


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    known = Dropped("0, 1, 2, ..., which are computed here")
    table: dict[str, Any] = {
        "logit_scale": "temperature",
        "text_projection.weight": "text_proj.weight",
        "visual_projection.weight": "image_proj.weight",
        "text_model.embeddings.token_embedding.weight": "text.embed.tokens.weight",
        "text_model.embeddings.position_embedding.weight": "text.embed.position.table.weight",
        "text_model.embeddings.position_ids": known,
        "vision_model.embeddings.class_embedding": "image.embed.cls",
        "vision_model.embeddings.patch_embedding.weight": "image.embed.proj.weight",
        "vision_model.embeddings.position_embedding.weight": "image.embed.position.table.weight",
        "vision_model.embeddings.position_ids": known,
    }
    names = {
        "text_model.final_layer_norm": "text.stack.norm",
        "vision_model.pre_layrnorm": "image.embed.norm",  # their spelling
        "vision_model.post_layernorm": "image.stack.norm",
    }
    for theirs, ours in {"text_model": "text", "vision_model": "image"}.items():
        layer, block = theirs + ".encoder.layers.{i}.", ours + ".stack.blocks.{i}."
        names |= {f"{layer}self_attn.{x}_proj": f"{block}self_attn.{x}_proj" for x in "qkv"}
        names |= {
            layer + "self_attn.out_proj": block + "self_attn.out_proj",
            layer + "layer_norm1": block + "self_residual.norm",
            layer + "layer_norm2": block + "ffn_residual.norm",
            layer + "mlp.fc1": block + "ffn.in_proj",
            layer + "mlp.fc2": block + "ffn.out_proj",
        }
    for theirs, ours in names.items():
        table |= linear_keys(theirs, ours)
    return table


def _tower(hf: Mapping[str, Any]) -> Tower:
    return Tower(
        hf["hidden_size"],
        hf["num_hidden_layers"],
        hf["num_attention_heads"],
        hf["intermediate_size"],
        hf_activation(hf_value(hf, "hidden_act", default="quick_gelu")),
        hf_value(hf, "layer_norm_eps", default=1e-5),
    )


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words; `names` are the keys of the file."""
    read_head(hf, HEADS, "none")
    text, image = hf["text_config"], hf["vision_config"]
    return Config(
        vocab_size=text["vocab_size"],
        max_len=text["max_position_embeddings"],
        text=_tower(text),
        image=_tower(image),
        image_size=image["image_size"],
        patch_size=image["patch_size"],
        channels=hf_value(image, "num_channels", default=3),
        width=hf["projection_dim"],
    )


def _tower_to_hf(tower: Tower) -> dict[str, Any]:
    return {
        "hidden_size": tower.d_model,
        "num_hidden_layers": tower.n_layers,
        "num_attention_heads": tower.n_heads,
        "intermediate_size": tower.d_ff,
        "hidden_act": to_hf_activation(tower.activation),
        "layer_norm_eps": tower.eps,
    }


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as their config."""
    # Theirs finds a text's last token by its id: the end token is the highest of the vocabulary.
    words = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_len}
    words |= {"eos_token_id": config.vocab_size - 1, "bos_token_id": config.vocab_size - 2}
    pixels = {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
    }
    common = {"projection_dim": config.width}
    return common | {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "text_config": _tower_to_hf(config.text)
        | words
        | common
        | {"model_type": "clip_text_model"},
        "vision_config": _tower_to_hf(config.image)
        | pixels
        | common
        | {"model_type": "clip_vision_model"},
    }
