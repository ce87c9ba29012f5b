"""What trains, what validates and what tests; named sets; downloads."""

from __future__ import annotations

import hashlib
import http.client
import os
import sys
import types
from itertools import pairwise
from pathlib import Path

import pytest

from clearhead.data import download as download_module
from clearhead.data import named, readers
from clearhead.data.corpus import open_corpus
from clearhead.data.download import Remote, download
from clearhead.errors import ClearheadError

DATA = os.environ.get("CLEARHEAD_DATA", "")


def needs(folder: str):
    there = bool(DATA) and (Path(DATA) / folder).is_dir()
    return pytest.mark.skipif(not there, reason=f"CLEARHEAD_DATA has no folder {folder}")


def text_of(corpus, split: str) -> str:
    return "".join(record["text"] for record in corpus.records(split))


@pytest.fixture
def table(tmp_path) -> str:
    path = tmp_path / "table.csv"
    path.write_text("text,label\n" + "".join(f"t{n},{n % 2}\n" for n in range(25)))
    return str(path)


# --- splits ---


@pytest.mark.parametrize("length", [2, 9, 10, 11, 1000, 4097])
def test_a_text_is_split_by_characters_as_nanogpt_does(tmp_path, monkeypatch, length):
    monkeypatch.setattr(readers, "PIECE", 100)
    text = "".join("\n" if n % 17 == 16 else chr(192 + n % 300) for n in range(length))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = open_corpus(tmp_path / "a.txt")
    assert corpus.splits == ("train", "valid")
    assert corpus.columns == ("text",)
    border = int(0.9 * length)
    assert text_of(corpus, "train") == text[:border]
    assert text_of(corpus, "valid") == text[border:]
    assert text_of(corpus, "valid") == text[border:]  # again, from its start
    assert corpus.count("train") == border
    for split in corpus.splits:
        assert not list(corpus.records(split))[-1].get(readers.MORE)


def test_records_are_split_by_count(table):
    corpus = open_corpus(table, split=0.2)
    train, valid = ([r["text"] for r in corpus.records(s)] for s in ("train", "valid"))
    assert (len(train), len(valid)) == (20, 5)
    assert {*train, *valid} == {f"t{n}" for n in range(25)}
    assert open_corpus(table, split=0).splits == ("train",)


