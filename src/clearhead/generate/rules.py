"""Rules that change what may come next: pure functions of the logits and of what was written.

They are applied to the model's logits in this order, before anything is drawn (`sampling`):

    bias                 logit + bias, for the tokens named
    repetition           logit / penalty if above 0, else logit * penalty: prompt and text
    presence, frequency  logit - presence [n > 0] - frequency * n: n counts the text alone
    no_repeat            no n-gram of prompt and text a second time
    banned               no such sequence of tokens, not_first: not as the first token
    least                no stop id before so many tokens
    first, last          the only token that may come: at the start, at the limit

The later rule wins: what is forced comes even if it is banned. A row without rules pays nothing.

Keskar et al. 2019, section 4.1 (repetition); Paulus et al. 2018, section 2.5 (n-grams).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import require

NEVER = -math.inf
Logits = Float[Tensor, " v"]
Ids = Sequence[int]


@dataclass(frozen=True)
class Rules:
    """What holds beside the model's own opinion; the defaults say nothing."""

    bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)."""
    repetition: float = 1.0
    """Above 1: tokens of the prompt and of the text become less likely."""
    presence: float = 0.0
    """Taken from the logit of every token that the text has."""
    frequency: float = 0.0
    """Taken from it as often as the text has the token."""
    no_repeat: int = 0
    """No sequence of so many tokens twice; 0: no such rule."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not written; of one token: a token that never is."""
    not_first: frozenset[int] = frozenset()
    """Ids that the text does not begin with."""
    least: int = 0
    """So many tokens are written before a stop id may come."""
    first: tuple[int, ...] = ()
    """What the text begins with."""
    last: int | None = None
    """The token at the limit, for texts that must end with it."""

    def __post_init__(self) -> None:
        for name in ("repetition", "presence", "frequency"):
            value = getattr(self, name)
            require(
                isinstance(value, (int, float)) and math.isfinite(value),
                f"{name}_penalty is a number, not {value!r}.",
            )
        require(
            self.repetition > 0,
            f"repetition_penalty is {self.repetition}: above 1 it avoids repetition, 1 does "
            "nothing, below 1 it invites it; 0 and less make no sense.",
        )
        for name in ("no_repeat", "least"):
            value = getattr(self, name)
            called = {"no_repeat": "no_repeat_ngram", "least": "min_new_tokens"}[name]
            require(
                type(value) is int and value >= 0,
                f"{called} is a whole number from 0, not {value!r}.",
            )
        require(
            all(self.banned),
            "A banned text is empty: name at least one token, or leave it out.",
        )
        require(
            all(not math.isnan(value) and value < math.inf for _, value in self.bias),
            "A logit's bias is a number (-inf rules the token out), not more.",
        )

    @property
    def ids(self) -> set[int]:
        """All ids that are named."""
        named = {id for id, _ in self.bias} | self.not_first | set(self.first)
        named |= {id for words in self.banned for id in words}
        return named if self.last is None else named | {self.last}


NONE = Rules()


def apply_rules(
    logits: Logits,
    rules: Rules,
    prompt: Ids,
    text: Ids,
    stop: Collection[int] = (),
    limit: int | None = None,
) -> Logits:
    """The logits of one row under all its rules; `text` is what was written behind the prompt, and
    `limit` how many tokens it may have.
    """
    forced = forced_token(rules, len(text), limit)
    if forced is not None:
        return force(logits, forced)
    if rules.bias:
        logits = add_bias(logits, rules.bias)
    if rules.repetition != 1.0:
        logits = penalise_repetition(logits, [*prompt, *text], rules.repetition)
    if rules.presence or rules.frequency:
        logits = penalise_text(logits, text, rules.presence, rules.frequency)
    if rules.no_repeat:
        logits = bar(logits, repeated(rules.no_repeat, [*prompt, *text]))
    if rules.banned:
        longest = max(map(len, rules.banned)) - 1
        recent = [*prompt, *text][-longest:] if longest else []
        logits = bar(logits, completed(rules.banned, recent))
    if rules.not_first and not text:
        logits = bar(logits, rules.not_first)
    if len(text) < rules.least:
        logits = bar(logits, stop)
    return logits


def forced_token(rules: Rules, written: int, limit: int | None = None) -> int | None:
    """The only token that may come when so many were written, if there is one."""
    if written < len(rules.first):
        return rules.first[written]
    return rules.last if limit is not None and written == limit - 1 else None


def force(logits: Logits, id: int) -> Logits:
    """This token and no other."""
    return torch.full_like(logits, NEVER).index_fill(0, _index([id], logits), 0.0)


def add_bias(logits: Logits, bias: Collection[tuple[int, float]]) -> Logits:
    """Some logits raised or lowered."""
    index = _index([id for id, _ in bias], logits)
    values = torch.tensor([value for _, value in bias], device=logits.device, dtype=logits.dtype)
    return logits.index_add(0, index, values)


def penalise_repetition(logits: Logits, seen: Ids, penalty: float) -> Logits:
    """Tokens that were seen: divided by the penalty if above 0, else multiplied."""
    index = _index(sorted(set(seen)), logits)
    old = logits[index]
    return logits.index_copy(0, index, torch.where(old < 0, old * penalty, old / penalty))


def penalise_text(logits: Logits, text: Ids, presence: float, frequency: float) -> Logits:
    """Tokens that were written: less by `presence` once, and by `frequency` each time."""
    if not text:
        return logits
    index, counts = _index(text, logits).unique(return_counts=True)
    return logits.index_add(0, index, -(presence + frequency * counts.to(logits.dtype)))


def bar(logits: Logits, ids: Collection[int]) -> Logits:
    """These tokens have no chance."""
    return logits.index_fill(0, _index(sorted(ids), logits), NEVER) if ids else logits


def repeated(n: int, seen: Ids) -> set[int]:
    """The tokens that would write an n-gram a second time."""
    if len(seen) < n:
        return set()
    start = tuple(seen[len(seen) - n + 1 :])
    windows = range(len(seen) - n + 1)
    return {seen[i + n - 1] for i in windows if tuple(seen[i : i + n - 1]) == start}


def completed(banned: Sequence[Ids], recent: Ids) -> set[int]:
    """The tokens that would complete one of the sequences."""
    found = set()
    for words in banned:
        n = len(words) - 1
        if n <= len(recent) and list(recent[len(recent) - n :]) == list(words[:-1]):
            found.add(words[-1])
    return found


def _index(ids: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.long, device=like.device)
