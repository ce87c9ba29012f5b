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

from clearhead.data.windows import windows
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
    size = one.parts.count(1)
    require(size > 0, "The context is empty, and answers are pieces of it: give some text.")
    first, around = one.parts.index(1), len(one.ids) - size
    room = max_len - around
    require(
        room > 0,
        f"The question alone has {first} tokens, and the model reads {max_len}: shorten it.",
    )
    kept = windows(one, max_len, min(stride, room // 2))
    ids, types = (
        [[values[i] for i in tokens] for tokens in kept] for values in (one.ids, one.types)
    )
    logits = run_encoder(net, ids, segments(net, types))
    best = None
    for out, tokens in zip(logits, kept, strict=True):
        piece = slice(first, first + len(tokens) - around)
        total, score, i, j = best_span(out[piece].float())
        if best is None or total > best[0]:
            best = (total, score, tokens[first + i], tokens[first + j])
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
