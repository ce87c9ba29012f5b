"""Byte-level BPE from vocab.json and merges.txt: GPT-2 and its kin.

Radford et al. 2019, section 2.2; Sennrich et al. 2016.

The text is bytes, each written as one printable character, and pairs of neighbours are merged in
the order of merges.txt. The families differ in the tokens around a text and in how they cut it:

    gpt2 gpt_neox qwen2    text
    roberta bart           <s> text </s>
    whisper                <|startoftranscript|> <|notimestamps|> text <|endoftext|>
    clip                   <|startoftext|> text <|endoftext|>, in small letters
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.special import SideFiles, add_tokens, read_json, read_text
from clearhead.text.split import byte_level_split, composing

_END = "<|endoftext|>"
_CLIP_CUTS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


@dataclass(frozen=True)
class Kind:
    """One family of byte-level tokenisers."""

    roles: dict[str, str]
    """Role -> token, where no file says otherwise."""
    around: Callable[[Backend, dict[str, str], dict[str, Any]], Any]
    """Makes what puts special tokens around a text, from tokeniser, roles and config."""
    split: str = "gpt-2"
    """How the text is cut, by name."""
    flags: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Role -> flags of that token: RoBERTa's mask takes the blank before it along."""


def read_byte_level(folder: Path, side: SideFiles) -> tuple[Backend, dict[str, str]]:
    """The tokeniser of a folder with vocab.json and merges.txt, and its roles."""
    vocab = read_vocab_json(folder / "vocab.json")
    name = kind_name(side, vocab)
    suffix = "</w>" if name == "clip" else ""
    merges = read_merges(folder / "merges.txt", vocab)
    kind = KINDS[name]
    roles = kind.roles | {role: token.content for role, token in side.roles.items()}
    if name in ("gpt2", "gpt_neox", "qwen2"):  # theirs is only a default, so it may be missing
        roles = {
            role: token
            for role, token in roles.items()
            if token in vocab or role in side.roles or token in _added(side)
        }
    backend = Backend(
        models.BPE(
            vocab,
            merges,
            unk_token=roles.get("unk") if name == "clip" else None,
            end_of_word_suffix=suffix,
            continuing_subword_prefix="",
        )
    )
    _pipeline(backend, name, side.config)
    add_tokens(backend, side)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens(
        [
            AddedToken(token, special=True, normalized=False, **kind.flags.get(role, {}))
            for role, token in roles.items()
            if token not in known
        ]
    )
    backend.post_processor = kind.around(backend, roles, side.config)
    return backend, roles


def kind_name(side: SideFiles, vocab: dict[str, int]) -> str:
    """Which of KINDS a folder is, by its class, its model's type, or its vocabulary."""
    said = side.kind()
    if said:
        name = ALIASES.get(said, said)
        require(
            name in KINDS,
            f'The tokeniser "{said}" with vocab.json and merges.txt is not known.'
            f"{did_you_mean(said, [*KINDS, *ALIASES])} Known: {', '.join([*KINDS, *ALIASES])}. "
            "Save it with transformers as tokenizer.json, which is read as it stands.",
        )
        return name
    if "<|startoftranscript|>" in _added(side):
        return "whisper"
    if "<|startoftext|>" in vocab and any(token.endswith("</w>") for token in vocab):
        return "clip"
    return "roberta" if {"<s>", "</s>", "<mask>"} <= vocab.keys() else "gpt2"


def read_vocab_json(path: Path) -> dict[str, int]:
    """Token -> id."""
    vocab = read_json(path)
    require(
        isinstance(vocab, dict) and bool(vocab), f"{path} must be a table of tokens and their ids."
    )
    seen: dict[int, str] = {}
    for token, id in vocab.items():
        require(
            type(id) is int and 0 <= id < 1 << 31,
            f'{path} gives "{token}" the id {id!r}: an id is a whole number from 0.',
        )
        require(id not in seen, f'{path} gives "{token}" and "{seen.get(id)}" the same id, {id}.')
        seen[id] = token
    return vocab


