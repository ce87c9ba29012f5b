"""Decoders of every kind with one way to call them, for the tests of caches."""

from __future__ import annotations

import torch

from clearhead.attention.mask import Causal, Window
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import TopKConfig
from clearhead.attention.spec import (
    ALiBiConfig,
    RopeConfig,
    ShawConfig,
    T5BucketsConfig,
    TransformerXLConfig,
)
from clearhead.layers.position import SinusoidalConfig
from clearhead.models.base import EncoderDecoder
from tiny import DECODERS, POSITIONS, SEQ2SEQ, attention, positioned, stacked, tiny, tokens

ROWS, TIME, WINDOW = 3, 9, 3

WINDOWED = {
    "none": None,
    "rope": RopeConfig(),
    "alibi": ALiBiConfig(),
    "t5_buckets": T5BucketsConfig(8, 16),
    "shaw": ShawConfig(2),
    "transformer_xl": TransformerXLConfig(),
}


def windowed(position):
    """A decoder whose layers all have a window."""
    mask = Causal() & Window(WINDOW)
    return stacked(attention(mask, kv=2, position=WINDOWED[position]))


def local_and_global():
    """Layers with a window and layers without, in turn."""
    local = attention(Window(WINDOW) & Causal(), position=RopeConfig())
    return stacked(local, attention(Causal(), position=ALiBiConfig()), n_layers=4)


STACKS = {
    "pre": lambda: stacked(attention(position=RopeConfig())),
    "post": lambda: stacked(attention(), position=SinusoidalConfig(), placement="post"),
    "sandwich": lambda: stacked(attention(position=ShawConfig(2)), placement="sandwich"),
    "parallel": lambda: stacked(attention(position=ALiBiConfig()), topology="parallel"),
    "top_k": lambda: stacked(attention(kernel=TopKConfig(2), position=RopeConfig())),
    "local and global": local_and_global,
}
CASES = (
    [("family", name) for name in (*DECODERS, *SEQ2SEQ)]
    + [("position", name) for name in POSITIONS]
    + [("window", name) for name in WINDOWED]
    + [("stack", name) for name in STACKS]
)


class Decoding:
    """One way to call decoders with and without a source."""

    def __init__(self, case, rows=ROWS):
        kind, name = case
        makers = {"family": tiny, "position": positioned, "window": windowed}
        self.net = STACKS[name]() if kind == "stack" else makers[kind](name)
        self.rows, self.memory = rows, None
        if isinstance(self.net, EncoderDecoder):
            lengths = [5, 3, 4, 6, 1, 2][:rows]
            at = Positions.ragged(lengths)
            self.memory = self.net.encode(tokens(rows, max(lengths), seed=8), at)

    def full(self, ids, at=None, rows=None):
        """Without a cache; `rows`: the sources of these ids."""
        if self.memory is None:
            return self.net.decode(ids, at)
        memory = self.memory if rows is None else self.memory.select(torch.tensor(rows))
        return self.net.decode(ids, memory, at)

    def cache(self, max_len=24, **more):
        """A new cache."""
        first = self.rows if self.memory is None else self.memory
        return self.net.new_cache(first, max_len, **more)

    def step(self, ids, cache, at=None):
        """The next tokens behind a cache."""
        return self.net.decode(ids, at=at, cache=cache)

    def steps(self, ids, chunks, cache):
        """All ids in chunks of these lengths."""
        assert sum(chunks) == ids.shape[1]
        return torch.cat([self.step(part, cache) for part in ids.split(chunks, dim=1)], dim=1)

    def alone(self, row, ids):
        """One row, as a list of ids, without a cache."""
        return self.full(torch.tensor([ids]), rows=[row])[0]


def chunked(size, length=TIME):
    """Chunks of a size, and what is left."""
    return [size] * (length // size) + ([length % size] if length % size else [])
