"""Another head on a body that is there: what the new head shares with the old one is kept, the rest
is drawn in the family's own style, and the report says which is which.

Two heads share a part where the family's key table gives it one name: BERT's pooler stands before
its labels too. Logits of other labels are never shared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from clearhead.layers.init import initialise
from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig, family
from clearhead.models.keys import Dropped, Rule, spelt_out
from clearhead.weights.convert import Report
from clearhead.weights.folder import assemble

REPLACED = "of the file's own head, which was replaced"


def head_changes(head: Any) -> dict[str, Any]:
    """What is changed in a config for the head that was asked for; "none" are the bare states, and
    None is no change.
    """
    if head is None:
        return {}
    return {"head": None if head in ("none", {"kind": "none"}) else head}


def seeded(seed: int | None) -> torch.Generator | None:
    """Where a new head is drawn from; None: torch's own generator."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def draw_head(
    config: FamilyConfig, there: Collection[str], generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """The head's parameters that are not there yet, drawn anew."""
    net: Any = config.outline()
    aliases = dict(net.ties)
    missing = [
        name
        for name, _ in net.named_parameters(remove_duplicate=False)
        if name.startswith("head.") and name not in there and name not in aliases
    ]
    if not missing:
        return {}
    head = net.head.to_empty(device="cpu")
    initialise(head, config.init, generator)
    parameters = {f"head.{name}": p.detach() for name, p in head.named_parameters()}
    return {name: parameters[name] for name in missing}


def without_head(
    theirs: Mapping[str, Tensor], module: ModuleType, own: FamilyConfig, config: FamilyConfig
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Their tensors without those of a head that was replaced by another, and these by name."""
    old = spelt_out(module.keys(own), 1)
    shared = _shared(module, own, config)
    gone = {}
    for name in theirs:
        rule = old.get(name) or old.get(module.PREFIX + name)
        parts = [part for part in (rule.ours if rule else ()) if part.startswith("head.")]
        if any(part not in shared for part in parts):
            gone[name] = REPLACED
    return {name: t for name, t in theirs.items() if name not in gone}, gone


def put_head(
    net: Net,
    own: FamilyConfig,
    head: Mapping[str, Any],
    read: Report,
    generator: torch.Generator | None = None,
) -> tuple[Net, FamilyConfig, Report]:
    """A network's body with another head (`head_changes` of it); `read` says where its parameters
    came from. The body is the same tensors, not a copy.
    """
    config = own.changed(**head)
    if config == own:
        return net, own, read
    shared = _shared(family(own.kind), own, config)
    aliases = dict(net.ties)
    tensors, moved = {}, {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if name not in aliases:
            moved[name] = shared.get(name) if name.startswith("head.") else name
            if (new := moved[name]) is not None:
                tensors[new] = parameter.detach()
    drawn = draw_head(config, tensors, generator)
    made = assemble(config, tensors | drawn)
    became, dropped = {}, dict(read.dropped)
    for theirs, ours in (read.became or {name: (name,) for name in moved}).items():
        kept = tuple(new for name in ours if (new := moved.get(name, name)) is not None)
        if kept:
            became[theirs] = kept
        else:
            dropped[theirs] = REPLACED
    return made, config, Report(became, dropped, dict(made.ties), tuple(drawn), read.notes)


def _shared(module: ModuleType, own: FamilyConfig, config: FamilyConfig) -> dict[str, str]:
    """The old head's parts that serve the new one, with what they are called in it."""
    if not hasattr(module, "keys"):
        return {}
    old, new = (spelt_out(module.keys(c), 1) for c in (own, config))
    same_labels = _labels(own) == _labels(config)
    shared: dict[str, str] = {}
    for key, rule in old.items():
        other: Rule | None = new.get(key)
        if other is None or isinstance(other, Dropped) or len(other.ours) != len(rule.ours):
            continue
        for part, name in zip(rule.ours, other.ours, strict=True):
            if part.startswith("head.") and (same_labels or not part.startswith("head.proj.")):
                shared[part] = name
    return shared


def _labels(config: Any) -> tuple[type, int | None, str | None]:
    """What the logits of a config's head are of."""
    head = config.head
    return type(head), getattr(head, "n_labels", None), getattr(head, "true", None)
