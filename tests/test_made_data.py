"""Made data: pure functions of seed and number, held-out items that training never sees."""

from __future__ import annotations

import datetime
import itertools
import pickle
import sys
from collections import Counter

import pytest

from clearhead.data.corpus import open_corpus
from clearhead.data.dates import FORMS, Dates, in_form, ordinal
from clearhead.data.holdout import mark, split_of
from clearhead.data.made import FEW, Add, Copy, Reverse, Sort
from clearhead.data.manual import PARAGRAPH, families
from clearhead.errors import ClearheadError

MADE = ("dates", "copy", "reverse", "sort", "add")


def test_hashes_are_for_ever():
    """A change here would move items from one side to the other in everybody's runs."""
    assert mark("2024-05-03") == 6447255880356100947
    assert Counter(split_of(str(n)) for n in range(20_000)).keys() == {"train", "valid", "test"}
    shares = Counter(split_of(str(n)) for n in range(20_000))
    assert 900 < shares["valid"] < 1100
    assert 900 < shares["test"] < 1100


@pytest.mark.parametrize("name", MADE)
def test_records_are_a_pure_function(name):
    corpus = open_corpus(name)
    assert corpus.endless
    assert corpus.splits == ("train", "valid", "test")
    assert [corpus.count(split) for split in corpus.splits] == [None, 1000, 1000]
    backwards = [corpus.record("train", 0, n) for n in reversed(range(50))]
    assert list(itertools.islice(corpus.records("train"), 50)) == backwards[::-1]
    again = pickle.loads(pickle.dumps(corpus))
    assert again.record("train", 3, 17) == corpus.record("train", 3, 17)
    assert [corpus.record("train", 1, n) for n in range(9)] != backwards[:-10:-1]
    assert tuple(backwards[0]) == corpus.columns
    assert again.fingerprint == corpus.fingerprint == open_corpus(name).fingerprint
    assert list(corpus.records("valid")) == list(corpus.records("valid"))


def held(record: dict) -> str | None:
    """What must not be in two splits, None where there are too few of that kind."""
    if "iso" in record:
        return record["iso"]
    source = record["source"]
    if "+" in source:
        a, b = sorted(source.split("+"))
        return f"{a}+{b}" if len(a) + len(b) > 3 else None
    return source if (10 if source.isdigit() else 26) ** len(source) >= FEW else None


@pytest.mark.parametrize("name", MADE)
def test_what_is_held_out_is_never_trained_on(name):
    corpus = open_corpus(name)
    seen = {
        "train": {held(corpus.record("train", seed, n)) for seed in (0, 1) for n in range(800)},
        "valid": {held(record) for record in corpus.records("valid")},
        "test": {held(record) for record in corpus.records("test")},
    }
    for one, other in itertools.combinations(seen, 2):
        assert seen[one] & seen[other] <= {None}
    assert len(seen["valid"]) > 500


def test_each_length_is_as_likely_in_every_split():
    corpus = open_corpus("copy:longest=5")
    for split in ("train", "valid", "test"):
        lengths = Counter(len(corpus.record(split, 0, n)["source"]) for n in range(1000))
        assert sorted(lengths) == [1, 2, 3, 4, 5]
        assert all(140 < count < 260 for count in lengths.values())


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_targets_are_right(split):
    for n in range(200):
        record = Copy().record(split, 0, n)
        assert record["target"] == record["source"]
        record = Reverse(symbols="xyz", longest=12).record(split, 0, n)
        assert record["target"] == record["source"][::-1]
        assert set(record["source"]) <= set("xyz")
        record = Sort(shortest=4, longest=6).record(split, 0, n)
        assert record["target"] == "".join(sorted(record["source"]))
        assert 4 <= len(record["source"]) <= 6
        record = Add(digits=4).record(split, 0, n)
        assert record["target"] == str(sum(map(int, record["source"].split("+"))))


