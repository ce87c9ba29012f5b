"""BPE-dropout: other pieces, the same text; by its rate; the same for the same seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import clearhead as ch
import processes
from clearhead.errors import ClearheadError
from clearhead.text.cuts import CutAnew, cut_word
from clearhead.text.trained import train_tokenizer
from clearhead.training.job import prepare
from clearhead.training.recipe import Recipe

TEXTS = [processes.text(400), "two dogs run far away and a cat sat on the mat"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> ch.Tokenizer:
    roles = {"pad": "<pad>", "eos": "</s>"}
    return train_tokenizer("bpe", TEXTS, 300, special_tokens=roles, template="$A </s>")


def test_without_dropout_the_pieces_are_the_tokenisers_own(tokenizer):
    assert CutAnew(tokenizer, 0.0, 0).encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
    plain = tokenizer.encode_batch(TEXTS, special=False)
    assert CutAnew(tokenizer, 0.0, 0).encode_batch(TEXTS, special=False) == plain


def test_with_it_the_text_is_the_same_in_more_pieces(tokenizer):
    own = tokenizer.encode_batch(TEXTS)
    cut = CutAnew(tokenizer, 0.3, 0).encode_batch(TEXTS)
    assert [tokenizer.decode(ids) for ids in cut] == TEXTS
    assert sum(map(len, cut)) > sum(map(len, own))
    assert len({tuple(ids) for ids in cut}) == len(TEXTS)  # three times the same, never twice so


def test_special_tokens_in_the_text_stay_whole_and_bad_text_is_named(tokenizer):
    cut = CutAnew(tokenizer, 0.5, 0)
    ids = cut.encode("a cat</s>sat")
    assert ids.count(tokenizer.eos_id) == 2
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode("a cat</s>sat"))
    long = "x" * 5000
    assert tokenizer.decode(cut.encode(long)) == long
    with pytest.raises(ClearheadError, match="cannot be tokenised"):
        cut.encode_batch(["fine", "half \ud800"])


def test_other_tokenisers_are_refused():
    for kind in ("unigram", "words", "characters"):
        with pytest.raises(ClearheadError, match="byte-level BPE"):
            CutAnew(train_tokenizer(kind, TEXTS), 0.1, 0)


def test_a_seed_gives_the_same_pieces_and_another_others(tokenizer):
    first, again, other = (CutAnew(tokenizer, 0.3, s).encode_batch(TEXTS) for s in (1, 1, 2))
    assert first == again != other


def test_a_single_merge_is_left_out_as_often_as_the_rate_says():
    ranks, dice = {("a", "b"): 0}, random.Random(0)
    counts = Counter(len(cut_word("ab", ranks, 0.2, dice)) for _ in range(20_000))
    assert counts[2] / 20_000 == pytest.approx(0.2, abs=0.01)


def test_the_best_merge_comes_first():
    ranks = {("b", "c"): 0, ("a", "b"): 1, ("a", "bc"): 2}
    assert cut_word("abc", ranks, 0.0, random.Random(0)) == ["abc"]
    assert cut_word("ab", ranks, 1.0, random.Random(0)) == ["a", "b"]


def test_a_run_reads_its_text_in_several_ways_and_is_evaluated_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    how = {"kind": "bpe", "vocab_size": 300}
    plain, cut = (
        prepare(Recipe.from_dict(processes.recipe(tmp_path, tokenizer=how | more)))
        for more in ({}, {"dropout": 0.2, "readings": 3})
    )
    assert plain.batches.per_epoch
    assert cut.batches.per_epoch
    assert cut.batches.per_epoch > 3 * plain.batches.per_epoch
    assert (cut.valid.flat("ids") == plain.valid.flat("ids")).all()


def test_an_objective_of_places_refuses_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.tsv").write_text("text\tlabel\n" + "a cat\tgood\na dog\tbad\n" * 20)
    changes = {
        "data": {"source": str(tmp_path / "x.tsv"), "objective": "classification", "length": 16},
        "tokenizer": {"kind": "bpe", "vocab_size": 300, "dropout": 0.1},
        "model": {"family": "bert", "n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 16},
    }
    with pytest.raises(ClearheadError, match="asks about places"):
        prepare(Recipe.from_dict(processes.recipe(tmp_path, **changes)))
