"""Presets: published models by name, with their sizes and the parameter counts their papers state.

ch.build("gpt2-medium")           ch.build("bert-base", n_layers=4)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import ClearheadError, nearest
from clearhead.models.family import FAMILIES, FamilyConfig, family

MILLION, BILLION = 10**6, 10**9


@dataclass(frozen=True)
class Preset:
    """A published model."""

    family: str
    """The file that builds it."""
    source: str
    """Where the sizes are published."""
    published: int | None = None
    """How many parameters the source states."""
    changes: dict[str, Any] = field(default_factory=dict)
    """What differs from the family's defaults."""

    def config(self) -> FamilyConfig:
        """The full settings."""
        return family(self.family).Config().changed(**self.changes)


def _sizes(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"n_layers": layers, "d_model": width, "n_heads": heads} | more


_POOLER = {"kind": "pooling", "mode": "first", "dense": True}
_BERT = {"head": _POOLER}
_OPUS = _sizes(6, 512, 8, vocab_size=58101, max_len=512, activation="silu", scaled=True)
_OPUS |= {"embed_norm": False, "position": {"kind": "sinusoidal", "layout": "halves"}}
_GOPHER = {"position": "transformer_xl", "norm": "rms_norm", "vocab_size": 32000, "max_len": 2048}


def _llama(layers: int, width: int, heads: int, kv: int, ff: int, **more: Any) -> dict[str, Any]:
    return _sizes(layers, width, heads, n_kv_heads=kv, d_ff=ff) | more


def _t5(width: int, layers: int, heads: int, ff: int, **more: Any) -> dict[str, Any]:
    ffn = {"kind": "plain", "d_ff": ff, "activation": "relu", "bias": False}
    return _sizes(layers, width, heads, head_dim=64, ffn=ffn) | more


def _flan(width: int, layers: int, heads: int, ff: int) -> dict[str, Any]:
    ffn = {"kind": "gated", "d_ff": ff, "activation": "gelu_tanh", "bias": False}
    return _t5(
        width, layers, heads, ff, ffn=ffn, head={"kind": "t5_lm", "tied": False, "scaled": False}
    )


_GPT2_PAPER = "Radford et al. 2019"
_LLAMA3_ROPE = {"kind": "rope", "theta": 500000.0}

PRESETS: dict[str, Preset] = {
    "transformer-base": Preset("transformer", "Vaswani et al. 2017, table 3", 65 * MILLION),
    "transformer-big": Preset(
        "transformer",
        "Vaswani et al. 2017, table 3",
        213 * MILLION,
        _sizes(6, 1024, 16, dropout=0.3),
    ),
    "bert-base": Preset("bert", "Devlin et al. 2019", 110 * MILLION, _BERT),
    "bert-large": Preset("bert", "Devlin et al. 2019", 340 * MILLION, _sizes(24, 1024, 16) | _BERT),
    "minilm-l6": Preset(
        "bert",
        "Wang et al. 2020",
        22_700_000,
        _sizes(6, 384, 12, head={"kind": "pooling", "mode": "mean"}),
    ),
    "roberta-base": Preset("roberta", "Liu et al. 2019", 125 * MILLION, _BERT),
    "roberta-large": Preset(
        "roberta", "Liu et al. 2019", 355 * MILLION, _sizes(24, 1024, 16) | _BERT
    ),
    "distilbert": Preset("distilbert", "Sanh et al. 2019", 66 * MILLION, {"head": None}),
    "gpt2": Preset("gpt2", _GPT2_PAPER, 124 * MILLION),
    "gpt2-medium": Preset("gpt2", _GPT2_PAPER, 355 * MILLION, _sizes(24, 1024, 16)),
    "gpt2-large": Preset("gpt2", _GPT2_PAPER, 774 * MILLION, _sizes(36, 1280, 20)),
    "gpt2-xl": Preset("gpt2", _GPT2_PAPER, 1558 * MILLION, _sizes(48, 1600, 25)),
    "megatron-lm": Preset(
        "gpt2", "Shoeybi et al. 2019", 8300 * MILLION, _sizes(72, 3072, 32, vocab_size=51200)
    ),
    "turing-nlg": Preset("gpt2", "Microsoft 2020", 17 * BILLION, _sizes(78, 4256, 28)),
    "gpt3": Preset("gpt2", "Brown et al. 2020", 175 * BILLION, _sizes(96, 12288, 96, max_len=2048)),
    "gopher": Preset("gpt2", "Rae et al. 2021", 280 * BILLION, _sizes(80, 16384, 128) | _GOPHER),
    "llama2-7b": Preset("llama", "Touvron et al. 2023", 6738 * MILLION, {"d_ff": 11008}),
    "llama3-8b": Preset(
        "llama",
        "Llama team 2024",
        8030 * MILLION,
        _llama(32, 4096, 32, 8, 14336, vocab_size=128256, max_len=8192, position=_LLAMA3_ROPE),
    ),
    "mistral-7b": Preset(
        "llama",
        "Jiang et al. 2023",
        7242 * MILLION,
        _llama(32, 4096, 32, 8, 14336, max_len=32768, variant={"window": 4096}),
    ),
    "smollm2-135m": Preset(
        "llama",
        "Allal et al. 2025",
        135 * MILLION,
        _llama(
            30, 576, 9, 3, 1536, vocab_size=49152, max_len=8192, head={"kind": "lm", "tied": True}
        )
        | {"position": {"kind": "rope", "theta": 100000.0}},
    ),
    "stories15m": Preset(
        "llama",
        "Karpathy 2023, llama2.c",
        15 * MILLION,
        _llama(6, 288, 6, 6, 768, max_len=256, head={"kind": "lm", "tied": True}),
    ),
    "t5-small": Preset("t5", "Raffel et al. 2020", 60 * MILLION, _t5(512, 6, 8, 2048)),
    "t5-base": Preset("t5", "Raffel et al. 2020", 220 * MILLION, _t5(768, 12, 12, 3072)),
    "flan-t5-small": Preset("t5", "Chung et al. 2022", 77 * MILLION, _flan(512, 8, 6, 1024)),
    "flan-t5-base": Preset("t5", "Chung et al. 2022", 250 * MILLION, _flan(768, 12, 12, 2048)),
    "bart-base": Preset("bart", "Lewis et al. 2020", 139 * MILLION),
    "bart-large": Preset("bart", "Lewis et al. 2020", 406 * MILLION, _sizes(12, 1024, 16)),
    "opus-mt": Preset("bart", "Tiedemann and Thottingal 2020", None, _OPUS),
    "vit-base": Preset("vit", "Dosovitskiy et al. 2021", 86_600_000),
    "clip-vit-base-32": Preset("clip", "Radford et al. 2021", 151 * MILLION),
    "whisper-tiny": Preset("whisper", "Radford et al. 2022"),
    "whisper-base": Preset("whisper", "Radford et al. 2022", 74 * MILLION, _sizes(6, 512, 8)),
    "pythia-160m": Preset("gpt_neox", "Biderman et al. 2023", 162_300_000),
}


def resolve(name: str) -> FamilyConfig:
    """The settings of a preset, or a family's defaults."""
    if name in PRESETS:
        return PRESETS[name].config()
    if name in FAMILIES:
        return family(name).Config()
    near = nearest(name, sorted({*PRESETS, *FAMILIES}), n=5)
    said = f' Did you mean "{near[0]}"?' if near else ""
    said += f" Also near: {', '.join(near[1:])}." if len(near) > 1 else ""
    raise ClearheadError(f'There is no model "{name}".{said} All of them: clearhead presets')
