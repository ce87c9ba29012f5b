"""Beam search: of all ways to go on, the best few are followed at once.

    score(y) = log p(y | x) / |y| ** length_penalty        |y|: the new tokens, the stop id included

At each step every beam is extended by every token, and the `width` best unfinished texts go on.
What ends (at a stop id, or at the limit) and is among the `width` best of that step is a
hypothesis; the best `width` of these are kept. All beams of a source share its states and its cross
cache; sources that are done leave the batch.

Wu et al. 2016, section 7. Differs from the paper: the penalty is a power of the length itself, as
in transformers.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.attention.cache import Cache
from clearhead.errors import require
from clearhead.generate.batch import Rows, prefill, row_limits
from clearhead.layers.stack import Memory

NEVER = -math.inf
STEEPEST = 50  # a power of the length beyond it is no number any more


@dataclass(frozen=True)
class Beam:
    """How to search, and when to stop."""

    width: int = 4
    """How many texts of a source are followed at once; 1 is the greedy choice."""
    length_penalty: float = 1.0
    """The power of the length that divides a score: 0 compares sums, above 0 favours long texts."""
    patience: Literal["full", "likely", "sure"] = "likely"
    """A source that has `width` hypotheses is done at once; or when no running beam would enter
    with its present length; or when none ever can.
    """
    max_new_tokens: int = 200
    """How many at most."""
    best: int = 1
    """How many hypotheses are returned of each source."""
    stop: frozenset[int] = frozenset()
    """Ids that end a text; they are not part of it, but count in its length and score."""
    never: frozenset[int] = frozenset()
    """Ids that are never chosen."""

    def __post_init__(self) -> None:
        for name in ("width", "max_new_tokens", "best"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value >= 1,
                f"{name} of a beam search is a whole number of 1 or more, not {value!r}.",
            )
        require(
            self.best <= self.width,
            f"{self.best} hypotheses were asked of {self.width} beams: search with as many beams.",
        )
        require(
            isinstance(self.length_penalty, (int, float)) and abs(self.length_penalty) <= STEEPEST,
            f"length_penalty is a number from -{STEEPEST} to {STEEPEST}, not "
            f"{self.length_penalty!r}.",
        )
        require(
            self.patience in ("full", "likely", "sure"),
            f'patience is "full", "likely" or "sure", not {self.patience!r}.',
        )


@dataclass(frozen=True)
class Hypothesis:
    """One text that a search found."""

    ids: list[int]
    """Its tokens, without the prompt and the stop id."""
    score: float
    """What hypotheses are ordered by: log_probability / length ** length_penalty."""
    log_probability: float
    """The sum over all its tokens, the stop id included, in nats."""
    end: int | None = None
    """The stop id that ended it; None where the limit did."""


def beam_search(
    net: Any,
    prompts: Rows,
    beam: Beam,
    max_len: int,
    memory: Memory | None = None,
    limits: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """For each prompt (and source, if there is a memory) its best hypotheses, the best first.

    `limits`: how many tokens each row may get, where that is fewer than the beam's.
    """
    ends = row_limits(prompts, beam.max_new_tokens, max_len, limits)
    books = [_Book(beam, end) for end in ends]
    with torch.inference_mode(), net.at_rest():
        cache, logits = prefill(net, prompts, ends, memory, beam.width)
        running = _Running(books, beam.width, logits.device)
        while True:
            parents, kept = running.step(logits, beam)
            if len(kept) == 0:
                return [book.best() for book in books]
            _follow(cache, parents, kept)
            logits = net.decode(running.written[:, :, -1].reshape(-1, 1), cache=cache)[:, -1]


class _Book:
    """The hypotheses of one source: the `width` best, the best first."""

    def __init__(self, beam: Beam, limit: int) -> None:
        self.beam, self.limit = beam, limit
        self.found: list[Hypothesis] = []

    def add(self, ids: list[int], log_probability: float) -> None:
        """Write a text down, if it is among the best."""
        score = log_probability / len(ids) ** self.beam.length_penalty
        end = ids[-1] if ids[-1] in self.beam.stop else None
        text = ids if end is None else ids[:-1]
        new = Hypothesis(text, score, log_probability, end)
        bisect.insort_right(self.found, new, key=lambda known: -known.score)
        del self.found[self.beam.width :]

    def is_open(self, running: float, length: int) -> bool:
        """Whether a beam that stands at this sum and length may still change what is written."""
        if running == NEVER:
            return False
        if len(self.found) < self.beam.width:
            return True
        if self.beam.patience == "full":
            return False
        if self.beam.patience == "sure" and self.beam.length_penalty > 0:
            length = self.limit  # a sum only falls, but what divides it may grow up to here
        return running / length**self.beam.length_penalty > self.found[-1].score

    def best(self) -> list[Hypothesis]:
        """As many as were asked for."""
        return self.found[: self.beam.best]


class _Running:
    """The texts that are still being written, of the sources that are not done."""

    def __init__(self, books: Sequence[_Book], width: int, device: torch.device) -> None:
        self.books = list(books)
        # At first all beams of a source are the same: only one of them counts.
        self.scores = torch.full((len(books), width), NEVER, device=device)
        self.scores[:, 0] = 0.0
        self.written = torch.zeros((len(books), width, 0), dtype=torch.long, device=device)

    def step(
        self, logits: Float[Tensor, "rows v"], beam: Beam
    ) -> tuple[Int[Tensor, "s w"], Int[Tensor, " kept"]]:
        """Extend, write down what ended, keep the best; returns which beam each new one extends
        and which sources go on.
        """
        values, parents, tokens = self._candidates(logits, beam)
        texts = torch.cat((_pick(self.written, parents), tokens.unsqueeze(2)), dim=2)
        length = texts.shape[2]
        stop = torch.tensor(sorted(beam.stop), dtype=torch.long, device=tokens.device)
        full = torch.tensor([length >= book.limit for book in self.books], device=tokens.device)
        ended = torch.isin(tokens, stop) | full.unsqueeze(1)
        hits = (ended & (values > NEVER))[:, : beam.width].nonzero()
        found = zip(hits.tolist(), texts[*hits.T].tolist(), values[*hits.T].tolist(), strict=True)
        for (source, _), ids, value in found:
            self.books[source].add(ids, value)
        self.scores, order = values.masked_fill(ended, NEVER).topk(beam.width, dim=1)
        self.written, parents = _pick(texts, order), parents.gather(1, order)
        front = zip(self.books, self.scores[:, 0].tolist(), strict=True)
        going = [i for i, (book, value) in enumerate(front) if book.is_open(value, length)]
        kept = torch.tensor(going, dtype=torch.long, device=tokens.device)
        self.books = [self.books[i] for i in going]
        self.scores, self.written = self.scores[kept], self.written[kept]
        return parents, kept

    def _candidates(self, logits: Float[Tensor, "rows v"], beam: Beam) -> tuple[Tensor, ...]:
        """The best extensions [s, k]: their sums, the beams they extend, and by which tokens. So
        many that `width` go on even if every stop id of every beam is among them.
        """
        sources, width = self.scores.shape
        log_p = logits.float().log_softmax(dim=-1)
        if beam.never:
            never = torch.tensor(sorted(beam.never), device=logits.device)
            log_p = log_p.index_fill(1, never, NEVER)
        v = log_p.shape[1]
        count = min(max(2, 1 + len(beam.stop)), v) * width
        own = log_p.topk(min(count, v), dim=1)  # no more of one beam can be among the best of all
        sums = self.scores.unsqueeze(2) + own.values.view(sources, width, -1)
        best = sums.flatten(1).topk(count, dim=1)
        tokens = own.indices.view(sources, -1).gather(1, best.indices)
        return best.values, best.indices // own.values.shape[1], tokens


def _pick(texts: Int[Tensor, "s w n"], which: Int[Tensor, "s k"]) -> Int[Tensor, "s k n"]:
    return texts.gather(1, which.unsqueeze(2).expand(-1, -1, texts.shape[2]))


def _follow(cache: Cache, parents: Int[Tensor, "s w"], kept: Int[Tensor, " kept"]) -> None:
    """Let every row of the cache become what its text so far was, and drop sources that are
    done.
    """
    sources, width = parents.shape
    first = torch.arange(sources, device=parents.device).unsqueeze(1) * width
    rows = first + parents
    if cache.memory is None:
        cache.reorder(rows[kept].flatten())
        return
    if width > 1:
        cache.reorder(rows.flatten())
    if len(kept) < sources:
        cache.keep(kept)
