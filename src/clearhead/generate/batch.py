"""Many prompts at once: prefill them together, then a token a row; rows that end leave the batch.

Prompts and sources may be ragged: empty slots are said by positions, each row counts from its own
start, and every row gets what it would get alone, draws included (each row has its own dice).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.attention.cache import Cache
from clearhead.attention.positions import Positions
from clearhead.errors import require
from clearhead.generate.decode import Sampling, check_logits
from clearhead.generate.sampling import choose
from clearhead.layers.stack import Memory

Rows = Sequence[Sequence[int]]


def decode_rows(
    net: Any,
    prompts: Rows,
    sampling: Sampling,
    max_len: int,
    memory: Memory | None = None,
    limits: Sequence[int] | None = None,
) -> Iterator[dict[int, int]]:
    """What follows each prompt, a step at a time: {row: its next id} of the rows that go on.

    `limits`: how many tokens each row may get, where that is fewer than the sampling's.
    """
    ends = row_limits(prompts, sampling.max_new_tokens, max_len, limits)
    open_rows, count = list(range(len(prompts))), 0
    with torch.inference_mode(), net.at_rest():
        cache, logits = prefill(net, prompts, ends, memory)
    never = torch.tensor(sorted(sampling.never), dtype=torch.long, device=logits.device)
    dice = [_dice(sampling, logits.device) for _ in prompts] if sampling.temperature else []
    while True:
        with torch.inference_mode():
            if len(never):
                logits = logits.index_fill(1, never, torch.finfo(logits.dtype).min)
            new = _choose_rows(logits, sampling, [dice[row] for row in open_rows] if dice else [])
        tokens, count = new.tolist(), count + 1
        alive = [i for i, token in enumerate(tokens) if token not in sampling.stop]
        if alive:
            yield {open_rows[i]: tokens[i] for i in alive}
        alive = [i for i in alive if count < ends[open_rows[i]]]
        if not alive:
            return
        # Only the step itself is without gradients and dropout: between tokens the caller works.
        with torch.inference_mode(), net.at_rest():
            if len(alive) < len(open_rows):
                kept = torch.tensor(alive, device=new.device)
                cache.keep(kept)
                new, open_rows = new[kept], [open_rows[i] for i in alive]
            logits = net.decode(new.unsqueeze(1), cache=cache)[:, -1]


def decode_batch(
    net: Any,
    prompts: Rows,
    sampling: Sampling,
    max_len: int,
    memory: Memory | None = None,
    limits: Sequence[int] | None = None,
) -> list[list[int]]:
    """The ids that follow each prompt, without the stop id: `decode_tokens` for many rows."""
    found: list[list[int]] = [[] for _ in prompts]
    for step in decode_rows(net, prompts, sampling, max_len, memory, limits):
        for row, token in step.items():
            found[row].append(token)
    return found


def prefill(
    net: Any,
    prompts: Rows,
    limits: Sequence[int],
    memory: Memory | None = None,
    beams: int = 1,
) -> tuple[Cache, Float[Tensor, "rows v"]]:
    """A cache that has read the prompts, with room for so many tokens more, and what may follow.

    Each prompt has `beams` rows, one behind the other. A prompt without a source is read once and
    its rows are copies; prompts with a source are short, and their cache has its rows from the
    start.
    """
    room = max(len(row) + limit for row, limit in zip(prompts, limits, strict=True))
    if memory is None:
        cache, rows = net.new_cache(len(prompts), room), list(prompts)
    else:
        require(
            len(prompts) == memory.rows,
            f"There are {memory.rows} sources and {len(prompts)} prompts: one for each.",
        )
        cache = net.new_cache(memory, room, beams)
        rows = [row for row in prompts for _ in range(beams)]
    ids, at = pad_rows(rows, next(net.parameters()).device)
    last = torch.tensor([len(row) - 1 for row in rows], device=ids.device)
    logits = net.decode(ids, at=at, cache=cache)
    logits = logits[torch.arange(len(rows), device=ids.device), last]
    check_logits(logits)
    if memory is None and beams > 1:
        copies = torch.arange(len(rows), device=ids.device).repeat_interleave(beams)
        cache.reorder(copies)
        logits = logits[copies]
    return cache, logits


def row_limits(
    prompts: Rows, most: int, max_len: int, limits: Sequence[int] | None = None
) -> list[int]:
    """How many tokens each row may get: what is asked, as far as the model has positions."""
    require(len(prompts) > 0, "There are no prompts: give at least one.")
    require(
        limits is None or len(limits) == len(prompts),
        f"{len(prompts)} prompts were given {len(limits or ())} limits: one a prompt.",
    )
    found = []
    for row, limit in zip(prompts, limits or [most] * len(prompts), strict=True):
        require(len(row) > 0, "A prompt is empty: give at least one token to start from.")
        require(
            len(row) < max_len,
            f"A prompt has {len(row)} tokens, and the model {max_len} positions: shorten it.",
        )
        require(limit >= 1, f"A row's limit is {limit}: ask for one token at least.")
        found.append(min(limit, most, max_len - len(row)))
    return found


def pad_rows(rows: Rows, device: torch.device | str) -> tuple[Int[Tensor, "b t"], Positions]:
    """Rows of different lengths as one tensor, with where its tokens stand."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    return ids, Positions.ragged([len(row) for row in rows], device=device)


def encode_sources(net: Any, sources: Rows) -> Memory:
    """The states of ragged sources."""
    with torch.inference_mode(), net.at_rest():
        return net.encode(*pad_rows(sources, next(net.parameters()).device))


def by_length(lengths: Sequence[int], slots: int) -> Iterator[list[int]]:
    """The numbers of rows in batches of similar length, longest first, each of at most so many
    slots (or of one row). What does not fit in memory then shows at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, slots // max(1, lengths[order[0]]))
        yield order[:size]
        order = order[size:]


def _dice(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    if sampling.seed is None:
        return None
    return torch.Generator(device).manual_seed(sampling.seed)


def _choose_rows(
    logits: Float[Tensor, "b v"], sampling: Sampling, dice: Sequence[torch.Generator | None]
) -> Int[Tensor, " b"]:
    """The best token of each row, or each row's draw with its own dice."""
    how = (sampling.temperature, sampling.top_k, sampling.top_p)
    if not dice:
        return choose(logits, *how)
    draws = [choose(row, *how, one) for row, one in zip(logits.split(1), dice, strict=True)]
    return torch.cat(draws)
