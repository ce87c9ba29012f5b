"""Beam search and batches: equal to greedy, to one by one, to an exhaustive search and to
`transformers.generate`.
"""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest
import torch

import architectures
import clearhead as ch
import reference
import tiny
from clearhead.errors import ClearheadError
from clearhead.generate.batch import by_length, decode_batch, decode_rows, encode_sources
from clearhead.generate.beam import Beam, beam_search
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.generate.rules import Rules
from clearhead.measure.hardware import Memory
from clearhead.models.base import EncoderDecoder
from clearhead.text.trained import train_tokenizer
from clearhead.weights.hf import load_hf

FAMILIES = [*tiny.DECODERS, *tiny.SEQ2SEQ]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]
SOURCES = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]]
STOP = frozenset({2, 7, 11, 13})
MAX_LEN = 64


def memory_of(net, sources=SOURCES):
    return encode_sources(net, sources) if isinstance(net, EncoderDecoder) else None


def alone(net, i):
    return memory_of(net, [SOURCES[i]])


# --- batches


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_of_ragged_prompts_is_one_by_one(name, temperature):
    net = tiny.tiny(name)
    sampling = Sampling(12, temperature, seed=3, stop=STOP, never=frozenset({5}))
    found = decode_batch(net, PROMPTS, sampling, MAX_LEN, memory_of(net))
    for i, prompt in enumerate(PROMPTS):
        assert found[i] == list(decode_tokens(net, prompt, sampling, MAX_LEN, alone(net, i)))


def test_rows_that_end_leave_the_batch_and_rows_have_their_own_limits():
    net = tiny.tiny("llama")
    limits, whole = [3, 9, 1, 60], Sampling(20)
    steps = list(decode_rows(net, PROMPTS, whole, 16, limits=limits))
    assert [len(step) for step in steps] == [4, 3, 3, *[2] * 6, *[1] * 5]
    found = decode_batch(net, PROMPTS, whole, 16, limits=limits)
    assert [len(ids) for ids in found] == [3, 9, 1, 14]  # the last: where positions end
    assert found[1] == list(decode_tokens(net, PROMPTS[1], Sampling(9), 16))
    seen = []
    net.embed.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[0]))
    decode_batch(net, PROMPTS, whole, 16, limits=limits)
    assert seen == [len(step) for step in steps]


def test_the_caller_of_a_batch_may_stop_at_any_step():
    net = tiny.tiny("gpt2").train()
    for _ in decode_rows(net, PROMPTS, Sampling(20), MAX_LEN):
        assert torch.is_grad_enabled()
        assert net.training
        break
    assert net.training


def test_batches_by_length_hold_every_row_once():
    lengths = [3, 9, 1, 4, 30, 2]
    batches = by_length(lengths, 10)
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert batches == [[4], [1], [3, 0], [5, 2]]
    assert by_length([], 10) == []


def test_batches_by_length_are_as_few_and_as_even_as_can_be():
    assert [len(batch) for batch in by_length([25] * 64, 1024)] == [32, 32]
    assert sorted(len(batch) for batch in by_length([25] * 42, 1024)) == [20, 22]  # or 21 twice
    assert len(by_length([64] * 1000, 16_384, overhead=32)) == 4
    assert [len(batch) for batch in by_length([25] * 40, 1024)] == [40]
    dice = random.Random(0)
    for slots in (30, 100, 1000):
        lengths = [dice.randint(1, 60) for _ in range(200)]
        batches = by_length(lengths, slots, overhead=4)
        assert sorted(i for batch in batches for i in batch) == list(range(200))
        sizes = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
        assert all(
            size <= slots or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True)
        )
        longest_first = sorted(lengths, reverse=True)
        assert [lengths[i] for batch in batches for i in batch] == longest_first
        fewer = by_length(lengths, slots, overhead=10_000)
        waste = [sum(len(b) * lengths[b[0]] for b in way) for way in (batches, fewer)]
        assert waste[0] <= waste[1]
        assert len(fewer) <= len(batches)


def test_a_batch_ends_where_a_cut_saves_slots_however_many_rows_follow():
    batches = by_length([30] * 3 + [2] * 500, 1024, overhead=32)
    assert len(batches[0]) == 3
    assert [len(batch) for batch in by_length([100] + [1] * 160, 16_384, 32)] == [1, 160]


