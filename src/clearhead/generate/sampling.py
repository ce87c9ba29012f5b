"""Choosing the next token from logits, by pure functions.

They are applied in the order temperature, top-k, top-p.

    p = softmax(logits / temperature), of the k best, of the smallest set whose sum reaches top_p

Temperature 0 is the greedy choice. Holtzman et al. 2020 (top-p).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import require

Logits = Float[Tensor, "b v"]


def probabilities(
    logits: Logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Logits:
    """The distribution to draw from; what is ruled out has exactly 0."""
    check_sampling(temperature, top_k, top_p)
    require(temperature > 0, "At temperature 0 the best token is taken, and nothing is drawn.")
    logits = logits.float()
    # The best at 0: then no temperature, however small, makes a number that is not one.
    p = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if 0 < top_k < p.shape[-1]:
        best = p.topk(top_k, dim=-1)
        p = torch.zeros_like(p).scatter(-1, best.indices, best.values)
    if top_p < 1.0:
        ordered, index = (p / p.sum(dim=-1, keepdim=True)).sort(dim=-1, descending=True)
        # What stands before a token already reaches top_p: it is not needed. The first always
        # stays.
        needed = ordered.cumsum(dim=-1) - ordered < top_p
        p = torch.zeros_like(p).scatter(-1, index, ordered * needed)
    return p / p.sum(dim=-1, keepdim=True)


def choose(
    logits: Logits,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " b"]:
    """One token a row."""
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    p = probabilities(logits, temperature, top_k, top_p)
    return torch.multinomial(p, 1, generator=generator).squeeze(1)


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Refuse settings that mean nothing."""
    require(
        temperature >= 0,
        f"temperature is {temperature}: 0 takes the best token, above 0 draws; below makes no "
        "sense.",
    )
    require(top_k >= 0, f"top_k is {top_k}: 0 keeps all tokens, k keeps the k best.")
    require(
        0 < top_p <= 1, f"top_p is {top_p}: it is a probability above 0, and 1 keeps all tokens."
    )
