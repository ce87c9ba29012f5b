"""A context that is too long is read in windows that overlap (Devlin et al. 2019, sec. 4.2, and its
code): each has all of the question and a piece of the context.

    question  c c c c
    question      c c c c       stride: how many tokens two neighbours share
    question          c c c
"""

from __future__ import annotations

from clearhead.errors import require
from clearhead.text.tokenizer import Encoded


def windows(
    encoded: Encoded, max_len: int | None, stride: int, where: str = "the text"
) -> list[list[int]]:
    """Which tokens of two texts each window has, at most `max_len` of them; None: one has all."""
    inside = [i for i, part in enumerate(encoded.parts) if part == 1]
    first, last = inside[0], inside[-1] + 1
    around = len(encoded.ids) - len(inside)
    room = len(inside) if max_len is None else min(len(inside), max_len - around)
    step = room if room == len(inside) else room - stride
    require(
        step >= 1,
        f"{where}: max_len {max_len} leaves {room} tokens of context beside the question, and "
        f"windows share {stride} of them (stride): raise max_len or lower stride.",
    )
    return [
        [*range(first), *range(a, min(a + room, last)), *range(last, len(encoded.ids))]
        for a in range(first, last - room + step, step)
    ]
