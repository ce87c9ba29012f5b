"""R-Drop: equal to its slow twin and to its formula, and a run with it is a run like any other."""

from __future__ import annotations

import pytest
import torch

from clearhead.data.batch import IGNORED, Batch
from clearhead.training.rdrop import rdrop_loss, slow_rdrop_loss


def example(rows: int = 300, words: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    logits = torch.randn(2 * rows, words, generator=dice, dtype=torch.float64)
    targets = torch.randint(words, (rows,), generator=dice)
    targets[::7] = IGNORED
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_the_slow_twin(smoothing: float) -> None:
    logits, targets = example()
    fast = rdrop_loss(logits, targets, smoothing, 5.0)
    (grad,) = torch.autograd.grad(3 * fast, logits)
    slow = slow_rdrop_loss(logits, targets, smoothing, 5.0)
    (expected,) = torch.autograd.grad(3 * slow, logits)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(grad, expected)


def test_two_equal_passes_are_one() -> None:
    logits, targets = example(rows=20)
    same = logits[:20].detach().repeat(2, 1).requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        same[:20], targets, ignore_index=IGNORED, reduction="sum", label_smoothing=0.1
    )
    torch.testing.assert_close(rdrop_loss(same, targets, 0.1, 5.0), expected)


def test_a_batch_twice_has_every_row_again_and_asks_the_same() -> None:
    ids = torch.arange(6).view(3, 2)
    twice = Batch((ids,), ids, count=6, tokens=6).twice()
    assert twice.inputs[0].tolist() == ids.tolist() * 2
    assert twice.targets is ids
    assert twice.count == 6
