"""Files to records: running text, parallel files, and tables (see tables.py).

A record is a dict. Tables have their columns, parallel files one column a language (train.en and
train.de have "en" and "de"), and text has "text". Running text comes in pieces of at most `PIECE`
characters, cut behind a newline where there is one; a piece that the next one continues has the
key `MORE`, and nothing stands between the two: a document ends where it is not set.

A `Stream` can be read again and again and never holds more than a piece or a record. It is surveyed
once, from end to end, when it is made: so whatever is wrong is said before any work, and its
fingerprint covers every character.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, ClassVar

from clearhead.data.files import File
from clearhead.data.holdout import mark
from clearhead.data.tables import READERS, Record, read_tables
from clearhead.errors import ClearheadError, require

PIECE = 2**20  # characters of running text in one record at most
MORE = "\0more"  # no column of a table is called so
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".log")
"""What is one text each even where two files differ in nothing else (notes.txt, notes.md)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Records that can be read again and again."""

    columns: tuple[str, ...]
    """The columns of the first record."""
    count: int | None
    """How many records there are, of running text how many characters; None if without end."""
    fingerprint: str
    """sha256 over what it yields."""

    unit: ClassVar[str] = "records"

    def __iter__(self) -> Iterator[Record]:
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Stream:
        """Only the records, or characters, from start until before stop."""
        raise NotImplementedError

    def lacks(self, column: str) -> str:
        """Where a column is missing first, as the end of a sentence; empty if it never is."""
        return "" if column in self.columns else "has no"


@dataclasses.dataclass(frozen=True, eq=False)
class Texts(Stream):
    """Running text, each file a document; a part may begin and end inside one."""

    files: tuple[File, ...]
    """The documents."""
    lengths: tuple[int, ...]
    """How many characters each has."""
    start: int
    """The first character, counted over all documents."""
    stop: int
    """The first that no longer belongs."""

    unit: ClassVar[str] = "characters"

    def __iter__(self) -> Iterator[Record]:
        place = 0
        for file, length in zip(self.files, self.lengths, strict=True):
            low, high = max(self.start - place, 0), min(self.stop - place, length)
            if low < high:
                for text, more in _pieces(_clip(file.running(), low, high)):
                    yield {"text": text, MORE: True} if more else {"text": text}
            place += length

    def part(self, start: int, stop: int) -> Texts:
        low, high = self.start + start, min(self.start + stop, self.stop)
        return dataclasses.replace(
            self,
            start=low,
            stop=high,
            count=high - low,
            fingerprint=fingerprint_of(self.fingerprint, start, stop),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(Stream):
    """Records of a table, or of anything that reads as one."""

    read: Callable[[], Iterator[Record]]
    """Starts reading from the first record."""
    gaps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """A column that not every record has -> the number of the first without it, from 1."""
    start: int = 0
    """How many records are passed over."""

    def __iter__(self) -> Iterator[Record]:
        stop = None if self.count is None else self.start + self.count
        return islice(self.read(), self.start, stop)

    def part(self, start: int, stop: int) -> Rows:
        return dataclasses.replace(
            self,
            start=self.start + start,
            count=max(0, stop - start if self.count is None else min(stop, self.count) - start),
            fingerprint=fingerprint_of(self.fingerprint, start, stop),
        )

    def spread(self, count: int) -> tuple[Rows, Rows]:
        """All but so many records, and these: one of every stretch, chosen by chance but for ever,
        so that a table that is sorted does not matter.
        """
        total = self.count or 0
        parts = []
        for held, size in ((False, total - count), (True, count)):
            read = functools.partial(_spread, self, count, held)
            own = fingerprint_of(self.fingerprint, "spread", count, held)
            parts.append(dataclasses.replace(self, read=read, start=0, count=size, fingerprint=own))
        return parts[0], parts[1]

    def lacks(self, column: str) -> str:
        if column in self.gaps:
            return f"lacks in record {self.gaps[column]} the"
        return super().lacks(column)


def _spread(rows: Rows, count: int, held: bool) -> Iterator[Record]:
    """The records that are held out, or the others."""
    total = rows.count or 0
    stretches = (range(i * total // count, (i + 1) * total // count) for i in range(count))
    chosen = (part[mark(str(i)) % len(part)] for i, part in enumerate(stretches))
    following = next(chosen, total)
    for number, record in enumerate(rows):
        mine = number == following
        if mine:
            following = next(chosen, total)
        if mine == held:
            yield record


def open_texts(files: Sequence[File]) -> Texts:
    """The files as running text, surveyed: hashed, counted, all of it UTF-8."""
    digest, lengths = hashlib.sha256(), []
    for file in files:
        length = 0
        for text in file.running():
            length += len(text)
            digest.update(text.encode("utf-8"))
        lengths.append(length)
    fingerprint = fingerprint_of("text", digest.hexdigest(), lengths)
    total = sum(lengths)
    return Texts(("text",), total, fingerprint, tuple(files), tuple(lengths), 0, total)


def open_rows(read: Callable[[], Iterator[Record]], name: str) -> Rows:
    """What `read` starts as a stream, surveyed: hashed, counted, its columns compared."""
    digest, count = hashlib.sha256(), 0
    columns: tuple[str, ...] = ()
    gaps: dict[str, int] = {}
    for record in read():
        count += 1
        if count == 1:
            columns = tuple(record)
        elif tuple(record) != columns:
            for column in columns:
                if column not in record:
                    gaps.setdefault(column, count)
        digest.update(json.dumps(record, sort_keys=True, default=_stable).encode() + b"\n")
    require(count > 0, f"{name} holds no records.")
    return Rows(columns, count, fingerprint_of("rows", digest.hexdigest()), read, gaps)


def _stable(value: Any) -> str:
    """What stands for a value that is no JSON: a date says what it is. An object that says only
    where it lies in memory (a picture) stands for its type; no objective reads it.
    """
    said = repr(value)
    return type(value).__name__ if said.startswith("<") else said


def open_files(files: Sequence[File], name: str) -> Stream:
    """Files of one kind, by their suffixes: tables one behind the other, or texts."""
    tables = [file for file in files if file.suffix in READERS]
    if not tables:
        texts = open_texts(files)
        require(bool(texts.count), f"{name} is empty.")
        return texts
    if len(tables) < len(files):
        text = next(file for file in files if file.suffix not in READERS)
        raise ClearheadError(
            f"{name} holds both tables ({tables[0].name}) and texts ({text.name}): choose by a "
            f"pattern such as '*{tables[0].suffix}' or '*{text.suffix or '.txt'}'."
        )
    return open_rows(functools.partial(read_tables, tuple(files)), name)


# --- parallel files ---


def languages(files: Sequence[File]) -> tuple[str, ...] | None:
    """The columns of parallel files, which differ in one part of their names; None for others.

    train.en and train.de, train.en.txt and train.de.txt; but not notes.txt and notes.md, nor
    part.1.txt and part.2.txt.
    """
    split = [file.bare.split(".") for file in files]
    if len(files) < 2 or len({len(parts) for parts in split}) > 1:
        return None
    differing = [set(column) for column in zip(*split, strict=True)]
    places = [place for place, found in enumerate(differing) if len(found) > 1]
    if len(places) != 1 or places[0] == 0 or len(differing[places[0]]) < len(files):
        return None
    names = tuple(parts[places[0]] for parts in split)
    known = {*TEXT_SUFFIXES, *READERS}
    are_names = all(name.replace("-", "").replace("_", "").isalpha() for name in names)
    return names if are_names and not any(f".{name.lower()}" in known for name in names) else None


def beside(files: Sequence[File]) -> tuple[str, ...] | None:
    """The columns of two texts with other names and equally many lines, english.txt and german.txt;
    None for others. Names with numbers are those of chapters.
    """
    stems = tuple(file.bare.split(".")[0] for file in files)
    endings = tuple(file.suffix.removeprefix(".") for file in files)
    plain = all(file.suffix not in READERS for file in files)
    if len(set(stems)) != 2 or not plain or any(c.isdigit() for name in stems for c in name):
        return None
    names = endings if len(set(endings)) == 2 and all(endings) else stems
    first, second = (sum(1 for _ in file.lines()) for file in files)
    return names if first == second > 1 else None


def open_parallel(files: Sequence[File], names: Sequence[str]) -> Rows:
    """Files whose lines belong together, line by line."""
    counts = [sum(1 for _ in file.lines()) for file in files]
    if len(set(counts)) > 1:
        said = ", ".join(f"{f.name} has {n:,}" for f, n in zip(files, counts, strict=True))
        raise ClearheadError(
            f"Parallel files need the same number of lines, but {said}: the lines of one would "
            "stand beside the wrong ones of the other."
        )
    read = functools.partial(read_parallel, tuple(files), tuple(names))
    return open_rows(read, " and ".join(file.name for file in files))


def read_parallel(files: tuple[File, ...], names: tuple[str, ...]) -> Iterator[Record]:
    """One record a line; blanks around a line are not kept."""
    for lines in zip_longest(*(file.lines() for file in files), fillvalue=""):
        yield {name: line.strip() for name, line in zip(names, lines, strict=True)}


# --- running text ---


def _clip(texts: Iterator[str], low: int, high: int) -> Iterator[str]:
    """The characters from low until before high."""
    place = 0
    for text in texts:
        if place >= high:
            return
        if place + len(text) > low:
            yield text[max(low - place, 0) : high - place]
        place += len(text)


def _pieces(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of at most PIECE characters, each with whether another follows."""
    buffer = ""
    for text in texts:
        buffer += text
        while len(buffer) > PIECE:
            cut = buffer.rfind("\n", 0, PIECE) + 1 or PIECE
            yield buffer[:cut], True
            buffer = buffer[cut:]
    if buffer:
        yield buffer, False


def fingerprint_of(*parts: Any) -> str:
    """sha256 over plain data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
