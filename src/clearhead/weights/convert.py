"""Somebody else's tensors as ours, and ours as theirs: total, exact, with a report of what became
of every key.

Loading is total: every foreign key is used or named as dropped, every parameter of ours is filled,
every shape is checked, and all that is wrong is listed at once, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.models.base import Net
from clearhead.models.keys import Dropped, Table, spelt_out


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
) -> tuple[dict[str, Tensor], Report]:
    """Our tensors from theirs. A body saved without its prefix (`bert.`) is recognised."""
    rules = spelt_out(table, n_layers)
    ours: dict[str, Tensor] = {}
    report = Report()
    unknown, twice = [], []
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
    if twice:
        raise ClearheadError(
            f"The file has these parameters twice, with different numbers: {_some(twice)}."
        )
    if unknown:
        raise ClearheadError(
            f"These keys of the file have no place in this model: {_some(unknown)}."
        )
    return ours, report


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


def fill(net: Net, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Put every tensor into its parameter, or raise one error that lists all that does not fit.

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
    net.load_state_dict(
        {n: t for n, t in tensors.items() if n not in aliases}, strict=False, assign=True
    )
    net.tie()
    return aliases


def _some(names: Iterable[str], most: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
