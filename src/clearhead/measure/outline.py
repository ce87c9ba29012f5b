"""The outline of a network: its modules as a tree, equal neighbours folded into one.

stack
  blocks.0-11     12 times the same
    self_attn
      q_proj      weight 768 x 768, bias 768
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Weight:
    """One parameter of a module."""

    name: str
    """Its name in the module."""
    shape: tuple[int, ...]
    """Its sizes."""
    tied: str | None = None
    """The parameter that it is one and the same with, if that came before it."""


@dataclass(frozen=True)
class Node:
    """A module, or several equal ones in a row."""

    name: str
    """Its name in the module above; "blocks.0-11" for a row."""
    kind: str
    """Its class."""
    note: str
    """What its class does not say: the mask that some layers share."""
    times: int
    """How many of them stand in a row."""
    parameters: int
    """Parameters of one of them, tied ones not counted again."""
    weights: tuple[Weight, ...]
    """Its own parameters."""
    children: tuple[Node, ...]
    """The modules inside."""


def outline(net: nn.Module) -> Node:
    """The tree. Dropout is left out: it has no numbers."""
    first: dict[int, str] = {}  # parameter -> the first name it goes by
    for name, parameter in net.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    return _node(net, "", "", first)


def _node(module: nn.Module, path: str, name: str, first: dict[int, str]) -> Node:
    weights, count = [], 0
    for own, parameter in module.named_parameters(recurse=False):
        origin = first[id(parameter)]
        tied = None if origin == _join(path, own) else origin
        weights.append(Weight(own, tuple(parameter.shape), tied))
        count += 0 if tied else parameter.numel()
    children: list[Node] = []
    for inner, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            paths = [_join(path, f"{inner}.{i}") for i in range(len(child))]
            items = [_node(item, at, "", first) for item, at in zip(child, paths, strict=True)]
            children += _folded(items, inner)
        elif not isinstance(child, nn.Dropout):
            children.append(_node(child, _join(path, inner), inner, first))
    count += sum(child.parameters * child.times for child in children)
    kind = type(module).__name__
    return Node(name, kind, _note(module), 1, count, tuple(weights), tuple(children))


def _folded(nodes: list[Node], name: str) -> list[Node]:
    """Equal neighbours as one node with their numbers."""
    rows: list[tuple[int, Node]] = []  # (how many, what)
    for node in nodes:
        if rows and rows[-1][1] == node:
            rows[-1] = (rows[-1][0] + 1, node)
        else:
            rows.append((1, node))
    folded, start = [], 0
    for times, node in rows:
        numbers = f"{start}" if times == 1 else f"{start}-{start + times - 1}"
        folded.append(replace(node, name=f"{name}.{numbers}", times=times))
        start += times
    return folded


def _note(module: Any) -> str:
    mask = getattr(module, "mask", None)
    if mask is None:
        return ""
    window = "" if mask.reach is None else f", window {mask.reach}"
    what = (
        "causal mask" if mask.causal else "no mask" if mask.kind == "all" else f"mask {mask.kind}"
    )
    return f"layers share: {what}{window}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
