"""One text that is being written: its prompt, its settings, its dice, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import require
from clearhead.generate.rules import NEVER, NONE, apply_rules, bar
from clearhead.generate.sampling import Sampling, best, choose

End = Literal["token", "string", "limit", "positions", "constraint"]


@runtime_checkable
class Constraint(Protocol):
    """What a text may be: one object a text, told of every token."""

    @property
    def done(self) -> bool:
        """Nothing can follow any more."""

    def mask(self) -> Bool[Tensor, " v"]:
        """Which tokens may come next; a stop id where the text may end."""

    def advance(self, token: int) -> Any:
        """This token came."""


Constrain = Callable[[], Constraint]


@dataclass(frozen=True)
class Step:
    """What one row got in one step."""

    row: int
    """Its number."""
    token: int
    """The id that came."""
    end: End | None = None
    """Why nothing follows: a stop id (which is not part of the text), the limit, the model's last
    position, a constraint that is fulfilled; None: it goes on.
    """
    log_probability: float | None = None
    """Of the token, by the model alone, where that was asked for."""
    best: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the k likeliest, where that was asked for."""


@dataclass
class Row:
    """One text: everything that belongs to it and to no other of its batch."""

    number: int
    """Which one it is."""
    prompt: Sequence[int]
    """What it follows."""
    sampling: Sampling
    """How its tokens are chosen."""
    limit: int
    """How many tokens it may get."""
    sample: int = 0
    """Which sample of its prompt: each throws its own dice."""
    constraint: Constraint | None = None
    """What it may be."""
    likely: int | None = None
    """How many of the likeliest tokens are noted; 0: only the chosen one's probability, None:
    nothing.
    """
    text: list[int] = field(default_factory=list)
    """The tokens so far; a stop id is not among them."""
    end: End | None = None
    """Why it ended; None: it goes on."""
    slid: int = 0
    """How often the start of its context was forgotten."""

    def __post_init__(self) -> None:
        self.prompt = list(self.prompt)
        self.window = list(self.prompt)  # what the cache holds of it
        self.dice: torch.Generator | None = None
        self.step = Step(self.number, -1)  # what was chosen last

    @property
    def ruled(self) -> bool:
        """Whether anything but the model decides."""
        return self.constraint is not None or self.sampling.rules is not NONE

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is all that is asked for."""
        how = self.sampling
        return not (how.temperature or how.never or self.ruled) and self.likely is None

    def rule(self, logits: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
        """The logits under this row's rules and its constraint."""
        how = self.sampling
        logits = apply_rules(logits, how.rules, self.prompt, self.text, how.stop, self.limit)
        if self.constraint is not None:
            allowed = self.constraint.mask().to(logits.device)
            logits = logits.clone()
            logits[: len(allowed)].masked_fill_(~allowed[: len(logits)], NEVER)
            logits[len(allowed) :] = NEVER
        return logits

    def take(self, max_len: int, slide: bool) -> Step:
        """The chosen token becomes part of the text, or ends it."""
        token = self.step.token
        if token in self.sampling.stop:
            self.end = "token"
        else:
            self.text.append(token)
            self.window.append(token)
            self._look_for_the_end(token, max_len, slide)
        if self.end is not None:
            old = self.step
            self.step = Step(old.row, token, self.end, old.log_probability, old.best)
        return self.step

    def _look_for_the_end(self, token: int, max_len: int, slide: bool) -> None:
        if self.constraint is not None:
            self.constraint.advance(token)
        if self.constraint is not None and self.constraint.done:
            self.end = "constraint"
        elif len(self.text) >= self.limit:
            # The limit may be no more than what the positions left.
            short = self.limit < self.sampling.max_new_tokens and len(self.window) >= max_len
            self.end = "positions" if short else "limit"
        elif len(self.window) >= max_len and not slide:
            self.end = "positions"

    def slide(self, max_len: int) -> None:
        """Forget all but the last half of a full context."""
        if len(self.window) >= max_len:
            self.window = self.window[-(max_len // 2) :]
            self.slid += 1


def choose_rows(
    logits: Float[Tensor, "b v"], rows: Sequence[Row], which: Int[Tensor, " v"] | None = None
) -> Int[Tensor, " b"]:
    """The next token of every row, which each row's `step` notes; rows with the same settings are
    chosen together. `which`: of which tokens the logits are, for rows that are all greedy.
    """
    parties: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        parties.setdefault(id(row.sampling), []).append(i)
    if len(parties) == 1:
        new = _choose_party(logits, rows)
    else:
        new = torch.empty(len(rows), dtype=torch.long, device=logits.device)
        for party in parties.values():
            new[party] = _choose_party(logits[party], [rows[i] for i in party])
    if which is not None:
        new = which[new]
    for row, token in zip(rows, new.tolist(), strict=True):
        row.step = Step(row.number, token)
    _note_likely(logits, rows)
    return new


def _choose_party(logits: Float[Tensor, "b v"], rows: Sequence[Row]) -> Int[Tensor, " b"]:
    """One token a row, all rows having one `Sampling`."""
    sampling, device = rows[0].sampling, logits.device
    if sampling.never:
        logits = torch.stack([bar(row, sampling.never) for row in logits])
    ruled = any(row.ruled and row.end is None for row in rows)
    if ruled:
        pairs = zip(logits, rows, strict=True)
        logits = torch.stack([row.rule(own) if row.end is None else own for own, row in pairs])
    if ruled or sampling.never:
        require(
            bool((logits.amax(dim=-1) > NEVER).all()),
            "No token may come next: the rules (banned and forced tokens, no_repeat_ngram, a "
            "constraint) rule out all of them. Relax one.",
        )
    if not sampling.temperature:
        return best(logits)
    if sampling.seed is None:
        return choose(logits, *sampling.how)
    for row in rows:
        row.dice = row.dice or sampling.dice(row.sample, device)
    return choose(logits, *sampling.how, [row.dice for row in rows])


def _note_likely(logits: Float[Tensor, "b v"], rows: Sequence[Row]) -> None:
    """Write the model's own log-probabilities into the steps of rows that want them."""
    asking = [i for i, row in enumerate(rows) if row.likely is not None and row.end is None]
    if not asking:
        return
    log_p = logits[asking].float().log_softmax(dim=-1)
    for own, i in zip(log_p, asking, strict=True):
        row, token = rows[i], rows[i].step.token
        best: tuple[tuple[int, float], ...] = ()
        if row.likely:
            top = own.topk(min(row.likely, len(own)))
            best = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        row.step = Step(row.number, token, None, float(own[token]), best)
