"""`clearhead quantise`: a smaller folder that opens again, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.cli.main import main
from clearhead.text.trained import train_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the log. "
SIZES = {"n_layers": 2, "d_model": 64, "n_heads": 4, "max_len": 64}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer("bpe", [TEXT * 10], vocab_size=300)
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    model.save("model")
    Path("text.txt").write_text(TEXT * 5)
    return "model"


@pytest.mark.parametrize(("form", "most"), [("bf16", 0.6), ("int8", 0.45), ("int4", 0.45)])
def test_what_is_written_is_the_packed_model(folder, capsys, form, most):
    assert main(["quantise", folder, "small", "--to", form, "--data", "text.txt"]) == 0
    said = capsys.readouterr().out
    assert "nats a token" in said
    sizes = [Path(name, "model.safetensors").stat().st_size for name in (folder, "small")]
    assert sizes[1] < most * sizes[0]
    ids = torch.arange(8)[None]
    torch.testing.assert_close(ch.load("small")(ids), ch.load(folder).fast(form)(ids))
    assert main(["show", "small"]) == 0


def test_nothing_is_written_where_it_cannot_be_measured(folder, capsys):
    bert = ch.build("bert", seed=0, vocab_size=50, **SIZES)
    bert.save("bert")
    assert main(["quantise", "bert", "small", "--data", "text.txt"]) == 2
    assert "--data measures how well a decoder" in capsys.readouterr().err
    assert main(["quantise", folder, "small", "--data", "none.txt"]) == 2
    assert not Path("small").exists()
    Path("small").mkdir()
    Path("small/mine").write_text("precious")
    assert main(["quantise", folder, "small"]) == 2
    assert Path("small/mine").read_text() == "precious"
