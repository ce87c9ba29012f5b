"""How well a model did, as pure functions of what was expected and what was found.

Every score is a number, or an `F1` with its precision and recall. How far it could be off is told
by `bootstrap`, which draws the examples anew, with replacement. Efron & Tibshirani 1993, chapter 13
(percentile intervals).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from clearhead.errors import require

Labels = Sequence[Hashable]
Numbers = Sequence[float | int] | np.ndarray
Entity = tuple[str, int, int]


@dataclass(frozen=True)
class F1:
    """The harmonic mean of precision and recall; 0 where nothing was right."""

    precision: float
    """Of what was found, the part that is right."""
    recall: float
    """Of what was expected, the part that was found."""

    @staticmethod
    def of(right: float, found: float, expected: float) -> F1:
        """From counts."""
        return F1(right / found if found else 0.0, right / expected if expected else 0.0)

    @property
    def value(self) -> float:
        """2 p r / (p + r)."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True)
class Interval:
    """Where a score lies, with a given confidence."""

    low: float
    """Its lower end."""
    high: float
    """Its upper end."""


# --- labels


def accuracy(expected: Labels, found: Labels) -> float:
    """The part of the labels that is right."""
    _check_equal(expected, found)
    return sum(a == b for a, b in zip(expected, found, strict=True)) / len(expected)


def label_f1(expected: Labels, found: Labels) -> dict[Hashable, F1]:
    """For each label that was expected or found, in the order of its first appearance."""
    _check_equal(expected, found)
    right = Counter(a for a, b in zip(expected, found, strict=True) if a == b)
    wanted, given = Counter(expected), Counter(found)
    return {
        label: F1.of(right[label], given[label], wanted[label])
        for label in dict.fromkeys((*expected, *found))
    }


def macro_f1(expected: Labels, found: Labels) -> float:
    """The mean of all labels' F1: rare labels count as much as frequent ones."""
    scores = label_f1(expected, found)
    return sum(score.value for score in scores.values()) / len(scores)


def micro_f1(expected: Labels, found: Labels, ignore: Labels = ()) -> float:
    """F1 of all labels' counts together, without those to ignore (with all it is the accuracy)."""
    _check_equal(expected, found)
    pairs = list(zip(expected, found, strict=True))
    right = sum(a == b and a not in ignore for a, b in pairs)
    given = sum(b not in ignore for _, b in pairs)
    return F1.of(right, given, sum(a not in ignore for a, _ in pairs)).value


# --- entities: tags such as B-PER, I-PER, O


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence: (type, first word, one past the last).

    Read as conlleval and seqeval's default do: an I- behind O, or of another type, begins an entity
    too.
    """
    found: list[Entity] = []
    start, kind, before = 0, "", "O"  # of the entity that is open; "" where none is
    for i, tag in enumerate((*tags, "O")):
        mark, _, name = tag.partition("-")
        require(
            mark in ("B", "I", "E", "S", "O"),
            f'"{tag}" is no tag of an entity: O, B-TYPE or I-TYPE (E- and S- are known too).',
        )
        name = "" if mark == "O" else name or "_"
        goes_on = kind == name and mark in ("I", "E") and before in ("B", "I")
        if kind and not goes_on:
            found.append((kind, start, i))
        if not goes_on:
            start, kind = i, name
        before = mark
    return found


def span_f1(expected: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> F1:
    """F1 of whole entities over all sentences: type and both ends must be right."""
    _check_equal(expected, found)
    right = given = wanted = 0
    for tags, others in zip(expected, found, strict=True):
        _check_equal(tags, others)
        a, b = set(entities(tags)), set(entities(others))
        right, given, wanted = right + len(a & b), given + len(b), wanted + len(a)
    return F1.of(right, given, wanted)


# --- answers


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and double blanks (SQuAD's own rules)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(found: str, answers: Sequence[str]) -> float:
    """1 if it is one of the answers, up to their normal form; else 0."""
    require(len(answers) > 0, "There is no answer to compare with.")
    return float(normalise_answer(found) in {normalise_answer(answer) for answer in answers})


def token_f1(found: str, answers: Sequence[str]) -> float:
    """How many words it shares with the answer it is most like."""
    require(len(answers) > 0, "There is no answer to compare with.")
    return max(_shared(normalise_answer(found), normalise_answer(answer)) for answer in answers)


def _shared(found: str, answer: str) -> float:
    words, others = found.split(), answer.split()
    if not words or not others:
        return float(words == others)  # no answer is right only where there is none
    common = (Counter(words) & Counter(others)).total()
    return F1.of(common, len(words), len(others)).value


# --- numbers


def pearson(expected: Numbers, found: Numbers) -> float:
    """The linear correlation; not a number where one side never changes."""
    _check_equal(expected, found)
    a, b = (np.asarray(x, dtype=np.float64) for x in (expected, found))
    if not np.ptp(a) or not np.ptp(b):  # their mean may differ from them by a rounding
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return min(1.0, max(-1.0, float(a @ b) / scale)) if scale else math.nan


def spearman(expected: Numbers, found: Numbers) -> float:
    """The correlation of ranks; equal numbers share the mean of theirs."""
    _check_equal(expected, found)
    return pearson(_ranks(expected), _ranks(found))


def _ranks(values: Numbers) -> np.ndarray:
    _, group, count = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]


def perplexity(nats: float, count: int) -> float:
    """exp(loss) of a sum of losses over so many tokens."""
    require(count > 0, "The perplexity of no tokens at all is not defined.")
    try:
        return math.exp(nats / count)
    except OverflowError:
        return math.inf


def bits_per(nats: float, count: int) -> float:
    """Bits per character or byte: a text's whole loss, whatever its tokens, over their number."""
    require(count > 0, "Bits per character of no characters at all are not defined.")
    return nats / count / math.log(2)


# --- how sure it is

LEVEL = 0.95


def bootstrap(
    measure: Callable[[Any], float],
    count: int,
    samples: int = 1000,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """The percentile interval of `measure(rows)`, where rows are `count` example numbers drawn with
    replacement. Draws for which it is not defined (a correlation of equal numbers) do not count.
    """
    require(count > 0 and samples > 0, "Drawing anew takes at least one example and one sample.")
    _check_level(level)
    dice = np.random.default_rng(seed)
    drawn = [measure(dice.integers(count, size=count)) for _ in range(samples)]
    values = [value for value in drawn if not math.isnan(value)] or [math.nan]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def mean_interval(values: Numbers, **how: Any) -> Interval:
    """The interval of a mean: of an accuracy (each example 0 or 1), a token F1, an exact match.

    Where all examples are right, or all wrong (True or False), drawing them anew shows no doubt at
    all: there it is that of Wilson (1927) for a share.
    """
    given = np.asarray(values)
    numbers = given.astype(np.float64)
    if given.dtype == bool and len(given) and given.min() == given.max():
        _check_level(how.get("level", LEVEL))
        z = NormalDist().inv_cdf((1 + how.get("level", LEVEL)) / 2)
        doubt = z * z / (len(numbers) + z * z)
        return Interval(1.0 - doubt, 1.0) if numbers[0] else Interval(0.0, doubt)
    return bootstrap(lambda rows: float(numbers[rows].mean()), len(numbers), **how)


def _check_level(level: float) -> None:
    require(0 < level < 1, f"level is the confidence, between 0 and 1, not {level}.")


def _check_equal(expected: Any, found: Any) -> None:
    require(
        len(expected) == len(found),
        f"{len(expected)} were expected and {len(found)} found: one for each.",
    )
    require(len(expected) > 0, "There is nothing to compare.")
