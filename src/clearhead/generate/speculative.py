"""Speculative decoding: guess several tokens cheaply, let the model read them all in one call.

A draft x is kept with probability min(1, p(x) / q(x)), where q drew it and p is what the model
would have drawn from. The first one that is not is drawn anew from max(0, p - q), normalised; if
all are kept, the same call gives one token more. What comes out is distributed exactly as p; at
temperature 0 it is the greedy text, token for token.

    text so far   d1  d2  d3  d4         one call of the model
                  yes yes no             -> d1, d2, another token; both caches go back to d2

Leviathan et al. 2023, algorithm 1. Where there is no second model, drafts are what followed the
same last tokens earlier in the text; then q is 1 at the draft. The draws are others than those of
`decode_tokens` with the same seed, their distribution is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import require
from clearhead.generate.batch import check_logits, check_prompts
from clearhead.generate.rules import NEVER, NONE, apply_rules, bar
from clearhead.generate.sampling import Sampling, probabilities
from clearhead.layers.stack import Memory


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A smaller model with the same vocabulary that writes ahead."""

    net: Any
    """Its network."""
    count: int = 4
    """How many tokens it writes ahead."""
    max_len: int | None = None
    """How many positions it has, if fewer than the model: behind them nothing is drafted."""
    memory: Memory | None = None
    """What its own encoder made of the source, if it is an encoder-decoder."""

    def __post_init__(self) -> None:
        _check_count("count", self.count)


@dataclass(frozen=True)
class PromptLookup:
    """No second model: what followed the last tokens where they stood before."""

    ngram: int = 3
    """How many last tokens are looked up, at most; fewer, if so many are not found."""
    count: int = 10
    """How many of the tokens that followed are drafted."""
    also: tuple[int, ...] = ()
    """Ids to look in as well: those of an encoder-decoder's source, say."""

    def __post_init__(self) -> None:
        _check_count("ngram", self.ngram)
        _check_count("count", self.count)


Draft = DraftModel | PromptLookup


@dataclass
class Tally:
    """What came of the drafts."""

    drafted: int = 0
    """Tokens that were guessed."""
    accepted: int = 0
    """How many of them the model took."""
    calls: int = 0
    """Calls of the model, the prompt's included."""

    @property
    def rate(self) -> float:
        """The share of drafts that were taken."""
        return self.accepted / self.drafted if self.drafted else 0.0