def test_the_way_to_batch_rows_is_the_cheapest_of_all():
    lengths, slots, overhead = [9, 8, 8, 5, 4, 4, 3, 1, 1], 20, 3

    def cost(way):
        return sum(overhead + len(batch) * batch[0] for batch in way)

    ways = [[]]  # all ways to cut the sorted lengths
    for length in lengths:
        longer = [[*way[:-1], [*way[-1], length]] for way in ways if way]
        ways = [[*way, [length]] for way in ways] + longer
    fit = [way for way in ways if all(len(b) * b[0] <= slots for b in way)]
    found = [[lengths[i] for i in batch] for batch in by_length(lengths, slots, overhead)]
    assert found in fit
    assert cost(found) == min(map(cost, fit))


# --- the beam


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("patience", ["full", "likely"])
def test_one_beam_is_greedy(name, patience):
    net = tiny.tiny(name)
    beam = Beam(1, 0.6, patience, 12, stop=STOP, never=frozenset({5}))
    found = beam_search(net, PROMPTS, beam, MAX_LEN, memory_of(net))
    greedy = Sampling(12, stop=STOP, never=beam.never)
    assert [one[0].ids for one in found] == decode_batch(
        net, PROMPTS, greedy, MAX_LEN, memory_of(net)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_is_searched_as_one_by_one_and_scores_are_sums_of_log_probabilities(name):
    net = tiny.tiny(name)
    beam = Beam(4, 0.7, "likely", 9, best=4, stop=STOP)
    found = beam_search(net, PROMPTS, beam, MAX_LEN, memory_of(net))
    for i, prompt in enumerate(PROMPTS):
        single = beam_search(net, [prompt], beam, MAX_LEN, alone(net, i))[0]
        assert [one.ids for one in single] == [one.ids for one in found[i]]
        assert len(found[i]) == 4
        assert [one.score for one in found[i]] == sorted((o.score for o in found[i]), reverse=True)
        for one in found[i]:
            assert one.end in STOP or len(one.ids) == 9
            ids = one.ids if one.end is None else [*one.ids, one.end]
            expected = log_probability(net, prompt, ids, alone(net, i))
            assert one.log_probability == pytest.approx(expected, rel=1e-4)
            assert one.score == pytest.approx(one.log_probability / len(ids) ** 0.7)


def log_probability(net, prompt, new, memory):
    """The sum of the new tokens' log-probabilities, without a cache."""
    ids = torch.tensor([[*prompt, *new]])
    with torch.inference_mode():
        log_p = net.decode(ids[:, :-1], *(() if memory is None else (memory,))).log_softmax(-1)
    return float(log_p[0, len(prompt) - 1 :].gather(1, ids[0, len(prompt) :, None]).sum())


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_enough_beams_are_an_exhaustive_search(name, penalty):
    net = tiny.tiny(name, vocab_size=4)
    stop, most, prompt = 3, 4, [1, 2]
    memory = memory_of(net, [[1, 2, 0]])
    texts = [
        text
        for n in range(most + 1)
        for text in itertools.product(range(3), repeat=n)  # 3 ends a text and is not within one
    ]
    scored = []
    for text in texts:
        ids = [*text, stop] if len(text) < most else list(text)
        total = log_probability(net, prompt, ids, memory)
        scored.append((total / len(ids) ** penalty, list(text)))
    scored.sort(key=lambda pair: -pair[0])
    width = 4**most
    beam = Beam(width, penalty, "sure", most, best=10, stop=frozenset({stop}))
    found = beam_search(net, [prompt], beam, MAX_LEN, memory)[0]
    assert [one.ids for one in found] == [text for _, text in scored[:10]]
    for one, (score, _) in zip(found, scored, strict=False):
        assert one.score == pytest.approx(score, rel=1e-4)


def test_more_beams_than_tokens_and_a_vocabulary_that_only_stops():
    net = tiny.tiny("gpt2", vocab_size=3)
    found = beam_search(net, [[1]], Beam(7, max_new_tokens=2, best=7), MAX_LEN)[0]
    assert len({tuple(one.ids) for one in found}) == 7  # of nine, none twice
    assert all(len(one.ids) == 2 for one in found)
    stops = Beam(2, best=2, stop=frozenset(range(3)))
    assert [one.ids for one in beam_search(net, [[1]], stops, MAX_LEN)[0]] == [[], []]
    assert all(math.isfinite(one.score) for one in found)


def test_sources_that_are_done_leave_and_all_beams_share_one_cross_cache():
    net = tiny.tiny("t5-gated")
    rows, cross = [], []
    attention = net.decoder.stack.blocks[0].cross_attn
    attention.register_forward_hook(lambda module, inputs, out: rows.append(out.shape[0]))
    attention.k_proj.register_forward_hook(lambda module, inputs, out: cross.append(out.shape[0]))
    beam = Beam(3, 1.0, "full", 20, stop=STOP)
    beam_search(net, PROMPTS, beam, MAX_LEN, memory_of(net))
    assert rows[:2] == [4, 12]  # a prompt is read once
    assert rows[-1] < 12
    assert all(later <= before for before, later in itertools.pairwise(rows[1:]))
    assert cross == [4]  # the keys of four sources, projected once


# --- coverage


def coverage(net, prompt, new, memory):
    """Wu et al. 2016, equation 14, with every look computed at once, without a cache."""
    ids = torch.tensor([[*prompt, *new]])
    with torch.inference_mode(), ch.capture(net, "decoder.stack.blocks.1.cross_attn.pattern") as a:
        net.decode(ids[:, :-1], memory)
    (pattern,) = a.values()
    looks = pattern[0].mean(dim=0)[len(prompt) - 1 :].sum(dim=0)
    return float(sum(math.log(min(float(one), 1.0)) for one in looks))


@pytest.mark.parametrize("weight", [0.2, 1.5])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_coverage_is_that_of_an_exhaustive_search(name, weight):
    net = tiny.tiny(name, vocab_size=4)
    stop, most, prompt = 3, 3, [1, 2]
    memory = memory_of(net, [[1, 2, 0, 2]])
    scored = []
    for n in range(most + 1):
        for text in itertools.product(range(3), repeat=n):
            ids = [*text, stop] if n < most else list(text)
            total = log_probability(net, prompt, ids, memory)
            score = total / len(ids) ** 0.6 + weight * coverage(net, prompt, ids, memory)
            scored.append((score, list(text)))
    scored.sort(key=lambda pair: -pair[0])
    stops = frozenset({stop})
    beam = Beam(4**most, 0.6, "sure", most, best=8, stop=stops, coverage_penalty=weight)
    found = beam_search(net, [prompt], beam, MAX_LEN, memory)[0]
    assert [one.ids for one in found] == [text for _, text in scored[:8]]
    for one, (score, _) in zip(found, scored, strict=False):
        assert one.score == pytest.approx(score, rel=1e-4)
    plain = Beam(4**most, 0.6, "sure", most, best=8, stop=stops)
    plain_found = beam_search(net, [prompt], plain, MAX_LEN, memory)[0]
    assert all(one.score > same.score for one, same in zip(plain_found, found, strict=True))


@pytest.mark.parametrize("patience", ["full", "likely", "sure"])
def test_coverage_of_a_ragged_batch_is_one_by_one(patience):
    net = tiny.tiny("t5-gated")
    beam = Beam(4, 0.7, patience, 9, best=4, stop=STOP, coverage_penalty=0.3)
    found = beam_search(net, PROMPTS, beam, MAX_LEN, memory_of(net))
    for i, prompt in enumerate(PROMPTS):
        single = beam_search(net, [prompt], beam, MAX_LEN, alone(net, i))[0]
        assert [one.ids for one in single] == [one.ids for one in found[i]]
        for one in found[i]:
            ids = one.ids if one.end is None else [*one.ids, one.end]
            expected = one.log_probability / len(ids) ** 0.7
            expected += 0.3 * coverage(net, prompt, ids, alone(net, i))
            assert one.score == pytest.approx(expected, rel=1e-3)


def test_nobody_listens_without_a_coverage_penalty():
    net = tiny.tiny("t5")
    seen = []
    attention = net.decoder.stack.blocks[-1].cross_attn
    draw = attention.kernel.pattern
    attention.kernel.pattern = lambda *given: seen.append(1) or draw(*given)
    beam_search(net, PROMPTS, Beam(2, max_new_tokens=3), MAX_LEN, memory_of(net))
    assert not seen
    looking = Beam(2, max_new_tokens=3, coverage_penalty=0.1)
    beam_search(net, PROMPTS, looking, MAX_LEN, memory_of(net))
    assert seen
    assert not attention.pattern.listeners
    with pytest.raises(ClearheadError, match="no source to cover"):
        beam_search(tiny.tiny("gpt2"), [[1]], looking, MAX_LEN)


# --- groups


def slow_groups(net, prompt, beam, memory=None):
    """Vijayakumar et al. 2018, algorithm 1, without a cache: all hypotheses of each group."""
    size = beam.width // beam.groups
    running = [[(0.0, [])] for _ in range(beam.groups)]
    found = [[] for _ in range(beam.groups)]
    for length in range(1, beam.max_new_tokens + 1):
        taken = []
        for g in range(beam.groups):
            options = []
            for total, text in running[g]:
                ids = torch.tensor([[*prompt, *text]])
                given = () if memory is None else (memory,)
                with torch.inference_mode():
                    log_p = net.decode(ids, *given)[0, -1].log_softmax(dim=0).tolist()
                for token, value in enumerate(log_p):
                    cost = beam.diversity_penalty * taken.count(token)
                    options.append((total + value - cost, total + value, [*text, token]))
            options.sort(key=lambda option: -option[0])
            ends = [text[-1] in beam.stop or length == beam.max_new_tokens for *_, text in options]
            for (_, value, text), end in list(zip(options, ends, strict=True))[:size]:
                if end:
                    found[g].append((value / length**beam.length_penalty, value, text))
            found[g] = sorted(found[g], key=lambda one: -one[0])[:size]
            going = [o for o, end in zip(options, ends, strict=True) if not end][:size]
            running[g] = [(value, text) for _, value, text in going]
            if len(found[g]) == size:  # patience "full"
                running[g] = []
            taken += [text[-1] for _, text in running[g]]
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama-window", "bart"])
@pytest.mark.parametrize(("width", "groups"), [(4, 2), (6, 3), (3, 3)])
@pytest.mark.parametrize("cost", [0.0, 0.5, 3.0])
def test_groups_are_the_slow_algorithm(name, width, groups, cost):
    net = tiny.tiny(name)
    beam = Beam(
        width,
        0.6,
        "full",
        6,
        best=width,
        stop=STOP,
        groups=groups,
        diversity_penalty=cost,
    )
    found = beam_search(net, PROMPTS, beam, MAX_LEN, memory_of(net))
    for i, prompt in enumerate(PROMPTS):
        expected = [one for group in slow_groups(net, prompt, beam, alone(net, i)) for one in group]
        expected = {tuple(text): (score, value) for score, value, text in expected}
        ours = {(*one.ids, *([] if one.end is None else [one.end])): one for one in found[i]}
        assert set(ours) == set(expected)
        assert len(found[i]) == len(ours)
        assert [one.score for one in found[i]] == sorted((o.score for o in found[i]), reverse=True)
        for text, (score, value) in expected.items():
            assert ours[text].score == pytest.approx(score, rel=1e-4)
            assert ours[text].log_probability == pytest.approx(value, rel=1e-4)


def test_groups_are_more_diverse_than_one_beam():
    net = tiny.tiny("gpt2")
    one = beam_search(net, [[1, 2]], Beam(6, max_new_tokens=6, best=6), MAX_LEN)[0]
    more = Beam(6, max_new_tokens=6, best=6, groups=6, diversity_penalty=5.0)
    many = beam_search(net, [[1, 2]], more, MAX_LEN)[0]
    assert len({text.ids[0] for text in many}) == 6 > len({text.ids[0] for text in one})


# --- the peer

PEERS = {
    "gpt2": reference.gpt2,
    "t5": lambda: reference.t5(num_decoder_layers=2),
    "marian": lambda: seq2seq("Marian"),
    "bart": lambda: seq2seq("Bart"),
}


def seq2seq(name):
    transformers = reference.transformers
    sizes = {
        "vocab_size": reference.VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 5,
        "forced_eos_token_id": None,
    }
    if name == "Marian":
        config = transformers.MarianConfig(**sizes, decoder_vocab_size=reference.VOCAB)
        return transformers.MarianMTModel(config)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))


