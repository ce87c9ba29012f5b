"""Scores against values worked out by hand, and against sacrebleu's own."""

from __future__ import annotations

import builtins
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.measure.scores import (
    F1,
    accuracy,
    bits_per,
    bootstrap,
    entities,
    exact_match,
    label_f1,
    macro_f1,
    mean_interval,
    micro_f1,
    normalise_answer,
    pearson,
    perplexity,
    span_f1,
    spearman,
    token_f1,
)
from clearhead.measure.translation import bleu, chrf

# --- labels


def test_accuracy_and_f1_by_hand():
    expected, found = list("aaabbc"), list("aabbbb")
    assert accuracy(expected, found) == pytest.approx(4 / 6)
    scores = label_f1(expected, found)
    assert scores["a"] == F1(1.0, 2 / 3)
    assert scores["b"] == F1(0.5, 1.0)
    assert scores["c"] == F1(0.0, 0.0)
    assert macro_f1(expected, found) == pytest.approx((0.8 + 2 / 3 + 0) / 3)
    assert micro_f1(expected, found) == pytest.approx(accuracy(expected, found))
    # Without "b" two are found, both right, of four: a, a, a, c.
    assert micro_f1(expected, found, ignore=["b"]) == pytest.approx(F1(1.0, 0.5).value)
    assert F1.of(0, 0, 0).value == 0


# --- entities


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O O", []),
        ("B-PER I-PER O B-LOC", [("PER", 0, 2), ("LOC", 3, 4)]),
        ("B-PER B-PER", [("PER", 0, 1), ("PER", 1, 2)]),
        ("I-PER I-PER O", [("PER", 0, 2)]),  # an I begins one too
        ("B-PER I-LOC I-LOC", [("PER", 0, 1), ("LOC", 1, 3)]),
        ("O I-PER B-PER I-PER", [("PER", 1, 2), ("PER", 2, 4)]),
        ("B-PER I-PER E-PER S-PER O", [("PER", 0, 3), ("PER", 3, 4)]),
        ("S-LOC I-LOC", [("LOC", 0, 1), ("LOC", 1, 2)]),
        ("B-PER", [("PER", 0, 1)]),
        ("B-X-Y I-X-Y", [("X-Y", 0, 2)]),
        ("", []),
    ],
)
def test_entities_as_conlleval_reads_them(tags, expected):
    assert entities(tags.split()) == expected


def test_spans_by_hand():
    """The example of seqeval's manual: 0.5."""
    expected = [
        ["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"],
        ["B-PER", "I-PER", "O"],
    ]
    found = [
        ["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"],
        ["B-PER", "I-PER", "O"],
    ]
    assert span_f1(expected, found) == F1(0.5, 0.5)
    assert span_f1(expected, found).value == 0.5
    assert span_f1([["B-A", "O"]], [["B-B", "O"]]).value == 0
    assert span_f1([["B-A", "B-A", "O"]], [["B-A", "O", "O"]]) == F1(1.0, 0.5)
    with pytest.raises(ClearheadError, match="no tag of an entity"):
        span_f1([["X-PER"]], [["O"]])


# --- answers


def test_answers_as_squad_compares_them():
    assert normalise_answer("The  Cat's, an   Apple!") == "cats apple"
    assert exact_match("the Eiffel Tower.", ["London", "Eiffel tower"]) == 1
    assert exact_match("tower", ["Eiffel tower"]) == 0
    assert token_f1("the tower", ["Eiffel tower"]) == pytest.approx(2 / 3)
    assert token_f1("a b b", ["b b b c", "x"]) == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert token_f1("", [""]) == 1
    assert token_f1("something", [""]) == 0
    assert token_f1("no word in common", ["else"]) == 0
    with pytest.raises(ClearheadError, match="no answer"):
        token_f1("a", [])


# --- numbers


def test_correlations_by_hand():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # means 2.5 and 3.25; 6.5 / sqrt(5 * 14.75)
    assert pearson([1, 2, 3, 4], [1, 4, 2, 6]) == pytest.approx(6.5 / math.sqrt(5 * 14.75))
    # ranks 1 2 3 4 5 and 2 1 4 3 5: 1 - 6 * 4 / (5 * 24)
    assert spearman([1, 2, 3, 4, 5], [20, 10, 400, 30, 5000]) == pytest.approx(0.8)
    # ties share their mean rank: 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1], [1, 2]))
    assert math.isnan(pearson([0.1] * 3, [1, 2, 4]))  # the mean of 0.1 three times is not 0.1
    assert spearman([1, 2, 3], [1, 8, 27]) == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=12))
@settings(max_examples=50, deadline=None)
def test_ranks_by_counting(pairs):
    def rank(values, x):
        return sum(y < x for y in values) + (sum(y == x for y in values) + 1) / 2

    a, b = zip(*pairs, strict=True)
    slow = pearson([rank(a, x) for x in a], [rank(b, x) for x in b])
    assert spearman(a, b) == pytest.approx(slow, nan_ok=True)


def test_perplexity_and_bits():
    assert perplexity(4 * math.log(7), 4) == pytest.approx(7)
    assert perplexity(1e9, 1) == math.inf
    assert bits_per(8 * math.log(2), 4) == pytest.approx(2)
    for measure in (perplexity, bits_per):
        with pytest.raises(ClearheadError, match="not defined"):
            measure(1.0, 0)


# --- intervals


