"""A corpus: where training data comes from, cut into what trains, what validates and what tests.

    open_corpus("my.txt")                       the first 90 % of its characters train
    open_corpus("reviews.csv", split=0.2)       a fifth of its records, from everywhere, validates
    open_corpus("train.en,train.de", valid="val.en,val.de")
    open_corpus("multi30k")                     a named set has its own splits
    open_corpus("sort:longest=12")              made data: training has no end
    open_corpus("hf:glue:sst2")                 from the Hugging Face hub

The name of a set comes first: a folder called manual is "./manual". Opening reads everything once,
in a stream, so that what is wrong with a file is said before any work; see readers.py for
what the records look like, and how the pieces of a long document are joined.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from clearhead.data.download import Progress
from clearhead.data.files import File, find_files
from clearhead.data.holdout import SPLITS
from clearhead.data.hub import open_hub
from clearhead.data.made import Maker
from clearhead.data.named import is_named, named_sets, open_maker, open_named
from clearhead.data.readers import (
    Record,
    Rows,
    Stream,
    beside,
    fingerprint_of,
    languages,
    open_files,
    open_parallel,
)
from clearhead.errors import ClearheadError, did_you_mean, require

Source = str | Path | Sequence[str | Path]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Records for training, validation and test; each can be read again and again."""

    name: str
    """What the user called it."""
    parts: Mapping[str, Stream]
    """Split -> its records."""
    maker: Maker | None = None
    """What makes the records where training has no end; None where it has."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Which of train, valid and test there are."""
        return tuple(split for split in SPLITS if split in self.parts)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the training records."""
        return self.parts["train"].columns

    @property
    def fingerprint(self) -> str:
        """sha256 over the content of all splits."""
        return fingerprint_of({split: self.parts[split].fingerprint for split in self.splits})

    @property
    def endless(self) -> bool:
        """Whether training records are made as long as one asks for them."""
        return self.maker is not None

    def count(self, split: str) -> int | None:
        """How many records a split has (characters of running text); None if it has no end."""
        return self._part(split).count

    def records(self, split: str) -> Iterator[Record]:
        """The records of a split, from its first."""
        return iter(self._part(split))

    def sample(self, split: str, most: int = 10_000) -> Iterator[Record]:
        """What a tokeniser is learnt from: all records, or so many where they have no end."""
        return islice(self.records(split), most if self.count(split) is None else None)

    def record(self, split: str, seed: int, n: int) -> Record:
        """The n-th made record for a seed: a pure function."""
        if self.maker is None:
            raise ClearheadError(f"{self.name} is read, not made: it has no records by seed.")
        return self.maker.record(split, seed, n)

    def require_columns(self, *names: str) -> None:
        """Refuse unless every record of every split has these columns."""
        for split in self.splits:
            part = self.parts[split]
            for name in names:
                lacks = part.lacks(name)
                require(
                    not lacks,
                    f'{self.name} ({split}) {lacks} column "{name}"; there are: '
                    f"{', '.join(part.columns)}.{did_you_mean(name, part.columns)}",
                )

    def _part(self, split: str) -> Stream:
        require(
            split in self.parts,
            f'{self.name} has no split "{split}"; it has {", ".join(self.splits)}.'
            f"{did_you_mean(split, self.splits)}",
        )
        return self.parts[split]


def open_corpus(
    source: Source,
    valid: Source | None = None,
    test: Source | None = None,
    split: float = 0.1,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus that a file, a folder, a pattern, parallel files or a name stands for.

    Without `valid`, and unless a named set has a split of its own, a `split` part validates: of
    texts the last characters (over all files together), of records some from everywhere; 0 holds
    nothing out.
    `limit` keeps only the first so many training records, or characters of running text.
    """
    require(0 <= split < 1, f"split is {split}: it is the part that validates, from 0 to below 1.")
    require(limit is None or limit > 0, f"limit is {limit}; at least one record must be left.")
    paths = _paths(source)
    name = ",".join(paths)
    maker = open_maker(paths[0]) if len(paths) == 1 else None
    parts: dict[str, Stream] = dict(maker.streams()) if maker else _open(paths, progress)
    for called, other in (("valid", valid), ("test", test)):
        if other is not None:
            parts[called] = _held_out(other, called, progress)
            require(
                parts[called].fingerprint != parts["train"].fingerprint,
                f"{called} is what trains, {name}: a score on it would say nothing. Name other "
                "data, or none: then a part of it validates.",
            )
    if "valid" not in parts and split > 0:
        parts["train"], parts["valid"] = cut(parts["train"], split, name)
    if limit is not None:
        parts["train"] = parts["train"].part(0, limit)
        maker = None  # so many and no more: an ordinary corpus
    return Corpus(name, parts, maker)


def cut(stream: Stream, split: float, name: str) -> tuple[Stream, Stream]:
    """All but a part, and that: of running text the last, of records some from everywhere."""
    total = stream.count or 0
    border = int(total * (1 - split))
    require(
        0 < border < total,
        f"{name} has {total} {stream.unit if total != 1 else stream.unit[:-1]}: too few to hold "
        f"{split:.0%} of them out. Name a file that validates, or set split to 0.",
    )
    if isinstance(stream, Rows):
        return stream.spread(total - border)
    return stream.part(0, border), stream.part(border, total)


def _held_out(source: Source, called: str, progress: Progress | None) -> Stream:
    """What validates or tests: a set's own split of that name, or all of a file."""
    paths = _paths(source)
    require(
        len(paths) > 1 or open_maker(paths[0]) is None,
        f'"{paths[0]}" is made without end: it cannot be the data for {called}.',
    )
    parts = _open(paths, progress)
    require(
        called in parts or set(parts) == {"train"},
        f'"{",".join(paths)}" has no split "{called}"; it has {", ".join(parts)}. Name another '
        "set, or a file.",
    )
    return parts.get(called, parts["train"])


def _open(paths: list[str], progress: Progress | None) -> dict[str, Stream]:
    """The splits that a source has by itself; files are all "train"."""
    if paths[0].startswith("hf:"):
        return dict(open_hub(",".join(paths)))
    if is_named(paths[0]):
        return open_named(",".join(paths), progress)
    found = [_found(path) for path in paths]
    files = [file for some in found for file in some]
    names = languages(files) if len(files) == len(paths) > 1 else None
    if names is None and len(files) == len(paths) == 2:
        names = beside(files)
    suffixes = {Path(path).suffix for path in paths}
    require(
        names is not None or len(suffixes) < 2 or len(paths) != 2,
        f"{' and '.join(paths)} have two endings, but are not taken for parallel files: those "
        "differ in their language alone (train.en, train.de), or have names without numbers and as "
        "many lines. Several texts are a folder or a pattern.",
    )
    return {"train": open_parallel(files, names) if names else open_files(files, ",".join(paths))}


def _found(path: str) -> list[File]:
    """The files; a name that is neither a file nor a set gets the nearest of the sets."""
    there = Path(path).expanduser().exists() or glob.has_magic(path)
    if not there and "/" not in path and "\\" not in path:
        near = did_you_mean(path.partition(":")[0], named_sets())
        require(not near, f'There is no file and no data set "{path}".{near}')
    return find_files(path)


def _paths(source: Source) -> list[str]:
    """One path or name, or several: a list, or "train.en,train.de"."""
    if isinstance(source, Path):
        return [str(source)]
    if isinstance(source, str):
        one = is_named(source) or Path(source).exists()
        return [source] if one else [path.strip() for path in source.split(",")]
    require(len(source) > 0, "A list of files must name at least one.")
    return [str(path) for path in source]
