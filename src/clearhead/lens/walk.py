"""One attention head worked out step by step over the words of any sentence, every number kept.

    q = x W_Q,  k = x W_K,  v = x W_V,  pattern = softmax(q k^T / (sqrt(d) T)),  out = pattern v

Vaswani et al. 2017, section 3.2.1; T is a temperature, 1 in the paper.

In numpy and in double precision, not torch: it starts ten times sooner, which matters for a command
that prints a few small tables, and all digits that are shown are right.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError

MAX_WORDS = 64
MAX_WIDTH = 64
TEMPERATURES = (1e-6, 1e6)  # beyond these the scores leave what a double can hold

MEANING = {
    "embedding": "Each word is looked up in a table: the same word always gives the same row. This "
    "table is not trained; its numbers come from the letters of the word and the seed.",
    "position": "Attention alone does not see order. So each place gets a row of sines and cosines "
    "of its own, each pair of columns with another wavelength.",
    "x": "What the head reads: one row for each word.",
    "W_Q": "Turns x into queries. A model learns these numbers; here they are given.",
    "W_K": "Turns x into keys.",
    "W_V": "Turns x into values.",
    "q": "The query: what this word is looking for.",
    "k": "The key: what this word offers to those who look.",
    "v": "The value: what this word hands over to those who look at it.",
    "scores": "How well each query (row) fits each key (column): multiply them number by number "
    "and add up.",
    "masked": "Causal: a word may look at itself and back, never ahead. A score of -inf becomes a "
    "weight of exactly 0, because exp(-inf) = 0.",
    "shifted": "Softmax begins. Taking the row's largest score off the whole row leaves the result "
    "as it is (all exponentials shrink by one factor, and so does their sum) and keeps exp from "
    "overflowing.",
    "exponentials": "exp makes every number positive and stretches the differences.",
    "sums": "What each row is divided by.",
    "pattern": "The attention weights. The numbers of a row add up to 1: they are the shares in "
    "which that query takes from the words (columns).",
    "out": "What the head writes: the values, mixed in the shares of the pattern. A model has "
    "several heads, each with projections of its own; their outputs stand side by side, and one "
    "more matrix, the output projection W_O, mixes them.",
}
MADE_UP = "Turns x into queries. A model learns these numbers; here they are made up from the seed."


@dataclass(frozen=True, eq=False)
class Step:
    """One matrix of the calculation, with the words that explain it."""

    name: str
    """Short name, the same as in the library's code: q, scores, pattern, out, ..."""
    formula: str
    """How it follows from the steps before."""
    rows: tuple[str, ...]
    """A label for each row."""
    columns: tuple[str, ...]
    """A label for each column."""
    values: np.ndarray
    """The numbers, [rows, columns]; a score that the mask removed is -inf."""
    note: str = ""
    """Words for this step alone, in place of those that go with its name."""

    def __post_init__(self) -> None:
        self.values.flags.writeable = False

    @property
    def meaning(self) -> str:
        """What the step does and why, in a sentence or two."""
        return self.note or MEANING[self.name]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which knows no infinity: a masked score is None there."""
        numbers = [[x if math.isfinite(x) else None for x in row] for row in self.values.tolist()]
        return {
            "name": self.name,
            "formula": self.formula,
            "meaning": self.meaning,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "values": numbers,
        }


@dataclass(frozen=True, eq=False)
class Walk:
    """The whole calculation of one head, from what goes in to what comes out."""

    title: str
    """What is being worked out."""
    steps: tuple[Step, ...]
    """The steps in the order in which they are computed."""

    def __getitem__(self, name: str) -> np.ndarray:
        """The numbers of the step of that name: `walk["pattern"]`."""
        return self.step(name).values

    def step(self, name: str) -> Step:
        """The step of that name."""
        for step in self.steps:
            if step.name == name:
                return step
        names = ", ".join(step.name for step in self.steps)
        raise ClearheadError(f'This walk has no step "{name}"; it has {names}.')

    def strongest(self) -> tuple[tuple[str, str, float], ...]:
        """For each row of the pattern: the row, the column it looks at most, and that weight."""
        pattern = self.step("pattern")
        best = pattern.values.argmax(axis=1)
        return tuple(
            (row, pattern.columns[j], float(weights[j]))
            for row, j, weights in zip(pattern.rows, best, pattern.values, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"title": self.title, "steps": [step.to_dict() for step in self.steps]}


def walk_sentence(
    sentence: str,
    *,
    width: int = 4,
    seed: int = 0,
    causal: bool = False,
    temperature: float = 1.0,
) -> Walk:
    """Self-attention over the words of a sentence, by a small untrained head, always the same one.

    Embeddings and projections come from hashes of the word and the seed, rounded to two decimals so
    that a reader can follow with a pencil. A word is what stands between blanks; punctuation at its
    ends is a word of its own.
    """
    sentence = " ".join(_printable(sentence).split())
    words = split_words(sentence)
    _check_width(width)
    rows, columns = numbered(words), dimensions(width)
    embedding = np.stack([_draw(f"word|{_same(word)}", seed, (width,)) for word in words])
    position = sinusoids(len(words), width)
    x = embedding + position
    # Spread 1/width, so that q, k and v are about as large as x, whatever the width.
    w_q, w_k, w_v = (
        np.round(_draw(name, seed, (width, width)) / math.sqrt(width), 2) + 0.0
        for name in ("W_Q", "W_K", "W_V")
    )
    inputs = [
        Step("embedding", "one row a word", rows, columns, embedding),
        Step("position", f"sin and cos of pos / 10000^(2i/{width})", rows, columns, position),
        Step("x", "embedding + position", rows, columns, x),
        *projections(rows, x, w_q, w_k, w_v, made_up=True),
    ]
    steps = attend(inputs, rows, rows, causal=causal, temperature=temperature)
    return Walk(f'Self-attention in "{sentence}"', steps)


def split_words(sentence: str) -> tuple[str, ...]:
    """The words between blanks, with punctuation at either end as words of its own."""
    words: list[str] = []
    for chunk in _printable(sentence).split():
        inner = [i for i, c in enumerate(chunk) if unicodedata.category(c)[0] != "P"]
        if not inner:  # nothing but punctuation
            words += chunk
            continue
        start, stop = inner[0], inner[-1] + 1
        words += [*chunk[:start], chunk[start:stop], *chunk[stop:]]
    if not words:
        raise ClearheadError('The sentence has no words. Give some: clearhead walk "the cat sat"')
    if len(words) > MAX_WORDS:
        raise ClearheadError(
            f"The sentence has {len(words)} words and signs, but its tables can be read only up to "
            f"{MAX_WORDS}. Give a shorter one."
        )
    return tuple(words)


def sinusoids(length: int, width: int, base: float = 10000.0) -> np.ndarray:
    """Sinusoidal positions, [length, width] (section 3.5): a sine and a cosine a wavelength."""
    angle = np.arange(length)[:, None] / base ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)


# --- the calculation ---


def attend(
    inputs: list[Step],
    queries: tuple[str, ...],
    tokens: tuple[str, ...],
    *,
    causal: bool,
    temperature: float,
) -> tuple[Step, ...]:
    """The inputs (q, k, v among them, or `scores` alone) and all steps that follow from them."""
    _check_temperature(temperature)
    given = {step.name: step.values for step in inputs}
    steps = list(inputs)
    if "q" in given:
        d = given["q"].shape[1]
        scores = given["q"] @ given["k"].T
        scaled = scores / (math.sqrt(d) * temperature)
        steps.append(Step("scores", "q k^T", queries, tokens, scores))
        formula, note = _scaling(d, temperature)
        steps.append(Step("scaled", formula, queries, tokens, scaled, note))
    else:  # a softmax alone: its scores are no sums of products, so they need no scale
        scaled = given["scores"] / temperature
        formula = f"scores / {temperature:g}"
        note = "The temperature: below 1 it makes the pattern sharper, above 1 flatter."
        steps.append(Step("scaled", formula, queries, tokens, scaled, note))
    if causal:
        scaled = np.where(np.tri(len(queries), dtype=bool), scaled, -np.inf)
        steps.append(Step("masked", "scaled, with -inf for later words", queries, tokens, scaled))
    steps += _softmax(steps[-1])
    if "v" in given:
        out = steps[-1].values @ given["v"]
        steps.append(Step("out", "pattern v", queries, dimensions(out.shape[1]), out))
    return tuple(steps)


def _softmax(scores: Step) -> tuple[Step, Step, Step, Step]:
    queries, tokens = scores.rows, scores.columns
    shifted = scores.values - scores.values.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    return (
        Step("shifted", f"{scores.name} - largest of the row", queries, tokens, shifted),
        Step("exponentials", "exp(shifted)", queries, tokens, exponentials),
        Step("sums", "exponentials, added up along the row", queries, ("sum",), sums),
        Step("pattern", "exponentials / sums", queries, tokens, exponentials / sums),
    )


def projections(
    rows: tuple[str, ...],
    x: np.ndarray,
    w_q: np.ndarray,
    w_k: np.ndarray,
    w_v: np.ndarray,
    *,
    made_up: bool = False,
) -> list[Step]:
    """The three weight matrices, given or made up from a seed, and x seen through each of them."""
    columns = dimensions(w_q.shape[1])
    formula = "made up from the seed" if made_up else "given"
    weights = [
        Step(name, formula, dimensions(len(w)), columns, w, note)
        for name, w, note in (
            ("W_Q", w_q, MADE_UP if made_up else ""),
            ("W_K", w_k, ""),
            ("W_V", w_v, ""),
        )
    ]
    products = [
        Step(name, f"x W_{name.upper()}", rows, columns, x @ w)
        for name, w in (("q", w_q), ("k", w_k), ("v", w_v))
    ]
    return weights + products


def _scaling(d: int, temperature: float) -> tuple[str, str]:
    """The formula and the reason of the scale, with this head's own numbers in them."""
    divisor = f"sqrt({d})" if temperature == 1 else f"(sqrt({d}) × {temperature:g})"
    meaning = (
        f"A score adds up {d} products. If they are independent, with mean 0, its variance is {d} "
        f"times that of one product. Dividing by sqrt({d}) = {math.sqrt(d):.4f} takes that back; "
        "without it softmax would soon be all or nothing, where it hardly learns."
    )
    if temperature != 1:
        meaning += (
            f" The temperature {temperature:g} divides once more: the pattern gets "
            f"{'sharper' if temperature < 1 else 'flatter'}."
        )
    return f"scores / {divisor}", meaning


