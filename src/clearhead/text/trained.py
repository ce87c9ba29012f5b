"""Tokenisers that are learnt from your own text, or need no learning.

characters   one token for each character that occurs
bytes        one token for each byte; id = byte, nothing is unknown
words        one token for each word or run of punctuation; blanks are not kept
bpe          byte-level BPE, as GPT-2 (Sennrich et al. 2016): merges the most frequent pair, over
             and over
unigram      keeps the pieces that make the text most probable (Kudo 2018)

Characters, bytes and bpe give back exactly the text they were given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.sentencepiece import BLANK
from clearhead.text.special import ROLES
from clearhead.text.tiktoken import byte_letters
from clearhead.text.tokenizer import Tokenizer

KINDS = ("characters", "bytes", "words", "bpe", "unigram")
SPECIALS = {
    "characters": {"unk": "<unk>"},
    "bytes": {"eos": "<|endoftext|>"},
    "words": {"unk": "<unk>", "eos": "<|endoftext|>"},
    "bpe": {"eos": "<|endoftext|>"},
    "unigram": {"unk": "<unk>", "eos": "</s>"},
}
"""Role -> token, where the caller names none."""


def train_tokenizer(
    kind: str,
    texts: Iterable[str],
    vocab_size: int | None = None,
    special_tokens: Mapping[str, str] | None = None,
    extra_tokens: Sequence[str] = (),
    template: str = "$A",
    pair_template: str | None = None,
) -> Tokenizer:
    """A tokeniser for these texts.

    `vocab_size` counts the special tokens too; None means all characters, or 8,000 pieces.
    `special_tokens` says which token plays which role ({"pad": "<pad>", "eos": "</s>"}), and
    `extra_tokens` are more that are never cut. `template` is what encode puts around a text:
    "$A </s>", or "[CLS] $A [SEP]" with the pair_template "[CLS] $A [SEP] $B:1 [SEP]:1".
    """
    require(
        kind in KINDS,
        f'There is no tokeniser "{kind}".{did_you_mean(kind, KINDS)} '
        f"There are: {', '.join(KINDS)}.",
    )
    require(vocab_size is None or vocab_size > 0, f"vocab_size is {vocab_size}; it counts tokens.")
    roles = dict(SPECIALS[kind] if special_tokens is None else special_tokens)
    for role in roles:
        require(
            role in ROLES,
            f'"{role}" is no role of a token.{did_you_mean(role, ROLES)} Roles: '
            f"{', '.join(ROLES)}.",
        )
    if kind in ("characters", "words", "unigram"):
        roles.setdefault("unk", "<unk>")
    specials = list(dict.fromkeys((*roles.values(), *extra_tokens)))
    require(all(specials), "A special token must not be empty.")
    texts = [texts] if isinstance(texts, str) else texts
    backend = _BUILDERS[kind](_checked(texts, kind), vocab_size, specials, roles)
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    backend.post_processor = _around(backend, template, pair_template)
    return Tokenizer(backend, roles)


def _checked(texts: Iterable[Any], kind: str) -> Iterator[str]:
    """The texts one by one; there must be some, and each must be text."""
    some = kind == "bytes"
    for place, text in enumerate(texts):
        require(
            isinstance(text, str),
            f"Text {place} is {type(text).__name__}; a tokeniser is learnt from str.",
        )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ClearheadError(
                f"Text {place} has half a character (a lone surrogate) at {error.start}: it was "
                "read with the wrong encoding."
            ) from error
        some = some or text != ""
        yield text
    require(some, "There is no text to learn a tokeniser from.")


def _characters(
    texts: Iterator[str], vocab_size: int | None, specials: list[str], roles: dict[str, str]
) -> Backend:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    room = None if vocab_size is None else vocab_size - len(specials)
    require(
        room is None or room > 0,
        f"vocab_size {vocab_size} leaves no room beside the special tokens.",
    )
    ranked = sorted(counts, key=lambda letter: (-counts[letter], letter))
    letters = sorted(letter for letter in ranked[:room] if letter not in specials)
    vocab = {token: id for id, token in enumerate([*specials, *letters])}
    # BPE without merges: characters one by one, faster than cutting the text with an expression.
    backend = Backend(models.BPE(vocab, [], unk_token=roles["unk"]))
    backend.decoder = decoders.Fuse()
    return backend


def _bytes(
    texts: Iterator[str], vocab_size: int | None, specials: list[str], roles: dict[str, str]
) -> Backend:
    needed = 256 + len(specials)
    require(
        vocab_size is None or vocab_size == needed,
        f"A tokeniser of bytes has 256 tokens and the special ones, {needed} in all, not "
        f"{vocab_size}: leave vocab_size away.",
    )
    letters = byte_letters()
    backend = Backend(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _words(
    texts: Iterator[str], vocab_size: int | None, specials: list[str], roles: dict[str, str]
) -> Backend:
    backend = Backend(models.WordLevel({}, unk_token=roles["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    size = _room(vocab_size, len(specials) + 1)
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _bpe(
    texts: Iterator[str], vocab_size: int | None, specials: list[str], roles: dict[str, str]
) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_room(vocab_size, 256 + len(specials)),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _unigram(
    texts: Iterator[str], vocab_size: int | None, specials: list[str], roles: dict[str, str]
) -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "always")
    backend.decoder = decoders.Metaspace(BLANK, "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=_room(vocab_size, len(specials) + 1),
        special_tokens=specials,
        unk_token=roles["unk"],
        show_progress=False,
    )
    first = next(texts, "")  # or the trainer would complain of no text in its own way
    backend.train_from_iterator(chain([first], texts), trainer)
    described = json.loads(backend.to_str())["model"]
    pieces = [(token, score) for token, score in described["vocab"]]
    count = len(specials)
    pieces = [*pieces[:count], *_settled(pieces[count:])]
    backend.model = models.Unigram(pieces, described["unk_id"], False)
    return backend


def _settled(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The pieces in an order that is the same in every training.

    The trainer goes through hash tables: the last digits differ, and so does the order of equals
    and of characters it only keeps to be complete, whose scores it makes up in steps of 0.0001.
    """
    letters = [piece for piece in pieces if len(piece[0]) == 1]
    longer = [piece for piece in pieces if len(piece[0]) > 1]
    steps = [
        (token, score)
        for run in _runs(letters, 0.00011)
        for token, (_, score) in zip(sorted(token for token, _ in run), run, strict=True)
    ]
    return [
        (token, round(run[0][1], 6))
        for run in _runs([*longer, *steps], 1e-9)
        for token in sorted(token for token, _ in run)
    ]


