"""The architectures of GGUF files in our words: settings to a config and back, and the key tables.

    llama     Llama, Mistral, SmolLM and most of their kin; rotary pairs stand side by side
    qwen2     the same with biases on q, k, v         qwen3     with a norm on queries and keys
    gpt2      GPT-2

A setting that changes what the model computes in a way that our family cannot express is refused,
never ignored. The names are those of gguf-py's constants.py in the llama.cpp repository.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.attention.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RopeScaling,
    YarnScaling,
)
from clearhead.attention.spec import RopeConfig
from clearhead.errors import ClearheadError, require
from clearhead.layers.ffn import GatedFFNConfig, PlainFFNConfig
from clearhead.layers.norm import LayerNormConfig
from clearhead.layers.position import LearnedConfig
from clearhead.models import gpt2, llama
from clearhead.models.family import FamilyConfig
from clearhead.models.heads import HeadConfig, LMConfig
from clearhead.models.hf import linear_keys
from clearhead.models.keys import Dropped, Fused, Rule, Table
from clearhead.weights.gguf_file import GGUF
from clearhead.weights.interleaved import Interleaved

ARCHITECTURES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "gpt2": "gpt2"}

MOST_LAYERS = 1024
MOST_SIZE = 1 << 24  # of any width; the product of two still counts bytes without overflow

BLOCK = "stack.blocks.{i}."
FREQS = "rope_freqs.weight"

# Settings that change what is computed, and the values with which they do not.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window_pattern": (),
    "rope.dimension_sections": (),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
}


class Facts:
    """The settings of a file's architecture, each checked as it is read."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        for key, harmless in _REFUSED.items():
            value = self.get(key)
            require(
                value is None or any(value == other for other in harmless),
                f"{file.path} sets {architecture}.{key} = {_short(value)}, which this library does "
                "not compute: choose a file of a model without it.",
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def size(self, key: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """A whole number from 1 to `most`."""
        value = self.get(key, default)
        require(value is not None, self._lacks(key))
        require(
            type(value) is int and 1 <= value <= most,
            f"{self.file.path} sets {self.architecture}.{key} = {_short(value)}; a whole number "
            f"from 1 to {most} belongs there.",
        )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, as its author wrote it: 1e-5, not the nearest float32."""
        value = self.get(key, default)
        require(value is not None, self._lacks(key))
        require(
            type(value) in (int, float) and math.isfinite(value) and value > 0,
            f"{self.file.path} sets {self.architecture}.{key} = {_short(value)}; a positive number "
            "belongs there.",
        )
        return float(str(np.float32(value)))

    def vocabulary(self) -> int:
        """How many tokens: the rows of the embedding, which the token list may not exceed."""
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        named = len(tokens) if isinstance(tokens, list) else None
        table = self.file.tensors.get("token_embd.weight")
        if table is None:
            return self.size("vocab_size", named)
        rows = table.shape[0]
        require(
            named is None or named <= rows,
            f"{self.file.path} names {named} tokens, but its embedding has {rows} rows: the file "
            "is not consistent. Convert the model again.",
        )
        return rows

    def tied(self) -> LMConfig:
        """The head, which is the embedding where the file has none of its own."""
        return LMConfig(tied="output.weight" not in self.file.tensors)

    def _lacks(self, key: str) -> str:
        return f"{self.file.path} lacks the setting {self.architecture}.{key}: convert it again."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_config(file: GGUF, architecture: str) -> FamilyConfig:
    """A file's settings in our words."""
    facts = Facts(file, architecture)
    return _gpt2_config(facts) if architecture == "gpt2" else _llama_config(facts)


def keys(config: FamilyConfig, architecture: str) -> Table:
    """GGUF's names for our parameters."""
    if isinstance(config, gpt2.Config):
        return _gpt2_keys()
    assert isinstance(config, llama.Config)
    return _llama_keys(config, paired=architecture == "llama")


def describe(config: FamilyConfig) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Our config as an architecture, its settings, and tensors that are settings too (the rotary
    factors); a model that no architecture expresses is refused.
    """
    if isinstance(config, gpt2.Config):
        return "gpt2", _gpt2_facts(config), {}
    require(
        isinstance(config, llama.Config),
        f'GGUF has no architecture for the family "{config.kind}" that this library writes. '
        'Families it writes: llama, gpt2. Export it with to="hf", or save() it.',
    )
    assert isinstance(config, llama.Config)
    return _llama_facts(config)


# Llama and its kin


def _llama_config(facts: Facts) -> llama.Config:
    d_model, n_heads = facts.size("embedding_length"), facts.size("attention.head_count")
    head_dim = facts.size("attention.key_length", max(d_model // n_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        require(
            facts.size(key, head_dim) == head_dim,
            f"{facts.file.path} sets {facts.architecture}.{key} = {facts.get(key)}, but a head is "
            f"{head_dim} wide: heads of which a part is turned or that mix widths are not read.",
        )
    require(
        n_heads * head_dim <= MOST_SIZE,
        f"{facts.file.path} says it has {n_heads} heads of {head_dim}: no model is that wide.",
    )
    theta = facts.number("rope.freq_base", 10000.0)
    window = facts.get("attention.sliding_window")
    return llama.Config(
        vocab_size=facts.vocabulary(),
        d_model=d_model,
        n_layers=facts.size("block_count", most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=facts.size("attention.head_count_kv", n_heads),
        d_ff=facts.size("feed_forward_length"),
        max_len=facts.size("context_length"),
        position=RopeConfig(theta, 1.0, _scaling(facts, theta, head_dim)),
        variant=llama.Variant(
            head_dim=None if n_heads * head_dim == d_model else head_dim,
            window=facts.size("attention.sliding_window") if window else None,
            qkv_bias="blk.0.attn_q.bias" in facts.file.tensors,
            out_bias="blk.0.attn_output.bias" in facts.file.tensors,
            ffn_bias="blk.0.ffn_gate.bias" in facts.file.tensors,
            qk_norm=facts.architecture == "qwen3",
            eps=facts.number("attention.layer_norm_rms_epsilon"),
        ),
        head=facts.tied(),
    )


def _scaling(facts: Facts, theta: float, head_dim: int) -> RopeScaling | None:
    """How the file stretches the rotary angles."""
    kind = facts.get("rope.scaling.type", "linear")  # llama.cpp's default, with factor 1
    factor = facts.get("rope.scaling.factor") or 1.0
    factors = facts.file.tensors.get(FREQS)
    if factors is not None:
        return _llama3(facts, factors.numpy(), theta, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    factor = facts.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor)
    require(
        kind == "yarn",
        f"{facts.file.path} stretches its rotary angles by {_short(kind)}, which is not known "
        "here. Known: linear, yarn, and Llama 3's.",
    )
    trained = facts.size("rope.scaling.original_context_length", facts.size("context_length"))
    fast = facts.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = facts.number("rope.scaling.yarn_beta_slow", 1.0)
    return YarnScaling(factor, trained, fast, slow)


def _llama3(facts: Facts, factors: np.ndarray, theta: float, head_dim: int) -> RopeScaling | None:
    """Llama 3's scaling from what each angle is divided by: all that a file keeps of it."""
    fits = factors.shape == (head_dim // 2,) and head_dim % 2 == 0
    if fits and np.isfinite(factors).all():
        if (factors == 1.0).all():
            return None
        scaling = Llama3Scaling(factor=float(factors.max()))
        if np.allclose(llama3_factors(scaling, theta, head_dim).numpy(), factors, 1e-4, 0):
            return scaling
    raise ClearheadError(
        f"{facts.file.path} divides its rotary angles ({FREQS}) by numbers that are not those of "
        "Llama 3.1 or later (low 1, high 4, trained with 8192), which is all that is read here."
    )


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> Tensor:
    """What each rotary angle is divided by."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / theta ** (steps / head_dim)
    return frequencies / scaling.stretch(frequencies, theta, head_dim)[0]


def _llama_keys(config: llama.Config, paired: bool) -> Table:
    heads = {"q": config.n_heads, "k": config.n_kv_heads or config.n_heads}
    table: dict[str, str | Rule] = {"token_embd.weight": "embed.tokens.weight"}
    for part in "qkv":
        for kind in ("weight", "bias"):
            ours = BLOCK + f"self_attn.{part}_proj.{kind}"
            table["blk.{i}.attn_" + f"{part}.{kind}"] = (
                Interleaved(ours, heads[part]) if paired and part in heads else ours
            )
    parts = {
        "attn_output": "self_attn.out_proj",
        "ffn_gate": "ffn.gate_proj",
        "ffn_up": "ffn.in_proj",
        "ffn_down": "ffn.out_proj",
    }
    for theirs, ours in parts.items():
        table |= linear_keys("blk.{i}." + theirs, BLOCK + ours)
    return table | {
        "blk.{i}.attn_q_norm.weight": BLOCK + "self_attn.q_norm.weight",
        "blk.{i}.attn_k_norm.weight": BLOCK + "self_attn.k_norm.weight",
        "blk.{i}.attn_rot_embd": Dropped("rotary angles, which are computed here"),
        "blk.{i}.attn_norm.weight": BLOCK + "self_residual.norm.weight",
        "blk.{i}.ffn_norm.weight": BLOCK + "ffn_residual.norm.weight",
        "output_norm.weight": "stack.norm.weight",
        "output.weight": "head.proj.weight",
        FREQS: Dropped("what the rotary angles are divided by: part of the settings here"),
    }


def _llama_facts(config: llama.Config) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    v, position = config.variant, config.position
    _refuse(config, "window", v.window, v.window is None)
    _refuse(config, "activation", v.activation, v.activation == "silu")
    _refuse(config, "qkv_bias", "with qk_norm", not (v.qkv_bias and v.qk_norm))
    _refuse_head(config, config.head)
    rotary = isinstance(position, RopeConfig) and position.fraction == 1.0
    _refuse(config, "position", getattr(position, "kind", None), rotary)
    assert isinstance(position, RopeConfig)
    head_dim = v.head_dim or config.d_model // config.n_heads
    # Biases are qwen2's, but llama.cpp wants its heads to fill the stream; llama takes them too.
    more_biases = v.out_bias or v.ffn_bias
    _refuse(config, "out_bias or ffn_bias", "with qk_norm", not (more_biases and v.qk_norm))
    biased = v.qkv_bias and not more_biases and head_dim * config.n_heads == config.d_model
    architecture = "qwen3" if v.qk_norm else "qwen2" if biased else "llama"
    facts = _sizes(config) | {
        "attention.head_count_kv": config.n_kv_heads or config.n_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": v.eps,
        "rope.dimension_count": head_dim,
    }
    more, tensors = _scaling_facts(config, position, architecture, head_dim)
    return architecture, facts | more, tensors


def _scaling_facts(
    config: llama.Config, position: RopeConfig, architecture: str, head_dim: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The rotary angles and how they are stretched."""
    theta, scaling = position.theta, position.scaling
    facts: dict[str, Any] = {"rope.freq_base": theta}
    if scaling is None:
        return facts, {}
    if isinstance(scaling, NTKScaling):  # is a larger theta
        return {"rope.freq_base": theta * scaling.factor ** (head_dim / (head_dim - 2))}, {}
    if isinstance(scaling, LinearScaling):
        return facts | {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}, {}
    if isinstance(scaling, Llama3Scaling) and architecture == "llama":
        return facts, {FREQS: llama3_factors(scaling, theta, head_dim)}
    plain = isinstance(scaling, YarnScaling) and scaling == YarnScaling(
        scaling.factor, scaling.trained_len
    )
    _refuse(config, "position.scaling", scaling, plain)
    assert isinstance(scaling, YarnScaling)
    return facts | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling.factor,
        "rope.scaling.original_context_length": scaling.trained_len,
    }, {}


# GPT-2


def _gpt2_config(facts: Facts) -> gpt2.Config:
    return gpt2.Config(
        vocab_size=facts.vocabulary(),
        d_model=facts.size("embedding_length"),
        n_layers=facts.size("block_count", most=MOST_LAYERS),
        n_heads=facts.size("attention.head_count"),
        d_ff=facts.size("feed_forward_length"),
        max_len=facts.size("context_length"),
        norm=LayerNormConfig(facts.number("attention.layer_norm_epsilon")),
        head=facts.tied(),
    )


def _gpt2_keys() -> Table:
    table: dict[str, str | Rule] = {
        "token_embd.weight": "embed.tokens.weight",
        "position_embd.weight": "embed.position.table.weight",
    }
    for kind in ("weight", "bias"):
        for theirs, ours in {
            "attn_norm": "self_residual.norm",
            "attn_output": "self_attn.out_proj",
            "ffn_norm": "ffn_residual.norm",
            "ffn_up": "ffn.in_proj",
            "ffn_down": "ffn.out_proj",
        }.items():
            table["blk.{i}." + f"{theirs}.{kind}"] = BLOCK + f"{ours}.{kind}"
        table["blk.{i}.attn_qkv." + kind] = Fused(BLOCK + "self_attn.{}_proj." + kind)
        table[f"output_norm.{kind}"] = f"stack.norm.{kind}"
    return table | {"output.weight": "head.proj.weight"}


def _gpt2_facts(config: gpt2.Config) -> dict[str, Any]:
    norm, position = config.norm, config.position
    heads = config.n_kv_heads in (None, config.n_heads)
    _refuse(config, "n_kv_heads", config.n_kv_heads, heads)
    _refuse(config, "activation", config.activation, config.activation == "gelu_tanh")
    _refuse(config, "norm", norm.kind, isinstance(norm, LayerNormConfig) and norm.bias)
    assert isinstance(norm, LayerNormConfig)
    _refuse_head(config, config.head)
    learned = isinstance(position, LearnedConfig) and (
        position.offset == 0 and position.max_len in (0, config.max_len)
    )
    _refuse(config, "position", getattr(position, "kind", None), learned)
    return _sizes(config) | {"attention.layer_norm_epsilon": norm.eps}


# Both


def _sizes(config: llama.Config | gpt2.Config) -> dict[str, Any]:
    ffn = config.to_stack().ffn
    assert isinstance(ffn, (GatedFFNConfig, PlainFFNConfig))
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_len,
        "embedding_length": config.d_model,
        "feed_forward_length": ffn.d_ff,
        "block_count": config.n_layers,
        "attention.head_count": config.n_heads,
    }


def _refuse_head(config: FamilyConfig, head: HeadConfig | None) -> None:
    language = isinstance(head, LMConfig) and not head.bias
    _refuse(config, "head", getattr(head, "kind", None), language)


def _refuse(config: FamilyConfig, setting: str, value: Any, fine: bool) -> None:
    require(
        fine,
        f"GGUF's architectures cannot express this {config.kind} model: {setting} is "
        f"{_short(value)}, which llama.cpp would not compute. Nothing was written. Export it with "
        'to="hf", or save() it.',
    )
