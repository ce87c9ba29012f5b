"""What a command reads and writes: texts as arguments, from a file or from standard input."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from tyro.conf import Positional, arg

from clearhead.errors import ClearheadError, require

CHUNK = 256  # texts that are worked on before the first of them are printed


@dataclass(frozen=True)
class TextArgs:
    """What every command takes that gives an answer a text."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A run's folder, a model's folder or file, or a hub name."""
    texts: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[TEXT ...]", help_behavior_hint="")
    ] = ()
    """The texts; none: standard input, a text a line."""
    file: str | None = None
    """A file with a text a line."""
    json: bool = False
    """Print an object a text."""
    stats: bool = False
    """Say at the end how fast it was."""


def read_texts(words: Sequence[str], file: str | None) -> list[str]:
    """The arguments; or the lines of a file, or of standard input, without empty ones."""
    require(not words or file is None, "Texts were given twice: as arguments, and with --file.")
    if words:
        return list(words)
    where = "standard input" if file is None else file
    lines = list(_lines(file))
    texts = [line for line in lines if line.strip()]
    require(bool(texts), f"There is no text: give it as an argument, or a line each in {where}.")
    empty = len(lines) - len(texts)
    if empty:
        left = "1 empty line was" if empty == 1 else f"{empty} empty lines were"
        print(f"{left} left out of {where}: line numbers differ behind it", file=sys.stderr)
    return texts


def read_whole(file: str | None) -> str:
    """All of a file, or of standard input, as one text."""
    return "\n".join(_lines(file)).strip()


def chunks(texts: Sequence[Any], size: int = CHUNK) -> Iterator[Sequence[Any]]:
    """So many texts at a time, so that the first answers come early, with a bar on a terminal.
    While they are worked on, notices go to standard error.
    """
    from rich.console import Console
    from rich.progress import track

    from clearhead.cli.notices import notices

    console = Console(stderr=True)
    starts: Iterable[int] = range(0, len(texts), size)
    if len(texts) > size and console.is_terminal:
        starts = track(list(starts), "texts", console=console, transient=True)
    with notices():
        for start in starts:
            yield texts[start : start + size]


def say_speed(count: int, seconds: float) -> None:
    """How fast so many texts were worked on."""
    texts = "1 text" if count == 1 else f"{count} texts"
    print(f"{texts}, {seconds:.2f} s: {count / seconds:.1f}/s", file=sys.stderr)


def say_json(**record: Any) -> None:
    """One object a line."""
    print(json.dumps(record, ensure_ascii=False), flush=True)


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file that is written beside its place and takes it when the block ends without an error."""
    path = Path(path).resolve()  # a link stays, and what it leads to is replaced
    new = None
    try:
        with tempfile.NamedTemporaryFile(
            prefix=f".{path.name}-", dir=path.parent, delete=False
        ) as file:
            new = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.chmod(0o644)
        new.replace(path)
    except OSError as error:
        raise ClearheadError(
            f"{path} could not be written ({error.strerror or error}); what was there before is as "
            "it was."
        ) from error
    finally:
        if new is not None:
            new.unlink(missing_ok=True)


def _lines(file: str | None) -> Iterator[str]:
    if file is not None:
        from clearhead.data.files import find_files

        for found in find_files(Path(file)):
            yield from (line.rstrip("\r\n") for line in found.lines())
        return
    if sys.stdin.isatty():
        print("reading standard input; Ctrl-D ends it", file=sys.stderr)
    try:
        for line in sys.stdin:
            line.encode("utf-8")  # some locales let other bytes through, as halves of characters
            yield line.rstrip("\r\n")
    except UnicodeError as error:
        raise ClearheadError(
            "Standard input is not UTF-8 text. Convert it: iconv -f LATIN1 -t UTF-8, say."
        ) from error
