"""`clearhead show` and `clearhead presets`: the values they print, from names and from folders."""

from __future__ import annotations

import json
import re

import pytest
import torch

import clearhead as ch
from clearhead.cli import main as cli
from clearhead.cli import units
from clearhead.cli.overrides import read_changes
from clearhead.errors import ClearheadError
from clearhead.measure.cost import predict
from clearhead.measure.outline import outline
from clearhead.models.presets import PRESETS
from tiny import SIZES

SMALL = ("--set", "n_layers=3", "d_model=32", "n_heads=4", "vocab_size=50", "max_len=40")


def run(capsys, *words):
    """The exit code, what was printed, and the error."""
    code = cli.main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


def run_json(capsys, *words):
    code, out, err = run(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def wrong(capsys, *words):
    """The one line of an error, with nothing else printed."""
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


# --- show ---


def test_a_preset(capsys):
    facts = run_json(capsys, "show", "gpt2", "--length", "512", "--batch", "8")
    cost = predict(ch.build("gpt2", device="meta").net, batch=8, length=512)
    assert facts["cost"] == json.loads(json.dumps(cost.to_dict()))
    assert facts["cost"]["total"]["parameters"] == 124_439_808
    assert facts["is"] == "preset"
    assert facts["shape"] == "decoder"
    assert facts["config"]["d_model"] == 768
    assert facts["weights"] is None


def test_settings_are_changed(capsys):
    facts = run_json(capsys, "show", "llama", *SMALL, "--set", "variant.window=5")
    assert facts["config"]["variant"]["window"] == 5
    assert facts["config"]["n_layers"] == 3
    assert facts["cost"]["length"] == 40  # not 512: no longer than max_len
    changes = {"n_layers": 3, "d_model": 32, "n_heads": 4, "vocab_size": 50, "max_len": 40}
    net = ch.build("llama", **changes, variant={"window": 5}).net
    assert facts["cost"]["total"]["parameters"] == sum(p.numel() for p in net.parameters())
    assert facts["cost"]["memory"]["cache"] == net.new_cache(8, 40).nbytes


def test_source_length(capsys):
    facts = run_json(capsys, "show", "t5-small", "--length", "20", "--source-length", "70")
    assert facts["cost"]["source_length"] == 70
    assert facts["cost"]["tokens"] == 8 * 90
    assert run_json(capsys, "show", "t5-small", "--length", "20")["cost"]["source_length"] == 20


def test_dtype(capsys):
    half = run_json(capsys, "show", "gpt2", "--dtype", "bfloat16")["cost"]
    assert half["number_size"] == 2
    assert half["memory"]["weights"] == 2 * 124_439_808


@pytest.mark.parametrize("family", ["transformer", "gpt2", "llama", "bert", "t5", "gpt_neox"])
def test_every_family_prints(family, capsys, narrow):
    code, out, err = run(capsys, "show", family, *SMALL)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out  # nothing is cut off
    assert "blocks.0-2 (3 x)" in out
    assert "weight 32 x 32" in out
    count = sum(p.numel() for p in ch.build(family, **dict_of(SMALL)).net.parameters())
    assert f"({count:,})" in out


def dict_of(words):
    return {key: int(value) for key, value in (word.split("=") for word in words[1:])}


def test_what_is_printed(capsys, narrow):
    code, out, _ = run(capsys, "show", "gpt2", "--length", "1024", "--batch", "1")
    assert code == 0
    assert "weight = embed.tokens.weight" in out
    assert "tied" in out
    assert "layers share: causal mask" in out
    assert "Kind" not in out
    assert re.search(r"FLOP +FLOP +share +activations", out)
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in out.splitlines()}
    assert lines["attention matrices"].startswith("attention matrices 604 MB 50.33 MB a layer")
    assert lines["weights"] == "weights 497.8 MB"
    # 2 x 12 layers x 768 numbers x 1024 tokens x 4 bytes
    assert lines["key/value cache"] == "key/value cache 75.5 MB 1 x 1024 tokens"


def test_a_wide_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run(capsys, "show", "flan-t5-small")
    assert code == 0
    assert "weight = encoder.embed.tokens.weight" in out
    assert "blocks.0-7 (8 x)" in out


# --- folders ---


