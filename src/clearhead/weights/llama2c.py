"""llama2.c models (Karpathy's run.c): one file of fp32 numbers behind seven sizes, and its
vocabulary.

    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len     int32 each
    the tensors, grouped by kind: all layers' wq, then all layers' wk, ...  fp32

A negative vocab_size says that the head is a tensor of its own. The layout is the first one
("version 0", that of stories15M.bin). Rotary pairs stand side by side, as in Meta's code.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.models.base import Net
from clearhead.models.heads import LMConfig
from clearhead.models.keys import Dropped, Table
from clearhead.models.llama import Config
from clearhead.weights.convert import Report, to_ours
from clearhead.weights.folder import assemble
from clearhead.weights.interleaved import Interleaved

HEADER = struct.Struct("<7i")
MAGIC = 0x616B3432  # "ak42", with which the later versions begin
MOST_LAYERS = 1024
MOST_TOKENS = 1 << 20

BLOCK = "stack.blocks.{i}."


def load_llama2c(path: str | Path) -> tuple[Net, Config, Report]:
    """The network (its numbers stay in the mapped file where they can), its settings, and what
    became of every tensor.
    """
    path = Path(path)
    require(os.path.isfile(path), f"There is no file {path}: check the path.")
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        config = _config(head, path)
        shapes = _shapes(config)
        expected = HEADER.size + 4 * sum(math.prod(shape) for shape in shapes.values())
        size = path.stat().st_size
        require(
            size == expected,
            f"{path} is {size} bytes long, but its sizes ({_said(head)}) make {expected}: it is "
            "truncated, damaged or no llama2.c file. Download it again.",
        )
        # A private copy on write: a change never reaches the file.
        numbers = torch.from_numpy(np.memmap(path, "<f4", "c", HEADER.size))
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror or error}.") from error
    tensors, report, faults = to_ours(_cut(numbers, shapes), _keys(config), config.n_layers)
    net = assemble(config, tensors, faults)
    return net, config, Report(report.became, report.dropped, dict(net.ties))


def _config(head: bytes, path: Path) -> Config:
    """The seven sizes in our words."""
    require(
        len(head) == HEADER.size, f"{path} is too short for a llama2.c file: it is no model at all."
    )
    dim, hidden, n_layers, n_heads, n_kv_heads, vocab, seq_len = HEADER.unpack(head)
    require(
        dim != MAGIC,
        f"{path} is a llama2.c file of version {hidden}; the first layout (version 0) is read "
        "here. Export it with llama2.c's export.py --version 0.",
    )
    fine = (
        min(dim, hidden, n_layers, n_heads, n_kv_heads, abs(vocab), seq_len) >= 1
        and n_layers <= MOST_LAYERS
        and dim % (2 * n_heads) == 0
        and n_heads % n_kv_heads == 0
    )
    require(
        fine,
        f"{path} is not a llama2.c model: no such model has {_said(head)}. Check what was "
        "downloaded.",
    )
    return Config(
        vocab_size=abs(vocab),
        d_model=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_ff=hidden,
        max_len=seq_len,
        head=LMConfig(tied=vocab > 0),
    )


def _said(head: bytes) -> str:
    names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
    return ", ".join(f"{n} {v}" for n, v in zip(names, HEADER.unpack(head), strict=True))


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors in the order of the file, under the names of run.c."""
    d, n, ff = config.d_model, config.n_layers, config.d_ff or 0
    width = d // config.n_heads
    kv = width * (config.n_kv_heads or config.n_heads)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding_table": (config.vocab_size, d),
        "rms_att_weight": (n, d),
        "wq": (n, d, d),
        "wk": (n, kv, d),
        "wv": (n, kv, d),
        "wo": (n, d, d),
        "rms_ffn_weight": (n, d),
        "w1": (n, ff, d),
        "w2": (n, d, ff),
        "w3": (n, ff, d),
        "rms_final_weight": (d,),
        "freq_cis_real": (config.max_len, width // 2),
        "freq_cis_imag": (config.max_len, width // 2),
    }
    if config.head is not None and not config.head.tied:
        shapes["wcls"] = (config.vocab_size, d)
    return shapes


def _cut(numbers: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors by name, those of a layer as "wq.0", "wq.1", ..."""
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape)
        whole = numbers[at:end].view(shape)
        layered = name in _LAYERED
        tensors |= {f"{name}.{i}": t for i, t in enumerate(whole)} if layered else {name: whole}
        at = end
    return tensors


_LAYERED = ("rms_att_weight", "wq", "wk", "wv", "wo", "rms_ffn_weight", "w1", "w2", "w3")


def _keys(config: Config) -> Table:
    """The names of run.c for our parameters."""
    angles = Dropped("rotary angles, which are computed here")
    return {
        "token_embedding_table": "embed.tokens.weight",
        "rms_att_weight.{i}": BLOCK + "self_residual.norm.weight",
        "wq.{i}": Interleaved(BLOCK + "self_attn.q_proj.weight", config.n_heads),
        "wk.{i}": Interleaved(
            BLOCK + "self_attn.k_proj.weight", config.n_kv_heads or config.n_heads
        ),
        "wv.{i}": BLOCK + "self_attn.v_proj.weight",
        "wo.{i}": BLOCK + "self_attn.out_proj.weight",
        "rms_ffn_weight.{i}": BLOCK + "ffn_residual.norm.weight",
        "w1.{i}": BLOCK + "ffn.gate_proj.weight",
        "w2.{i}": BLOCK + "ffn.out_proj.weight",
        "w3.{i}": BLOCK + "ffn.in_proj.weight",
        "rms_final_weight": "stack.norm.weight",
        "freq_cis_real": angles,
        "freq_cis_imag": angles,
        "wcls": "head.proj.weight",
    }


def read_llama2c_vocab(path: str | Path) -> list[tuple[bytes, float]]:
    """The tokens of llama2.c's tokenizer.bin, each with its score, in the order of their ids."""
    path = Path(path)
    require(os.path.isfile(path), f"There is no file {path}: check the path.")
    try:
        data = path.read_bytes() if path.stat().st_size <= 1 << 28 else b""
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror or error}.") from error
    damaged = f"{path} is not a whole llama2.c tokenizer.bin"
    require(len(data) >= 4, f"{damaged}: its size cannot be right. Download it again.")
    longest = struct.unpack_from("<i", data)[0]
    tokens: list[tuple[bytes, float]] = []
    at = 4
    while at < len(data):
        end = at + 8
        require(end <= len(data), f"{damaged}: token {len(tokens)} is cut off. Download it again.")
        score, length = struct.unpack_from("<fi", data, at)
        require(
            0 <= length <= longest and end + length <= len(data) and len(tokens) < MOST_TOKENS,
            f"{damaged}: token {len(tokens)} says it has {length} bytes (the longest: {longest}), "
            f"and {len(data) - end} are left. Download it again.",
        )
        tokens.append((data[end : end + length], score))
        at = end + length
    return tokens
