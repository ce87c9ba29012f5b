"""Weights in fewer bits, and back: the slow twin of every fast product.

    fp32   as they are                                            32   bits a weight
    bf16   the upper 16 bits, rounded                             16
    int8   w = scale * q, q from -127 to 127, a scale a row        8      (how they lie: `integers`)
    int4   w = scale * q + low, q from 0 to 15                     5      (how they lie: `nibbles`)

Scale and low of int4 are bf16 numbers, the upper and the lower half of 32 bits. They are those of a
few candidates with the smallest squared error in their group of 32. Rows are filled with zeros up
to a whole number of groups (int4) or of 64 (int8), and there are 64 of them to a block.

A product with int8 or int4 rounds x, too, in groups of 64 or 32 numbers (`as_read`): then it is one
of whole numbers.
"""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Form = Literal["fp32", "bf16", "int8", "int4"]
FORMS: tuple[Form, ...] = ("fp32", "bf16", "int8", "int4")
GROUP = 32  # weights that share a scale
STRIP = 4  # rows of W that fp32 and bf16 work on together: no product has fewer
MANY = 32  # rows of x; up to here products take W in strips, from there on in panels
WHOLE: tuple[Form, ...] = ("int8", "int4")  # whose products are of whole numbers
READ = {
    "int8": 64,
    "int4": GROUP,
}  # numbers of x that share a scale: a row has whole groups of them
BESIDE, QUAD = 64, 4  # rows of a block, and bytes of each that stand together
OFFSET = 128  # int8: what is added to codes
WORDS = (
    1 + GROUP // 8
)  # int4: of 32 bits, that a group of a row has: its scale and low, 8 codes each
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
    return _of_words(_rows_of_words(stored).flatten(0, 1)[: len(scales)], k)


def as_read(x: Float[Tensor, "*b k"], form: Form) -> Float[Tensor, "*b k"]:
    """x as a product with weights of this form takes it: some numbers of a row together rounded to
    255 steps.
    """
    if form not in WHOLE:
        return x
    k, size = x.shape[-1], READ[form]
    groups = F.pad(x.float(), (0, -k % size)).unflatten(-1, (-1, size))
    most = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(
        most < TINY, 0.0, torch.full_like(most, 127) / most
    )  # (not 127 * (1 / most))
    return ((groups * steps).round() * (most / 127)).flatten(-2)[..., :k].to(x.dtype)


