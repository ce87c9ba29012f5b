"""The decoding core: prefill the prompts together, then a token a row from the cache.

Prompts and sources may be ragged: empty slots are said by positions, each row counts from its own
start, and every row gets what it would get alone, draws included (each row has its own dice). Rows
that end leave the batch. It depends on the protocol of `models.base` alone (`new_cache`, `decode`,
`decode_next`, `decode_last`, and `encode` for an encoder-decoder), and it is a generator: whoever
stops iterating stops the work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.attention.cache import Cache
from clearhead.attention.positions import Positions
from clearhead.errors import require
from clearhead.generate.prefix import Prefixes
from clearhead.generate.row import Row, Step, choose_rows
from clearhead.generate.sampling import NO_NUMBERS, Sampling, largest_are_numbers
from clearhead.layers.stack import Memory
from clearhead.tap import taps

Rows = Sequence[Sequence[int]]
ENDS = 32  # places where a batch of equal rows may end, however many they are


def decode_rows(
    net: Any,
    prompts: Rows,
    sampling: Sampling,
    max_len: int,
    memory: Memory | None = None,
    limits: Sequence[int] | None = None,
) -> Iterator[dict[int, int]]:
    """What follows each prompt, a step at a time: {row: its next id} of the rows that go on.

    `limits`: how many tokens each row may get, where that is fewer than the sampling's. A row ends
    where the model's positions do.
    """
    ends = row_limits(prompts, sampling.max_new_tokens, max_len, limits)
    pairs = zip(prompts, ends, strict=True)
    rows = [Row(i, prompt, sampling, end) for i, (prompt, end) in enumerate(pairs)]
    for steps in decode_steps(net, rows, max_len, memory, slide=False):
        if found := {step.row: step.token for step in steps if step.end != "token"}:
            yield found


def decode_batch(
    net: Any,
    prompts: Rows,
    sampling: Sampling,
    max_len: int,
    memory: Memory | None = None,
    limits: Sequence[int] | None = None,
) -> list[list[int]]:
    """The ids that follow each prompt, without the stop id."""
    found: list[list[int]] = [[] for _ in prompts]
    for step in decode_rows(net, prompts, sampling, max_len, memory, limits):
        for row, token in step.items():
            found[row].append(token)
    return found


def decode_steps(
    net: Any,
    rows: Sequence[Row],
    max_len: int,
    memory: Memory | None = None,
    samples: int = 1,
    slide: bool = True,
    prefixes: Prefixes | None = None,
) -> Iterator[list[Step]]:
    """One step of every open row, until none is open; whoever sets `row.end` closes a row.

    `samples` rows stand behind each other for every prompt and share its prefill, and its source.
    A row that comes to the last position ends there, or, with `slide`, reads the last half of its
    context again from position 0 and writes on: it has forgotten what was before.
    """
    check_prompts([row.prompt for row in rows], max_len)
    slide = slide and memory is None and max_len >= 2
    slots = list(rows)
    with torch.inference_mode(), net.at_rest():
        heads = slots[::samples]
        room = [_room(row, max_len) for row in heads]
        prompts = [row.window for row in heads]
        cache, logits = prefill(net, prompts, room, memory, samples, prefixes)
    which: Int[Tensor, " v"] | None = None
    while True:
        with torch.inference_mode():
            new = choose_rows(logits, slots, which)
        steps = [row.take(max_len, slide) for row in slots if row.end is None]
        yield steps
        if all(row.end is not None for row in slots):
            return
        # Only the step itself is without gradients and dropout: between tokens the caller works.
        with torch.inference_mode(), net.at_rest():
            if any(len(row.window) == max_len for row in slots if row.end is None):
                slots = [row for row in slots if row.end is None]
                for row in slots:
                    row.slide(max_len)
                room = [_room(row, max_len) for row in slots]
                cache, logits = prefill(net, [row.window for row in slots], room)
                which = None
                continue
            slots, new = _drop(cache, slots, new, 1 if memory is None else samples)
            greedy = all(row.greedy for row in slots)
            logits, which = net.decode_next(new.unsqueeze(1), cache, greedy)
            if not greedy:  # (`best` looks at what it finds)
                check_logits(logits)


def _room(row: Row, max_len: int) -> int:
    """How many tokens a row may still get before its context is full."""
    return min(row.limit - len(row.text), max_len - len(row.window))


def _drop(
    cache: Cache, slots: list[Row], new: Int[Tensor, " b"], group: int
) -> tuple[list[Row], Int[Tensor, " kept"]]:
    """Rows that ended leave the cache. Samples of one source share it, and leave together."""
    firsts = range(0, len(slots), group)
    alive = [i // group for i in firsts if any(row.end is None for row in slots[i : i + group])]
    if len(alive) == len(firsts):
        return slots, new
    cache.keep(torch.tensor(alive, device=new.device))
    kept = [i * group + j for i in alive for j in range(group)]
    return [slots[i] for i in kept], new[kept]


def prefill(
    net: Any,
    prompts: Rows,
    limits: Sequence[int],
    memory: Memory | None = None,
    beams: int = 1,
    prefixes: Prefixes | None = None,
) -> tuple[Cache, Float[Tensor, "rows v"]]:
    """A cache that has read the prompts, with room for so many tokens more, and what may follow.

    Each prompt has `beams` rows, one behind the other: it is read once, and they share that.
    `prefixes`: what was read before and need not be read again; nothing is taken from there
    while somebody listens at a tap, who may change what is read.
    """
    if prefixes is not None and any(tap.listeners for tap in taps(net).values()):
        prefixes = None
    room = max(len(row) + limit for row, limit in zip(prompts, limits, strict=True))
    known = [0] * len(prompts)
    if memory is None:
        cache = net.new_cache(len(prompts), room)
        if prefixes is not None:
            known = prefixes.recall(net, cache, prompts)
    else:
        require(
            len(prompts) == memory.rows,
            f"There are {memory.rows} sources and {len(prompts)} prompts: one for each.",
        )
        cache = net.new_cache(memory, room)
    decoder = net if memory is None else net.decoder
    if beams > 1 and getattr(decoder.stack, "step", None) is not None:
        cache.reserve(max(limits))  # four beams need about twice what one does
    device = next(net.parameters()).device
    rest = [row[n:] for row, n in zip(prompts, known, strict=True)]
    ids, at = pad_rows(rest, device, known)
    last = torch.tensor([len(row) - 1 for row in rest], device=device)
    logits = net.decode_last(ids, at, cache, last)
    check_logits(logits)
    if memory is None and prefixes is not None:
        prefixes.keep(cache, prompts)
    cache.fan_out(beams, device)
    return cache, logits.repeat_interleave(beams, dim=0) if beams > 1 else logits


def check_logits(logits: Tensor) -> None:
    """Refuse to choose from what cannot be compared; -inf, a token that is ruled out, can."""
    require(largest_are_numbers(logits), NO_NUMBERS)


def check_prompts(prompts: Rows, max_len: int) -> None:
    """Refuse prompts that leave nothing to read, or no room to write."""
    require(len(prompts) > 0, "There are no prompts: give at least one.")
    for row in prompts:
        require(len(row) > 0, "A prompt is empty: give at least one token to start from.")
        require(
            len(row) < max_len,
            f"A prompt has {len(row)} tokens, and the model {max_len} positions, of which one must "
            f"be free: shorten the prompt, or keep its last {max_len - 1} tokens.",
        )


def row_limits(
    prompts: Rows, most: int, max_len: int, limits: Sequence[int] | None = None
) -> list[int]:
    """How many tokens each row may get: what is asked, as far as the model has positions."""
    require(
        limits is None or len(limits) == len(prompts),
        f"{len(prompts)} prompts were given {len(limits or ())} limits: one a prompt.",
    )
    check_prompts(prompts, max_len)
    found = []
    for row, limit in zip(prompts, limits or [most] * len(prompts), strict=True):
        require(limit >= 1, f"A row's limit is {limit}: ask for one token at least.")
        found.append(min(limit, most, max_len - len(row)))
    return found


def pad_rows(
    rows: Rows, device: torch.device | str, start: int | Sequence[int] = 0
) -> tuple[Int[Tensor, "b t"], Positions]:
    """Rows of different lengths as one tensor, with where its tokens stand."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    return ids, Positions.ragged([len(row) for row in rows], start=start, device=device)


