"""Where text comes from: files, folders, globs, gzip and zip, as streams of decoded text.

Nothing here holds a whole file in memory and nothing is unpacked to disk. What is not UTF-8 text is
refused with the place of the first wrong byte and a command that converts it. In a folder or a zip
the order is that of the sorted paths; hidden files (.git, .DS_Store, __MACOSX) are left out.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import glob
import gzip
import io
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from clearhead.errors import ClearheadError, did_you_mean, require

BLOCK = 2**20  # bytes that are read at once
START = 2**13  # bytes that tell whether a file is binary
LONGEST = 2**26  # characters of one line or record; beyond that the file is no such table
FREE, RATIO = 2**30, 200  # bytes that may always come out of an archive; beyond, times its size

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# What reading a damaged or hostile archive raises, beside its own BadZipFile.
_BROKEN = (
    *(OSError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, ValueError),
    *(struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)


@dataclasses.dataclass(frozen=True)
class File:
    """A file, or a member of a zip; unpacked while it is read where its name ends in .gz."""

    path: Path
    """Where it lies."""
    member: str = ""
    """Its name inside the zip at `path`; empty for a plain file."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.path}: {self.member}" if self.member else str(self.path)

    @property
    def bare(self) -> str:
        """Its last name without .gz: what tells the format and the language."""
        name = PurePosixPath(self.member).name if self.member else self.path.name
        return name[:-3] if name.lower().endswith(".gz") else name

    @property
    def suffix(self) -> str:
        """ ".txt" of a.txt and of a.txt.gz, in small letters."""
        return PurePosixPath(self.bare).suffix.lower()

    def blocks(self) -> Iterator[bytes]:
        """Its bytes, unpacked, a block at a time."""
        total = 0
        with self._open() as (file, archive):
            packed = self.path.stat().st_size
            while block := file.read(BLOCK):
                total += len(block)
                out = archive.count(self.member, total) if archive else total
                _refuse_bomb(self.name, out, packed)
                yield block

    def start(self) -> bytes:
        """Its first bytes, without UTF-8's mark; none of a file that is empty."""
        with self._open() as (file, _):
            return file.read(START).removeprefix(codecs.BOM_UTF8)

    def text(self) -> Iterator[str]:
        """Its characters as they are, a block at a time, without a byte order mark."""
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        place, line = 0, 1  # of the first byte that is not decoded yet
        for block in self.blocks():
            size = len(block)
            if place == 0:
                block = self._unmarked(block)
            require(
                b"\0" not in block,
                f"{self.name} is a binary file (it holds zero bytes): give a text file, UTF-8.",
            )
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                line += bytes(error.object[: error.start]).count(b"\n")
                base = place + size - len(block) - pending
                raise self._wrong(error, base, line) from error
            place += size
            line += block.count(b"\n")
            yield text
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise self._wrong(error, place - len(error.object), line) from error

    def running(self) -> Iterator[str]:
        """Its characters with every kind of line end as a newline, as Python's `open` reads."""
        ends = io.IncrementalNewlineDecoder(None, translate=True)
        for text in self.text():
            yield ends.decode(text)
        yield ends.decode("", final=True)

    def lines(self) -> Iterator[str]:
        """Its lines, each with its end; only a newline ends one. The last may have none."""
        kept = ""
        for text in self.text():
            parts = (kept + text).split("\n")
            kept = parts.pop()
            for part in parts:
                yield part + "\n"
            require(
                len(kept) <= LONGEST,
                f"{self.name} has a line of more than {LONGEST:,} characters: it has no lines that "
                "are records.",
            )
        if kept:
            yield kept

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[IO[bytes], _Archive | None]]:
        """Its bytes, unpacked, and the zip that it lies in; what is broken says so."""
        try:
            archive = _archive_of(self.path) if self.member else None
            with contextlib.ExitStack() as stack:
                file: Any = archive.open(self.member) if archive else self.path.open("rb")
                stack.enter_context(file)
                if (self.member or self.path.name).lower().endswith(".gz"):
                    file = stack.enter_context(gzip.GzipFile(fileobj=file))
                yield file, archive
        except ClearheadError:
            raise
        except _BROKEN as error:
            raise ClearheadError(f"{self.name} cannot be read: {_said(error)}.") from error

    def _unmarked(self, block: bytes) -> bytes:
        """The first block without UTF-8's mark; other encodings' marks name them."""
        for mark, encoding in _MARKS.items():
            require(not block.startswith(mark), f"{self.name} is {encoding}. {self._how(encoding)}")
        return block.removeprefix(codecs.BOM_UTF8)

    def _wrong(self, error: UnicodeDecodeError, base: int, line: int) -> ClearheadError:
        return ClearheadError(
            f"{self.name} is not UTF-8: byte 0x{error.object[error.start]:02x} at "
            f"{base + error.start} (line {line}). If it is Western European text: "
            f"{self._how('WINDOWS-1252')}"
        )

    def _how(self, encoding: str) -> str:
        name = self.bare
        return f"Convert it: iconv -f {encoding} -t UTF-8 '{name}' > 'utf8-{name}'"