@pytest.mark.parametrize(("total", "split"), [(2, 0.1), (25, 0.1), (100, 0.25), (97, 0.5)])
def test_records_that_validate_come_from_everywhere(tmp_path, total, split):
    """A table that is sorted by its labels is split all the same."""
    path = tmp_path / "sorted.csv"
    path.write_text("text,label\n" + "".join(f"t{i},{i * 4 // total}\n" for i in range(total)))
    corpus = open_corpus(path, split=split)
    train, valid = ([r["text"] for r in corpus.records(s)] for s in ("train", "valid"))
    assert (len(train), len(valid)) == (corpus.count("train"), corpus.count("valid"))
    assert len(valid) == total - int(total * (1 - split))
    assert sorted(train + valid) == sorted(f"t{i}" for i in range(total))
    assert [r["text"] for r in corpus.records("valid")] == valid  # read again
    assert [r["text"] for r in open_corpus(path, split=split).records("valid")] == valid
    numbers = [int(text[1:]) for text in valid]
    assert numbers == sorted(numbers)
    if total > 20:
        assert {number * 4 // total for number in numbers} >= {0, 3}
        assert len({b - a for a, b in pairwise(numbers)}) > 1  # not every tenth, say


def test_files_that_validate_and_test(tmp_path, table):
    (tmp_path / "v.csv").write_text("label,text\n1,v\n")
    (tmp_path / "t.csv").write_text("text,label\nt,0\n")
    corpus = open_corpus(table, valid=str(tmp_path / "v.csv"), test=tmp_path / "t.csv")
    assert corpus.splits == ("train", "valid", "test")
    assert [corpus.count(split) for split in corpus.splits] == [25, 1, 1]
    assert list(corpus.records("valid")) == [{"label": "1", "text": "v"}]
    corpus.require_columns("text", "label")


@pytest.mark.parametrize("joined", [True, False])
def test_parallel_files(tmp_path, joined):
    for language in ("en", "de"):
        for part, lines in (("train", 20), ("val", 3)):
            text = "".join(f"{language} {part} {n}\n" for n in range(lines))
            (tmp_path / f"{part}.{language}").write_text(text)
    pairs = [[str(tmp_path / f"{part}.{x}") for x in ("en", "de")] for part in ("train", "val")]
    train, valid = (",".join(pair) if joined else pair for pair in pairs)
    corpus = open_corpus(train, valid)
    assert corpus.columns == ("en", "de")
    assert (corpus.count("train"), corpus.count("valid")) == (20, 3)
    assert list(corpus.records("valid"))[2] == {"en": "en val 2", "de": "de val 2"}
    assert open_corpus(train).count("valid") == 2


def test_several_texts_are_one_corpus(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name[0] * 10)
    corpus = open_corpus([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert [r["text"] for r in corpus.records("train")] == ["a" * 10, "b" * 8]
    assert text_of(corpus, "valid") == "bb"


def test_limit_keeps_the_first_training_records_alone(tmp_path, table):
    corpus = open_corpus(table, limit=3)
    assert [r["text"] for r in corpus.records("train")] == ["t0", "t1", "t2"]
    assert corpus.count("valid") == 3
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    assert text_of(open_corpus(tmp_path / "a.txt", limit=12), "train") == "012345678901"


def test_the_fingerprint_is_of_content_and_cut(tmp_path, table):
    first = open_corpus(table)
    os.utime(table, (1, 1))
    assert open_corpus(table).fingerprint == first.fingerprint
    assert open_corpus(table, split=0.2).fingerprint != first.fingerprint
    assert open_corpus(table, limit=5).fingerprint != first.fingerprint
    Path(table).write_text(Path(table).read_text().replace("t7,1", "t7,0"))
    assert open_corpus(table).fingerprint != first.fingerprint
    assert len(first.fingerprint) == 64


def test_sample_is_all_that_has_an_end(table):
    assert len(list(open_corpus(table).sample("train"))) == 22
    assert len(list(open_corpus("copy").sample("train", most=7))) == 7


# --- bad input ---


def test_columns_that_are_not_there(tmp_path, table):
    corpus = open_corpus(table)
    with pytest.raises(ClearheadError, match=r'no column "lable".*text, label.*mean "label"'):
        corpus.require_columns("text", "lable")
    (tmp_path / "v.csv").write_text("text\nv\n")
    with pytest.raises(ClearheadError, match=r'\(valid\) has no column "label"'):
        open_corpus(table, valid=tmp_path / "v.csv").require_columns("label")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n' * 12 + '{"text": "b"}\n' * 8)
    with pytest.raises(ClearheadError, match='lacks in record 13 the column "n"'):
        open_corpus(tmp_path / "a.jsonl").require_columns("n")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("one.jsonl", '{"text": "a"}\n', "has 1 record: too few to hold 10% of them out"),
        ("one.csv", "text\na\n", "has 1 record: too few"),
        ("letter.txt", "a", "has 1 character: too few"),
    ],
)
def test_what_cannot_be_split_says_so(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ClearheadError, match=said):
        open_corpus(tmp_path / name)
    assert len(list(open_corpus(tmp_path / name, split=0).records("train"))) == 1


def test_one_line_of_text_is_text(tmp_path):
    (tmp_path / "line.txt").write_text("only one line, but long enough")
    assert text_of(open_corpus(tmp_path / "line.txt"), "valid") == "ugh"


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ("tinyshakespear", {}, 'no data set "tinyshakespear".*mean "tinyshakespeare"'),
        ("multi-30k", {}, 'mean "multi30k"'),
        ("no/such/file.txt", {}, 'no file or folder "no/such/file.txt"'),
        ("manual:a=1", {}, "has no settings"),
        ("copy:longst=3", {}, 'mean "longest"'),
        ("copy:longest", {}, "write it as name=value"),
        ("copy:longest=many", {}, 'whole number, not "many"'),
        ("copy:spaced=yes", {}, "true or false"),
        ("copy:shortest=5,longest=4", {}, "not from 5 to 4"),
        ("copy:symbols=aa", {}, "different symbols"),
        ("add:digits=0", {}, "from 1 to 18"),
        ("dates:first=2000,last=2001", {}, "ten or more years"),
        ("copy", {"valid": "sort"}, "cannot be the data for valid"),
        ("copy", {"split": 1.0}, "from 0 to below 1"),
        ("copy", {"split": -0.1}, "from 0 to below 1"),
        ("copy", {"limit": 0}, "at least one record"),
        ([], {}, "at least one"),
    ],
)
def test_wrong_names_and_settings(source, settings, said):
    with pytest.raises(ClearheadError, match=said):
        open_corpus(source, **settings)


@needs("trec")
def test_a_set_without_the_split_does_not_lend_its_training_data(table):
    with pytest.raises(ClearheadError, match='"trec" has no split "valid"; it has train, test'):
        open_corpus(table, valid="trec")
    assert open_corpus(table, test="trec").count("test") == 500


def test_the_training_data_cannot_be_held_out(tmp_path, table):
    (tmp_path / "copy.csv").write_text(Path(table).read_text())
    for called in ("valid", "test"):
        with pytest.raises(ClearheadError, match=f"{called} is what trains"):
            open_corpus(table, **{called: str(tmp_path / "copy.csv")})