def speculate(
    net: Any,
    prompt: Collection[int],
    sampling: Sampling,
    max_len: int,
    draft: Draft,
    memory: Memory | None = None,
    tally: Tally | None = None,
) -> Iterator[int]:
    """The ids that follow a prompt, as `decode_tokens` gives them; `tally` is counted up."""
    check_prompts([list(prompt)], max_len)
    tally = Tally() if tally is None else tally
    choice = _Choice(list(prompt), sampling, next(net.parameters()).device)
    if isinstance(draft, DraftModel):
        _check_vocabularies(net, draft.net)
    ids = list(prompt)  # of the text what fits into the context
    while True:
        left = sampling.max_new_tokens - len(choice.text)
        room = min(len(ids) + left, max_len)
        reader = _Reader(net, memory, room, draft.count)
        author = _author(draft, choice, room)
        while left > 0 and len(ids) < max_len:
            # Only the step itself is without gradients and dropout: between tokens the caller
            # works.
            with torch.inference_mode(), net.at_rest():
                # One token more than the drafts comes out of a step, and all must have a place.
                guessed, q = author.write(ids, min(draft.count, room - len(ids) - 1))
                p = choice.distribution(reader.read(ids, guessed), guessed)
                new, kept = choice.settle(p, guessed, q)
                reader.go_back(len(ids) + len(new) - 1)
                author.go_back(len(ids) + len(new) - 1)
            tally.calls += 1
            tally.drafted += len(guessed)
            tally.accepted += kept
            for token in new:
                if token in sampling.stop:
                    return
                yield token
            ids += new
            choice.text += new
            left -= len(new)
        if left == 0 or memory is not None or max_len < 2:
            return
        ids = ids[-(max_len // 2) :]  # as `decode_tokens` goes on


class _Choice:
    """What may follow, as probabilities, and the rule that keeps a draft or not."""

    def __init__(self, prompt: list[int], sampling: Sampling, device: torch.device) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.text: list[int] = []  # what was written so far
        self.dice, self._device = sampling.dice(0, device), device

    def distribution(
        self, logits: Float[Tensor, "n v"], guessed: Sequence[int]
    ) -> Float[Tensor, "n v"]:
        """What is drawn from behind the last n - 1 drafts, and before them; the best token alone at
        temperature 0.
        """
        check_logits(logits)
        how, first = self.sampling, len(guessed) + 1 - len(logits)
        if how.never:
            logits = torch.stack([bar(row, how.never) for row in logits])
        if how.rules is not NONE:
            ends = (how.stop, how.max_new_tokens)
            texts = [[*self.text, *guessed[: first + i]] for i in range(len(logits))]
            pairs = zip(logits, texts, strict=True)
            logits = torch.stack(
                [apply_rules(row, how.rules, self.prompt, text, *ends) for row, text in pairs]
            )
        if how.temperature == 0:
            p = torch.zeros_like(logits).scatter(1, logits.argmax(dim=1, keepdim=True), 1.0)
        else:
            p = probabilities(logits, *how.how)
        # Where the rules leave nothing, nothing has a probability: no draft is taken there.
        return p.masked_fill(logits.amax(dim=1, keepdim=True) == NEVER, 0.0)

    def draw(self, p: Float[Tensor, " v"]) -> int:
        """One token."""
        require(
            float(p.sum()) > 0,
            "No token may come next: the rules (banned and forced tokens, n-grams that may not "
            "repeat) rule out all of them. Relax one.",
        )
        if self.sampling.temperature == 0:
            return int(p.argmax())
        return int(torch.multinomial(p, 1, generator=self.dice))

    def settle(
        self, p: Float[Tensor, "n v"], guessed: Sequence[int], q: Float[Tensor, "m v"] | None
    ) -> tuple[list[int], int]:
        """The drafts that are kept and one token more, and how many are drafts; without q the
        drafts were certain.
        """
        for i, token in enumerate(guessed):
            sure = 1.0 if q is None else float(q[i, token])
            if self._uniform() * sure < float(p[i, token]):
                continue
            rest = p[i].clone()
            if q is None:
                rest[token] = 0.0
            else:
                rest = (rest - q[i]).clamp(min=0.0)
            # Nothing is left only by rounding: then p and q are the same.
            return self._one_more(guessed[:i], rest if float(rest.sum()) > 0 else p[i])
        return self._one_more(guessed, p[len(guessed)])

    def _one_more(self, kept: Sequence[int], p: Float[Tensor, " v"]) -> tuple[list[int], int]:
        """Kept drafts come even if nothing may follow them: that is said in the next step."""
        if kept and float(p.sum()) == 0:
            return list(kept), len(kept)
        return [*kept, self.draw(p)], len(kept)

    def _uniform(self) -> float:
        if self.sampling.temperature == 0:
            return 0.5
        return float(torch.rand((), generator=self.dice, device=self._device))


class _Reader:
    """A network and what it has read of a text; it can go back."""

    def __init__(self, net: Any, memory: Memory | None, room: int, slack: int) -> None:
        self.net, self.device = net, next(net.parameters()).device
        self.cache = net.new_cache(1 if memory is None else memory, room, slack=slack)
        self.saved: Any = None

    def read(self, ids: Sequence[int], guessed: Sequence[int] = ()) -> Float[Tensor, "n v"]:
        """Logits behind the text and behind each of the tokens that may be taken back."""
        if guessed and not self.cache.trims:
            if self.cache.length < len(ids) - 1:
                self._feed(ids[self.cache.length : -1])
            self.saved = self.cache.snapshot()
        logits = self._feed([*ids[self.cache.length :], *guessed])
        return logits[-len(guessed) - 1 :]

    def go_back(self, length: int) -> None:
        """Forget what stands at `length` and behind; a state that cannot is put back to where it
        was saved, and reads again from there.
        """
        if length >= self.cache.length:
            return
        if self.cache.trims:
            self.cache.trim(length)
        else:
            self.cache.restore(self.saved)

    def _feed(self, new: Sequence[int]) -> Float[Tensor, "n v"]:
        given = torch.tensor([list(new)], device=self.device)
        return self.net.decode(given, cache=self.cache)[0]


class _ModelAuthor:
    """Drafts by a model: token by token, each with the distribution it was drawn from."""

    def __init__(self, draft: DraftModel, choice: _Choice, room: int) -> None:
        self.choice, self.draft = choice, draft
        self.room = room if draft.max_len is None else min(room, draft.max_len)
        self.reader = _Reader(draft.net, draft.memory, self.room, draft.count)

    def write(
        self, ids: Sequence[int], count: int
    ) -> tuple[list[int], Float[Tensor, "m v"] | None]:
        guessed: list[int] = []
        rows: list[Tensor] = []
        for _ in range(min(count, self.room - len(ids))):
            with self.draft.net.at_rest():
                logits = self._read(ids, guessed)
            p = self.choice.distribution(logits, guessed)
            if float(p.sum()) == 0:
                break
            rows.append(p)
            guessed.append(self.choice.draw(p[0]))
        return guessed, torch.cat(rows) if rows else None

    def go_back(self, length: int) -> None:
        self.reader.go_back(length)

    def _read(self, ids: Sequence[int], guessed: Sequence[int]) -> Float[Tensor, "1 v"]:
        """The logits behind the last draft; the text itself is never taken back."""
        reader = self.reader
        if guessed:
            return reader._feed(guessed[-1:])[-1:]
        logits = reader.read(ids)
        reader.saved = None if reader.cache.trims else reader.cache.snapshot()
        return logits


class _LookupAuthor:
    """Drafts from the text itself: behind the last place where it went on from the same tokens."""

    def __init__(self, draft: PromptLookup) -> None:
        self.draft = draft
        self.text: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}  # some tokens -> where they last went on
        self._learn(draft.also)
        self.offset = len(self.text)

    def write(self, ids: Sequence[int], count: int) -> tuple[list[int], None]:
        self._learn(ids[len(self.text) - self.offset :])
        if count < 1:
            return [], None
        for n in range(min(self.draft.ngram, len(ids)), 0, -1):
            start = self.follows.get(tuple(ids[-n:]))
            if start is not None:
                return self.text[start : start + count], None
        return [], None

    def go_back(self, length: int) -> None:
        """Nothing: only what is certain was learnt."""

    def _learn(self, new: Sequence[int]) -> None:
        """The last token is what runs end with; what follows it is not known yet."""
        for token in new:
            end = len(self.text)
            for n in range(1, min(self.draft.ngram, end) + 1):
                self.follows[tuple(self.text[end - n :])] = end
            self.text.append(token)


def _author(draft: Draft, choice: _Choice, room: int) -> _ModelAuthor | _LookupAuthor:
    if isinstance(draft, DraftModel):
        return _ModelAuthor(draft, choice, room)
    return _LookupAuthor(draft)


def _check_count(name: str, value: object) -> None:
    require(
        type(value) is int and value >= 1,
        f"{name} of a draft is a whole number of 1 or more, not {value!r}.",
    )


def _check_vocabularies(net: Any, draft: Any) -> None:
    """Refuse a draft whose ids mean something else, before it reads any."""
    sizes = [getattr(getattr(one.head, "proj", None), "out_features", None) for one in (net, draft)]
    require(
        None in sizes or sizes[0] == sizes[1],
        f"The model has {sizes[0]} tokens and its draft {sizes[1]}: a draft needs the same "
        "vocabulary, or its ids mean something else.",
    )
