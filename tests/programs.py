"""Small models whose steps are one call, for the tests of `fast/program.py`."""

from __future__ import annotations

import torch

import clearhead as ch
from tiny import noisy

SIZES = {"vocab_size": 40, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_len": 64, "d_ff": 96}
DECODERS = {
    "gpt2": ("gpt2", {}),
    "gpt2 with the exact gelu": ("gpt2", {"activation": "gelu"}),
    "gpt2 with relu, grouped": ("gpt2", {"activation": "relu", "n_kv_heads": 2}),
    "llama": ("llama", {"n_kv_heads": 2}),
    "llama with norms of q and k": ("llama", {"variant": {"qk_norm": True, "qkv_bias": True}}),
    "gpt_neox": ("gpt_neox", {"position": {"kind": "rope", "fraction": 0.5}}),
}
PAIRS = {
    "post": ("transformer", {}),
    "pre": ("transformer", {"placement": "pre", "position": "rope"}),
    "sandwich": ("transformer", {"placement": "sandwich", "position": "learned"}),
    "bart": ("bart", {}),
}


def plain(name, table=DECODERS):
    family, own = table[name]
    return noisy(ch.build(family, seed=0, **SIZES | {"dropout": 0.0} | own).net, 0.1)


def ids(rows, length, seed=3):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(form, found, expected):
    """Where bytes are rounded anew, a last digit may tip a number over."""
    if form == "fp32":
        small = 5e-6 * max(1.0, float(expected.abs().amax()))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=small)
        return
    assert (found - expected).norm() < 0.02 * expected.norm()
