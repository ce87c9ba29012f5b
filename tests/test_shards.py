"""Stores of tokenised examples: what goes in comes out, whole or not at all."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from clearhead.data import shards
from clearhead.data.shards import Store, cached_store, write_store
from clearhead.errors import ClearheadError

EXAMPLES = [
    {"ids": [7, 8, 9], "label": 1, "score": 0.5},
    {"ids": [], "label": 0, "score": 1.0},
    {"ids": [65535], "label": 2, "score": -2.25},
]


def test_what_is_written_is_read(tmp_path):
    written = write_store(tmp_path / "s", EXAMPLES)
    for store in (written, Store.open(tmp_path / "s")):
        assert len(store) == 3
        assert store.columns == ("ids", "label", "score")
        for i, example in enumerate(EXAMPLES):
            found = store[i]
            assert found["ids"].tolist() == example["ids"]
            assert (found["label"].item(), found["score"].item()) == (
                example["label"],
                example["score"],
            )
        assert store.flat("ids").tolist() == [7, 8, 9, 65535]
        assert store.lengths("ids").tolist() == [3, 0, 1]
        assert store.lengths("label").tolist() == [1, 1, 1]
    assert store.flat("ids").dtype == np.uint16
    assert store.flat("score").dtype == np.float32
    taken = store.take(np.array([2, 0]))
    assert [row["ids"].tolist() for row in taken] == [[65535], [7, 8, 9]]
    with pytest.raises(IndexError, match="Example 3 of 3"):
        store[3]
    with pytest.raises(ClearheadError, match=r'no column "labels".* mean "label"'):
        store.flat("labels")


@pytest.mark.parametrize(
    ("last", "dtype"), [(65535, "uint16"), (65536, "int32"), (-100, "int32"), (2**40, "int64")]
)
def test_a_column_grows_with_its_numbers(tmp_path, monkeypatch, last, dtype):
    monkeypatch.setattr(shards, "BUFFER", 8)  # so that much is on disk when the large one comes
    rows = [[i, i + 1, i + 2] for i in range(50)] + [[last]]
    store = write_store(tmp_path / "s", ({"ids": row} for row in rows))
    assert store.flat("ids").dtype == dtype
    assert [store[i]["ids"].tolist() for i in range(51)] == rows
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [
        "ids.ends",
        "ids.values",
        "manifest.json",
    ]


def test_nothing_is_there_until_all_is(tmp_path):
    def torn():
        yield {"ids": [1]}
        assert not (tmp_path / "s").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "s", torn())
    assert list(tmp_path.iterdir()) == []


def test_who_comes_second_takes_what_is_there(tmp_path):
    def slow():
        write_store(tmp_path / "s", [{"ids": [1, 2]}])  # another process, meanwhile
        yield {"ids": [1, 2]}

    store = write_store(tmp_path / "s", slow())
    assert store.flat("ids").tolist() == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_the_killed_left_behind_is_swept(tmp_path):
    old, young = tmp_path / ".s-old", tmp_path / ".s-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "ids.values").write_bytes(b"00")
    for path in (old / "ids.values", old):
        os.utime(path, (1e9, 1e9))
    write_store(tmp_path / "s", [{"ids": [1]}])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s-young", "s"]


def test_bad_examples_are_refused(tmp_path):
    with pytest.raises(ClearheadError, match="no examples"):
        write_store(tmp_path / "s", [])
    with pytest.raises(ClearheadError, match="Example 2 has the columns"):
        write_store(tmp_path / "s", [{"a": [1]}, {"b": [1]}])
    with pytest.raises(ClearheadError, match="not what this column holds"):
        write_store(tmp_path / "s", [{"a": 1}, {"a": [1, 2]}])
    assert list(tmp_path.iterdir()) == []


def test_the_cache_makes_once_and_mends(tmp_path, monkeypatch):
    made = []

    def make():
        made.append(1)
        return [{"ids": [3, 4]}]

    assert cached_store("k", make, tmp_path).flat("ids").tolist() == [3, 4]
    assert cached_store("k", make, tmp_path).flat("ids").tolist() == [3, 4]
    assert len(made) == 1
    (tmp_path / "k" / "ids.values").write_bytes(b"\x00")  # torn
    with pytest.raises(ClearheadError, match="has 1 bytes, not 4"):
        Store.open(tmp_path / "k")
    assert cached_store("k", make, tmp_path).flat("ids").tolist() == [3, 4]
    assert len(made) == 2
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "elsewhere"))
    cached_store("k", make, None)
    assert (tmp_path / "elsewhere" / "shards" / "k" / "manifest.json").exists()


def test_no_store_is_said_so(tmp_path):
    with pytest.raises(ClearheadError, match="no complete store"):
        Store.open(tmp_path / "nothing")
    write_store(tmp_path / "s", [{"ids": [1]}])
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    manifest["format"] = "other/9"
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ClearheadError, match="another format"):
        Store.open(tmp_path / "s")
