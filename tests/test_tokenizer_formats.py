"""Tokenisers of every format give the ids that transformers and sentencepiece give.

Damaged files are clear errors.

The vocabularies are tiny and made here. Real ones are used where CLEARHEAD_WEIGHTS (or
/tmp/weights) has them.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
import random
import struct
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.tokenization_utils_base import generate_merges

from clearhead.errors import ClearheadError
from clearhead.text.foreign import from_gguf, from_llama2c, gguf_metadata
from clearhead.text.protobuf import parse_model
from clearhead.text.split import byte_level_split
from clearhead.text.tiktoken import byte_letters, from_tiktoken, whisper_specials, whisper_tokenizer
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.trained import train_tokenizer

WEIGHTS = Path(os.environ.get("CLEARHEAD_WEIGHTS", "/tmp/weights"))

TRICKY = [
    "",
    " ",
    "Hello world",
    " leading",
    "trailing ",
    "a  b   c",
    "tabs\tand\nnewlines\r\n\n\n x",
    "naïve café Über",
    "e\u0301 combining a\u0308",
    "日本語のテキスト 漢字",
    "😀 👩‍👩‍👧‍👦 🇫🇷 🧑🏽‍💻 ok",
    "control \x01\x07\x1f x",
    "\u200b\ufeff zero\u00adwidth",
    "ﬁ ligature Ⅷ ½ ①",
    "don't I'll we've HELLO's",
    "1234567890 3.14 12,000",
    "\u3000ideographic\u3000space\u00a0nbsp\u2003em",
    "مرحبا بالعالم नमस्ते",
    "x" * 120,
    "ſ ß İ ı K Å",
    "##ing #hash ####",
    "\ufffd replacement",
]
SPECIAL = [
    "<s> in </s> text <unk>x",
    "<pad><mask> [MASK] [CLS]a[SEP]",
    "a <mask> b",
    "<|endoftext|>hi<|endoftext|> there",
    "<|startoftext|>",
    "<extra_id_0> foo <extra_id_1>bar",
    "<0x0A> bytes <0x41>",
    ">>fr<< hello",
]

LINES = [
    line
    for chapter in range(30)
    for line in (
        f"Chapter {chapter}: the hill behind the harbour was green in the year {1900 + chapter}.",
        "She said that she would rather walk than wait, and didn't look back at the town.",
        "naïve café Ünïcödé, 日本語テキスト 漢字, привет мир, 😀 emoji, ½ of it.",
        f"def function_{chapter}(value): return value * {chapter} + offset[{chapter % 7}]  # note",
    )
]


def same(ours, theirs, texts) -> None:
    """Equal ids for every text, all differences listed."""
    wrong = {text: (ours(text), theirs(text)) for text in texts if ours(text) != theirs(text)}
    assert not wrong


def write(folder: Path, **files: object) -> Path:
    """A folder with these files; tables become JSON; __ in a name is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name.replace("__", ".")
        if isinstance(data, bytes):
            path.write_bytes(data)
        else:
            path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return folder


def check_save(ours: Tokenizer, folder: Path, texts) -> None:
    """Saved, it is opened with equal ids by us and by transformers."""
    ours.save(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    same(ours.encode, theirs.encode, texts)
    same(ours.encode, Tokenizer.load(folder).encode, texts)
    for role, token in ours.roles.items():
        assert getattr(theirs, f"{role}_token") == token
        assert getattr(theirs, f"{role}_token_id") == getattr(ours, f"{role}_id")


# -- vocabularies


@pytest.fixture(scope="session")
def wordpiece() -> list[str]:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        LINES,
        trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False),
    )
    vocab = backend.get_vocab()
    return sorted(vocab, key=vocab.__getitem__)


@pytest.fixture(scope="session")
def byte_level() -> dict[str, object]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    return vocab_and_merges(backend)