def _runs(pieces: list[tuple[str, float]], apart: float) -> list[list[tuple[str, float]]]:
    """The pieces by falling score, cut where two neighbours are further `apart`."""
    runs: list[list[tuple[str, float]]] = []
    for piece in sorted(pieces, key=lambda piece: -piece[1]):
        if runs and runs[-1][-1][1] - piece[1] < apart:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _room(vocab_size: int | None, least: int) -> int:
    size = 8000 if vocab_size is None else vocab_size
    require(
        size >= least,
        f"vocab_size {size} is too small: this tokeniser has at least {least} tokens.",
    )
    return size


def _around(backend: Backend, template: str, pair: str | None) -> Any:
    """The special tokens that stand around a text."""
    single = template.split()
    both = (
        pair.split() if pair else [*single, *(f"{part.replace('$A', '$B')}:1" for part in single)]
    )
    names = {part.rsplit(":", 1)[0] if part[-2:-1] == ":" else part for part in (*single, *both)}
    used = {name: backend.token_to_id(name) for name in names - {"$A", "$B"}}
    for name, id in used.items():
        require(
            id is not None,
            f'The template puts "{name}" around a text, which is no token here: add it to '
            "special_tokens.",
        )
    require("$A" in template, 'A template has a place for the text: "$A </s>".')
    return processors.TemplateProcessing(
        single=single, pair=both, special_tokens=list(used.items())
    )


_BUILDERS: dict[str, Callable[..., Backend]] = {
    "characters": _characters,
    "bytes": _bytes,
    "words": _words,
    "bpe": _bpe,
    "unigram": _unigram,
}
