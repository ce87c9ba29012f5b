"""Llama and its kin: a decoder with RMSNorm, rotary positions, grouped heads and a gated
feed-forward.

Touvron et al. 2023; Mistral adds a window, Qwen2 biases on q, k, v, Qwen3 a norm on queries and
keys: each a choice below.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.attention.mask import Causal, Mask, Window
from clearhead.attention.rotary import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from clearhead.attention.spec import (
    AttentionConfig,
    AttentionPosition,
    Biases,
    Geometry,
    RopeConfig,
)
from clearhead.config import Spec
from clearhead.errors import ClearheadError, require
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import Activation, GatedFFNConfig
from clearhead.layers.init import Init
from clearhead.layers.norm import RMSNormConfig
from clearhead.layers.position import AddedPosition
from clearhead.layers.stack import StackConfig
from clearhead.models.base import Decoder
from clearhead.models.family import FamilyConfig, Shape, decoder, split_position
from clearhead.models.heads import HeadConfig, HeadStyle, LMConfig
from clearhead.models.hf import (
    OUR_LAYOUT,
    head_keys,
    head_of,
    hf_activation,
    hf_value,
    linear_keys,
    to_hf_activation,
    write_head,
)
from clearhead.models.keys import Dropped, Table


@dataclass(frozen=True)
class Variant(Spec, kind="variant"):
    """What tells the members of this family apart."""

    head_dim: int | None = None
    """Width of a head; None: d_model / n_heads."""
    window: int | None = None
    """Every token sees this many positions back, itself included; None: all."""
    qkv_bias: bool = False
    """Bias vectors on queries, keys and values (Qwen2)."""
    out_bias: bool = False
    """A bias vector on the output of attention too (Llama with attention_bias)."""
    ffn_bias: bool = False
    """Bias vectors in the feed-forward (Llama with mlp_bias)."""
    qk_norm: bool = False
    """A norm on each head's queries and keys (Qwen3)."""
    eps: float = 1e-5
    """Of the norms."""
    activation: Activation = "silu"
    """Of the gate."""


