"""The decoding core on every family: uncached, one by one, transformers, and what is written."""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import architectures
import clearhead as ch
import reference
import tiny
from clearhead.errors import ClearheadError
from clearhead.generate.batch import decode_batch, decode_steps, encode_sources
from clearhead.generate.beam import beam_search
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.generate.options import read_options
from clearhead.generate.prefix import Prefixes
from clearhead.generate.prompts import few_shot
from clearhead.generate.row import Row
from clearhead.generate.rules import Rules
from clearhead.generate.score import score_tokens
from clearhead.generate.write import split_at_stop
from clearhead.models.base import EncoderDecoder
from clearhead.text.trained import train_tokenizer
from clearhead.weights.hf import load_hf
from decoding import CASES, Decoding

FAMILIES = [*tiny.DECODERS, *tiny.SEQ2SEQ]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3]]
SOURCES = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10]]
STOP = frozenset({2, 7, 11, 13})
RULES = Rules(
    bias=((5, 0.5),),
    repetition=1.2,
    presence=0.3,
    frequency=0.2,
    no_repeat=2,
    banned=((3, 4), (9,)),
    not_first=frozenset({1}),
    least=3,
    last=2,
)
TEXT = "the cat sat on the mat and the dog sat on the log"


def memory_of(net, sources=SOURCES):
    return encode_sources(net, sources) if isinstance(net, EncoderDecoder) else None


# --- equivalences


@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_is_the_best_token_without_a_cache(case):
    decoding = Decoding(case, rows=1)
    ids, new = [3, 1, 4, 1, 5], []
    with torch.inference_mode():
        for _ in range(10):
            new.append(int(decoding.full(torch.tensor([[*ids, *new]]))[0, -1].argmax()))
    assert list(decode_tokens(decoding.net, ids, Sampling(10), 64, decoding.memory)) == new


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_hold_in_a_batch_as_alone(name, temperature):
    net = tiny.tiny(name)
    sampling = Sampling(12, temperature, 15, 0.95, seed=3, stop=STOP, rules=RULES)
    found = decode_batch(net, PROMPTS, sampling, 64, memory_of(net))
    for i, prompt in enumerate(PROMPTS):
        memory = memory_of(net, [SOURCES[i]])
        assert found[i] == list(decode_tokens(net, prompt, sampling, 64, memory))
        assert len(found[i]) in range(3, 12)  # a stop id comes at the limit at the latest
        assert found[i][0] != 1


def rows_of(samplings, **more):
    pairs = zip(PROMPTS, samplings, strict=True)
    return [Row(i, p, s, s.max_new_tokens, **more) for i, (p, s) in enumerate(pairs)]


def texts(steps, rows):
    for _ in steps:
        pass
    return [row.text for row in rows]


@pytest.mark.parametrize("name", ["gpt2", "llama-window", "t5"])
def test_every_row_has_its_own_settings_and_seed(name):
    net = tiny.tiny(name)
    samplings = [
        Sampling(9, 1.0, seed=1, stop=STOP),
        Sampling(12),
        Sampling(5, 0.7, 5, seed=2, rules=RULES),
        Sampling(12, 1.0, min_p=0.1, seed=1, never=frozenset({4})),
    ]
    rows = rows_of(samplings)
    found = texts(decode_steps(net, rows, 64, memory_of(net)), rows)
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True)):
        memory = memory_of(net, [SOURCES[i]])
        assert found[i] == list(decode_tokens(net, prompt, sampling, 64, memory))


def test_rows_slide_in_a_batch_as_alone():
    net = tiny.tiny("gpt2", max_len=12)
    samplings = [Sampling(n) for n in (30, 4, 21, 17)]
    rows = rows_of(samplings)
    found = texts(decode_steps(net, rows, 12), rows)
    assert [row.slid for row in rows] == [4, 0, 3, 2]
    for prompt, sampling, text in zip(PROMPTS, samplings, found, strict=True):
        assert text == list(decode_tokens(net, prompt, sampling, 12))


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
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
    }
    if name == "Marian":
        config = transformers.MarianConfig(**sizes, decoder_vocab_size=reference.VOCAB)
        return transformers.MarianMTModel(config)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))


