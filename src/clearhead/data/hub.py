"""Data sets by name from the Hugging Face hub: "hf:name" or "hf:name:config".

The package `datasets` (extra `data`) downloads and keeps them in its own cache, memory-mapped. No
code of a data set is run. "validation" is called "valid", and so is the first of those that begin
so ("validation_matched") where none has that name alone; the same holds for "test". A column of
objects (`translation: {en, de}`) becomes one column for each key (`column.key` where the key is
taken), and a class number its name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from clearhead.data.readers import Record, Rows, open_rows
from clearhead.errors import ClearheadError

SPLITS = {"valid": ("validation", "valid", "dev"), "test": ("test",)}
"""Our name -> what a split's name is, or begins with, at the hub."""


def open_hub(name: str) -> dict[str, Rows]:
    """The splits that a data set of the hub has; at least "train"."""
    path, _, config = name.removeprefix("hf:").partition(":")
    loaded = _load(path, config or None)
    if "train" not in loaded:
        raise ClearheadError(
            f'The data set "{path}" has no split "train"; it has {", ".join(loaded)}.'
        )
    found = {"train": loaded["train"]}
    for split, names in SPLITS.items():
        near = [*(n for n in names if n in loaded), *(n for n in loaded if n.startswith(names))]
        if near:
            found[split] = loaded[near[0]]
    return {
        split: open_rows(_Reader(table, _class_names(table)), f"{name} ({split})")
        for split, table in found.items()
    }


@dataclasses.dataclass(frozen=True, eq=False)
class _Reader:
    """Starts a split's records; an object, so that data workers can be sent it."""

    table: Any
    """The data set's own table, memory-mapped."""
    names: dict[str, list[str]]
    """Column -> what its class numbers mean."""

    def __call__(self) -> Iterator[Record]:
        for row in self.table:
            record: Record = {}
            for column, value in row.items():
                if not isinstance(value, dict):
                    record[column] = self._of(column, value)
                    continue
                for key, inner in value.items():
                    taken = key in record or (key in row and key != column)
                    record[f"{column}.{key}" if taken else key] = inner
            yield record

    def _of(self, column: str, value: Any) -> Any:
        names = self.names.get(column)
        known = names is not None and isinstance(value, int) and 0 <= value < len(names)
        return names[value] if names is not None and known else value


def _class_names(table: Any) -> dict[str, list[str]]:
    features = getattr(table, "features", None) or {}
    return {
        column: list(feature.names)
        for column, feature in features.items()
        if getattr(feature, "names", None)
    }


def _load(path: str, config: str | None) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ClearheadError(
            f'The data set "{path}" comes from the Hugging Face hub, which needs the package '
            'datasets: pip install "clearhead[data]".'
        ) from error
    # Up to version 3 sets could be programs; later ones have neither those nor the setting.
    old = "trust_remote_code" in inspect.signature(load_dataset).parameters
    try:
        return load_dataset(path, config, **({"trust_remote_code": False} if old else {}))
    except Exception as error:  # what it raises differs between versions
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ClearheadError(
            f'The data set "{path}" could not be had from the hub ({said}): check its name '
            '(hub names look like owner/name, a configuration follows as "hf:name:config"), the '
            "connection, or HF_HUB_OFFLINE."
        ) from error
