"""Filling in what was hidden: single tokens (BERT) or spans of them (T5).

masked   the [MASK] sat down   ->  . cat . .                  Devlin et al. 2019, sec. 3.1
spans    the <0> down <1>      ->  <0> cat sat <1> quietly    Raffel et al. 2020, sec. 3.1.4

Differs from the papers: how many tokens of a row are asked for is exact (the rate times its
ordinary tokens, rounded, at least one), as in BERT's code; there is no next sentence to recognise.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.objective import (
    READER,
    WRITER,
    Examples,
    StreamObjective,
    Vocabulary,
    padded,
    places,
    shifted,
)
from clearhead.data.shards import Store
from clearhead.errors import ClearheadError, require
from clearhead.text.tokenizer import Tokenizer

SENTINELS = tuple(f"<extra_id_{i}>" for i in range(100))


@dataclass(frozen=True)
class Masked(StreamObjective, kind="masked"):
    """Some tokens from all the others.

    Of the tokens that are asked for, most are shown as the mask, some as another token and some as
    they are, so that the network cannot tell which ones count.
    """

    rate: float = 0.15
    """Which part of the ordinary tokens is asked for."""
    mask: float = 0.8
    """Which part of those is shown as the mask."""
    swap: float = 0.1
    """Which part of those is shown as a random ordinary token; the rest is shown as it is."""
    vocabulary: Vocabulary | None = None
    """What the tokeniser decides; `bind` sets it."""

    shape = "encoder"
    ask = "tokens"
    head: ClassVar[str | None] = "masked_lm"
    roles: ClassVar[dict[str, str]] = READER
    template: ClassVar[str] = "[CLS] $A [SEP]"
    pair_template: ClassVar[str | None] = "[CLS] $A [SEP] $B:1 [SEP]:1"

    def __post_init__(self) -> None:
        require(
            0 < self.rate < 1, f"rate is a part of the tokens: between 0 and 1, not {self.rate}."
        )
        require(
            min(self.mask, self.swap) >= 0 and self.mask + self.swap <= 1,
            f"mask ({self.mask}) and swap ({self.swap}) are parts of what is asked for: 0 or more, "
            "and together at most 1.",
        )

    def bind(self, tokenizer: Tokenizer) -> Masked:
        require(
            tokenizer.mask_id is not None,
            'The tokeniser has no mask token: train it with special_tokens {"mask": "[MASK]"}, or '
            "choose the objective next_token.",
        )
        vocabulary = Vocabulary.of(tokenizer)
        require(
            len(vocabulary.special) < vocabulary.size,
            "The tokeniser has special tokens only: there is nothing to mask.",
        )
        return replace(self, vocabulary=vocabulary)

    def taken(self, length: int) -> int:
        return length - len(_bound(self, self.vocabulary).around)

    def lengths(self, store: Store) -> np.ndarray:
        return super().lengths(store) + len(_bound(self, self.vocabulary).around)

    def window(self, ids: np.ndarray, dice: np.random.Generator) -> Batch:
        inputs = self._around(ids.astype(np.int64))
        targets = self._hide(inputs, np.ones(inputs.shape, dtype=bool), dice)
        return Batch(
            (torch.from_numpy(inputs),),
            torch.from_numpy(targets),
            count=int((targets != IGNORED).sum()),
            slots=inputs.size,
            tokens=inputs.size,
        )

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        inputs, at, lengths = padded([self._around(e["ids"][None])[0] for e in examples])
        filled = np.arange(inputs.shape[1]) < lengths[:, None]
        targets = self._hide(inputs.numpy(), filled, dice)
        return Batch(
            (inputs,),
            torch.from_numpy(targets),
            places(at=at),
            count=int((targets != IGNORED).sum()),
            slots=inputs.numel(),
            tokens=int(lengths.sum()),
        )

    def _around(self, ids: np.ndarray) -> np.ndarray:
        """Rows between the two tokens that an encoder's text stands between."""
        around = _bound(self, self.vocabulary).around
        if not around:
            return ids
        first, last = (np.full((len(ids), 1), id, dtype=np.int64) for id in around)
        return np.concatenate([first, ids, last], axis=1)

    def _hide(self, ids: np.ndarray, filled: np.ndarray, dice: np.random.Generator) -> np.ndarray:
        """Change `ids` in place; what was there is returned, IGNORED where nothing is asked."""
        known = _bound(self, self.vocabulary)
        assert known.mask is not None
        usable = filled & ~np.isin(ids, np.array(known.special))
        number = usable.sum(axis=1, keepdims=True)
        wanted = np.minimum(np.maximum(np.round(number * self.rate), 1), number)
        # The first so many of a random order in which unusable slots come last.
        order = np.argsort(np.where(usable, dice.random(ids.shape), 2.0), axis=1)
        asked = np.zeros(ids.shape, dtype=bool)
        np.put_along_axis(asked, order, np.arange(ids.shape[1]) < wanted, axis=1)
        targets = np.where(asked, ids, IGNORED)
        fate = dice.random(ids.shape)
        ids[asked & (fate < self.mask)] = known.mask
        swapped = asked & (fate >= self.mask) & (fate < self.mask + self.swap)
        ordinary = _ordinary(known)
        ids[swapped] = ordinary[dice.integers(len(ordinary), size=int(swapped.sum()))]
        return targets