@pytest.fixture(scope="module", params=PEERS)
def peers(request, tmp_path_factory):
    """Their tiny random model and ours from its files."""
    torch.manual_seed(4)
    hf, folder = architectures.randomise(PEERS[request.param]()), tmp_path_factory.mktemp("peer")
    hf.generation_config.forced_eos_token_id = None
    hf.save_pretrained(folder)
    return hf, load_hf(folder)[0]


PATIENCE = {"full": True, "likely": False, "sure": "never"}


@pytest.mark.parametrize("patience", PATIENCE)
@pytest.mark.parametrize("penalty", [1.0, 0.0, 0.6, 2.0, -1.0])
@pytest.mark.parametrize("ends", [[2], [2, 7, 11, 19, 23, 31, 40, 51]], ids=["one", "many"])
def test_transformers_finds_the_same(peers, patience, penalty, ends):
    sources = [[9, 8, 7, 6, 5], [11, 12], [31, 41, 59, 26]]
    hf, net = peers
    seq2seq = hf.config.is_encoder_decoder
    width = max(map(len, sources))
    pad = 1
    rows, real = [], []
    for source in sources:  # a decoder's prompts are padded on the left there
        empty = [pad] * (width - len(source))
        rows.append(source + empty if seq2seq else empty + source)
        held = [1] * len(source)
        real.append(held + [0] * len(empty) if seq2seq else [0] * len(empty) + held)
    settings = {
        "num_beams": 4,
        "length_penalty": penalty,
        "early_stopping": PATIENCE[patience],
        "num_return_sequences": 4,
        "max_new_tokens": 10,
        "eos_token_id": ends,
        "pad_token_id": pad,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with torch.inference_mode():
        out = hf.generate(torch.tensor(rows), attention_mask=torch.tensor(real), **settings)
    stop = frozenset(ends)
    beam = Beam(4, penalty, patience, 10, best=4, stop=stop)
    if seq2seq:
        start = hf.generation_config.decoder_start_token_id
        memory = encode_sources(net, sources)
        ours = beam_search(net, [[start]] * 3, beam, 64, memory)
    else:
        ours = beam_search(net, sources, beam, 64)
    skip = 1 if seq2seq else width
    theirs = [cut(ids[skip:], stop) for ids in out.sequences.tolist()]
    found = [one for hypotheses in ours for one in hypotheses]
    assert [one.ids for one in found] == theirs
    scores = torch.tensor([one.score for one in found])
    torch.testing.assert_close(scores, out.sequences_scores, rtol=1e-4, atol=1e-5)


RULES = {
    "n-grams": ({"no_repeat_ngram_size": 2}, Rules(no_repeat=2)),
    "repetition": ({"repetition_penalty": 1.7}, Rules(repetition=1.7)),
    "least": ({"min_new_tokens": 6}, Rules(least=6)),
    "last": ({"forced_eos_token_id": 2}, Rules(last=2)),
    "words": ({"bad_words_ids": [[4, 5], [9, 30]]}, Rules(banned=((4, 5), (9, 30)))),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_transformers_finds_the_same_under_rules(peers, name, penalty):
    hf, net = peers
    theirs, rules = RULES[name]
    seq2seq, source = hf.config.is_encoder_decoder, [9, 30, 9, 41, 59, 26]
    settings = {
        "num_beams": 4,
        "length_penalty": penalty,
        "num_return_sequences": 4,
        "max_new_tokens": 12,
        "eos_token_id": [2, 19],
        "pad_token_id": 1,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    rows = torch.tensor([source])
    with torch.inference_mode():
        out = hf.generate(rows, attention_mask=torch.ones_like(rows), **settings | theirs)
    beam = Beam(4, penalty, "likely", 12, best=4, stop=frozenset({2, 19}), rules=rules)
    start = [hf.generation_config.decoder_start_token_id] if seq2seq else source
    memory = encode_sources(net, [source]) if seq2seq else None
    ours = beam_search(net, [start], beam, 64, memory)[0]
    found = [cut(ids[len(start) :], beam.stop) for ids in out.sequences.tolist()]
    assert [one.ids for one in ours] == found
    scores = torch.tensor([one.score for one in ours])
    torch.testing.assert_close(scores, out.sequences_scores, rtol=1e-4, atol=1e-5)
    free = Beam(4, penalty, "likely", 12, best=4, stop=beam.stop)
    if name == "n-grams":  # and the rule changes something
        assert [one.ids for one in beam_search(net, [start], free, 64, memory)[0]] != found


def test_rules_that_rule_out_all():
    net = tiny.tiny("gpt2", vocab_size=4)
    with pytest.raises(ClearheadError, match="rule out all of them"):
        beam_search(net, [[1]], Beam(2, rules=Rules(no_repeat=1)), MAX_LEN)


def cut(ids, stop):
    """Up to the first id that ends a text."""
    return list(itertools.takewhile(lambda id: id not in stop, ids))


# --- texts


TEXT = "the cat sat on the mat and the dog sat on the log"


@pytest.fixture(scope="module")
def model():
    tokenizer = train_tokenizer("characters", [TEXT], vocab_size=64)
    sizes = tiny.SIZES | {"vocab_size": tokenizer.vocab_size}
    model = ch.build("t5", seed=0, **sizes)
    tiny.noisy(model.net)
    model.tokenizer = tokenizer
    model.companions["generation_config.json"] = {"decoder_start_token_id": 1, "eos_token_id": 8}
    return model


@pytest.mark.parametrize("beams", [1, 3])
def test_translations_come_in_the_order_given(model, beams):
    texts = ["the cat", "on the mat and the dog", "a", "", "the log sat"]
    found = model.translate(texts, beams=beams, max_new_tokens=15, batch_tokens=16)
    assert found == [model.translate(text, beams=beams, max_new_tokens=15) for text in texts]
    assert found == model.translate(texts, beams=beams, max_new_tokens=15)
    assert len(set(found)) > 2
    if beams == 1:
        assert found[0] == model.generate("the cat", max_new_tokens=15)


def test_the_best_few_of_each_text_with_their_scores(model):
    texts = ["the cat", "the log sat"]
    found = model.generate(texts, beams=4, n=3, max_new_tokens=9, details=True)
    assert [len(each) for each in found] == [3, 3]
    assert [each[0].text for each in found] == model.translate(texts, beams=4, max_new_tokens=9)
    for each in found:
        assert each[0].score > each[1].score > each[2].score


def test_a_translation_is_as_long_as_its_source_and_fifty_more(model):
    long = ch.Model(model.net, model.config, model.tokenizer, dict(model.companions))
    long.companions["generation_config.json"] = {"decoder_start_token_id": 1}
    source = model.tokenizer.encode("cat")
    assert len(long.tokenizer.encode(long.translate("cat"), special=False)) <= len(source) + 50


def test_the_settings_that_came_along_are_the_default(model):
    own = ch.Model(model.net, model.config, model.tokenizer)
    own.companions["generation_config.json"] = model.companions["generation_config.json"] | {
        "num_beams": 3,
        "length_penalty": -1.0,
    }
    texts = ["the cat", "on the mat and the dog", "the log sat"]
    found = own.translate(texts, max_new_tokens=15)
    assert found == model.translate(texts, beams=3, length_penalty=-1.0, max_new_tokens=15)
    greedy = model.translate(texts, max_new_tokens=15)
    assert greedy == own.translate(texts, beams=1, max_new_tokens=15)
    assert found != greedy
    assert found != own.translate(texts, length_penalty=1.0, max_new_tokens=15)


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_weights_that_are_no_numbers(model, damage):
    net = copy.deepcopy(model.net)
    for parameter in net.head.parameters():
        parameter.data.fill_(damage)
    own = ch.Model(net, model.config, model.tokenizer, model.companions)
    for call in (
        lambda: own.translate("the cat", beams=3),
        lambda: own.translate("the cat"),
        lambda: own.generate("the cat", temperature=1.0),
    ):
        with pytest.raises(ClearheadError, match="outputs are not numbers: its weights are damag"):
            call()


def test_banned_words_and_a_forced_beginning(model):
    own = ch.Model(model.net, model.config, model.tokenizer)
    said = {"decoder_start_token_id": 1, "forced_bos_token_id": 4}
    own.companions["generation_config.json"] = said
    free = own.generate("the cat", max_new_tokens=8)
    memory = encode_sources(own.net, [own.tokenizer.encode("the cat")])
    tokens = list(decode_tokens(own.net, [1, 4], Sampling(8), MAX_LEN, memory))
    assert free == own.tokenizer.decode(tokens)
    own.companions["generation_config.json"] = said | {"bad_words_ids": [[tokens[0]], [1, 2]]}
    banned = Sampling(8, never=frozenset(tokens[:1]))
    tokens = list(decode_tokens(own.net, [1, 4], banned, MAX_LEN, memory))
    assert own.translate("the cat", max_new_tokens=8) == own.tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beams": 0}, "beams is a whole number from 1"),
        ({"beams": 2.5}, "beams is a whole number from 1"),
        ({"beams": 10**5}, "beams is a whole number from 1 up to the vocabulary's"),
        ({"beams": 2, "n": 2, "beam": 3}, "no setting n, beam: it has beams, length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty is a number"),
        ({"length_penalty": 10**12}, "length_penalty is a number from -50 to 50"),
        ({"max_new_tokens": 0}, "one token at least"),
        ({"batch_tokens": 0}, "batch_tokens is how many"),
    ],
)
def test_settings_that_mean_nothing(model, settings, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        model.translate("the cat", **settings)


def test_what_is_no_text_is_not_translated(model, unchecked):
    for wrong in (None, 3):
        with pytest.raises(ClearheadError, match=f"a text or a list of texts, not {wrong}"):
            model.translate(wrong)


def test_a_search_that_is_more_than_the_memory_is_refused(model, monkeypatch):
    monkeypatch.setattr("clearhead.model.read_memory", lambda: Memory(total=99, available=99))
    for search in (model.translate, model.generate):
        with pytest.raises(ClearheadError, match=r"beams is 8, .* Search with fewer"):
            search("the cat", beams=8)
    monkeypatch.setattr("clearhead.model.read_memory", lambda: Memory(total=None, available=None))
    assert isinstance(model.translate("the cat", beams=8), str)


def test_what_cannot_be_searched(model, unchecked):
    net = tiny.tiny("gpt2")
    for prompts, said in [
        ([], "no prompts"),
        ([[1], []], "prompt is empty"),
        ([[1] * 64], "64 tokens, and the model 64 positions"),
    ]:
        with pytest.raises(ClearheadError, match=said):
            beam_search(net, prompts, Beam(), MAX_LEN)
        with pytest.raises(ClearheadError, match=said):
            decode_batch(net, prompts, Sampling(), MAX_LEN)
    with pytest.raises(ClearheadError, match="given 1 limits"):
        decode_batch(net, [[1], [2]], Sampling(), MAX_LEN, limits=[1])
    with pytest.raises(ClearheadError, match="4 sources and 1 prompts"):
        beam_search(model.net, [[1]], Beam(), MAX_LEN, memory_of(model.net))
    with pytest.raises(ClearheadError, match="5 hypotheses were asked of 4 beams"):
        Beam(4, best=5)
    with pytest.raises(ClearheadError, match="5 beams cannot be parted into 2 equal groups"):
        Beam(5, groups=2)
    for wrong in ({"coverage_penalty": -1.0}, {"diversity_penalty": math.nan}):
        with pytest.raises(ClearheadError, match="is a number of 0 or more"):
            Beam(**wrong)
    with pytest.raises(ClearheadError, match="patience is"):
        Beam(patience="never")
    decoder = ch.build("gpt2", seed=0, **tiny.SIZES)
    decoder.tokenizer = model.tokenizer
    with pytest.raises(ClearheadError, match="takes an encoder-decoder"):
        decoder.translate("the")
