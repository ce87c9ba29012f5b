"""Contrastive search: likely tokens whose state is unlike those of the text so far.

    score(v) = (1 - alpha) p(v | text) - alpha max_j cos(h_v, h_j)      v: the k likeliest tokens

h_v is the last layer's state of v as the next token, h_j that of each token before it: a text that
begins to repeat itself is dear. Su et al. 2022, section 4.2, equation 5. With k = 1 or alpha = 0 it
is the greedy choice. The candidates are the rows of one call; the cache has a copy for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.attention.cache import Cache
from clearhead.errors import require
from clearhead.generate.batch import check_logits, check_prompts
from clearhead.layers.stack import Memory
from clearhead.models.base import EncoderDecoder


def contrastive_search(
    net: Any,
    prompt: Collection[int],
    k: int = 4,
    alpha: float = 0.6,
    max_new_tokens: int = 200,
    stop: frozenset[int] = frozenset(),
    never: frozenset[int] = frozenset(),
    *,
    max_len: int,
    memory: Memory | None = None,
) -> Iterator[int]:
    """The ids that follow a prompt, one by one; ends at a stop id or at the limit.

    k: how many of the likeliest tokens are compared (a small vocabulary has fewer); alpha: how much
    likeness costs, from 0 to 1. At its last position a decoder goes on as `decode_tokens` does.
    """
    ids, left = list(prompt), max_new_tokens
    check_prompts([ids], max_len)
    _check(k, alpha, max_new_tokens)
    while True:
        room = min(len(ids) + left, max_len)
        with torch.inference_mode(), net.at_rest():
            search = _Search(net, ids, k, room, memory, never)
        while left and len(ids) < max_len:
            # Only the step itself is without gradients and dropout: between tokens the caller
            # works.
            with torch.inference_mode(), net.at_rest():
                token = search.step(alpha)
            if token in stop:
                return
            yield token
            ids.append(token)
            left -= 1
        if left == 0 or memory is not None or max_len < 2:
            return
        ids = ids[-(max_len // 2) :]


class _Search:
    """The text's states, what may follow, and a cache with a row for each candidate."""

    def __init__(
        self,
        net: Any,
        ids: Sequence[int],
        k: int,
        room: int,
        memory: Memory | None,
        never: frozenset[int],
    ) -> None:
        self.net = net
        device = next(net.parameters()).device
        self.never = torch.tensor(sorted(never), dtype=torch.long, device=device)
        given = torch.tensor([list(ids)], device=device)
        embed = net.decoder.embed if isinstance(net, EncoderDecoder) else net.embed
        k = min(k, embed.vocab_size)
        if memory is None:
            self.cache: Cache = net.new_cache(1, room)
            states = self._states(given)
            self.cache.reorder(torch.zeros(k, dtype=torch.long, device=device))
        else:
            self.cache = net.new_cache(memory, room, k)
            states = self._states(given.expand(k, -1))[:1]
        self.known = F.normalize(states[0].float(), dim=1)  # [t, m]
        self.p = self._follow(states[:, -1:])
        self.k = k

    def step(self, alpha: float) -> int:
        """The best candidate, which the cache and the states then have read."""
        likely = self.p.topk(self.k)
        states = self._states(likely.indices.unsqueeze(1))  # [k, 1, m]
        new = F.normalize(states[:, 0].float(), dim=1)
        likeness = (new @ self.known.T).amax(dim=1)
        scores = (1 - alpha) * likely.values - alpha * likeness
        # What may never be chosen has probability 0, and there may be fewer others than k.
        best = int(scores.masked_fill(likely.values == 0, -torch.inf).argmax())
        self.cache.reorder(torch.full_like(likely.indices, best))
        self.known = torch.cat((self.known, new[best : best + 1]))
        self.p = self._follow(states[best : best + 1])
        return int(likely.indices[best])

    def _states(self, ids: Tensor) -> Float[Tensor, "b t m"]:
        if isinstance(self.net, EncoderDecoder):
            return self.net.decoder.states(ids, cache=self.cache, memory=self.cache.memory)
        return self.net.states(ids, cache=self.cache)

    def _follow(self, state: Float[Tensor, "1 1 m"]) -> Float[Tensor, " v"]:
        """The distribution of the next token."""
        at = self.cache.next(1, state.device)
        logits = self.net.head(state, at)[0, 0].float()
        check_logits(logits)
        if len(self.never):
            logits = logits.index_fill(0, self.never, -torch.inf)
            require(
                bool(logits.amax() > -torch.inf),
                "No token may come next: all of them are banned. Allow one.",
            )
        return logits.softmax(dim=0)


def _check(k: int, alpha: float, most: int) -> None:
    require(
        type(k) is int and k >= 1,
        f"k is how many tokens a contrastive search compares, 1 or more, not {k!r}.",
    )
    require(
        isinstance(alpha, (int, float)) and 0 <= alpha <= 1,
        f"alpha is a number from 0 (likely) to 1 (unlike what was said), not {alpha!r}.",
    )
    require(
        type(most) is int and most >= 1, f"max_new_tokens is {most!r}: ask for one token at least."
    )