def test_our_folder(capsys, tmp_path):
    folder = tmp_path / "model"
    model = ch.build("gpt2", **SIZES)
    model.save(folder)
    facts = run_json(capsys, "show", str(folder), "--length", "9", "--batch", "2")
    assert facts["is"] == "folder"
    assert facts["config"] == json.loads(json.dumps(model.config.to_dict()))
    cost = predict(model.net, batch=2, length=9)
    assert facts["cost"] == json.loads(json.dumps(cost.to_dict()))
    count = cost.parameters
    assert facts["weights"]["numbers"] == {"F32": count}
    assert facts["weights"]["size"] == (folder / "model.safetensors").stat().st_size
    code, out, _ = run(capsys, "show", str(folder), "--length", "9")
    assert code == 0
    assert "model.safetensors: " in out


def test_a_folder_in_half_precision(capsys, tmp_path):
    model = ch.build("gpt2", **SIZES)
    model.net.to(torch.bfloat16)
    model.save(tmp_path / "half")
    facts = run_json(capsys, "show", str(tmp_path / "half"))
    assert list(facts["weights"]["numbers"]) == ["BF16"]
    assert facts["cost"]["number_size"] == 2
    whole = run_json(capsys, "show", str(tmp_path / "half"), "--dtype", "float32")
    assert whole["cost"]["number_size"] == 4


def test_a_folder_without_weights(capsys, tmp_path):
    folder = tmp_path / "model"
    ch.build("gpt2", **SIZES).save(folder)
    (folder / "model.safetensors").unlink()
    assert run_json(capsys, "show", str(folder))["weights"] is None


