"""Where models come from: folders of ours and of Hugging Face's, and single files.

Each reader gives a `Model` with its tokeniser and companions, and a report of what became of every
foreign key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.errors import require
from clearhead.generate.settings import FILE, check_generation, ignored_settings
from clearhead.model import Model
from clearhead.models.family import check_depth, depth
from clearhead.models.heads import HeadConfig
from clearhead.models.whisper import from_openai, openai_keys
from clearhead.text.foreign import from_gguf, from_llama2c
from clearhead.text.tiktoken import RANK_FILES, whisper_tokenizer
from clearhead.text.tokenizer import Tokenizer
from clearhead.weights.convert import Report, to_ours
from clearhead.weights.files import (
    file_kind,
    inside,
    read_json,
    read_settings,
    read_table,
    single_file,
)
from clearhead.weights.folder import (
    COMPANIONS,
    CONFIG,
    LABELS,
    WEIGHTS,
    assemble,
    load_model,
    model_inside,
)
from clearhead.weights.gguf import load_gguf
from clearhead.weights.hf import load_hf
from clearhead.weights.llama2c import load_llama2c, read_llama2c_vocab
from clearhead.weights.new_head import head_changes, put_head, seeded
from clearhead.weights.pickles import read_whisper_pt

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "source.spm",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "target.spm",
    "chat_template.jinja",
    "chat_template.json",
)

IDS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")
BEFORE = ("forced_bos_token_id", "bad_words_ids", "num_beams", "length_penalty")


def open_with_head(
    path: Path, head: Any = None, labels: Sequence[str] | None = None, seed: int | None = None
) -> tuple[Model, Report]:
    """A model from a folder or a file, with another head than its own if one is asked for.

    `head` is a kind, a table with its settings, or "none" for the bare states; None: its own.
    `labels` are the names of a classifier's labels, which say how many there are. What the old head
    has no part for is drawn from `seed`, and is named in the report.
    """
    require(not isinstance(labels, str), 'labels is a list of names: labels=["bad", "good"].')
    if labels is not None and head is not None and not isinstance(head, HeadConfig):
        table = {"kind": head} if isinstance(head, str) else head
        head = {"n_labels": len(labels)} | table if isinstance(table, dict) else table
    model, report = (read_file if path.is_file() else read_folder)(path, head, seed)
    if labels is not None:
        count = getattr(getattr(model.config, "head", None), "n_labels", 0)
        require(
            count == len(labels),
            f"{len(labels)} labels are named ({', '.join(map(str, labels))[:80]}), but the head of "
            f"this model has {count}: name as many, and ask for a head with labels "
            '(head="classification").',
        )
        model.companions[LABELS] = [str(label) for label in labels]
    return model, report


def read_folder(folder: Path, head: Any = None, seed: int | None = None) -> tuple[Model, Report]:
    """A folder that `save` wrote, a run's, a Hugging Face folder, or one with a single file."""
    folder = model_inside(folder)
    if folder.is_dir() and not (folder / CONFIG).exists():
        return read_file(single_file(folder), head, seed)
    description = read_settings(folder)
    if str(description.get("format")).startswith("clearhead/"):
        if (folder / WEIGHTS).exists():
            inside(folder, WEIGHTS)
        net, config = load_model(folder)
        companions = _companions(folder) | _own_labels(folder)
        check_generation(companions.get(FILE, {}), _written(config))
        model = Model(net, config, _tokenizer(folder), companions)
        return _with_head(model, Report(), head, seed)
    net, config, report = load_hf(folder, seed, **head_changes(head))
    companions = _companions(folder)
    names = IDS if FILE in companions else IDS + BEFORE  # older folders say all in config.json
    own = {name: description[name] for name in names if description.get(name) is not None}
    if own:
        companions[FILE] = own | companions.get(FILE, {})
    said = companions.get(FILE, {})
    check_generation(said, _written(config))
    report = replace(report, notes=(*report.notes, *ignored_settings(said)))
    if not report.drawn and (labels := _labels(description, config)):
        companions[LABELS] = labels
    return Model(
        net, config, _tokenizer(folder, str(description["model_type"])), companions
    ), report


def _with_head(model: Model, report: Report, head: Any, seed: int | None) -> tuple[Model, Report]:
    """The model with the head that was asked for; names of labels go with the labels."""
    if head is None:
        return model, report
    net, config, report = put_head(
        model.net, model.config, head_changes(head), report, seeded(seed)
    )
    gone = {LABELS} if config != model.config else set()
    companions = {name: said for name, said in model.companions.items() if name not in gone}
    return Model(net, config, model.tokenizer, companions), report


