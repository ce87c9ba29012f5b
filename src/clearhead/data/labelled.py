"""Texts with labels: one for a text, one for every word.

classification   a fine film         ->  positive
tagging          Ann | lives | here  ->  PER | O | O     (the first token of a word carries its tag)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.corpus import Corpus
from clearhead.data.objective import (
    READER,
    Examples,
    Objective,
    Record,
    column_of,
    padded,
    places,
    text_of,
)
from clearhead.data.shards import Store
from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.tokenizer import Encoded, Tokenizer


class ReaderObjective(Objective):
    """An objective of an encoder on whole texts."""

    shape = "encoder"
    roles: ClassVar[dict[str, str]] = READER
    template: ClassVar[str] = "[CLS] $A [SEP]"
    pair_template: ClassVar[str | None] = "[CLS] $A [SEP] $B:1 [SEP]:1"

    def lengths(self, store: Store) -> np.ndarray:
        return store.lengths("ids")[:, None]


@dataclass(frozen=True)
class Classification(ReaderObjective, kind="classification"):
    """The label of a text, or of two."""

    text: str = "text"
    """The column of the text."""
    second: str | None = None
    """The column of the other text, where a label is about two."""
    label: str = "label"
    """The column of the label."""
    labels: tuple[str, ...] = ()
    """The names of the labels in the order of their numbers; none: those of the training data, in
    order.
    """
    max_len: int | None = None
    """Longer texts are cut to so many tokens (of two, the longer one is cut)."""
    segments: bool = True
    """Whether the model is told which of the two texts a token belongs to."""

    ask = "label"
    head: ClassVar[str | None] = "classification"

    def __post_init__(self) -> None:
        require(self.text != self.second, f'text and second are both "{self.text}".')
        _check_labels(self.labels)
        check_max_len(self.max_len)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.text, *([] if self.second is None else [self.second]), self.label)

    def prepare(self, corpus: Corpus) -> Classification:
        super().prepare(corpus)
        if self.labels:
            return self
        found = (
            label_name(column_of(record, self.label, where), where)
            for where, record in _numbered(corpus)
        )
        return replace(self, labels=label_names(found, self.label))

    def texts(self, record: Record) -> list[str]:
        names = (self.text, self.second)
        return [value for name in names if name and isinstance(value := record.get(name), str)]

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        label = label_number(column_of(record, self.label, where), self.labels, where)
        first = text_of(record, self.text, where)
        if self.second is None:
            encoded = tokenizer.encode_with_offsets(first)
        else:
            encoded = tokenizer.encode_pair(first, text_of(record, self.second, where))
        kept = cut_to(encoded, self.max_len, where)
        example: dict[str, Any] = {"ids": [encoded.ids[i] for i in kept], "label": label}
        if self.second is not None and self.segments:
            example["types"] = [encoded.types[i] for i in kept]
        return example

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        ids, where, tokens = read_side_by_side(examples)
        targets = torch.tensor([int(example["label"]) for example in examples])
        return Batch((ids,), targets, where, len(examples), ids.numel(), tokens)


@dataclass(frozen=True)
class Tagging(ReaderObjective, kind="tagging"):
    """The tag of every word."""

    words: str = "words"
    """The column of the words: a list, or a text with blanks between them."""
    tags: str = "tags"
    """The column of the tags, one a word, in the same form."""
    labels: tuple[str, ...] = ()
    """The names of the tags in the order of their numbers; none: those of the training data, in
    order.
    """

    ask = "tags"
    head: ClassVar[str | None] = "tagging"

    def __post_init__(self) -> None:
        require(self.words != self.tags, f'words and tags are both "{self.words}".')
        _check_labels(self.labels)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.words, self.tags)

    def prepare(self, corpus: Corpus) -> Tagging:
        super().prepare(corpus)
        if self.labels:
            return self
        found = (
            label_name(tag, where)
            for where, record in _numbered(corpus)
            for tag in _listed(record, self.tags, where)
        )
        return replace(self, labels=label_names(found, self.tags))

    def texts(self, record: Record) -> list[str]:
        return [" ".join(map(str, _listed(record, self.words, "A record")))]

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        words = [str(word) for word in _listed(record, self.words, where)]
        tags = _listed(record, self.tags, where)
        require(
            len(words) == len(tags),
            f"{where} has {len(words)} words and {len(tags)} tags: one tag a word.",
        )
        require(len(words) > 0, f"{where} has no words.")
        encoded = tokenizer.encode_words(words)
        numbers, last = [], None
        for word in encoded.words:
            if word is None or word == last:
                numbers.append(IGNORED)
            else:
                numbers.append(label_number(tags[word], self.labels, where))
            last = word
        return {"ids": encoded.ids, "tags": numbers}

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        ids, where, tokens = read_side_by_side(examples)
        targets, at, _ = padded([example["tags"] for example in examples])
        if at is not None:
            targets[~at.filled()] = IGNORED
        count = int((targets != IGNORED).sum())
        return Batch((ids,), targets, where, count, ids.numel(), tokens)


def read_side_by_side(
    examples: Examples, column: str = "ids"
) -> tuple[torch.Tensor, dict[str, Any], int]:
    """The ids of texts, where they stand (with segments, if there are any), how many tokens."""
    ids, at, lengths = padded([example[column] for example in examples])
    types = None
    if "types" in examples[0]:
        types, _, _ = padded([example["types"] for example in examples])
        types = types if bool(types.any()) else None
    return ids, places(at=at, types=types), int(lengths.sum())


def cut_to(encoded: Encoded, max_len: int | None, where: str) -> list[int]:
    """Which tokens are kept of a text, or of two, that is too long: the longer one is cut at its
    end, special tokens stay.
    """
    kept = list(range(len(encoded.ids)))
    if max_len is None or len(kept) <= max_len:
        return kept
    parts = [[i for i in kept if encoded.parts[i] == part] for part in (0, 1)]
    room = max_len - (len(kept) - len(parts[0]) - len(parts[1]))
    require(room >= 1, f"{where}: max_len {max_len} leaves no room beside the special tokens.")
    short = min(len(parts[0]), len(parts[1]))
    if short > room // 2:
        sizes = [room - room // 2, room // 2]
    else:
        sizes = [short, room - short] if len(parts[0]) == short else [room - short, short]
    gone = {i for part, size in zip(parts, sizes, strict=True) for i in part[size:]}
    return [i for i in kept if i not in gone]


def label_names(found: Iterable[str], column: str) -> tuple[str, ...]:
    """The names of labels in order: of numbers if all are, else of letters."""
    names = set(found)
    require(len(names) > 0, f'There are no labels in "{column}": the training data is empty.')
    require(
        len(names) > 1,
        f'"{column}" is always "{next(iter(names))}" in the training data: there is nothing to '
        "tell apart.",
    )
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def label_number(value: Any, labels: tuple[str, ...], where: str) -> int:
    """The number of a label; one that training never showed is an error."""
    require(
        len(labels) > 0, "The names of the labels are not known yet: prepare(corpus) finds them."
    )
    name = label_name(value, where)
    number = _numbers(labels).get(name)
    if number is None:
        shown = ", ".join(labels[:12]) + (", ..." if len(labels) > 12 else "")
        raise ClearheadError(
            f'{where}: the label "{name}" does not occur in the training data.'
            f"{did_you_mean(name, labels)} Labels: {shown}. What validates and tests can only have "
            "labels that are trained."
        )
    return number


def check_max_len(max_len: int | None) -> None:
    """A length that something fits in."""
    require(max_len is None or max_len >= 1, f"max_len counts tokens: 1 or more, not {max_len}.")


def _check_labels(labels: tuple[str, ...]) -> None:
    twice = sorted({name for name in labels if labels.count(name) > 1})
    require(not twice, f"labels names {', '.join(twice)} more than once.")


def label_name(value: Any, where: str) -> str:
    """What a label is called; a missing one is no class of its own."""
    name = value.strip() if isinstance(value, str) else str(value)
    missing = value is None or name == "" or (isinstance(value, float) and math.isnan(value))
    require(
        not missing,
        f"{where} has no label (it is {value!r}): give it one, or take the record away.",
    )
    return name


def _numbered(corpus: Corpus) -> Iterator[tuple[str, Record]]:
    """The training records, each with what messages call it."""
    for number, record in enumerate(corpus.sample("train"), start=1):
        yield f"record {number}", record


def _listed(record: Record, column: str, where: str) -> list[Any]:
    """A list of words, or the words of a text."""
    value = column_of(record, column, where)
    if isinstance(value, str):
        return value.split()
    require(
        isinstance(value, (list, tuple)),
        f'{where}: "{column}" is {value!r}; a list of words, or a text with blanks between them, '
        "belongs there.",
    )
    require(None not in value, f'{where}: "{column}" has a gap: {list(value)[:12]}.')
    return list(value)


@functools.lru_cache(maxsize=4)
def _numbers(labels: tuple[str, ...]) -> dict[str, int]:
    return {name: number for number, name in enumerate(labels)}