def _check_temperature(temperature: float) -> None:
    low, high = TEMPERATURES
    if not low <= temperature <= high:  # refuses nan as well
        raise ClearheadError(
            f"The temperature must lie between {low:g} and {high:g}, not {temperature:g}, because "
            "scores are divided by it. 1 is the usual one; 0.01 nearly picks the best key alone."
        )


# --- words, labels and made-up weights ---


def _check_width(width: int) -> None:
    if not 2 <= width <= MAX_WIDTH or width % 2:
        raise ClearheadError(
            f"The width must be an even number from 2 to {MAX_WIDTH}, not {width}: positions "
            "come in pairs of a sine and a cosine. 4 is easy to read."
        )


def _printable(text: str) -> str:
    # Control characters would move the cursor, and lone surrogates cannot be written at all.
    hidden = {"Cc", "Cs"}
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in hidden and not c.isspace() else c
        for c in unicodedata.normalize("NFC", text)
    )


def _same(word: str) -> str:
    """What two spellings of one word share: "The" and "the" have one embedding."""
    return unicodedata.normalize("NFC", word.casefold())


def numbered(words: Sequence[str]) -> tuple[str, ...]:
    """The words as labels; one that occurs more than once gets a small number: the₁ ... the₂."""
    keys = [_same(word) for word in words]
    small = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
    return tuple(
        word + str(keys[: i + 1].count(key)).translate(small) if keys.count(key) > 1 else word
        for i, (word, key) in enumerate(zip(words, keys, strict=True))
    )


def dimensions(width: int) -> tuple[str, ...]:
    """Labels for the numbers of a vector."""
    return tuple(f"d{i + 1}" for i in range(width))


def _draw(name: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of mean 0 and variance 1, to two decimals, from the name and the seed alone."""
    # From a hash, not a generator: numpy does not promise the same stream in its next version.
    text = f"{seed}|{name}".encode()
    raw = np.frombuffer(hashlib.shake_128(text).digest(4 * math.prod(shape)), dtype="<u4")
    uniform = raw.astype(np.float64) / 2**32
    return np.round((2 * uniform - 1) * math.sqrt(3), 2).reshape(shape) + 0.0  # no -0.0