def scratch_bytes(m: int, k: int) -> int:
    """Room for m rows of x as whole numbers, and for the facts of each group."""
    least, most = min(READ.values()), max(READ.values())
    facts = -(-k // least) * 8
    return m * (-(-k // most) * most + -(-facts // BESIDE) * BESIDE)


def plain_product(
    x: Float[Tensor, "*b k"], stored: Tensor, scales: Tensor, form: Form, bias: Tensor | None
) -> Float[Tensor, "*b n"]:
    """x W^T + b, by unpacking: what the compiled products are compared with."""
    weight = unpack(stored, scales, form, x.shape[-1])
    return F.linear(as_read(x, form), weight.to(x.dtype), bias)


def stored_as(form: Form, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
    """Type and shape of what `pack` gives for a matrix of this shape."""
    blocks = -(-n // BESIDE)
    return {
        "fp32": {"weight": (torch.float32, (n, k))},
        "bf16": {"weight": (torch.bfloat16, (n, k))},
        "int8": {
            "weight": (torch.uint8, (blocks, -(-k // READ["int8"]) * READ["int8"] * BESIDE)),
            "scales": (torch.float32, (n, 1)),
        },
        "int4": {"weight": (torch.int32, (blocks, -(-k // GROUP) * WORDS * BESIDE))},
    }[form]


def _pack_rows(weight: Float[Tensor, "n k"], form: Form) -> tuple[Tensor, Tensor]:
    if form == "int8":
        scales = weight.abs().amax(dim=1) / 127
        q = codes(weight, scales, 127)
        q = F.pad(q, (0, -q.shape[1] % READ["int8"], 0, -len(q) % BESIDE)) + OFFSET
        blocks = q.to(torch.uint8).unflatten(0, (-1, BESIDE)).unflatten(2, (-1, QUAD))
        return blocks.transpose(1, 2).flatten(1), scales.unsqueeze(1)
    groups = -(-weight.shape[1] // GROUP)
    w = F.pad(weight, (0, groups * GROUP - weight.shape[1])).unflatten(1, (groups, GROUP))
    scale, low = find_range(w)
    q = codes(w - low.unsqueeze(2), scale, 15, 0)
    return in_blocks(q, scale, low), weight.new_empty(len(weight), 0)


def codes(w: Tensor, scale: Tensor, high: int, low: int | None = None) -> Tensor:
    """The whole numbers nearest to w / scale, from low (-high) to high."""
    steps = torch.where(scale == 0, 0.0, 1 / scale).unsqueeze(-1)
    return (w * steps).round().clamp(-high if low is None else low, high)


def in_blocks(
    q: Float[Tensor, "n g size"], scale: Float[Tensor, "n g"], low: Float[Tensor, "n g"]
) -> Int[Tensor, "blocks words"]:
    """Codes of int4, and what they are codes of, as they are stored.

    [block, group, word, row]: word 0 is scale and low; in the next ones a byte has codes i and
    i + 4 of eight, the first one below.
    """
    eights = q.to(torch.uint8).unflatten(2, (-1, 2, QUAD))  # [n, g, 4, 2, 4]
    pairs = (eights[..., 0, :] | (eights[..., 1, :] << 4)).contiguous()
    both = scale.view(torch.int32) | (low.view(torch.int32) >> 16 & 0xFFFF)
    words = torch.cat((both.unsqueeze(2), pairs.view(torch.int32).squeeze(3)), dim=2)
    words = F.pad(words, (0, 0, 0, 0, 0, -len(words) % BESIDE)).unflatten(0, (-1, BESIDE))
    return words.permute(0, 2, 3, 1).flatten(1)


def _rows_of_words(stored: Int[Tensor, "blocks all"]) -> Int[Tensor, "blocks rows g words"]:
    """The words of each row."""
    return stored.view(len(stored), -1, WORDS, BESIDE).permute(0, 3, 1, 2)


def _of_words(words: Int[Tensor, "n g words"], k: int) -> Float[Tensor, "n k"]:
    """The weights of some rows."""
    scale, low = _split(words[:, :, 0])
    pairs = words[:, :, 1:].contiguous().view(torch.uint8).unflatten(2, (-1, 1, QUAD))
    whole = torch.cat((pairs & 15, pairs >> 4), dim=3).flatten(2).float()
    return (whole * scale.unsqueeze(2) + low.unsqueeze(2)).flatten(1)[:, :k]


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


def _split(both: Int[Tensor, "*n"]) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    return (both >> 16 << 16).view(torch.float32), (both << 16).view(torch.float32)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def look_up_rows(
    stored: Tensor, scales: Tensor, form: Form, k: int, ids: Int[Tensor, "*b"]
) -> Float[Tensor, "*b k"]:
    """Some rows of the weights in fp32."""
    flat = ids.flatten()
    if form == "int8" and stored.is_cpu:
        return _look_up_here(stored, scales, k, flat).view(*ids.shape, k)
    if form == "int8":
        quads = stored.view(torch.int32).view(len(stored), -1, BESIDE)
        found = quads.transpose(1, 2)[flat // BESIDE, flat % BESIDE].view(torch.uint8)
        found = (found[:, :k].float() - OFFSET) * scales.index_select(0, flat)
        return found.view(*ids.shape, k)
    if form == "int4":
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < len(scales):
            raise IndexError("index out of range in self")  # as torch says it
        found = _of_words(_rows_of_words(stored)[flat // BESIDE, flat % BESIDE], k)
        return found.view(*ids.shape, k)
    return stored.index_select(0, flat).float().view(*ids.shape, k)


def _look_up_here(
    stored: Tensor, scales: Float[Tensor, "n 1"], k: int, ids: Int[Tensor, " i"]
) -> Float[Tensor, "i k"]:
    """Some rows of int8 by NumPy, whose calls take a fifth of the time: a step looks up one row."""
    at = ids.numpy()
    if at.size and int(at.min()) < 0:
        raise IndexError("index out of range in self")  # as torch says it
    quads = stored.numpy().view(np.int32).reshape(len(stored), -1, BESIDE)
    found = np.ascontiguousarray(quads[at // BESIDE, :, at % BESIDE]).view(np.uint8)
    rows = found[:, :k].astype(np.float32)
    rows -= OFFSET
    rows *= scales.numpy()[at]
    return torch.from_numpy(rows)
