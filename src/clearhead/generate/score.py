"""How likely a text is: log p(token | what stands before it), for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import require
from clearhead.layers.stack import Memory


@torch.inference_mode()
def score_tokens(
    net: Any, ids: Sequence[int], max_len: int, memory: Memory | None = None
) -> Float[Tensor, " n"]:
    """The log-probability, in nats, of every token but the first, which has nothing before it."""
    require(
        len(ids) >= 2,
        "A text of one token has nothing to tell it by: score takes two tokens at least.",
    )
    require(
        len(ids) <= max_len + 1,
        f"The text has {len(ids)} tokens, and the model reads {max_len}: score it in pieces.",
    )
    row = torch.tensor([list(ids)], device=next(net.parameters()).device)
    with net.at_rest():
        logits = net.decode(row[:, :-1], *(() if memory is None else (memory,)))
    return logits.float().log_softmax(dim=-1)[0].gather(1, row[0, 1:, None]).squeeze(1)
