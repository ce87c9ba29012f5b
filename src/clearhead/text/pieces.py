"""What each token of a vocabulary writes, and which tokens write a text.

It is read off the tokeniser's decoder: byte-level BPE, sentencepiece, characters. A decoder that
puts blanks between words by itself (WordPiece, words) does not say it.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clearhead.text.sentencepiece import BLANK
from clearhead.text.tiktoken import byte_letters

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBES = ("\n", ",", ".", "a")  # behind one of them a text stands without a blank before it


@dataclass(frozen=True)
class Pieces:
    """What the tokens of a vocabulary write."""

    of: list[bytes | None]
    """id -> what it writes; None for special tokens and for ids that are none."""
    ids: dict[bytes, list[int]]
    """What is written -> the single tokens that do."""


_KNOWN: weakref.WeakKeyDictionary[Any, Pieces | None] = weakref.WeakKeyDictionary()


def pieces_of(tokenizer: Any) -> Pieces | None:
    """Those of a tokeniser; None where what a token writes depends on the tokens beside it."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = _read(tokenizer)
    return _KNOWN[tokenizer]


def tokens_that_write(text: str, tokenizer: Any) -> list[int]:
    """The single tokens that write just this."""
    pieces = pieces_of(tokenizer)
    return [] if pieces is None else pieces.ids.get(text.encode(), [])


def ways_to_write(text: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """Tokens that write a text: each single one that does, and those that the tokeniser makes of it
    where it begins and where it stands behind something: sentencepiece puts a blank before the
    first. None of them is the token for what is unknown, which may write anything.
    """
    alone = tokenizer.encode(text, special=False)  # first: it refuses what is no text
    found = [*((id,) for id in tokens_that_write(text, tokenizer)), tuple(alone)]
    for probe in PROBES:
        before = tokenizer.encode(probe, special=False)
        both = tokenizer.encode(probe + text, special=False)
        if before and tokenizer.unk_id not in before and both[: len(before)] == before:
            found.append(tuple(both[len(before) :]))
            break
    return [ids for ids in dict.fromkeys(found) if ids and tokenizer.unk_id not in ids]


def _read(tokenizer: Any) -> Pieces | None:
    decode = _spelling(tokenizer)
    if decode is None:
        return None
    of: list[bytes | None] = [None] * tokenizer.vocab_size
    ids: dict[bytes, list[int]] = {}
    hidden = tokenizer.special_ids | {tokenizer.unk_id}
    for token, id in tokenizer.backend.get_vocab().items():
        if id not in hidden:
            of[id] = decode(token)
            ids.setdefault(decode(token), []).append(id)
    return Pieces(of, ids)


def _spelling(tokenizer: Any) -> Any:
    """How the tokeniser's decoder makes bytes of one token; None: that depends on others."""
    said = json.loads(tokenizer.backend.to_str())
    kinds = {part["type"]: part for part in _parts(said.get("decoder"))}
    if "ByteLevel" in kinds:
        bytes_of = {letter: byte for byte, letter in byte_letters().items()}

        def spelt(token: str) -> bytes:
            if all(letter in bytes_of for letter in token):
                return bytes(bytes_of[letter] for letter in token)
            return token.encode()  # added as it is

        return spelt
    if not kinds or set(kinds) - {"Fuse", "Metaspace", "Replace", "ByteFallback", "Strip"}:
        return None
    blank = "Metaspace" in kinds or "Replace" in kinds

    def plain(token: str) -> bytes:
        if "ByteFallback" in kinds and (byte := BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace(BLANK, " ") if blank else token).encode()

    return plain


def _parts(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder
