"""Beam search: of all ways to go on, the best few are followed at once.

    score(y) = log p(y | x) / |y| ** length_penalty + coverage_penalty * cp
    cp = sum_i log min(1, sum_j a_ij)          |y|: the new tokens, the stop id included

At each step every beam is extended by every token, and the `width` best unfinished texts go on.
What ends (at a stop id, or at the limit) and is among the `width` best of that step is a
hypothesis; the best `width` of these are kept. All beams of a source share its states and its cross
cache; sources that are done leave the batch.

Coverage: a_ij is how much the last layer looks at source token i, on average over its heads, before
it writes token j. A text that passes over a part of its source is marked down; unfinished ones are
still compared by log p. Wu et al. 2016, section 7. Differs from the paper: the length penalty is a
power of the length itself, as in transformers.

Groups: beams in equal groups, each a search of its own, one after the other within a step. To go on
with a token costs a group `diversity_penalty` for each beam of the earlier groups that just took
it; scores and sums do not hold that. Vijayakumar et al. 2018, section 3, with Hamming diversity.
Differs from its code, where the costs of earlier steps stay in the sums.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from clearhead.attention.cache import Cache
from clearhead.errors import require
from clearhead.generate.batch import Rows, check_logits, prefill, row_limits
from clearhead.generate.rules import NONE, Rules, apply_rules
from clearhead.generate.sampling import best_few, best_log_p
from clearhead.layers.stack import Memory
from clearhead.tap import Activations, capture

NEVER = -math.inf
Candidates = tuple[Tensor, Tensor, Tensor, Tensor]
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
    coverage_penalty: float = 0.0
    """How much it costs to pass over a part of the source; 0: nothing, and nobody looks."""
    groups: int = 1
    """In how many groups the beams are; each has its own texts."""
    diversity_penalty: float = 0.5
    """What it costs a group to take a token that a beam of an earlier group took."""
    rules: Rules = NONE
    """What else holds; log-probabilities and so scores are those under the rules, as in
    transformers.
    """

    def __post_init__(self) -> None:
        for name in ("width", "max_new_tokens", "best", "groups"):
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
        require(
            self.width % self.groups == 0,
            f"{self.width} beams cannot be parted into {self.groups} equal groups: change one.",
        )
        for name in ("coverage_penalty", "diversity_penalty"):
            value = getattr(self, name)
            require(
                isinstance(value, (int, float)) and 0 <= value < math.inf,
                f"{name} is a number of 0 or more, not {value!r}.",
            )


@dataclass(frozen=True)
class Hypothesis:
    """One text that a search found."""

    ids: list[int]
    """Its tokens, without the prompt and the stop id."""
    score: float
    """What hypotheses are ordered by: log_probability / length ** length_penalty, and what it costs
    to pass over the source.
    """
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
    with torch.inference_mode(), net.at_rest(), _looking(net, beam, memory) as looks:
        cache, logits = prefill(net, prompts, ends, memory, beam.width)
        sources = [_Source(list(row), end, beam) for row, end in zip(prompts, ends, strict=True)]
        running = _Running(sources, beam, logits.device)
        if looks is not None and memory is not None:
            look = _last_look(looks, 1, [len(row) for row in prompts])
            running.cover(look.expand(-1, beam.width, -1), memory)
        while True:
            parents, kept = running.step(logits)
            if len(kept) == 0:
                return [source.best() for source in sources]
            _follow(cache, parents, kept)
            del logits  # as large as all else that is new in a step
            logits = net.decode(running.written[:, :, -1].reshape(-1, 1), cache=cache)[:, -1]
            if looks is not None:
                running.look(_last_look(looks, beam.width, [1] * len(kept)))


class _Book:
    """The hypotheses of one group of a source: as many as it has beams, the best first."""

    def __init__(self, beam: Beam, limit: int) -> None:
        self.beam, self.limit, self.size = beam, limit, beam.width // beam.groups
        self.found: list[Hypothesis] = []

    def add(self, ids: list[int], log_probability: float, penalty: float) -> None:
        """Write a text down, if it is among the best."""
        score = log_probability / len(ids) ** self.beam.length_penalty + penalty
        end = ids[-1] if ids[-1] in self.beam.stop else None
        text = ids if end is None else ids[:-1]
        new = Hypothesis(text, score, log_probability, end)
        bisect.insort_right(self.found, new, key=lambda known: -known.score)
        del self.found[self.size :]

    def is_open(self, running: float, score: float, length: int) -> bool:
        """Whether beams may still change what is written: the best of them stands at this sum, the
        best at this score, both at this length.
        """
        if running == NEVER:
            return False
        if len(self.found) < self.size:
            return True
        if self.beam.patience == "full":
            return False
        if self.beam.patience == "sure":
            # A sum only falls, but what divides it may grow up to the limit, and coverage too.
            length = self.limit if self.beam.length_penalty > 0 else length
            score = running / length**self.beam.length_penalty
        return score > self.found[-1].score


class _Source:
    """One prompt of a search, and what was found for it."""

    def __init__(self, prompt: list[int], limit: int, beam: Beam) -> None:
        self.prompt, self.limit, self.beam = prompt, limit, beam
        self.books = [_Book(beam, limit) for _ in range(beam.groups)]

    def best(self) -> list[Hypothesis]:
        """As many as were asked for, fewer if groups found the same."""
        found = sorted((one for book in self.books for one in book.found), key=lambda x: -x.score)
        require(
            len(found) > 0,
            "No token may come next: the rules (banned and forced tokens, n-grams that may not "
            "repeat) rule out all of them. Relax one.",
        )
        different = {(*one.ids, one.end): one for one in reversed(found)}
        return [one for one in found if different[*one.ids, one.end] is one][: self.beam.best]


class _Running:
    """The texts that are still being written, of the sources that are not done."""

    def __init__(self, sources: Sequence[_Source], beam: Beam, device: torch.device) -> None:
        self.sources, self.beam, self.size = list(sources), beam, beam.width // beam.groups
        # At first all beams of a group are the same: only one of them counts.
        self.scores = torch.full((len(sources), beam.width), NEVER, device=device)
        self.scores[:, :: self.size] = 0.0
        self.written = torch.zeros((len(sources), beam.width, 0), dtype=torch.long, device=device)
        self.covered: Tensor | None = None  # [s, w, k] how much each source token was looked at
        self.filled: Tensor | None = None  # [s, 1, k] which there are

    def cover(self, look: Float[Tensor, "s w k"], memory: Memory) -> None:
        """Begin to count where the source was looked at."""
        self.covered = look
        self.filled = memory.at.filled().unsqueeze(1).expand(look.shape[0], -1, -1)

    def look(self, look: Float[Tensor, "s w k"]) -> None:
        """One more look at the source."""
        assert self.covered is not None
        self.covered = self.covered + look

    def step(self, logits: Float[Tensor, "rows v"]) -> tuple[Int[Tensor, "s w"], Int[Tensor, " n"]]:
        """Extend, write down what ended, keep the best; returns which beam each new one extends
        and which sources go on.
        """
        parts = []
        if self.beam.groups == 1 and self.beam.rules is NONE:
            parts.append(self._extend(0, self._best(logits)))
        else:
            check_logits(logits)
            log_p = self._log_p(logits)
            taken = torch.zeros_like(log_p[:, 0])
            for group in range(self.beam.groups):
                parts.append(self._extend(group, self._best_of_group(group, log_p, taken)))
                scores, texts, _ = parts[-1]
                taken.scatter_add_(1, texts[:, :, -1], (scores > NEVER).to(taken.dtype))
        self.scores, self.written, parents = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        if self.covered is not None:
            self.covered = _pick(self.covered, parents)
        kept = torch.tensor(self._going(), dtype=torch.long, device=logits.device)
        self.sources = [self.sources[i] for i in kept.tolist()]
        self.scores, self.written = self.scores[kept], self.written[kept]
        if self.covered is not None and self.filled is not None:
            self.covered, self.filled = self.covered[kept], self.filled[kept]
        return parents, kept

    def _log_p(self, logits: Float[Tensor, "rows v"]) -> Float[Tensor, "s w v"]:
        """Log-probabilities under the rules."""
        log_p, beam = logits.float().log_softmax(dim=-1), self.beam
        if beam.never:
            never = torch.tensor(sorted(beam.never), device=logits.device)
            log_p.index_fill_(1, never, NEVER)
        log_p = log_p.view(*self.scores.shape, -1)
        if beam.rules is NONE:
            return log_p
        rows = zip(self.sources, log_p, self.written.tolist(), strict=True)
        ruled = [
            apply_rules(row, beam.rules, source.prompt, text, beam.stop, source.limit)
            for source, own, texts in rows
            for row, text in zip(own, texts, strict=True)
        ]
        return torch.stack(ruled).view_as(log_p)

    def _penalty(self) -> Float[Tensor, "s w"]:
        """What each beam pays for what it has not looked at."""
        if self.covered is None or self.filled is None:
            return torch.zeros_like(self.scores)
        least = torch.finfo(self.covered.dtype).tiny
        logs = self.covered.clamp(min=least, max=1.0).log().masked_fill(~self.filled, 0.0)
        return self.beam.coverage_penalty * logs.sum(dim=2)

    def _extend(self, group: int, candidates: Candidates) -> tuple[Tensor, Tensor, Tensor]:
        """The group's next beams: their sums, their texts, and which beams they extend."""
        beam, penalty = self.beam, self._penalty()
        worth, values, parents, tokens = candidates
        texts = torch.cat((_pick(self.written, parents), tokens.unsqueeze(2)), dim=2)
        length = texts.shape[2]
        stop = torch.tensor(sorted(beam.stop), dtype=torch.long, device=tokens.device)
        full = torch.tensor([length >= one.limit for one in self.sources], device=tokens.device)
        ended = torch.isin(tokens, stop) | full.unsqueeze(1)
        hits = (ended & (values > NEVER))[:, : self.size].nonzero()
        paid = penalty.gather(1, parents)
        columns = [x[*hits.T].tolist() for x in (texts, values, paid)]
        for (source, _), *found in zip(hits.tolist(), *columns, strict=True):
            self.sources[source].books[group].add(*found)
        order = worth.masked_fill(ended, NEVER).topk(self.size, dim=1).indices
        scores = values.masked_fill(ended, NEVER).gather(1, order)
        now = scores / length**beam.length_penalty + paid.gather(1, order)
        state = zip(scores.amax(1).tolist(), now.amax(1).tolist(), strict=True)
        for source, (best, score) in enumerate(state):
            if not self.sources[source].books[group].is_open(best, score, length):
                scores[source] = NEVER
        return scores, _pick(texts, order), parents.gather(1, order)

    def _count(self, v: int) -> int:
        """How many extensions of a group are looked at: so many that all beams go on even if every
        stop id of every beam is among them.
        """
        return min(max(2, 1 + len(self.beam.stop)), v) * self.size

    def _best(self, logits: Float[Tensor, "rows v"]) -> Candidates:
        """The best extensions [s, k]: what they are compared by, their sums, the beams they extend,
        and by which tokens.
        """
        v = logits.shape[1]
        count = self._count(v)
        # No more of one beam can be among the best of all.
        found = best_log_p(logits.float().contiguous(), min(count, v), sorted(self.beam.never))
        values, indices = (each.view(*self.scores.shape, -1) for each in found)
        sums, parents, tokens = _best_of_all(self.scores, values, indices, count)
        return sums, sums, parents, tokens

    def _best_of_group(
        self, group: int, log_p: Float[Tensor, "s w v"], taken: Float[Tensor, "s v"]
    ) -> Candidates:
        """The same of a group, where tokens that others have taken are worth less."""
        first, v = group * self.size, log_p.shape[2]
        count, own = self._count(v), slice(first, first + self.size)
        worth = log_p[:, own] - self.beam.diversity_penalty * taken.unsqueeze(1)
        few = best_few(worth, min(count, v))
        best, parents, tokens = _best_of_all(self.scores[:, own], *few, count)
        parents = first + parents
        values = self.scores.gather(1, parents) + log_p.flatten(1).gather(1, parents * v + tokens)
        return best, values, parents, tokens

    def _going(self) -> list[int]:
        """The sources that have a beam left."""
        return (self.scores > NEVER).any(dim=1).nonzero().flatten().tolist()