@dataclass(frozen=True)
class Config(FamilyConfig, kind="llama"):
    """A Llama; the defaults are those of Llama 2 7B."""

    shape: ClassVar[Shape] = "decoder"
    init: ClassVar[Init] = "gpt2"

    vocab_size: int = 32000
    """How many tokens there are."""
    d_model: int = 4096
    """Width of the residual stream."""
    n_layers: int = 32
    """How many blocks."""
    n_heads: int = 32
    """Query heads."""
    n_kv_heads: int | None = None
    """Key/value heads; None: n_heads."""
    d_ff: int | None = None
    """Width inside the feed-forward; None: 8/3 d_model, rounded up to a multiple of 256 (of 8 if
    narrow).
    """
    max_len: int = 4096
    """How many positions the model was made for."""
    dropout: float = 0.0
    """On embeddings, sublayers and, unless they have their own rate, attention weights."""
    attention_dropout: float | None = None
    """On attention weights; None: as `dropout`. With 0 the fused kernel runs, which is faster."""
    position: AddedPosition | AttentionPosition | None = RopeConfig()
    """How positions enter."""
    variant: Variant = Variant()
    """What tells the members of this family apart."""
    head: HeadConfig | None = LMConfig(tied=False)
    """What the last states are turned into."""

    @property
    def pattern_dropout(self) -> float:
        """The rate on attention weights."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    def to_embed(self) -> EmbedConfig:
        """Tokens, without positions unless one is added."""
        added, _ = split_position(self.position, self.max_len)
        return EmbedConfig(self.vocab_size, self.d_model, added, dropout=self.dropout)

    def to_stack(self) -> StackConfig:
        """The blocks."""
        v = self.variant
        _, inside = split_position(self.position, self.max_len)
        mask: Mask = Causal() if v.window is None else Causal() & Window(v.window)
        attention = AttentionConfig(
            Geometry(self.d_model, self.n_heads, self.n_kv_heads, v.head_dim),
            mask=mask,
            position=inside,
            biases=Biases(v.qkv_bias, v.qkv_bias, v.qkv_bias, out=v.out_bias),
            qk_norm=v.eps if v.qk_norm else None,
            dropout=self.pattern_dropout,
        )
        ffn = GatedFFNConfig(self.d_ff or _default_ff(self.d_model), v.activation, v.ffn_bias)
        return StackConfig(
            self.n_layers, (attention,), ffn, RMSNormConfig(v.eps), dropout=self.dropout
        )

    def network(self) -> Decoder:
        style = HeadStyle(self.d_model, self.vocab_size, "last", bias=False, dropout=self.dropout)
        return decoder(self.to_embed(), self.to_stack(), self.head, style)


def _default_ff(d_model: int) -> int:
    step = 256 if d_model >= 512 else 8
    return -(-8 * d_model // 3 // step) * step


PREFIX = "model."
HEAD_KEYS = {
    "lm": {"lm_head.weight": "head.proj.weight"},
    "classification": {"score.weight": "head.proj.weight"},
    "tagging": linear_keys("score", "head.proj"),
}
KIN = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def heads(kin: str) -> dict[str, str]:
    """Their architectures for one of the kin."""
    return {
        "lm": f"{kin}ForCausalLM",
        "none": f"{kin}Model",
        "classification": f"{kin}ForSequenceClassification",
        "tagging": f"{kin}ForTokenClassification",
    }


BLOCK = "stack.blocks.{i}."


def keys(config: Config) -> Table:
    """Their names for our parameters."""
    table: dict[str, Any] = {"model.embed_tokens.weight": "embed.tokens.weight"}
    layer = "model.layers.{i}."
    for theirs, ours in {"q": "q", "k": "k", "v": "v", "o": "out"}.items():
        table |= linear_keys(layer + f"self_attn.{theirs}_proj", BLOCK + f"self_attn.{ours}_proj")
    for theirs, ours in {"gate": "gate", "up": "in", "down": "out"}.items():
        table |= linear_keys(layer + f"mlp.{theirs}_proj", BLOCK + f"ffn.{ours}_proj")
    return (
        table
        | {
            "model.layers.{i}.self_attn.q_norm.weight": BLOCK + "self_attn.q_norm.weight",
            "model.layers.{i}.self_attn.k_norm.weight": BLOCK + "self_attn.k_norm.weight",
            "model.layers.{i}.self_attn.rotary_emb.inv_freq": Dropped(
                "rotary angles, which are computed here"
            ),
            "model.layers.{i}.input_layernorm.weight": BLOCK + "self_residual.norm.weight",
            "model.layers.{i}.post_attention_layernorm.weight": BLOCK + "ffn_residual.norm.weight",
            "model.norm.weight": "stack.norm.weight",
        }
        | head_keys(config.head, HEAD_KEYS)
    )


def from_hf(hf: Mapping[str, Any], names: Collection[str]) -> Config:
    """Their config in our words: Llama, Mistral, Qwen2, Qwen3."""
    kind = hf_value(hf, "model_type", default="llama")
    biased = kind in ("llama", "qwen3") and bool(hf.get("attention_bias"))
    return Config(
        vocab_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf_value(hf, "num_key_value_heads"),
        d_ff=hf["intermediate_size"],
        max_len=hf["max_position_embeddings"],
        position=RopeConfig(_theta(hf), 1.0, rope_scaling(hf)),
        variant=Variant(
            head_dim=_head_dim(hf),
            window=_window(hf),
            qkv_bias=kind == "qwen2" or biased,
            out_bias=biased,
            ffn_bias=kind == "llama" and bool(hf.get("mlp_bias")),
            qk_norm=kind == "qwen3",
            eps=hf_value(hf, "rms_norm_eps", default=1e-6),
            activation=hf_activation(hf_value(hf, "hidden_act", default="silu")),
        ),
        head=head_of(hf, heads(KIN[kind]), "lm", bool(hf.get("tie_word_embeddings"))),
    )


def to_hf(config: Config) -> dict[str, Any]:
    """Our settings as the config of the member of this family that has them."""
    v, rope = config.variant, config.position
    kind = _kin(v)
    if not isinstance(rope, RopeConfig) or rope.fraction != 1.0:
        raise ClearheadError(
            "Hugging Face's Llama family has rotary positions over the whole head; this model "
            f"differs. {OUR_LAYOUT}"
        )
    said = write_head(config.head, heads(KIN[kind]), KIN[kind]) | {
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads or config.n_heads,
        "intermediate_size": config.d_ff or _default_ff(config.d_model),
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": v.eps,
        "hidden_act": to_hf_activation(v.activation),
        "attention_dropout": config.pattern_dropout,
        "rope_parameters": _rope_to_hf(rope),
        "head_dim": v.head_dim or config.d_model // config.n_heads,
        "attention_bias": v.out_bias,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    more: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": v.window},
        "llama": {"mlp_bias": v.ffn_bias},
    }
    return said | more.get(kind, {})


def _kin(v: Variant) -> str:
    """Which of their models has just these choices."""
    require(
        v.qkv_bias or not v.out_bias,
        f"No model of transformers has out_bias without qkv_bias. {OUR_LAYOUT}",
    )
    asked = {
        "llama": v.ffn_bias or (v.out_bias and not v.qk_norm),
        "mistral": v.window is not None,
        "qwen2": v.qkv_bias and not v.out_bias,
        "qwen3": v.qk_norm,
    }
    found = [name for name, wanted in asked.items() if wanted]
    if len(found) > 1:
        raise ClearheadError(
            f"No model of transformers combines these choices: {', '.join(found)}. {OUR_LAYOUT}"
        )
    return found[0] if found else "llama"


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Our rotary settings in their words."""
    said: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    match rope.scaling:
        case None:
            return said
        case LinearScaling(factor):
            return said | {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, trained):
            return said | {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": trained,
            }
        case YarnScaling(factor, trained, fast, slow, attention, truncate):
            more = {} if attention is None else {"attention_factor": attention}
            return (
                said
                | more
                | {
                    "rope_type": "yarn",
                    "factor": factor,
                    "beta_fast": fast,
                    "beta_slow": slow,
                    "truncate": truncate,
                    "original_max_position_embeddings": trained,
                }
            )
    raise ClearheadError(
        f'The rotary scaling "{rope.scaling.kind}" has no name in transformers. {OUR_LAYOUT}'
    )