def test_intervals_cover_what_they_promise_and_repeat():
    hits = [1.0] * 70 + [0.0] * 30
    found = mean_interval(hits, samples=4000)
    # the normal approximation: 0.7 +- 1.96 * sqrt(0.7 * 0.3 / 100)
    half = 1.96 * math.sqrt(0.7 * 0.3 / 100)
    assert found.low == pytest.approx(0.7 - half, abs=0.015)
    assert found.high == pytest.approx(0.7 + half, abs=0.015)
    assert mean_interval(hits) == mean_interval(hits) != mean_interval(hits, seed=1)
    narrow = mean_interval(hits, level=0.5)
    assert found.low < narrow.low < 0.7 < narrow.high < found.high
    assert mean_interval([0.3] * 5).low == pytest.approx(0.3)
    # all of ten right: Wilson's interval, as tables have it
    assert mean_interval([True] * 10).low == pytest.approx(0.7225, abs=1e-4)
    assert mean_interval([True] * 10).high == 1.0
    assert mean_interval([1.0] * 10).low == 1.0  # no share: a loss may be 1, too
    assert mean_interval([False] * 10).high == pytest.approx(0.2775, abs=1e-4)
    a = np.arange(30.0)
    perfect = bootstrap(lambda rows: spearman(a[rows], a[rows]), 30, samples=50)
    assert perfect.low == pytest.approx(1)
    flat = bootstrap(lambda rows: spearman(a[rows] * 0, a[rows]), 30, samples=5)
    assert math.isnan(flat.low)
    with pytest.raises(ClearheadError, match="level"):
        mean_interval(hits, level=95)


# --- translations

FOUND = [
    "The cat sat on the mat.",
    "A dog runs through the Park!",
    "Two men are talking, I think.",
    "it rains",
]
REFERENCES = [
    "The cat sat on a mat.",
    "A dog is running through the park!",
    "Two men are talking , I think.",
    "It is raining.",
]


@pytest.mark.parametrize("lower", [False, True])
def test_bleu_and_chrf_are_sacrebleus(lower):
    import sacrebleu

    score = bleu(FOUND, REFERENCES, lower=lower, samples=200)
    own = sacrebleu.corpus_bleu(FOUND, [REFERENCES], lowercase=lower)
    assert score.value == own.score
    case = "lc" if lower else "mixed"
    version = sacrebleu.__version__
    assert score.signature == f"nrefs:1|case:{case}|eff:no|tok:13a|smooth:exp|version:{version}"
    assert score.interval.low <= score.value <= score.interval.high
    letters = chrf(FOUND, REFERENCES, lower=lower, samples=200)
    if not lower:
        assert letters.value == sacrebleu.corpus_chrf(FOUND, [REFERENCES]).score
        assert letters.value < chrf(FOUND, REFERENCES, lower=True, samples=0).value
        assert score.value < bleu(FOUND, REFERENCES, lower=True, samples=0).value
    assert letters.signature.startswith("nrefs:1|case:")
    assert letters.interval.low < letters.value < letters.interval.high


def test_bleu_by_hand():
    """4 of 5 words, 2 of 4 pairs, 1 of 3 triples, smoothed 1/2 of 2 quadruples; as long as the
    reference, so there is no penalty.
    """
    score = bleu(["a b c x d"], ["a b c y d"], samples=0)
    assert score.value == pytest.approx(100 * (4 / 5 * 2 / 4 * 1 / 3 * 1 / 2 / 2) ** 0.25)
    assert score.interval is None
    assert bleu(FOUND, FOUND, samples=10).interval.low == pytest.approx(100)
    short = bleu(["a b c d"], ["a b c d e"], samples=0)
    assert short.value == pytest.approx(100 * math.exp(1 - 5 / 4))


def test_several_references():
    import sacrebleu

    both = [[reference, found] for reference, found in zip(REFERENCES, FOUND, strict=True)]
    assert bleu(FOUND, both, samples=0).value == pytest.approx(100)
    other = [[a, b] for a, b in zip(REFERENCES, reversed(REFERENCES), strict=True)]
    own = sacrebleu.corpus_bleu(FOUND, [REFERENCES, REFERENCES[::-1]])
    assert bleu(FOUND, other, samples=0).value == own.score


def test_intervals_of_bleu_draw_sentences():
    import sacrebleu

    found = bleu(FOUND, REFERENCES, samples=300, seed=5).interval
    dice, slow = np.random.default_rng(5), []
    for _ in range(300):
        rows = dice.integers(4, size=4)
        own = sacrebleu.corpus_bleu([FOUND[i] for i in rows], [[REFERENCES[i] for i in rows]])
        slow.append(own.score)
    low, high = np.quantile(slow, [0.025, 0.975])
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_what_cannot_be_scored(monkeypatch):
    for call in (accuracy, macro_f1, pearson, spearman):
        with pytest.raises(ClearheadError, match="one for each"):
            call([1, 2], [1])
        with pytest.raises(ClearheadError, match="nothing to compare"):
            call([], [])
    with pytest.raises(ClearheadError, match="2 translations and 1 references"):
        bleu(["a", "b"], ["a"])
    with pytest.raises(ClearheadError, match="no translations"):
        chrf([], [])
    with pytest.raises(ClearheadError, match="same number of references"):
        bleu(["a", "b"], [["a"], ["b", "c"]])
    real = builtins.__import__

    def absent(name, *more):
        if name == "sacrebleu":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ClearheadError, match=r"pip install 'clearhead\[eval\]'"):
        bleu(["a"], ["a"])
