"""Tokenised examples on disk, memory-mapped: written once in a stream, read as if they were in
memory.

    manifest.json     {"format": ..., "examples": 3, "columns": {"ids": {...}, "label": {...}}}
    ids.values        all examples one behind the other: 7 8 9 | 4 | 5 6
    ids.ends          where each example ends:               3   4   6
    label.values      one number an example (a column of numbers has no ends)

A column is kept in the smallest type its numbers fit. The folder is written beside its place and
renamed when it is complete, so that a folder that is there is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.paths import cache_folder

FORMAT = "clearhead-shards/1"
MANIFEST = "manifest.json"
DAY = 24 * 3600  # nobody writes for that long without a word
BUFFER = 1 << 20  # numbers of a column that are held back before they are written
TYPES = ("uint16", "int32", "int64", "float32")  # each is tried when a number does not fit the last

Example = Mapping[str, Sequence[int] | np.ndarray | int | float]


class Store:
    """Examples with named columns, each a list of numbers or one number. `Store.open(folder)`."""

    def __init__(
        self, values: dict[str, np.ndarray], ends: dict[str, np.ndarray], examples: int
    ) -> None:
        self.columns = tuple(values)
        self._values, self._ends, self._examples = values, ends, examples

    @staticmethod
    def open(folder: str | Path) -> Store:
        """The store of a folder; its files must be exactly as long as the manifest says."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            require(manifest["format"] == FORMAT, f"{folder} has another format than {FORMAT}.")
            examples, columns = int(manifest["examples"]), manifest["columns"]
            values, ends = {}, {}
            for name, column in columns.items():
                length = int(column["values"])
                values[name] = _mapped(folder / f"{name}.values", column["dtype"], length)
                if column["ragged"]:
                    ends[name] = _mapped(folder / f"{name}.ends", "int64", examples)
        except ClearheadError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClearheadError(
                f"{folder} is no complete store of examples ({error}): delete it, and it is made "
                "again."
            ) from error
        return Store(values, ends, examples)

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Example i: its columns, without a copy; a number is an array of no dimension."""
        if not 0 <= i < self._examples:
            raise IndexError(f"Example {i} of {self._examples}.")
        return self.take(np.array([i]))[0]

    def take(self, numbers: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Several examples at once, which costs less than one by one."""
        columns = {}
        for name, values in self._values.items():
            if name in self._ends:
                ends = self._ends[name]
                begins = np.where(numbers > 0, ends[numbers - 1], 0).tolist()
                spans = zip(begins, ends[numbers].tolist(), strict=True)
                columns[name] = [values[begin:end] for begin, end in spans]
            else:
                columns[name] = [values[i : i + 1].reshape(()) for i in numbers.tolist()]
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def flat(self, column: str) -> np.ndarray:
        """All examples of a column one behind the other; mapped, not read."""
        self._known(column)
        return self._values[column]

    def lengths(self, column: str) -> np.ndarray:
        """How many numbers each example has in a column."""
        self._known(column)
        if column not in self._ends:
            return np.ones(self._examples, dtype=np.int64)
        return np.diff(self._ends[column], prepend=0)

    def _known(self, column: str) -> None:
        require(
            column in self._values,
            f'There is no column "{column}" in this store.{did_you_mean(column, self.columns)} '
            f"It has: {', '.join(self.columns)}.",
        )


