"""Writing a GGUF file, whole or not at all: see gguf_file.py for what one looks like."""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.weights.gguf_file import (
    ALIGNMENT,
    BOOL,
    LIST,
    MAGIC,
    MOST_DIMS,
    MOST_NAME,
    SCALARS,
    TEXT,
    VERSIONS,
    nbytes_of,
)
from clearhead.weights.gguf_quant import KINDS, NUMBERS, quantise


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, str] | None = None,
) -> None:
    """Write a file, whole or not at all: settings and tensors, each in the number format that
    `kinds` names for it ("F32", "F16", "Q8_0"; F32 where it names none).

    A whole number becomes uint32 where it fits, a fraction float32, a list the smallest of int32
    and int64, float32, bool or text that holds all of it.
    """
    path, kinds = Path(path), kinds or {}
    require(not os.path.isdir(path), f"{path} is a folder: choose the name of a file.")
    chosen = {name: kinds.get(name, "F32") for name in tensors}
    _check_tensors(tensors, chosen)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    require(
        type(alignment) is int and alignment >= 8 and alignment & (alignment - 1) == 0,
        f"general.alignment must be a power of two of at least 8, not {alignment!r}.",
    )
    head = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    head += [_packed_text(key) + _packed(value, key) for key, value in metadata.items()]
    offset = 0
    for name, tensor in tensors.items():
        number, shape = NUMBERS[chosen[name]], tuple(tensor.shape)
        form = f"<I{len(shape)}QIQ"
        head += [_packed_text(name), struct.pack(form, len(shape), *shape[::-1], number, offset)]
        offset += -(-nbytes_of(shape, number) // alignment) * alignment
    with _whole_file(path) as file:
        _write(file, b"".join(head), alignment)
        for name, tensor in tensors.items():
            _write(file, _encoded(name, tensor, chosen[name]), alignment)


def _check_tensors(tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> None:
    for name, tensor in tensors.items():
        kind = kinds[name]
        require(
            kind in ("F32", "F16", "Q8_0"),
            f"{name} cannot be written as {kind!r}: choose F32, F16 or Q8_0.",
        )
        require(
            len(name.encode()) < MOST_NAME,
            f'The name "{name}" is too long: llama.cpp takes names below {MOST_NAME} bytes.',
        )
        shape = list(tensor.shape)
        require(
            1 <= len(shape) <= MOST_DIMS and min(shape) >= 1,
            f"{name} of shape {shape} cannot be written: GGUF has 1 to {MOST_DIMS} dimensions, "
            "none of them empty.",
        )
        block = KINDS[NUMBERS[kind]].numbers
        require(
            shape[-1] % block == 0,
            f"{name} has rows of {shape[-1]}, which {kind} cannot hold: it takes whole blocks of "
            f"{block}. Write it as F16.",
        )


def _encoded(name: str, tensor: Tensor, kind: str) -> memoryview:
    numbers = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    try:
        return quantise(numbers, kind).data
    except ClearheadError as error:
        raise ClearheadError(f"{name} cannot be written as {kind}. {error}") from error


def _write(file: BinaryIO, data: bytes | memoryview, alignment: int) -> None:
    file.write(data)
    file.write(b"\0" * (-len(data) % alignment))


def _packed_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _packed(value: Any, key: str) -> bytes:
    """A setting's type and value."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()  # Python's own numbers
    if isinstance(value, (list, tuple)):
        kind = _list_kind(value, key)
        return struct.pack("<IIQ", LIST, kind, len(value)) + b"".join(
            _payload(item, kind, key) for item in value
        )
    kind = _scalar_kind(value, key)
    return struct.pack("<I", kind) + _payload(value, kind, key)


def _payload(value: Any, kind: int, key: str) -> bytes:
    try:
        return _packed_text(value) if kind == TEXT else struct.pack(SCALARS[kind], value)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise ClearheadError(
            f"{key} = {value!r} cannot be written into a GGUF file: {error}."
        ) from error


def _scalar_kind(value: Any, key: str) -> int:
    """The number of the type that a value is written as."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, str):
        return TEXT
    if isinstance(value, float):
        return 6
    if isinstance(value, int):
        if value < 0:
            return 5 if value >= -(1 << 31) else 11
        return 4 if value < 1 << 32 else 10
    raise ClearheadError(
        f"{key} = {value!r} cannot be written into a GGUF file: it takes numbers, texts, true and "
        "false, and lists of one of them."
    )


def _list_kind(values: list[Any] | tuple[Any, ...], key: str) -> int:
    kinds = {_scalar_kind(value, key) for value in values}
    whole = {4, 5, 10, 11}
    if kinds <= whole:  # llama.cpp reads lists of whole numbers as int32
        return 5 if all(-(1 << 31) <= value < 1 << 31 for value in values) else 11
    if len(kinds) > 1 and kinds <= whole | {6}:
        return 6
    require(len(kinds) == 1, f"{key} mixes texts, numbers or truths in one list: choose one kind.")
    return kinds.pop()


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that is written beside its place and takes it when it is complete."""
    new = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise ClearheadError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            new.unlink()
