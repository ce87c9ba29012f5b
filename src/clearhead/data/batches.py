"""Endless streams of batches, in which batch n is a pure function of (seed, n).

So the position in a stream is one integer, the number of the next batch; resuming, threads that
work ahead and several processes need nothing more.

Windows    windows of one long stream of tokens; nothing is padded
Buckets    examples of similar length together
Endless    examples that are made
fixed      every example, or every token, once: for evaluation
prefetch   batches made ahead by threads
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import numpy as np

from clearhead.data.batch import Batch
from clearhead.data.corpus import Corpus
from clearhead.data.objective import Objective, StreamObjective
from clearhead.data.order import Groups, Shuffle
from clearhead.data.shards import Store
from clearhead.errors import ClearheadError, require
from clearhead.text.tokenizer import Tokenizer

_DICE = 1  # a batch's own dice are [seed, n, 1], others than those of epoch n, [seed, n]


@runtime_checkable
class Batches(Protocol):
    """The n-th batch of an endless stream."""

    per_epoch: float | None
    """How many batches show all the data once; None where it has no end."""

    def batch(self, n: int) -> Batch:
        """Batch n; the same whenever it is asked for."""
        ...


class Windows:
    """Windows of a stream, in an order that every epoch shuffles, each epoch cut at other places.

    The stream is a ring. An epoch shows (stream // window) windows, none of which overlap, so every
    token is asked for once; what is left over, less than a window, lies elsewhere in every epoch.
    """

    def __init__(
        self, store: Store, objective: Objective, length: int, batch: int, seed: int = 0
    ) -> None:
        self._objective = _streaming(objective)
        self._flat = store.flat("ids")
        self._step = _step(self._objective, len(self._flat), length)
        require(batch >= 1, f"A batch has at least one row, not {batch}.")
        self._rows, self._seed = batch, _checked(seed)
        self._order = Shuffle(len(self._flat) // self._step, seed)
        self._offsets = np.arange(self._step + self._objective.overlap)
        self._kept: tuple[int, int] | None = None
        self.per_epoch: float | None = self._order.count / batch

    def batch(self, n: int) -> Batch:
        """Batch n: rows n * batch, n * batch + 1, ... of the epochs one behind the other."""
        first = n * self._rows
        starts = self._order(first, self._rows) * self._step
        done = 0
        while done < self._rows:  # a batch may lie in several epochs
            epoch, place = divmod(first + done, self._order.count)
            rest = min(self._rows - done, self._order.count - place)
            starts[done : done + rest] += self._cut(epoch)
            done += rest
        ids = self._flat.take(starts[:, None] + self._offsets, mode="wrap")
        return self._objective.window(ids, np.random.default_rng([self._seed, n, _DICE]))

    def _cut(self, epoch: int) -> int:
        """Where the first window of an epoch begins."""
        kept = self._kept
        if kept is None or kept[0] != epoch:
            dice = np.random.default_rng([self._seed, epoch])
            kept = self._kept = (epoch, int(dice.integers(len(self._flat))))
        return kept[1]


class Buckets:
    """Examples of similar length together, grouped anew in every epoch."""

    def __init__(
        self,
        store: Store,
        objective: Objective,
        batch: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
        max_len: int | None = None,
    ) -> None:
        """Batches of exactly `batch` examples (but for one), or of about `tokens` slots, padding
        counted, on the side that has more. Examples longer than `max_len` are left out.
        """
        require(
            (batch is None) != (tokens is None),
            "Say how large a batch is: either batch (examples) or tokens (slots).",
        )
        size = batch if batch is not None else tokens
        require(size is not None and size >= 1, f"A batch holds at least 1, not {size}.")
        self._store, self._objective, self._seed = store, objective, _checked(seed)
        self._kept, lengths = _short_enough(store, objective, max_len)
        self.left_out = len(store) - len(self._kept)
        """How many examples are longer than `max_len`, or empty."""
        self._groups = Groups(lengths, batch, tokens)
        self._plans: dict[int, list[np.ndarray]] = {}
        self.per_epoch: float | None = float(len(self._groups))

    def batch(self, n: int) -> Batch:
        """Batch n."""
        epoch, place = divmod(n, len(self._groups))
        examples = self._store.take(self._kept[self._plan(epoch)[place]])
        dice = np.random.default_rng([self._seed, n, _DICE])
        return self._objective.collate(examples, dice)

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """The groups of an epoch; the last two epochs' are kept."""
        plan = self._plans.get(epoch)
        if plan is None:
            plan = self._groups(np.random.default_rng([self._seed, epoch]))
            last = list(self._plans.items())[-1:]
            self._plans = dict([*last, (epoch, plan)])
        return plan


class Endless:
    """Made data: records are computed from their number, so nothing is stored."""

    per_epoch: float | None = None

    def __init__(
        self,
        corpus: Corpus,
        objective: Objective,
        tokenizer: Tokenizer,
        batch: int,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        require(batch >= 1, f"A batch has at least one row, not {batch}.")
        require(corpus.endless, f"{corpus.name} has an end: it goes into a store.")
        self._corpus, self._tokenizer, self._split = corpus, tokenizer, split
        self._objective = objective.bind(tokenizer)
        self._rows, self._seed = batch, _checked(seed)

    def batch(self, n: int) -> Batch:
        """Batch n: records n * batch, n * batch + 1, ..."""
        examples = []
        for number in range(n * self._rows, (n + 1) * self._rows):
            record = self._corpus.record(self._split, self._seed, number)
            example = self._objective.encode(record, self._tokenizer, f"record {number}")
            examples.append({name: np.asarray(value) for name, value in example.items()})
        dice = np.random.default_rng([self._seed, n, _DICE])
        return self._objective.collate(examples, dice)


def fixed(
    store: Store,
    objective: Objective,
    length: int | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    max_len: int | None = None,
    seed: int = 0,
) -> Iterator[Batch]:
    """The order of evaluation: everything once, the same in every call.

    Of a stream (`length` is given): windows one behind the other, `batch` in a batch (or as many as
    `tokens` slots hold), the shorter last one alone. For the next token that asks for every token
    but the first exactly once. Of examples: from the shortest to the longest, without those longer
    than `max_len` (`too_long` counts them).
    """
    size = batch if batch is not None else tokens if tokens is not None else 8192
    require(size >= 1, f"A batch holds at least 1, not {size}.")
    if length is None:
        kept, lengths = _short_enough(store, objective, max_len)
        batches = _fixed_examples(store, objective, kept, lengths, (batch, size), seed)
    else:
        rows = batch if batch is not None else max(1, size // length)
        batches = _fixed_windows(store, _streaming(objective), length, rows, seed)
    return batches


def _fixed_windows(
    store: Store, objective: StreamObjective, length: int, rows: int, seed: int
) -> Iterator[Batch]:
    flat = store.flat("ids")
    require(len(flat) > 1, f"A text of {len(flat)} tokens leaves nothing to evaluate.")
    step, overlap = objective.taken(length), objective.overlap
    require(step >= 1, f"A window of {length} slots has no room for a token.")
    whole = (len(flat) - overlap) // step
    offsets = np.arange(step + overlap)
    number = 0
    for first in range(0, whole, rows):
        starts = np.arange(first, min(first + rows, whole)) * step
        dice = np.random.default_rng([seed, number, _DICE])
        yield objective.window(flat.take(starts[:, None] + offsets), dice)
        number += 1
    rest = flat[whole * step :]
    if len(rest) >= objective.shortest:
        yield objective.window(rest[None], np.random.default_rng([seed, number, _DICE]))


def _fixed_examples(
    store: Store,
    objective: Objective,
    kept: np.ndarray,
    lengths: np.ndarray,
    size: tuple[int | None, int],
    seed: int,
) -> Iterator[Batch]:
    order = np.lexsort((*lengths.T, lengths.max(axis=1)))
    widest = lengths.max(axis=1)[order]
    first = number = 0
    while first < len(order):
        batch, tokens = size
        # widest rises, so slots (rows * widest of the last) do too, and no more rows can fit than
        # if all were as short as the first
        if batch is None:
            ahead = widest[first : first + tokens // int(widest[first]) + 1]
            slots = np.arange(1, len(ahead) + 1) * ahead
            rows = max(1, int(np.searchsorted(slots, tokens, side="right")))
        else:
            rows = batch
        examples = store.take(kept[order[first : first + rows]])
        yield objective.collate(examples, np.random.default_rng([seed, number, _DICE]))
        first, number = first + rows, number + 1


def prefetch(batches: Batches, start: int, workers: int = 0) -> Generator[Batch]:
    """Batches start, start + 1, ... for ever; with workers, threads make them ahead of time.

    The batches and their order do not depend on `workers`. Closing the iterator ends the threads.
    """
    require(workers >= 0, f"workers counts threads; {workers} is less than none.")
    if workers == 0:
        while True:
            yield batches.batch(start)
            start += 1
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")
    ahead: deque[Future[Batch]] = deque()
    try:
        while True:
            while len(ahead) < 2 * workers:
                ahead.append(pool.submit(batches.batch, start))
                start += 1
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def too_long(store: Store, objective: Objective, max_len: int) -> int:
    """How many examples are longer than `max_len` on either side."""
    return int((objective.lengths(store).max(axis=1) > max_len).sum())


def _short_enough(
    store: Store, objective: Objective, max_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the examples that are short enough, and their lengths."""
    lengths = objective.lengths(store)
    longest = lengths.max(axis=1)
    filled = longest >= 1
    require(bool(filled.any()), "No example has a token: are the texts empty?")
    keep = filled if max_len is None else filled & (longest <= max_len)
    require(
        bool(keep.any()),
        f"Every example is longer than max_len, which is {max_len}: the shortest has "
        f"{longest[filled].min()} tokens. Raise max_len.",
    )
    return np.flatnonzero(keep), lengths[keep]


def _streaming(objective: Objective) -> StreamObjective:
    if not isinstance(objective, StreamObjective):
        raise ClearheadError(
            f'The objective "{objective.kind}" has examples, not a stream: use Buckets.'
        )
    return objective


def _step(objective: StreamObjective, total: int, length: int) -> int:
    """How far apart windows begin; the stream must hold one."""
    require(length >= 1, f"A context has at least one token, not {length}.")
    step = objective.taken(length)
    require(step >= 1, f"A window of {length} slots has no room for a token.")
    needed = step + objective.overlap
    most = length - (needed - total)
    mend = f"Set the context to {most} or less, or give" if most > 0 else "Give"
    require(
        total >= needed,
        f"The context is longer than the text: a window takes {needed:,} tokens, and the text has "
        f"{total:,}. {mend} more text.",
    )
    return step


def _checked(seed: int) -> int:
    require(seed >= 0, f"A seed is 0 or more, not {seed}.")
    return seed