def test_splits_that_are_not_there(table):
    corpus = open_corpus(table)
    with pytest.raises(ClearheadError, match='no split "test"; it has train, valid'):
        corpus.records("test")
    with pytest.raises(ClearheadError, match="it has no records by seed"):
        corpus.record("train", 0, 0)


# --- downloads ---


@pytest.fixture
def published(tmp_path, monkeypatch) -> Remote:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    file = tmp_path / "published.txt"
    file.write_text("published text")
    return Remote("got.txt", hashlib.sha256(file.read_bytes()).hexdigest(), file.as_uri())


def test_a_download_is_checked_and_kept(tmp_path, published):
    seen = []
    file = download_module.locate("set", published, "", lambda *told: seen.append(told))
    assert file.path == tmp_path / "cache" / "data" / "set" / "got.txt"
    assert "".join(file.text()) == "published text"
    assert seen == [("got.txt", 14, 14)]
    (tmp_path / "published.txt").unlink()
    assert download_module.locate("set", published, "") == file  # not asked for again


def test_a_wrong_hash_leaves_nothing_behind(tmp_path, published):
    wrong = Remote("got.txt", "0" * 64, published.url)
    with pytest.raises(ClearheadError, match="sha256"):
        download(wrong, tmp_path / "into" / "got.txt")
    assert list((tmp_path / "into").iterdir()) == []


def test_a_connection_that_speaks_no_http(published, monkeypatch):
    def fail(*_, **__):
        raise http.client.BadStatusLine("nonsense")

    monkeypatch.setattr(download_module.urllib.request, "urlopen", fail)
    with pytest.raises(ClearheadError, match=r"the download failed \(nonsense\)"):
        open_corpus("tinyshakespeare")


def test_without_a_connection_the_error_says_where_to_put_the_file(published, monkeypatch):
    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(download_module.urllib.request, "urlopen", fail)
    with pytest.raises(ClearheadError, match=r"CLEARHEAD_DATA/tinyshakespeare/input.txt.*https://"):
        open_corpus("tinyshakespeare")
    with pytest.raises(ClearheadError, match=r"CLEARHEAD_DATA/trec/train_5500.label.*Li and Roth"):
        open_corpus("trec")
    with pytest.raises(ClearheadError, match=r"CLEARHEAD_DATA/fra_eng/fra-eng.zip.*Tatoeba"):
        open_corpus("fra_eng")


def test_the_users_own_files_come_first_packed_or_not(tmp_path, published, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.en").write_text("mine")
    found = download_module.locate("set", Remote("train.en.gz"), "")
    assert found.path == tmp_path / "set" / "train.en"


# --- the hub ---


class Labels:
    names = ("bad", "good")


class Table(list):
    features = {"label": Labels(), "text": object()}  # noqa: RUF012


def test_hub_sets_have_our_names(monkeypatch):
    asked = []

    def load_dataset(path, config):
        asked.append((path, config))
        rows = [{"translation": {"en": "a", "de": "b"}, "label": 1}, {"label": -1, "text": "x"}]
        return {"train": Table(rows * 10), "validation": Table(rows[:1]), "unsupervised": Table()}

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = open_corpus("hf:owner/name:config")
    assert asked == [("owner/name", "config")]
    assert corpus.splits == ("train", "valid")
    assert list(corpus.records("valid")) == [{"en": "a", "de": "b", "label": "good"}]
    assert list(corpus.records("train"))[1] == {"label": -1, "text": "x"}
    assert corpus.count("train") == 20


def from_hub(monkeypatch, **splits):
    fake = types.SimpleNamespace(load_dataset=lambda path, config: splits)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return open_corpus("hf:owner/name")


def test_hub_splits_with_longer_names(monkeypatch):
    one, two, three = (Table([{"text": text}] * 10) for text in "abc")
    corpus = from_hub(monkeypatch, train=one, validation_matched=two, validation_other=three)
    assert next(corpus.records("valid")) == {"text": "b"}
    corpus = from_hub(monkeypatch, train=one, test_odd=two, test=three)
    assert next(corpus.records("test")) == {"text": "c"}
    assert next(corpus.records("valid")) == {"text": "a"}  # cut off


def test_hub_columns_are_never_overwritten(monkeypatch):
    row = {"text": "x", "one": {"text": "y", "n": 1}, "two": {"n": 2}, "n2": {"n2": 3}}
    corpus = from_hub(monkeypatch, train=Table([row] * 10))
    flat = {"text": "x", "one.text": "y", "n": 1, "two.n": 2, "n2": 3}
    assert next(corpus.records("train")) == flat


def test_old_versions_are_told_to_run_no_code(monkeypatch):
    told = []

    def load_dataset(path, config, trust_remote_code=None):
        told.append(trust_remote_code)
        return {"train": Table([{"text": "a"}] * 10)}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    open_corpus("hf:owner/name")
    assert told == [False]


def test_the_hub_without_its_package_or_its_set(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ClearheadError, match=r'pip install "clearhead\[data\]"'):
        open_corpus("hf:owner/name")

    def load_dataset(path, config):
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ClearheadError, match=r"could not be had from the hub \(offline\)"):
        open_corpus("hf:owner/name")
    only = types.SimpleNamespace(load_dataset=lambda *_: {"other": Table()})
    monkeypatch.setitem(sys.modules, "datasets", only)
    with pytest.raises(ClearheadError, match='no split "train"; it has other'):
        open_corpus("hf:owner/name")


