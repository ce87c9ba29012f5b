"""R-Drop: a text is seen twice under other dropout, and the two predictions are drawn together.

    loss = (CE(p) + CE(q)) / 2 + alpha / 4 (KL(p | q) + KL(q | p))

Liang et al. 2021 (their alpha; 5 for translation). Dropout trains many networks that share weights,
and what is run in the end is their mean: here they are asked to agree, so that the mean is like
each of them. It costs a second pass a text, and pays where the data are few and the model knows
them by heart.

The gradient of the first prediction's logits, with d = log p - log q:

    (p - target) / 2 + alpha / 4 (p (d - KL(p | q)) + p - q)

and the same for the second with p and q exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.batch import IGNORED

ROWS = 128  # worked on together: a few MB, which stay near the processor
SUITED = ("tokens", "label", "tags")  # what is asked by one distribution a target


class _RDrop(torch.autograd.Function):
    """The loss, and at once its gradient, a few rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, alpha: float
    ) -> Tensor:
        half = targets.shape[0]
        grads = torch.empty_like(logits)
        total = logits.new_zeros(())
        for start in range(0, half, ROWS):
            end = min(start + ROWS, half)
            asked = targets[start:end]
            first, second = logits[start:end], logits[half + start : half + end]
            own = (grads[start:end], grads[half + start : half + end])
            total += _pair(first, second, asked, smoothing, alpha, own)
        ctx.grads = grads  # not saved for others: it is overwritten
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        return grads.mul_(grad), None, None, None


def _pair(
    first: Tensor,
    second: Tensor,
    targets: Tensor,
    smoothing: float,
    alpha: float,
    grads: tuple[Tensor, Tensor],
) -> Tensor:
    """The sum over some rows; their gradients are written into `grads`."""
    asked = (targets != IGNORED).to(first.dtype)
    right = targets.clamp(min=0).unsqueeze(1)
    a, b = first.log_softmax(-1), second.log_softmax(-1)
    p, q = a.exp(), b.exp()
    d = a - b
    there, back = (p * d).sum(-1), -(q * d).sum(-1)
    loss = (alpha / 4) * (there + back)
    ways = ((a, p, q, d, there, 1.0), (b, q, p, d, back, -1.0))
    for grad, (logs, own, other, ahead, apart, sign) in zip(grads, ways, strict=True):
        loss -= 0.5 * (1.0 - smoothing) * logs.gather(1, right).squeeze(1)
        # alpha/4 (own (sign d - apart) + own - other) + own/2, in the memory of the gradient
        torch.add((1.0 - apart).unsqueeze(1), ahead, alpha=sign, out=grad)
        grad.mul_(own).sub_(other).mul_(alpha / 4).add_(own, alpha=0.5)
        if smoothing:
            even = smoothing / logs.shape[-1]
            loss -= 0.5 * even * logs.sum(-1)
            grad.sub_(0.5 * even)
        grad.scatter_add_(1, right, torch.full_like(grad[:, :1], 0.5 * (smoothing - 1.0)))
        grad.mul_(asked.unsqueeze(1))
    return (loss * asked).sum()


def rdrop_loss(output: Tensor, targets: Tensor, smoothing: float, alpha: float) -> Tensor:
    """Summed over the targets [b, ..] of an output [2 b, .., v], whose halves are two passes."""
    logits, asked = output.reshape(-1, output.shape[-1]), targets.reshape(-1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if torch.compiler.is_compiling() or not logits.requires_grad:
        return slow_rdrop_loss(logits, asked, smoothing, alpha)
    return _RDrop.apply(logits, asked, smoothing, alpha)


def slow_rdrop_loss(logits: Tensor, targets: Tensor, smoothing: float, alpha: float) -> Tensor:
    """The same by PyTorch's own functions."""
    asked = targets != IGNORED
    a, b = logits.log_softmax(-1).chunk(2)
    apart = F.kl_div(b, a, reduction="none", log_target=True)
    apart = apart + F.kl_div(a, b, reduction="none", log_target=True)
    entropy = F.cross_entropy(
        logits,
        targets.repeat(2),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return entropy / 2 + alpha / 4 * (apart.sum(-1) * asked).sum()