@pytest.fixture(scope="session")
def clip() -> dict[str, object]:
    backend = Backend(models.BPE(end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=letters, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    files = vocab_and_merges(backend)
    vocab = files["vocab__json"]
    for token in (*(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"):
        vocab.setdefault(token, len(vocab))
    return files


def vocab_and_merges(backend: Backend) -> dict[str, object]:
    model = json.loads(backend.to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
    return {"vocab__json": model["vocab"], "merges__txt": merges}


def train_spm(lines: list[str] = LINES, **options: object) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        minloglevel=2,
        **({"vocab_size": 400, "hard_vocab_limit": False} | options),
    )
    return out.getvalue()


@pytest.fixture(scope="session")
def t5_model() -> bytes:
    return train_spm(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.fixture(scope="session")
def llama_model() -> bytes:
    return train_spm(
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
    )


# -- WordPiece


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False, "model_max_length": 512},
        {"strip_accents": False, "tokenize_chinese_chars": False},
        {"unk_token": {"content": "[UNK]", "__type": "AddedToken", "normalized": False}},
    ],
)
def test_vocab_txt_is_bert(wordpiece, config, tmp_path):
    folder = write(
        tmp_path / "bert",
        vocab__txt="\n".join(wordpiece) + "\n",
        tokenizer_config__json=config | {"tokenizer_class": "BertTokenizer"},
        config__json={"model_type": "bert"},
    )
    ours = Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs, transformers.BertTokenizer)
    same(ours.encode, theirs.encode, TRICKY + SPECIAL)
    same(
        lambda text: ours.decode(ours.encode(text)),
        lambda text: theirs.decode(theirs.encode(text), skip_special_tokens=True),
        TRICKY + SPECIAL,
    )
    pair, expected = ours.encode_pair("one walk", "two"), theirs("one walk", "two")
    assert (pair.ids, pair.types) == (expected["input_ids"], expected["token_type_ids"])
    offsets = theirs("the café.", return_offsets_mapping=True)["offset_mapping"]
    assert ours.encode_with_offsets("the café.").offsets == offsets
    assert ours.mask_id == theirs.mask_token_id
    assert ours.max_len == config.get("model_max_length")
    check_save(ours, tmp_path / "saved", TRICKY + SPECIAL)


def test_vocab_txt_alone_is_enough(wordpiece, tmp_path):
    folder = write(tmp_path / "bert", vocab__txt="\n".join(wordpiece))
    theirs = transformers.BertTokenizer(vocab={token: id for id, token in enumerate(wordpiece)})
    same(Tokenizer.load(folder).encode, theirs.encode, TRICKY + SPECIAL)


# -- byte-level BPE

MASK = {"content": "<mask>", "lstrip": True, "normalized": False, "__type": "AddedToken"}
BYTE_LEVEL = {
    "gpt2": ("GPT2Tokenizer", {"add_bos_token": True}),
    "roberta": ("RobertaTokenizer", {"mask_token": MASK}),
    "bart": ("BartTokenizer", {"mask_token": MASK, "add_prefix_space": True}),
    "qwen2": ("Qwen2Tokenizer", {"additional_special_tokens": ["<unk>", "<mask>"]}),
    "gpt_neox": ("GPTNeoXTokenizer", {"pad_token": "<pad>"}),
    "whisper": ("WhisperTokenizer", {}),
}
MARKS = ("startoftranscript", "en", "transcribe", "translate", "notimestamps", "0.00")


@pytest.mark.parametrize("model_type", BYTE_LEVEL)
def test_vocab_json_and_merges_are_byte_level(byte_level, model_type, tmp_path):
    name, config = BYTE_LEVEL[model_type]
    size = len(byte_level["vocab__json"])
    added = {f"<|{mark}|>": size + place for place, mark in enumerate(MARKS)}
    folder = write(
        tmp_path / model_type,
        tokenizer_config__json=config | {"tokenizer_class": name},
        config__json={"model_type": model_type},
        **byte_level,
        **({"added_tokens__json": added} if model_type == "whisper" else {}),
    )
    ours = Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__.startswith({"bart": "Roberta"}.get(model_type, name[:4]))
    texts = [*TRICKY, *SPECIAL, "<|startoftranscript|><|en|> hi <|0.00|>"]
    same(ours.encode, theirs.encode, texts)
    same(
        lambda text: ours.decode(ours.encode(text)),
        lambda text: theirs.decode(theirs.encode(text), skip_special_tokens=True),
        texts[:-1],
    )
    pair = ours.encode_pair("one walk", "two")
    expected = theirs("one walk", "two", return_token_type_ids=True)
    assert (pair.ids, pair.types) == (expected["input_ids"], expected["token_type_ids"])
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    check_save(ours, tmp_path / "saved", texts)


def test_the_family_is_found_from_the_model_or_the_vocabulary(byte_level, clip, tmp_path):
    folder = write(tmp_path / "a", **byte_level)
    begin, end = byte_level["vocab__json"]["<s>"], byte_level["vocab__json"]["</s>"]
    guessed, told = Tokenizer.load(folder), Tokenizer.load(folder, model_type="gpt2")
    assert guessed.encode("hill") == [begin, *told.encode("hill"), end]
    assert guessed.encode("a <mask>")[-2:] == [guessed.mask_id, end]  # the blank goes with it
    write(folder, config__json={"model_type": "gpt2"})
    assert Tokenizer.load(folder).encode("hill") == told.encode("hill")
    assert Tokenizer.load(write(tmp_path / "b", **clip)).roles["bos"] == "<|startoftext|>"
    with pytest.raises(ClearheadError, match=r'"robreta" .* Did you mean "roberta"'):
        Tokenizer.load(folder, model_type="robreta")


def test_clip_is_in_small_letters(clip, tmp_path):
    folder = write(
        tmp_path / "clip",
        tokenizer_config__json={"tokenizer_class": "CLIPTokenizer", "model_max_length": 77},
        config__json={"model_type": "clip"},
        **clip,
    )
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs, transformers.CLIPTokenizer)
    texts = TRICKY + SPECIAL
    same(ours.encode, theirs.encode, texts)
    theirs.save_pretrained(tmp_path / "theirs")
    for tokenizer in (ours, Tokenizer.load(tmp_path / "theirs")):
        same(
            lambda text, own=tokenizer: own.decode(own.encode(text)),
            lambda text: theirs.decode(theirs.encode(text), skip_special_tokens=True),
            texts,
        )
    assert ours.max_len == 77
    check_save(ours, tmp_path / "saved", texts)


# -- sentencepiece


