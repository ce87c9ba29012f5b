"""The walk over a whole network: what each part of it costs in one call.

A tower is an embedding, a stack and a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from clearhead.layers.block import Block, ParallelBlock
from clearhead.layers.patch import PatchEmbedding
from clearhead.layers.recurrent import RecurrentStack
from clearhead.layers.sound import SoundEmbedding
from clearhead.layers.stack import Stack
from clearhead.measure.parts import (
    KEPT,
    Call,
    Part,
    Place,
    count_additive,
    count_attention,
    count_cell,
    count_convolution,
    count_ffn,
    count_plain,
    width_of,
)
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Net
from clearhead.models.heads import MaskedLMHead, PoolingHead


def walk(net: Net, batch: int, length: int, source_length: int | None = None) -> list[Part]:
    """All parts, with every parameter of the network in exactly one of them."""
    call = Call(batch, length)
    if isinstance(net, EncoderDecoder):
        source = length if source_length is None else source_length
        parts = [
            *_tower(net.encoder, "encoder", Call(batch, source)),
            *_tower(net.decoder, "decoder", Call(batch, length, source)),
            *_head(net.head, Place("head", "head"), call),
        ]
    elif isinstance(net, Encoder | Decoder):
        parts = list(_tower(net, "", call))
    else:
        parts = list(_meeting(net, call))
    return _with_parameters(net, parts)


def tokens_of_image(embed: nn.Module) -> int | None:
    """How many tokens an embedding of images always makes; None: it is one of something else."""
    return embed.side**2 + 1 if isinstance(embed, PatchEmbedding) else None


def _with_parameters(net: Net, parts: list[Part]) -> list[Part]:
    """Each parameter goes to the part with the longest name that contains it."""
    counts: dict[str, int] = {}
    paths = {part.path for part in parts}
    for name, parameter in net.named_parameters():  # a tied one comes once
        owner = name.rpartition(".")[0]
        path = owner
        while path and path not in paths:
            path = path.rpartition(".")[0]
        counts[path or owner] = counts.get(path or owner, 0) + parameter.numel()
    counted = [replace(part, parameters=counts.pop(part.path, 0)) for part in parts]
    return counted + [Part(path, "other", parameters=n) for path, n in counts.items()]


def _tower(tower: Encoder | Decoder, path: str, call: Call) -> Iterator[Part]:
    top = Place(path, "other")
    yield from _embed(tower.embed, top.at("embed", "embedding"), call)
    yield from _stack(tower.stack, top.at("stack"), call)
    if tower.head is not None:
        yield from _head(tower.head, top.at("head", "head"), call)


def _meeting(net: Net, call: Call) -> Iterator[Part]:
    """Towers side by side, whose vectors are projected into one space and multiplied."""
    width = 0
    for name, child in net.named_children():
        if isinstance(child, Encoder | Decoder):
            own = tokens_of_image(child.embed) or call.length
            yield from _tower(child, name, Call(call.batch, own))
        else:
            yield from count_plain(child, Place(name, "head"), call.batch)
            width = getattr(child, "out_features", 0)
    yield Place("", "head").part(2 * call.batch**2 * width)


def _embed(embed: nn.Module, place: Place, call: Call) -> Iterator[Part]:
    """Tables, norms, and the convolutions of images and sound; the data need no gradient."""
    yield place.part()
    yield from count_plain(embed, place, call.tokens)
    if isinstance(embed, PatchEmbedding):
        conv = place.at("proj")
        yield count_convolution(embed.proj, conv, call.batch * embed.side**2, data=True)
    if isinstance(embed, SoundEmbedding):
        frames = 2 * call.tokens
        yield count_convolution(embed.conv1, place.at("conv1"), frames, data=True)
        yield count_convolution(embed.conv2, place.at("conv2"), call.tokens, data=False)
        # GELU, twice: each keeps its input.
        yield place.part(kept=(frames + call.tokens) * embed.conv2.out_channels)


def _head(head: nn.Module, place: Place, call: Call) -> Iterator[Part]:
    pooled = any(isinstance(module, PoolingHead) for module in head.modules())
    tokens = call.batch if pooled else call.tokens
    yield from count_plain(head, place, tokens)
    if isinstance(head, MaskedLMHead):
        yield place.part(kept=KEPT.get(head.activation, 1) * tokens * head.dense.out_features)


def _stack(stack: Stack | RecurrentStack, place: Place, call: Call) -> Iterator[Part]:
    if isinstance(stack, RecurrentStack):
        yield from _recurrent(stack, place, call)
        return
    for i, block in enumerate(stack.blocks):
        path = place.at(f"blocks.{i}").path
        bias = stack.kinds[i % len(stack.kinds)].bias
        # The gradient of a learned bias needs the pattern: such layers are never fused.
        learned = bias is not None and any(True for _ in bias.parameters())
        yield from _block(block, Place(path, "other", path), call, learned, first=i == 0)
    for i, kind in enumerate(stack.kinds):
        if kind.bias is not None:
            yield place.at(f"kinds.{i}.bias", "positions").part()
    if stack.norm is not None:
        yield from count_plain(stack.norm, place.at("norm", "norms"), call.tokens)


def _recurrent(stack: RecurrentStack, place: Place, call: Call) -> Iterator[Part]:
    for i, block in enumerate(stack.blocks):
        path = place.at(f"blocks.{i}").path
        here = Place(path, "recurrence", path)
        yield count_cell(block.cell, here.at("cell"), call, from_zero=not call.source)
        if block.cross_attn is not None:
            yield from count_additive(
                block.cross_attn, here.at("cross_attn", "cross-attention"), call
            )
            yield from count_plain(block.mix, here.at("mix", "cross-attention"), call.tokens)
            yield here.part(kept=call.tokens * stack.width)  # the tanh behind it
        if block.dropout.p:
            yield here.at("dropout").part(kept=call.tokens * stack.width)


def _block(
    block: Block, place: Place, call: Call, learned_bias: bool, first: bool
) -> Iterator[Part]:
    attn = place.at("self_attn", "attention projections")
    yield from count_attention(block.self_attn, attn, call, call.length, learned_bias)
    yield from count_plain(block.self_residual, place.at("self_residual", "norms"), call.tokens)
    if block.cross_attn is not None and block.cross_residual is not None:
        cross = place.at("cross_attn", "cross-attention")
        yield from count_attention(block.cross_attn, cross, call, call.source, False)
        yield from count_plain(
            block.cross_residual, place.at("cross_residual", "norms"), call.tokens
        )
        if first:  # the source's states are kept once for all blocks
            yield cross.part(kept=call.batch * call.source * block.cross_attn.k_proj.in_features)
    yield from count_ffn(block.ffn, place.at("ffn", "ffn"), call.tokens)
    residual = place.at("ffn_residual", "norms")
    for part in count_plain(block.ffn_residual, residual, call.tokens):
        shared = isinstance(block, ParallelBlock) and part.path == f"{residual.path}.norm"
        # Side by side, both norms read (and keep) the same stream.
        kept = part.kept - shared * call.tokens * width_of(block.ffn_residual)
        yield replace(part, kept=kept, written=kept)
