"""Choosing the next token from logits, by pure functions.

They are applied in this order; each sees what the ones before it left, made to sum to 1 again:

    temperature   p = softmax(logits / temperature)
    top_k         the k best
    top_p         the smallest set of the best whose sum reaches top_p
    min_p         those with at least min_p times the best one's probability
    typical       the smallest set whose sum reaches it of those nearest to -log p = H(p)

Temperature 0 is the greedy choice. Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p);
Meister et al. 2022 (locally typical). What comes before all this stands in `rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import require
from clearhead.fast.peaks import peaks
from clearhead.generate.rules import NEVER, NONE, Rules

Logits = Float[Tensor, "b v"]
FEW = 1024
NO_NUMBERS = "The model's outputs are not numbers: its weights are damaged."
PART = 128  # tokens whose best one is compared with that of others first
Dice = torch.Generator | Sequence[torch.Generator | None] | None


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
    min_p: float = 0.0
    """Draw only what has this share of the best one's probability; 0: from all."""
    typical: float = 1.0
    """Draw from the most typical tokens that have this probability; 1: from all."""
    rules: Rules = NONE
    """What else holds: penalties, biases, banned and forced tokens."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "temperature", "top_p", "min_p", "typical"):
            value = getattr(self, name)
            whole = name in ("max_new_tokens", "top_k")
            require(
                isinstance(value, int if whole else (int, float)),
                f"{name} must be a {'whole ' if whole else ''}number, not {value!r}.",
            )
        require(
            self.seed is None or isinstance(self.seed, int),
            f"seed must be a whole number, or None for other draws each time, not {self.seed!r}.",
        )
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.typical)
        require(
            self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens}: ask for one token at least.",
        )
        require(
            self.rules.least <= self.max_new_tokens,
            f"min_new_tokens is {self.rules.least} and max_new_tokens {self.max_new_tokens}: at "
            "least cannot be more than at most.",
        )

    @property
    def how(self) -> tuple[float, int, float, float, float]:
        """What `choose` takes, in its order."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.typical

    def dice(self, sample: int = 0, device: torch.device | str = "cpu") -> torch.Generator | None:
        """The dice of one sample of a request, whatever else is in its batch; None: nobody's."""
        if self.seed is None or not self.temperature:
            return None
        # The golden ratio's bits: samples of neighbouring seeds do not meet.
        mixed = (self.seed + sample * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device).manual_seed(mixed)


def probabilities(
    logits: Logits,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical: float = 1.0,
) -> Logits:
    """The distribution to draw from; what is ruled out has exactly 0."""
    p, index = _candidates(logits, temperature, top_k, top_p, min_p, typical)
    return p if index is None else torch.zeros_like(logits, dtype=p.dtype).scatter(-1, index, p)


def best(logits: Logits) -> Int[Tensor, " b"]:
    """The best token of each row, the first of equal ones; what is no number would be the best, and
    is refused.
    """
    if _has_numpy(logits):
        numbers = logits.numpy()
        where = numbers.argmax(axis=-1)  # ten times as quick as torch's
        largest = numbers[np.arange(len(where)), where]
        require(bool(np.isfinite(largest).all()), NO_NUMBERS)
        return torch.from_numpy(where)
    top = logits.max(dim=-1)
    require(bool(top.values.isfinite().all()), NO_NUMBERS)
    return top.indices


def largest_are_numbers(logits: Float[Tensor, "*b v"]) -> bool:
    """Whether every row has a largest number, and nothing in it is none."""
    if _has_numpy(logits):
        return bool(np.isfinite(logits.numpy().max(axis=-1)).all())  # (cheaper to call than torch)
    return bool(logits.amax(dim=-1).isfinite().all())


def _has_numpy(logits: Float[Tensor, "*b v"]) -> bool:
    """Whether NumPy can look at it where it is."""
    return logits.is_cpu and logits.dtype == torch.float32 and not logits.requires_grad


def best_log_p(
    logits: Logits, k: int, never: Sequence[int] = ()
) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
    """The log-probabilities of the k best tokens of each row, the best first, and which they are;
    those in `never` have theirs, but are not chosen.
    """
    banned = torch.tensor(never, dtype=torch.long, device=logits.device)
    left_out = logits[:, banned]
    if never:  # in their place for a moment: a copy would take as long as all the rest
        logits.index_fill_(1, banned, NEVER)
    found = peaks(logits, PART)
    tops, total = (None, logits.logsumexp(dim=1, keepdim=True)) if found is None else found
    total = torch.logaddexp(total, left_out.logsumexp(dim=1, keepdim=True))  # of none: log 0
    values, where = best_few(logits, k, tops)
    if never:
        logits.index_copy_(1, banned, left_out)
    require(bool(total.isfinite().all()) and not bool(values.isnan().any()), NO_NUMBERS)
    return values - total, where