def test_a_t5_model_is_sentencepieces(t5_model, tmp_path):
    folder = write(
        tmp_path / "t5",
        spiece__model=t5_model,
        tokenizer_config__json={"tokenizer_class": "T5Tokenizer", "extra_ids": 10},
        config__json={"model_type": "t5"},
    )
    ours = Tokenizer.load(folder)
    spm = sentencepiece.SentencePieceProcessor(model_proto=t5_model)
    same(lambda text: ours.encode(text, special=False), spm.encode, TRICKY)
    assert ours.encode("hill") == [*spm.encode("hill"), ours.eos_id]
    assert ours.id("<extra_id_9>") == len(spm)
    assert ours.id("<extra_id_0>") == ours.vocab_size - 1
    model = parse_model(t5_model)
    theirs = transformers.T5Tokenizer(
        vocab=[(piece.text, piece.score) for piece in model.pieces]
        + [(f"<extra_id_{number}>", 0.0) for number in reversed(range(10))],
        _spm_precompiled_charsmap=model.charsmap,
        extra_ids=10,
    )
    same(ours.encode, theirs.encode, TRICKY + SPECIAL)
    same(
        lambda text: ours.decode(ours.encode(text)),
        lambda text: theirs.decode(theirs.encode(text), skip_special_tokens=True),
        TRICKY + SPECIAL,
    )
    check_save(ours, tmp_path / "saved", TRICKY + SPECIAL)


@pytest.mark.parametrize("legacy", [None, False])
def test_a_llama_model_is_sentencepieces(llama_model, legacy, tmp_path):
    """Exactly, as the model was trained; or as transformers has it where a file says so."""
    config = {"tokenizer_class": "LlamaTokenizer"}
    config |= {} if legacy is None else {"legacy": legacy}
    folder = write(tmp_path / "llama", tokenizer__model=llama_model, tokenizer_config__json=config)
    ours = Tokenizer.load(folder)
    spm = sentencepiece.SentencePieceProcessor(model_proto=llama_model)
    texts = [*TRICKY, "▁ written ▁▁ out", "<0x0A> bytes"]
    if legacy is None:
        same(lambda text: ours.encode(text, special=False), spm.encode, texts)
        same(lambda text: ours.decode(ours.encode(text)), lambda text: text, texts[:-2])
    else:
        vocab = {spm.id_to_piece(id): id for id in range(len(spm))}
        theirs = transformers.LlamaTokenizer(
            vocab=vocab, merges=generate_merges(vocab), add_bos_token=True
        )
        same(ours.encode, theirs.encode, texts + SPECIAL)
    assert ours.encode("hill")[0] == ours.bos_id == 1
    assert (ours.eos_id, ours.unk_id, ours.pad_id) == (2, 0, None)
    check_save(ours, tmp_path / "saved", texts + SPECIAL)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {"model_type": "unigram", "byte_fallback": True, "vocab_size": 600},
        {"model_type": "unigram", "normalization_rule_name": "nfkc_cf"},
        {"model_type": "unigram", "split_by_whitespace": False},
        {
            "model_type": "bpe",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "normalization_rule_name": "identity",
        },
    ],
    ids=["bpe", "bytes", "folded", "over words", "no prefix"],
)
def test_any_model_is_sentencepieces(options, tmp_path):
    data = train_spm(**options)
    ours = Tokenizer.load(write(tmp_path / "spm", a__spm=data))
    spm = sentencepiece.SentencePieceProcessor(model_proto=data)
    same(ours.encode, spm.encode, TRICKY)
    check_save(ours, tmp_path / "saved", TRICKY)


def test_user_defined_pieces_are_never_cut(tmp_path):
    data = train_spm(model_type="bpe", user_defined_symbols=["<sep>", "foo bar"])
    ours = Tokenizer.load(write(tmp_path, a__model=data))
    spm = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert ours.id("<sep>") in ours.encode("hill<sep>hill")
    assert ours.id("<sep>") == spm.piece_to_id("<sep>")
    assert ours.decode(ours.encode("a<sep>")) != "a"  # not special, so it is kept


@pytest.fixture(scope="session")
def marian(tmp_path_factory) -> Path:
    source = train_spm([*LINES[::4], *LINES[1::4]], model_type="unigram", vocab_size=300)
    target = train_spm([*LINES[1::4], *LINES[2::4]], model_type="unigram", vocab_size=200)
    pieces = set()
    for data in (source, target):
        spm = sentencepiece.SentencePieceProcessor(model_proto=data)
        pieces |= {spm.id_to_piece(id) for id in range(3, len(spm))}
    kept = [piece for place, piece in enumerate(sorted(pieces)) if place % 17]
    names = ["</s>", "<unk>", *kept, ">>fr<<", "<pad>"]
    return write(
        tmp_path_factory.mktemp("marian") / "m",
        source__spm=source,
        target__spm=target,
        vocab__json={name: id for id, name in enumerate(names)},
        tokenizer_config__json={"source_lang": "en", "target_lang": "fr"},
        config__json={"model_type": "marian"},
    )


