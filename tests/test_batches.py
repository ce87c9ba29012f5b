"""Streams of batches: pure functions of their number that show everything once an epoch."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from clearhead.attention.positions import Positions
from clearhead.data.batches import Buckets, Endless, Windows, fixed, prefetch, too_long
from clearhead.data.corpus import open_corpus
from clearhead.data.language import NextToken, Seq2seq
from clearhead.data.order import Groups, Shuffle
from clearhead.data.shards import write_store
from clearhead.errors import ClearheadError
from clearhead.text.trained import train_tokenizer

TRANSLATE = Seq2seq(source="en", target="de")


def stream(tmp_path, total, name="stream"):
    """Token i of the stream is i, in examples of 7."""
    numbers = np.arange(total)
    return write_store(tmp_path / name, ({"ids": numbers[i : i + 7]} for i in range(0, total, 7)))


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory):
    return sentences(tmp_path_factory.mktemp("multi30k"), 29000)


def sentences(tmp_path, count, seed=0):
    """Lengths as in Multi30k with a BPE of 10,000: mean 15, deviation 5, correlation 0.86."""
    dice = np.random.default_rng(seed)
    source = np.clip(np.round(dice.gamma(9, 1.5, count) + 1.5), 4, 50).astype(int)
    target = np.clip(np.round(source * dice.normal(1.02, 0.17, count)), 3, 55).astype(int)
    rows = zip(source.tolist(), target.tolist(), strict=True)
    examples = (
        {"source": np.full(a, i % 60000), "target": np.full(b + 1, i % 60000)}
        for i, (a, b) in enumerate(rows)
    )
    return write_store(tmp_path / "pairs", examples), source, target


def equal(a, b):
    assert [t.tolist() for t in a.inputs] == [t.tolist() for t in b.inputs]
    assert a.targets.tolist() == b.targets.tolist()
    assert a.places.keys() == b.places.keys()
    assert (a.count, a.slots, a.tokens) == (b.count, b.slots, b.tokens)


# --- orders ---


@pytest.mark.parametrize(("count", "part"), [(1, 4), (10, 100), (10, 4), (1000, 7), (8, 4)])
def test_a_shuffle_is_a_permutation_in_every_epoch(count, part):
    shuffle = Shuffle(count, seed=3, part=part)
    whole = shuffle(0, 3 * count).reshape(3, count)
    for epoch in whole:
        assert sorted(epoch.tolist()) == list(range(count))
    if count == 1000:
        assert len({tuple(epoch) for epoch in whole.tolist()}) == 3
        assert abs(np.corrcoef(whole[0], np.arange(count))[0, 1]) < 0.1
    fresh = Shuffle(count, seed=3, part=part)
    for first, n in ((2 * count, 1), (count - 1, 2), (0, count)):  # in any order of asking
        assert fresh(first, n).tolist() == whole.reshape(-1)[first : first + n].tolist()


def test_a_shuffle_of_billions_needs_little_memory():
    shuffle = Shuffle(3_000_000_000, seed=0)
    some = shuffle(2_999_999_990, 20)
    assert len(set(some.tolist())) == 20
    assert some.max() < 3_000_000_000
    assert shuffle._kept[1].nbytes <= 8 << 20


# --- windows ---


def test_every_token_is_asked_for_once_an_epoch(tmp_path):
    store = stream(tmp_path, 240)
    windows = Windows(store, NextToken(), length=8, batch=5, seed=1)
    assert windows.per_epoch == 6.0
    seen = []
    for epoch in range(3):
        batches = [windows.batch(epoch * 6 + i) for i in range(6)]
        asked = torch.cat([batch.targets.flatten() for batch in batches]).tolist()
        assert sorted(asked) == list(range(240))
        for batch in batches:
            assert torch.equal((batch.inputs[0] + 1) % 240, batch.targets)
            assert batch.inputs[0].shape == batch.targets.shape == (5, 8)
            assert (batch.count, batch.slots, batch.tokens) == (40, 40, 40)
            assert batch.places == {}
            assert batch.targets.is_contiguous()
        seen.append({batch.inputs[0][row, 0].item() % 8 for batch in batches for row in range(5)})
    assert all(len(cuts) == 1 for cuts in seen)  # an epoch is cut at one offset,
    assert len(set.union(*seen)) > 1  # another one in another epoch


def test_what_is_left_over_is_less_than_a_window_and_moves(tmp_path):
    store = stream(tmp_path, 247)
    windows = Windows(store, NextToken(), length=8, batch=1, seed=0)
    assert windows.per_epoch == 30
    missed = []
    for epoch in range(4):
        asked = [i for n in range(30) for i in windows.batch(epoch * 30 + n).targets[0].tolist()]
        assert len(set(asked)) == len(asked) == 240
        missed.append(frozenset(range(247)) - frozenset(asked))
    assert len(set(missed)) > 1


def test_a_batch_may_lie_in_several_epochs(tmp_path):
    store = stream(tmp_path, 24)
    large = Windows(store, NextToken(), length=8, batch=7, seed=5)  # an epoch has 3 rows
    small = Windows(store, NextToken(), length=8, batch=1, seed=5)
    rows = torch.cat([small.batch(n).inputs[0] for n in range(14)])
    assert torch.equal(torch.cat([large.batch(0).inputs[0], large.batch(1).inputs[0]]), rows)


def test_a_batch_is_a_function_of_its_number(tmp_path):
    store, other = stream(tmp_path, 500), 0
    for make in (
        lambda seed: Windows(store, NextToken(), 16, 4, seed),
        lambda seed: Buckets(store, NextToken(), batch=9, seed=seed),
    ):
        first, again = make(2), make(2)
        for n in (17, 3, 0, 17, 40):
            equal(first.batch(n), again.batch(n))
        other += first.batch(0).inputs[0].tolist() != make(3).batch(0).inputs[0].tolist()
    assert other == 2


@pytest.mark.parametrize(
    ("length", "batch", "total"), [(8, 5, 240), (8, 5, 241), (8, 3, 5), (8, 1, 2)]
)
def test_evaluation_asks_for_every_token_but_the_first_once(tmp_path, length, batch, total):
    store = stream(tmp_path, total)
    batches = list(fixed(store, NextToken(), length=length, batch=batch))
    asked = [i for b in batches for i in b.targets.flatten().tolist()]
    assert asked == list(range(1, total))
    assert sum(b.count for b in batches) == total - 1
    assert all(b.inputs[0].shape[0] <= batch and b.inputs[0].shape[1] <= length for b in batches)
    for one, two in zip(
        batches, fixed(store, NextToken(), length=length, batch=batch), strict=True
    ):
        equal(one, two)


def test_a_context_longer_than_the_text_is_refused(tmp_path):
    store = stream(tmp_path, 20)
    with pytest.raises(
        ClearheadError, match=r"takes 65 tokens, and the text has 20.* to 19 or less"
    ):
        Windows(store, NextToken(), length=64, batch=2)
    assert Windows(store, NextToken(), length=19, batch=2).batch(0).count == 38
    with pytest.raises(ClearheadError, match="use Buckets"):
        Windows(store, TRANSLATE, 8, 2)
    with pytest.raises(ClearheadError, match="at least one row"):
        Windows(store, NextToken(), 8, 0)
    with pytest.raises(ClearheadError, match="seed is 0 or more"):
        Windows(store, NextToken(), 8, 1, seed=-1)


# --- buckets ---


@pytest.mark.parametrize("size", [{"tokens": 2048}, {"tokens": 4096}, {"batch": 64}])
def test_buckets_waste_little_and_show_everything_once(multi30k, size):
    store, source, target = multi30k
    buckets = Buckets(store, TRANSLATE, **size, seed=0)
    per_epoch = int(buckets.per_epoch)
    meetings = []
    for epoch in range(2):
        batches = [buckets.batch(epoch * per_epoch + n) for n in range(per_epoch)]
        seen = [i for batch in batches for i in batch.inputs[0][:, 0].tolist()]
        assert sorted(seen) == list(range(29000))
        tokens, slots = sum(b.tokens for b in batches), sum(b.slots for b in batches)
        assert tokens == source.sum() + target.sum()
        assert slots == sum(t.numel() for b in batches for t in b.inputs)
        assert 1 - tokens / slots < 0.05
        if "tokens" in size:
            sides = [max(t.numel() for t in batch.inputs) for batch in batches]
            assert 0.85 * size["tokens"] < np.mean(sides) < 1.1 * size["tokens"]
            assert max(sides) < 1.3 * size["tokens"]
        else:
            assert sorted({len(b.targets) for b in batches}) == [8, 64]
        widths = [batch.inputs[0].shape[1] for batch in batches]
        assert abs(np.corrcoef(widths, np.arange(per_epoch))[0, 1]) < 0.3  # long ones not last
        meetings.append({frozenset(b.inputs[0][:, 0].tolist()) for b in batches})
    # Examples meet others in every epoch, but for the few longest.
    assert len(meetings[0] & meetings[1]) < 0.05 * per_epoch


def test_groups_are_as_many_in_every_epoch():
    dice = np.random.default_rng(0)
    for lengths in (dice.integers(1, 40, (977, 2)), np.full((10, 1), 5), np.full((3, 1), 500)):
        for batch, tokens in ((8, None), (None, 100), (None, 10**6)):
            groups = Groups(lengths, batch, tokens)
            for seed in range(5):
                found = groups(np.random.default_rng(seed))
                assert len(found) == len(groups)
                assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))


def test_long_examples_are_left_out_and_counted(tmp_path):
    store, source, target = sentences(tmp_path, 500)
    long = int((np.maximum(source, target) > 20).sum())
    buckets = Buckets(store, TRANSLATE, tokens=500, max_len=20)
    assert buckets.left_out == long == too_long(store, TRANSLATE, 20)
    rows = sum(len(buckets.batch(n).targets) for n in range(int(buckets.per_epoch)))
    assert rows == 500 - long
    assert all(max(t.shape[1] for t in buckets.batch(n).inputs) <= 20 for n in range(5))
    assert sum(len(b.targets) for b in fixed(store, TRANSLATE, max_len=20)) == 500 - long
    with pytest.raises(ClearheadError, match="longer than max_len, which is 2: the shortest has"):
        Buckets(store, TRANSLATE, batch=8, max_len=2)
    empty = write_store(tmp_path / "empty", [{"source": [], "target": []}])
    with pytest.raises(ClearheadError, match="No example has a token"):
        Buckets(empty, TRANSLATE, batch=8)
    with pytest.raises(ClearheadError, match="either batch"):
        Buckets(store, TRANSLATE)
    with pytest.raises(ClearheadError, match="either batch"):
        Buckets(store, TRANSLATE, batch=3, tokens=4)


@pytest.mark.parametrize("size", [{"batch": 7}, {"tokens": 300}, {}])
def test_evaluation_shows_every_example_once(tmp_path, size):
    store, _, target = sentences(tmp_path, 200)
    batches = list(fixed(store, TRANSLATE, **size))
    seen = [i for b in batches for i in b.inputs[0][:, 0].tolist()]
    assert sorted(seen) == list(range(200))
    assert sum(b.count for b in batches) == target.sum()
    if "tokens" in size:
        assert max(t.numel() for b in batches for t in b.inputs) <= 300


def test_evaluation_fills_its_batches(tmp_path):
    store, _, _ = sentences(tmp_path, 300)
    widest, expected = sorted(TRANSLATE.lengths(store).max(axis=1).tolist()), []
    while widest:  # the slow twin: as many as fit, one more would not
        rows = 1
        while rows < len(widest) and (rows + 1) * widest[rows] <= 100:
            rows += 1
        expected.append(rows)
        widest = widest[rows:]
    assert [len(b.targets) for b in fixed(store, TRANSLATE, tokens=100)] == expected


def test_positions_are_those_of_ragged(tmp_path):
    store, _, _ = sentences(tmp_path, 50)
    batch = Buckets(store, TRANSLATE, batch=50).batch(0)
    lengths = [(row >= 0).sum().item() for row in batch.places["source_at"].pos]
    wanted = Positions.ragged(lengths)
    found = batch.places["source_at"]
    assert torch.equal(found.pos, wanted.pos)
    for fact in ("lo", "hi", "dense", "holes", "ends"):
        assert getattr(found, fact) == getattr(wanted, fact)
    assert batch.tokens == sum(int(at.filled().sum()) for at in batch.places.values())


# --- made data, threads ---


def test_made_data_is_a_function_of_the_number():
    corpus = open_corpus("reverse")
    source, target = corpus.columns[:2]
    texts = [r[name] for r in itertools.islice(corpus.records("train"), 200) for name in r]
    tokenizer = train_tokenizer(
        "characters", texts, special_tokens={"pad": "<pad>", "eos": "</s>"}, template="$A </s>"
    )
    objective = Seq2seq().prepare(corpus)
    assert (objective.source, objective.target) == (source, target)
    endless = Endless(corpus, objective, tokenizer, batch=3, seed=4)
    assert endless.per_epoch is None
    batch = endless.batch(5)
    equal(batch, Endless(corpus, objective, tokenizer, batch=3, seed=4).batch(5))
    for row in range(3):
        record = corpus.record("train", 4, 15 + row)
        assert tokenizer.decode(batch.inputs[0][row].tolist()).startswith(record[source])
        asked = [i for i in batch.targets[row].tolist() if i >= 0]
        assert asked == [*tokenizer.encode(record[target], special=False), tokenizer.eos_id]


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(tmp_path, workers):
    store, _, _ = sentences(tmp_path, 300)
    buckets = Buckets(store, TRANSLATE, tokens=400)
    ahead = prefetch(Buckets(store, TRANSLATE, tokens=400), start=5, workers=workers)
    in_line = prefetch(buckets, start=5, workers=0)
    for n, (one, two) in enumerate(zip(ahead, in_line, strict=True)):
        equal(one, two)
        equal(one, buckets.batch(5 + n))
        if n == 70:  # past an epoch
            break
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_what_goes_wrong_in_a_worker_is_raised_in_its_place():
    class Failing:
        per_epoch = None

        def batch(self, n):
            raise ClearheadError(f"batch {n} is bad")

    for workers in (0, 2):
        with pytest.raises(ClearheadError, match="batch 9 is bad"):
            next(prefetch(Failing(), 9, workers))