class _Archive(zipfile.ZipFile):
    """A zip that is open, with how much has come out of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._sizes: dict[str, int] = {}
        self._total = 0

    def count(self, member: str, size: int) -> int:
        """Bytes out of all members, now that so many are out of this one; what is read again does
        not count again.
        """
        new = size - self._sizes.get(member, 0)
        if new > 0:
            self._sizes[member] = size
            self._total += new
        return self._total


def _archive_of(path: Path) -> _Archive:
    """A zip, opened once for all its members: its list of them may be long."""
    now = path.stat()
    return _kept_archive(path, (now.st_ino, now.st_size, now.st_mtime_ns, os.getpid()))


@functools.lru_cache(maxsize=1)
def _kept_archive(path: Path, stamp: Any) -> _Archive:
    """The last zip; another for a file that changed, and for a forked process: they would share
    one place in the file.
    """
    return _Archive(path)


def find_files(source: str | Path) -> list[File]:
    """The files that a path, a folder, a zip or a glob stands for, sorted; there is at least one.

    Files without content are left out where others have some.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = [File(file) for file in _walk(path)]
    elif path.is_file():
        found = _members(path) if path.suffix.lower() == ".zip" else [File(path)]
    elif glob.has_magic(str(source)):
        names = sorted(glob.glob(str(path), recursive=True))
        found = [File(Path(name)) for name in names if Path(name).is_file()]
        require(bool(found), f'No file matches "{source}".')
    else:
        require(not path.exists(), f"{source} is neither a file nor a folder.")
        raise ClearheadError(f'There is no file or folder "{source}".{_neighbour(path)}')
    require(bool(found), f"{source} holds no files.")
    starts = {file: file.start() for file in found}
    if path.is_dir() or found[0].member:
        _refuse_binaries(starts, "the zip" if found[0].member else f"{path}{os.sep}")
    filled = [file for file in found if starts[file]]
    require(bool(filled), f"{source} is empty." if len(found) == 1 else f"{source}: all are empty.")
    return filled


def _walk(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _members(path: Path) -> list[File]:
    try:
        inside = [info for info in _archive_of(path).infolist() if _is_wanted(info)]
    except _BROKEN as error:
        raise ClearheadError(f"{path} is no zip that can be read: {_said(error)}.") from error
    _refuse_bomb(str(path), sum(info.file_size for info in inside), path.stat().st_size)
    for info in inside:
        require(not info.flag_bits & 1, f"{path} needs a password: unpack it first.")
    return [File(path, name) for name in sorted({info.filename for info in inside})]


def _is_wanted(info: zipfile.ZipInfo) -> bool:
    parts = PurePosixPath(info.filename).parts
    hidden = any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in parts)
    return not info.is_dir() and not hidden


def _refuse_binaries(starts: dict[File, bytes], where: str) -> None:
    """All binary files of a folder at once, so that one look is enough."""
    binary = [
        file.member or str(file.path)
        for file, start in starts.items()
        if b"\0" in start and not start.startswith(tuple(_MARKS))
    ]
    if binary:
        more = f" and {len(binary) - 5} more" if len(binary) > 5 else ""
        raise ClearheadError(
            f"{where} also holds binary files: {', '.join(binary[:5])}{more}. Take them away, or "
            "choose files by a pattern such as 'folder/**/*.txt'."
        )


def _refuse_bomb(name: str, size: int, packed: int) -> None:
    require(
        size <= max(FREE, RATIO * packed),
        f"{name} unpacks to more than {RATIO} times its size: that is no text. Unpack it yourself "
        "if you trust it.",
    )


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _neighbour(path: Path) -> str:
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(path.name, beside)