@pytest.mark.filterwarnings("ignore:Recommended")
def test_marian_has_two_models_and_one_vocabulary(marian, tmp_path):
    ours, theirs = Tokenizer.load(marian), transformers.MarianTokenizer.from_pretrained(marian)
    texts = [*TRICKY, *SPECIAL, ">>de<< no such language", "a >>fr<< inside"]
    same(ours.encode, theirs.encode, texts)
    same(ours.target.encode, lambda text: theirs(text_target=text)["input_ids"], texts)
    assert ours.encode("café 日本") != ours.target.encode("café 日本")
    same(
        lambda text: ours.target.decode(theirs.encode(text)),
        lambda text: theirs.decode(theirs.encode(text), skip_special_tokens=True),
        texts,
    )
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    found = ours.encode_with_offsets(">>fr<< the hill")
    assert found.offsets[0] == (0, 6)
    assert found.offsets[-1] == (0, 0)
    assert ">>fr<< the hill"[slice(*found.offsets[-2])].strip() in "the hill"
    ours.save(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, transformers.MarianTokenizer)
    same(ours.encode, again.encode, texts)
    same(ours.target.encode, Tokenizer.load(tmp_path).target.encode, texts)
    with pytest.raises(ClearheadError, match="one text at a time"):
        ours.encode_pair("a", "b")


# -- what stands beside a vocabulary