# --- named sets ---


@needs("tinyshakespeare")
def test_tinyshakespeare_is_nanogpts():
    corpus = open_corpus("tinyshakespeare")
    text = (Path(DATA) / "tinyshakespeare" / "input.txt").read_text()
    assert text_of(corpus, "train") == text[:1003854]
    assert text_of(corpus, "valid") == text[1003854:]


@needs("multi30k")
def test_multi30k():
    corpus = open_corpus("multi30k")
    assert corpus.columns == ("en", "de", "fr")
    assert [corpus.count(split) for split in corpus.splits] == [29000, 1014, 1000]
    first = next(corpus.records("test"))
    assert first["en"] == "A man in an orange hat starring at something."
    assert first["de"] == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."


@needs("multi30k")
def test_published_hashes_are_those_of_the_files_here():
    for name, digest in named.MULTI30K.items():
        file = Path(DATA) / "multi30k" / f"{name}.gz"
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest


@pytest.mark.slow
@needs("fra_eng")
def test_fra_eng_holds_sentences_out():
    corpus = open_corpus("fra_eng")
    sentences = {split: [r["en"] for r in corpus.records(split)] for split in corpus.splits}
    assert [len(sentences[split]) for split in ("valid", "test")] == [1000, 1000]
    assert len(sentences["train"]) > 139_000
    bare = {
        split: {"".join(filter(str.isalnum, s.casefold())) for s in found}
        for split, found in sentences.items()
    }
    assert not bare["train"] & (bare["valid"] | bare["test"])
    assert len(bare["valid"] | bare["test"]) == 2000


@needs("sst2")
def test_sst2():
    corpus = open_corpus("sst2")
    assert [corpus.count(split) for split in corpus.splits] == [6920, 872, 1821]
    assert next(corpus.records("valid")) == {
        "text": "one long string of cliches",
        "label": "negative",
    }
    assert {r["label"] for r in corpus.records("train")} == {"negative", "positive"}


@needs("trec")
def test_trec():
    corpus = open_corpus("trec")
    assert corpus.splits == ("train", "valid", "test")
    assert corpus.count("train") + corpus.count("valid") == 5452
    assert corpus.count("test") == 500
    records = list(open_corpus("trec", split=0).records("train"))
    assert {r["label"] for r in records} == {"ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"}
    assert records[0]["text"] == "How did serfdom develop in and then leave Russia ?"
    assert "sister city" in records[65]["text"]


@needs("stsb")
def test_stsb():
    corpus = open_corpus("stsb")
    assert [corpus.count(split) for split in corpus.splits] == [5749, 1500, 1379]
    scores = [r["score"] for r in corpus.records("test")]
    assert scores[0] == 2.5
    assert (min(scores), max(scores)) == (0.0, 5.0)


@pytest.mark.parametrize("names", [("p.en", "w.de"), ("english.txt", "german.txt")])
def test_two_files_with_other_names_and_as_many_lines_are_parallel(tmp_path, names):
    first, second = (tmp_path / name for name in names)
    first.write_text("one\ntwo\n" * 10)
    second.write_text("eins\nzwei\n" * 10)
    corpus = open_corpus(f"{first},{second}")
    columns = ("en", "de") if names[0] == "p.en" else ("english", "german")
    assert corpus.columns == columns
    assert next(corpus.records("train")) == dict(zip(columns, ("one", "eins"), strict=True))


def test_chapters_and_texts_of_other_lengths_are_one_text(tmp_path):
    for name in ("chapter1.txt", "chapter2.txt", "long.txt"):
        (tmp_path / name).write_text("a line\n" * (20 if name == "long.txt" else 10))
    for pair in (("chapter1.txt", "chapter2.txt"), ("chapter1.txt", "long.txt")):
        corpus = open_corpus(",".join(str(tmp_path / name) for name in pair))
        assert corpus.columns == ("text",)


def test_two_endings_are_not_taken_for_one_text(tmp_path):
    (tmp_path / "p.en").write_text("one\ntwo\n" * 10)
    (tmp_path / "w.de").write_text("eins\nzwei\n" * 11)
    with pytest.raises(ClearheadError, match="as many lines"):
        open_corpus(f"{tmp_path / 'p.en'},{tmp_path / 'w.de'}")
