"""One prompt after the other: the ids that follow it, one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from clearhead.generate.batch import check_logits as check_logits
from clearhead.generate.batch import decode_steps
from clearhead.generate.row import Constraint, Row
from clearhead.generate.sampling import Sampling as Sampling
from clearhead.layers.stack import Memory


def decode_tokens(
    net: Any,
    prompt: Collection[int],
    sampling: Sampling,
    max_len: int,
    memory: Memory | None = None,
    constraint: Constraint | None = None,
) -> Iterator[int]:
    """The ids that follow a prompt, one by one; ends at a stop id or at the limit.

    A decoder that comes to its last position reads the last half of its context again from position
    0 and writes on: it has forgotten what was before. An encoder-decoder ends there.
    """
    row = Row(0, list(prompt), sampling, sampling.max_new_tokens, constraint=constraint)
    for (step,) in decode_steps(net, [row], max_len, memory):
        if step.end != "token":
            yield step.token
