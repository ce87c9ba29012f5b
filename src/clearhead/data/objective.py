"""What an objective is: how a record becomes an example, and examples a batch.

    record --encode--> example (lists of numbers, kept in a Store) --collate--> Batch

`StreamObjective` is for language models: examples lie one behind the other in one long stream, and
windows of it are the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.attention.positions import Positions
from clearhead.config import Spec
from clearhead.data.batch import IGNORED, Batch
from clearhead.data.corpus import Corpus
from clearhead.data.readers import MORE
from clearhead.data.shards import Store
from clearhead.errors import ClearheadError, did_you_mean
from clearhead.text.tokenizer import Tokenizer

Record = Mapping[str, Any]
Examples = list[dict[str, np.ndarray]]

READER = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
"""Special tokens of a new tokeniser for an encoder."""
WRITER = {"pad": "<pad>", "eos": "</s>"}
"""Special tokens of a new tokeniser for an encoder-decoder."""


class Objective(Spec):
    """What a network is trained for; a sum type by `kind`."""

    shape: ClassVar[Literal["decoder", "encoder", "encoder-decoder"]]
    """Which network."""
    head: ClassVar[str | None] = None
    """Which head of clearhead.models.heads it needs; None: the network has its own."""
    ask: ClassVar[Literal["tokens", "label", "tags", "span", "similarity", "contrast"]]
    """Which loss: the form of `Batch.targets`."""
    stream: ClassVar[bool] = False
    """Whether examples are windows of one long stream."""
    roles: ClassVar[dict[str, str]] = {}
    """Role -> special token, for a tokeniser that is trained for this objective."""
    template: ClassVar[str] = "$A"
    """What such a tokeniser puts around a text."""
    pair_template: ClassVar[str | None] = None
    """And around two."""

    @property
    def extra_tokens(self) -> tuple[str, ...]:
        """More tokens that such a tokeniser never cuts."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a record that are read."""
        return ()

    def prepare(self, corpus: Corpus) -> Objective:
        """The objective with what the data decides (names of labels); its columns must be there."""
        corpus.require_columns(*self.columns)
        return self

    def bind(self, tokenizer: Tokenizer) -> Objective:
        """The objective with what the tokeniser decides (which id is the mask)."""
        return self

    def texts(self, record: Record) -> list[str]:
        """What a tokeniser learns from."""
        return [value for name in self.columns if isinstance(value := record.get(name), str)]

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        """The example of a record; `where` names the record in errors."""
        raise NotImplementedError

    def examples(self, records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """The examples of all records, as they come."""
        for number, record in enumerate(records, start=1):
            yield self.encode(record, tokenizer, f"record {number}")

    def lengths(self, store: Store) -> np.ndarray:
        """How long each example is: [examples, sides]. Padding goes up to the longest of a batch,
        on each side of its own.
        """
        raise NotImplementedError

    def collate(self, examples: Examples, dice: np.random.Generator) -> Batch:
        """One batch of these examples."""
        raise NotImplementedError


class StreamObjective(Objective):
    """An objective of language models, on windows of a stream of tokens (the column "ids")."""

    stream = True

    @property
    def columns(self) -> tuple[str, ...]:
        return ("text",)

    def taken(self, length: int) -> int:
        """How many tokens further the next window of `length` slots begins."""
        return length

    overlap: ClassVar[int] = 0
    """How many tokens of the next window a window shows as well."""
    shortest: ClassVar[int] = 1
    """How many tokens of the stream a window needs at least."""

    def window(self, ids: np.ndarray, dice: np.random.Generator) -> Batch:
        """One batch of windows [rows, taken + overlap] of the stream."""
        raise NotImplementedError

    def encode(self, record: Record, tokenizer: Tokenizer, where: str = "record") -> dict[str, Any]:
        """The tokens of a text and the one that ends it, unless the next record goes on with it."""
        ids = tokenizer.encode(text_of(record, "text", where), special=False)
        return {"ids": ids if record.get(MORE) else ids + ending(tokenizer)}

    def examples(self, records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
        """A token that ends a text stands between texts; behind the last there is none, so that a
        single text is itself and nothing else.
        """
        end, before = ending(tokenizer), False
        for texts, goes_on in _chunks(records):
            for ids, more in zip(tokenizer.encode_batch(texts, False), goes_on, strict=True):
                yield {"ids": end + ids if before else ids}
                before = not more

    def lengths(self, store: Store) -> np.ndarray:
        return store.lengths("ids")[:, None]


def _chunks(
    records: Iterable[Record], most: int = 1 << 20
) -> Iterator[tuple[list[str], list[Any]]]:
    """Texts and whether each goes on, about a million characters at a time."""
    texts: list[str] = []
    more: list[Any] = []
    size = 0
    for number, record in enumerate(records, start=1):
        texts.append(text_of(record, "text", f"record {number}"))
        more.append(record.get(MORE))
        size += len(texts[-1])
        if size >= most:
            yield texts, more
            texts, more, size = [], [], 0
    if texts:
        yield texts, more


@dataclass(frozen=True)
class Vocabulary(Spec, kind="vocabulary"):
    """What an objective that changes tokens knows of the tokeniser."""

    size: int
    """How many ids there are."""
    special: tuple[int, ...]
    """Those that are no ordinary token."""
    mask: int | None = None
    """The id that hides a token."""
    around: tuple[int, ...] = ()
    """What stands before and behind a window: two ids, or none."""
    pad: int | None = None
    """What a target starts with."""
    eos: int | None = None
    """What a text ends with."""
    sentinels: tuple[int, ...] = ()
    """What stands for a span that was left out, in order."""

    @staticmethod
    def of(tokenizer: Tokenizer, sentinels: Sequence[int] = ()) -> Vocabulary:
        """What a tokeniser says."""
        named = {tokenizer.id(token) for token in tokenizer.roles.values()}
        both = (tokenizer.cls_id, tokenizer.sep_id)
        return Vocabulary(
            size=tokenizer.vocab_size,
            special=tuple(sorted(tokenizer.special_ids | named | set(sentinels))),
            mask=tokenizer.mask_id,
            around=() if both[0] is None or both[1] is None else (both[0], both[1]),
            pad=tokenizer.pad_id,
            eos=tokenizer.eos_id,
            sentinels=tuple(sentinels),
        )


def ending(tokenizer: Tokenizer) -> list[int]:
    """The token that ends a text (an encoder's is "sep"), if there is one."""
    end = tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id
    return [] if end is None else [end]


def column_of(record: Record, name: str, where: str) -> Any:
    """A column of a record."""
    if name not in record:
        raise ClearheadError(
            f'{where} has no column "{name}".{did_you_mean(name, record)} It has: '
            f"{', '.join(record)}."
        )
    return record[name]


def text_of(record: Record, name: str, where: str) -> str:
    """A column of a record that must be a text."""
    text = column_of(record, name, where)
    if not isinstance(text, str):
        raise ClearheadError(f'{where}: "{name}" is {text!r}, which is not a text.')
    return text


def padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Positions | None, np.ndarray]:
    """Rows of different lengths as one tensor [rows, longest], where they stand (None: no slot is
    empty), and their lengths. Empty slots hold 0, which cannot matter: their position is -1.
    """
    lengths = _lengths(rows)
    width = int(lengths.max())
    flat = np.concatenate(rows).astype(np.int64)
    if int(lengths.min()) == width:
        return torch.from_numpy(flat.reshape(len(rows), width)), None, lengths
    filled = np.arange(width) < lengths[:, None]
    out = np.zeros(filled.shape, dtype=np.int64)
    out[filled] = flat
    return torch.from_numpy(out), _places(filled, lengths), lengths


def shifted(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor, Positions | None, np.ndarray]:
    """What is shown of each row (all but its last), what is asked (all but its first, IGNORED
    behind its end), where that stands, and how much it is.
    """
    whole, _, lengths = padded(rows)
    inputs, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
    lengths -= 1
    width = inputs.shape[1]
    if int(lengths.min()) == width:
        return inputs, targets, None, lengths
    filled = np.arange(width) < lengths[:, None]
    inputs.numpy()[~filled] = 0
    targets.numpy()[~filled] = IGNORED
    return inputs, targets, _places(filled, lengths), lengths


def _lengths(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))


def _places(filled: np.ndarray, lengths: np.ndarray) -> Positions:
    """`Positions.ragged(lengths)` without a Python loop."""
    return Positions(
        torch.from_numpy(np.where(filled, np.arange(filled.shape[1]), -1)),
        lo=0,
        hi=filled.shape[1] - 1,
        dense=False,
        holes=True,
        ends=tuple(lengths.tolist()),
    )


def places(**at: Positions | Tensor | None) -> dict[str, Any]:
    """The network's keywords, without those that say nothing."""
    return {name: value for name, value in at.items() if value is not None}
