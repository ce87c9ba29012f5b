"""Tables of records: JSON lines, JSON lists, CSV and TSV, read as streams.

Whatever is wrong is said with the number of its line. Values are as the file has them: in CSV and
TSV all are strings.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from clearhead.data.files import LONGEST, File
from clearhead.errors import ClearheadError, require

Record = dict[str, Any]

_BLANKS = re.compile(r"[ \t\r\n]*")


def read_tables(files: tuple[File, ...]) -> Iterator[Record]:
    """The records of all files, one file behind the other."""
    for file in files:
        yield from READERS[file.suffix](file)


def read_jsonl(file: File) -> Iterator[Record]:
    """One JSON object a line; a line that is a string has the column "text"."""
    for number, line in enumerate(file.lines(), 1):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ClearheadError(
                f"{file.name}, line {number} is not JSON: {error}. One object stands in each line."
            ) from error
        yield _record(value, f"{file.name}, line {number}")


def read_json(file: File) -> Iterator[Record]:
    """The items of a JSON list, one after the other, without reading the whole list first."""
    scan = _Scan(file.text())
    mark = scan.mark()
    require(
        mark == "[",
        f"{file.name} is no JSON list of records: it starts with {mark!r}. A file with one object "
        "a line is called .jsonl.",
    )
    number = 0
    while mark != "]":
        scan.at += 1  # behind the bracket or the comma
        if scan.mark() == "]" and number == 0:
            break
        number += 1
        yield _record(scan.item(f"{file.name}, item {number}"), f"{file.name}, item {number}")
        mark = scan.mark()
        require(
            mark in (",", "]"),
            f"{file.name}: behind item {number} {f'stands {mark!r}' if mark else 'the file ends'}, "
            "but a comma or the end of the list belongs there.",
        )
    scan.at += 1
    require(not scan.mark(), f"{file.name} goes on behind the end of its list.")


class _Scan:
    """A place in a text that is read as it goes; what lies far before it is forgotten."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.text, self.at = "", 0
        self._texts, self._decoder = texts, json.JSONDecoder()

    def mark(self) -> str:
        """The next character that is no blank, at which the place is then; "" at the end."""
        while True:
            blank = _BLANKS.match(self.text, self.at)
            assert blank is not None  # none at all is a match too
            self.at = blank.end()
            if self.at < len(self.text) or not self._more():
                return self.text[self.at : self.at + 1]

    def item(self, where: str) -> Any:
        """The value that begins here; the place is then behind it."""
        while True:
            try:
                value, self.at = self._decoder.raw_decode(self.text, self.at)
                return value
            except (ValueError, RecursionError) as error:
                if len(self.text) - self.at > LONGEST or not self._more():
                    said = getattr(error, "msg", error)
                    raise ClearheadError(f"{where} is not JSON: {said}.") from error

    def _more(self) -> bool:
        """Read on: as much again as waits here, so that a long item takes no quadratic time."""
        rest = self.text[self.at :]
        more = "".join(islice(self._texts, 1 + len(rest) // 2**20))
        self.text, self.at = rest + more, 0
        return bool(more)


def read_table(file: File, separator: str = ",") -> Iterator[Record]:
    """A CSV with a header; TSV has no quotes. In a CSV of semicolons these separate."""
    if separator == ",":
        header = next(file.lines(), "")
        separator = ";" if header.count(";") > header.count(",") else ","
    rows = csv.reader(
        file.lines(),
        delimiter=separator,
        quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    names: list[str] = []
    try:
        for row in _long_rows(rows):
            if not row:
                continue
            if not names:
                names = _header(row, file)
                continue
            require(
                len(row) == len(names),
                f"{file.name}, line {rows.line_num} has {len(row)} columns, but the header has "
                f"{len(names)} ({', '.join(names)}).",
            )
            yield dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ClearheadError(
            f"{file.name}, line {rows.line_num} is no row of a table: {error}. Is a quote open?"
        ) from error


READERS: dict[str, Callable[[File], Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": functools.partial(read_table, separator="\t"),
}
"""Suffix -> what reads records from such a file; every other file is text."""


def _long_rows(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """The rows, however long their fields: the limit is the whole process's, so it is put back
    behind each.
    """
    while True:
        before = csv.field_size_limit(LONGEST)
        try:
            row = next(rows, None)
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        yield row


def _header(row: list[str], file: File) -> list[str]:
    names = [name.strip() for name in row]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(
        not twice and all(names),
        f"{file.name}: the header needs one name for each column, but "
        + (f"{', '.join(map(repr, twice))} stands there twice." if twice else "one is empty."),
    )
    return names


def _record(value: Any, where: str) -> Record:
    value = {"text": value} if isinstance(value, str) else value
    require(
        isinstance(value, dict) and bool(value),
        f'{where} is {json.dumps(value)[:60]}; a record is an object such as {{"text": "..."}}.',
    )
    return value
