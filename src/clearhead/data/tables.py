"""Tables of records: JSON lines, JSON lists, CSV and TSV, read as streams.

Whatever is wrong is said with the number of its line. Values are as the file has them: in CSV and
TSV all are strings.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from clearhead.data.files import LONGEST, File
from clearhead.errors import ClearheadError, require

Record = dict[str, Any]


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
    texts = file.text()
    buffer = "".join(islice(texts, 1)).lstrip()
    require(
        buffer.startswith("["),
        f"{file.name} is no JSON list of records: it starts with {buffer[:1]!r}. A file with one "
        "object a line is called .jsonl.",
    )
    decoder, number, buffer = json.JSONDecoder(), 0, buffer[1:]
    while True:
        buffer = buffer.lstrip(" \t\r\n,")  # a comma too many is no reason to stop
        if buffer.startswith("]"):
            rest = buffer[1:] + "".join(islice(texts, 1))
            require(not rest.strip(), f"{file.name} goes on behind the end of its list.")
            return
        try:
            value, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError) as error:
            more = "".join(islice(texts, 1 + len(buffer) // 2**20))  # doubled: never quadratic
            if not more or len(buffer) > LONGEST:
                raise ClearheadError(
                    f"{file.name}, item {number + 1} is not JSON: {error}."
                ) from error
            buffer += more
            continue
        number, buffer = number + 1, buffer[end:]
        yield _record(value, f"{file.name}, item {number}")


def read_table(file: File, separator: str = ",") -> Iterator[Record]:
    """A CSV with a header; TSV has no quotes. In a CSV of semicolons these separate."""
    if separator == ",":
        header = next(file.lines(), "")
        separator = ";" if header.count(";") > header.count(",") else ","
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))
    rows = csv.reader(
        file.lines(),
        delimiter=separator,
        quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    names: list[str] = []
    try:
        for row in rows:
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
