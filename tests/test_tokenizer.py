"""Tokenisers trained here, what every tokeniser can do, and text from ids as they come."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from clearhead.errors import ClearheadError
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.trained import KINDS, train_tokenizer

TEXTS = [
    "To be, or not to be: that is the question.",
    "Whether 'tis nobler in the mind to suffer",
    "The slings and arrows of outrageous fortune,\n\tor to take arms!",
    "naïve café, 日本語, привет, 😀😃, e\u0301, 1234 5678",
    "the the the there then they that this those these to take to be",
] * 4
STRANGE = [
    "",
    " ",
    "\n\n  \t x \r\n",
    "To be",
    " leading and trailing ",
    "e\u0301 a\u0308\u0323",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 🇫🇷 🧑🏽‍💻",
    "\x00\x01\x1f\x7f\u200b\ufeff",
    "\ufffd replaced",
    "x" * 500,
    "<unk> <|endoftext|></s>",
    "مرحبا नमस्ते ﬁ ½",
]
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def trained(kind: str) -> Tokenizer:
    size = {"bpe": 350, "unigram": 150, "words": 40}.get(kind)
    return train_tokenizer(kind, TEXTS, size)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return trained(request.param)


BYTES, BPE, CHARACTERS = trained("bytes"), trained("bpe"), trained("characters")
UNIGRAM, WORDS = trained("unigram"), trained("words")


# -- round trips


@given(text)
@settings(max_examples=300)
def test_bytes_and_bpe_give_back_any_text(value):
    for tokenizer in (BYTES, BPE):
        assert tokenizer.decode(tokenizer.encode(value), special=True) == value


@given(st.text(st.sampled_from(sorted(set("".join(TEXTS)))), max_size=60))
def test_characters_give_back_any_text_of_theirs(value):
    ids = CHARACTERS.encode(value)
    assert CHARACTERS.decode(ids) == value
    assert len(ids) == len(value)


@pytest.mark.parametrize("value", STRANGE)
def test_strange_texts_come_back(value):
    for tokenizer in (BYTES, BPE):
        assert tokenizer.decode(tokenizer.encode(value), special=True) == value


def test_bytes_are_their_own_ids():
    assert BYTES.encode("Aé") == [65, 0xC3, 0xA9]
    assert BYTES.vocab_size == 257
    assert BYTES.eos_id == 256


def test_a_character_that_was_not_seen_is_unknown():
    assert CHARACTERS.encode("☃") == [CHARACTERS.unk_id]
    assert CHARACTERS.decode(CHARACTERS.encode("a☃b"), special=True) == "a<unk>b"
    few = train_tokenizer("characters", ["aaabbc"], vocab_size=3)
    assert [few.token(id) for id in range(few.vocab_size)] == ["<unk>", "a", "b"]


def test_words_are_words():
    ids = WORDS.encode("the question, the slings")
    assert len(ids) == 5
    assert WORDS.decode(ids[:1]) == "the"


def test_unigram_gives_back_words_it_knows():
    assert UNIGRAM.decode(UNIGRAM.encode("To be or not")) == "To be or not"


# -- training


def test_training_again_gives_the_same(tokenizer, tmp_path):
    kind = {"WordLevel": "words", "Unigram": "unigram"}.get(type(tokenizer.backend.model).__name__)
    if kind is None:
        kind = {BYTES.vocab_size: "bytes", BPE.vocab_size: "bpe"}.get(
            tokenizer.vocab_size, "characters"
        )
    assert trained(kind).backend.to_str() == tokenizer.backend.to_str()


@pytest.mark.parametrize("size", [300, 800])
def test_pieces_of_one_score_have_one_order(size):
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    first, *more = (train_tokenizer("unigram", [text], size).backend.to_str() for _ in range(6))
    assert more == [first] * 5


def test_vocab_size_is_the_size():
    assert BPE.vocab_size == 350
    assert WORDS.vocab_size <= 40
    assert UNIGRAM.vocab_size <= 150


def test_special_tokens_have_their_roles_and_a_template():
    roles = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    tokenizer = train_tokenizer(
        "bpe", TEXTS, 300, roles, extra_tokens=["<sep>"], template="<s> $A </s>"
    )
    ids = tokenizer.encode("To be<sep>")
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert ids[-2] == tokenizer.id("<sep>")
    assert tokenizer.encode("To be", special=False) == ids[1:-2]
    assert tokenizer.decode(ids) == "To be"
    assert tokenizer.decode(ids, special=True) == "<s>To be<sep></s>"
    assert tokenizer.pad_id == 0
    assert tokenizer.mask_id == tokenizer.id("<mask>")
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.max_len) == (None, None, None)
    assert tokenizer.eos_ids == (tokenizer.eos_id,)


def test_pairs_have_types_parts_and_offsets():
    roles = {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]"}
    tokenizer = train_tokenizer(
        "words",
        TEXTS,
        60,
        roles,
        template="[CLS] $A [SEP]",
        pair_template="[CLS] $A [SEP] $B:1 [SEP]:1",
    )
    pair = tokenizer.encode_pair("to be", "that is")
    assert pair.types == [0, 0, 0, 0, 1, 1, 1]
    assert pair.parts == [None, 0, 0, None, 1, 1, None]
    assert pair.offsets == [(0, 0), (0, 2), (3, 5), (0, 0), (0, 4), (5, 7), (0, 0)]
    assert pair.ids[0] == tokenizer.cls_id
    one = tokenizer.encode_with_offsets("to be", special=False)
    assert one.ids == tokenizer.encode("to be", special=False)
    assert one.offsets == [(0, 2), (3, 5)]
    words = tokenizer.encode_words(["to", "be:", "that"], special=False)
    assert words.words == [0, 1, 1, 2]


@pytest.mark.parametrize("value", ["é😀 To be", "日本語 x", " a  b"])
def test_offsets_point_into_the_text(tokenizer, value):
    found = tokenizer.encode_with_offsets(value)
    assert found.ids == tokenizer.encode(value)
    assert all(0 <= a <= b <= len(value) for a, b in found.offsets)
    if tokenizer.vocab_size == BPE.vocab_size:
        assert value.startswith("".join(value[a:b] for a, b in found.offsets[:1]))


def test_a_batch_is_its_texts(tokenizer):
    assert tokenizer.encode_batch(STRANGE) == [tokenizer.encode(value) for value in STRANGE]
    assert tokenizer.encode_batch(iter([])) == []


# -- files


def test_saved_is_loaded_and_opened_by_transformers(tokenizer, tmp_path):
    tokenizer.max_len, tokenizer.chat_template = 77, "{{ messages[0].content }}"
    tokenizer.save(tmp_path / "new" / "folder")
    again = Tokenizer.load(tmp_path / "new" / "folder")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    for value in STRANGE + TEXTS[:5]:
        assert again.encode(value) == tokenizer.encode(value) == theirs.encode(value)
        ids = tokenizer.encode(value)
        assert again.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert again.roles == tokenizer.roles
    assert again.max_len == theirs.model_max_length == 77
    assert again.chat_template == theirs.chat_template == tokenizer.chat_template
    assert (theirs.eos_token_id, theirs.unk_token_id) == (tokenizer.eos_id, tokenizer.unk_id)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    again.save(tmp_path / "new" / "folder")  # over itself
    assert Tokenizer.load(tmp_path / "new" / "folder").encode("To be") == tokenizer.encode("To be")


def test_two_languages_have_two_vocabularies(tmp_path):
    source, target = trained("bpe"), trained("characters")
    assert source.target is source
    pair = Tokenizer(source.backend, source.roles, target=target, eos_ids=[3, 5])
    pair.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode("To be") == source.encode("To be")
    assert again.target.encode("To be") == target.encode("To be")
    assert again.eos_ids == (pair.eos_id, 3, 5)
    transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_can_be_sent_to_another_process(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("To be") == tokenizer.encode("To be")
    assert again.roles == tokenizer.roles


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    BPE.save(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ClearheadError, match="cannot be saved"):
        BYTES.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


# -- text as it comes


def streamed(tokenizer: Tokenizer, ids: list[int], special: bool = False) -> list[str]:
    stream = tokenizer.decode_stream(special)
    return [*(stream.feed(id) for id in ids), stream.flush()]


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=150)
def test_a_stream_gives_what_decode_gives(seed, special):
    """For any ids, also such as no text has."""
    numbers = random.Random(seed)
    for tokenizer in (BYTES, BPE, CHARACTERS, UNIGRAM, WORDS):
        ids = [numbers.randrange(tokenizer.vocab_size + 2) for _ in range(numbers.randrange(40))]
        assert "".join(streamed(tokenizer, ids, special)) == tokenizer.decode(ids, special)


@given(text)
@settings(max_examples=150)
def test_a_stream_never_gives_half_a_character(value):
    for tokenizer in (BYTES, BPE):
        pieces = streamed(tokenizer, tokenizer.encode(value), special=True)
        assert "".join(pieces) == value
        assert "".join(pieces).count("\ufffd") == value.count("\ufffd")
        assert pieces[-1] in ("", "\ufffd")


def test_a_stream_gives_a_character_as_soon_as_it_is_whole():
    stream = BYTES.decode_stream()
    given_out = [stream.feed(byte) for byte in "a😀é".encode()]
    assert given_out == ["a", "", "", "", "😀", "", "é"]
    assert stream.flush() == ""
    assert stream.feed(*b"\xf0\x9f") == ""
    assert stream.feed(ord("x")) == "\ufffdx"
    assert stream.feed(*b"\xff\xff\xff") == "\ufffd\ufffd"
    assert stream.flush() == "\ufffd"
    assert stream.feed(*b"new") == "new"


# -- wrong use


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: train_tokenizer("bpee", TEXTS), 'Did you mean "bpe"'),
        (lambda: train_tokenizer("bpe", []), "no text"),
        (lambda: train_tokenizer("characters", ["", ""]), "no text"),
        (lambda: train_tokenizer("unigram", iter(())), "no text"),
        (lambda: train_tokenizer("words", []), "no text"),
        (lambda: train_tokenizer("bpe", TEXTS, 100), "at least 257"),
        (lambda: train_tokenizer("characters", TEXTS, 1), "no room"),
        (lambda: train_tokenizer("bytes", [], 300), "257 in all"),
        (lambda: train_tokenizer("bpe", TEXTS, -5), "vocab_size is -5"),
        (lambda: train_tokenizer("bpe", ["fine", b"bytes"]), "Text 1 is bytes"),
        (lambda: train_tokenizer("bpe", ["fine", "half \ud83d"]), "Text 1 has half a character"),
        (lambda: train_tokenizer("bpe", TEXTS, 300, {"end": "</s>"}), '"end" is no role'),
        (lambda: train_tokenizer("bpe", TEXTS, 300, {"eos": ""}), "must not be empty"),
        (lambda: train_tokenizer("bpe", TEXTS, 300, template="$A </s>"), "no token here"),
        (
            lambda: train_tokenizer("bpe", TEXTS, 300, template="<|endoftext|>"),
            "place for the text",
        ),
        (lambda: BPE.encode("half \ud83d"), "cannot be tokenised"),
        (lambda: BPE.encode_batch(["fine", "half \ud83d"]), "ud83d"),
        (lambda: BPE.encode(5), "cannot be tokenised"),
        (lambda: BPE.decode([5, -100]), "leave out padding"),
        (lambda: BPE.decode([[5, 6]]), "one sequence|whole numbers"),
        (lambda: BPE.id("<|endoftex|>"), 'Did you mean "<|endoftext|>"'),
        (lambda: BPE.token(350), "no token with id 350"),
        (lambda: BPE.token(-1), "no token with id -1"),
        (lambda: BPE.encode_words("a text"), "list of words"),
        (lambda: Tokenizer(BPE.backend, {"boss": "a"}), 'Did you mean "bos"'),
        (lambda: Tokenizer(BPE.backend, {"bos": "<nowhere>"}), "not in the vocabulary"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_use_is_explained(what, words):
    with pytest.raises(ClearheadError, match=words):
        what()


def test_a_text_alone_is_a_text_and_not_its_letters():
    assert train_tokenizer("words", "to be or not", 10).vocab_size == 6


def test_a_vocabulary_with_gaps_counts_to_its_last_id():
    backend = Backend(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert Tokenizer(backend).vocab_size == 8
    assert "b" in Tokenizer(backend)
    assert "c" not in Tokenizer(backend)
