"""Texts through an encoder-decoder: sorted by length, in batches, back in the order given.

Vaswani et al. 2017, section 6.1: a translation has at most as many tokens as its source and 50
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.errors import require
from clearhead.generate.batch import by_length, decode_batch, encode_sources
from clearhead.generate.beam import Beam, beam_search
from clearhead.generate.decode import Sampling

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
    """What the model makes of each text; a text without tokens stays empty.

    `batch_tokens`: how many slots of sources are searched at once, all beams counted; `capped`:
    whether the length of a source limits that of its translation.
    """
    require(
        isinstance(batch_tokens, int) and batch_tokens >= 1,
        f"batch_tokens is how many source tokens are worked on at once, not {batch_tokens!r}.",
    )
    sources = tokenizer.encode_batch(texts)
    found = [""] * len(texts)
    rows = [i for i, source in enumerate(sources) if source]
    for batch in by_length([len(sources[i]) for i in rows], batch_tokens // beam.width):
        chosen = [rows[i] for i in batch]
        limits = [beam.max_new_tokens] * len(chosen)
        if capped:
            limits = [len(sources[i]) + EXTRA for i in chosen]
        ids = _decode(net, [sources[i] for i in chosen], beam, start, max_len, limits)
        for i, written in zip(chosen, ids, strict=True):
            found[i] = tokenizer.target.decode(written)
    return found


def _decode(
    net: Any,
    sources: Sequence[Sequence[int]],
    beam: Beam,
    start: Sequence[int],
    max_len: int,
    limits: Sequence[int],
) -> list[list[int]]:
    memory = encode_sources(net, sources)
    prompts = [list(start)] * len(sources)
    if beam.width == 1:  # the same texts, without the book-keeping
        sampling = Sampling(beam.max_new_tokens, stop=beam.stop, never=beam.never)
        return decode_batch(net, prompts, sampling, max_len, memory, limits)
    found = beam_search(net, prompts, beam, max_len, memory, limits)
    return [hypotheses[0].ids for hypotheses in found]
