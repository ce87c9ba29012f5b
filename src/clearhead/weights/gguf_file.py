"""GGUF files (llama.cpp's), read strictly and memory-mapped.

    "GGUF", version, how many tensors, how many settings
    settings     name, type, value: numbers, texts, lists of them
    tensors      name, sizes (the fastest first, so ours reversed), number format, offset
    data         aligned to general.alignment

Whatever a file says of itself is checked against the file's size before it is believed: nothing is
read beyond its end, and nothing is allocated from a number that the file merely claims. The format
is described in docs/gguf.md of the ggml repository.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.weights.gguf_quant import KINDS, SUPPORTED, Bytes, dequantise

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # where general.alignment says nothing else

# Real files are far below these (a vocabulary of 262144 has a million texts); beyond them the time
# and memory of a small file's settings would no longer be small.
MOST_ITEMS = 1 << 22
MOST_NESTING = 4
MOST_DIMS = 4  # ggml's own limit
MOST_NAME = 64  # bytes of a tensor's name, ggml's own limit
MOST_KEY = 65535  # bytes of a setting's name, the format's own limit

BOOL, TEXT, LIST = 7, 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q"}
SCALARS |= {12: "<d", BOOL: "<B"}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in the file: decoded when asked for, not before."""

    name: str
    """Its name."""
    shape: tuple[int, ...]
    """Its sizes as torch counts them, the slowest first."""
    kind: str
    """Its number format: "F16", "Q4_K", ..."""
    raw: Bytes
    """Its bytes, which are the file's own."""

    def numpy(self) -> np.ndarray:
        """Its numbers in fp32. Those of F32 are the mapped file itself: a change stays private."""
        require(
            self.kind in SUPPORTED,
            f"The tensor {self.name} is stored as {self.kind}, which cannot be decoded here. "
            f"Supported: {', '.join(SUPPORTED)}.",
        )
        return dequantise(self.raw, self.kind).reshape(self.shape)

    def tensor(self) -> Tensor:
        """The same for torch."""
        return torch.from_numpy(self.numpy())


@dataclass(frozen=True)
class GGUF:
    """A file's settings and tensors."""

    metadata: dict[str, Any]
    """Its settings: "general.architecture", "llama.block_count", "tokenizer.ggml.tokens", ..."""
    tensors: dict[str, GGUFTensor]
    """Its tensors by name, in the order of the file."""
    path: Path
    """Where it is."""


def read_gguf(path: str | Path) -> GGUF:
    """All settings and tensors of a file; the tensors stay in it until they are asked for."""
    path = Path(path)
    require(not os.path.isdir(path), f"{path} is a folder: a GGUF model is one file.")
    require(os.path.isfile(path), f"There is no file {path}: check the path.")
    try:
        with path.open("rb") as file:
            require(file.read(4) == MAGIC, _not_gguf(path))
            # A private copy on write, so that torch may have the numbers as they lie there.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read: {error.strerror or error}.") from error
    return _Reader(data, path).file()


def _not_gguf(path: Path) -> str:
    return f'{path} is not a GGUF file (those begin with "GGUF"): check what was downloaded.'


