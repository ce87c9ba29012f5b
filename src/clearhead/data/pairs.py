"""Two texts: an answer found in a context, or two texts that mean the same.

span_qa   who wrote it? | Ann wrote it.  ->  first and last token of "Ann"
          Contexts that are too long are read in windows that overlap (Devlin et al. 2019, sec. 4.2,
          and its code); a window without the answer points at its first token.
pairs     a score for each pair (similarity), or each first text finds its second among all second
          texts of the batch (contrast; Reimers & Gurevych 2019, Henderson et al. 2017)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from clearhead.data.batch import Batch
from clearhead.data.labelled import ReaderObjective, check_max_len, cut_to, read_side_by_side
from clearhead.data.objective import Examples, Record, column_of, text_of
from clearhead.data.shards import Store
from clearhead.data.windows import windows
from clearhead.errors import ClearheadError, require
from clearhead.text.tokenizer import Encoded, Tokenizer


@dataclass(frozen=True)
class SpanQA(ReaderObjective, kind="span_qa"):
    """Where in a context the answer to a question stands."""

    question: str = "question"
    """The column of the question."""
    context: str = "context"
    """The column of the text that has the answer."""
    answer: str = "answer"
    """The column of the answer, as it is written in the context; empty: there is none."""
    start: str = "start"
    """The column that says at which character of the context the answer begins."""
    max_len: int | None = None
    """How many tokens question and context have at most, special tokens included; longer contexts
    are read in windows.
    """
    stride: int = 64
    """How many tokens of the context two neighbouring windows share."""
    segments: bool = True
    """Whether the model is told which of question and context a token belongs to."""

    ask = "span"
    head: ClassVar[str | None] = "span"

    def __post_init__(self) -> None:
        names = (self.question, self.context, self.answer, self.start)
        require(len(set(names)) == 4, f"span_qa needs four columns, not {', '.join(names)}.")
        check_max_len(self.max_len)
        require(self.stride >= 0, f"stride counts tokens: 0 or more, not {self.stride}.")

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.question, self.context, self.answer, self.start)

    def texts(self, record: Record) -> list[str]:
        names = (self.question, self.context)
        return [value for name in names if isinstance(value := record.get(name), str)]

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        """The first window that has the answer, or the first."""
        found = self.windows(record, tokenizer, where)
        best = next((window for window in found if any(window["span"])), found[0])
        return {name: best[name] for name in self._kept}

    def examples(self, records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """Every window of every record."""
        for number, record in enumerate(records, start=1):
            for window in self.windows(record, tokenizer, f"record {number}"):
                yield {name: window[name] for name in self._kept}

    @property
    def _kept(self) -> tuple[str, ...]:
        """What of a window is an example."""
        return ("ids", "types", "span") if self.segments else ("ids", "span")

    def windows(
        self, record: Record, tokenizer: Tokenizer, where: str = "record"
    ) -> list[dict[str, Any]]:
        """All windows of a record: ids, types, span (first and last token of the answer; twice 0
        if it is not whole in the window), and offsets: where each token stands in the context, in
        characters, None if it is none of the context's.
        """
        context = text_of(record, self.context, where)
        encoded = tokenizer.encode_pair(text_of(record, self.question, where), context)
        require(1 in encoded.parts, f'{where}: "{self.context}" is empty.')
        answer = self._answer(record, context, where)
        kept = windows(encoded, self.max_len, self.stride, where)
        return [_window(encoded, tokens, answer) for tokens in kept]

    def _answer(self, record: Record, context: str, where: str) -> tuple[int, int] | None:
        """From which character to which; None if the context has no answer."""
        answer = _first(column_of(record, self.answer, where))
        start = _first(column_of(record, self.start, where))
        if answer in (None, ""):
            return None
        try:
            begin = int(start)
        except (TypeError, ValueError) as error:
            raise ClearheadError(
                f'{where}: "{self.start}" is {start!r}; it is the number of the character at '
                "which the answer begins."
            ) from error
        found = context[begin : begin + len(answer)] if begin >= 0 else ""
        require(
            found == answer,
            f'{where}: the answer is "{answer}", but at character {begin} of the context stands '
            f'"{found}".',
        )
        return begin, begin + len(answer)

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        ids, where, tokens = read_side_by_side(examples)
        spans = np.stack([example["span"] for example in examples]).astype(np.int64)
        return Batch((ids,), torch.from_numpy(spans), where, len(examples), ids.numel(), tokens)


@dataclass(frozen=True)
class Pairs(ReaderObjective, kind="pairs"):
    """Vectors of texts that are near where the texts mean the same."""

    first: str = "first"
    """The column of one text."""
    second: str = "second"
    """The column of the other."""
    score: str | None = None
    """The column that says how near they are; none: each is nearest to its own."""
    largest: float = 1.0
    """The score of two texts that mean the same (5 in STS): scores are divided by it."""
    max_len: int | None = None
    """Longer texts are cut to so many tokens."""

    head: ClassVar[str | None] = "pooling"

    def __post_init__(self) -> None:
        require(self.first != self.second, f'first and second are both "{self.first}".')
        require(self.largest > 0, f"largest must be above 0, not {self.largest}.")
        check_max_len(self.max_len)

    @property
    def ask(self) -> Literal["similarity", "contrast"]:  # type: ignore[override]
        """Which loss: the score decides."""
        return "contrast" if self.score is None else "similarity"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.first, self.second, *([] if self.score is None else [self.score]))

    def texts(self, record: Record) -> list[str]:
        names = (self.first, self.second)
        return [value for name in names if isinstance(value := record.get(name), str)]

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        example: dict[str, Any] = {}
        for side, name in (("first", self.first), ("second", self.second)):
            encoded = tokenizer.encode_with_offsets(text_of(record, name, where))
            example[side] = [encoded.ids[i] for i in cut_to(encoded, self.max_len, where)]
        if self.score is not None:
            score = column_of(record, self.score, where)
            try:
                number = float(score)
            except (TypeError, ValueError):
                number = math.nan
            require(
                math.isfinite(number),
                f'{where}: "{self.score}" is {score!r}, which is not a number.',
            )
            example["score"] = number / self.largest
        return example

    def lengths(self, store: Store) -> np.ndarray:
        # Both sides are rows of one batch, so they are padded to the longest of either.
        return np.maximum(store.lengths("first"), store.lengths("second"))[:, None]

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        """Twice as many rows as pairs: all first texts, then all second ones."""
        sides = [{"ids": example[side]} for side in ("first", "second") for example in examples]
        ids, where, tokens = read_side_by_side(sides)
        if self.score is None:
            targets = torch.arange(len(examples))
        else:
            targets = torch.tensor([float(example["score"]) for example in examples])
        return Batch((ids,), targets, where, len(examples), ids.numel(), tokens)


def _window(encoded: Encoded, kept: list[int], answer: tuple[int, int] | None) -> dict[str, Any]:
    """Some tokens of question and context, and where among them the answer stands."""
    offsets = [encoded.offsets[i] if encoded.parts[i] == 1 else None for i in kept]
    span = [0, 0]
    if answer is not None:
        begin, end = answer
        inside = [(i, place) for i, place in enumerate(offsets) if place is not None]
        over = [i for i, place in inside if place[1] > begin and place[0] < end]
        whole = inside[0][1][0] <= begin and end <= inside[-1][1][1]
        if over and whole:
            span = [over[0], over[-1]]
    return {
        "ids": [encoded.ids[i] for i in kept],
        "types": [encoded.types[i] for i in kept],
        "span": span,
        "offsets": offsets,
    }


def _first(value: Any) -> Any:
    """The first of several (data sets list what each reader answered)."""
    if isinstance(value, (list, tuple)):
        return value[0] if value else None
    return value
