"""Writing from left to right: the next token of a text, or of a translation.

next_token   the cat sat                  ->  cat sat down
seq2seq      the cat </s>, <pad> le chat  ->  le chat </s>
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch

from clearhead.data.batch import Batch
from clearhead.data.corpus import Corpus
from clearhead.data.objective import (
    WRITER,
    Examples,
    Objective,
    Record,
    StreamObjective,
    padded,
    places,
    shifted,
    text_of,
)
from clearhead.data.shards import Store
from clearhead.errors import ClearheadError, require
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NextToken(StreamObjective, kind="next_token"):
    """Each token from those before it."""

    shape = "decoder"
    ask = "tokens"
    head: ClassVar[str | None] = "lm"
    roles: ClassVar[dict[str, str]] = {"eos": "<|endoftext|>"}
    overlap: ClassVar[int] = 1  # the last token of a window is the next one's first
    shortest: ClassVar[int] = 2

    def window(self, ids: np.ndarray, dice: np.random.Generator) -> Batch:
        tokens = torch.from_numpy(ids.astype(np.int64))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        count = targets.numel()
        return Batch((inputs,), targets, count=count, slots=count, tokens=count)

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        """Texts side by side; the first token of each is not asked for."""
        inputs, targets, at, lengths = shifted([example["ids"] for example in examples])
        count = int(lengths.sum())
        return Batch((inputs,), targets, places(at=at), count, inputs.numel(), count)

    def lengths(self, store: Store) -> np.ndarray:
        return super().lengths(store) - 1


@dataclass(frozen=True)
class Seq2seq(Objective, kind="seq2seq"):
    """A text from another; the decoder is shown the right tokens so far (teacher forcing)."""

    source: str | None = None
    """The column that is read; None: the first of the data."""
    target: str | None = None
    """The column that is written; None: the second."""
    start: int | None = None
    """The id every target starts with; None: the padding token's, as in T5 and Marian."""

    shape = "encoder-decoder"
    ask = "tokens"
    head: ClassVar[str | None] = "lm"
    roles: ClassVar[dict[str, str]] = WRITER
    template: ClassVar[str] = "$A </s>"

    def __post_init__(self) -> None:
        require(
            self.source is None or self.source != self.target,
            f'source and target are both "{self.source}": name two columns.',
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.source, self.target) if name is not None)

    def prepare(self, corpus: Corpus) -> Seq2seq:
        rest = [name for name in corpus.columns if name not in self.columns]
        missing = 2 - len(self.columns)
        require(
            len(rest) >= missing,
            f"A translation needs two columns, source and target; the data has: "
            f"{', '.join(corpus.columns)}.",
        )
        source = rest.pop(0) if self.source is None else self.source
        target = rest.pop(0) if self.target is None else self.target
        corpus.require_columns(source, target)
        return replace(self, source=source, target=target)

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        """The target is kept with what it starts and ends with: shown without its last, asked
        without its first.
        """
        (example,) = self._encoded([record], [where], tokenizer)
        return example

    def examples(self, records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """A thousand records at a time, which costs a fraction of one by one."""
        records, done = iter(records), 0
        while some := list(islice(records, 1000)):
            where = [f"record {number}" for number in range(done + 1, done + len(some) + 1)]
            yield from self._encoded(some, where, tokenizer)
            done += len(some)

    def _encoded(
        self, records: Sequence[Record], where: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        if self.source is None or self.target is None:
            raise ClearheadError("seq2seq does not know its columns: prepare(corpus) finds them.")
        start = tokenizer.pad_id if self.start is None else self.start
        end = tokenizer.target.eos_id
        if start is None or end is None:
            raise ClearheadError(
                "A target starts with the padding token and ends with the eos token, and this "
                'tokeniser lacks one: train it with special_tokens {"pad": "<pad>", "eos": "</s>"}.'
            )
        both = list(zip(records, where, strict=True))
        read = tokenizer.encode_batch([text_of(r, self.source, at) for r, at in both])
        written = tokenizer.target.encode_batch(
            [text_of(r, self.target, at) for r, at in both], special=False
        )
        for source, target, at in zip(read, written, where, strict=True):
            require(len(source) > 0, f'{at}: "{self.source}" is empty.')
            yield {"source": source, "target": [start, *target, end]}

    def lengths(self, store: Store) -> np.ndarray:
        return np.stack([store.lengths("source"), store.lengths("target") - 1], axis=1)

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        source, source_at, read = padded([example["source"] for example in examples])
        target, asked, target_at, written = shifted([example["target"] for example in examples])
        count = int(written.sum())
        return Batch(
            (source, target),
            asked,
            places(source_at=source_at, target_at=target_at),
            count=count,
            slots=source.numel() + target.numel(),
            tokens=int(read.sum()) + count,
        )