def read_file(path: Path, head: Any = None, seed: int | None = None) -> tuple[Model, Report]:
    """A GGUF file, an official Whisper .pt or a llama2.c .bin; told apart by what is in it."""
    return _with_head(*_read_file(path), head, seed)


def _read_file(path: Path) -> tuple[Model, Report]:
    kind = file_kind(path)
    if kind == "gguf":
        net, config, report, gguf = load_gguf(path)
        none = gguf.metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab")
        return Model(net, config, None if none else from_gguf(gguf.metadata)), report
    if kind == "openai":
        return _read_whisper(path)
    vocab = path.with_name("tokenizer.bin")
    _stay_inside(path.parent, vocab.name)
    net, config, report = load_llama2c(path)
    tokenizer = None
    if vocab.is_file():
        entries = read_llama2c_vocab(vocab)
        tokenizer = from_llama2c([(_text(i, piece), s) for i, (piece, s) in enumerate(entries)])
    return Model(net, config, tokenizer), report


def _labels(hf: dict[str, Any], config: Any) -> list[str]:
    """The names of a classifier's labels, where the config gives one to each."""
    count = getattr(getattr(config, "head", None), "n_labels", 0)
    named = hf.get("id2label")
    if not isinstance(named, dict) or set(named) != {str(i) for i in range(count)}:
        return []
    return [str(named[str(i)]) for i in range(count)]


def _text(index: int, piece: bytes | str) -> str:
    """A piece of llama2.c's vocabulary; its 256 bytes stand behind three special tokens."""
    if isinstance(piece, str):
        return piece
    if 3 <= index < 259 and piece in (bytes([index - 3]), chr(index - 3).encode()):
        return f"<0x{index - 3:02X}>"
    return piece.decode("utf-8", "replace")


def _read_whisper(path: Path) -> tuple[Model, Report]:
    _stay_inside(path.parent, *RANK_FILES.values())
    dims, theirs = read_whisper_pt(path)
    config = from_openai(dims)
    check_depth(config, len(theirs), str(path))
    theirs = {name: tensor.float() for name, tensor in theirs.items()}
    tensors, report, faults = to_ours(theirs, openai_keys(config), depth(config))
    net = assemble(config, tensors, faults)
    tokenizer = whisper_tokenizer(config.vocab_size, path.parent)
    return Model(net, config, tokenizer), Report(report.became, report.dropped, dict(net.ties))


def _tokenizer(folder: Path, model_type: str | None = None) -> Tokenizer | None:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    _stay_inside(folder, *TOKENIZER_FILES, *BESIDE_TOKENIZER)
    _stay_inside(folder / "target", *TOKENIZER_FILES, *BESIDE_TOKENIZER, CONFIG, root=folder)
    tokenizer = Tokenizer.load(folder, model_type)
    limit = folder / "sentence_bert_config.json"  # sentence-transformers reads less than the model
    if limit.exists():
        length = read_table(inside(folder, limit.name)).get("max_seq_length")
        require(
            length is None or (type(length) is int and length >= 2),
            f"{limit} says max_seq_length = {length!r:.40}, which must be a whole number from 2.",
        )
        tokenizer.max_len = length
    return tokenizer


def _stay_inside(folder: Path, *names: str, root: Path | None = None) -> None:
    """Refuse those of these files that are there and lead out of the model's folder."""
    for name in names:
        if (folder / name).exists():
            inside(folder, name, root)


def _written(config: Any) -> int:
    """How many tokens a model can write."""
    return getattr(config, "target_vocab_size", None) or config.vocab_size


def _companions(folder: Path) -> dict[str, Any]:
    names = [name for name in COMPANIONS if name != LABELS and (folder / name).exists()]
    return {name: read_table(inside(folder, name)) for name in names}


def _own_labels(folder: Path) -> dict[str, Any]:
    """The names of labels as we save them; in others' folders a file of that name may be
    anything.
    """
    if not (folder / LABELS).exists():
        return {}
    labels = read_json(inside(folder, LABELS))
    require(
        isinstance(labels, list) and all(isinstance(label, str) for label in labels),
        f"{folder / LABELS} must hold a list of names.",
    )
    return {LABELS: labels}