def best_few(
    x: Float[Tensor, "*b v"], k: int, tops: Float[Tensor, "*b parts"] | None = None
) -> tuple[Float[Tensor, "*b k"], Int[Tensor, "*b k"]]:
    """The k largest of a row, the largest first, and where they stand.

    Of a large vocabulary only those k parts are looked through whose largest number is among the k
    largest of all parts (`tops`, where they are known): the others cannot have any.
    """
    parts = x.shape[-1] // PART
    if not x.is_cpu or 4 * k > parts:
        return x.topk(k, dim=-1)
    cut, rest = x[..., : parts * PART].unflatten(-1, (parts, PART)), x[..., parts * PART :]
    where = (cut.amax(dim=-1) if tops is None else tops).topk(k, dim=-1).indices
    found = cut.gather(-2, where.unsqueeze(-1).expand(*where.shape, PART)).flatten(-2)
    values, at = torch.cat((found, rest), dim=-1).topk(k, dim=-1)
    inside = where.gather(-1, (at // PART).clamp(max=k - 1)) * PART + at % PART
    return values, torch.where(at < k * PART, inside, at + (parts - k) * PART)


def choose(
    logits: Logits,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical: float = 1.0,
    dice: Dice = None,
) -> Int[Tensor, " b"]:
    """One token a row; `dice`: one for all rows, or each row's own."""
    check_sampling(temperature, top_k, top_p, min_p, typical)
    if temperature == 0:
        return best(logits)
    p, index = _candidates(logits, temperature, top_k, top_p, min_p, typical)
    # One number a row decides, so that a row's draw costs its dice one throw. What has no
    # probability does not move the sum, so it is never where the sum passes the throw.
    sums = p.double().cumsum(dim=-1)
    throws = _throws(len(p), dice, p.device).unsqueeze(1) * sums[:, -1:]
    found = torch.searchsorted(sums, throws, right=True).clamp(max=p.shape[1] - 1)
    return (found if index is None else index.gather(-1, found)).squeeze(1)


def check_sampling(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0, typical: float = 1.0
) -> None:
    """Refuse settings that mean nothing."""
    require(
        0 <= temperature < math.inf,
        f"temperature is {temperature}: 0 takes the best token, above 0 draws; below makes no "
        "sense.",
    )
    require(top_k >= 0, f"top_k is {top_k}: 0 keeps all tokens, k keeps the k best.")
    require(
        0 < top_p <= 1, f"top_p is {top_p}: it is a probability above 0, and 1 keeps all tokens."
    )
    require(
        0 <= min_p <= 1, f"min_p is {min_p}: it is a share from 0, which keeps all tokens, to 1."
    )
    require(
        0 < typical <= 1,
        f"typical is {typical}: it is a probability above 0, and 1 keeps all tokens.",
    )


def _candidates(
    logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float, typical: float
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"] | None]:
    """The probabilities to draw from, and the tokens they belong to; None: all, in their order.

    Behind top-k and top-p the best stand first, and few numbers are left of a vocabulary.
    """
    check_sampling(temperature, top_k, top_p, min_p, typical)
    require(temperature > 0, "At temperature 0 the best token is taken, and nothing is drawn.")
    logits, index = logits.float(), None
    if 0 < top_k < logits.shape[-1]:
        logits, index = best_few(logits, top_k)
    # The best at 0, and no division by 0: then no temperature, however small, makes a number that
    # is not one.
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    p = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if top_p < 1:
        if index is None:
            p, index = _best_first(p, top_p)
        # What stands before a token already reaches top_p: it is not needed. The first always is.
        p = p * (p.cumsum(dim=-1) - p < top_p)
        p = p / p.sum(dim=-1, keepdim=True)
    if min_p > 0:
        p = p * (p >= min_p * p.amax(dim=-1, keepdim=True))
        p = p / p.sum(dim=-1, keepdim=True)
    if typical < 1:
        surprise = -p.log()
        entropy = torch.special.entr(p).sum(dim=-1, keepdim=True)
        p = p * _enough(p, -(surprise - entropy).abs(), typical)
        p = p / p.sum(dim=-1, keepdim=True)
    return p, index


def _best_first(
    p: Float[Tensor, "b v"], mass: float
) -> tuple[Float[Tensor, "b n"], Int[Tensor, "b n"]]:
    """The largest first; only the first few, if those of every row reach `mass`: to sort a whole
    vocabulary takes longer than a small model takes for a token.
    """
    if p.shape[-1] > 4 * FEW:
        best = p.topk(FEW, dim=-1)
        if bool((best.values.sum(dim=-1) > mass + 1e-5).all()):
            return best.values, best.indices
    return p.sort(dim=-1, descending=True, stable=True)


def _enough(p: Float[Tensor, "b n"], worth: Float[Tensor, "b n"], mass: float) -> Tensor:
    """Which tokens are needed, the worthiest first, until their probabilities reach `mass`."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    ordered = p.gather(-1, order)
    needed = ordered.cumsum(dim=-1) - ordered < mass
    needed[..., 0] = True
    return torch.zeros_like(needed).scatter(-1, order, needed)


def _throws(rows: int, dice: Dice, device: torch.device) -> Float[Tensor, " rows"]:
    """A number from 0 to 1 for every row."""
    if dice is None or isinstance(dice, torch.Generator):
        return torch.rand(rows, generator=dice, device=device, dtype=torch.float64)
    each = [torch.rand(1, generator=one, device=device, dtype=torch.float64) for one in dice]
    return torch.cat(each)
