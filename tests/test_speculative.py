"""Speculative decoding changes nothing but the time: greedy token for token, draws in
distribution.
"""

from __future__ import annotations

import contextlib
import copy
import itertools

import jaxtyping
import pytest
import torch

import tiny
from clearhead.attention.cache import KV
from clearhead.errors import ClearheadError
from clearhead.generate.batch import encode_sources
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.generate.rules import Rules
from clearhead.generate.speculative import DraftModel, PromptLookup, Tally, speculate
from clearhead.models.base import EncoderDecoder

FAMILIES = [*tiny.DECODERS, *tiny.SEQ2SEQ]
STOP = frozenset({2, 7})
SOURCE = [1, 2, 3, 9]


def memory_of(net):
    return encode_sources(net, [SOURCE]) if isinstance(net, EncoderDecoder) else None


def drafts(net):
    """One that is nearly always right, one that nearly never is, and none."""
    other = tiny.noisy(copy.deepcopy(net), 0.02)
    return {
        "near": DraftModel(other, 4, memory=memory_of(other)),
        "far": DraftModel(tiny.tiny("gpt2"), 3),
        "lookup": PromptLookup(2, 5, also=(3, 9, 4, 4)),
    }


@pytest.mark.parametrize("kind", ["near", "far", "lookup"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_greedy(name, kind):
    net = tiny.tiny(name)
    memory, tally = memory_of(net), Tally()
    draft = drafts(net)[kind]
    free, bound = Sampling(15), Sampling(15, stop=STOP, never=frozenset({5}))
    for prompt, sampling in (([1], free), ([4, 5, 4, 5, 4], free), ([6, 6], bound)):
        found = list(speculate(net, prompt, sampling, 64, draft, memory, tally))
        assert found == list(decode_tokens(net, prompt, sampling, 64, memory))
    assert tally.drafted > 0
    assert 0 <= tally.accepted <= tally.drafted
    if kind == "near":
        assert tally.rate > 0.15
        assert tally.calls < 35  # of 45 tokens, less what stopped


RULES = [
    Rules(no_repeat=2),
    Rules(repetition=1.6, frequency=0.4, last=2),
    Rules(banned=((4, 5), (6, 6, 6)), least=9, first=(3, 8), bias=((4, 2.0),)),
]


@pytest.mark.parametrize("kind", ["near", "lookup"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_rules_hold_for_every_draft(name, rules, kind):
    net = tiny.tiny(name)
    draft, memory = drafts(net)[kind], memory_of(net)
    sampling = Sampling(14, stop=STOP, rules=rules)
    for prompt in ([4, 5, 4, 5, 4], [6, 6]):
        for max_len in (64, 12):
            found = list(speculate(net, prompt, sampling, max_len, draft, memory))
            assert found == list(decode_tokens(net, prompt, sampling, max_len, memory))


def test_rules_that_rule_out_all():
    """As soon as the text is there, and not while drafts are tried."""
    net = tiny.tiny("gpt2", vocab_size=4)
    for draft in (PromptLookup(also=(1, 2, 3, 0, 1)), DraftModel(net)):
        for temperature in (0.0, 1.0):
            sampling = Sampling(20, temperature, rules=Rules(no_repeat=1))
            written = speculate(net, [1], sampling, 64, draft)
            assert {next(written) for _ in range(3)} == {0, 2, 3}
            with pytest.raises(ClearheadError, match="rule out all of them"):
                next(written)


@pytest.mark.parametrize("name", ["gpt2", "llama-window", "bart"])
@pytest.mark.parametrize("kind", ["near", "lookup"])
def test_states_that_cannot_go_back_are_saved(name, kind, monkeypatch):
    """As a recurrent network's cannot."""
    net = tiny.tiny(name)
    draft, memory = drafts(net)[kind], memory_of(net)
    expected = list(decode_tokens(net, [1, 2, 1], Sampling(30), 64, memory))
    monkeypatch.setattr(KV, "trims", False)
    assert list(speculate(net, [1, 2, 1], Sampling(30), 64, draft, memory)) == expected


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("kind", ["near", "lookup"])
def test_the_last_positions_do_not_overflow(kind, length):
    """A decoder goes on with half of its context, an encoder-decoder ends."""
    for name in ("gpt2", "bart"):
        net = tiny.tiny(name, max_len=12)
        memory, draft = memory_of(net), drafts(net)[kind]
        prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2][:length]
        for most in (1, 2, 5, 40):
            found = list(speculate(net, prompt, Sampling(most), 12, draft, memory))
            assert found == list(decode_tokens(net, prompt, Sampling(most), 12, memory))


def test_a_draft_with_fewer_positions_stops_drafting():
    net = tiny.tiny("llama")
    draft = DraftModel(tiny.tiny("gpt2", max_len=10), 4, max_len=10)
    found = list(speculate(net, [1, 2], Sampling(30), 64, draft))
    assert found == list(decode_tokens(net, [1, 2], Sampling(30), 64))


def test_a_text_that_repeats_is_looked_up():
    """A model that only repeats: all drafts are taken, and there are few calls."""
    net = Chain(torch.eye(6).roll(1, dims=1) * 50)  # 0 1 2 3 4 5 0 1 ...
    tally = Tally()
    prompt = [0, 1, 2, 3, 4, 5, 0]
    found = list(speculate(net, prompt, Sampling(60), 100, PromptLookup(3, 10), None, tally))
    assert found == [(i + 1) % 6 for i in range(60)]
    assert tally.accepted == tally.drafted
    assert tally.calls <= 12


# --- the distribution


class Chain:
    """A toy network: the logits depend on the last token alone."""

    def __init__(self, logits):
        self.logits = logits
        self.head = None

    def parameters(self):
        return iter([self.logits])

    @contextlib.contextmanager
    def at_rest(self):
        yield

    def new_cache(self, rows, room, slack=0):
        return Length()

    def decode(self, ids, cache):
        cache.length += ids.shape[1]
        return self.logits[ids]


class Length:
    """A toy cache."""

    trims = True
    length = 0

    def trim(self, length):
        self.length = length


@pytest.fixture
def unchecked_here():
    """Thousands of short texts: shapes are checked by the other tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("kind", ["near", "far", "lookup"])
@pytest.mark.parametrize(
    "how",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.3, "top_p": 0.8}],
)
def test_draws_have_the_distribution_of_the_model(kind, how, unchecked_here):
    """Chi-square over all texts of three tokens."""
    tokens, runs, prompt = 4, 1200, [0, 1, 2, 3, 1, 0, 2, 0]
    dice = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, tokens, generator=dice)
    net = Chain(logits)
    draft = {
        "near": DraftModel(Chain(logits + 0.3 * torch.randn(tokens, tokens, generator=dice)), 2),
        "far": DraftModel(Chain(2 * torch.randn(tokens, tokens, generator=dice)), 3),
        "lookup": PromptLookup(2, 3),
    }[kind]
    counts, tally = {}, Tally()
    for seed in range(runs):
        sampling = Sampling(3, seed=seed, **how)
        text = tuple(speculate(net, prompt, sampling, 64, draft, None, tally))
        counts[text] = counts.get(text, 0) + 1
    p = truth(logits, how)
    chi_square, cells = 0.0, 0
    rest = [0.0, 0.0]  # texts that are too rare for a cell of their own
    for text in itertools.product(range(tokens), repeat=3):
        expected = runs * float(p[prompt[-1], text[0]] * p[text[0], text[1]] * p[text[1], text[2]])
        seen = counts.pop(text, 0)
        if expected == 0:
            assert seen == 0
        elif expected < 5:
            rest = [rest[0] + seen, rest[1] + expected]
        else:
            chi_square, cells = chi_square + (seen - expected) ** 2 / expected, cells + 1
    if rest[1] > 0:
        chi_square, cells = chi_square + (rest[0] - rest[1]) ** 2 / rest[1], cells + 1
    assert not counts
    assert 0 < tally.accepted < tally.drafted
    freedom = cells - 1
    assert chi_square < freedom + 3.1 * (2 * freedom) ** 0.5 + 5  # p = 0.001, about


def truth(logits, how):
    """The model's own distribution behind each token, by the definition."""
    p = (logits / how["temperature"]).softmax(dim=1)
    for row in p:
        order = sorted(range(len(row)), key=lambda i: -float(row[i]))
        kept = order[: how.get("top_k", len(order))]
        total, core = 0.0, []
        for i in kept:
            if total / float(row[kept].sum()) < how.get("top_p", 1.0):
                core.append(i)
            total += float(row[i])
        row[[i for i in range(len(row)) if i not in core]] = 0.0
    return p / p.sum(dim=1, keepdim=True)


def test_seeds_repeat():
    net = tiny.tiny("gpt2")
    draft = drafts(net)["near"]
    texts = [
        list(speculate(net, [1, 2], Sampling(20, 1.0, seed=seed), 64, draft)) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_caller_may_stop_at_any_token_and_training_goes_on():
    net = tiny.tiny("gpt2").train()
    for _ in speculate(net, [1, 2], Sampling(20), 64, PromptLookup()):
        assert torch.is_grad_enabled()
        assert net.training
        break
    assert net.training


# --- what is refused


def test_what_cannot_be_drafted(unchecked):
    net = tiny.tiny("gpt2")
    small = DraftModel(tiny.tiny("gpt2", vocab_size=11))
    with pytest.raises(ClearheadError, match=r"23 tokens and its draft 11.* same vocabulary"):
        next(speculate(net, [1, 2], Sampling(), 64, small))
    with pytest.raises(ClearheadError, match="made for its sources"):
        next(speculate(net, [1, 2], Sampling(), 64, DraftModel(tiny.tiny("bart"))))
    with pytest.raises(ClearheadError, match="decodes nothing"):
        next(speculate(net, [1, 2], Sampling(), 64, DraftModel(tiny.tiny("bert"))))
    with pytest.raises(ClearheadError, match="prompt is empty"):
        next(speculate(net, [], Sampling(), 64, PromptLookup()))
    with pytest.raises(ClearheadError, match="shorten the prompt"):
        next(speculate(net, [1] * 64, Sampling(), 64, PromptLookup()))
    for make in (
        lambda: PromptLookup(0),
        lambda: PromptLookup(count=0),
        lambda: DraftModel(net, 0),
    ):
        with pytest.raises(ClearheadError, match="whole number of 1 or more"):
            make()
