"""`clearhead import` and `clearhead export`: what they print, what they write, what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead as ch
from architectures import ROWS, randomise
from clearhead.cli import main as cli
from clearhead.cli.import_ import folded
from clearhead.weights.check import _inputs, difference_to_transformers, largest_difference
from test_llama2c import SIZES as LLAMA2C
from test_llama2c import weights as llama2c_weights
from test_llama2c import write as write_llama2c
from tiny import SIZES


def run(capsys, *words):
    """The exit code, what was printed, and the error."""
    capsys.readouterr()  # what transformers said while the folder was made
    code = cli.main([str(word) for word in words])
    out = capsys.readouterr()
    return code, " ".join(out.out.split()), " ".join(out.err.split())


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def theirs(tmp_path):
    """The folder of a row of the table."""

    def make(name):
        row = next(row for row in ROWS if row.name == name)
        randomise(row.make()).save_pretrained(tmp_path / "hf")
        if row.beside is not None:
            row.beside(tmp_path / "hf")
        return tmp_path / "hf"

    return make


# --- import ---


def single(folder, kind):
    """A folder with one model file of that kind and nothing else."""
    folder.mkdir()
    if kind == "gguf":
        ch.export(ch.build("llama", seed=0, **SIZES), folder / "a.gguf", to="gguf", dtype="f32")
        return folder / "a.gguf"
    write_llama2c(folder / "a.bin", LLAMA2C, llama2c_weights(LLAMA2C))
    return folder / "a.bin"


@pytest.mark.parametrize("kind", ["gguf", "bin"])
@pytest.mark.parametrize("whole", [False, True], ids=["file", "folder"])
@pytest.mark.usefixtures("unchecked")
def test_a_single_file_is_saved_though_there_is_nothing_to_compare_with(
    kind, whole, tmp_path, capsys
):
    file = single(tmp_path / "in", kind)
    source = file.parent if whole else file
    code, out, err = run(capsys, "import", source, tmp_path / "out", "--check")
    assert code == 2
    assert "saved to" in out
    assert "a single file" in err
    assert "Traceback" not in err
    assert ch.load(tmp_path / "out").config == ch.load(source).config


def test_our_own_folder_is_not_compared(tmp_path, capsys):
    ch.build("gpt2", seed=0, **SIZES).save(tmp_path / "own")
    code, out, err = run(capsys, "import", tmp_path / "own", tmp_path / "out", "--check", "--json")
    assert code == 2
    assert json.loads(out)["max_difference"] is None
    assert "transformers does not open" in err
    assert ch.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("row", "of"), [("sentence-transformers pooling", "states"), ("gpt2 lm", "logits")]
)
@pytest.mark.filterwarnings("ignore:Cannot enable progress bars")
def test_what_was_compared_is_said_without_their_progress_bar(row, of, theirs, capsys):
    folder = theirs(row)
    bars = transformers.utils.logging
    bars.enable_progress_bar()
    try:
        code, out, err = run(capsys, "import", folder, "--check")
        assert bars.is_progress_bar_enabled()
    finally:
        bars.disable_progress_bar()
    assert code == 0
    assert f"largest difference of {of} from transformers:" in out
    assert err == ""


def test_import_replaces_only_what_it_is_told_to(theirs, tmp_path, capsys):
    folder = theirs("gpt2 lm")
    ch.build("bert", seed=0, **SIZES).save(tmp_path / "out")
    code, _, err = run(capsys, "import", folder, tmp_path / "out")
    assert code == 2
    assert "is there already: choose another place, or replace it with --overwrite" in err
    assert ch.load(tmp_path / "out").config.kind == "bert"
    code, _, err = run(capsys, "import", folder, tmp_path / "out", "--overwrite")
    assert (code, err) == (0, "")
    assert ch.load(tmp_path / "out").config.kind == "gpt2"
    (tmp_path / "empty").mkdir()
    assert run(capsys, "import", folder, tmp_path / "empty")[0] == 0


def test_import_never_deletes_other_things(theirs, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years")
    code, _, err = run(capsys, "import", theirs("gpt2 lm"), tmp_path / "out", "--overwrite")
    assert code == 2
    assert "holds other things too (thesis.tex)" in err


def test_layers_are_folded_wherever_the_number_stands():
    became = {f"w3.{i}": (f"stack.blocks.{i}.ffn.in_proj.weight",) for i in range(3)}
    became |= {f"h.{i}.mlp.bias": (f"stack.blocks.{i}.ffn.out_proj.bias",) for i in range(2)}
    assert folded(became) == {
        ("w3.*", "stack.blocks.*.ffn.in_proj"): 3,
        ("h.*.mlp", "stack.blocks.*.ffn.out_proj"): 2,
    }


def test_different_rates_of_dropout_are_reported(theirs, tmp_path, capsys):
    folder = theirs("gpt2 lm")
    assert ch.load(folder, report=True)[1].notes == ()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_pdrop": 0.2, "embd_pdrop": 0}))
    note = (
        "dropout: the config has resid_pdrop 0.1, embd_pdrop 0, attn_pdrop 0.2; there is one rate "
        "here, and 0.1 is kept"
    )
    assert ch.load(folder, report=True)[1].notes == (note,)
    assert note in run(capsys, "import", folder)[1]
    assert json.loads(run(capsys, "import", folder, "--json")[1])["notes"] == [note]


def test_the_rates_of_both_towers_are_looked_at(theirs):
    folder = theirs("clip")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    (note,) = ch.load(folder, report=True)[1].notes
    assert "text_config.attention_dropout 0.3" in note


def test_settings_without_effect_are_named(theirs):
    folder = theirs("bart")
    said = {"num_beams": 4, "no_repeat_ngram_size": 3, "max_length": 142, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(said))
    model, report = ch.load(folder, report=True)
    (note,) = [note for note in report.notes if note.startswith("generation_config.json")]
    assert "sets max_length, which have no effect here:" in note
    assert model.companions["generation_config.json"].items() >= said.items()


def test_older_folders_say_in_their_config_how_to_search(theirs):
    folder = theirs("bart")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_beams": 6}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert ch.load(folder).companions["generation_config.json"]["num_beams"] == 6
    (folder / "generation_config.json").write_text("{}")
    assert "num_beams" not in ch.load(folder).companions["generation_config.json"]


# --- what --check compares ---


def test_only_like_numbers_are_compared():
    ones = torch.ones(2, 3)
    assert largest_difference(ones, ones + 0.5) == 0.5
    with pytest.raises(ch.ClearheadError, match=r"is \(2, 3\) and that of transformers \(2, 1\)"):
        largest_difference(ones, torch.ones(2, 1))
    for damage in (float("nan"), float("inf")):
        with pytest.raises(ch.ClearheadError, match="outputs are not numbers"):
            largest_difference(ones, ones * damage)


@pytest.mark.parametrize("row", ["gpt2 lm", "roberta masked_lm", "bert span", "t5 v1.0", "bart"])
def test_padding_is_compared_too(row, theirs):
    folder = theirs(row)
    model = ch.load(folder)
    inputs, ours = _inputs(model.net, model.config)
    assert len(ours) == 2
    assert inputs["attention_mask"].sum(dim=1).tolist() in ([16, 8], [9, 4])
    assert difference_to_transformers(model.net, model.config, str(folder)).largest < 1e-4


# --- BART's body ---


def test_a_bart_without_its_head_is_opened_with_it(tmp_path, capsys):
    """As AutoModelForSeq2SeqLM opens it: the head is the embedding, its bias zeros."""
    row = next(row for row in ROWS if row.name == "bart")
    body = randomise(row.make()).model
    body.save_pretrained(tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert said["architectures"] == ["BartModel"]
    assert "final_logits_bias" not in load_file(tmp_path / "hf" / "model.safetensors")
    model, report = ch.load(tmp_path / "hf", report=True)
    hf = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    case = row.feed.whole()
    with torch.no_grad():
        expected = hf(**case.theirs).logits
        torch.testing.assert_close(model(*case.ours), expected, rtol=1e-5, atol=1e-5)
    assert report.drawn == ()
    assert "head.proj.bias is not in the file: zeros, as in transformers" in report.notes
    code, out, err = run(capsys, "import", tmp_path / "hf", "--check", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["compared"] == "logits"
    assert json.loads(out)["max_difference"] < 1e-4
    ch.export(model, tmp_path / "out")
    assert ch.load(tmp_path / "out").net.head.proj.bias.equal(torch.zeros(99))


def test_a_bart_with_its_head_must_have_all_of_it(theirs):
    folder = theirs("bart")
    file = load_file(folder / "model.safetensors")
    del file["final_logits_bias"]
    save_file(file, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ch.ClearheadError, match=r"missing: head\.proj\.bias"):
        ch.load(folder)


# --- export ---


@pytest.mark.parametrize(
    ("row", "call"),
    [
        ("gpt2 lm", "AutoModelForCausalLM"),
        ("bert tagging", "AutoModelForTokenClassification"),
        ("t5 v1.0", "AutoModelForSeq2SeqLM"),
        ("marian", "AutoModelForSeq2SeqLM"),
        ("whisper", "AutoModelForSpeechSeq2Seq"),
        ("clip", "AutoModel"),
    ],
)
def test_export_says_what_opens_it(row, call, theirs, tmp_path, capsys):
    code, out, err = run(capsys, "export", theirs(row), tmp_path / "out")
    assert (code, err) == (0, "")
    assert f"Open it with: transformers.{call}.from_pretrained('{tmp_path / 'out'}')" in out
    assert "pooler" not in out
    assert getattr(transformers, call).from_pretrained(tmp_path / "out")


def test_export_says_that_transformers_draws_a_pooler(theirs, tmp_path, capsys):
    code, out, _ = run(capsys, "export", theirs("bert none"), tmp_path / "out")
    assert code == 0
    assert "which the model has not, and draws one: use last_hidden_state" in out


@pytest.mark.parametrize(
    ("row", "files"),
    [("gpt2 lm", ["model", "decoder_with_past"]), ("bert none", ["model"])],
)
def test_export_names_the_graphs(row, files, theirs, tmp_path, capsys, unchecked):
    pytest.importorskip("onnxscript")
    code, out, _ = run(capsys, "export", theirs(row), tmp_path / "out", "--to", "onnx")
    assert code == 0
    for name in files:
        path = tmp_path / "out" / f"{name}.onnx"
        assert f"onnxruntime.InferenceSession('{path}')" in out
        assert path.is_file()


def test_export_replaces_only_what_it_is_told_to(theirs, tmp_path, capsys):
    folder = theirs("llama lm")
    for to, name in (("hf", "out"), ("gguf", "a.gguf")):
        words = ("export", folder, tmp_path / name, "--to", to)
        assert run(capsys, *words)[0] == 0
        code, _, err = run(capsys, *words)
        assert code == 2
        assert "--overwrite" in err
        assert run(capsys, *words, "--overwrite")[0] == 0
