"""How text is cut before byte-level BPE.

Merges never cross these cuts, so a vocabulary works only with the cuts it was learnt with. Each way
has the name that GGUF files use for it.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, did_you_mean

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

# Name -> the expressions that cut one after another. "gpt-2" is what ByteLevel does by itself;
# "digits" parts every digit.
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": ("gpt-2",),
    "smollm": ("digits", "gpt-2"),
    "llama-bpe": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}",),
    "qwen2": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}",),
    "tekken": (_CASED % ("", "", ""),),
    "gpt-4o": (_CASED % (_SHORT + "?", _SHORT + "?", "{1,3}"),),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[一-龥ࠀ-一가-퟿]+",
        "digits",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
ALIASES = {
    "gpt2": "gpt-2",
    "phi-2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "roberta-bpe": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "dbrx": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "megrez": "qwen2",
    "llama4": "gpt-4o",
}
COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Whose text is brought into Unicode's composed form (NFC) first."""


def byte_level_split(name: str) -> pre_tokenizers.PreTokenizer:
    """The cut of that name, with the text turned into bytes at the end."""
    known = ALIASES.get(name, name)
    if known not in SPLITS:
        names = [*SPLITS, *ALIASES]
        raise ClearheadError(
            f'The way to split text "{name}" is not known.{did_you_mean(name, names)} '
            f"Known: {', '.join(names)}."
        )
    cuts: list[Any] = []
    for expression in SPLITS[known]:
        if expression == "digits":
            cuts.append(pre_tokenizers.Digits(individual_digits=True))
        elif expression != "gpt-2":
            cuts.append(pre_tokenizers.Split(Regex(expression), behavior="isolated"))
    own = "gpt-2" in SPLITS[known]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    return cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)


def composing(name: str) -> normalizers.Normalizer | None:
    """The normaliser that goes with a cut."""
    return normalizers.NFC() if name in COMPOSED else None


def split_name(backend: Backend) -> str | None:
    """The name of a tokeniser's cut, or None if it is none of these."""
    own = _cuts(json.loads(backend.to_str())["pre_tokenizer"])
    for name in SPLITS:
        if own == _cuts(json.loads(byte_level_split(name).__getstate__())):
            return name
    return None


def _cuts(pre: Any) -> list[Any]:
    """What matters of a pre-tokeniser's description."""
    if not isinstance(pre, dict):
        return []
    if pre["type"] == "Sequence":
        return [cut for inner in pre["pretokenizers"] for cut in _cuts(inner)]
    keep = ("type", "pattern", "behavior", "invert", "individual_digits", "add_prefix_space")
    found = {key: pre[key] for key in keep if key in pre}
    if pre["type"] == "ByteLevel":
        found["use_regex"] = pre.get("use_regex", True)
    return [found]
