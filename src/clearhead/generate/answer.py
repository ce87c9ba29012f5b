"""Answers that stand in a text: the span whose start and end logits have the largest sum.

Devlin et al. 2019, section 4.2. A context that is too long is read in windows that overlap; the
best span of all windows is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import require
from clearhead.generate.vectors import run_encoder, segments

LONGEST = 30  # tokens of an answer


@dataclass(frozen=True)
class Answer:
    """A piece of the context."""

    text: str
    """What it says."""
    start: int
    """Where it begins in the context, in characters."""
    end: int
    """Where it ends."""
    score: float
    """The probability of its first token as a start, times that of its last as an end, among the
    tokens of its window's context.
    """


def answer_question(
    net: Any, tokenizer: Any, question: str, context: str, max_len: int, stride: int = 128
) -> Answer:
    """The answer to a question about a context; windows share `stride` tokens, or half of them."""
    one = tokenizer.encode_pair(question, context)
    inside = [i for i, part in enumerate(one.parts) if part == 1]
    require(len(inside) > 0, "The context is empty, and answers are pieces of it: give some text.")
    first, last = inside[0], inside[-1] + 1
    room = max_len - (len(one.ids) - len(inside))
    require(
        room > 0,
        f"The question alone has {first} tokens, and the model reads {max_len}: shorten it.",
    )
    step = room if len(inside) <= room else max(1, room - min(stride, room // 2))
    starts = list(range(first, max(first + 1, last - room + step), step))
    spans = [(start, min(start + room, last)) for start in starts]

    def windows(values: list[int]) -> list[list[int]]:
        return [values[:first] + values[a:b] + values[last:] for a, b in spans]

    logits = run_encoder(net, windows(one.ids), segments(net, windows(one.types)))
    best = None
    for out, (a, b) in zip(logits, spans, strict=True):
        total, score, i, j = best_span(out[first : first + b - a].float())
        if best is None or total > best[0]:
            best = (total, score, a + i, a + j)
    assert best is not None
    return _cut_out(context, one.offsets[best[2]][0], one.offsets[best[3]][1], best[1])


def best_span(
    logits: Float[Tensor, "t 2"], longest: int = LONGEST
) -> tuple[float, float, int, int]:
    """The largest sum of a start's and an end's logit, its probability, and the two places."""
    start, end = logits.unbind(dim=1)
    sums = start.unsqueeze(1) + end.unsqueeze(0)
    possible = torch.ones_like(sums, dtype=torch.bool).triu().tril(longest - 1)
    i, j = divmod(int(sums.masked_fill(~possible, -torch.inf).argmax()), len(start))
    score = start.softmax(dim=0)[i] * end.softmax(dim=0)[j]
    return float(sums[i, j]), float(score), i, j


def _cut_out(context: str, start: int, end: int, score: float) -> Answer:
    """Without the blanks that some tokenisers count as part of a word."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    return Answer(text.strip(), start, start + len(text.strip()), score)