@pytest.fixture(scope="module", params=PEERS)
def peers(request, tmp_path_factory):
    torch.manual_seed(4)
    hf, folder = architectures.randomise(PEERS[request.param]()), tmp_path_factory.mktemp("peer")
    hf.generation_config.forced_eos_token_id = None
    hf.save_pretrained(folder)
    return hf, load_hf(folder)[0]


SAID = [
    {},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[9], [31, 5], [4, 4], [17]]},
    {"min_new_tokens": 7, "forced_eos_token_id": 2},
    {"suppress_tokens": [5, 6, 8], "begin_suppress_tokens": [11, 31, 59]},
    {"min_length": 9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
]


@pytest.mark.parametrize("said", SAID, ids=str)
def test_transformers_writes_the_same_with_rules(peers, said):
    hf, net = peers
    ends = [2, 7, 11, 19, 23, 31, 40, 51]
    more = {"max_new_tokens": 10, "eos_token_id": ends, "pad_token_id": 1, "do_sample": False}
    for source in ([9, 8, 7, 6, 5], [11, 12], [31, 41, 59, 26]):
        given = torch.tensor([source])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = hf.generate(given, attention_mask=torch.ones_like(given), **more, **said)
        prompt, memory = source, None
        if hf.config.is_encoder_decoder:
            prompt = [hf.generation_config.decoder_start_token_id]
            memory = encode_sources(net, [source])
        options = options_of(said | {"eos_token_id": ends})
        least = max(options.sampling.rules.least, options.min_length - len(prompt))
        sampling = rule_least(options.sampling, least)
        ours = list(decode_tokens(net, prompt, sampling, 64, memory))
        theirs = out[0, len(prompt) :].tolist()
        assert ours == list(itertools.takewhile(lambda id: id not in ends, theirs))


class NoTokens:
    eos_ids = ()


def options_of(said):
    return read_options({"max_new_tokens": 10}, said, NoTokens(), reference.VOCAB)


def rule_least(sampling, least):
    return replace(sampling, rules=replace(sampling.rules, least=least))


# --- texts


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("characters", [TEXT], vocab_size=64)


def build(tokenizer, family="gpt2", **more):
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "max_len": 64}
    model = ch.build(family, seed=0, vocab_size=tokenizer.vocab_size, **sizes | more)
    tiny.noisy(model.net)
    model.tokenizer = tokenizer
    if family != "gpt2":
        model.companions["generation_config.json"] = {"decoder_start_token_id": 1}
    return model


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def model(request, tokenizer):
    return build(tokenizer, request.param)


MANY = ["the cat", "on the mat and", "a", "the dog sat"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 1.3, "seed": 4, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.1},
        {"stop": ["t", " a"], "no_repeat_ngram": 3},
        {"begin_with": "dog", "banned": ["a", "th"], "min_new_tokens": 5},
        {"logit_bias": {"e": -3.0, "o": 2}, "presence_penalty": 0.4, "frequency_penalty": 0.1},
    ],
    ids=str,
)
def test_many_prompts_are_one_by_one_and_streams_are_whole_texts(model, settings):
    settings = {"max_new_tokens": 14} | settings
    found = model.generate(MANY, **settings)
    assert found == [model.generate(prompt, **settings) for prompt in MANY]
    assert found == ["".join(model.stream(prompt, **settings)) for prompt in MANY]
    assert len(set(found)) > 1
    if "begin_with" in settings:
        assert all(text.startswith("dog") and "a" not in text[3:] for text in found)


