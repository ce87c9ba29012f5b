"""The decoding loop: prefill the prompt, then one token after the other from the cache.

It depends on the protocol of `models.base` alone (`new_cache`, `decode`, and `encode` for an
encoder-decoder), and it is a generator: whoever stops iterating stops the work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import require
from clearhead.generate.sampling import check_sampling, choose
from clearhead.layers.stack import Memory


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop."""

    max_new_tokens: int = 200
    """How many at most."""
    temperature: float = 0.0
    """0 takes the best token; above, tokens are drawn."""
    top_k: int = 0
    """Draw from the k best only; 0: from all."""
    top_p: float = 1.0
    """Draw from the smallest set that has this probability."""
    seed: int | None = None
    """For draws that can be repeated."""
    stop: frozenset[int] = frozenset()
    """Ids that end the text; they are not part of it."""
    never: frozenset[int] = frozenset()
    """Ids that are never chosen."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "temperature", "top_p"):
            value = getattr(self, name)
            whole = name in ("max_new_tokens", "top_k")
            require(
                isinstance(value, int if whole else (int, float)),
                f"{name} must be a {'whole ' if whole else ''}number, not {value!r}.",
            )
        check_sampling(self.temperature, self.top_k, self.top_p)
        require(
            self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens}: ask for one token at least.",
        )


def check_logits(logits: Tensor) -> None:
    """Refuse to choose from what cannot be compared; -inf, a token that is ruled out, can."""
    require(
        bool(logits.amax(dim=-1).isfinite().all()),
        "The model's outputs are not numbers: its weights are damaged.",
    )


def decode_tokens(
    net: Any,
    prompt: Collection[int],
    sampling: Sampling,
    max_len: int,
    memory: Memory | None = None,
) -> Iterator[int]:
    """The ids that follow a prompt, one by one; ends at a stop id or at the limit.

    A decoder that comes to its last position reads the last half of its context again from position
    0 and writes on: it has forgotten what was before. An encoder-decoder ends there.
    """
    ids = list(prompt)
    require(len(ids) > 0, "The prompt is empty: give at least one token to start from.")
    require(
        len(ids) < max_len,
        f"The prompt has {len(ids)} tokens, and the model {max_len} positions: shorten the prompt.",
    )
    left = sampling.max_new_tokens
    room = min(len(ids) + left, max_len)
    device = next(net.parameters()).device
    dice = None
    if sampling.seed is not None:
        dice = torch.Generator(device).manual_seed(sampling.seed)
    cache = net.new_cache(1 if memory is None else memory, room)
    never = torch.tensor(sorted(sampling.never), device=device)
    new = torch.tensor([ids], device=device)
    while True:
        # Only the step itself is without gradients and dropout: between tokens the caller works.
        with torch.inference_mode(), net.at_rest():
            logits: Tensor = net.decode(new, cache=cache)[:, -1]
            if len(ids) == len(prompt):
                check_logits(logits)
            if len(never):
                logits = logits.index_fill(1, never, torch.finfo(logits.dtype).min)
            how = (sampling.temperature, sampling.top_k, sampling.top_p)
            new = choose(logits, *how, dice).view(1, 1)
        token = int(new)
        if token in sampling.stop:
            return
        yield token
        ids.append(token)
        left -= 1
        if left == 0:
            return
        if len(ids) == max_len:
            if memory is not None or max_len < 2:
                return
            ids = ids[-(max_len // 2) :]
            cache = net.new_cache(1, min(len(ids) + left, max_len))
            new = torch.tensor([ids], device=device)
