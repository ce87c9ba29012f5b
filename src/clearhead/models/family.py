"""The table of families, and what a family's file gives.

A family is one file: `Config` (its published settings in our words, with `to_embed`, `to_stack`,
`build`), the key table `keys` and `from_hf` / `to_hf` for the weights people have. A new one is
that file and one line below.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch.overrides import TorchFunctionMode

from clearhead.attention.spec import AttentionPosition
from clearhead.config import Spec
from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.init import Init, initialise
from clearhead.layers.position import AddedPosition, LearnedConfig
from clearhead.layers.stack import StackConfig, build_stack
from clearhead.models.base import Decoder, Encoder, Net, Ties
from clearhead.models.heads import HeadConfig, HeadStyle

FAMILIES: dict[str, str] = {
    "transformer": "clearhead.models.transformer",
    "gpt2": "clearhead.models.gpt2",
    "llama": "clearhead.models.llama",
    "bert": "clearhead.models.bert",
    "t5": "clearhead.models.t5",
    "gpt_neox": "clearhead.models.gpt_neox",
    "roberta": "clearhead.models.roberta",
    "distilbert": "clearhead.models.distilbert",
    "bart": "clearhead.models.bart",
    "vit": "clearhead.models.vit",
    "clip": "clearhead.models.clip",
    "whisper": "clearhead.models.whisper",
    "rnn": "clearhead.models.rnn",
    "rnn_seq2seq": "clearhead.models.rnn_seq2seq",
}

SIZES = ("d_model", "n_layers", "n_decoder_layers", "n_heads", "max_len", "d_ff", "vocab_size")
LARGEST = 10**9  # of any size: more is a damaged or hostile file
Shape = Literal["encoder", "decoder", "encoder-decoder", "two-tower"]


class _NoDraw(TorchFunctionMode):
    """Leaves out what nn.Linear and others draw for themselves: `initialise` draws all of it, from
    the generator given; and on the meta device their draws would import a compiler first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class FamilyConfig(Spec):
    """Base of the families' settings."""

    shape: ClassVar[Shape] = "decoder"
    init: ClassVar[Init] = "xavier"
    vocab_size: int
    n_layers: int
    max_len: int

    def __post_init__(self) -> None:
        """What no model can be built with, whatever its family."""
        for name in SIZES:
            size = getattr(self, name, None)
            least = 0 if name == "vocab_size" else 1  # images have no vocabulary
            require(size is None or size >= least, f"{name} must be {least} or more, not {size}.")
            require(
                size is None or size <= LARGEST,
                f"{name} is {size}, more than any model has: the settings are damaged.",
            )
        for name in ("dropout", "attention_dropout"):
            rate = getattr(self, name, None) or 0.0
            require(0 <= rate < 1, f"{name} must be in [0, 1), not {rate}.")

    def network(self) -> Net:
        """The network with weights as PyTorch leaves them."""
        raise ClearheadError(f"The family {self.kind} does not say how it is built.")

    def outline(self) -> Net:
        """The network on the meta device: shapes without numbers, in no time and no memory."""
        with torch.device("meta"), _NoDraw():
            return self.network()

    def build(self, generator: torch.Generator | None = None) -> Net:
        """The network, its weights drawn in the family's own style (on meta: not drawn)."""
        with _NoDraw():
            net = self.network()
        if next(net.parameters()).device.type != "meta":
            initialise(net, self.init, generator)
        return net


def decoder(
    embed: EmbedConfig, stack: StackConfig, head: HeadConfig | None, style: HeadStyle
) -> Decoder:
    """A decoder with its head, tied to the token embedding where the head says so."""
    parts = embed.build(), build_stack(stack), head.build(style) if head else None
    return Decoder(*parts, ties=_head_tie(embed, head))


def encoder(
    embed: EmbedConfig, stack: StackConfig, head: HeadConfig | None, style: HeadStyle
) -> Encoder:
    """An encoder with its head, tied to the token embedding where the head says so."""
    parts = embed.build(), build_stack(stack), head.build(style) if head else None
    return Encoder(*parts, ties=_head_tie(embed, head))


def _head_tie(embed: EmbedConfig, head: HeadConfig | None) -> Ties:
    if head is None or not head.tied:
        return ()
    require(
        embed.position is None or embed.position.beside == 0,
        "Positions beside the tokens make the embedding narrower than the stream, so the head "
        "cannot be tied to "
        f'it: use head={{"kind": "{head.kind}", "tied": false}}.',
    )
    return (("head.proj.weight", "embed.tokens.weight"),)


def depth(config: FamilyConfig) -> int:
    """The layers of the deeper side: so many a key table must be spelt out for."""
    return max(config.n_layers, getattr(config, "n_decoder_layers", None) or 0)


def check_depth(config: FamilyConfig, tensors: int, where: str) -> None:
    """Refuse more layers than weights, before anything is built: a layer has at least one
    tensor.
    """
    require(
        depth(config) <= max(tensors, 1),
        f"{where} says {depth(config)} layers, but the weights are only {tensors} tensors: the two "
        "do not belong together.",
    )


def family(name: str) -> ModuleType:
    """The module of a family."""
    if name not in FAMILIES:
        raise ClearheadError(
            f'There is no family "{name}".{did_you_mean(name, FAMILIES)} '
            f"Known: {', '.join(FAMILIES)}."
        )
    return importlib.import_module(FAMILIES[name])


def split_position(
    position: AddedPosition | AttentionPosition | None, max_len: int
) -> tuple[AddedPosition | None, AttentionPosition | None]:
    """A position as (what the embedding adds, what attention does)."""
    if isinstance(position, LearnedConfig) and position.max_len == 0:
        position = replace(position, max_len=max_len)
    if isinstance(position, AddedPosition):
        return position, None
    return None, position