def test_the_files_beside_a_tokenizer_json_are_honoured(byte_level, tmp_path):
    model = models.BPE(
        byte_level["vocab__json"],
        [tuple(line.split()) for line in byte_level["merges__txt"].splitlines()[1:]],
    )
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    size = backend.get_vocab_size()
    folder = write(
        tmp_path / "m",
        tokenizer__json=backend.to_str(),
        tokenizer_config__json={
            "eos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
            "pad_token": "[PAD]",
            "model_max_length": 1e30,
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": "{{ messages[0].role }}"},
            ],
            "additional_special_tokens": ["<mask>"],
            "added_tokens_decoder": {str(size + 1): {"content": "<new>", "special": False}}
            | {str(size): {"content": "[PAD]", "special": True}},
        },
        special_tokens_map__json={"bos_token": "<s>", "eos_token": "<unk>"},  # out of date
        generation_config__json={"eos_token_id": [5, 3]},
    )
    ours = Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    same(ours.encode, theirs.encode, [*TRICKY, *SPECIAL, "a<new>b[PAD]", "x " * 50])
    assert ours.roles == {"eos": "<|endoftext|>", "pad": "[PAD]"}
    assert ours.pad_id == size == theirs.pad_token_id
    assert ours.vocab_size == size + 2
    assert ours.eos_ids == (5, 3)
    assert ours.max_len is None
    assert ours.chat([{"role": "user", "content": "x"}]) == "user"
    assert "<new>" in ours.decode(ours.encode("a<new>"))
    config = {"eos_token": "<unk>", "pad_token": "<pad>"}
    added = {"[PAD]": size, "<new>": size + 1}
    write(folder, tokenizer_config__json=config, added_tokens__json=added)
    write(folder, special_tokens_map__json={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.roles == {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    same(ours.encode, theirs.encode, [*TRICKY, *SPECIAL, "a<new>b[PAD]"])
    write(folder, chat_template__jinja="{{ messages[0].content }}")
    assert Tokenizer.load(folder).chat([{"role": "user", "content": "x"}]) == "x"


def test_a_tokenizer_json_alone_has_roles_by_their_names(byte_level, tmp_path):
    source = Tokenizer.load(write(tmp_path / "a", **byte_level))
    folder = write(tmp_path / "b", tokenizer__json=source.backend.to_str())
    alone = Tokenizer.load(folder)
    assert (alone.bos_id, alone.eos_id, alone.pad_id) == (
        source.bos_id,
        source.eos_id,
        source.pad_id,
    )
    write(folder, config__json={"model_type": "x", "eos_token_id": alone.pad_id})
    assert Tokenizer.load(folder).eos_id == alone.pad_id
    assert Tokenizer.load(folder).eos_ids == (alone.pad_id,)


# -- GGUF, llama2.c, tiktoken


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "llama3", "megrez"])
def test_text_is_cut_as_transformers_cuts_it_for_gguf(name):
    pattern = GGUF_PRE_TOKENIZER_SPLITS[name]
    theirs = Backend(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    same(
        byte_level_split(name).pre_tokenize_str,
        theirs.pre_tokenizer.pre_tokenize_str,
        [*TRICKY, *LINES[:8]],
    )


def test_digits_are_parted_where_the_name_says_so():
    letters = {v: k for k, v in byte_letters().items()}

    def cuts(name: str, text: str) -> list[str]:
        found = byte_level_split(name).pre_tokenize_str(text)
        return [bytes(letters[c] for c in piece).decode() for piece, _ in found]

    assert cuts("gpt-2", "In 1234, x") == ["In", " 1234", ",", " x"]
    assert cuts("smollm", "In 1234, x") == ["In", " ", "1", "2", "3", "4", ",", " x"]
    assert cuts("llama-bpe", "In 1234, x") == ["In", " ", "123", "4", ",", " x"]
    assert cuts("qwen2", "In 1234, x") == ["In", " ", "1", "2", "3", "4", ",", " x"]
    assert cuts("default", "In 1234, x") == ["In", " ", "123", "4", ",", " x"]
    with pytest.raises(ClearheadError, match='Did you mean "qwen2"'):
        byte_level_split("qwen22")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_byte_level_goes_through_gguf(byte_level, pre):
    vocab = byte_level["vocab__json"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [3 if token.startswith("<") and token.endswith(">") else 1 for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": byte_level["merges__txt"].splitlines()[1:],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
        "tokenizer.ggml.eot_token_id": vocab["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": vocab["<pad>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}",
    }
    tokenizer = from_gguf(metadata)
    assert tokenizer.encode("hill")[0] == tokenizer.bos_id == vocab["<s>"]
    assert tokenizer.eos_ids == (vocab["</s>"], vocab["<|endoftext|>"])
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == "<s>"
    same(
        lambda text: tokenizer.decode(tokenizer.encode(text), special=True),
        lambda text: "<s>" + text,
        [text for text in TRICKY if pre != "qwen2" or unicodedata.is_normalized("NFC", text)],
    )
    written = gguf_metadata(tokenizer)
    assert written | {"tokenizer.ggml.add_eos_token": None} == metadata | {
        "tokenizer.ggml.add_eos_token": None
    }
    same(from_gguf(written).encode, tokenizer.encode, TRICKY + SPECIAL)
    padded = gguf_metadata(tokenizer, vocab_size=len(tokens) + 3)
    assert padded["tokenizer.ggml.tokens"][-1] == f"[PAD{len(tokens) + 2}]"
    assert from_gguf(padded).encode("hill") == tokenizer.encode("hill")
    with pytest.raises(ClearheadError, match="do not belong together"):
        gguf_metadata(tokenizer, vocab_size=5)


def llama2c(entries: list[tuple[str, float]], text: str) -> list[int]:
    """The encoder of llama2.c's run.c, line by line."""
    ids = {token: id for id, (token, _) in enumerate(entries)}
    tokens = [1]
    if text:
        tokens.append(ids[" "])
    for letter in text:
        tokens += [ids[letter]] if letter in ids else [byte + 3 for byte in letter.encode()]
    while True:
        best, where, which = -1e10, -1, -1
        for place, (a, b) in enumerate(itertools.pairwise(tokens)):
            merged = ids.get(entries[a][0] + entries[b][0])
            if merged is not None and entries[merged][1] > best:
                best, where, which = entries[merged][1], place, merged
        if where < 0:
            return tokens
        tokens[where : where + 2] = [which]


def test_llama2c_and_gguf_merge_by_scores(llama_model, tmp_path):
    spm = sentencepiece.SentencePieceProcessor(model_proto=llama_model)
    entries = [
        (spm.id_to_piece(id).replace("\u2581", " "), spm.get_score(id)) for id in range(len(spm))
    ]
    entries[1:3] = [("\n<s>\n", 0.0), ("\n</s>\n", 0.0)]
    ours = from_llama2c(entries)
    same(ours.encode, lambda text: llama2c(entries, text), TRICKY)
    same(lambda text: ours.encode(text, special=False), spm.encode, TRICKY)
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    raw = [
        (chr(id - 3), 0.0) if 3 <= id < 259 else entry for id, entry in enumerate(entries)
    ]  # older files have the bytes themselves
    same(from_llama2c(raw).encode, ours.encode, TRICKY)
    metadata = gguf_metadata(ours)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    again = from_gguf(metadata)
    same(again.encode, ours.encode, TRICKY + SPECIAL)
    del metadata["tokenizer.ggml.token_type"]
    same(from_gguf(metadata).encode, ours.encode, TRICKY)
    check_save(ours, tmp_path, TRICKY + SPECIAL)


def test_gguf_export_says_what_it_cannot_do():
    with pytest.raises(ClearheadError, match="not Unigram"):
        gguf_metadata(train_tokenizer("unigram", LINES[:40], 100))
    with pytest.raises(ClearheadError, match="no name for the way"):
        gguf_metadata(train_tokenizer("bytes", []))
    written = gguf_metadata(train_tokenizer("bpe", LINES, 300))
    assert written["tokenizer.ggml.pre"] == "gpt-2"


def ranks(byte_level) -> list[bytes]:
    letters = {letter: byte for byte, letter in byte_letters().items()}
    vocab = byte_level["vocab__json"]
    tokens = [token for token in sorted(vocab, key=vocab.__getitem__) if token[0] != "<"]
    found = [bytes(letters[letter] for letter in token) for token in tokens]
    return [*found, b"<"] if b"<" not in found else found


def test_a_rank_file_is_byte_level_bpe(byte_level, tmp_path):
    tokens = ranks(byte_level)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path = tmp_path / "x.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    ours = from_tiktoken(path, ["<|endoftext|>", "<|a|>"])
    letters = byte_letters()
    vocab = {"".join(letters[byte] for byte in token): id for id, token in enumerate(tokens)}
    merges = [tuple(line.split()) for line in byte_level["merges__txt"].splitlines()[1:]]
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    same(
        ours.encode,
        lambda text: backend.encode(text).ids,
        [t for t in TRICKY + SPECIAL if "<|" not in t],
    )
    assert ours.encode("<|a|>") == [len(tokens) + 1]
    assert ours.eos_id == len(tokens)
    check_save(ours, tmp_path / "saved", TRICKY + SPECIAL)


def test_whispers_special_tokens_are_in_order():
    english, many, more = (whisper_specials(size) for size in (51864, 51865, 51866))
    assert [len(english), len(many), len(more)] == [51864 - 50256, 51865 - 50257, 51866 - 50257]
    assert english == many
    ids = {token: 50256 + place for place, token in enumerate(english)}
    assert ids["<|endoftext|>"] == 50256
    assert ids["<|startoftranscript|>"] == 50257
    assert ids["<|en|>"] == 50258
    assert ids["<|notimestamps|>"] == 50362
    assert (ids["<|0.00|>"], ids["<|30.00|>"]) == (50363, 51863)
    assert more.index("<|yue|>") == many.index("<|translate|>")
    with pytest.raises(ClearheadError, match="No Whisper model has 7 tokens"):
        whisper_specials(7)


# -- streams, for every kind of decoder


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_a_stream_gives_what_decode_gives(streaming, seed, special):
    numbers = random.Random(seed)
    for tokenizer in streaming:
        ids = [numbers.randrange(tokenizer.vocab_size + 1) for _ in range(numbers.randrange(40))]
        stream = tokenizer.decode_stream(special)
        pieces = [*(stream.feed(id) for id in ids), stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, special)


@pytest.fixture(scope="session")
def streaming(wordpiece, byte_level, clip, t5_model, llama_model, marian, tmp_path_factory):
    place = tmp_path_factory.mktemp("streaming")
    folders = [
        write(place / "bert", vocab__txt="\n".join(wordpiece)),
        write(place / "gpt2", config__json={"model_type": "gpt2"}, **byte_level),
        write(place / "clip", **clip),
        write(place / "t5", spiece__model=t5_model, config__json={"model_type": "t5"}),
        write(place / "llama", tokenizer__model=llama_model, config__json={"model_type": "llama"}),
        marian,
    ]
    return [Tokenizer.load(folder) for folder in folders]


def test_a_stream_never_gives_half_a_character(streaming):
    for tokenizer in streaming:
        for text in TRICKY:
            ids = tokenizer.encode(text)
            stream = tokenizer.decode_stream()
            pieces = [stream.feed(id) for id in ids]
            whole = tokenizer.decode(ids)
            assert "".join(pieces).count("\ufffd") <= whole.count("\ufffd")
            assert "".join([*pieces, stream.flush()]) == whole


def test_a_stream_behind_a_prompt_keeps_the_blank_between(streaming):
    for tokenizer in streaming:
        before = tokenizer.encode("the quick brown", special=False)
        ids = tokenizer.encode("the quick brown fox jumps", special=False)
        if ids[: len(before)] != before:
            continue  # this vocabulary joins over the cut
        stream = tokenizer.decode_stream()
        stream.follow(*before[-4:])
        found = stream.feed(*ids[len(before) :]) + stream.flush()
        assert tokenizer.decode(before) + found == tokenizer.decode(ids)


# -- damaged files

GOOD_VOCAB = {"a": 0, "b": 1, "ab": 2}
MERGES = "#version: 0.2\na b\n"
PIECE = b"\x0a\x0b\x0a\x05<unk>\x18\x02"  # not what its length says


def spm_pieces(*pieces: tuple[bytes, int]) -> bytes:
    out = b""
    for text, kind in pieces:
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", 0.0)
        body += b"\x18" + bytes([kind])
        out += b"\x0a" + bytes([len(body)]) + body
    return out


UNK = (b"<unk>", 2)
DAMAGED = {
    "nothing": ({}, "has no tokeniser"),
    "json cut off": ({"tokenizer__json": '{"version": "1.0", "model": {'}, "cannot be read"),
    "json of something else": ({"tokenizer__json": {"a": 1}}, "cannot be read"),
    "json list": ({"tokenizer__json": "[]"}, "cannot be read"),
    "json not utf-8": ({"tokenizer__json": b"\xff\xfe{}"}, "cannot be read"),
    "json unknown model": ({"tokenizer__json": {"model": {"type": "Magic"}}}, "cannot be read"),
    "json deep": ({"tokenizer__json": '{"model":' + "[" * 99999}, "cannot be read"),
    "json merges": (
        {"tokenizer__json": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}},
        "out of vocabulary",
    ),
    "config not a table": (
        {"vocab__txt": "[UNK]\n[CLS]\n[SEP]", "tokenizer_config__json": "[1]"},
        "must hold a JSON table",
    ),
    "config cut off": (
        {"vocab__txt": "[UNK]\n[CLS]\n[SEP]", "tokenizer_config__json": '{"a'},
        "cannot be read as JSON",
    ),
    "config deep": (
        {"vocab__txt": "[UNK]\n[CLS]\n[SEP]", "tokenizer_config__json": "[" * 99999},
        "cannot be read as JSON",
    ),
    "token a number": (
        {"vocab__txt": "[UNK]\n[CLS]\n[SEP]", "tokenizer_config__json": {"unk_token": 5}},
        "unk_token is 5",
    ),
    "vocab.txt twice": ({"vocab__txt": "[UNK]\n[CLS]\n[SEP]\nx\nx\n"}, "lines 4 and 5"),
    "vocab.txt empty": ({"vocab__txt": ""}, "empty"),
    "vocab.txt other": ({"vocab__txt": "one\ntwo\n"}, r'no "\[UNK\]"'),
    "vocab.txt latin-1": ({"vocab__txt": "[UNK]\né".encode("latin-1")}, "not UTF-8"),
    "vocab.txt class": (
        {"vocab__txt": "[UNK]", "tokenizer_config__json": {"tokenizer_class": "BortTokenizer"}},
        'Did you mean "bert"',
    ),
    "no merges": ({"vocab__json": GOOD_VOCAB}, "no merges.txt"),
    "merge unknown": ({"vocab__json": GOOD_VOCAB, "merges__txt": "a b\nab c\n"}, 'line 2: "c"'),
    "merge makes unknown": ({"vocab__json": GOOD_VOCAB, "merges__txt": "b a\n"}, 'line 1: "ba"'),
    "merge of three": ({"vocab__json": GOOD_VOCAB, "merges__txt": "a b c\n"}, "not two tokens"),
    "merges utf-16": ({"vocab__json": GOOD_VOCAB, "merges__txt": MERGES.encode("utf-16")}, "UTF-8"),
    "vocab.json list": ({"vocab__json": ["a"], "merges__txt": MERGES}, "table of tokens"),
    "vocab.json id": ({"vocab__json": {"a": "0"}, "merges__txt": MERGES}, "whole number"),
    "vocab.json negative": ({"vocab__json": {"a": -1}, "merges__txt": MERGES}, "whole number"),
    "vocab.json huge": ({"vocab__json": {"a": 2**40}, "merges__txt": MERGES}, "whole number"),
    "vocab.json twice": ({"vocab__json": {"a": 1, "b": 1}, "merges__txt": MERGES}, "same id"),
    "added elsewhere": (
        {"vocab__json": GOOD_VOCAB, "merges__txt": MERGES, "added_tokens__json": {"<x>": 70}},
        '"<x>" has id 70',
    ),
    "added text": (
        {"vocab__json": GOOD_VOCAB, "merges__txt": MERGES, "added_tokens__json": {"<x>": "3"}},
        "whole number",
    ),
    "model cut off": ({"a__model": spm_pieces(UNK, (b"a", 1))[:-3]}, "not a whole sentencepiece"),
    "model empty": ({"a__model": b""}, "no pieces"),
    "model text": ({"a__model": b"not a model at all"}, "not a whole sentencepiece"),
    "model length": ({"a__model": b"\x0a\xff\xff\xff\xff\xff\x7f"}, "only 0 are left"),
    "model number": ({"a__model": b"\x08" + b"\xff" * 20}, "more than ten bytes"),
    "model group": ({"a__model": b"\x0b"}, "wire type 3"),
    "model field 0": ({"a__model": b"\x02\x01a"}, "field number 0"),
    "model not utf-8": ({"a__model": spm_pieces(UNK, (b"\xff\xfe", 1))}, "not UTF-8"),
    "model twice": ({"a__model": spm_pieces(UNK, (b"a", 1), (b"a", 1))}, "twice"),
    "model no unknown": ({"a__model": spm_pieces((b"a", 1))}, "unknown pieces"),
    "model of words": (
        {"a__model": spm_pieces(UNK) + b"\x12\x02\x18\x03"},
        "algorithm is number 3",
    ),
    "model charsmap": (
        {"a__model": spm_pieces(UNK) + b"\x1a\x05\x12\x03abc"},
        "table of characters",
    ),
    "model piece a number": ({"a__model": b"\x08\x05"}, "bytes were expected"),
    "model class": (
        {"a__model": spm_pieces(UNK), "tokenizer_config__json": {"tokenizer_class": "T6Tokenizer"}},
        'Did you mean "t5"',
    ),
    "model score": ({"a__model": PIECE}, "not a whole sentencepiece"),
    "marian target": ({"source__spm": spm_pieces(UNK), "vocab__json": GOOD_VOCAB}, "no target.spm"),
    "marian vocab": (
        {"source__spm": spm_pieces(UNK), "target__spm": spm_pieces(UNK), "vocab__json": GOOD_VOCAB},
        "not a Marian vocabulary",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_clear_errors(name, tmp_path):
    files, words = DAMAGED[name]
    with pytest.raises(ClearheadError, match=words):
        Tokenizer.load(write(tmp_path / "damaged", **files))


def test_a_table_of_characters_that_points_nowhere_is_a_clear_error(tmp_path):
    """It is not seen when the file is read; the Rust code panics when it is used."""
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.normalizer = normalizers.Precompiled(b"\x04\0\0\0abcd\0\0")
    ours = Tokenizer.load(write(tmp_path, tokenizer__json=backend.to_str()))
    for use in (lambda: ours.encode("hello"), lambda: ours.encode_batch(["hello"])):
        with pytest.raises(ClearheadError, match="the tokeniser's files are damaged"):
            use()


def test_no_folder_and_a_file_are_clear_errors(tmp_path):
    with pytest.raises(ClearheadError, match="no folder"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ClearheadError, match="is a file"):
        Tokenizer.load(tmp_path / "file")


@given(st.data())
@settings(max_examples=150)
def test_a_model_with_changed_bytes_is_read_or_refused(llama_model, data):
    """Never another error, never more memory than the file is worth."""
    changed = bytearray(llama_model)
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ClearheadError):
        parse_model(bytes(changed[: data.draw(st.integers(0, len(changed)))]))


GGUF = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "gpt3"}, 'Did you mean "gpt2"'),
        ({"model": None}, 'of kind "None"'),
        ({"pre": "nonsense"}, "not known"),
        ({"tokens": None}, "no tokens"),
        ({"tokens": []}, "no tokens"),
        ({"tokens": ["a", 5]}, "list of str"),
        ({"tokens": ["a", "b", "ab", "a"]}, "twice"),
        ({"token_type": [1, 1]}, "3 tokens but 2 of token_type"),
        ({"merges": None}, "no merges"),
        ({"merges": ["a c"]}, "Merge 0"),
        ({"merges": ["ab"]}, "Merge 0"),
        ({"model": "llama"}, "no scores"),
        ({"model": "llama", "scores": [0.0]}, "3 tokens but 1 of scores"),
    ],
)
def test_damaged_gguf_metadata_is_a_clear_error(changes, words):
    changed = GGUF | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(ClearheadError, match=words):
        from_gguf({key: value for key, value in changed.items() if value is not None})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "lacks 256"),
        ("YQ== 0\nYg== 2\n", "line 2"),
        ("YQ== 0\nYQ== 1\n", "line 2"),
        ("!!! 0\n", "line 1"),
        ("YQ==\n", "line 1"),
        ("YQ== x\n", "line 1"),
    ],
)
def test_a_damaged_rank_file_is_a_clear_error(lines, words, tmp_path):
    (tmp_path / "gpt2.tiktoken").write_text(lines)
    with pytest.raises(ClearheadError, match=words):
        whisper_tokenizer(51864, tmp_path)