@dataclass(frozen=True)
class Spans(StreamObjective, kind="spans"):
    """Spans from the text around them: each is shown as one sentinel, and the target names each
    sentinel with what it stood for.
    """

    rate: float = 0.15
    """Which part of the tokens is hidden."""
    mean: float = 3.0
    """How many tokens a span has on average."""
    vocabulary: Vocabulary | None = None
    """What the tokeniser decides; `bind` sets it."""

    shape = "encoder-decoder"
    ask = "tokens"
    head: ClassVar[str | None] = "lm"
    roles: ClassVar[dict[str, str]] = WRITER
    template: ClassVar[str] = "$A </s>"
    shortest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require(
            0 < self.rate < 1, f"rate is a part of the tokens: between 0 and 1, not {self.rate}."
        )
        require(self.mean >= 1, f"A span has on average one token or more, not {self.mean}.")

    @property
    def extra_tokens(self) -> tuple[str, ...]:
        return SENTINELS

    def bind(self, tokenizer: Tokenizer) -> Spans:
        found = [tokenizer.id(name) for name in SENTINELS if name in tokenizer]
        require(
            len(found) > 0,
            "The tokeniser has no sentinels (<extra_id_0>, <extra_id_1>, ...): train it with them "
            "as extra_tokens.",
        )
        require(
            tokenizer.eos_id is not None and tokenizer.pad_id is not None,
            "Targets start with the padding token and end with the eos token; the tokeniser lacks "
            'one: train it with special_tokens {"pad": "<pad>", "eos": "</s>"}.',
        )
        return replace(self, vocabulary=Vocabulary.of(tokenizer, found))

    def window(self, ids: np.ndarray, dice: np.random.Generator) -> Batch:
        """Every row has the same number of hidden tokens and spans, so nothing is padded."""
        source, target = self._corrupt(ids.astype(np.int64), dice)
        read, written = torch.from_numpy(source), torch.from_numpy(target)
        inputs, targets = written[:, :-1].contiguous(), written[:, 1:].contiguous()
        slots = read.numel() + inputs.numel()
        return Batch((read, inputs), targets, count=targets.numel(), slots=slots, tokens=slots)

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        """Texts of different lengths; one of a single token hides nothing, so it must have two."""
        for example in examples:
            require(len(example["ids"]) >= 2, "A text needs two tokens to hide one of them.")
        pairs = [self._corrupt(e["ids"][None].astype(np.int64), dice) for e in examples]
        source, source_at, read = padded([row[0] for row, _ in pairs])
        inputs, targets, target_at, written = shifted([row[0] for _, row in pairs])
        count = int(written.sum())
        return Batch(
            (source, inputs),
            targets,
            places(source_at=source_at, target_at=target_at),
            count=count,
            slots=source.numel() + inputs.numel(),
            tokens=int(read.sum()) + count,
        )

    def _corrupt(self, ids: np.ndarray, dice: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sources, and targets with what they start and end with."""
        known = _bound(self, self.vocabulary)
        assert known.eos is not None
        assert known.pad is not None
        rows, length = ids.shape
        hidden, spans = span_counts(length, self.rate, self.mean)
        require(
            spans <= len(known.sentinels),
            f"A window of {length} tokens has {spans} hidden spans, and the tokeniser has "
            f"{len(known.sentinels)} sentinels: shorten the context, lower rate, or raise mean.",
        )
        noise = hide_spans(rows, length, hidden, spans, dice)
        sentinels = np.array(known.sentinels[:spans])
        end = np.full((rows, 1), known.eos, dtype=np.int64)
        start = np.full((rows, 1), known.pad, dtype=np.int64)
        source = np.concatenate([_replaced(ids, noise, sentinels), end], axis=1)
        # A target is the source with the roles exchanged: what is shown is left out. Windows begin
        # with shown tokens, so its first sentinel is the first one.
        target = np.concatenate([start, _replaced(ids, ~noise, sentinels), end], axis=1)
        return source, target


def span_counts(length: int, rate: float, mean: float) -> tuple[int, int]:
    """How many tokens of so many are hidden, in how many spans."""
    hidden = min(max(round(length * rate), 1), length - 1)
    spans = min(max(round(hidden / mean), 1), hidden, length - hidden)
    return hidden, spans


def hide_spans(
    rows: int, length: int, hidden: int, spans: int, dice: np.random.Generator
) -> np.ndarray:
    """Which tokens are hidden [rows, length]: shown and hidden runs in turn, the first one shown,
    their lengths a random partition of what is shown and of what is hidden.
    """
    runs = np.empty((rows, 2 * spans), dtype=np.int64)
    runs[:, 0::2] = _partition(rows, length - hidden, spans, dice)
    runs[:, 1::2] = _partition(rows, hidden, spans, dice)
    starts = np.zeros((rows, length), dtype=np.int64)
    np.put_along_axis(starts, np.cumsum(runs, axis=1)[:, :-1], 1, axis=1)
    return np.cumsum(starts, axis=1) % 2 == 1


def _partition(rows: int, items: int, parts: int, dice: np.random.Generator) -> np.ndarray:
    """Random lengths of so many parts, none empty, that add up [rows, parts]."""
    first = np.arange(items - 1) < parts - 1  # which of the gaps between items part them
    cuts = dice.permuted(np.broadcast_to(first, (rows, items - 1)), axis=1)
    places = np.nonzero(cuts)[1].reshape(rows, parts - 1) + 1
    return np.diff(places, axis=1, prepend=0, append=items)


def _replaced(ids: np.ndarray, hide: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Rows in which each run of hidden tokens has become one sentinel. Every row has as many runs
    and hidden tokens as the others.
    """
    begins = hide.copy()
    begins[:, 1:] &= ~hide[:, :-1]
    run = np.cumsum(begins, axis=1) - 1
    shown = np.where(begins, sentinels[np.maximum(run, 0)], ids)
    return shown[begins | ~hide].reshape(len(ids), -1)


def _bound(objective: StreamObjective, vocabulary: Vocabulary | None) -> Vocabulary:
    if vocabulary is None:
        raise ClearheadError(
            f'The objective "{objective.kind}" does not know the tokeniser yet: '
            "objective.bind(tokenizer) tells it."
        )
    return vocabulary


@functools.lru_cache(maxsize=4)
def _ordinary(vocabulary: Vocabulary) -> np.ndarray:
    """The ids that are no special token."""
    return np.setdiff1d(np.arange(vocabulary.size), np.array(vocabulary.special))
