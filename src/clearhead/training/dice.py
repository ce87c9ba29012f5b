"""The dice of a step: dropout's draws come from (seed, step, process), and from nothing before.

PyTorch's dropout takes no generator, so its global one is set within the block and put back behind
it: whoever iterates over a run finds the random state as they left it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def thrown(seed: int, step: int, rank: int, device: torch.device) -> Iterator[None]:
    """Draws within the block depend on these numbers alone."""
    number = ((seed * 1_000_003 + step) * 1_009 + rank) % 2**63
    index = device.index or 0
    with torch.random.fork_rng([index] if device.type == "cuda" else [], device_type="cuda"):
        torch.default_generator.manual_seed(number)
        if device.type == "cuda":
            torch.cuda.default_generators[index].manual_seed(number)
        if device.type != "mps":
            yield
            return
        before = torch.mps.get_rng_state()  # fork_rng does not know how to ask for it
        torch.mps.manual_seed(number)
        try:
            yield
        finally:
            torch.mps.set_rng_state(before)