def test_a_missing_rank_file_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("clearhead.text.tiktoken.PACKAGES", ())
    with pytest.raises(ClearheadError, match="pip download --no-deps mlx-whisper"):
        whisper_tokenizer(51864, tmp_path)


def test_too_few_llama2c_entries_are_a_clear_error():
    with pytest.raises(ClearheadError, match="at least 4"):
        from_llama2c([("<unk>", 0.0)])


# -- real ones


def needs(path: str):
    return pytest.mark.skipif(not list(WEIGHTS.glob(path)), reason=f"needs {WEIGHTS / path}")


@needs("minilm/tokenizer.json")
@pytest.mark.usefixtures("unchecked")
def test_minilm_in_both_its_formats(tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(WEIGHTS / "minilm")
    ours = Tokenizer.load(WEIGHTS / "minilm")
    same(ours.encode, theirs.encode, TRICKY + SPECIAL)
    assert ours.max_len == 512
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((WEIGHTS / "minilm" / name).read_bytes())
    same(Tokenizer.load(tmp_path).encode, theirs.encode, TRICKY + SPECIAL)


@needs("stories15m/tokenizer.bin")
@pytest.mark.usefixtures("unchecked")
def test_stories_begin_as_llama_2_writes_them():
    data, at, entries = (WEIGHTS / "stories15m/tokenizer.bin").read_bytes(), 4, []
    while at < len(data):
        score, size = struct.unpack_from("<fi", data, at)
        entries.append((data[at + 8 : at + 8 + size].decode(), score))
        at += 8 + size
    ours = from_llama2c(entries)
    assert ours.encode("Once upon a time") == [1, 9038, 2501, 263, 931]
    same(lambda text: ours.decode(ours.encode(text)), lambda text: text, TRICKY)


@needs("smollm2/*.gguf")
@pytest.mark.usefixtures("unchecked")
def test_smollm2_from_its_gguf():
    (path,) = WEIGHTS.glob("smollm2/*.gguf")
    names = ("tokens", "merges", "token_type")
    metadata, _ = read_gguf_metadata(str(path), tuple(f"tokenizer.ggml.{name}" for name in names))
    ours = from_gguf(metadata)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    digits = [text for text in TRICKY if "Ⅷ" not in text]  # which theirs does not part
    same(ours.encode, lambda text: theirs.encode(text).ids, digits + SPECIAL)
    text = ours.chat([{"role": "user", "content": "Hello"}])
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert ours.encode(text, special=False)[:2] == [ours.id("<|im_start|>"), 9690]
    written = gguf_metadata(ours)
    assert all(written[key] == metadata[key] for key in written if key in metadata)


@needs("whisper/gpt2.tiktoken")
@pytest.mark.usefixtures("unchecked")
def test_whispers_vocabulary_is_gpt_2s(tmp_path):
    ours = whisper_tokenizer(51864, WEIGHTS / "whisper")
    assert ours.encode("Hello world", special=False) == [15496, 995]
    assert ours.encode(" Hello world") == [50257, 50362, 18435, 995, 50256]
    same(lambda text: ours.decode(ours.encode(text)), lambda text: text, TRICKY)
    ours.save(tmp_path)
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path)
    same(ours.encode, theirs.encode, TRICKY)