class _Reader:
    """A place in the file that only moves forward, and never beyond the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size = data, path, len(data)
        self.at = len(MAGIC)
        self.items = 0

    def file(self) -> GGUF:
        version = self.number("<I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "for big-endian machines" if swapped else f"of version {version}"
            raise ClearheadError(
                f"{self.path} is a GGUF file {what}; versions 2 and 3, little-endian, are read "
                "here. Convert the model again with today's llama.cpp."
            )
        n_tensors = self.count("tensors", least=32)
        n_settings = self.count("settings", least=13)
        metadata: dict[str, Any] = {}
        for _ in range(n_settings):
            key = self.text("the name of a setting", MOST_KEY)
            require(key not in metadata, self.damaged(f'the setting "{key}" is there twice'))
            metadata[key] = self.value(self.number("<I", key), key)
        return GGUF(metadata, self.tensors(n_tensors, self.alignment(metadata)), self.path)

    def damaged(self, what: str) -> str:
        return (
            f"{self.path} is not a whole GGUF file: {what}. It is truncated, damaged or made to "
            "mislead: download or convert it again."
        )

    def fail(self, what: str) -> ClearheadError:
        return ClearheadError(self.damaged(what))

    def skip(self, length: int, what: str) -> int:
        """Move on by so many bytes, all of which must be there; where they begin."""
        start = self.at
        if length > self.size - start:
            raise self.fail(f"{what} would end beyond the end of the file")
        self.at = start + length
        return start

    def number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form), what))[0]

    def count(self, what: str, least: int) -> int:
        """How many of something, of which each takes at least so many bytes of what is left."""
        count = self.number("<Q", f"the number of {what}")
        if count * least > self.size - self.at:
            raise self.fail(f"it says it has {count} {what}, more than there is room for")
        self.items += count
        if self.items > MOST_ITEMS:
            raise ClearheadError(
                f"{self.path} says it has {count} {what}: with more than {MOST_ITEMS} entries it "
                "is no model that can be read here."
            )
        return count

    def text(self, what: str, most: int | None = None) -> str:
        """A text; with `most` it is a name: of so many bytes at most, and not empty."""
        length = self.number("<Q", f"the length of {what}")
        if most is not None and length > most:
            raise self.fail(f"{what} is {length} bytes long, more than {most}")
        start = self.skip(length, what)
        if most is not None and length == 0:
            raise self.fail(f"{what} is empty")
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 text") from error

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == TEXT:
            return self.text(key)
        if kind == LIST:
            return self.many(key, depth + 1)
        if kind not in SCALARS:
            raise self.fail(f"{key} is of the unknown type {kind}")
        number = self.number(SCALARS[kind], key)
        return self.truth(number, key) if kind == BOOL else number

    def many(self, key: str, depth: int) -> list[Any]:
        if depth > MOST_NESTING:
            raise self.fail(f"{key} is a list in a list more than {MOST_NESTING} deep")
        kind = self.number("<I", key)
        form = SCALARS.get(kind)
        least = struct.calcsize(form) if form else 8 if kind == TEXT else 12
        count = self.count(f"entries in {key}", least)
        if form is None:
            return [self.value(kind, key, depth) for _ in range(count)]
        start = self.skip(count * least, key)
        numbers = np.frombuffer(self.data, form, count, start).tolist()
        return [self.truth(number, key) for number in numbers] if kind == BOOL else numbers

    def truth(self, number: int, key: str) -> bool:
        if number > 1:
            raise self.fail(f"{key} is {number}, which is neither true (1) nor false (0)")
        return number == 1

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", ALIGNMENT)
        require(
            type(value) is int and 0 < value <= 1 << 30 and value & (value - 1) == 0,
            self.damaged(f"general.alignment is {value!r}, not a power of two"),
        )
        return value

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self.text("the name of a tensor", MOST_NAME)
            require(name not in entries, self.damaged(f"the tensor {name} is there twice"))
            entries[name] = self.entry(name)
        start = -(-self.at // alignment) * alignment
        self.check_places(entries, start, alignment)
        tensors = {}
        for name, (shape, number, offset) in entries.items():
            length = nbytes_of(shape, number)
            raw = np.frombuffer(self.data, np.uint8, length, start + offset)
            tensors[name] = GGUFTensor(name, shape, KINDS[number].name, raw)
        return tensors

    def entry(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Shape, number format and offset of a tensor."""
        dims = self.number("<I", name)
        if not 1 <= dims <= MOST_DIMS:
            raise self.fail(f"the tensor {name} has {dims} dimensions, not 1 to {MOST_DIMS}")
        shape = tuple(self.number("<Q", name) for _ in range(dims))[::-1]
        number, offset = self.number("<I", name), self.number("<Q", name)
        if number not in KINDS:
            raise ClearheadError(
                f"The tensor {name} in {self.path} is of the unknown number format {number}. "
                f"Supported: {', '.join(SUPPORTED)}."
            )
        kind = KINDS[number]
        if min(shape) < 1 or shape[-1] % kind.numbers:
            raise self.fail(
                f"the tensor {name} has the shape {list(shape)}, but {kind.name} comes in rows of "
                f"whole blocks of {kind.numbers}"
            )
        return shape, number, offset

    def check_places(
        self, entries: Mapping[str, tuple[tuple[int, ...], int, int]], start: int, alignment: int
    ) -> None:
        """Every tensor lies in the file, aligned, and none upon another."""
        end, last = 0, ""
        for name, (shape, number, offset) in sorted(entries.items(), key=lambda e: e[1][2]):
            if offset % alignment:
                raise self.fail(f"the tensor {name} is not aligned to {alignment} bytes")
            if offset < end:
                raise self.fail(f"the tensors {last} and {name} lie upon each other")
            end, last = offset + nbytes_of(shape, number), name
            if start + end > self.size:
                raise self.fail(
                    f"the tensor {name} of shape {list(shape)} would end beyond the end of the file"
                )


def nbytes_of(shape: tuple[int, ...], number: int) -> int:
    """Bytes of a tensor; Python's whole numbers do not overflow."""
    kind = KINDS[number]
    return math.prod(shape) // kind.numbers * kind.nbytes
