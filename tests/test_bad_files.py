"""Bad files: what is damaged, foreign or of another model is refused, and stays untouched."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import clearhead as ch
import tiny
from clearhead.errors import ClearheadError
from clearhead.weights.folder import load_model


def refused(message: str):
    """Exactly our error (not another ValueError), and this part of its text."""
    return pytest.raises(ClearheadError, match=message)


def decoder(**changes: Any) -> ch.Model:
    return ch.build("gpt2", seed=0, **tiny.SIZES | changes)


@pytest.fixture
def saved(tmp_path) -> Path:
    decoder().save(tmp_path / "it")
    return tmp_path / "it"


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused_load(folder: Path, message: str) -> None:
    """`load` refuses, and leaves everything beside and in the folder as it was."""
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")}
    with refused(message):
        ch.load(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*")} == before


def test_folder_that_does_not_exist(tmp_path):
    refused_load(tmp_path / "nowhere", "There is no model at .*nowhere: check the path")


def test_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "it.txt").write_text("text")
    refused_load(tmp_path / "it.txt", "it.txt is (a file; a model is|none of the files)")


def test_folder_without_settings(tmp_path):
    (tmp_path / "it").mkdir()
    refused_load(tmp_path / "it", "has no config.json.* it is not a model's folder")


def test_folder_without_weights(saved):
    (saved / "model.safetensors").unlink()
    refused_load(saved, "it has no model.safetensors: the weights are missing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "config.json cannot be read as JSON"),
        (b"", "config.json cannot be read as JSON"),
        (b'{"format": "clearhead/1", "fam', "config.json cannot be read as JSON"),
        (b"\x80\x04\x95\xff\xfe", "config.json cannot be read as JSON"),
        (b"[" * 100_000, "config.json cannot be read as JSON"),
        (b"[1, 2]", "config.json is not a table of settings"),
        (b"null", "config.json is not a table of settings"),
        (b"{}", "not a Clearhead model|which is not supported"),
        (b'{"model_type": "gpt2", "n_embd": 768}', "not a Clearhead model|lacks"),
        (b'{"format": "clearhead/1"}', 'There is no family "None"'),
    ],
)
def test_settings_file_that_is_none(content, message, saved):
    (saved / "config.json").write_bytes(content)
    refused_load(saved, message)


def test_settings_file_of_another_version(saved):
    rewrite(saved, format="clearhead/9")
    with refused("its format is 'clearhead/9', not one of 'clearhead/1', "):
        load_model(saved)
    refused_load(saved, "clearhead/9|not supported")


def test_unknown_family_in_the_file(saved):
    rewrite(saved, family="gpt3")
    refused_load(saved, r'There is no family "gpt3"\. Did you mean "gpt2"\?')


@pytest.mark.parametrize("value", [None, 3, ["gpt2"], {"a": 1}])
def test_family_in_the_file_of_another_type(value, saved):
    rewrite(saved, family=value)
    refused_load(saved, "There is no family")


@pytest.mark.parametrize("value", [None, 3, "gpt2", []])
def test_settings_in_the_file_of_another_type(value, saved):
    rewrite(saved, config=value)
    refused_load(saved, "it/config.json must be a table of settings")


def test_file_without_the_settings_of_the_model(saved):
    path = saved / "config.json"
    path.write_text(json.dumps({"format": "clearhead/1", "family": "gpt2"}))
    refused_load(saved, "config")


def test_misspelt_setting_in_the_file(saved):
    config = json.loads((saved / "config.json").read_text())["config"]
    config["n_layer"] = config.pop("n_layers")
    rewrite(saved, config=config)
    refused_load(saved, r'it/config.json has no setting "n_layer"\. Did you mean "n_layers"\?')


def test_settings_of_another_family_in_the_file(saved):
    rewrite(saved, family="llama")
    refused_load(saved, 'is of kind "gpt2", but "llama" belongs here')


@pytest.mark.parametrize("left", [0, 4, 8, 50, 2000, -1])
def test_truncated_weights(left, saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    refused_load(saved, "not a whole safetensors file .*truncated, damaged .*Copy or save it again")


@pytest.mark.parametrize(
    "content",
    [
        b"<!DOCTYPE html><html><body>404</body></html>",
        b"\xff" * 64,
        struct.pack("<Q", 2**40) + b"{}",
    ],
)
def test_foreign_weights(content, saved):
    (saved / "model.safetensors").write_bytes(content)
    refused_load(saved, "not a whole safetensors file")


class Bomb:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_pickle_under_another_name_is_not_executed(write, saved, tmp_path):
    target = tmp_path / "it ran"
    with open(saved / "model.safetensors", "wb") as file:
        write(Bomb(target), file)
    refused_load(saved, "not a whole safetensors file")
    assert not target.exists()


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_all_that_does_not_fit_is_listed_at_once(saved):
    def change(tensors):
        del tensors["stack.norm.bias"], tensors["embed.position.table.weight"]
        tensors["stack.norm.gain"] = torch.ones(16)
        tensors["embed.tokens.weight"] = torch.zeros(24, 16)
        tensors["stack.blocks.0.ffn.in_proj.bias"] = torch.zeros(64, dtype=torch.int32)

    change_weights(saved, change)
    with pytest.raises(ClearheadError) as error:
        ch.load(saved)
    text = str(error.value)
    for part in (
        "The weights do not fit the model.",
        "missing: embed.position.table.weight, stack.norm.bias",
        "not of this model: stack.norm.gain",
        "of another shape: embed.tokens.weight is (24, 16), not (23, 16)",
        "not floating-point numbers: stack.blocks.0.ffn.in_proj.bias is torch.int32",
    ):
        assert part in text


def test_a_long_list_is_folded(saved):
    change_weights(saved, lambda t: t.update({f"extra.{i}": torch.ones(1) for i in range(40)}))
    refused_load(saved, r"not of this model: extra\.\* \(40 times\)\.")


def test_a_list_that_cannot_be_folded_is_cut(saved):
    change_weights(saved, lambda t: t.update({f"{i}x" * 30: torch.ones(1) for i in range(900)}))
    refused_load(saved, r"not of this model: (\w+, ){9,99}\w+ and 8\d\d more\.")


def test_two_different_tensors_for_one_tied_parameter(saved):
    change_weights(saved, lambda t: t.update({"head.proj.weight": torch.ones(23, 16)}))
    refused_load(
        saved, "two different tensors in the file: head.proj.weight differs from embed.tok"
    )


def test_weights_of_another_size_of_model(saved, tmp_path):
    decoder(d_model=32).save(tmp_path / "wide")
    (tmp_path / "wide" / "model.safetensors").replace(saved / "model.safetensors")
    refused_load(saved, r"of another shape: .*is \(23, 32\), not \(23, 16\)")
