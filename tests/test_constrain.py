"""Whatever a random model writes under a constraint fits it, and what cannot be is refused."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

import tiny
from clearhead.errors import ClearheadError
from clearhead.generate.constrain import Constraint
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.generate.row import Constraint as Protocol
from clearhead.text.pieces import pieces_of
from clearhead.text.trained import train_tokenizer

pytest.importorskip("llguidance")

TEXT = 'the cat, é: {"name": "ünï", "age": [12345.67890, true, false, null]} -+e/AZaz'
KINDS = ["characters", "bytes", "bpe", "unigram"]


@pytest.fixture(scope="module")
def tokenizers():
    sizes = {"unigram": 60, "bpe": 300}
    return {kind: train_tokenizer(kind, [TEXT] * 4, vocab_size=sizes.get(kind)) for kind in KINDS}


def write(net, constraint, tokenizer, seed, most=120):
    """A random text, and whether it came to its end."""
    sampling = Sampling(most, 1.5, seed=seed, stop=frozenset(tokenizer.eos_ids))
    size = net.embed.vocab_size
    prompt = [seed % size]
    ids = list(decode_tokens(net, prompt, sampling, 200, None, constraint))
    return tokenizer.decode(ids), constraint.accepts


def net_for(tokenizer):
    return tiny.tiny("gpt2", vocab_size=tokenizer.vocab_size, max_len=200)


PATTERNS = [
    r"[0-9]{4}-[0-9]{2}",
    r"(cat|the){1,3}",
    r"[a-e]+,[^a-z]",
    r"é{2}",
    r"a/e?",
    r"(t|th|the)e*n",
    r"\d{1,3}(\.\d+)?e",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_expression(tokenizers, kind, pattern):
    tokenizer = tokenizers[kind]
    net, ended = net_for(tokenizer), 0
    for seed in range(3):
        constraint = Constraint.regex(pattern, tokenizer)
        assert isinstance(constraint, Protocol)
        text, whole = write(net, constraint, tokenizer, seed)
        assert not whole or re.fullmatch(pattern, text), text
        ended += whole
    assert ended > 0


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "tall"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_json_is_what_its_schema_says(tokenizers, kind):
    tokenizer = tokenizers[kind]
    net, ended = net_for(tokenizer), 0
    for seed in range(4):
        text, whole = write(net, Constraint.schema(PERSON, tokenizer), tokenizer, seed)
        if whole:
            found = json.loads(text)
            assert set(found) == {"name", "age", "tall"}
            assert type(found["name"]) is str
            assert type(found["age"]) is int
            assert 1 <= found["age"] <= 99
            assert type(found["tall"]) is bool
            ended += 1
    assert ended > 0


@pytest.mark.parametrize("kind", KINDS)
def test_other_schemas(tokenizers, kind):
    tokenizer = tokenizers[kind]
    net = net_for(tokenizer)
    for schema, fits in [
        ({"enum": ["cat", 12, None]}, lambda value: value in ("cat", 12, None)),
        (json.dumps({"type": "boolean"}), lambda value: type(value) is bool),
        (
            {"type": "array", "items": {"type": "integer", "maximum": 50}, "maxItems": 3},
            lambda value: all(type(one) is int and one <= 50 for one in value) and len(value) < 4,
        ),
    ]:
        ended = 0
        for seed in range(3):
            text, whole = write(net, Constraint.schema(schema, tokenizer), tokenizer, seed)
            assert not whole or fits(json.loads(text)), text
            ended += whole
        assert ended > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_what_decoding_gives(tokenizers, kind):
    tokenizer = tokenizers[kind]
    pieces = pieces_of(tokenizer).of
    assert len(pieces) == tokenizer.vocab_size
    ids = tokenizer.encode(TEXT, special=False)
    text = b"".join(pieces[id] for id in ids).decode()
    assert text.removeprefix(" " if kind == "unigram" else "") == TEXT
    assert all(pieces[id] is None for id in tokenizer.special_ids)


def test_masks_say_all_that_may_come(tokenizers):
    tokenizer = tokenizers["bpe"]
    pieces = pieces_of(tokenizer).of
    constraint = Constraint.regex("the cat|to|cat", tokenizer, vocab_size=400)
    mask = constraint.mask()
    assert mask.shape == (400,)
    assert mask.dtype == torch.bool
    texts = (b"the cat", b"to", b"cat")
    fitting = {
        i for i, piece in enumerate(pieces) if piece and any(t.startswith(piece) for t in texts)
    }
    assert len(fitting) > 3
    assert set(mask.nonzero().flatten().tolist()) == fitting


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_must_come_comes_in_the_tokenisers_own_tokens(tokenizers, kind):
    tokenizer = tokenizers[kind]
    constraint = Constraint.regex("the cat", tokenizer)
    found = []
    while not constraint.done:
        (token,) = constraint.mask().nonzero().flatten().tolist()
        found.append(token)
        constraint.advance(token)
    assert constraint.accepts
    assert tokenizer.decode(found) == "the cat"
    if kind != "unigram":  # that would put a blank before it
        assert found == tokenizer.encode("the cat", special=False)


def test_a_text_may_end_where_it_is_whole(tokenizers):
    tokenizer = tokenizers["bytes"]
    constraint = Constraint.regex("a+", tokenizer)
    (end,) = tokenizer.eos_ids
    assert not constraint.mask()[end]
    constraint.advance(ord("a"))
    other = constraint.copy()
    assert constraint.accepts
    assert not constraint.done
    assert set(constraint.mask().nonzero().flatten().tolist()) == {ord("a"), end}
    constraint.advance(end)
    assert constraint.done
    assert not other.done
    other.advance(ord("a"))
    stops = Constraint.regex("a", tokenizer, stop={ord("b")})
    stops.advance(ord("a"))
    assert stops.done


def test_a_vocabulary_that_ends_no_text(tokenizers):
    """Characters have no stop token: the text ends where nothing can follow."""
    tokenizer = tokenizers["characters"]
    assert not tokenizer.eos_ids
    constraint = Constraint.regex("cat?", tokenizer)
    for letter in "ca":
        constraint.advance(tokenizer.id(letter))
    assert constraint.accepts
    assert not constraint.done
    assert constraint.mask().nonzero().flatten().tolist() == [tokenizer.id("t")]
    constraint.advance(tokenizer.id("t"))
    assert constraint.done


# --- what is refused


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "unclosed group"),
        ("a(?=b)", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"[^\s\S]", "no text that this vocabulary can write"),
        (r"a[^\s\S]b", "no text that this vocabulary can write"),
        (3, "is a text, not 3"),
    ],
)
def test_expressions_that_cannot_be(tokenizers, pattern, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        Constraint.regex(pattern, tokenizers["bytes"])


@pytest.mark.parametrize("pattern", ["q", "aq", "(the){3}q", "[xyq]{2}"])
def test_letters_that_the_vocabulary_has_not(tokenizers, pattern):
    with pytest.raises(ClearheadError, match="no text that this vocabulary can write"):
        Constraint.regex(pattern, tokenizers["characters"])
    assert Constraint.regex("aq|at", tokenizers["characters"]).mask().sum() == 1


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        (False, "satisfied by no text"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"allOf": [{"type": "string"}, {"type": "object"}]}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ("{", "is no JSON"),
        ("3", "is an object such as"),
        ([1], "is an object such as"),
    ],
)
def test_schemas_that_cannot_be(tokenizers, schema, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        Constraint.schema(schema, tokenizers["bytes"])


def test_tokens_that_do_not_fit(tokenizers):
    constraint = Constraint.regex("ab", tokenizers["bytes"])
    with pytest.raises(ClearheadError, match="does not fit the constraint"):
        constraint.advance(ord("x"))


def test_tokenisers_that_cannot_be_followed():
    words = train_tokenizer("words", [TEXT])
    with pytest.raises(ClearheadError, match="puts blanks between words by itself"):
        Constraint.regex("a", words)


def test_without_the_package(tokenizers, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (Constraint.regex, Constraint.schema):
        with pytest.raises(ClearheadError, match=r"pip install 'clearhead\[constrain\]'"):
            make("true", tokenizers["bytes"])