def read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of merges.txt; each of them and its result must be in the vocabulary."""
    require(path.is_file(), f"{path.parent} has vocab.json but no merges.txt: copy it too.")
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        require(
            len(parts) == 2 and all(parts),
            f'{path}, line {number}: "{line}" is not two tokens with a blank between them.',
        )
        for token in (*parts, "".join(parts)):
            require(
                token in vocab,
                f'{path}, line {number}: "{token}" is not in vocab.json. The two files are not of '
                "one tokeniser, or one is damaged.",
            )
        merges.append((parts[0], parts[1]))
    return merges


def _added(side: SideFiles) -> set[str]:
    return {token.content for token in (*side.added.values(), *side.extra)}


def _pipeline(backend: Backend, name: str, config: dict[str, Any]) -> None:
    """Normaliser, split and decoder."""
    backend.decoder = decoders.ByteLevel()
    if name == "clip":
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        cut = pre_tokenizers.Split(Regex(_CLIP_CUTS), behavior="removed", invert=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [cut, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = word_end_decoder("</w>")
        return
    normalizer = normalizers.NFC() if name == "gpt_neox" else composing(KINDS[name].split)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = byte_level_split(KINDS[name].split)
    if config.get("add_prefix_space") is True:
        if KINDS[name].split != "gpt-2":
            raise ClearheadError(f"add_prefix_space is not known with {name} tokenisers.")
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def word_end_decoder(suffix: str) -> decoders.Decoder:
    """Byte-level, where a mark at the end of each word stands for the blank behind it."""
    last = decoders.Replace(Regex(re.escape(suffix) + r"\z"), "")
    return decoders.Sequence([decoders.ByteLevel(), last, decoders.Replace(suffix, " ")])


def _bos_eos(backend: Backend, roles: dict[str, str], config: dict[str, Any]) -> Any:
    """Nothing around the text, unless add_bos_token or add_eos_token ask for it."""
    bos = roles.get("bos") if config.get("add_bos_token") is True else None
    eos = roles.get("eos") if config.get("add_eos_token") is True else None
    return around_text(backend, bos, eos)


def around_text(backend: Backend, bos: str | None, eos: str | None) -> Any:
    """A template with a token before each text, behind it, or both."""
    single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
    second = [f"{bos}:1"] * bool(bos) + ["$B:1"] + [f"{eos}:1"] * bool(eos)
    used = [(token, backend.token_to_id(token)) for token in {bos, eos} if token]
    return processors.TemplateProcessing(single=single, pair=single + second, special_tokens=used)


def _roberta(backend: Backend, roles: dict[str, str], config: dict[str, Any]) -> Any:
    sep, cls = _pair(backend, roles["sep"]), _pair(backend, roles["cls"])
    trim = config.get("trim_offsets", True) is not False
    return processors.RobertaProcessing(sep, cls, trim, config.get("add_prefix_space") is True)


def _clip(backend: Backend, roles: dict[str, str], config: dict[str, Any]) -> Any:
    eos, bos = _pair(backend, roles["eos"]), _pair(backend, roles["bos"])
    return processors.RobertaProcessing(eos, bos, False, False)


def whisper_template(backend: Backend, roles: dict[str, str], config: dict[str, Any]) -> Any:
    """Where a transcript begins, what it is in and what is to be done (if told), that it has no
    times, and its end.
    """
    wanted = [f"<|{config[key]}|>" for key in ("language", "task") if config.get(key)]
    wanted = [token for token in wanted if backend.token_to_id(token) is not None]
    before = ["<|startoftranscript|>", *wanted, "<|notimestamps|>"]
    for token in before:
        require(
            backend.token_to_id(token) is not None,
            f'The vocabulary lacks "{token}": a Whisper folder has it in added_tokens.json.',
        )
    head, end = " ".join(f"{token}:0" for token in before), roles["eos"]
    return processors.TemplateProcessing(
        single=f"{head} $A:0 {end}:0",
        pair=f"{head} $A:0 $B:1 {end}:1",
        special_tokens=[_pair(backend, token) for token in (*before, end)],
    )


def _pair(backend: Backend, token: str) -> tuple[str, int]:
    id = backend.token_to_id(token)
    assert id is not None  # every role's token has been added
    return token, id


_BERT_LIKE = {
    "bos": "<s>",
    "eos": "</s>",
    "sep": "</s>",
    "cls": "<s>",
    "unk": "<unk>",
    "pad": "<pad>",
    "mask": "<mask>",
}
_ENDS = {"bos": _END, "eos": _END, "unk": _END}
KINDS = {
    "gpt2": Kind(_ENDS, _bos_eos),
    "gpt_neox": Kind(_ENDS, _bos_eos),
    "qwen2": Kind({"eos": _END, "pad": _END}, _bos_eos, split="qwen2"),
    "roberta": Kind(_BERT_LIKE, _roberta, flags={"mask": {"lstrip": True}}),
    "whisper": Kind(_ENDS, whisper_template),
    "clip": Kind({"bos": "<|startoftext|>", "eos": _END, "unk": _END, "pad": _END}, _clip),
}
ALIASES = {
    "bart": "roberta",
    "codegen": "gpt2",
    "gptneox": "gpt_neox",
    "gpt_neo": "gpt2",
    "qwen3": "qwen2",
}
