"""Rules: each one, and all in their order, are transformers' logits processors."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from clearhead.errors import ClearheadError
from clearhead.generate.rules import (
    NONE,
    Rules,
    apply_rules,
    completed,
    penalise_text,
    repeated,
)

PROMPT, TEXT = [3, 4, 5, 3, 9], [4, 5, 11, 3, 4]
STOP = frozenset({2, 7})
SIZE, LIMIT = 19, 8

CASES = {
    "bias": Rules(bias=((3, 2.0), (11, -1.5))),
    "repetition": Rules(repetition=1.7),
    "invited": Rules(repetition=0.6),
    "bigrams": Rules(no_repeat=2),
    "trigrams": Rules(no_repeat=3),
    "unigrams": Rules(no_repeat=1),
    "banned": Rules(banned=((8,), (3, 4, 6), (4, 1), (9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0))),
    "least": Rules(least=7),
    "not first": Rules(not_first=frozenset({1, 2})),
    "last": Rules(last=2),
    "all": Rules(
        bias=((4, 3.0), (5, -0.5)),
        repetition=1.3,
        no_repeat=2,
        banned=((8,), (4, 6)),
        not_first=frozenset({1}),
        least=6,
        last=2,
    ),
}


def processors(rules):
    """The reference, in the order of `transformers.generate`."""
    chain, length = LogitsProcessorList(), len(PROMPT)
    if rules.bias:
        bias = [[[id], value] for id, value in rules.bias]
        chain.append(theirs.SequenceBiasLogitsProcessor(bias))
    if rules.repetition != 1:
        chain.append(theirs.RepetitionPenaltyLogitsProcessor(rules.repetition))
    if rules.no_repeat:
        chain.append(theirs.NoRepeatNGramLogitsProcessor(rules.no_repeat))
    if rules.banned:
        banned = [list(words) for words in rules.banned]
        chain.append(theirs.NoBadWordsLogitsProcessor(banned, sorted(STOP)))
    if rules.least:
        args = (length, rules.least, sorted(STOP), "cpu")
        chain.append(theirs.MinNewTokensLengthLogitsProcessor(*args))
    if rules.last is not None:
        chain.append(theirs.ForcedEOSTokenLogitsProcessor(length + LIMIT, rules.last, "cpu"))
    if rules.not_first:
        ids = sorted(rules.not_first)
        chain.append(theirs.SuppressTokensAtBeginLogitsProcessor(ids, length, "cpu"))
    return chain


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("written", range(LIMIT))
def test_rules_are_those_of_transformers(name, written):
    rules, text = CASES[name], [*TEXT, 11, 3, 4][:written]
    logits = 2 * torch.randn(SIZE)
    before = logits.clone()
    ours = apply_rules(logits, rules, PROMPT, text, STOP, LIMIT)
    assert torch.equal(logits, before)  # a pure function
    expected = processors(rules)(torch.tensor([[*PROMPT, *text]]), logits.clone()[None])[0]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", CASES)
def test_each_case_says_something(name):
    logits = torch.linspace(-2, 2, SIZE)
    some = [
        not torch.equal(apply_rules(logits, CASES[name], PROMPT, text, STOP, LIMIT), logits)
        for text in ([], TEXT, [*TEXT, 11, 3])
    ]
    assert any(some)
    assert torch.equal(apply_rules(logits, NONE, PROMPT, TEXT, STOP, LIMIT), logits)


def test_presence_and_frequency_look_at_the_text_alone():
    logits = torch.zeros(SIZE)
    found = apply_rules(logits, Rules(presence=0.5, frequency=0.25), PROMPT, TEXT)
    for id in range(SIZE):
        n = TEXT.count(id)
        assert found[id] == pytest.approx(-(0.5 * (n > 0) + 0.25 * n))
    assert torch.equal(penalise_text(logits, [], 1.0, 1.0), logits)


def test_what_is_forced_comes_even_if_it_is_banned():
    rules = Rules(first=(8, 6), banned=((8,),), not_first=frozenset({8}), last=2, least=8)
    logits = torch.randn(SIZE)
    for written, token in [([], 8), ([8], 6), ([8, 6, *TEXT], 2)]:
        found = apply_rules(logits, rules, PROMPT, written, STOP, LIMIT)
        assert found.argmax() == token
        assert found.isfinite().sum() == 1
    free = apply_rules(logits, rules, PROMPT, [8, 6], STOP, LIMIT)
    assert free.isfinite().sum() == SIZE - 3  # the banned one and two stop ids


SHORT = st.lists(st.integers(0, 3), max_size=12)


@given(SHORT, st.integers(1, 4))
def test_no_ngram_comes_twice_and_nothing_else_is_barred(seen, n):
    barred = repeated(n, seen)
    known = {tuple(seen[i : i + n]) for i in range(len(seen) - n + 1)}
    if len(seen) < n - 1:
        assert not barred
        return
    for token in range(4):
        new = tuple([*seen, token][len(seen) + 1 - n :])
        assert (token in barred) == (new in known)


@given(SHORT, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4))
def test_a_banned_sequence_is_barred_exactly_where_it_would_be_complete(seen, banned):
    barred = completed(banned, seen)
    for token in range(4):
        text = [*seen, token]
        ends = any(text[-len(words) :] == words for words in banned)
        assert (token in barred) == ends


@given(st.lists(st.integers(0, 18), max_size=30), st.floats(-2, 2), st.floats(-2, 2))
def test_counts_are_counts(text, presence, frequency):
    found = penalise_text(torch.zeros(SIZE), text, presence, frequency)
    counts = Counter(text)
    wanted = [-(presence * (counts[i] > 0) + frequency * counts[i]) for i in range(SIZE)]
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition": -1.0}, "repetition_penalty is -1"),
        ({"repetition": math.nan}, "repetition_penalty is a number"),
        ({"presence": "much"}, "presence_penalty is a number"),
        ({"frequency": math.inf}, "frequency_penalty is a number"),
        ({"no_repeat": -1}, "no_repeat_ngram is a whole number"),
        ({"least": 1.5}, "min_new_tokens is a whole number"),
        ({"banned": ((),)}, "banned text is empty"),
        ({"bias": ((1, math.nan),)}, "bias is a number"),
        ({"bias": ((1, math.inf),)}, "bias is a number"),
    ],
)
def test_rules_that_mean_nothing(settings, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        Rules(**settings)
