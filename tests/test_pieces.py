"""Tokens that are named by texts: all that write a text are meant, in every kind of vocabulary."""

from __future__ import annotations

import pytest

import clearhead as ch
from clearhead.text.pieces import token_bytes, tokens_that_write, ways_to_write
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
    pieces, ways = token_bytes(tokenizer), ways_to_write(text, tokenizer)
    written = [b"".join(pieces[id] for id in ids).decode() for ids in ways]
    assert text in written
    # What sentencepiece puts before the first word is all that may be more.
    assert {one.removeprefix(" ") for one in written} == {text.removeprefix(" ")}
    assert {(id,) for id in tokens_that_write(text, tokenizer)} <= set(ways)


@pytest.mark.parametrize("banned", [".", "t", "3"])
def test_what_is_banned_is_not_written_wherever_it_stands(model, banned):
    pieces = token_bytes(model.tokenizer)
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
        assert token_bytes(tokenizer)[named] == b" the"


def test_a_decoder_that_puts_blanks_itself_says_nothing():
    tokenizer = train_tokenizer("words", [TEXT], special_tokens={"unk": "[UNK]"})
    assert token_bytes(tokenizer) is None
    assert ways_to_write("cat", tokenizer) == [(tokenizer.id("cat"),)]
