"""Tokens that are named by texts: all that write a text are meant, in every kind of vocabulary."""

from __future__ import annotations

import re

import pytest

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.generate.options import read_options
from clearhead.text.pieces import pieces_of, tokens_that_write, ways_to_write
from clearhead.text.trained import train_tokenizer
from tiny import noisy

TEXT = "the cat. a then, the hat. the. cat, 3 the 33.\n"
KINDS = {"characters": None, "bytes": None, "bpe": 270, "unigram": 30}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return train_tokenizer(request.param, [TEXT * 4], vocab_size=KINDS[request.param])


@pytest.fixture(scope="module")
def model(tokenizer):
    made = ch.build(
        "gpt2",
        vocab_size=tokenizer.vocab_size,
        n_layers=1,
        d_model=32,
        n_heads=4,
        max_len=128,
        dropout=0.0,
        seed=0,
    )
    noisy(made.net)
    made.tokenizer = tokenizer
    return made


@pytest.mark.parametrize("text", [".", "the", "t", " the", "3", ", "])
def test_every_way_writes_the_text(tokenizer, text):
    pieces, ways = pieces_of(tokenizer).of, ways_to_write(text, tokenizer)
    written = [b"".join(pieces[id] for id in ids).decode() for ids in ways]
    assert text in written
    # What sentencepiece puts before the first word is all that may be more.
    assert {one.removeprefix(" ") for one in written} == {text.removeprefix(" ")}
    assert {(id,) for id in tokens_that_write(text, tokenizer)} <= set(ways)


@pytest.mark.parametrize("banned", [".", "t", "3"])
def test_what_is_banned_is_not_written_wherever_it_stands(model, banned):
    pieces = pieces_of(model.tokenizer).of
    alone = {id for id, piece in enumerate(pieces) if piece and piece.decode("latin") == banned}
    assert alone

    def tokens(**more):
        drawn = {"max_new_tokens": 20, "temperature": 1.0, "seed": 1, "details": True}
        return set(model.generate("the cat", **drawn, **more).ids)

    assert tokens(logit_bias=dict.fromkeys(alone, 50.0)) == alone
    assert tokens(logit_bias={banned: 50.0}) == alone
    assert not alone & tokens(logit_bias=dict.fromkeys(alone, 50.0), banned=[banned])


def test_a_blank_belongs_to_the_token_that_a_bias_names():
    for kind in ("bpe", "unigram"):
        tokenizer = train_tokenizer(kind, [TEXT * 4], vocab_size=KINDS[kind])
        (named,) = tokens_that_write(" the", tokenizer)
        assert pieces_of(tokenizer).of[named] == b" the"


def test_a_decoder_that_puts_blanks_itself_says_nothing():
    tokenizer = train_tokenizer("words", [TEXT], special_tokens={"unk": "[UNK]"})
    assert pieces_of(tokenizer) is None
    assert ways_to_write("cat", tokenizer) == [(tokenizer.id("cat"),)]


def read(tokenizer, **settings):
    return read_options(settings, {}, tokenizer, tokenizer.vocab_size)


def test_sentencepiece_without_a_line_break_bans_words_in_the_middle_and_not_what_is_unknown():
    tokenizer = train_tokenizer(
        "unigram", ["(the mat) the cat, a hat."] * 4, vocab_size=30, special_tokens={"unk": "<unk>"}
    )
    assert tokenizer.unk_id in tokenizer.encode("\n")
    before, both = (tokenizer.encode(text, special=False) for text in (",", ",mat"))
    assert both[: len(before)] == before
    inside = tuple(both[len(before) :])
    ways = ways_to_write("mat", tokenizer)
    assert b"".join(pieces_of(tokenizer).of[id] for id in inside) == b"mat"
    assert inside in ways
    assert ways_to_write("ж", tokenizer) == []  # it could not be written
    assert not read(tokenizer, banned=["ж"]).sampling.never


def test_a_bias_is_for_a_token_that_writes_the_text_and_nothing_else():
    tokenizer = train_tokenizer("unigram", [TEXT * 4], vocab_size=30)
    pieces = pieces_of(tokenizer)
    for text in ("the", " the", "t"):
        for id, _ in read(tokenizer, logit_bias={text: 1.0}).sampling.rules.bias:
            assert pieces.of[id] == text.encode()
    lost = [
        piece.decode()[1:]
        for piece in pieces.ids
        if piece.startswith(b" ") and piece[1:] and piece[1:] not in pieces.ids
    ]
    assert {"cat", "33.\n"} <= set(lost)
    for text in lost:
        with pytest.raises(ClearheadError, match=re.escape(f"{' ' + text!r}, with a blank, is")):
            read(tokenizer, logit_bias={text: 1.0})


def test_half_a_character_is_refused_with_a_sentence(tokenizer):
    for settings in ({"banned": ["\ud83d"]}, {"logit_bias": {"\ud83d": 1.0}}):
        with pytest.raises(ClearheadError):
            read(tokenizer, **settings)


def test_an_end_is_not_banned_with_a_blank_before_it_either():
    tokenizer = train_tokenizer("unigram", [TEXT * 4], vocab_size=30)
    (end,) = tokenizer.eos_ids
    options = read(tokenizer, banned=[tokenizer.token(end)])
    assert end not in options.sampling.never
    assert all(end not in ids for ids in options.sampling.rules.banned)
