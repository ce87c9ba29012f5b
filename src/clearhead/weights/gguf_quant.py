"""The number formats of a GGUF file, and what they stand for in fp32.

A quantised tensor is a row of blocks. A block holds small whole numbers q and what they are
multiplied by; x is

    Q8_0               scale * q                                                  32 numbers
    Q4_0, Q5_0         scale * (q - half)                                         32
    Q4_1, Q5_1         scale * q + least                                          32
    Q4_K, Q5_K         (scale * s) * q - (least * m), s and m for each 32         256
    Q6_K               (scale * s) * (q - 32), s for each 16                      256

The layouts are ggml's (ggml-common.h in llama.cpp). The low four bits of a byte come before its
high four, not beside them: byte j holds numbers j and j + (as many as there are bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import ClearheadError, require

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK = 1 << 20  # numbers decoded at a time, so that the intermediate steps stay small


@dataclass(frozen=True)
class Kind:
    """A number format: how many numbers a block has and how many bytes it takes."""

    name: str
    """ggml's name."""
    numbers: int
    """Numbers in a block."""
    nbytes: int
    """Bytes of a block."""


# By its number in the file. Of those that cannot be decoded here the size is known all the same,
# so that a file is checked whole.
KINDS: dict[int, Kind] = {
    number: Kind(name, numbers, nbytes)
    for number, name, numbers, nbytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
NUMBERS = {kind.name: number for number, kind in KINDS.items()}

_HALF = "<f2"
LAYOUTS: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype(_HALF),
    "BF16": np.dtype("<u2"),
    "Q8_0": np.dtype([("scale", _HALF), ("q", "i1", 32)]),
    "Q4_0": np.dtype([("scale", _HALF), ("q", "u1", 16)]),
    "Q4_1": np.dtype([("scale", _HALF), ("least", _HALF), ("q", "u1", 16)]),
    "Q5_0": np.dtype([("scale", _HALF), ("high", "u1", 4), ("q", "u1", 16)]),
    "Q5_1": np.dtype([("scale", _HALF), ("least", _HALF), ("high", "u1", 4), ("q", "u1", 16)]),
    "Q4_K": np.dtype([("scale", _HALF), ("least", _HALF), ("s", "u1", 12), ("q", "u1", 128)]),
    "Q5_K": np.dtype(
        [("scale", _HALF), ("least", _HALF), ("s", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)]
    ),
    "Q6_K": np.dtype([("q", "u1", 128), ("high", "u1", 64), ("s", "i1", 16), ("scale", _HALF)]),
}
SUPPORTED = tuple(LAYOUTS)


def dequantise(raw: Bytes, kind: str) -> Floats:
    """The numbers of these bytes (whole blocks) in fp32; F32 itself is not copied."""
    require(
        kind in LAYOUTS,
        f"The number format {kind} cannot be decoded here. Supported: {', '.join(SUPPORTED)}.",
    )
    blocks = raw.view(LAYOUTS[kind])
    if kind == "F32":
        return blocks
    numbers = KINDS[NUMBERS[kind]].numbers
    out = np.empty(len(blocks) * numbers, np.float32)
    step = _CHUNK // numbers
    with np.errstate(all="ignore"):  # an infinite scale is the file's, not an accident of ours
        for start in range(0, len(blocks), step):
            part = _DECODERS[kind](blocks[start : start + step])
            out[start * numbers : start * numbers + part.size] = part.reshape(-1)
    return out


def quantise(numbers: Floats, kind: str) -> Bytes:
    """The bytes of these numbers as F32, F16 or Q8_0 (then their count divides by 32)."""
    if kind == "F32":
        return np.ascontiguousarray(numbers, "<f4").reshape(-1).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "F16":
            half = np.ascontiguousarray(numbers).astype(_HALF).reshape(-1)
        elif kind == "Q8_0":
            blocks = np.ascontiguousarray(numbers).reshape(-1, 32)
            scale = np.abs(blocks).max(axis=1) / np.float32(127)
            half = scale.astype(_HALF)
        else:
            raise ClearheadError(f"Numbers are written as F32, F16 or Q8_0, not as {kind}.")
    require(
        bool(np.isfinite(half).all()),
        f"Some numbers are too large for {kind} (beyond 65504), or are no numbers at all.",
    )
    return half.view(np.uint8) if kind == "F16" else _q8_0(blocks, scale, half)


def _q8_0(blocks: Floats, scale: Floats, half: NDArray[np.float16]) -> Bytes:
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    exact = blocks * inverse[:, None]
    # Halves go away from zero, as in ggml; numpy's own rounding takes them to the even neighbour.
    whole = np.floor(np.abs(exact))
    packed = np.empty(len(blocks), LAYOUTS["Q8_0"])
    packed["scale"] = half
    packed["q"] = np.sign(exact) * (whole + (np.abs(exact) - whole >= 0.5))
    return packed.view(np.uint8)


_FOUR = np.uint8(4)


def _float(part: NDArray) -> Floats:
    """A number for each block, ready to be multiplied with what the block holds."""
    return part.astype(np.float32)[:, None]


def _nibbles(q: Bytes) -> Bytes:
    """[..., n] -> [..., 2, n]: all the low halves, then all the high ones."""
    return np.stack((q & 15, q >> 4), axis=-2)


def _five_bits(blocks: NDArray) -> Bytes:
    """[n, 32]: four bits from `q`, the fifth from `high`."""
    fifth = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    return _nibbles(blocks["q"]).reshape(-1, 32) | (fifth << _FOUR)


def _six_bits(s: Bytes) -> tuple[Floats, Floats]:
    """The eight s and the eight m that twelve bytes hold, six bits each, [n, 8, 1]."""
    a, b, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate((a & 63, (c & 15) | (a >> 6 << 4)), axis=1)
    leasts = np.concatenate((b & 63, (c >> 4) | (b >> 6 << 4)), axis=1)
    return scales.astype(np.float32)[:, :, None], leasts.astype(np.float32)[:, :, None]


def _bf16(blocks: NDArray) -> Floats:
    return (blocks.astype(np.uint32) << 16).view(np.float32)


def _q4_k(blocks: NDArray, high: Bytes | int = 0) -> Floats:
    q = _nibbles(blocks["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32) | high
    s, m = _six_bits(blocks["s"])
    return _float(blocks["scale"])[..., None] * s * q - _float(blocks["least"])[..., None] * m


def _q5_k(blocks: NDArray) -> Floats:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth: Bytes = (blocks["high"][:, None, :] >> bits) & np.uint8(1)
    return _q4_k(blocks, fifth << _FOUR)


def _q6_k(blocks: NDArray) -> Floats:
    low = _nibbles(blocks["q"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks["high"].reshape(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).astype(np.int8).reshape(-1, 16, 16) - 32
    return (_float(blocks["scale"]) * blocks["s"])[:, :, None] * q.astype(np.float32)


_DECODERS: dict[str, Callable[[NDArray], NDArray]] = {
    "F16": lambda b: b.astype(np.float32),
    "BF16": _bf16,
    "Q8_0": lambda b: _float(b["scale"]) * b["q"],
    "Q4_0": lambda b: _float(b["scale"]) * (_nibbles(b["q"]).reshape(-1, 32).astype(np.int8) - 8),
    "Q4_1": lambda b: _float(b["scale"]) * _nibbles(b["q"]).reshape(-1, 32) + _float(b["least"]),
    "Q5_0": lambda b: _float(b["scale"]) * (_five_bits(b).astype(np.int8) - 16),
    "Q5_1": lambda b: _float(b["scale"]) * _five_bits(b) + _float(b["least"]),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
