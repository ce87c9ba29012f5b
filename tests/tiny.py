"""Tiny models for the tests: every family, position, placement and kernel at width 16, two layers.

Weights are drawn large (noise of 0.3 everywhere): at their initial size positions and masks would
move an output by less than a test can see.
"""

from __future__ import annotations

import torch

import clearhead as ch
from clearhead.attention.mask import Causal
from clearhead.attention.positions import Positions
from clearhead.attention.spec import AttentionConfig, Geometry
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import PlainFFNConfig
from clearhead.layers.stack import StackConfig
from clearhead.models.family import decoder
from clearhead.models.heads import HeadStyle, LMConfig

VOCAB = 23
WIDTH = 16
SIZES = {"vocab_size": VOCAB, "d_model": WIDTH, "n_layers": 2, "n_heads": 4, "max_len": 64}

_GATED = {"kind": "gated", "d_ff": 24, "activation": "gelu_tanh", "bias": False}
_PLAIN = {"kind": "plain", "d_ff": 24, "activation": "relu", "bias": False}
_BUCKETS = {"kind": "t5_buckets", "buckets": 8, "max_distance": 16}

DECODERS = {
    "gpt2": ("gpt2", {"n_kv_heads": 2}),
    "llama": ("llama", {"n_kv_heads": 2}),
    "llama-window": ("llama", {"n_kv_heads": 1, "variant": {"window": 4}}),
    "llama-qwen": ("llama", {"variant": {"qk_norm": True, "qkv_bias": True, "head_dim": 6}}),
    "gpt_neox": ("gpt_neox", {"position": {"kind": "rope", "fraction": 0.5}}),
    "rnn": ("rnn", {"cell": "rnn"}),
    "rnn-lstm": ("rnn", {"head": {"kind": "lm", "tied": False}}),
    "rnn-gru": ("rnn", {"cell": "gru"}),
}
SEQ2SEQ = {
    "t5": ("t5", {"ffn": _PLAIN, "position": _BUCKETS}),
    "t5-gated": (
        "t5",
        {"ffn": _GATED, "head_dim": 6, "head": {"kind": "t5_lm", "tied": False, "scaled": False}},
    ),
    "transformer": ("transformer", {}),
    "transformer-pre": ("transformer", {"placement": "pre", "position": "rope"}),
    "transformer-sandwich": ("transformer", {"placement": "sandwich", "position": "learned"}),
    "bart": ("bart", {}),
    "rnn_seq2seq": ("rnn_seq2seq", {}),
    "rnn_seq2seq-lstm": ("rnn_seq2seq", {"cell": "lstm", "attention": "none"}),
}
ENCODERS = {
    "bert": ("bert", {}),
    "bert-alibi": ("bert", {"position": "alibi", "token_types": 0}),
    "roberta": ("roberta", {}),
    "distilbert": ("distilbert", {}),
}
MODELS = DECODERS | SEQ2SEQ | ENCODERS

# Those of which a model knows only differences of positions, and those that know where they are.
RELATIVE = {
    "none": None,
    "rope": "rope",
    "rope-partial": {"kind": "rope", "fraction": 0.5},
    "rope-linear": {"kind": "rope", "scaling": {"kind": "linear", "factor": 4.0}},
    "rope-ntk": {"kind": "rope", "scaling": {"kind": "ntk", "factor": 4.0}},
    "rope-yarn": {
        "kind": "rope",
        "scaling": {"kind": "yarn", "factor": 4.0, "trained_len": 16},
    },
    "rope-llama3": {
        "kind": "rope",
        "scaling": {"kind": "llama3", "factor": 4.0, "trained_len": 16},
    },
    "alibi": "alibi",
    "t5_buckets": _BUCKETS,
    "shaw": {"kind": "shaw", "max_distance": 3},
    "transformer_xl": "transformer_xl",
}
ABSOLUTE = {
    "learned": "learned",
    "sinusoidal": "sinusoidal",
    "sinusoidal-halves": {"kind": "sinusoidal", "layout": "halves", "base": 1000.0},
    "sinusoidal-beside": {"kind": "sinusoidal", "width": 4},
    "sinusoidal_2d": {"kind": "sinusoidal_2d", "columns": 3},
    "learned_2d": {"kind": "learned_2d", "rows": 22, "columns": 3},
    "rope_2d": {"kind": "rope_2d", "columns": 3},
}
POSITIONS = RELATIVE | ABSOLUTE


def noisy(net, size=0.3):
    """The same network with every parameter shaken, ready for inference."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return net.eval()


def sizes_of(family):
    """The sizes that a family has."""
    return {k: n for k, n in SIZES.items() if k != "n_heads" or not family.startswith("rnn")}


def tiny(name, **changes):
    """A tiny network by its name in the tables above."""
    family, own = MODELS[name]
    own = {**sizes_of(family), "dropout": 0.0, **own, **changes}
    return noisy(ch.build(family, seed=0, **own).net)


def positioned(position):
    """A tiny GPT-2 with this position scheme."""
    head = {"kind": "lm", "tied": position != "sinusoidal-beside"}
    return tiny("gpt2", position=POSITIONS[position], head=head)


def attention(mask=None, *, kv=None, **more):
    """One tiny attention spec, causal unless told otherwise."""
    return AttentionConfig(Geometry(WIDTH, 4, kv), mask=Causal() if mask is None else mask, **more)


def stacked(*attentions, n_layers=2, position=None, dropout=0.0, **more):
    """A tiny decoder of any stack at all."""
    stack = StackConfig(n_layers, attentions, PlainFFNConfig(24), dropout=dropout, **more)
    embed = EmbedConfig(VOCAB, WIDTH, position, dropout=dropout)
    style = HeadStyle(WIDTH, VOCAB)
    torch.manual_seed(0)
    return noisy(decoder(embed, stack, LMConfig(), style))


def tokens(rows, length, seed=1):
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (rows, length), generator=generator)


def padded(rows, side, filler=0):
    """Id lists of different lengths as one tensor with its positions."""
    width = max(len(row) for row in rows)
    full = []
    for row in rows:
        empty = [filler] * (width - len(row))
        full.append(empty + list(row) if side == "left" else list(row) + empty)
    return torch.tensor(full), Positions.ragged([len(row) for row in rows], side)


def close(actual, expected, tolerance=1e-5):
    """Equal up to rounding, relative to the size of the numbers."""
    assert torch.isfinite(expected).all(), "the expected values themselves are not finite"
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
