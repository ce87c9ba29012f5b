"""The model that a name, a folder or a file stands for, without its weights.

Its settings, and what the header of the weights file says.

A safetensors file starts with 8 bytes, the length of the JSON that follows: name -> dtype, shape,
and from where to where its bytes are. So sizes and types are known without reading a weight.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import ClearheadError
from clearhead.models.family import FAMILIES, FamilyConfig, family
from clearhead.models.presets import PRESETS, resolve
from clearhead.models.whisper import from_openai
from clearhead.weights.files import (
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    file_kind,
    inside,
    open_weights,
    read_settings,
    single_file,
)
from clearhead.weights.folder import FORMATS, WEIGHTS, model_inside
from clearhead.weights.gguf import describe_gguf
from clearhead.weights.hf import hf_config, inside_folder
from clearhead.weights.llama2c import load_llama2c
from clearhead.weights.pickles import read_whisper_pt

LONGEST_HEADER = 100 * 2**20  # what the safetensors library allows

_KINDS = {"gguf": "GGUF file", "openai": "Whisper file", "llama2c": "llama2.c file"}
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NAMES = {getattr(torch, theirs): ours for ours, theirs in TYPES.items()}


@dataclass(frozen=True)
class Weights:
    """What the headers of a model's weights say."""

    files: tuple[str, ...]
    """The files that are there."""
    missing: tuple[str, ...]
    """Files that the index names and that are not there."""
    size: int
    """Bytes of the files."""
    tensors: int
    """How many tensors they hold."""
    numbers: dict[str, int]
    """How many numbers of each type: {"F32": 124439808}."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of all floating-point numbers, or None if there are several or none."""
        found = {name for name in self.numbers if name in TYPES}
        return getattr(torch, TYPES[found.pop()]) if len(found) == 1 else None


@dataclass(frozen=True)
class Target:
    """A model that somebody named."""

    name: str
    """As it was given."""
    kind: str
    """What the name is: preset, family, folder, Hugging Face folder, or which kind of file."""
    config: FamilyConfig
    """Its settings."""
    weights: Weights | None = None
    """What its files hold, if there are any."""


def find(name: str) -> Target:
    """A preset or family by its name, or a folder. A folder called like a preset: "./gpt2"."""
    if name in PRESETS:
        return Target(name, "preset", resolve(name))
    if name in FAMILIES:
        return Target(name, "family", resolve(name))
    path = model_inside(Path(name).expanduser())
    if path.is_dir() and not (path / "config.json").exists():
        path = single_file(path)
    if path.is_file():
        return _in_file(name, path)
    if path.exists() or "/" in name or "\\" in name:
        return _in_folder(name, path)
    config = resolve(name)  # raises, with the nearest name
    return Target(name, "preset", config)


def _in_file(name: str, path: Path) -> Target:
    """A model in one file. Only its settings are read: tensors stay mapped and undecoded."""
    kind = file_kind(path)
    numbers: Counter[str] = Counter()
    if kind == "gguf":
        config, file = describe_gguf(path)
        for found in file.tensors.values():
            numbers[found.kind] += math.prod(found.shape)
        count = len(file.tensors)
    else:
        if kind == "openai":
            dims, tensors = read_whisper_pt(path)
            config = from_openai(dims)
        else:
            net, config, _ = load_llama2c(path)
            tensors = dict(net.named_parameters())
        for tensor in tensors.values():
            numbers[NAMES.get(tensor.dtype, str(tensor.dtype))] += tensor.numel()
        count = len(tensors)
    weights = Weights((path.name,), (), path.stat().st_size, count, dict(numbers))
    return Target(name, _KINDS[kind], config, weights)


def _in_folder(name: str, folder: Path) -> Target:
    description = read_settings(folder)
    names, weights = read_headers(folder)
    if description.get("format") in FORMATS:
        settings = description.get("config", {})
        where = f"{folder.name}/config.json"
        config = family(str(description.get("family"))).Config.from_dict(settings, where=where)
        return Target(name, "folder", config, weights)
    return Target(name, "Hugging Face folder", hf_config(description, names, folder), weights)


def read_headers(folder: Path) -> tuple[tuple[str, ...], Weights | None]:
    """The names of all tensors, and the summary; of one file, or of the shards an index names."""
    if (folder / WEIGHTS).exists():
        wanted = [inside(folder, WEIGHTS).name]
    elif (folder / INDEX).exists():
        wanted = _shards(inside(folder, INDEX))
    elif (folder / PICKLE).exists() or (folder / PICKLE_INDEX).exists():
        return _pickled(folder)
    else:
        return (), None
    there = [file for file in wanted if (folder / inside_folder(file)).is_file()]
    tensors: dict[str, Any] = {}
    for file in there:
        tensors |= _read_header(folder / file)
    numbers: dict[str, int] = {}
    for tensor in tensors.values():
        count = math.prod(tensor["shape"])
        numbers[tensor["dtype"]] = numbers.get(tensor["dtype"], 0) + count
    size = sum((folder / file).stat().st_size for file in there)
    missing = tuple(file for file in wanted if file not in there)
    return tuple(tensors), Weights(tuple(there), missing, size, len(tensors), numbers)


def _pickled(folder: Path) -> tuple[tuple[str, ...], Weights]:
    """The same of .bin files, which are mapped and not read."""
    tensors = open_weights(folder)
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[NAMES.get(tensor.dtype, str(tensor.dtype))] += tensor.numel()
    files = sorted(folder.glob("pytorch_model*.bin"))
    size = sum(file.stat().st_size for file in files)
    names = tuple(file.name for file in files)
    return tuple(tensors), Weights(names, (), size, len(tensors), dict(numbers))


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ClearheadError(
            f"{index} is no index of weights ({error!r}): it is damaged. Copy it again."
        ) from error


def _read_header(path: Path) -> dict[str, Any]:
    """One file's header, checked against the file's length."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        tensors = {name: header[name] for name in header if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if not all(
            isinstance(t["dtype"], str) and t["shape"] == [*t["shape"]] for t in tensors.values()
        ):
            raise ValueError("a tensor has no shape")
        if 8 + length + end != size:
            raise ValueError(f"it should have {8 + length + end} bytes, and has {size}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ClearheadError(
            f"{path} is not a whole safetensors file ({error}): it is truncated, damaged or of "
            "another format. Copy or save it again."
        ) from error
    return tensors
