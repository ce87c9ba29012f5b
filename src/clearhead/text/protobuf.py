"""A sentencepiece model file: just enough of protocol buffers to read one, strictly and bounded.

A message is a row of (field number and wire type, value): a varint, 8 bytes, a length with that
many bytes, or 4 bytes. Every length is checked against what is left, so nothing is allocated on a
file's word alone. Field numbers: sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clearhead.errors import ClearheadError, require
from clearhead.text.special import LARGEST_FILE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
MOST_PIECES = 4_000_000

Value = int | bytes


@dataclass(frozen=True)
class Piece:
    """One entry of a sentencepiece vocabulary."""

    text: str
    """The piece; blanks are written as U+2581."""
    score: float
    """Its log-probability (unigram), or minus the order of its merge (BPE)."""
    type: int = NORMAL
    """NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE."""


@dataclass(frozen=True)
class SentencePieceModel:
    """What a .model or .spm file says."""

    pieces: tuple[Piece, ...]
    """The vocabulary; a piece's place is its id."""
    algorithm: int
    """UNIGRAM or BPE."""
    byte_fallback: bool
    """Are unknown characters written as byte pieces?"""
    charsmap: bytes
    """The compiled table that normalises characters; empty for none."""
    dummy_prefix: bool
    """Does every text get a blank in front?"""
    single_blanks: bool
    """Are blanks at the ends removed and runs of them made one?"""
    unk_id: int
    """Which piece is the unknown one."""


def read_model(path: Path) -> SentencePieceModel:
    """The model in a file, or a clear error."""
    try:
        size = path.stat().st_size
        require(size <= LARGEST_FILE, f"{path} has {size:,} bytes: no sentencepiece model has.")
        return parse_model(path.read_bytes())
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read ({error}).") from error
    except ClearheadError as error:
        raise ClearheadError(
            f"{path} is not a whole sentencepiece model: {error} Copy it again."
        ) from error


def parse_model(data: bytes) -> SentencePieceModel:
    """The model in these bytes."""
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in fields(data):
        if number == 1:
            require(len(pieces) < MOST_PIECES, f"it has more than {MOST_PIECES:,} pieces.")
            pieces.append(_piece(_bytes(value), len(pieces)))
        elif number == 2:
            trainer = dict(fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(fields(_bytes(value)))
    require(bool(pieces), "it has no pieces.")
    algorithm = _int(trainer.get(3, UNIGRAM))
    require(
        algorithm in (UNIGRAM, BPE),
        f"its algorithm is number {algorithm}; unigram (1) and BPE (2) can be used.",
    )
    unknown = [id for id, piece in enumerate(pieces) if piece.type == UNKNOWN]
    require(len(unknown) == 1, f"it has {len(unknown)} unknown pieces instead of one.")
    texts: set[str] = set()
    for piece in pieces:
        require(piece.text not in texts, f"it has the piece {piece.text!r} twice.")
        texts.add(piece.text)
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=algorithm,
        byte_fallback=bool(_int(trainer.get(35, 0))),
        charsmap=_bytes(normalizer.get(2, b"")),
        dummy_prefix=bool(_int(normalizer.get(3, 1))),
        single_blanks=bool(_int(normalizer.get(4, 1))),
        unk_id=unknown[0],
    )


def _piece(data: bytes, id: int) -> Piece:
    values = dict(fields(data))
    try:
        text = _bytes(values.get(1, b"")).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClearheadError(f"piece {id} is not UTF-8.") from error
    require(text != "", f"piece {id} is empty.")
    packed = _bytes(values.get(2, b"\0\0\0\0"))
    require(len(packed) == 4, f"the score of piece {id} has {len(packed)} bytes.")
    score: float = struct.unpack("<f", packed)[0]
    require(score == score and abs(score) != float("inf"), f"the score of piece {id} is {score}.")
    return Piece(text, score, _int(values.get(3, NORMAL)))


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """(Field number, value) of a message: a whole number for varints, bytes for all else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        require(number > 0, f"field number 0 at byte {at}.")
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ClearheadError(f"wire type {wire} at byte {at}.")
        require(
            size <= len(data) - at,
            f"a field of {size:,} bytes at byte {at}, where only {len(data) - at:,} are left.",
        )
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        require(at < len(data), "it ends inside a number.")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ClearheadError(f"a number of more than ten bytes at byte {at}.")


def _int(value: Value) -> int:
    require(isinstance(value, int), "a number was expected where bytes are.")
    return int(value) if isinstance(value, int) else 0


def _bytes(value: Value) -> bytes:
    require(isinstance(value, bytes), "bytes were expected where a number is.")
    return value if isinstance(value, bytes) else b""