def write_store(folder: str | Path, examples: Iterable[Example]) -> Store:
    """Write examples as they come, in bounded memory, and open them.

    Nothing is at `folder` until all is; where another process was faster, its folder is taken.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ClearheadError(f"Examples cannot be written to {folder}: {error}.") from error
    try:
        _write(new, examples)
        try:
            new.rename(folder)
        except OSError:
            if not (folder / MANIFEST).exists():
                raise
    except OSError as error:
        raise ClearheadError(
            f"Examples cannot be written to {folder}: {error}. Free some space, or set "
            "CLEARHEAD_CACHE to a folder on another disk."
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Store.open(folder)


def cached_store(key: str, make: Callable[[], Iterable[Example]], cache: Path | None) -> Store:
    """The store of a key, made at the first call; a damaged one is made again.

    The key is a hash of everything the examples depend on. `cache`: the folder of all stores; None:
    shards/ in $CLEARHEAD_CACHE, or in ~/.cache/clearhead.
    """
    if cache is None:
        cache = cache_folder() / "shards"
    folder = cache / key
    if folder.exists():
        try:
            return Store.open(folder)
        except ClearheadError:
            shutil.rmtree(folder, ignore_errors=True)
    return write_store(folder, make())


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed while writing left behind."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        try:
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
        except OSError:
            continue  # its owner has just finished
        if time.time() - newest > DAY:
            shutil.rmtree(left, ignore_errors=True)


def _mapped(path: Path, dtype: str, length: int) -> np.ndarray:
    """A file as an array; a plain one, because slices of np.memmap cost several times as much."""
    require(dtype in TYPES, f"{path}: {dtype!r} is no type of a column.")
    wanted, size = length * np.dtype(dtype).itemsize, path.stat().st_size
    require(
        size == wanted,
        f"{path} has {size:,} bytes, not {wanted:,}: delete its folder, and it is made again.",
    )
    if not length:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _write(folder: Path, examples: Iterable[Example]) -> None:
    columns: dict[str, _Column] = {}
    count = 0
    with ExitStack() as files:  # closes every column, even if one cannot be written
        for count, example in enumerate(examples, start=1):
            if count == 1:
                columns = {name: _Column(folder, name, v) for name, v in example.items()}
                for column in columns.values():
                    files.callback(column.close)
            if columns.keys() != example.keys():
                raise ClearheadError(
                    f"Example {count} has the columns {sorted(example)}, those before it "
                    f"{sorted(columns)}."
                )
            for name, value in example.items():
                columns[name].add(value)
    require(count > 0, "There are no examples to write: the data is empty.")
    about = {name: column.about() for name, column in columns.items()}
    manifest = {"format": FORMAT, "examples": count, "columns": about}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


class _Column:
    """One column while it is written."""

    def __init__(self, folder: Path, name: str, first: Any) -> None:
        self.path = folder / f"{name}.values"
        self.ragged = np.ndim(first) > 0
        self.dtype = np.dtype(TYPES[0])
        self.values: BinaryIO = self.path.open("wb")
        self.ends: BinaryIO | None = None
        if self.ragged:
            self.ends = (folder / f"{name}.ends").open("wb")
        self.held: list[np.ndarray] = []
        self.held_ends: list[int] = []
        self.waiting = self.total = 0

    def add(self, value: Any) -> None:
        array = np.atleast_1d(np.asarray(value))
        if array.size == 0:
            array = array.astype(np.uint16)  # an empty list has no type of its own
        fitting = array.ndim == 1 and array.dtype.kind in "iuf"
        if not fitting or not (self.ragged or array.size == 1):
            raise ClearheadError(
                f"{self.path.stem}: {value!r} is not what this column holds (numbers, in every "
                "example a list of them or in every example one)."
            )
        self.held.append(array)
        self.total += array.size
        self.held_ends.append(self.total)
        self.waiting += array.size + 1
        if self.waiting >= BUFFER:
            self.flush()

    def flush(self) -> None:
        if not self.held:
            return
        array = np.concatenate(self.held)
        while not _fits(array, self.dtype):
            self.widen(TYPES[TYPES.index(self.dtype.name) + 1])
        self.values.write(array.astype(self.dtype).tobytes())
        if self.ends is not None:
            self.ends.write(np.asarray(self.held_ends, dtype=np.int64).tobytes())
        self.held, self.held_ends, self.waiting = [], [], 0

    def widen(self, dtype: str) -> None:
        """Rewrite what is there in a larger type."""
        self.values.close()
        narrow = self.path.with_suffix(".narrow")
        self.path.rename(narrow)
        self.values = self.path.open("wb")
        with narrow.open("rb") as file:
            while data := file.read(BUFFER * self.dtype.itemsize):
                self.values.write(np.frombuffer(data, self.dtype).astype(dtype).tobytes())
        narrow.unlink()
        self.dtype = np.dtype(dtype)

    def close(self) -> None:
        with self.values if self.ends is None else self.ends:
            self.flush()
            with self.values:
                for file in (self.values, self.ends):
                    if file is not None:
                        file.flush()
                        os.fsync(file.fileno())

    def about(self) -> dict[str, Any]:
        return {"dtype": self.dtype.name, "ragged": self.ragged, "values": self.total}


def _fits(array: np.ndarray, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f" or array.size == 0:
        return True
    if array.dtype.kind == "f":
        return False
    limits = np.iinfo(dtype)
    return bool(array.min() >= limits.min and array.max() <= limits.max)