def _best_of_all(
    scores: Float[Tensor, "s w"],
    values: Float[Tensor, "s w k"],
    indices: Int[Tensor, "s w k"],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the best extensions of every beam the best: their sums, beams and tokens."""
    best = (scores.unsqueeze(2) + values).flatten(1).topk(count, dim=1)
    return (
        best.values,
        best.indices // values.shape[2],
        indices.flatten(1).gather(1, best.indices),
    )


@contextmanager
def _looking(net: Any, beam: Beam, memory: Memory | None) -> Iterator[Activations | None]:
    """What the last layer looks at in the source, if somebody wants to know."""
    if not beam.coverage_penalty:
        yield None
        return
    require(
        memory is not None,
        "A coverage penalty is for encoder-decoders: this model has no source to cover. Use 0.",
    )
    last = len(net.decoder.stack.blocks) - 1
    require(
        net.decoder.stack.blocks[last].cross_attn is not None,
        "A coverage penalty needs a decoder that looks at its source; this one has the source's "
        "last state alone. Use 0.",
    )
    with capture(net, f"decoder.stack.blocks.{last}.cross_attn.pattern") as looks:
        yield looks


def _last_look(looks: Activations, width: int, lengths: list[int]) -> Float[Tensor, "s w k"]:
    """How much each beam's last token looks at each of the source's, on average over the heads."""
    (pattern,) = looks.values()  # [s, h, w * t, k]
    each = pattern.float().mean(dim=1).unflatten(1, (width, -1))
    rows = torch.arange(len(lengths), device=each.device)
    return each[rows, :, torch.tensor(lengths, device=each.device) - 1]


def _pick(texts: Shaped[Tensor, "s w n"], which: Int[Tensor, "s k"]) -> Shaped[Tensor, "s k n"]:
    """Of each source these beams."""
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