def _window(hf: Mapping[str, Any]) -> int | None:
    """Their window, if all layers have it; a model that mixes them is refused."""
    window, layers = hf_value(hf, "sliding_window"), hf["num_hidden_layers"]
    if window is None or hf.get("model_type") == "mistral":
        return window
    if not hf.get("use_sliding_window"):
        return None
    whole = min(hf_value(hf, "max_window_layers", default=28), layers)  # the first ones have none
    types = ["full_attention"] * (whole > 0) + ["sliding_attention"] * (layers > whole)
    kinds = set(hf_value(hf, "layer_types", default=types))
    require(
        len(kinds) == 1,
        "In this model some layers have a window and others see everything, which is not supported "
        "here.",
    )
    return window if kinds == {"sliding_attention"} else None


def _head_dim(hf: Mapping[str, Any]) -> int | None:
    """Their width of a head; None where it is the usual one, whether they say so or not."""
    width, heads = hf_value(hf, "head_dim"), hf["num_attention_heads"]
    return None if width is not None and width * heads == hf["hidden_size"] else width


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Their rotary settings, which moved from `rope_scaling` to `rope_parameters`."""
    return hf_value(hf, "rope_parameters", "rope_scaling", default={})


def _theta(hf: Mapping[str, Any]) -> float:
    return float(
        hf_value(hf, "rope_theta", default=hf_value(_rope(hf), "rope_theta", default=10000.0))
    )


def _yarn_factor(rope: Mapping[str, Any]) -> float | None:
    """What cosines and sines are multiplied by: given, or from two magnitudes, or the paper's."""
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if not above or not below or rope.get("attention_factor") is not None:
        return hf_value(rope, "attention_factor")
    grown = 0.1 * math.log(max(rope["factor"], 1.0))
    return (above * grown + 1.0) / (below * grown + 1.0)


def _positive(rope: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number of theirs above 0: the angles are divided by it."""
    value = float(rope[name] if default is None else hf_value(rope, name, default=default))
    require(value > 0, f"Its rotary scaling says {name} = {value}, which must be above 0.")
    return value


def rope_scaling(hf: Mapping[str, Any]) -> RopeScaling | None:
    """Their scaling of the angles in our words."""
    rope = _rope(hf)
    kind = hf_value(rope, "rope_type", "type", default="default")
    trained = hf_value(
        rope, "original_max_position_embeddings", default=hf["max_position_embeddings"]
    )
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_positive(rope, "factor"))
    if kind == "yarn":
        return YarnScaling(
            _positive(rope, "factor"),
            trained,
            _positive(rope, "beta_fast", 32.0),
            _positive(rope, "beta_slow", 1.0),
            _yarn_factor(rope),
            hf_value(rope, "truncate", default=True),
        )
    if kind == "llama3":
        low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
        require(low < high, "Its rotary scaling must have low_freq_factor < high_freq_factor.")
        return Llama3Scaling(_positive(rope, "factor"), low, high, trained)
    raise ClearheadError(
        f'The rotary scaling "{kind}" is not known here. Known: linear, yarn, llama3.'
    )
