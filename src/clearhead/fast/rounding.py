"""Rounding to int4 with an eye on the inputs (GPTQ: Frantar et al. 2022, section 3).

A matrix is rounded column by column, and what is lost in a column is made good, as far as the
inputs x of the layer allow it, by the columns that are still to come:

    H = sum of x x^T over some text;   w_later -= (w_j - rounded w_j) / U_jj * U_j,later,
    U the upper Cholesky factor of H^-1

So the layer's outputs on such text change least, not its weights. The text is drawn from the model
itself, from random first tokens (Liu et al. 2023, section 2): nobody has to have some at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.fast.formats import GROUP, codes, find_range, in_blocks

ROWS, LENGTH, SEED = 32, 128, 0  # of the text
DAMPED = 0.01  # part of the mean of H's diagonal that is added to it
MOST = 2**26  # numbers of all the H that are collected in one pass over the text


@torch.inference_mode()
def draw_text(net: Any, max_len: int, vocab_size: int) -> Int[Tensor, "b t"]:
    """What a decoder writes, token by token from its own probabilities."""
    length = min(LENGTH, max_len)
    dice = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocab_size, (ROWS, 1), generator=dice)
    cache = net.new_cache(ROWS, length)
    written = [ids]
    with net.at_rest():
        for _ in range(length - 1):
            likely = net.decode(written[-1], cache=cache)[:, -1].softmax(dim=-1)
            written.append(torch.multinomial(likely, 1, generator=dice))
    return torch.cat(written, dim=1)


def second_moments(
    net: Any, layers: Sequence[tuple[str, nn.Linear]], text: Int[Tensor, "b t"]
) -> Iterator[tuple[str, Float[Tensor, "k k"]]]:
    """(name, sum of x x^T) of every layer, in as many passes over the text as memory asks for."""
    left = list(layers)
    while left:
        size, now = 0, list[tuple[str, nn.Linear]]()
        while left and (not now or size + left[0][1].in_features ** 2 <= MOST):
            size += left[0][1].in_features ** 2
            now.append(left.pop(0))
        with _seen(now) as found, torch.inference_mode(), net.at_rest():
            net.decode(text)
        yield from found.items()


def round_to_int4(
    weight: Float[Tensor, "n k"], moments: Float[Tensor, "k k"]
) -> tuple[Int[Tensor, "blocks words"], Tensor]:
    """What `formats.pack` gives; k is a whole number of groups."""
    w = weight.detach().float().T.contiguous()  # a column of the matrix is a row here
    factor = _factor(moments)
    all_codes, scales, lows = [], [], []
    for start in range(0, len(w), GROUP):
        stop = start + GROUP
        scale, low = find_range(w[start:stop].T[:, None], moments.diagonal()[start:stop])
        step, least = scale[:, 0], low[:, 0]
        group, lost = torch.empty(GROUP, w.shape[1]), torch.empty(GROUP, w.shape[1])
        for i, j in enumerate(range(start, stop)):
            group[i] = codes((w[j] - least).unsqueeze(1), step, 15, 0)[:, 0]
            lost[i] = (w[j] - (group[i] * step + least)) / factor[j, j]
            w[j + 1 : stop] -= factor[j, j + 1 : stop, None] * lost[i]
        w[stop:] -= factor[start:stop, stop:].T @ lost
        all_codes.append(group.T)
        scales.append(scale)
        lows.append(low)
    found = torch.stack(all_codes, dim=1), torch.cat(scales, dim=1), torch.cat(lows, dim=1)
    return in_blocks(*found), weight.new_empty(len(weight), 0)


def _factor(moments: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """The upper Cholesky factor of the inverse."""
    h = moments.clone()
    diagonal = h.diagonal()
    diagonal += DAMPED * diagonal.mean() + torch.finfo(h.dtype).tiny
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)


@contextmanager
def _seen(layers: Sequence[tuple[str, nn.Linear]]) -> Iterator[dict[str, Tensor]]:
    """Name -> sum of x x^T over what the layers are given within the block."""
    found = {name: torch.zeros(part.in_features, part.in_features) for name, part in layers}

    def listen(name: str) -> Any:
        def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].detach().flatten(0, -2).float()
            found[name] += x.T @ x

        return add

    hooks = [part.register_forward_pre_hook(listen(name)) for name, part in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
