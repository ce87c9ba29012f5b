"""GGUF models in and out: llama.cpp's one-file format, with the tokeniser inside.

    load_gguf      a file as one of our networks, in fp32         export_gguf    and back
    read_gguf      its settings and tensors alone                 write_gguf     and back

gguf_file.py reads the container, gguf_write.py writes it, gguf_quant.py knows the number formats,
gguf_arch.py the architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig
from clearhead.weights.convert import Report, fill, to_ours, to_theirs
from clearhead.weights.folder import assemble
from clearhead.weights.gguf_arch import ARCHITECTURES, FREQS, describe, keys, read_config
from clearhead.weights.gguf_file import GGUF, GGUFTensor, read_gguf
from clearhead.weights.gguf_quant import KINDS, NUMBERS, SUPPORTED
from clearhead.weights.gguf_write import write_gguf

__all__ = [
    "GGUF",
    "GGUFTensor",
    "check_family",
    "describe_gguf",
    "export_gguf",
    "load_gguf",
    "read_gguf",
    "write_gguf",
]

StoredAs = Literal["f32", "f16", "q8_0"]
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}  # llama.cpp's numbers for general.file_type


def describe_gguf(path: str | Path) -> tuple[FamilyConfig, GGUF]:
    """The settings of a file's model and the file itself, without decoding a tensor."""
    file = read_gguf(path)
    return read_config(file, _architecture(file)), file


def load_gguf(path: str | Path) -> tuple[Net, FamilyConfig, Report, GGUF]:
    """The network in fp32, its settings, what became of every tensor, and the file itself (its
    `metadata` holds the tokeniser).
    """
    file = read_gguf(path)
    architecture = _architecture(file)
    _check_kinds(file)
    config = read_config(file, architecture)
    table = keys(config, architecture)
    _rehearse(file, config, architecture)
    theirs = {name: tensor.tensor() for name, tensor in file.tensors.items()}
    tensors, report, faults = to_ours(theirs, table, config.n_layers)
    net = assemble(config, tensors, faults)
    return net, config, Report(report.became, report.dropped, dict(net.ties)), file


def check_family(config: FamilyConfig) -> None:
    """Refuse a model that no architecture of GGUF expresses."""
    describe(config)


def _architecture(file: GGUF) -> str:
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ClearheadError(
            f'{file.path} holds a model of the architecture "{name}", which is not supported.'
            f"{did_you_mean(name, ARCHITECTURES)} Supported: {', '.join(ARCHITECTURES)}."
        )
    kind = file.metadata.get("general.type", "model")
    require(kind == "model", f"{file.path} is not a model but its {kind!r}: load the model's file.")
    parts = file.metadata.get("split.count", 0)
    require(
        parts in (0, 1),
        f"{file.path} is one of {parts} parts of a model. Join them first: "
        "llama-gguf-split --merge FIRST-PART OUT.gguf",
    )
    return name


def _check_kinds(file: GGUF) -> None:
    foreign = [f"{t.name} ({t.kind})" for t in file.tensors.values() if t.kind not in SUPPORTED]
    more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
    require(
        not foreign,
        f"{file.path} has tensors in number formats that cannot be decoded here: "
        f"{', '.join(foreign[:5])}{more}. Supported: {', '.join(SUPPORTED)}. Take another "
        "quantisation of the same model, such as Q4_K_M or Q8_0.",
    )


def _rehearse(file: GGUF, config: FamilyConfig, architecture: str) -> None:
    """Load shapes without numbers, so that what does not fit is said before anything is decoded."""
    shapes = {name: torch.empty(t.shape, device="meta") for name, t in file.tensors.items()}
    try:
        tensors, _, faults = to_ours(shapes, keys(config, architecture), config.n_layers)
    except ClearheadError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # of a rule that cannot take a shape
        raise ClearheadError(
            f"The tensors of {file.path} are not of the shapes that its settings say ({error}): "
            "the file is damaged. Download or convert it again."
        ) from error
    fill(config.outline(), tensors, faults)


def export_gguf(
    net: Net,
    config: FamilyConfig,
    tokenizer_metadata: Mapping[str, Any] | None,
    path: str | Path,
    dtype: StoredAs = "f16",
) -> None:
    """Write a model of the llama or gpt2 family as a file that llama.cpp opens.

    `tokenizer_metadata` are the settings "tokenizer.ggml.model", "tokenizer.ggml.tokens", ...; None
    writes a model without a tokeniser. Matrices are stored as `dtype` (as f16 where their rows do
    not divide into the blocks of q8_0), vectors and positions in f32.
    """
    require(dtype in _FILE_TYPES, f"dtype is {dtype!r}: choose f32, f16 or q8_0.")
    architecture, facts, extra = describe(config)
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in facts.items()},
        **_tokenizer(tokenizer_metadata, config.vocab_size),
    }
    theirs = to_theirs(_parameters(net, config), keys(config, architecture), config.n_layers)
    tensors = theirs | extra
    kinds = {name: _kind(name, tensor, dtype.upper()) for name, tensor in tensors.items()}
    write_gguf(path, metadata, tensors, kinds)


def _tokenizer(metadata: Mapping[str, Any] | None, vocab_size: int) -> dict[str, Any]:
    if metadata is None:
        return {"tokenizer.ggml.model": "none"}  # llama.cpp takes ids alone then
    foreign = [key for key in metadata if not key.startswith("tokenizer.")]
    require(
        not foreign,
        f"{', '.join(foreign[:5])}: not of a tokeniser, whose settings begin with tokenizer.",
    )
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    require(
        len(tokens) == vocab_size,
        f"tokenizer.ggml.tokens has {len(tokens)} entries, but the model has {vocab_size} tokens: "
        "llama.cpp wants one for each (fill up with [PAD0], [PAD1], ...).",
    )
    return dict(metadata)


def _parameters(net: Net, config: FamilyConfig) -> dict[str, Tensor]:
    """Every parameter once; they must be those of the model that the settings describe."""
    with torch.device("meta"):
        expected = {name: p.shape for name, p in config.build().named_parameters()}
    aliases = dict(net.ties)
    found = {
        name: parameter.detach()
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if name not in aliases
    }
    odd = sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected or name not in found or expected[name] != found[name].shape
    )
    require(
        not odd,
        "The network is not the one that its settings describe. These parameters differ: "
        f"{', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}.",
    )
    return found


def _kind(name: str, tensor: Tensor, wanted: str) -> str:
    """The number format of a tensor, as llama.cpp's own converter chooses it."""
    if tensor.dim() < 2 or name in ("position_embd.weight", FREQS):
        return "F32"
    whole = tensor.shape[-1] % KINDS[NUMBERS[wanted]].numbers == 0
    return wanted if whole else "F16"