def test_n_texts_share_a_prefill_and_have_their_own_dice(model):
    settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": 7}
    reads = []
    embed = model.net.embed if hasattr(model.net, "embed") else model.net.encoder.embed
    hook = embed.register_forward_hook(lambda module, inputs, out: reads.append(out.shape))
    found = model.generate("the cat", n=4, **settings)
    hook.remove()
    assert reads[0][0] == 1
    assert sum(shape[1] > 1 for shape in reads) == 1  # the prompt, or the source, once
    assert len(set(found)) == 4
    assert found[0] == model.generate("the cat", **settings)
    both = model.generate(["on the", "the cat"], n=4, **settings)
    assert both[1] == found
    assert len(both[0]) == 4
    assert (
        model.generate("the cat", n=2, max_new_tokens=5)
        == [model.generate("the cat", max_new_tokens=5)] * 2
    )


def test_details(model):
    settings = {"max_new_tokens": 9, "temperature": 0.9, "seed": 1, "top_k": 5}
    found = model.generate(MANY, details=True, log_probabilities=3, **settings)
    for prompt, one in zip(MANY, found, strict=True):
        assert one.text == model.generate(prompt, **settings)
        assert one.text == model.tokenizer.decode(one.ids)
        assert one.end == "limit"
        assert len(one.ids) == len(one.log_probabilities) == len(one.best) == 9
        assert one.prompt_tokens == len(model.tokenizer.encode(prompt))
        assert 0 < one.first < one.seconds
        assert one.tokens_a_second == pytest.approx(8 / (one.seconds - one.first))
        ids = torch.tensor([[*model.tokenizer.encode(prompt), *one.ids]])
        if isinstance(model.net, EncoderDecoder):
            memory = encode_sources(model.net, [model.tokenizer.encode(prompt)])
            with torch.inference_mode():
                logits = model.net.decode(torch.tensor([[1, *one.ids[:-1]]]), memory)[0]
        else:
            logits = model.net(ids[:, :-1])[0, -9:]
        log_p = logits.log_softmax(-1)
        expected = log_p.gather(1, torch.tensor(one.ids)[:, None]).squeeze(1)
        torch.testing.assert_close(
            torch.tensor(one.log_probabilities), expected, rtol=1e-4, atol=1e-4
        )
        for row, best in zip(log_p, one.best, strict=True):
            assert list(best) == row.topk(3).indices.tolist()
    stream = model.stream("the cat", **settings)
    assert returned(stream).text == model.generate("the cat", **settings)


def returned(generator):
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def test_why_a_text_ended(tokenizer):
    model = build(tokenizer)
    free = model.generate("the", max_new_tokens=12, details=True)
    stop = free.ids[5]
    model.companions["generation_config.json"] = {"eos_token_id": stop}
    ended = model.generate("the", max_new_tokens=12, details=True)
    assert ended.end == "token"
    assert ended.ids == free.ids[: free.ids.index(stop)]
    assert len(ended.log_probabilities) == len(ended.ids) + 1
    least = model.generate("the", max_new_tokens=12, min_new_tokens=8, details=True)
    assert len(least.ids) >= 8
    assert stop not in least.ids[:8]
    long = model.generate("the", max_new_tokens=12, min_new_tokens=12)
    text = long[3:5]
    cut = model.generate("the", max_new_tokens=12, stop=text, details=True, min_new_tokens=12)
    assert (cut.end, cut.text) == ("string", long[: long.find(text)])
    source = build(tokenizer, "transformer", max_len=10)
    source.companions["generation_config.json"] = {"decoder_start_token_id": 1}
    for way in ({}, {"beams": 2}):
        assert source.generate("the", max_new_tokens=50, details=True, **way).end == "positions"
        assert source.generate("the", max_new_tokens=9, details=True, **way).end == "limit"


