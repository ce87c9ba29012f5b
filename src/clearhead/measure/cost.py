"""What a model costs, predicted from its modules without allocating anything.

    model = ch.build("gpt3", device="meta")
    cost = predict(model.net, batch=1, length=2048)
    cost.parameters; cost.forward; cost.memory.activations; cost.by_component()["ffn"].forward

With N parameters beside the tables and short texts, forward is near 2 N FLOPs a token and training
near 6 N (Kaplan et al. 2020, section 2.1); attention adds 4 t m a layer, which grows with the
length. What is counted and what is not: `clearhead.measure.parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import torch
from torch import nn

from clearhead.attention.additive import AdditiveAttention
from clearhead.errors import require
from clearhead.layers.position import Learned, Learned2D
from clearhead.measure.parts import Component, Part
from clearhead.measure.towers import tokens_of_image, walk
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Net


@dataclass(frozen=True)
class Share:
    """What some parts cost together."""

    parameters: int = 0
    """Parameters, each counted once in the whole model."""
    forward: int = 0
    """FLOPs of a forward pass."""
    backward: int = 0
    """FLOPs of a backward pass."""
    activations: int = 0
    """Bytes kept for the backward pass where the attention kernel is fused."""
    activations_written: int = 0
    """The same where it is not fused."""
    patterns: int = 0
    """Bytes of the attention matrices, if they are written down: b h t s numbers a layer."""

    def __add__(self, other: Share) -> Share:
        return Share(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Share)))


@dataclass(frozen=True)
class Memory:
    """Bytes, all numbers in one type.

    Left out: what a kernel needs for a moment, ids, masks and tables that all layers share.
    """

    weights: int
    """The parameters."""
    gradients: int
    """One number a parameter."""
    optimiser: int
    """AdamW's two moments, two numbers a parameter."""
    activations: int
    """Kept from the forward to the backward pass, where the attention kernel is fused."""
    activations_written: int
    """The same where the pattern is written down: on a CPU with dropout on attention weights, or
    where somebody asks for the pattern.
    """
    patterns: int
    """All attention matrices, if they are written down."""
    logits: int
    """The head's output, once; the loss keeps as much for the backward pass."""
    cache: int
    """Keys and values of `batch` sequences of `length` tokens; a layer with a window keeps the
    window only.
    """
    cross_cache: int
    """Keys and values of the sources."""

    @property
    def training(self) -> int:
        """What a training step holds when the backward pass starts."""
        state = self.weights + self.gradients + self.optimiser
        return state + self.activations + self.logits

    @property
    def generating(self) -> int:
        """Weights and caches."""
        return self.weights + self.cache + self.cross_cache


@dataclass(frozen=True)
class Cost:
    """The prediction for one batch."""

    batch: int
    """Rows."""
    length: int
    """Tokens a row (of the target, where there is a source)."""
    source_length: int | None
    """Tokens a row of the source; None: there is none."""
    tokens: int
    """Tokens in the batch: of target, source and images."""
    number_size: int
    """Bytes of a number."""
    parts: tuple[Part, ...]
    """Every module that costs something."""
    memory: Memory
    """Bytes by purpose."""

    @property
    def total(self) -> Share:
        """All parts together."""
        return self._sum(self.parts)

    @property
    def parameters(self) -> int:
        """Parameters, tied ones once."""
        return self.total.parameters

    @property
    def forward(self) -> int:
        """FLOPs of a forward pass of the batch."""
        return self.total.forward

    @property
    def training(self) -> int:
        """FLOPs of a forward and a backward pass of the batch."""
        return self.total.forward + self.total.backward

    def by_component(self) -> dict[str, Share]:
        """The sums for embedding, attention projections, attention scores, ..."""
        groups = self._group(lambda part: part.component)
        return {name: groups[name] for name in get_args(Component) if name in groups}

    def by_layer(self) -> dict[str, Share]:
        """The sums for each block, by its name; "" has what stands outside the blocks."""
        return self._group(lambda part: part.layer)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "batch": self.batch,
            "length": self.length,
            "source_length": self.source_length,
            "tokens": self.tokens,
            "number_size": self.number_size,
            "total": asdict(self.total) | {"training": self.training},
            "components": {name: asdict(share) for name, share in self.by_component().items()},
            "layers": {name: asdict(share) for name, share in self.by_layer().items() if name},
            "memory": asdict(self.memory)
            | {"training": self.memory.training, "generating": self.memory.generating},
        }

    def _group(self, key: Callable[[Part], str]) -> dict[str, Share]:
        groups: dict[str, list[Part]] = {}
        for part in self.parts:
            groups.setdefault(key(part), []).append(part)
        return {name: self._sum(parts) for name, parts in groups.items()}

    def _sum(self, parts: Iterable[Part]) -> Share:
        total, size = Share(), self.number_size
        for part in parts:
            in_bytes = part.kept * size, part.written * size, part.pattern * size
            total += Share(part.parameters, part.forward, part.backward, *in_bytes)
        return total