def test_settings_stand_behind_the_name():
    corpus = open_corpus("sort:longest=3,shortest=3,spaced=true,symbols=cab")
    records = [corpus.record("train", 0, n) for n in range(50)]
    assert all(len(r["source"]) == 5 and r["source"][1] == " " for r in records)
    order = "cab".index
    assert all(r["target"].split() == sorted(r["source"].split(), key=order) for r in records)
    assert corpus.fingerprint != open_corpus("sort").fingerprint
    assert " " in open_corpus("add:spaced=true").record("train", 0, 0)["source"]


def test_a_limit_gives_made_data_an_end():
    corpus = open_corpus("reverse", limit=30)
    assert not corpus.endless
    assert corpus.count("train") == len(list(corpus.records("train"))) == 30


def test_a_wrong_split_is_refused():
    with pytest.raises(ClearheadError, match=r'no split "valdi".*mean "valid"'):
        Copy().record("valdi", 0, 0)


# --- dates ---


def test_dates_in_each_form():
    pytest.importorskip("babel")
    day = datetime.date(2024, 2, 3)
    english = {form: in_form(day, form)["en"] for form in FORMS}
    assert english["short"] == "2/3/24"
    assert english["medium"] == "Feb 3, 2024"
    assert english["full"] == "Saturday, February 3, 2024"
    assert english["dd.MM.y"] == "03.02.2024"
    assert english["'the' {} 'of' MMMM y"] == "the 3rd of February 2024"
    assert in_form(day, "full")["fr"] == "samedi 3 février 2024"
    assert in_form(day, "full")["de"] == "Samstag, 3. Februar 2024"
    assert in_form(day, "short")["fr"] == "3 février 2024"  # no weekday was said
    assert in_form(day, "y-MM-dd")["de"] == "3. Februar 2024"
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 30, 31)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "30th", "31st"]
    )


def test_every_english_date_has_one_meaning():
    pytest.importorskip("babel")
    meanings: dict[str, set[str]] = {}
    for n in range(3000):
        record = Dates().record("train", 0, n)
        meanings.setdefault(record["en"], set()).add(record["fr"])
    assert all(len(found) == 1 for found in meanings.values())
    assert len(meanings) > 2800


def test_dates_keep_to_their_years():
    pytest.importorskip("babel")
    years = {int(Dates(2060, 2080).record("train", 0, n)["iso"][:4]) for n in range(500)}
    assert years == set(range(2060, 2081))


def test_dates_without_babel(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ClearheadError, match="made with Babel: pip install"):
        open_corpus("dates")


# --- the manual ---


def test_the_manual_is_split_by_topics_that_share_nothing():
    corpus = open_corpus("manual")
    assert corpus.splits == ("train", "valid")
    texts = {split: [r["text"] for r in corpus.records(split)] for split in corpus.splits}
    assert texts["train"][0].startswith('assert\n======\n\nThe "assert" statement\n')
    sizes = {split: sum(map(len, found)) for split, found in texts.items()}
    assert sizes["train"] + sizes["valid"] > 400_000
    assert 0.05 < sizes["valid"] / (sizes["train"] + sizes["valid"]) < 0.12
    paragraphs = {
        split: {" ".join(p.split()) for text in found for p in text.split("\n\n")}
        for split, found in texts.items()
    }
    shared = paragraphs["train"] & paragraphs["valid"]
    assert all(len(paragraph) < PARAGRAPH for paragraph in shared)


def test_topics_that_share_a_paragraph_are_one_family():
    long = "a paragraph that is long enough to have been copied from one topic to another one. " * 2
    other = "another paragraph, as long as it needs to be for nobody to write it twice by chance. "
    topics = {
        "a": long,
        "b": f"x\n\n{long}\n\n{other * 2}",
        "c": other * 2,
        "d": "short",
        "e": "short",
    }
    assert families(topics) == [["a", "b", "c"], ["d"], ["e"]]
