"""Key tables: how the names and shapes of somebody else's weights map to ours, and back.

A table is a dict {their name: our name}, with {i} for the layer. Where one of theirs is not simply
one of ours, the value is a rule with two directions, so that every table inverts:

    "h.{i}.attn.c_attn.weight": Fused("stack.blocks.{i}.self_attn.{}_proj.weight", transposed=True)
    "h.{i}.attn.bias":          Dropped("the causal mask, which is a formula here")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class Rule:
    """One of their tensors as some of ours."""

    ours: tuple[str, ...]

    def to_ours(self, tensor: Tensor) -> list[Tensor]:
        """Their tensor as ours, in the order of `ours`."""
        return [tensor]

    def to_theirs(self, tensors: list[Tensor]) -> Tensor:
        """The inverse."""
        return tensors[0]


@dataclass(frozen=True)
class Same(Rule):
    """The same tensor under another name."""

    name: str
    """Our name."""

    @property
    def ours(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)


@dataclass(frozen=True)
class Transposed(Rule):
    """A matrix stored [in, out] (GPT-2): a view, so that nothing of a mapped file is read yet."""

    name: str
    """Our name."""

    @property
    def ours(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def to_ours(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.transpose(0, -1)]

    def to_theirs(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0].T.contiguous()


@dataclass(frozen=True)
class Fused(Rule):
    """Queries, keys and values in one tensor, one block behind the other.

    A tensor that cannot be cut is handed on whole: the check of shapes names it then.
    """

    pattern: str
    """Our name with {} for q, k, v."""
    transposed: bool = False
    """Whether it is stored [in, out]."""

    @property
    def ours(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.pattern.replace("{}", part) for part in "qkv")

    def to_ours(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.transpose(0, -1) if self.transposed else tensor
        parts = tensor.chunk(3, dim=0) if tensor.dim() else ()
        return list(parts) if len(parts) == 3 else [tensor] * 3

    def to_theirs(self, tensors: list[Tensor]) -> Tensor:
        joined = torch.cat(tensors, dim=0)
        return joined.T.contiguous() if self.transposed else joined


@dataclass(frozen=True)
class FusedByHead(Rule):
    """Queries, keys and values of head 1, then of head 2, ... (GPT-NeoX)."""

    pattern: str
    """Our name with {} for q, k, v."""
    n_heads: int
    """How many heads."""

    @property
    def ours(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.pattern.replace("{}", part) for part in "qkv")

    def to_ours(self, tensor: Tensor) -> list[Tensor]:
        if tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % (3 * self.n_heads):
            return [tensor] * 3  # see Fused
        heads = tensor.unflatten(0, (self.n_heads, 3, -1))
        return [heads[:, part].flatten(0, 1).contiguous() for part in range(3)]

    def to_theirs(self, tensors: list[Tensor]) -> Tensor:
        heads = [tensor.unflatten(0, (self.n_heads, -1)) for tensor in tensors]
        return torch.stack(heads, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Stacked(Rule):
    """The same tensor with axes of length 1 before it (a batch of one)."""

    name: str
    """Our name."""
    axes: int = 1
    """How many."""

    @property
    def ours(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def to_ours(self, tensor: Tensor) -> list[Tensor]:
        for _ in range(self.axes):
            tensor = tensor.squeeze(0)
        return [tensor]

    def to_theirs(self, tensors: list[Tensor]) -> Tensor:
        return tensors[0][(None,) * self.axes]


@dataclass(frozen=True)
class Dropped(Rule):
    """A tensor of theirs that has no place here; it is never written back."""

    why: str
    """The reason, for the report."""

    ours = ()


Table = Mapping[str, str | Rule]


def spelt_out(table: Table, n_layers: int) -> dict[str, Rule]:
    """The table with every {i} written out for each layer, and every bare name as a rule."""
    rules: dict[str, Rule] = {}
    for theirs, value in table.items():
        rule = Same(value) if isinstance(value, str) else value
        if "{i}" not in theirs:
            rules[theirs] = rule
            continue
        for i in range(n_layers):
            rules[theirs.replace("{i}", str(i))] = _at_layer(rule, i)
    return rules


def _at_layer(rule: Rule, i: int) -> Rule:
    named = {
        key: value.replace("{i}", str(i))
        for key, value in vars(rule).items()
        if isinstance(value, str) and key in ("name", "pattern")
    }
    return type(rule)(**(vars(rule) | named))


def block_keys(theirs: str, ours: str, cross: bool) -> dict[str, str]:
    """The names that BART, Marian and Whisper have for the parameters of a stack's blocks."""
    layer, block = theirs + ".layers.{i}.", ours + ".blocks.{i}."
    names = {
        layer + "self_attn_layer_norm": block + "self_residual.norm",
        layer + "fc1": block + "ffn.in_proj",
        layer + "fc2": block + "ffn.out_proj",
        layer + "final_layer_norm": block + "ffn_residual.norm",
    }
    attentions = {"self_attn": "self_attn"} | ({"encoder_attn": "cross_attn"} if cross else {})
    for a, b in attentions.items():
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            names[f"{layer}{a}.{part}"] = f"{block}{b}.{part}"
    if cross:
        names[layer + "encoder_attn_layer_norm"] = block + "cross_residual.norm"
    return {f"{a}.{kind}": f"{b}.{kind}" for a, b in names.items() for kind in ("weight", "bias")}
