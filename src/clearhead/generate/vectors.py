"""Texts as vectors, in batches of similar length so that little is padding."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import require
from clearhead.generate.batch import by_length, pad_rows

# Slots of a batch. On a CPU fewer make small products, more are less alike and leave the cache; on
# other devices more are better (not measured).
SLOTS, MORE = 1024, 16_384
OVERHEAD = 32  # slots that could be computed while another batch is begun


@torch.inference_mode()
def run_encoder(
    net: Any,
    rows: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """An encoder's output for every row of ids, in the order given."""
    require(all(len(row) > 0 for row in rows), "A text has no tokens at all: give it at least one.")
    device = next(net.parameters()).device
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    slots = SLOTS if device.type == "cpu" else MORE
    for chosen in by_length([len(row) for row in rows], slots, OVERHEAD):
        ids, at = pad_rows([rows[i] for i in chosen], device)
        kinds = None if types is None else pad_rows([types[i] for i in chosen], device)[0]
        with net.at_rest():
            found = net(ids, at) if kinds is None else net(ids, at, kinds)
        for i, out in zip(chosen, found, strict=True):
            outputs[i] = out
    return outputs


def segments(net: Any, types: Sequence[Sequence[int]]) -> Sequence[Sequence[int]] | None:
    """These segments, if the network tells segments apart."""
    table = getattr(net.embed, "types", None)
    return types if table is not None and table.num_embeddings > 1 else None


def embed_texts(
    net: Any, tokenizer: Any, texts: Sequence[str], max_len: int
) -> Float[Tensor, "n m"]:
    """One vector a text; longer texts than the model can read are cut, with a warning."""
    require(len(texts) > 0, "There are no texts to embed.")
    whole = tokenizer.encode_batch(texts)
    rows = [cut(ids, max_len) for ids in whole]
    tell_cut(map(len, whole), max_len)
    return torch.stack(run_encoder(net, rows))


def tell_cut(lengths: Iterable[int], max_len: int) -> None:
    """Warn if texts have more tokens than are read."""
    lengths = list(lengths)
    longer = sum(length > max_len for length in lengths)
    if longer:
        warnings.warn(
            f"{longer} of {len(lengths)} texts have more than the {max_len} tokens that the model "
            f"reads (the longest {max(lengths)}): what is beyond is left out. Cut them into parts.",
            stacklevel=4,
        )


def cut(ids: list[int], max_len: int) -> list[int]:
    """At most `max_len` ids, of which the last (a separator) stays."""
    return ids if len(ids) <= max_len else [*ids[: max_len - 1], ids[-1]]
