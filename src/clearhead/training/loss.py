"""Losses: sums over what is asked, so that parts of a batch add up to the whole.

tokens       cross-entropy of ids, with label smoothing: (1 - e) on the right one, e spread evenly
label        the same, one a text;  tags: one a word;  span: where an answer starts, and ends
similarity   squared error of the cosine of two texts against their score in [0, 1]
contrast     the cosine of a pair against those of all other pairs of the batch, both ways
             (Henderson et al. 2017; temperature 0.05)

The loss of a step is the sum over all its batches, in all processes, divided by how many targets
were asked for. Then 4 batches of 2 are one of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.batch import IGNORED, Batch
from clearhead.errors import require
from clearhead.training.rdrop import rdrop_loss

TEMPERATURE = 0.05


class _CrossEntropy(torch.autograd.Function):
    """F.cross_entropy summed, whose backward pass works in the memory of its forward pass.

    The gradient of the logits is softmax - (1 - e) [right] - e / v. PyTorch makes it of four arrays
    as large as the logits; here it is one, and a step of a small model with many words is a tenth
    faster.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        logs = logits.log_softmax(-1)
        asked = targets != IGNORED
        right = targets.clamp(min=0).unsqueeze(1)
        loss = -(1.0 - smoothing) * logs.gather(1, right).squeeze(1)
        if smoothing:
            loss -= smoothing / logits.shape[-1] * logs.sum(dim=-1)
        ctx.save_for_backward(asked, right)
        ctx.logs, ctx.smoothing = logs, smoothing  # not saved for others: it is overwritten
        return (loss * asked).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        asked, right = ctx.saved_tensors
        logs, smoothing = ctx.logs, ctx.smoothing
        ctx.logs = None  # a second backward pass would find it changed
        found = logs.exp_()
        if smoothing:
            found -= smoothing / logs.shape[-1]
        found.scatter_add_(1, right, torch.full_like(found[:, :1], smoothing - 1.0))
        return found.mul_((grad * asked).unsqueeze(1)), None, None


def token_loss(output: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum of cross-entropies [.., v] against ids [..]."""
    logits, asked = output.reshape(-1, output.shape[-1]), targets.reshape(-1)
    if logits.dtype in (torch.bfloat16, torch.float16):  # a sum of thousands has no digits there
        logits = logits.float()
    if torch.compiler.is_compiling() or not logits.requires_grad:
        return slow_token_loss(logits, asked, smoothing)
    return _CrossEntropy.apply(logits, asked, smoothing)


def slow_token_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The same by PyTorch's own function."""
    return F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )


def span_loss(output: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Start and end, each a choice among the slots: output [b, t, 2], targets [b, 2]."""
    ends = output.transpose(1, 2).reshape(-1, output.shape[1])
    return token_loss(ends, targets, smoothing)


def similarity_loss(output: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cosine of row i and row b + i should be their score."""
    first, second = output.chunk(2)
    return (F.cosine_similarity(first, second) - targets).square().sum()


def contrast_loss(output: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Row i belongs to row b + i, and to no other."""
    first, second = F.normalize(output, dim=-1).chunk(2)
    scores = first @ second.T / TEMPERATURE
    ways = (scores, scores.T)
    losses = [
        F.cross_entropy(way, targets, reduction="sum", label_smoothing=smoothing) for way in ways
    ]
    return torch.stack(losses).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "tokens": token_loss,
    "label": token_loss,
    "tags": token_loss,
    "span": span_loss,
    "similarity": similarity_loss,
    "contrast": contrast_loss,
}


def batch_loss(
    net: Callable[..., Tensor], batch: Batch, ask: str, smoothing: float = 0.0, rdrop: float = 0.0
) -> Tensor:
    """The network's loss on a batch, summed over `batch.count` targets."""
    require(ask in LOSSES, f'There is no loss "{ask}". There are: {", ".join(LOSSES)}.')
    if rdrop:
        twice = batch.twice()
        return rdrop_loss(net(*twice.inputs, **twice.places), batch.targets, smoothing, rdrop)
    output = net(*batch.inputs, **batch.places)
    return LOSSES[ask](output, batch.targets, smoothing)
