"""Somebody else's tensors as ours, and ours as theirs: total, exact, with a report of what became
of every key.

Loading is total: every foreign key is used or named as dropped, every parameter of ours is filled,
every shape is checked, and all that is wrong is listed at once, before anything is changed; names
that differ in their layers alone count as one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.models.base import Net
from clearhead.models.keys import Dropped, Table, spelt_out

Faults = Mapping[str, list[str]]  # what is wrong -> where
NONE: Faults = {}
NAME, LIST = 100, 2000  # characters of a name and of a list: a file may be hostile


@dataclass(frozen=True)
class Report:
    """What became of every foreign key."""

    became: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Their key -> our parameters."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Their key -> why it has no place here."""
    tied: dict[str, str] = field(default_factory=dict)
    """Our parameter -> the one it shares its numbers with."""
    drawn: tuple[str, ...] = ()
    """Our parameters that the file does not have and that were drawn anew: a new head."""
    notes: tuple[str, ...] = ()
    """What else is not as in the file, a sentence each."""


def to_ours(
    tensors: Mapping[str, Tensor], table: Table, n_layers: int, prefix: str = ""
) -> tuple[dict[str, Tensor], Report, Faults]:
    """Our tensors from theirs, and what is wrong with these, for `fill` to say. A body saved
    without its prefix (`bert.`) is recognised.
    """
    rules = spelt_out(table, n_layers)
    ours: dict[str, Tensor] = {}
    report = Report()
    unknown: list[str] = []
    twice: list[str] = []
    for name, tensor in tensors.items():
        key = name if name in rules else prefix + name
        if key not in rules:
            unknown.append(name)
        elif isinstance(rule := rules[key], Dropped):
            report.dropped[name] = rule.why
        else:
            report.became[name] = rule.ours
            for part, value in zip(rule.ours, rule.to_ours(tensor), strict=True):
                if part in ours and not ours[part].equal(value):
                    twice.append(part)
                ours[part] = value
    return (
        ours,
        report,
        {
            "in the file twice, with different numbers": twice,
            "keys that have no place in this model": unknown,
        },
    )


def to_theirs(ours: Mapping[str, Tensor], table: Table, n_layers: int) -> dict[str, Tensor]:
    """Their tensors from ours: the inverse, for all keys that we have the parts of. The first name
    of a part wins.
    """
    theirs: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, rule in spelt_out(table, n_layers).items():
        if rule.ours and all(part in ours and part not in used for part in rule.ours):
            theirs[name] = rule.to_theirs([ours[part] for part in rule.ours])
            used |= set(rule.ours)
    lost = [name for name in ours if name not in used]
    if lost:
        raise ClearheadError(f"The key table has no name for these parameters: {_some(lost)}.")
    return theirs


def fill(net: Net, tensors: Mapping[str, Tensor], faults: Faults = NONE) -> dict[str, str]:
    """Put every tensor into its parameter, or raise one error that lists all that does not fit,
    `faults` first.

    Returns which parameters share the numbers of which. Nothing is changed where there is an error.
    """
    slots = dict(net.named_parameters(remove_duplicate=False))
    aliases = dict(net.ties)
    missing = [name for name in slots if name not in tensors and name not in aliases]
    extra = [name for name in tensors if name not in slots]
    shapes = [
        f"{name} is {tuple(tensor.shape)}, not {tuple(slots[name].shape)}"
        for name, tensor in tensors.items()
        if name in slots and tensor.shape != slots[name].shape
    ]
    kinds = [
        f"{name} is {tensor.dtype}"
        for name, tensor in tensors.items()
        if not tensor.is_floating_point()
    ]
    broken = [
        f"{alias} differs from {original}"
        for alias, original in net.ties
        if alias in tensors and original in tensors and not tensors[alias].equal(tensors[original])
    ]
    said = [
        f"{words}: {_some(names)}"
        for words, names in {
            **faults,
            "missing": missing,
            "not of this model": extra,
            "of another shape": shapes,
            "not floating-point numbers": kinds,
            "tied here, but two different tensors in the file": broken,
        }.items()
        if names
    ]
    if said:
        raise ClearheadError("The weights do not fit the model. " + "; ".join(said) + ".")
    own = {name: _alone(tensor) for name, tensor in tensors.items() if name not in aliases}
    net.load_state_dict(own, strict=False, assign=True)
    net.tie()
    return aliases


def _alone(tensor: Tensor) -> Tensor:
    """The same numbers where they are, known as all that is there: who saves or sends a tensor that
    is a part of a file would take the whole file along.
    """
    if not tensor.is_cpu or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    size = tensor.element_size()
    as_whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size, torch.uint8)
    with torch.inference_mode(False):  # a parameter that was loaded there can still learn
        return torch.from_numpy(tensor.detach().view(as_whole).numpy()).view(tensor.dtype)


def folded(name: str) -> str:
    """A name with its layers' numbers as *."""
    return re.sub(r"\.\d+(?=[. ]|$)", ".*", name)


def _some(names: Iterable[str]) -> str:
    """All of these names; those of several layers as one, with how many there are."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(folded(name), []).append(name)
    said = [
        short[:NAME] + f" ({len(same)} times)" if len(same) > 1 else same[0][:NAME]
        for short, same in kinds.items()
    ]
    ends = itertools.accumulate(len(name) for name in said)
    most = sum(end <= LIST for end in ends)
    more = f" and {len(said) - most} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more