def predict(
    net: Net,
    *,
    batch: int = 1,
    length: int,
    source_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Cost:
    """The cost of one batch; an encoder-decoder's source is as long as its target unless given.

    `dtype` is that of weights, activations and cache alike; None: the parameters' own.
    """
    require(batch >= 1, f"The batch must be 1 or more, not {batch}.")
    require(length >= 1, f"The length must be 1 or more, not {length}.")
    if isinstance(net, EncoderDecoder):
        source_length = length if source_length is None else source_length
        require(source_length >= 1, f"The source's length must be 1 or more, not {source_length}.")
        lengths = [_checked(net.encoder.embed, source_length), _checked(net.decoder.embed, length)]
    else:
        require(
            source_length is None, "Only an encoder-decoder has a source: give no length of it."
        )
        lengths = _lengths(net, length)
    parts = tuple(walk(net, batch, length, source_length))
    dtype = next(net.parameters()).dtype if dtype is None else dtype
    size, count = dtype.itemsize, sum(part.parameters for part in parts)
    cross = _cross_cache(net, batch, source_length or 0) * size
    memory = Memory(
        weights=count * size,
        gradients=count * size,
        optimiser=2 * count * size,
        activations=sum(part.kept for part in parts) * size,
        activations_written=sum(part.written for part in parts) * size,
        patterns=sum(part.pattern for part in parts) * size,
        logits=_outputs(net, batch, length) * size,
        cache=_cache(net, batch, length, dtype),
        cross_cache=cross,
    )
    return Cost(batch, length, source_length, batch * sum(lengths), size, parts, memory)


def _limit(module: nn.Module) -> int | None:
    return module.max_len if isinstance(module, Learned | Learned2D) else None


def _lengths(net: Net, length: int) -> list[int]:
    """How many tokens a row has in each tower."""
    if isinstance(net, Encoder | Decoder):
        return [_checked(net.embed, length)]
    towers = [child for child in net.children() if isinstance(child, Encoder | Decoder)]
    require(
        len(towers) > 0,
        "The cost of encoders, decoders and their pairs can be predicted, not that of "
        f"{type(net).__name__}: pass model.net.",
    )
    return [tokens_of_image(tower.embed) or _checked(tower.embed, length) for tower in towers]


def _checked(embed: nn.Module, length: int) -> int:
    """The length, if the embedding can make so many tokens."""
    image = tokens_of_image(embed)
    require(
        image in (None, length),
        f"An image is {image} tokens for this model, not {length}: change image_size or "
        "patch_size in its settings.",
    )
    for module in embed.modules():
        limit = _limit(module)
        require(
            limit is None or length <= limit,
            f"A length of {length} is beyond the learned table of {limit} positions: ask for "
            f"{limit} at most, or give the model a larger max_len.",
        )
    return length


def _outputs(net: Net, batch: int, length: int) -> int:
    """How many numbers the head returns; without a head they are among the activations."""
    head = getattr(net, "head", None)
    last = getattr(head, "proj", None)
    if not isinstance(last, nn.Linear):
        return 0
    pooled = hasattr(head, "pooling")
    return batch * last.out_features * (1 if pooled else length)


def _cache(net: Net, batch: int, length: int, dtype: torch.dtype) -> int:
    """The bytes of an empty cache, which is made on the meta device: no memory is touched."""
    decoder = net.decoder if isinstance(net, EncoderDecoder) else net
    if not isinstance(decoder, Decoder):
        return 0
    return decoder.new_cache(batch, length, device="meta", dtype=dtype).nbytes


def _cross_cache(net: Net, batch: int, source: int) -> int:
    """How many numbers the keys and values of the sources are."""
    if not isinstance(net, EncoderDecoder):
        return 0
    numbers = 0
    for block in net.decoder.stack.blocks:
        if isinstance(block.cross_attn, AdditiveAttention):
            numbers += block.cross_attn.k_proj.out_features
        elif block.cross_attn is not None:
            numbers += 2 * block.cross_attn.n_kv_heads * block.cross_attn.head_dim
    return batch * source * numbers
