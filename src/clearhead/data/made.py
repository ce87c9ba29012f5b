"""Data that is made: endless training records, and held-out ones that are never among them.

A maker is a spec whose `record(split, seed, n)` is a pure function: the n-th record of a split, the
same on every machine. First comes its length, then sources of that length are drawn until one falls
into the split that is asked for (by a hash of it, see holdout.py). Where there are fewer than `FEW`
sources of a length, holding some back would leave gaps in what can be learnt at all ("a" alone):
those short ones are in every split.

    copy      gattaca -> gattaca
    reverse   gattaca -> acattag
    sort      31415 -> 11345
    add       123+45 -> 168; with a+b, b+a is held out too
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from clearhead.config import Spec
from clearhead.data.holdout import SPLITS, split_of
from clearhead.data.readers import Record, Rows, fingerprint_of
from clearhead.errors import ClearheadError, did_you_mean, require

HELD = 1000  # records that validate, and as many that test
FEW = 2000  # so few sources of a length are in every split


class Maker(Spec):
    """What makes records out of nothing but numbers."""

    columns: ClassVar[tuple[str, ...]] = ("source", "target")

    def shape(self, dice: np.random.Generator) -> tuple[Any, bool]:
        """How long a source is, or in what form; and whether such ones are in every split."""
        raise NotImplementedError

    def draw(self, shape: Any, dice: np.random.Generator) -> Any:
        """An item of that shape."""
        raise NotImplementedError

    def key(self, item: Any) -> str:
        """What an item's split depends on."""
        raise NotImplementedError

    def write(self, shape: Any, item: Any) -> Record:
        """The record of an item."""
        raise NotImplementedError

    def version(self) -> str:
        """What else its records depend on, beside its settings."""
        return ""

    def record(self, split: str, seed: int, n: int) -> Record:
        """The n-th record of a split for a seed."""
        require(
            split in SPLITS,
            f'There is no split "{split}".{did_you_mean(split, SPLITS)} There are: '
            f"{', '.join(SPLITS)}.",
        )
        return self.make(split, np.random.default_rng([seed, n, SPLITS.index(split)]))

    def make(self, split: str, dice: np.random.Generator) -> Record:
        """A record of a split."""
        shape, everywhere = self.shape(dice)
        while True:
            item = self.draw(shape, dice)
            if everywhere or split_of(self.key(item)) == split:
                return self.write(shape, item)

    def records(self, split: str) -> Iterator[Record]:
        """The records of seed 0; training goes on without end."""
        numbers = itertools.count() if split == "train" else range(HELD)
        return (self.record(split, 0, n) for n in numbers)

    def streams(self) -> dict[str, Rows]:
        """Its splits. The fingerprint covers the settings and a sample of what they make."""
        sample = [self.record("train", 0, n) for n in range(32)]
        fingerprint = fingerprint_of(self.to_dict(), self.version(), sample)
        return {
            split: Rows(
                self.columns,
                None if split == "train" else HELD,
                fingerprint_of(fingerprint, split),
                _Reader(self, split),
            )
            for split in SPLITS
        }


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Starts a split's records; an object, not a closure, so that data workers can be sent it."""

    maker: Maker
    """What makes them."""
    split: str
    """Which of them."""

    def __call__(self) -> Iterator[Record]:
        return self.maker.records(self.split)


@dataclasses.dataclass(frozen=True)
class Sequences(Maker):
    """Random strings of symbols, and what a rule makes of them."""

    shortest: int = 1
    """Symbols of the shortest source."""
    longest: int = 20
    """Symbols of the longest source; every length is equally likely."""
    symbols: str = string.ascii_lowercase
    """What the sources consist of."""
    spaced: bool = False
    """Whether a blank stands between two symbols, for tokenisers of words."""

    def __post_init__(self) -> None:
        require(
            1 <= self.shortest <= self.longest,
            f"{self.kind}: lengths go from 1 or more to the longest, not from {self.shortest} to "
            f"{self.longest}.",
        )
        require(
            len(set(self.symbols)) == len(self.symbols) > 1,
            f'{self.kind}: "{self.symbols}" is no set of two or more different symbols.',
        )

    def shape(self, dice: np.random.Generator) -> tuple[Any, bool]:
        length = int(dice.integers(self.shortest, self.longest + 1))
        return length, len(self.symbols) ** length < FEW

    def draw(self, shape: Any, dice: np.random.Generator) -> Any:
        return [self.symbols[i] for i in dice.integers(0, len(self.symbols), shape)]

    def key(self, item: Any) -> str:
        return "".join(item)

    def write(self, shape: Any, item: Any) -> Record:
        between = " " if self.spaced else ""
        return {"source": between.join(item), "target": between.join(self.rule(item))}

    def rule(self, symbols: list[str]) -> list[str]:
        """The target of a source."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Copy(Sequences, kind="copy"):
    """The target is the source."""

    def rule(self, symbols: list[str]) -> list[str]:
        return symbols


@dataclasses.dataclass(frozen=True)
class Reverse(Sequences, kind="reverse"):
    """The target is the source from its end."""

    def rule(self, symbols: list[str]) -> list[str]:
        return symbols[::-1]


@dataclasses.dataclass(frozen=True)
class Sort(Sequences, kind="sort"):
    """The target has the symbols of the source in the order in which `symbols` names them."""

    symbols: str = string.digits
    """What the sources consist of, in order."""

    def rule(self, symbols: list[str]) -> list[str]:
        return sorted(symbols, key=self.symbols.index)


@dataclasses.dataclass(frozen=True)
class Add(Maker, kind="add"):
    """Sums of two numbers."""

    digits: int = 3
    """Digits of the longest summand; every number of digits is equally likely."""
    spaced: bool = False
    """Whether a blank stands between two characters, for tokenisers of words."""

    def __post_init__(self) -> None:
        require(1 <= self.digits <= 18, f"add: digits is {self.digits}; it goes from 1 to 18.")

    def shape(self, dice: np.random.Generator) -> tuple[Any, bool]:
        sizes = (int(size) for size in dice.integers(1, self.digits + 1, 2))
        # A number of two digits starts at 10; of one, at 0.
        bounds = [(10 ** (size - 1) if size > 1 else 0, 10**size) for size in sizes]
        return bounds, math.prod(high - low for low, high in bounds) < FEW

    def draw(self, shape: Any, dice: np.random.Generator) -> Any:
        return tuple(int(dice.integers(low, high)) for low, high in shape)

    def key(self, item: Any) -> str:
        return "+".join(map(str, sorted(item)))

    def write(self, shape: Any, item: Any) -> Record:
        between, (a, b) = " " if self.spaced else "", item
        return {"source": between.join(f"{a}+{b}"), "target": between.join(f"{a + b}")}


def read_settings(maker: type[Maker], text: str) -> Maker:
    """A maker with settings as they stand behind its name: "longest=30,spaced=true"."""
    types = {field.name: str(field.type) for field in dataclasses.fields(maker)}  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        require(
            bool(equals),
            f'"{setting}" is no setting of {maker.kind}: write it as name=value. It has '
            f"{', '.join(types)}.",
        )
        settings[name] = _value(value, types.get(name, "str"), f"{maker.kind}.{name}")
    return maker.from_dict(settings, maker.kind)


def _value(text: str, kind: str, where: str) -> int | bool | str:
    if kind == "bool":
        require(text in ("true", "false"), f'{where} is true or false, not "{text}".')
        return text == "true"
    if kind == "int":
        try:
            return int(text)
        except ValueError:
            raise ClearheadError(f'{where} is a whole number, not "{text}".') from None
    return text