@pytest.mark.parametrize(
    "way", [{}, {"temperature": 1.0}, {"beams": 2}, {"look_up": True}], ids=str
)
def test_outputs_that_are_no_numbers_are_told_whenever_they_come(tokenizer, way):
    model = build(tokenizer, head={"kind": "lm", "tied": False})
    settings = {"max_new_tokens": 6, "begin_with": "do"}
    model.generate("the cat", **settings, **way)
    with torch.no_grad():
        model.net.embed.tokens.weight[tokenizer.id("o")] = math.nan  # not in the prompt
    with pytest.raises(ClearheadError, match="not numbers"):
        model.generate("the cat", **settings, **way)


@pytest.mark.parametrize(
    "way", [{}, {"temperature": 1.0}, {"beams": 2}, {"look_up": True}, {"contrast": 0.5}], ids=str
)
def test_what_is_banned_is_not_written_even_if_nothing_is_left(tokenizer, way):
    model, ids = build(tokenizer), range(tokenizer.vocab_size)
    with pytest.raises(ClearheadError, match="No token may come next"):
        model.generate("the", banned=list(ids), max_new_tokens=4, **way)
    model.generate("the", banned=list(ids[1:]), max_new_tokens=4, **way)


# --- stop strings


STOPS = [  # pieces, stop strings, the text, whether it ended there
    (["ab", "cd", "ef"], ["cd"], "ab", True),
    (["ab", "cd", "ef"], ["bc"], "a", True),
    (["ab", "cd", "ef"], ["bcde"], "a", True),
    (["ab", "cd", "ef"], ["bcdx"], "abcdef", False),
    (["ab", "cd", "ef"], ["fg"], "abcdef", False),
    (["a", "a", "a", "b"], ["aab"], "a", True),
    (["abcabd"], ["abd"], "abc", True),
    (["abcabd"], ["abd", "ca"], "ab", True),
    (["abc", "d"], ["abcd", "bc"], "a", True),
    (["a", "b", "c", "d"], ["abcd", "bc"], "a", True),
    (["x", "\n", "\n", "y"], ["\n\n"], "x", True),
    (["x\n", "y\n", "\nz"], ["\n\n"], "x\ny", True),
    (["stop"], ["stop"], "", True),
    (["sto", ""], ["stop"], "sto", False),
    (["é", "👍", "a"], ["👍a"], "é", True),
]


def fed(pieces, stops):
    """The pieces through `split_at_stop`, as a writer does it."""
    out, held = [], ""
    for piece in pieces:
        certain, held, stopped = split_at_stop(held + piece, stops)
        out.append(certain)
        if stopped:
            return "".join(out), True
    return "".join(out) + held, False


@pytest.mark.parametrize(("pieces", "stops", "text", "ended"), STOPS)
def test_stop_strings_over_token_borders(pieces, stops, text, ended):
    assert fed(pieces, stops) == (text, ended)


