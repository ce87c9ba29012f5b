"""Weights in fewer bits, and back: the slow twin of every fast product.

    fp32   as they are                                            32   bits a weight
    bf16   the upper 16 bits, rounded                             16
    int8   w = scale * q, q from -127 to 127, a scale a row        8      (how they lie: `integers`)
    int4   w = scale * q + low, q from 0 to 15, two to a byte      5

Scale and low of int4 are bf16 numbers, the upper and the lower half of 32 bits. They are those of a
few candidates with the smallest squared error in their group of 32. Rows are filled with zeros up
to a whole number of groups (int4) or of 64 (int8, and 64 rows to a block).

A product with int8 rounds x, too, in groups of 64 numbers (`as_read`): then it is one of whole
numbers.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

Form = Literal["fp32", "bf16", "int8", "int4"]
FORMS: tuple[Form, ...] = ("fp32", "bf16", "int8", "int4")
GROUP = 32  # weights that share a scale
MANY = 32  # rows of x; up to here products take W in strips, from there on in panels
# int8: the number that is added to codes; numbers of x that share a scale; rows of a block, and
# weights of each that stand together; what the length of a row is filled up to a multiple of.
OFFSET, READ, BESIDE, QUAD, WIDTH = 128, 64, 64, 4, 64
assert WIDTH % READ == 0  # no group of x goes over the end of a row
TINY = 1e-30  # a group of x without a larger number is 0: 127 / it would not be finite
BLOCK = 2**22  # weights that are worked on at a time

# int4: how far the ends of a group's range are drawn in, as parts of it, each end by itself.
DRAWN_IN = (0.0, 0.04, 0.08, 0.12, 0.16, 0.2)


def pack(weight: Float[Tensor, "n k"], form: Form) -> tuple[Tensor, Tensor]:
    """The stored weights and their scales [n, groups] (none: [n, 0])."""
    weight = weight.detach().float()
    if form in ("fp32", "bf16"):
        stored = weight if form == "fp32" else weight.bfloat16()
        return stored.contiguous(), weight.new_empty(len(weight), 0)
    rows = max(BLOCK // max(weight.shape[1], 1) // BESIDE, 1) * BESIDE
    parts = [_pack_rows(part, form) for part in weight.split(rows)]
    stored, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return stored, scales


def unpack(stored: Tensor, scales: Tensor, form: Form, k: int) -> Float[Tensor, "n k"]:
    """The weights in fp32, k to a row."""
    if form in ("fp32", "bf16"):
        return stored.float()
    if form == "int8":
        quads = stored.unflatten(1, (-1, BESIDE, QUAD)).transpose(1, 2)  # [blocks, 64, k / 4, 4]
        rows = quads.reshape(stored.shape[0] * BESIDE, -1)
        return (rows[: len(scales), :k].float() - OFFSET) * scales
    pairs = stored.unflatten(1, (-1, GROUP // 2))
    whole = torch.cat((pairs & 15, pairs >> 4), dim=2).float()
    scale, low = _split(scales)
    return (whole * scale.unsqueeze(2) + low.unsqueeze(2)).flatten(1)[:, :k]


def as_read(x: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """x as a product with int8 takes it: 64 numbers of a row rounded to 255 steps."""
    k = x.shape[-1]
    groups = F.pad(x.float(), (0, -k % READ)).unflatten(-1, (-1, READ))
    most = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(
        most < TINY, 0.0, torch.full_like(most, 127) / most
    )  # (not 127 * (1 / most))
    return ((groups * steps).round() * (most / 127)).flatten(-2)[..., :k].to(x.dtype)


def scratch_bytes(m: int, k: int) -> int:
    """Room for m rows of x as whole numbers, and for the scale of each group."""
    width = -(-k // WIDTH) * WIDTH
    facts = -(-width // READ) * 8
    return m * (width + -(-facts // WIDTH) * WIDTH)


def plain_product(
    x: Float[Tensor, "*b k"], stored: Tensor, scales: Tensor, form: Form, bias: Tensor | None
) -> Float[Tensor, "*b n"]:
    """x W^T + b, by unpacking: what the compiled products are compared with."""
    x = as_read(x) if form == "int8" else x
    return F.linear(x, unpack(stored, scales, form, x.shape[-1]).to(x.dtype), bias)


def stored_as(form: Form, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
    """Type and shape of what `pack` gives for a matrix of this shape."""
    groups = -(-k // GROUP)
    return {
        "fp32": {"weight": (torch.float32, (n, k))},
        "bf16": {"weight": (torch.bfloat16, (n, k))},
        "int8": {
            "weight": (torch.uint8, (-(-n // BESIDE), -(-k // WIDTH) * WIDTH * BESIDE)),
            "scales": (torch.float32, (n, 1)),
        },
        "int4": {
            "weight": (torch.uint8, (n, groups * GROUP // 2)),
            "scales": (torch.int32, (n, groups)),
        },
    }[form]


def _pack_rows(weight: Float[Tensor, "n k"], form: Form) -> tuple[Tensor, Tensor]:
    if form == "int8":
        scales = weight.abs().amax(dim=1) / 127
        q = codes(weight, scales, 127)
        q = F.pad(q, (0, -q.shape[1] % WIDTH, 0, -len(q) % BESIDE)) + OFFSET
        blocks = q.to(torch.uint8).unflatten(0, (-1, BESIDE)).unflatten(2, (-1, QUAD))
        return blocks.transpose(1, 2).flatten(1), scales.unsqueeze(1)
    groups = -(-weight.shape[1] // GROUP)
    w = F.pad(weight, (0, groups * GROUP - weight.shape[1])).unflatten(1, (groups, GROUP))
    scale, low = find_range(w)
    q = codes(w - low.unsqueeze(2), scale, 15, 0)
    return pair_up(q), joined(scale, low)


def codes(w: Tensor, scale: Tensor, high: int, low: int | None = None) -> Tensor:
    """The whole numbers nearest to w / scale, from low (-high) to high."""
    steps = torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(-1)
    return (w * steps).round().clamp(-high if low is None else low, high)


def pair_up(q: Float[Tensor, "n g size"]) -> UInt8[Tensor, "n bytes"]:
    """Two codes of int4 to a byte: those of a group's first half below, of its second above."""
    first, second = q.to(torch.uint8).split(GROUP // 2, dim=2)
    return (first | (second << 4)).flatten(1)


def find_range(
    w: Float[Tensor, "n g size"], counts: Float[Tensor, " size"] | None = None
) -> tuple[Float[Tensor, "n g"], Float[Tensor, "n g"]]:
    """(scale, low) of every group for int4: of some ranges the one with the smallest error, each
    column counted as said.
    """
    least, most = w.amin(dim=2), w.amax(dim=2)
    width = most - least
    best = torch.full_like(least, torch.finfo(least.dtype).max)
    scales, lows = torch.zeros_like(least), torch.zeros_like(least)
    for below, above in itertools.product(DRAWN_IN, DRAWN_IN):
        scale = _rounded(width * (1 - below - above) / 15)
        low = _rounded(least + width * below)
        found = codes(w - low.unsqueeze(2), scale, 15, 0) * scale.unsqueeze(2) + low.unsqueeze(2)
        error = (found - w).square()
        error = error.sum(dim=2) if counts is None else error @ counts
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        lows = torch.where(better, low, lows)
    return scales, lows


def joined(scale: Float[Tensor, "*n"], low: Float[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Two numbers that are bf16 as one of 32 bits."""
    return scale.view(torch.int32) | (low.view(torch.int32) >> 16 & 0xFFFF)


def _split(both: Int[Tensor, "*n"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    return (both >> 16 << 16).view(torch.float32), (both << 16).view(torch.float32)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def look_up_rows(
    stored: Tensor, scales: Tensor, form: Form, k: int, ids: Int[Tensor, "*b"]
) -> Float[Tensor, "*b k"]:
    """Some rows of the weights in fp32."""
    flat = ids.flatten()
    if form == "int8":
        quads = stored.unflatten(1, (-1, BESIDE, QUAD))[flat // BESIDE, :, flat % BESIDE]
        found = (quads.flatten(1)[:, :k].float() - OFFSET) * scales.index_select(0, flat)
        return found.unflatten(0, ids.shape)
    stored, scales = stored.index_select(0, flat), scales.index_select(0, flat)
    return unpack(stored, scales, form, k).unflatten(0, ids.shape)
