"""Figures of a model on data, against the same computed by hand or by others' code."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.cli.main import main
from clearhead.data.corpus import open_corpus
from clearhead.data.labelled import Classification, Tagging
from clearhead.data.language import NextToken, Seq2seq
from clearhead.data.pairs import Pairs
from clearhead.errors import ClearheadError
from clearhead.text.trained import train_tokenizer
from clearhead.training.evaluate import How, evaluate, objective_for
from clearhead.training.figures import FIGURES
from clearhead.training.job import in_order, make_store

SIZES = {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 16}
READER = {
    "special_tokens": {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "template": "[CLS] $A [SEP]",
    "pair_template": "[CLS] $A [SEP] $B:1 [SEP]:1",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def reader(texts, labels=(), **head):
    """A tiny encoder with a head."""
    tokenizer = train_tokenizer("words", texts, **READER)
    model = ch.build("bert", seed=0, vocab_size=tokenizer.vocab_size, head=head, **SIZES)
    model.tokenizer = tokenizer
    model.companions["labels.json"] = list(labels)
    model.net.eval()
    return model


def test_the_loss_of_a_text_is_what_the_model_says_of_each_token(tmp_path):
    text = "the cat sat on the mat. " * 9
    path = tmp_path / "a.txt"
    path.write_text(text)
    tokenizer = train_tokenizer("characters", [text])
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    corpus = open_corpus(path, split=0)
    found = evaluate(model, NextToken(), corpus, "train", How(length=16))
    ids = torch.tensor(tokenizer.encode(text))
    total = 0.0
    with torch.inference_mode():
        model.net.eval()
        for first in range(0, len(ids) - 1, 16):
            window = ids[first : first + 17]
            logits = model.net(window[None, :-1])[0]
            total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    loss = total / (len(ids) - 1)
    assert found["loss"].value == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-5)
    bits = total / len(text) / math.log(2)
    assert found["bits_per_character"].value == pytest.approx(bits, rel=1e-5)
    assert found["bits_per_byte"].value == pytest.approx(bits, rel=1e-5)
    interval = found["loss"].interval
    assert interval.low <= loss <= interval.high


def test_a_limit_holds_for_the_loss_too(tmp_path):
    text = "the cat sat on the mat. a dog ran. " * 9
    (tmp_path / "all.txt").write_text(text)
    (tmp_path / "some.txt").write_text(text[:100])
    tokenizer = train_tokenizer("characters", [text])
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    whole, some = (open_corpus(tmp_path / name, split=0) for name in ("all.txt", "some.txt"))
    found = evaluate(model, NextToken(), whole, "train", How(limit=100))
    wanted = evaluate(model, NextToken(), some, "train")
    assert found == wanted
    assert found["loss"] != evaluate(model, NextToken(), whole, "train")["loss"]


def test_data_without_end_need_a_limit():
    corpus = open_corpus("copy:longest=6")
    tokenizer = train_tokenizer(
        "characters",
        [record["source"] for record in corpus.records("valid")],
        special_tokens={"pad": "<pad>", "eos": "</s>"},
        template="$A </s>",
    )
    model = ch.build("transformer", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    objective = Seq2seq().prepare(corpus)
    with pytest.raises(ClearheadError, match=r"no end.*--limit"):
        evaluate(model, objective, corpus, "train")
    assert evaluate(model, objective, corpus, "train", How(limit=5))["loss"].value > 0


def test_a_batch_of_evaluation_has_few_logits(tmp_path, monkeypatch):
    """However many words a model knows; the figures stay."""
    text = "the cat sat on the mat. " * 40
    (tmp_path / "a.txt").write_text(text)
    tokenizer = train_tokenizer("characters", [text])
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    corpus = open_corpus(tmp_path / "a.txt", split=0)
    store = make_store(corpus, "train", NextToken(), tokenizer)
    (all_at_once, _) = in_order(store, NextToken(), model, 16)
    before = evaluate(model, NextToken(), corpus, "train")["loss"].value
    for most, rows in ((tokenizer.vocab_size * 50, 3), (1, 1)):
        monkeypatch.setattr("clearhead.training.job.EVAL_LOGITS", most)
        batches = list(in_order(store, NextToken(), model, 16))
        assert max(batch.targets.shape[0] for batch in batches) == rows
        assert sum(batch.count for batch in batches) == len(text) - 1
        after = evaluate(model, NextToken(), corpus, "train")["loss"].value
        assert after == pytest.approx(before, rel=1e-5)
    assert all_at_once.targets.shape[0] > 3


@pytest.mark.parametrize(
    ("family", "head", "columns", "kind"),
    [
        ("t5", None, "en,de", "seq2seq"),
        ("transformer", None, "id,en,de", "seq2seq"),
        ("bert", {"kind": "masked_lm"}, "id,text", "masked"),
        ("gpt2", None, "text", "next_token"),
        ("bert", {"kind": "pooling", "mode": "mean"}, "sentence1,sentence2", "pairs"),
    ],
)
def test_what_a_model_is_for(tmp_path, family, head, columns, kind):
    """Judged by its head, for every head that writes, and then measured."""
    path = tmp_path / "a.csv"
    names = columns.split(",")
    row = ",".join(f"some words {i}" if name != "id" else "7" for i, name in enumerate(names))
    path.write_text(f"{columns}\n" + f"{row}\n" * 6)
    corpus = open_corpus(path, split=0)
    special = READER if family == "bert" else {}
    if family in ("t5", "transformer"):
        special = {"special_tokens": {"pad": "<pad>", "eos": "</s>"}, "template": "$A </s>"}
    tokenizer = train_tokenizer("words", ["some words 0 1 2 3"] * 3, **special)
    more = {} if head is None else {"head": head}
    model = ch.build(family, seed=0, vocab_size=tokenizer.vocab_size, **SIZES, **more)
    model.tokenizer = tokenizer
    objective = objective_for(model, corpus)
    assert objective.kind == kind
    assert "id" not in objective.columns
    found = evaluate(model, objective, corpus, "train")
    assert set(found) <= set(FIGURES[kind])
    assert found["accuracy" if kind == "pairs" else "loss"].value >= 0


def test_translations_are_scored_by_sacrebleu(tmp_path):
    import sacrebleu

    corpus = open_corpus("copy:longest=6")
    records = list(corpus.records("valid"))[:20]
    tokenizer = train_tokenizer(
        "characters",
        [record["source"] for record in records],
        special_tokens={"pad": "<pad>", "eos": "</s>"},
        template="$A </s>",
    )
    model = ch.build("transformer", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    objective = Seq2seq().prepare(corpus)
    found = evaluate(model, objective, corpus, "valid", How(limit=20, beams=2))
    written = model.translate([record["source"] for record in records], beams=2)
    wanted = [record["target"] for record in records]
    assert found["bleu"].value == pytest.approx(sacrebleu.corpus_bleu(written, [wanted]).score)
    assert found["chrf"].value == pytest.approx(sacrebleu.corpus_chrf(written, [wanted]).score)
    same = sum(a == b for a, b in zip(written, wanted, strict=True)) / 20
    assert found["exact_match"].value == same
    assert "|tok:13a|" in found["bleu"].note


def test_labels_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "good film,yes\nbad film,no\ngood bad,no\nfilm,yes\n" * 3)
    corpus = open_corpus(path, split=0)
    texts = [record["text"] for record in corpus.records("train")]
    model = reader(texts, ["no", "yes"], kind="classification", n_labels=2)
    found = evaluate(model, objective_for(model, corpus), corpus, "train")
    wanted = [record["label"] for record in corpus.records("train")]
    rows = model.classify(texts)
    best = [max(row, key=row.get) for row in rows]
    right = sum(a == b for a, b in zip(best, wanted, strict=True)) / len(wanted)
    assert found["accuracy"].value == pytest.approx(right)
    loss = -sum(math.log(row[w]) for row, w in zip(rows, wanted, strict=True)) / len(wanted)
    assert found["loss"].value == pytest.approx(loss, rel=1e-5)


def test_a_label_the_model_never_saw_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\ngood,yes\nbad,perhaps\n")
    corpus = open_corpus(path, split=0)
    model = reader(["good bad"], ["no", "yes"], kind="classification", n_labels=2)
    objective = Classification(labels=("no", "yes"))
    with pytest.raises(ClearheadError, match="perhaps"):
        evaluate(model, objective, corpus, "train")


def test_entities_are_scored_as_spans(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"words": "ann lives here", "tags": "B-PER O O"}, {"words": "here", "tags": "O"}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    corpus = open_corpus(path, split=0)
    model = reader(["ann lives here"], ["B-PER", "O"], kind="tagging", n_labels=2)
    with torch.no_grad():  # a model that says O to everything
        model.net.head.proj.weight.zero_()
        model.net.head.proj.bias.copy_(torch.tensor([0.0, 5.0]))
    found = evaluate(model, Tagging(labels=("B-PER", "O")), corpus, "train")
    assert found["f1"].value == 0.0
    assert found["accuracy"].value == 3 / 4  # of the words, not of the sentences


def test_pairs_are_ranked(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("first,second,score\na b,a b,5\na,b c,1\nc,a b,2\nb c,b,4\n")
    corpus = open_corpus(path, split=0)
    model = reader(["a b c"], kind="pooling", mode="mean")
    objective = Pairs(score="score", largest=5.0)
    found = evaluate(model, objective, corpus, "train")
    first = model.embed(["a b", "a", "c", "b c"])
    second = model.embed(["a b", "b c", "a b", "b"])
    cosine = F.cosine_similarity(first, second)
    scores = torch.tensor([5.0, 1.0, 2.0, 4.0])
    wanted = torch.corrcoef(torch.stack([cosine, scores]))[0, 1]
    assert found["pearson"].value == pytest.approx(float(wanted), abs=1e-5)
    apart = cosine.argsort().argsort() - scores.argsort().argsort()
    ranked = 1 - 6 * int(apart.square().sum()) / (4 * 15)
    assert found["spearman"].value == pytest.approx(ranked, abs=1e-9)


def test_partners_are_found_in_parts_as_all_at_once(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("first,second\na,b\nb,a b\nc,c\na b,c a\nb c,b c\n")
    corpus = open_corpus(path, split=0)
    model = reader(["a b c"], kind="pooling", mode="mean")
    at_once = evaluate(model, Pairs(), corpus, "train")["accuracy"].value
    first, second = (model.embed([r[c] for r in corpus.records("train")]) for c in Pairs().columns)
    cosine = F.cosine_similarity(first[:, None], second[None], dim=-1)
    assert at_once == float((cosine.argmax(1) == torch.arange(5)).double().mean())
    monkeypatch.setattr("clearhead.training.evaluate.ROWS", 2)
    assert evaluate(model, Pairs(), corpus, "train")["accuracy"].value == at_once


def test_a_model_of_another_shape_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 20)
    corpus = open_corpus(tmp_path / "a.txt", split=0)
    model = reader(["some text"], kind="pooling", mode="mean")
    with pytest.raises(ClearheadError, match="decoder"):
        evaluate(model, NextToken(), corpus, "train")
    with pytest.raises(ClearheadError, match='no split "test"'):
        evaluate(model, NextToken(), corpus, "test")


def test_the_command_prints_figures_and_json(tmp_path, capsys):
    text = "the cat sat on the mat. " * 20
    (tmp_path / "a.txt").write_text(text)
    tokenizer = train_tokenizer("characters", [text])
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    model.save(tmp_path / "model")
    assert main(["eval", str(tmp_path / "model"), str(tmp_path / "a.txt")]) == 0
    assert "bits per character" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "model"), str(tmp_path / "a.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"]["interval"][0] <= found["loss"]["value"] <= found["loss"]["interval"][1]
    words = ["eval", str(tmp_path / "model"), str(tmp_path / "a.txt"), "--objective", "next_token"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert "no data of its own" in capsys.readouterr().err


def test_beams_that_cannot_be_are_refused_before_anything_is_measured(
    tmp_path, capsys, monkeypatch
):
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    roles = {"pad": "<pad>", "eos": "</s>"}
    tokenizer = train_tokenizer("characters", [letters], special_tokens=roles)
    model = ch.build("transformer", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    model.save(tmp_path / "model")
    monkeypatch.setattr("clearhead.training.evaluate._loss", lambda *_: pytest.fail("too early"))
    words = ["eval", str(tmp_path / "model"), "copy:longest=6", "--limit", "2", "--beams"]
    for beams in ("0", "-1", "100000"):
        assert main([*words, beams]) == 2
        said = f"up to the vocabulary's {tokenizer.vocab_size} tokens, not {beams}."
        assert said in capsys.readouterr().err


def test_generate_writes_the_prompt_and_what_follows(tmp_path, capsys):
    text = "abcd " * 40
    tokenizer = train_tokenizer("characters", [text])
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    model.save(tmp_path / "model")
    words = ["generate", str(tmp_path / "model"), "abc", "--max-new-tokens", "5", "--seed", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    wanted = model.generate("abc", max_new_tokens=5, temperature=0.8, seed=1)
    assert out == f"abc{wanted}\n"