def test_weights_are_not_read(capsys, tmp_path):
    """64 GB of numbers that are not there (a sparse file): the header is enough."""
    folder = tmp_path / "model"
    ch.build("gpt2", **SIZES).save(folder)
    numbers = 16 * 10**9
    tensor = {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}
    header = json.dumps({"x": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * numbers)
    weights = run_json(capsys, "show", str(folder))["weights"]
    assert weights["numbers"] == {"F32": numbers}
    assert weights["size"] == 8 + len(header) + 4 * numbers


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_folder(capsys, tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=tied,
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "hf")
    facts = run_json(capsys, "show", str(tmp_path / "hf"), "--length", "9")
    count = sum(p.numel() for p in theirs.parameters())
    assert facts["is"] == "Hugging Face folder"
    assert facts["family"] == "llama"
    assert facts["cost"]["total"]["parameters"] == count
    assert facts["weights"]["numbers"] == {"F32": count}


def test_shards(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_positions": 40}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    facts = run_json(capsys, "show", str(tmp_path / "hf"), "--length", "9")
    weights = facts["weights"]
    assert len(weights["files"]) > 1
    assert sum(weights["numbers"].values()) == sum(p.numel() for p in theirs.parameters())
    (tmp_path / "hf" / weights["files"][-1]).unlink()
    code, out, _ = run(capsys, "show", str(tmp_path / "hf"), "--length", "9")
    assert code == 0
    assert "not there" in out


def test_a_truncated_file(capsys, tmp_path):
    folder = tmp_path / "model"
    ch.build("gpt2", **SIZES).save(folder)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for part in (whole[:-10], whole[:20], b"", b"not a safetensors file at all"):
        path.write_bytes(part)
        line = wrong(capsys, "show", str(folder))
        assert "not a whole safetensors file" in line
        assert "Copy or save it again" in line


def test_a_damaged_config(capsys, tmp_path):
    folder = tmp_path / "model"
    ch.build("gpt2", **SIZES).save(folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace("n_layers", "n_layer"))
    assert 'Did you mean "n_layers"?' in wrong(capsys, "show", str(folder))
    path.write_text('{"model_type": "lama"}')
    assert 'Did you mean "llama"?' in wrong(capsys, "show", str(folder))
    path.write_text('{"model_type": "llama"}')
    assert "config.json lacks" in wrong(capsys, "show", str(folder))


def test_a_file_that_is_only_a_part(capsys, tmp_path):
    """The hint names a folder only where there is a model in it."""
    folder = tmp_path / "model"
    ch.build("gpt2", **SIZES).save(folder)
    weights = folder / "model.safetensors"
    assert f"name its folder, {folder}." in wrong(capsys, "show", str(weights))
    (folder / "config.json").unlink()
    assert "put config.json beside it" in wrong(capsys, "show", str(weights))


def test_no_such_folder(capsys, tmp_path):
    assert "check the path" in wrong(capsys, "show", str(tmp_path / "nothing"))


def test_a_folder_called_like_a_preset(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ch.build("gpt2", **SIZES).save("gpt2")
    assert run_json(capsys, "show", "gpt2")["is"] == "preset"
    assert run_json(capsys, "show", "./gpt2")["is"] == "folder"


# --- wrong use ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gtp2"], 'There is no model "gtp2". Did you mean "gpt2"?'),
        (["gpt2", "--set", "n_layer=3"], 'Did you mean "n_layers"?'),
        (["gpt2", "--set", "n_layers"], "--set takes key=value"),
        (["gpt2", "--set", "n_layers=[1"], "is no YAML"),
        (["gpt2", "--set", "n_layers=many"], "must be a whole number"),
        (["gpt2", "--set", "n_heads=5"], "does not divide"),
        (["gpt2", "--length", "1025"], "learned table of 1024 positions"),
        (["gpt2", "--length", "0"], "length must be 1 or more"),
        (["gpt2", "--batch", "0"], "batch must be 1 or more"),
        (["gpt2", "--source-length", "9"], "Only an encoder-decoder has a source"),
    ],
)
def test_wrong_use(words, said, capsys):
    assert said in wrong(capsys, "show", *words)


def test_values_are_yaml():
    pairs = ["a=1", "b=3e-4", "c=true", "d=null", "e={kind: rope, theta: 5.0}", "f.g=x", "h=a=b"]
    assert read_changes(pairs) == {
        "a": 1,
        "b": 3e-4,
        "c": True,
        "d": None,
        "e": {"kind": "rope", "theta": 5.0},
        "f.g": "x",
        "h": "a=b",
    }
    with pytest.raises(ClearheadError, match="key=value"):
        read_changes(["=3"])


# --- presets ---


def test_all_presets(capsys):
    rows = run_json(capsys, "presets")
    assert [row["name"] for row in rows] == list(PRESETS)
    by_name = {row["name"]: row for row in rows}
    gpt2 = by_name["gpt2"]
    assert (gpt2["layers"], gpt2["width"], gpt2["heads"]) == (12, 768, 12)
    assert gpt2["counted"] == 124_439_808
    assert gpt2["difference"] == pytest.approx(124_439_808 / 124e6 - 1)
    assert by_name["llama3-8b"]["kv_heads"] == 8
    assert by_name["flan-t5-small"]["decoder_layers"] == 8
    assert all(abs(row["difference"]) <= 0.03 for row in rows if row["published"])


def test_presets_with_a_word(capsys, narrow):
    assert {row["family"] for row in run_json(capsys, "presets", "T5")} == {"t5"}
    assert {row["source"] for row in run_json(capsys, "presets", "touvron")} == {
        "Touvron et al. 2023"
    }
    code, out, _ = run(capsys, "presets", "llama")
    assert code == 0
    assert "32/8" in out
    assert "gpt2" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_no_preset_has_the_word(capsys):
    assert 'Did you mean "mistral-7b"?' in wrong(capsys, "presets", "mistrall-7b")


# --- the outline and the units ---


def test_outline_counts_and_folds():
    net = ch.build("gpt2", **SIZES | {"n_layers": 5}).net
    tree = outline(net)
    assert tree.parameters == sum(p.numel() for p in net.parameters())
    stack = next(child for child in tree.children if child.name == "stack")
    blocks = stack.children[0]
    assert (blocks.name, blocks.times) == ("blocks.0-4", 5)
    head = tree.children[-1].children[0]
    assert head.weights[0].tied == "embed.tokens.weight"
    assert head.parameters == 0


def test_outline_keeps_different_blocks_apart():
    net = ch.build("gpt2", **SIZES | {"n_layers": 4}).net
    net.stack.blocks[2].ffn.in_proj.bias = None
    names = [child.name for child in outline(net.stack).children]
    assert names[:3] == ["blocks.0-1", "blocks.2", "blocks.3"]


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.short, 124_439_808, "124.4 M"),
        (units.short, 1_558_000_000, "1.558 B"),
        (units.short, 999_999, "1 M"),
        (units.short, 384, "384"),
        (units.size, 33_554_432, "33.55 MB"),
        (units.size, 512, "512 B"),
        (units.size, 0, "0 B"),
        (units.flops, 7.1e14, "710 TFLOP"),
        (units.flops, 999_990, "1 MFLOP"),
    ],
)
def test_units(function, value, text):
    assert function(value) == text
