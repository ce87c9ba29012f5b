"""`clearhead translate`, `embed`, `classify`, `tag`, `answer`: the model's own answers, a line
each, from arguments, files and standard input.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
import tiny
from clearhead.cli.main import main
from clearhead.text.trained import train_tokenizer

TEXTS = ["the cat sat", "on the mat and the dog", "the log"]
LABELS = ["bad", "good", "odd"]
SIZES = {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny random models by what they are for."""
    tokenizer = train_tokenizer("bpe", TEXTS, vocab_size=275)
    heads = {
        "embed": ("bert", {"kind": "pooling", "mode": "mean", "normalise": True}),
        "classify": ("bert", {"kind": "classification", "n_labels": 3}),
        "tag": ("bert", {"kind": "tagging", "n_labels": 3}),
        "answer": ("bert", "span"),
        "translate": ("transformer", None),
    }
    found = {}
    for name, (family, head) in heads.items():
        more = {} if head is None else {"head": head}
        model = ch.build(family, seed=0, vocab_size=tokenizer.vocab_size, **SIZES, **more)
        tiny.noisy(model.net)
        model.net.eval()
        model.tokenizer = tokenizer
        if name in ("classify", "tag"):
            model.companions["labels.json"] = LABELS
        if name == "translate":
            model.companions["generation_config.json"] = {"decoder_start_token_id": 1}
        found[name] = tmp_path_factory.mktemp("models") / name
        model.save(found[name])
    return found


def said(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_translations_come_a_line_each_in_order(models, capsys, tmp_path, monkeypatch):
    folder = str(models["translate"])
    right = ch.load(folder).translate(TEXTS, beams=2)
    out = said(capsys, "translate", folder, *TEXTS, "--beams", "2")
    assert out.splitlines() == [text.replace("\n", " ") for text in right]
    (tmp_path / "texts").write_text("\n".join(TEXTS[:2]) + "\n\n" + TEXTS[2])
    words = ("translate", folder, "--file", str(tmp_path / "texts"), "--beams", "2")
    assert said(capsys, *words) == out
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(TEXTS)))
    lines = said(capsys, "translate", folder, "--beams", "2", "--json").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"source": text, "translation": made} for text, made in zip(TEXTS, right, strict=True)
    ]


def test_many_texts_come_in_order(models, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.cli.texts.CHUNK", 2)
    monkeypatch.setattr("clearhead.cli.texts.chunks.__defaults__", (2,))
    folder = str(models["classify"])
    out = said(capsys, "classify", folder, *TEXTS)
    assert [line.partition("\t")[2] for line in out.splitlines()] == TEXTS


def test_speed_is_said_on_the_side(models, capsys):
    assert main(["translate", str(models["translate"]), "the cat", "--stats"]) == 0
    both = capsys.readouterr()
    assert "1 texts" in both.err
    assert "tokens/s, 5 beams" in both.err
    assert "tokens/s" not in both.out


def test_vectors_and_cosines(models, capsys, tmp_path):
    folder = str(models["embed"])
    right = ch.load(folder).embed(TEXTS)
    table = said(capsys, "embed", folder, *TEXTS).splitlines()
    assert [float(cell) for cell in table[2].split()[-3:]] == pytest.approx(
        (right @ right.T)[1].tolist(), abs=6e-4
    )
    lines = said(capsys, "embed", folder, *TEXTS, "--json").splitlines()
    vectors = torch.tensor([json.loads(line)["vector"] for line in lines])
    torch.testing.assert_close(vectors, right)
    numbers = said(capsys, "embed", folder, "the cat sat").split()
    assert [float(x) for x in numbers] == pytest.approx(right[0].tolist(), abs=1e-4)
    assert said(capsys, "embed", folder, *TEXTS, "--out", str(tmp_path / "v.npy")) == ""
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), right.numpy(), atol=1e-6)


def test_labels_with_their_probability(models, capsys):
    folder = str(models["classify"])
    right = ch.load(folder).classify("the cat sat")
    label, value = next(iter(right.items()))
    assert said(capsys, "classify", folder, "the cat sat") == f"{label} {value:.3f}\n"
    assert said(capsys, "classify", folder, "the cat sat", "--best", "3").count(".") == 3
    pair = ch.load(folder).classify(("the cat", "the dog"))
    for words in (["the cat", "--second", "the dog"], ["the cat\tthe dog"]):
        found = json.loads(said(capsys, "classify", folder, *words, "--json"))
        assert found["labels"] == pytest.approx(pair)


def test_words_with_their_tags(models, capsys):
    folder = str(models["tag"])
    right = ch.load(folder).tag("the cat sat")
    assert said(capsys, "tag", folder, "the cat sat").split() == [f"{w}/{t}" for w, t in right]
    found = json.loads(said(capsys, "tag", folder, "the cat sat", "--json"))
    assert list(zip(found["words"], found["tags"], strict=True)) == right


def test_answers_are_pieces_of_the_text(models, capsys, tmp_path, monkeypatch):
    folder, context = str(models["answer"]), "the dog sat on the log"
    right = ch.load(folder).answer("what sat ?", context)
    assert said(capsys, "answer", folder, "what sat ?", "--context", context) == right.text + "\n"
    (tmp_path / "c.txt").write_text(context + "\n")
    found = json.loads(
        said(capsys, "answer", folder, "what sat ?", "--file", str(tmp_path / "c.txt"), "--json")
    )
    assert (found["text"], found["start"], found["end"]) == (right.text, right.start, right.end)
    monkeypatch.setattr("sys.stdin", io.StringIO(context))
    assert said(capsys, "answer", folder, "what sat ?") == right.text + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["translate", "translate"], "There is no text"),
        (["embed", "embed", "a", "--file", "b"], "given twice"),
        (["classify", "classify", "a", "--best", "0"], "1 or more"),
        (["classify", "embed", "a"], "Classifying takes a model with a classification head"),
        (["answer", "answer", "what ?", "--context", " "], "no text to look for"),
        (["answer", "answer", "a ?", "--context", "b", "--file", "c"], "given twice"),
        (["tag", "tag", "--file", "none.txt"], 'no file or folder "none.txt"'),
        (["translate", "embed", "a"], "Translating takes an encoder-decoder"),
    ],
)
def test_what_cannot_be_done(models, capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    verb, model, *rest = words
    assert main([verb, str(models[model]), *rest]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []
