"""What each token of a vocabulary writes, and which tokens write a text.

It is read off the tokeniser's decoder: byte-level BPE, sentencepiece, characters. A decoder that
puts blanks between words by itself (WordPiece, words) does not say it.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from clearhead.text.sentencepiece import BLANK
from clearhead.text.tiktoken import byte_letters

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN: weakref.WeakKeyDictionary[Any, Sequence[bytes | None] | None] = weakref.WeakKeyDictionary()


def tokens_that_write(text: str, tokenizer: Any) -> list[int]:
    """The single tokens that write just this."""
    pieces, wanted = token_bytes(tokenizer) or (), text.encode()
    return [id for id, piece in enumerate(pieces) if piece == wanted]


def ways_to_write(text: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """Tokens that write a text: each single one that does, and those that the tokeniser makes of it
    where it begins a line or stands behind one: sentencepiece puts a blank before the first.
    """
    found = [(id,) for id in tokens_that_write(text, tokenizer)]
    found.append(tuple(tokenizer.encode(text, special=False)))
    line = tokenizer.encode("\n", special=False)
    behind = tokenizer.encode("\n" + text, special=False)
    if behind[: len(line)] == line and tokenizer.unk_id not in line:
        found.append(tuple(behind[len(line) :]))
    return [ids for ids in dict.fromkeys(found) if ids]


def token_bytes(tokenizer: Any) -> Sequence[bytes | None] | None:
    """What each token writes; None for special tokens and for ids that are none, and None as a
    whole where that depends on the tokens beside it.
    """
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = _read(tokenizer)
    return _KNOWN[tokenizer]


def _read(tokenizer: Any) -> list[bytes | None] | None:
    decode = _spelling(tokenizer)
    if decode is None:
        return None
    found: list[bytes | None] = [None] * tokenizer.vocab_size
    hidden = tokenizer.special_ids | {tokenizer.unk_id}
    for token, id in tokenizer.backend.get_vocab().items():
        if id not in hidden:
            found[id] = decode(token)
    return found


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
