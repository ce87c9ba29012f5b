"""Texts through an encoder-decoder: sorted by length, in batches, back in the order given.

Vaswani et al. 2017, section 6.1: a translation has at most as many tokens as its source and 50
more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import require
from clearhead.generate.batch import by_length, decode_batch, encode_sources
from clearhead.generate.beam import Beam, beam_search
from clearhead.generate.sampling import Sampling

EXTRA = 50


def translate_texts(
    net: Any,
    tokenizer: Any,
    texts: Sequence[str],
    beam: Beam,
    start: Sequence[int],
    max_len: int,
    batch_tokens: int = 4096,
    capped: bool = True,
) -> list[str]:
    """The best that the model makes of each text; a text without tokens stays empty.

    `batch_tokens`: how many slots of sources are searched at once, all beams counted; `capped`:
    whether the length of a source limits that of its translation.
    """
    found = [""] * len(texts)
    for batch in _batches(tokenizer.encode_batch(texts), beam, batch_tokens, capped):
        for i, ids in zip(batch.rows, _best(net, batch, beam, start, max_len), strict=True):
            found[i] = tokenizer.target.decode(ids)
    return found


@dataclass(frozen=True)
class _Batch:
    """Sources that are worked on at once."""

    rows: list[int]
    """Which texts they are."""
    sources: list[list[int]]
    """Their ids."""
    limits: list[int]
    """How many tokens each translation may have."""


def _batches(
    sources: list[list[int]], beam: Beam, batch_tokens: int, capped: bool
) -> Iterator[_Batch]:
    """The sources that have tokens, those of similar length together."""
    require(
        isinstance(batch_tokens, int) and batch_tokens >= 1,
        f"batch_tokens is how many source tokens are worked on at once, not {batch_tokens!r}.",
    )
    rows = [i for i, source in enumerate(sources) if source]
    for batch in by_length([len(sources[i]) for i in rows], batch_tokens // beam.width):
        chosen = [rows[i] for i in batch]
        limits = [beam.max_new_tokens] * len(chosen)
        if capped:
            limits = [len(sources[i]) + EXTRA for i in chosen]
        yield _Batch(chosen, [sources[i] for i in chosen], limits)


def _best(
    net: Any, batch: _Batch, beam: Beam, start: Sequence[int], max_len: int
) -> list[list[int]]:
    memory, prompts = encode_sources(net, batch.sources), [list(start)] * len(batch.rows)
    if beam.width > 1:
        found = beam_search(net, prompts, beam, max_len, memory, batch.limits)
        return [hypotheses[0].ids for hypotheses in found]
    # Without the book-keeping. The same texts, unless there is a repetition penalty: it is one of
    # logits here, and one of log-probabilities in a search.
    sampling = Sampling(beam.max_new_tokens, stop=beam.stop, never=beam.never, rules=beam.rules)
    return decode_batch(net, prompts, sampling, max_len, memory, batch.limits)
