"""What the choice among many tokens needs to know of each row of logits, in one go."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.fast import compile as compiled

LANES = 16  # of the widest vector
LEAST = 2**15  # numbers that are worth a call


def peaks(
    x: Float[Tensor, "n v"], part: int
) -> tuple[Float[Tensor, "n parts"], Float[Tensor, "n 1"]] | None:
    """The largest number of every whole part of a row, and log sum exp of the row; None where there
    is no compiled code for it, or nothing but -inf in a row. The slow twins: amax, logsumexp.
    """
    if (
        not x.is_cpu
        or x.dtype != torch.float32
        or x.numel() < LEAST
        or x.shape[1] < part
        or part % LANES
        or not x.is_contiguous()
        or not compiled.available()
    ):
        return None
    rows, width = x.shape
    tops, sums = x.new_empty((rows, width // part + 1)), x.new_empty((rows, 1))
    ends = sums.data_ptr(), width, rows, part, compiled.threads(), 0
    compiled.steps()["peaks"](x.data_ptr(), tops.data_ptr(), 0, 0, *ends)
    top = tops[:, -1:]
    if bool(top.isneginf().any()):  # nothing to compare with
        return None
    return tops[:, :-1], top + sums.log()
