"""Objectives: what is shown and what is asked, by hand, by count, and back to the text."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from clearhead.data.batch import IGNORED
from clearhead.data.batches import Windows, fixed
from clearhead.data.corpus import open_corpus
from clearhead.data.masking import SENTINELS, Masked, Spans, hide_spans, span_counts
from clearhead.data.objectives import OBJECTIVES, read_objective
from clearhead.data.readers import MORE
from clearhead.data.shards import write_store
from clearhead.errors import ClearheadError
from clearhead.models.heads import HeadConfig
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.trained import train_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the log . a bird sang in the old tree ! " * 4
DICE = np.random.default_rng(0)


def tokenizer_for(objective, kind="words", texts=(TEXT,), vocab_size=None):
    return train_tokenizer(
        kind,
        list(texts),
        vocab_size=vocab_size,
        special_tokens=objective.roles,
        extra_tokens=objective.extra_tokens,
        template=objective.template,
        pair_template=objective.pair_template,
    )


def collated(objective, tokenizer, records, seed=0):
    objective = objective.bind(tokenizer)
    examples = [objective.encode(record, tokenizer) for record in records]
    arrays = [{name: np.asarray(v) for name, v in example.items()} for example in examples]
    return objective.collate(arrays, np.random.default_rng(seed))


def corpus_of(tmp_path, records, **more):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return open_corpus(str(path), **{"split": 0.0} | more)


# --- all of them ---


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_objective_is_plain_data(kind):
    objective = read_objective(kind)
    assert objective.kind == kind
    assert read_objective(objective.to_dict()) == objective
    assert objective.shape in {"decoder", "encoder", "encoder-decoder"}
    heads = {cls.kind for cls in HeadConfig.__subclasses__()}
    assert objective.head in heads
    asks = {"tokens", "label", "tags", "span", "similarity", "contrast"}
    assert objective.ask in asks
    tokenizer = tokenizer_for(objective)  # its special tokens and templates fit together
    assert objective.bind(tokenizer).kind == kind


def test_objectives_are_named_rightly():
    assert read_objective({"kind": "masked", "rate": 0.3}).rate == 0.3
    with pytest.raises(ClearheadError, match=r'no objective "mask".*There are: next_token'):
        read_objective("mask")
    with pytest.raises(ClearheadError, match=r'no setting "rat".*Did you mean "rate"'):
        read_objective({"kind": "masked", "rat": 0.3})
    with pytest.raises(ClearheadError, match="must be one of"):
        read_objective(3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "masked", "rate": 1.5}, "between 0 and 1, not 1.5"),
        ({"kind": "masked", "mask": 0.9, "swap": 0.2}, "together at most 1"),
        ({"kind": "spans", "mean": 0.5}, "one token or more, not 0.5"),
        ({"kind": "seq2seq", "source": "a", "target": "a"}, 'both "a"'),
        ({"kind": "classification", "labels": ["x", "x"]}, "x more than once"),
        ({"kind": "classification", "max_len": 0}, "1 or more, not 0"),
        ({"kind": "span_qa", "stride": -1}, "0 or more, not -1"),
        ({"kind": "pairs", "largest": 0}, "above 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, said):
    with pytest.raises(ClearheadError, match=said):
        read_objective(wrong)


# --- language models ---


def test_texts_are_parted_by_one_token():
    objective = read_objective("next_token")
    tokenizer = tokenizer_for(objective, "bytes")
    records = [
        {"text": "ab", MORE: True},
        {"text": "cd"},
        {"text": "e", "more": True},  # a column of the user's own
        {"text": "fg", MORE: True},
    ]
    ids = [i for e in objective.examples(records, tokenizer) for i in e["ids"]]
    assert tokenizer.decode(ids, special=True) == "abcd<|endoftext|>e<|endoftext|>fg"
    (alone,) = objective.examples([{"text": "abc"}], tokenizer)
    assert alone["ids"] == list(b"abc")  # a single text is itself
    assert objective.encode({"text": "abc"}, tokenizer)["ids"] == [*b"abc", tokenizer.eos_id]
    with pytest.raises(ClearheadError, match='record 2 has no column "text"'):
        list(objective.examples([{"text": "a"}, {"txt": "b"}], tokenizer))


def test_next_token_side_by_side():
    objective = read_objective("next_token")
    tokenizer = tokenizer_for(objective, "bytes")
    batch = collated(objective, tokenizer, [{"text": "abc"}, {"text": "z"}])
    end = tokenizer.eos_id
    assert batch.inputs[0].tolist() == [[97, 98, 99], [122, 0, 0]]
    assert batch.targets.tolist() == [[98, 99, end], [end, IGNORED, IGNORED]]
    assert batch.places["at"].pos.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert (batch.count, batch.slots, batch.tokens) == (4, 6, 4)


def test_seq2seq_by_hand(tmp_path):
    records = [{"en": "the cat sat", "de": "cat"}, {"en": "dog", "de": "the dog sat"}]
    corpus = corpus_of(tmp_path, records)
    objective = read_objective("seq2seq").prepare(corpus)
    assert (objective.source, objective.target) == ("en", "de")
    tokenizer = tokenizer_for(objective)
    the, cat, sat, dog = (tokenizer.id(word) for word in ("the", "cat", "sat", "dog"))
    pad, end = tokenizer.pad_id, tokenizer.eos_id
    batch = collated(objective, tokenizer, records)
    source, target = batch.inputs
    assert source.tolist() == [[the, cat, sat, end], [dog, end, 0, 0]]
    assert target.tolist() == [[pad, cat, 0, 0], [pad, the, dog, sat]]
    assert batch.targets.tolist() == [[cat, end, IGNORED, IGNORED], [the, dog, sat, end]]
    assert batch.places["source_at"].ends == (4, 2)
    assert batch.places["target_at"].ends == (2, 4)
    assert (batch.count, batch.slots, batch.tokens) == (6, 16, 12)
    even = collated(objective, tokenizer, records[:1] * 2)
    assert even.places == {}
    assert objective.changed(start=7).encode(records[0], tokenizer)["target"] == [7, cat, end]
    with pytest.raises(ClearheadError, match='no column "fr"'):
        objective.changed(target="fr").prepare(corpus)
    with pytest.raises(ClearheadError, match="lacks one"):
        objective.encode(records[0], train_tokenizer("words", [TEXT]))


def test_many_records_are_as_one_by_one():
    objective = read_objective({"kind": "seq2seq", "source": "a", "target": "b"})
    one = tokenizer_for(objective)
    other = tokenizer_for(objective, "characters")
    both = Tokenizer(one.backend, one.roles, target=other)  # two vocabularies
    words = TEXT.split()
    records = [{"a": " ".join(words[i % 9 :][:5]), "b": words[i % 20]} for i in range(1203)]
    found = list(objective.examples(records, both))
    assert found == [objective.encode(record, both) for record in records]
    assert found[0]["source"] == one.encode(records[0]["a"])
    middle = other.encode(records[0]["b"], special=False)
    assert found[0]["target"] == [one.pad_id, *middle, other.eos_id]
    with pytest.raises(ClearheadError, match=r'record 1102: "b" is 5, which is not a text'):
        list(objective.examples([*records[:1101], {"a": "x", "b": 5}], both))


def wordpiece():
    """A tokeniser as BERT's, with special tokens of its own."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "the", "cat", "##s"]
    backend = Backend(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(names[:5])
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    roles = {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    return Tokenizer(backend, roles)


def test_a_pretrained_tokeniser_brings_its_own_special_tokens():
    tokenizer = wordpiece()
    tagging = read_objective({"kind": "tagging", "labels": ["N", "V"]})
    example = tagging.encode({"words": "the cats playing", "tags": "N N V"}, tokenizer)
    assert example["ids"] == [2, 7, 8, 9, 5, 6, 3]
    assert example["tags"] == [IGNORED, 0, 0, IGNORED, 1, IGNORED, IGNORED]
    label = read_objective({"kind": "classification", "second": "b", "labels": ["x", "y"]})
    example = label.encode({"text": "the cats", "b": "playing", "label": "y"}, tokenizer)
    assert example["ids"] == [2, 7, 8, 9, 3, 5, 6, 3]
    assert example["types"] == [0, 0, 0, 0, 0, 1, 1, 1]
    masked = Masked(rate=0.9, mask=0.0, swap=1.0).bind(tokenizer)
    batch = masked.window(np.array([[7, 8, 1, 5, 3, 6]] * 200), np.random.default_rng(0))
    assert batch.inputs[0].shape == (200, 8)
    assert set(batch.inputs[0][:, 1].tolist()) == {5, 6, 7, 8, 9}  # ordinary ones, all of them
    assert (batch.targets[:, [0, 3, 5, 7]] == IGNORED).all()
    parted = masked.examples([{"text": "cat"}, {"text": "cat"}], tokenizer)
    assert [example["ids"] for example in parted] == [[8], [3, 8]]


# --- masked tokens ---


def masked_stream(tmp_path, total=200_000):
    objective = Masked()
    words = [f"w{i}" for i in range(500)]
    tokenizer = tokenizer_for(objective, texts=[" ".join(words)])
    objective = objective.bind(tokenizer)
    dice = np.random.default_rng(0)
    ids = dice.integers(0, tokenizer.vocab_size, total)  # special tokens among them
    return objective, tokenizer, write_store(tmp_path / "s", [{"ids": ids}]), ids


def test_masking_ratios_by_count(tmp_path):
    objective, tokenizer, store, ids = masked_stream(tmp_path)
    special = sorted(objective.vocabulary.special)
    windows = Windows(store, objective, length=130, batch=50)
    stream = windows.batch
    asked = shown_mask = swapped = kept = ordinary = 0
    for n in range(30):
        batch = stream(n)
        inputs, targets = batch.inputs[0].numpy(), batch.targets.numpy()
        assert inputs.shape == (50, 130)
        assert (inputs[:, 0] == tokenizer.cls_id).all()
        assert (inputs[:, -1] == tokenizer.sep_id).all()
        at = targets != IGNORED
        assert batch.count == at.sum()
        assert not np.isin(targets[at], special).any()
        original = np.where(at, targets, inputs)
        usable = (~np.isin(original, special)).sum(axis=1)
        assert (at.sum(axis=1) == np.maximum(1, np.round(usable * 0.15))).all()
        hidden = at & (inputs == tokenizer.mask_id)
        other = at & (inputs != targets) & ~hidden
        assert not np.isin(inputs[other], special).any()
        asked += at.sum()
        shown_mask += hidden.sum()
        swapped += other.sum()
        kept += (at & (inputs == targets)).sum()
        ordinary += usable.sum()
    assert abs(asked / ordinary - 0.15) < 0.001
    for found, part in ((shown_mask, 0.8), (swapped, 0.1 * 499 / 500), (kept, 0.1 + 0.1 / 500)):
        deviation = np.sqrt(asked * part * (1 - part))
        assert abs(found - asked * part) < 4 * deviation
    assert shown_mask + swapped + kept == asked
    # Beneath the masks lies the text itself.
    flat = {tuple(ids[i : i + 3]) for i in range(len(ids) - 2)} | {(ids[-2], ids[-1], ids[0])}
    row = np.where(targets[0] != IGNORED, targets[0], inputs[0])[1:-1]
    assert all(tuple(row[i : i + 3]) in flat for i in range(1, 120))


def test_a_row_has_something_asked_if_it_can():
    objective = Masked()
    tokenizer = tokenizer_for(objective)
    batch = collated(objective, tokenizer, [{"text": "cat"}, {"text": ""}, {"text": TEXT}])
    asked = (batch.targets != IGNORED).sum(dim=1).tolist()
    assert asked == [1, 0, round(0.15 * 84)]
    assert batch.targets[0, 1] == tokenizer.id("cat")
    assert batch.count == sum(asked)
    filled = batch.places["at"].filled()
    assert not ((batch.targets != IGNORED) & ~filled).any()
    assert batch.tokens == int(filled.sum())


def test_evaluation_masks_the_same_every_time(tmp_path):
    objective, _, store, _ = masked_stream(tmp_path, 1000)
    one, two = (list(fixed(store, objective, length=66, batch=4)) for _ in range(2))
    assert [b.inputs[0].tolist() for b in one] == [b.inputs[0].tolist() for b in two]
    assert [b.targets.tolist() for b in one] == [b.targets.tolist() for b in two]
    assert sum(b.tokens - 2 * len(b.targets) for b in one) == 1000


def test_masking_needs_a_mask_and_a_tokeniser():
    with pytest.raises(ClearheadError, match="no mask token"):
        Masked().bind(train_tokenizer("words", [TEXT]))
    with pytest.raises(ClearheadError, match=r"bind\(tokenizer\)"):
        Masked().window(np.zeros((1, 4), dtype=int), DICE)
    with pytest.raises(ClearheadError, match="no sentinels"):
        Spans().bind(train_tokenizer("words", [TEXT]))


# --- spans ---


def unmask(source, target, tokenizer):
    """The text that a source and its target came from."""
    sentinels = {tokenizer.id(name) for name in SENTINELS}
    spans, current = {}, None
    for id in target:
        if id in sentinels:
            current = spans.setdefault(id, [])
        elif current is not None:
            current.append(id)
    return [i for id in source for i in (spans[id] if id in sentinels else [id])]


@pytest.mark.parametrize("length", [2, 3, 10, 64, 512])
def test_spans_invert_to_the_text(tmp_path, length):
    objective = Spans()
    tokenizer = tokenizer_for(objective, "bytes")
    objective = objective.bind(tokenizer)
    text = np.random.default_rng(1).integers(0, 256, 4000)
    store = write_store(tmp_path / "s", [{"ids": text}])
    batch = Windows(store, objective, length, batch=6).batch(0)
    hidden, spans = span_counts(length, 0.15, 3.0)
    source, shown = batch.inputs
    assert source.shape == (6, length - hidden + spans + 1)
    assert shown.shape == batch.targets.shape == (6, hidden + spans + 1)
    assert (shown[:, 0] == tokenizer.pad_id).all()
    assert torch.equal(shown[:, 1:], batch.targets[:, :-1])
    assert (source[:, -1] == tokenizer.eos_id).all()
    assert (batch.targets[:, -1] == tokenizer.eos_id).all()
    assert batch.places == {}
    assert batch.count == batch.targets.numel()
    assert batch.slots == batch.tokens == source.numel() + shown.numel()
    doubled = text.tolist() * 2
    for row in range(6):
        used = [i for i in source[row].tolist() if i in set(objective.vocabulary.sentinels)]
        assert used == [tokenizer.id(name) for name in SENTINELS[:spans]]
        found = unmask(source[row, :-1].tolist(), batch.targets[row, :-1].tolist(), tokenizer)
        assert len(found) == length
        assert any(doubled[i : i + length] == found for i in range(4000))


def t5_mask(length, rate, mean, dice):
    """`random_spans_noise_mask` of T5's code, row by row, in numpy."""
    noise = min(max(int(np.round(length * rate)), 1), length - 1)
    spans = max(int(np.round(noise / mean)), 1)

    def segments(items, parts):
        first = np.arange(items - 1) < parts - 1
        dice.shuffle(first)
        return np.bincount(np.cumsum(np.concatenate([[0], first])), minlength=parts)

    runs = np.stack([segments(length - noise, spans), segments(noise, spans)], axis=1).reshape(-1)
    starts = np.zeros(length, dtype=int)
    starts[np.cumsum(runs)[:-1]] = 1
    return np.cumsum(starts) % 2 == 1


def test_spans_are_distributed_as_in_t5():
    length, rows = 60, 20_000
    hidden, spans = span_counts(length, 0.15, 3.0)
    ours = hide_spans(rows, length, hidden, spans, np.random.default_rng(0))
    dice = np.random.default_rng(1)
    theirs = np.stack([t5_mask(length, 0.15, 3.0, dice) for _ in range(rows)])
    for mask in (ours, theirs):
        assert (mask.sum(axis=1) == hidden).all()
        assert not mask[:, 0].any()
        assert mask[:, -1].all()
        begins = mask[:, 1:] & ~mask[:, :-1]
        assert (begins.sum(axis=1) == spans).all()
    assert np.abs(ours.mean(axis=0) - theirs.mean(axis=0)).max() < 0.02
    assert (hidden, spans) == (9, 3)
    assert span_counts(512, 0.15, 3.0) == (77, 26)  # T5: 568 tokens -> 114 targets with eos
    assert span_counts(568, 0.15, 3.0) == (85, 28)
    assert 568 - 85 + 28 + 1 == 512
    assert 85 + 28 + 1 == 114


def test_too_many_spans_are_refused():
    objective = Spans(mean=1.0)
    objective = objective.bind(tokenizer_for(objective))
    with pytest.raises(ClearheadError, match="has 120 hidden spans, and the tokeniser has 100"):
        objective.window(np.ones((1, 800), dtype=int), DICE)


def test_spans_of_texts_of_different_lengths():
    objective = Spans()
    tokenizer = tokenizer_for(objective)
    batch = collated(objective, tokenizer, [{"text": TEXT}, {"text": "the cat sat"}])
    assert batch.tokens < batch.slots
    end = tokenizer.eos_id
    row = [i for i in batch.targets[1].tolist() if i != IGNORED]
    source = batch.inputs[0][1][batch.places["source_at"].filled()[1]].tolist()
    text = unmask(source[:-1], row[:-1], tokenizer)
    assert text == [*tokenizer.encode("the cat sat", special=False), end]
    assert batch.count == (batch.targets != IGNORED).sum()


# --- labels ---

FILMS = [
    {"text": "the cat sat", "label": "pos", "other": "on the mat"},
    {"text": "the dog", "label": "neg", "other": "sat"},
    {"text": "a bird sang", "label": "pos", "other": "."},
]


def test_classification_by_hand(tmp_path):
    objective = read_objective("classification").prepare(corpus_of(tmp_path, FILMS))
    assert objective.labels == ("neg", "pos")
    tokenizer = tokenizer_for(objective)
    batch = collated(objective, tokenizer, FILMS[:2])
    assert batch.targets.tolist() == [1, 0]
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    the, cat, sat, dog = (tokenizer.id(word) for word in ("the", "cat", "sat", "dog"))
    assert batch.inputs[0].tolist() == [[cls, the, cat, sat, sep], [cls, the, dog, sep, 0]]
    assert (batch.count, batch.slots, batch.tokens) == (2, 10, 9)
    assert set(batch.places) == {"at"}
    assert objective.texts(FILMS[0]) == ["the cat sat"]
    with pytest.raises(ClearheadError, match=r'record 2: the label "poz".*Did you mean "pos"'):
        list(objective.examples([FILMS[0], {"text": "x", "label": "poz"}], tokenizer))
    with pytest.raises(ClearheadError, match='no column "labl"'):
        read_objective({"kind": "classification", "label": "labl"}).prepare(
            corpus_of(tmp_path, FILMS)
        )


def test_labels_of_numbers_are_in_the_order_of_numbers(tmp_path):
    records = [{"text": "x", "label": i} for i in (10, 9, -1, 0)]
    objective = read_objective("classification").prepare(corpus_of(tmp_path, records))
    assert objective.labels == ("-1", "0", "9", "10")
    with pytest.raises(ClearheadError, match="nothing to tell apart"):
        read_objective("classification").prepare(corpus_of(tmp_path, records[:1] * 3))
    fixed_order = read_objective({"kind": "classification", "labels": ["10", "9", "0", "-1"]})
    assert fixed_order.prepare(corpus_of(tmp_path, records)) == fixed_order


@pytest.mark.parametrize("missing", [None, "", "  ", float("nan")])
def test_a_missing_label_is_no_class(tmp_path, missing):
    records = [{"text": "x", "label": label} for label in ("a", "b", missing)]
    with pytest.raises(ClearheadError, match="record 3 has no label"):
        read_objective("classification").prepare(corpus_of(tmp_path, records))
    known = read_objective({"kind": "classification", "labels": ["a", "b"]})
    with pytest.raises(ClearheadError, match="record 3 has no label"):
        list(known.examples(records, tokenizer_for(known)))
    tags = [{"words": ["x", "y"], "tags": ["a", tag]} for tag in ("b", missing)]
    with pytest.raises(ClearheadError, match=r'record 2( has no label|: "tags" has a gap)'):
        read_objective("tagging").prepare(corpus_of(tmp_path, tags))


def test_two_texts_have_types_and_the_longer_one_is_cut(tmp_path):
    objective = read_objective({"kind": "classification", "second": "other"})
    objective = objective.prepare(corpus_of(tmp_path, FILMS))
    tokenizer = tokenizer_for(objective)
    batch = collated(objective, tokenizer, FILMS[:2])
    assert batch.places["types"].tolist() == [
        [0, 0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 0, 0, 0],
    ]
    record = {"text": "the cat sat on the mat", "other": "a dog", "label": "pos"}
    for max_len, shown in (
        (9, "[CLS] the cat sat on [SEP] a dog [SEP]"),
        (8, "[CLS] the cat sat [SEP] a dog [SEP]"),
        (6, "[CLS] the cat [SEP] a [SEP]"),
    ):
        ids = objective.changed(max_len=max_len).encode(record, tokenizer)["ids"]
        assert " ".join(tokenizer.token(i) for i in ids) == shown
    with pytest.raises(ClearheadError, match="no room"):
        objective.changed(max_len=3).encode(record, tokenizer)


def test_tagging_asks_the_first_token_of_a_word(tmp_path):
    records = [
        {"words": ["ab", "c"], "tags": ["X", "Y"]},
        {"words": "dd efg", "tags": "Y X"},
    ]
    objective = read_objective("tagging").prepare(corpus_of(tmp_path, records))
    assert objective.labels == ("X", "Y")
    tokenizer = tokenizer_for(objective, "characters", texts=["abcdefg "])
    batch = collated(objective, tokenizer, records)
    no = IGNORED
    assert batch.targets.tolist() == [[no, 0, no, 1, no, no, no], [no, 1, no, 0, no, no, no]]
    assert batch.places["at"].ends == (5, 7)
    assert (batch.count, batch.tokens, batch.slots) == (4, 12, 14)
    with pytest.raises(ClearheadError, match="record has 2 words and 1 tags"):
        objective.encode({"words": "a b", "tags": "X"}, tokenizer)
    with pytest.raises(ClearheadError, match='the label "Z"'):
        objective.encode({"words": "a", "tags": "Z"}, tokenizer)


# --- pairs and questions ---

CONTEXT = "the cat sat on the mat and the dog sat on the log ."
ASKED = {"question": "the dog ?", "context": CONTEXT, "answer": "the log", "start": 42}


def test_answers_are_found_in_every_window_that_has_them():
    assert CONTEXT[42:49] == "the log"
    objective = read_objective("span_qa")
    tokenizer = tokenizer_for(objective)
    batch = collated(objective, tokenizer, [ASKED])
    (first, last), ids = batch.targets[0].tolist(), batch.inputs[0][0].tolist()
    assert tokenizer.decode(ids[first : last + 1]) == "the log"
    narrow = objective.changed(max_len=13, stride=3)  # 7 tokens of context a window
    windows = narrow.windows(ASKED, tokenizer)
    covered = set()
    for window in windows:
        assert len(window["ids"]) == len(window["types"]) == len(window["offsets"]) <= 13
        places = [place for place in window["offsets"] if place is not None]
        covered |= set(places)
        a, b = window["span"]
        whole = places[0][0] <= 42 and places[-1][1] >= 49
        assert (a, b) != (0, 0) if whole else (a, b) == (0, 0)
        if whole:
            assert (window["offsets"][a][0], window["offsets"][b][1]) == (42, 49)
    assert len(covered) == 14  # every token of the context
    assert len(windows) == 3
    assert len(list(narrow.examples([ASKED, ASKED], tokenizer))) == 6
    assert any(narrow.encode(ASKED, tokenizer)["span"])
    none = objective.encode(ASKED | {"answer": [], "start": []}, tokenizer)
    assert none["span"] == [0, 0]


def test_wrong_answers_are_refused():
    objective = read_objective("span_qa")
    tokenizer = tokenizer_for(objective)
    with pytest.raises(ClearheadError, match=r'"the log", but at character 3 .* stands " cat sa"'):
        objective.encode(ASKED | {"start": 3}, tokenizer)
    with pytest.raises(ClearheadError, match="number of the character"):
        objective.encode(ASKED | {"start": "x"}, tokenizer)
    with pytest.raises(ClearheadError, match="raise max_len or lower stride"):
        objective.changed(max_len=10).encode(ASKED, tokenizer)


def test_pairs_are_twice_as_many_rows():
    records = [
        {"first": "the cat", "second": "a bird sang", "score": 2.5},
        {"first": "the dog sat", "second": "the dog", "score": "5"},
    ]
    objective = read_objective("pairs")
    assert objective.ask == "contrast"
    tokenizer = tokenizer_for(objective)
    batch = collated(objective, tokenizer, records)
    assert batch.inputs[0].shape == (4, 5)
    assert batch.targets.tolist() == [0, 1]
    rows = [tokenizer.decode(row[row != 0].tolist()) for row in batch.inputs[0]]
    assert rows == ["the cat", "the dog sat", "a bird sang", "the dog"]
    assert batch.places["at"].ends == (4, 5, 5, 4)
    assert (batch.count, batch.slots, batch.tokens) == (2, 20, 18)
    scored = read_objective({"kind": "pairs", "score": "score", "largest": 5.0})
    assert scored.ask == "similarity"
    batch = collated(scored, tokenizer, records)
    assert batch.targets.tolist() == [0.5, 1.0]
    assert batch.targets.dtype == torch.float32
    for score in ("much", "nan", float("inf"), None):
        with pytest.raises(ClearheadError, match=f"{score!r}, which is not a number"):
            scored.encode(records[0] | {"score": score}, tokenizer)