def encode_sources(net: Any, sources: Rows) -> Memory:
    """The states of ragged sources."""
    with torch.inference_mode(), net.at_rest():
        return net.encode(*pad_rows(sources, next(net.parameters()).device))


def by_length(lengths: Sequence[int], slots: int, overhead: int | None = None) -> list[list[int]]:
    """The numbers of rows in batches of similar length, longest first, each of at most so many
    slots (or of one row).

    The sorted rows are cut so that the batches have the fewest slots, where each of them costs
    `overhead` slots more: None is for decoding, whose every step reads all weights for each batch.
    Of equal ways the one with the most even batches, as far as `ENDS` places a batch tell.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [max(1, lengths[i]) for i in order]
    more, count = max(1, slots // 4 if overhead is None else overhead), len(order)
    drops = [i for i in range(1, count) if sizes[i] < sizes[i - 1]]  # where a cut saves slots
    costs, ends = [(0, 0)] * (count + 1), [count] * (count + 1)  # of the best way from a row on
    for first in range(count - 1, -1, -1):
        last = min(count, first + max(1, slots // sizes[first]))
        step = 1 + (last - first - 1) // ENDS
        own = drops[bisect_right(drops, first) : bisect_right(drops, last)]
        ways = []
        for end in (*range(last, first, -step), *own):
            size, (after, uneven) = (end - first) * sizes[first], costs[end]
            ways.append((more + size + after, size * size + uneven, end))
        *best, ends[first] = min(ways)
        costs[first] = best[0], best[1]
    found, first = [], 0
    while first < count:
        found.append(order[first : ends[first]])
        first = ends[first]
    return found
