"""Contrastive search against a slow twin without a cache, and what is refused."""

from __future__ import annotations

import pytest
import torch

import tiny
from clearhead.attention.positions import Positions
from clearhead.errors import ClearheadError
from clearhead.generate.batch import encode_sources
from clearhead.generate.contrastive import contrastive_search
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.models.base import EncoderDecoder

FAMILIES = [*tiny.DECODERS, *tiny.SEQ2SEQ]


def memory_of(net):
    return encode_sources(net, [[1, 2, 3, 9]]) if isinstance(net, EncoderDecoder) else None


@torch.inference_mode()
def slow_twin(net, prompt, k, alpha, count, memory=None, never=()):
    """By the formula: every candidate is read with the whole text before it."""
    ids = list(prompt)
    for _ in range(count):
        x = states(net, ids, memory)
        p = net.head(x[None], Positions.span(0, len(ids)))[0, -1]
        p[list(never)] = -torch.inf
        p = p.softmax(dim=0)
        best = None
        for token in p.argsort(descending=True)[:k].tolist():
            h = states(net, [*ids, token], memory)[-1]
            likeness = max(float(torch.cosine_similarity(h, old, dim=0)) for old in x)
            score = (1 - alpha) * float(p[token]) - alpha * likeness
            if best is None or score > best[0]:
                best = (score, token)
        ids.append(best[1])
    return ids[len(prompt) :]


def states(net, ids, memory):
    if memory is None:
        return net.states(torch.tensor([ids]))[0]
    return net.decoder.states(torch.tensor([ids]), memory=memory)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_its_slow_twin(name):
    net = tiny.tiny(name)
    memory = memory_of(net)
    for k, alpha in ((4, 0.6), (3, 1.0), (7, 0.3)):
        found = list(contrastive_search(net, [3, 1, 4], k, alpha, 8, max_len=64, memory=memory))
        assert found == slow_twin(net, [3, 1, 4], k, alpha, 8, memory)
    never = frozenset(found[:2])
    again = contrastive_search(net, [3], 4, 0.6, 5, never=never, max_len=64, memory=memory)
    assert list(again) == slow_twin(net, [3], 4, 0.6, 5, memory, never)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("k", "alpha"), [(1, 0.6), (5, 0.0)])
def test_one_candidate_or_no_penalty_is_greedy(name, k, alpha):
    net = tiny.tiny(name)
    memory = memory_of(net)
    sampling = Sampling(15, stop=frozenset({2, 7}))
    found = contrastive_search(net, [3, 1], k, alpha, 15, sampling.stop, max_len=64, memory=memory)
    assert list(found) == list(decode_tokens(net, [3, 1], sampling, 64, memory))


def test_it_repeats_itself_less_than_greedy_does():
    net = tiny.tiny("gpt2")
    greedy = list(contrastive_search(net, [1], 1, max_new_tokens=40, max_len=64))
    found = list(contrastive_search(net, [1], 6, max_new_tokens=40, max_len=64))
    assert len(set(found)) > len(set(greedy))


def test_a_vocabulary_smaller_than_k_and_tokens_that_are_never_chosen():
    net = tiny.tiny("gpt2", vocab_size=4)
    never = frozenset({1, 3})
    found = list(contrastive_search(net, [1], 9, 0.9, 12, never=never, max_len=64))
    assert found == slow_twin(net, [1], 2, 0.9, 12, never=never)


def test_behind_the_last_position():
    """A decoder reads the last half of its context again, an encoder-decoder ends."""
    net = tiny.tiny("gpt2", max_len=10)
    whole = list(contrastive_search(net, [1, 2, 3], max_new_tokens=20, max_len=10))
    assert len(whole) == 20
    again = list(contrastive_search(net, whole[2:7], max_new_tokens=5, max_len=10))
    assert whole[7:12] == again
    net = tiny.tiny("bart", max_len=10)
    found = contrastive_search(net, [1], max_new_tokens=20, max_len=10, memory=memory_of(net))
    assert len(list(found)) == 9


def test_the_caller_may_stop_at_any_token_and_training_goes_on():
    net = tiny.tiny("gpt2").train()
    for _ in contrastive_search(net, [1, 2], max_len=64):
        assert torch.is_grad_enabled()
        assert net.training
        break
    assert net.training


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"k": 0}, "k is how many tokens"),
        ({"k": 2.0}, "k is how many tokens"),
        ({"alpha": 1.5}, "alpha is a number from 0"),
        ({"alpha": float("nan")}, "alpha is a number from 0"),
        ({"max_new_tokens": 0}, "one token at least"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1] * 64}, "shorten the prompt"),
    ],
)
def test_settings_that_mean_nothing(settings, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        next(contrastive_search(tiny.tiny("gpt2"), **{"prompt": [1], "max_len": 64} | settings))