LETTERS = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(LETTERS, max_size=3))
def test_where_tokens_part_does_not_matter(pieces, stops):
    text = "".join(pieces)
    assert fed(pieces, stops) == fed([text], stops) == fed(list(text), stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert fed(pieces, stops)[1] == bool(ends)


@given(st.text("ab", max_size=8), st.lists(LETTERS, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    certain, held, stopped = split_at_stop(text, stops)
    if not stopped:
        assert certain + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_strings_in_texts(model):
    free = model.generate("the cat", max_new_tokens=20)
    for size in (1, 2, 3, 5):
        for at in range(len(free) - size):
            stop = free[at : at + size]
            text = free[: free.find(stop)]
            assert model.generate("the cat", max_new_tokens=20, stop=stop) == text
            pieces = list(model.stream("the cat", max_new_tokens=20, stop=[stop, "zzz"]))
            assert "".join(pieces) == text


# --- half characters, cancelling


def test_streams_never_give_half_a_character_and_can_be_stopped():
    own = train_tokenizer("bytes", ["é👍ü"])
    model = build(own)
    for seed in range(3):
        settings = {"max_new_tokens": 40, "temperature": 3.0, "seed": seed}
        pieces = list(model.stream("é", **settings))
        whole = model.generate("é", details=True, **settings)
        assert "".join(pieces) == whole.text == own.decode(whole.ids)
    calls = []
    model.net.embed.register_forward_hook(lambda *_: calls.append(1))
    stream = model.stream("é", max_new_tokens=40, begin_with="abcdefgh")
    for _ in range(3):
        next(stream)
    stream.close()
    assert len(calls) == 3  # the prompt and two tokens; nothing was computed ahead


# --- the context is full


def test_a_full_context_is_told_once_and_in_the_details(tokenizer):
    model = build(tokenizer, max_len=16)
    with pytest.warns(UserWarning, match="last position \\(16\\)") as told:
        one = model.generate("the cat", max_new_tokens=40, details=True)
    assert len(told) == 1
    assert one.slid == 4
    assert len(one.ids) == 40
    assert model.generate("the cat", max_new_tokens=9, details=True).slid == 0


# --- prefixes


@pytest.mark.parametrize("name", tiny.DECODERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prefixes_change_no_token(name, temperature):
    net = tiny.tiny(name)
    start = [5, 1, 4, 2, 8, 3, 9, 9, 1]
    prompts = [[*start, *end] for end in ([3], [4, 4, 1], [7, 2], [3, 6, 6, 6, 2])]
    sampling = Sampling(10, temperature, seed=2)
    plain = [list(decode_tokens(net, prompt, sampling, 64)) for prompt in prompts]
    store = Prefixes()
    for _ in range(2):
        rows = [Row(i, prompt, sampling, 10) for i, prompt in enumerate(prompts)]
        assert texts(decode_steps(net, rows, 64, prefixes=store), rows) == plain
    for i in (2, 0, 3, 1, 3):  # alone, and again, and rows that share more and less
        rows = [Row(0, prompts[i], sampling, 10)]
        assert texts(decode_steps(net, rows, 64, prefixes=store), rows) == plain[i : i + 1]
    rows = [Row(i, p, sampling, 10) for i, p in enumerate([prompts[3], [2, 2], prompts[0]])]
    found = texts(decode_steps(net, rows, 64, prefixes=store), rows)
    assert found[::2] == [plain[3], plain[0]]
    keys = name != "llama-window" and not name.startswith("rnn")  # kept for all positions
    assert (store.spared > 0) == keys


def test_what_was_read_is_not_read_again(tokenizer):
    model, reads = build(tokenizer), []
    model.net.embed.register_forward_hook(lambda module, _, out: reads.append(out.shape[:2]))
    start = "the cat sat on the mat and "
    many = [start + end for end in ("the", "a dog", "sat")]
    expected = [model.generate(prompt, max_new_tokens=6) for prompt in many]
    reads.clear()
    assert model.generate(many, max_new_tokens=6) == expected
    common = len(tokenizer.encode(start))
    assert reads[:2] == [(1, common), (3, 5)]
    assert len(model.prefixes) == 0  # nothing is kept unless asked
    reads.clear()
    for _ in range(2):
        assert model.generate(many[0], max_new_tokens=6, remember=True) == expected[0]
    assert [shape[1] for shape in reads[::6]] == [common + 3, 1]
    assert model.generate(many[1], max_new_tokens=6, remember=True) == expected[1]
    for parameter in model.net.parameters():  # other weights: nothing known holds
        torch.nn.init.normal_(parameter, 0, 0.5)
    fresh = model.generate(many[0], max_new_tokens=6)
    assert model.generate(many[0], max_new_tokens=6, remember=True) == fresh
    assert len(model.prefixes) == 1


def test_what_was_read_under_a_patch_is_not_remembered(tokenizer):
    model, prompt = build(tokenizer), "the cat sat on the mat"
    settings = {"max_new_tokens": 8, "remember": True}
    plain = model.generate(prompt, max_new_tokens=8)
    changes = {"blocks.0.ffn.hidden": lambda x: -3 * x}
    with ch.patch(model.net, changes):
        patched = model.generate(prompt, **settings)
        assert len(model.prefixes) == 0
    assert patched != plain
    assert model.generate(prompt, **settings) == plain
    assert len(model.prefixes) == 1
    with ch.patch(model.net, changes):  # nor is what is known taken for what is patched
        assert model.generate(prompt, **settings) == patched


def test_weights_that_were_loaded_in_inference_mode(tokenizer, tmp_path):
    model, prompts = build(tokenizer), ["the cat sat on", "the cat sat a"]
    model.save(tmp_path / "model")
    with torch.inference_mode():
        loaded = ch.load(tmp_path / "model")
    settings = {"max_new_tokens": 6}
    assert loaded.generate(prompts, **settings) == model.generate(prompts, **settings)


def test_the_store_keeps_what_was_used_last():
    net = tiny.tiny("gpt2")
    each = 12 * 2 * 2 * 2 * 4 * 4  # tokens, layers, keys and values, heads, width, bytes
    store = Prefixes(2 * each)
    for first in (1, 2, 1, 3):
        row = Row(0, [first] * 12, Sampling(1), 1)
        texts(decode_steps(net, [row], 64, prefixes=store), [row])
    assert store.nbytes <= 2 * each
    assert [one.ids[0] for one in store.kept] == [1, 3]


# --- constraints


class Letters:
    """Only these tokens, and so many of them."""

    def __init__(self, ids, count, size):
        self.ids, self.left, self.size, self.told = ids, count, size, []

    @property
    def done(self):
        return self.left == 0

    def mask(self):
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    def advance(self, token):
        self.left -= 1
        self.told.append(token)


def test_a_constraint_rules_each_text(tokenizer):
    model, size = build(tokenizer), tokenizer.vocab_size
    ids = [tokenizer.id("a"), tokenizer.id("o")]
    made = []

    def constraint():
        made.append(Letters(ids, 5, size))
        return made[-1]

    settings = {"temperature": 1.0, "seed": 1, "constraint": constraint, "details": True}
    found = model.generate("the", n=3, **settings)
    assert all(set(one.text) <= set("ao") and len(one.ids) == 5 for one in found)
    assert {one.end for one in found} == {"constraint"}
    assert [one.ids for one in found] == [each.told for each in made]
    with pytest.raises(ClearheadError, match="No token may come next"):
        model.generate("the", constraint=lambda: Letters([], 5, size))


def test_texts_that_match_an_expression_or_a_schema(model):
    pytest.importorskip("llguidance")
    settings = {"max_new_tokens": 30, "temperature": 1.5, "seed": 2}
    found = model.generate(MANY, regex="(cat|dog) (sat|on)", **settings)
    assert all(re.fullmatch("(cat|dog) (sat|on)", text) for text in found)
    assert found == [model.generate(one, regex="(cat|dog) (sat|on)", **settings) for one in MANY]
    own = train_tokenizer("bytes", [TEXT])
    writer = build(own)
    schema = {"enum": ["sun", "sea"]}
    texts = writer.generate("the", schema=schema, n=4, **settings)
    assert {json.loads(text) for text in texts} <= {"sun", "sea"}


def test_rules_hold_for_beams_and_translations(tokenizer):
    model = build(tokenizer, "t5")
    said = {"decoder_start_token_id": 1, "no_repeat_ngram_size": 2, "min_length": 9}
    plain = model.generate("the cat", beams=3, max_new_tokens=14, details=True).ids
    model.companions["generation_config.json"] = said
    one = model.generate("the cat", beams=3, max_new_tokens=14, details=True)
    pairs = list(itertools.pairwise([1, *one.ids]))
    assert len(pairs) == len(set(pairs))
    assert len(set(itertools.pairwise(plain))) < len(plain) - 1
    assert len(one.ids) >= 8
    assert model.translate("the cat", beams=3, max_new_tokens=14) == one.text
    greedy = model.generate("the cat", max_new_tokens=14)
    assert model.translate("the cat", beams=1, max_new_tokens=14) == greedy
    assert greedy == model.generate("the cat", beams=1, max_new_tokens=14)


# --- what came with the model


def test_settings_that_came_along_hold_unless_a_call_says_otherwise(tokenizer):
    model, free = build(tokenizer), {"max_new_tokens": 16}
    plain = model.generate("the cat", **free)
    model.companions["generation_config.json"] = {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 1,
    }
    ruled = model.generate("the cat", **free)
    assert ruled != plain  # but still greedy: no dice were asked for
    assert ruled == model.generate("the cat", **free)
    assert plain == model.generate("the cat", **free, repetition_penalty=1.0, no_repeat_ngram=0)
    drawn = {"temperature": 2.0, "seed": 1}
    assert model.generate("the cat", **free, **drawn) == ruled  # top_k is their 1
    assert model.generate("the cat", **free, **drawn, top_k=0) != ruled
    model.companions["generation_config.json"] = {"max_new_tokens": 3}
    assert len(model.generate("the cat", details=True).ids) == 3


def test_a_banned_word_of_the_call_joins_those_of_the_model(tokenizer):
    model = build(tokenizer)
    first = tokenizer.id("a")
    model.companions["generation_config.json"] = {"bad_words_ids": [[first]]}
    text = model.generate("the cat", max_new_tokens=40, temperature=2.0, seed=0, banned=["o"])
    assert not set(text) & {"a", "o"}
    assert set(text) & {"t", "e", "h"}


def test_ends_that_the_vocabulary_does_not_have_do_no_harm(tokenizer):
    model = build(tokenizer)
    model.companions["generation_config.json"] = {"eos_token_id": [2, 5000, -1]}
    one = model.generate("the", min_new_tokens=4, max_new_tokens=4, details=True)
    assert len(one.ids) == 4
    assert 2 not in one.ids
    assert len(model.generate("the", beams=2, max_new_tokens=4, details=True).ids) <= 4


def test_a_length_penalty_of_0_that_came_along_is_0(unchecked):
    for said, penalty in (({"length_penalty": 0.0}, 0.0), ({"length_penalty": None}, 1.0)):
        way = read_options({"beams": 2}, said, NoTokens(), reference.VOCAB).way
        assert way.length_penalty == penalty


def test_contrast_does_not_pass_over_a_least_length_that_came_along(tokenizer):
    model = build(tokenizer)
    model.companions["generation_config.json"] = {"min_length": 12}
    with pytest.raises(ClearheadError, match="min_new_tokens=0"):
        model.generate("the", contrast=0.5, max_new_tokens=4)
    model.generate("the", contrast=0.5, max_new_tokens=4, min_new_tokens=0)


# --- other ways


def test_other_ways_write_what_greedy_does(model):
    settings = {"max_new_tokens": 12}
    greedy = model.generate(MANY, **settings)
    for way in ({"beams": 1}, {"draft": model}, {"look_up": True}, {"contrast": 0.5, "top_k": 1}):
        assert model.generate(MANY, **settings, **way) == greedy, way
        assert ["".join(model.stream(one, **settings, **way)) for one in MANY] == greedy
    ruled = settings | {"no_repeat_ngram": 2, "repetition_penalty": 1.2}
    for way in ({"draft": model}, {"look_up": True}):
        assert model.generate(MANY, **ruled, **way) == model.generate(MANY, **ruled), way
    # A beam's scores are log-probabilities, of which a penalty makes something else.
    del ruled["repetition_penalty"]
    assert model.generate(MANY, **ruled, beams=1) == model.generate(MANY, **ruled)
    stop = greedy[0][2:4]
    cut = model.generate(MANY[0], **settings, stop=stop)
    for way in ({"beams": 1}, {"draft": model}, {"look_up": True}, {"contrast": 0.5, "top_k": 1}):
        found = model.generate(MANY[0], **settings, **way, stop=stop, details=True)
        assert (found.text, found.end) == (cut, "string")


def test_beams_give_the_best_texts_with_scores(model):
    found = model.generate(MANY, beams=4, n=3, max_new_tokens=6, details=True, length_penalty=0.5)
    for texts in found:
        scores = [one.score for one in texts]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(one.ids) for one in texts}) == 3
    best = model.generate(MANY, beams=4, max_new_tokens=6, length_penalty=0.5)
    assert best == [texts[0].text for texts in found]


def test_beams_that_find_fewer_texts_than_asked(model):
    groups = {"beams": 4, "groups": 4, "diversity_penalty": 0, "max_new_tokens": 5}
    assert model.generate("the", n=4, **groups) == [model.generate("the", **groups)]
    found = model.generate(MANY, n=4, **groups)
    assert found == [[text] for text in model.generate(MANY, **groups)]


def test_batches_count_beams(model, monkeypatch):
    sizes = []

    def search(net, prompts, *rest):
        sizes.append(len(prompts))
        return beam_search(net, prompts, *rest)

    monkeypatch.setattr("clearhead.generate.write.beam_search", search)
    monkeypatch.setattr("clearhead.generate.write.SLOTS", 80)
    model.generate(["the", "cat"], beams=4, max_new_tokens=10)
    assert sizes == [1, 1]  # 13 slots each, four times


def test_drawn_texts_of_a_draft_repeat_with_their_seed(model):
    settings = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3, "look_up": True, "n": 3}
    found = model.generate("the cat", **settings)
    assert found == model.generate("the cat", **settings)
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beams": 2, "look_up": True}, "beams and look_up are different ways"),
        ({"beams": 2, "temperature": 1.0}, "draws nothing"),
        ({"contrast": 0.5, "temperature": 1.0}, "draws nothing"),
        ({"beams": 10**6}, "up to the vocabulary's"),
        ({"beams": 2, "n": 3}, "n is 3 and beams 2: .* Say beams=3 or more, or n=2"),
        ({"length_penalty": 1.0}, "say beams=4"),
        ({"groups": 2}, "say beams=4"),
        ({"regex": "a", "schema": {}}, "cannot hold together"),
        ({"look_up": True, "regex": "a"}, "works without constraints"),
        ({"regex": "("}, "cannot be used"),
        ({"regex": "[zq]"}, "satisfied by no text"),
        ({"constraint": 3}, "constraint makes a constraint"),
        ({"draft": "small"}, "draft is a smaller model"),
        ({"contrast": 2}, "contrast is a number from 0"),
        ({"contrast": 0.5, "banned": ["th"]}, "works without rules"),
        ({"beams": 2, "details": True, "log_probabilities": 2}, "written one by one"),
    ],
)
def test_ways_that_do_not_go_together(model, settings, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        model.generate("the cat", **settings)


# --- prompts


def test_few_shot_prompts(unchecked):
    pairs = [("sea", "mer"), ("sky", "ciel")]
    assert few_shot(pairs, "sun", "English to French:") == (
        "English to French:\nsea => mer\nsky => ciel\nsun =>"
    )
    assert few_shot([], "sun", between=": ") == "sun:"
    assert few_shot(pairs[:1], "a", between="|", after="##") == "sea|mer##a|"
    with pytest.raises(ClearheadError, match="question and its answer"):
        few_shot([("a",)], "b")
    with pytest.raises(ClearheadError, match="stand apart"):
        few_shot(pairs, "b", after="")


def test_sums_of_log_probabilities_are_the_score(tokenizer):
    model = build(tokenizer)
    one = model.generate("the cat", max_new_tokens=8, details=True)
    total = score_tokens(model.net, [*tokenizer.encode("the cat"), *one.ids], 64)[-8:].sum()
    assert math.isclose(sum(one.log_probabilities), float(total), rel_tol=1e-4)
