"""Made notes: tags that fit the words, answers that stand where they are said to stand."""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter

import pytest

from clearhead.data.corpus import open_corpus
from clearhead.data.notes import SENTENCES, SLOT, TAGS, Notes, made_names
from clearhead.data.objectives import SpanQA, Tagging
from clearhead.errors import ClearheadError
from clearhead.text.trained import train_tokenizer

SPLITS = ("train", "valid", "test")
MANY = 400


def notes(split: str, count: int = MANY) -> list[dict]:
    return [dict(Notes().record(split, 0, n)) for n in range(count)]


def entities(record: dict) -> list[tuple[str, str]]:
    """Kind and words of everything that is tagged."""
    found: list[tuple[str, list[str]]] = []
    for word, tag in zip(record["words"], record["tags"], strict=True):
        if tag.startswith("B-"):
            found.append((tag[2:], [word]))
        elif tag.startswith("I-"):
            assert found[-1][0] == tag[2:]
            found[-1][1].append(word)
    return [(kind, " ".join(words)) for kind, words in found]


def spaced(text: str) -> str:
    """Words and marks with a blank between each two."""
    return " ".join(re.findall(r"\w+(?:[:'/-]\w+)*|[^\w\s]", text))


def test_there_are_many_sentences_and_every_question_names_something_of_its_own():
    assert len(SENTENCES) >= 25
    for sentence, questions in SENTENCES.items():
        slots = SLOT.findall(sentence)
        assert len(set(slots)) == len(slots)
        for question, answer in questions:
            asked = set(SLOT.findall(question))
            assert asked
            assert asked <= set(slots)
            assert answer in set(slots) - asked
            assert answer[0] in TAGS


@pytest.mark.parametrize("split", SPLITS)
def test_tags_align_with_words(split):
    kinds: Counter[str] = Counter()
    for record in notes(split):
        assert len(record["words"]) == len(record["tags"])
        assert record["words"] == spaced(record["context"]).split()
        for before, tag in itertools.pairwise(["O", *record["tags"]]):
            if tag.startswith("I-"):
                assert before[2:] == tag[2:]
        kinds.update(kind for kind, _ in entities(record))
    assert kinds.keys() == set(TAGS.values())


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_stands_where_it_is_said_to_stand(split):
    for record in notes(split):
        start, answer = record["start"], record["answer"]
        assert record["context"][start : start + len(answer)] == answer
        assert spaced(answer) in [text for _, text in entities(record)]
        assert record["question"].endswith("?")
        assert answer not in record["question"]


def test_answers_are_of_every_kind_and_in_every_sentence():
    records = notes("train", 2000)
    kinds = Counter({t: k for k, t in entities(r)}[spaced(r["answer"])] for r in records)
    assert kinds.keys() == set(TAGS.values())
    assert min(kinds.values()) > 100
    later = sum(re.search(r"[.?] ", r["context"][: r["start"]]) is not None for r in records)
    assert 300 < later < 700


def test_no_held_out_name_is_in_training():
    for kind in "plo":
        pools = [set(made_names(kind, split)) for split in SPLITS]
        assert all(len(pool) > 100 for pool in pools)
        assert not any(a & b for a, b in itertools.combinations(pools, 2))
    every = {name: split for k in "plo" for split in SPLITS for name in made_names(k, split)}
    for split in SPLITS:
        for record in notes(split, 200):
            assert {every.get(word, split) for word in record["words"]} == {split}
            names = [text for kind, text in entities(record) if kind in ("PER", "LOC", "ORG")]
            assert all(any(word in every for word in name.split()) for name in names)


def test_records_are_a_pure_function():
    corpus = open_corpus("notes")
    assert corpus.endless
    assert corpus.splits == SPLITS
    assert [corpus.count(split) for split in SPLITS] == [None, 1000, 1000]
    backwards = [corpus.record("train", 0, n) for n in reversed(range(50))]
    assert list(itertools.islice(corpus.records("train"), 50)) == backwards[::-1]
    again = pickle.loads(pickle.dumps(corpus))
    assert again.record("train", 3, 17) == corpus.record("train", 3, 17)
    assert corpus.record("train", 1, 0) != corpus.record("train", 0, 0)
    assert tuple(backwards[0]) == corpus.columns
    assert again.fingerprint == corpus.fingerprint == open_corpus("notes").fingerprint
    assert corpus.fingerprint != open_corpus("notes:sentences=3").fingerprint


def test_settings():
    one = [Notes(sentences=1).record("valid", 0, n) for n in range(50)]
    assert not any(re.search(r"[.?] ", record["context"]) for record in one)
    with pytest.raises(ClearheadError, match="1 to 32 sentences, not 0"):
        open_corpus("notes:sentences=0")
    with pytest.raises(ClearheadError, match=r'no split "valdi".*mean "valid"'):
        Notes().record("valdi", 0, 0)


def test_both_objectives_read_them():
    corpus = open_corpus("notes", limit=200)
    tagging, answering = Tagging().prepare(corpus), SpanQA().prepare(corpus)
    kinds = sorted(TAGS.values())
    assert tagging.labels == (*(f"{mark}-{kind}" for mark in "BI" for kind in kinds), "O")
    texts = (text for record in corpus.records("train") for text in answering.texts(record))
    tokenizer = train_tokenizer(
        "bpe",
        texts,
        400,
        special_tokens=answering.roles,
        template=answering.template,
        pair_template=answering.pair_template,
    )
    for record in itertools.islice(corpus.records("valid"), 100):
        example = tagging.encode(record, tokenizer)
        asked = [tagging.labels[n] for n in example["tags"] if n >= 0]
        assert asked == record["tags"]
        (window,) = answering.windows(record, tokenizer)
        first, last = (window["offsets"][i] for i in window["span"])
        assert record["context"][first[0] : last[1]].strip() == record["answer"]
        assert len(window["ids"]) <= 128
