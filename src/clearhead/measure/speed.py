"""How fast a model reads and writes here, beside what this machine's memory allows.

Decoding one sequence reads every weight once a token, so its roof is

    tokens/s <= bandwidth / bytes of the weights

and a share of the roof says how much is left to win. Contenders take turns, another first in every
round; the best of a few rounds counts, since whatever disturbs only ever makes a time longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """What is measured."""

    prompt: int = 32
    """Tokens that are read at once (of an encoder: all of them)."""
    new: int = 64
    """Tokens that are written one by one."""
    rows: int = 1
    """Sequences at a time."""


@dataclass(frozen=True)
class Times:
    """How long a contender took for the work."""

    first: float
    """Seconds until the prompt was read and the first token chosen."""
    rest: float
    """Seconds for all other tokens."""


@dataclass(frozen=True)
class Speed:
    """What a contender reached."""

    name: str
    """Which."""
    read: float
    """Tokens a second of the prompt, all rows together."""
    written: float | None
    """Tokens a second behind the first one, all rows together; None for an encoder."""
    held: int
    """Bytes of its weights; 0 where that is not known."""
    share: float | None = None
    """Of what the memory allows for one row; None where it was not measured."""


Contender = Callable[[Work], Times]
# Said beside a share of more than 1.
ABOVE = "above 100 %: some of it stays in the cache, or the memory was busier when measured"


def race(
    contenders: Mapping[str, Contender],
    held: Mapping[str, int],
    work: Work,
    rounds: int = 3,
    bandwidth: float | None = None,
    reads: Mapping[str, Callable[[], int]] | None = None,
) -> list[Speed]:
    """The speed of each contender; `bandwidth` in GB/s gives shares. `reads`: how many bytes of its
    weights a step reads in the end, where that may be another number than all of them.
    """
    names = list(contenders)
    best: dict[str, Times] = {}
    for number in range(rounds + 1):  # the first one warms up
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            now = contenders[name](work)
            before = best.get(name, now) if number > 1 else now
            best[name] = Times(min(now.first, before.first), min(now.rest, before.rest))
    found = []
    for name in names:
        times, size = best[name], held.get(name, 0)
        written = None
        if work.new > 1 and times.rest > 0:
            written = work.rows * (work.new - 1) / times.rest
        share = None
        if bandwidth and written and size and work.rows == 1:
            read = reads[name]() if reads and name in reads else size
            share = written * read / (bandwidth * 1e9)
        found.append(Speed(name, work.rows * work.prompt / times.first, written, size, share))
    return found


def decoder(net: Any, vocab_size: int) -> Contender:
    """Greedy decoding by a decoder, or by an encoder-decoder whose source the prompt is."""

    def run(work: Work) -> Times:
        ids = _ids(work, vocab_size)
        with torch.inference_mode(), net.at_rest():
            start = time.perf_counter()
            if hasattr(net, "encoder"):
                cache = net.new_cache(net.encode(ids), work.new)
                new = torch.zeros(work.rows, 1, dtype=torch.long)
            else:
                cache, new = net.new_cache(work.rows, work.prompt + work.new), ids
            new = net.decode(new, cache=cache)[:, -1:].argmax(dim=-1)
            first = time.perf_counter()
            for _ in range(work.new - 1):
                logits, which = net.decode_next(new, cache, greedy=True)
                new = logits.argmax(dim=-1, keepdim=True)
                new = new if which is None else which[new]
            return Times(first - start, time.perf_counter() - first)

    return run


def encoder(net: Any, vocab_size: int) -> Contender:
    """Reading texts at once."""

    def run(work: Work) -> Times:
        ids = _ids(work, vocab_size)
        with torch.inference_mode(), net.at_rest():
            start = time.perf_counter()
            net(ids)
            return Times(time.perf_counter() - start, 0.0)

    return run


def transformers_decoder(folder: str, vocab_size: int) -> Contender:
    """The same by transformers' own `generate`, from a folder that it opens."""
    import transformers

    said = transformers.utils.logging
    level = said.get_verbosity()
    said.set_verbosity_error()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    finally:
        said.set_verbosity(level)

    def run(work: Work) -> Times:
        ids = _ids(work, vocab_size)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        seconds = []
        for count in (1, work.new):
            start = time.perf_counter()
            model.generate(**given, max_new_tokens=count, min_new_tokens=count, **how)
            seconds.append(time.perf_counter() - start)
        return Times(seconds[0], max(seconds[1] - seconds[0], 1e-9))

    return run


def _ids(work: Work, vocab_size: int) -> Tensor:
    dice = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (work.rows, work.prompt), generator=dice)
