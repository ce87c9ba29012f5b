"""Saving and loading: the same model comes back, and a save that fails leaves no trace."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import clearhead as ch
import tiny
from clearhead.errors import ClearheadError
from clearhead.fast import form as forms
from clearhead.weights import folder as folders

POSITIONED = {
    f"position {name}": ("gpt2", {"position": position, "head": {"kind": "lm", "tied": False}})
    for name, position in tiny.POSITIONS.items()
}
HEADS = {
    f"head {kind}": ("bert", {"head": {"kind": kind}})
    for kind in ("masked_lm", "pooling", "classification", "tagging", "span")
}
MODELS = tiny.MODELS | POSITIONED | HEADS


def model(name: str = "gpt2") -> ch.Model:
    family, changes = MODELS[name]
    made = ch.build(family, seed=1, **tiny.sizes_of(family) | changes)
    tiny.noisy(made.net)
    return made


def run(made: ch.Model) -> torch.Tensor:
    inputs = [tiny.tokens(2, 7)] * (2 if made.config.shape == "encoder-decoder" else 1)
    return made.net(*inputs)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


# --- what was saved comes back ---


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_comes_back(name, tmp_path):
    saved = model(name)
    saved.save(tmp_path / "it")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "it").iterdir()}
    assert set(modes.values()) == {0o644}  # for everybody to read
    loaded = ch.load(tmp_path / "it")
    assert loaded.config == saved.config
    assert type(loaded.net) is type(saved.net)
    ours, theirs = (dict(m.net.named_parameters(remove_duplicate=False)) for m in (saved, loaded))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.equal(theirs[key]), key
    assert run(loaded).equal(run(saved))


@pytest.mark.parametrize("name", MODELS)
def test_tied_parameters_are_one_after_loading(name, tmp_path):
    saved = model(name)
    saved.save(tmp_path / "it")
    net = ch.load(tmp_path / "it").net
    file = load_file(tmp_path / "it" / "model.safetensors")
    for alias, original in saved.net.ties:
        assert net.get_parameter(alias) is net.get_parameter(original)
        assert alias not in file
    count = len(list(saved.net.parameters()))
    assert len(list(net.parameters())) == len(file) == count


def test_which_families_are_tied():
    """So that the test above is about something."""
    tied = {name for name in tiny.MODELS if model(name).net.ties}
    assert tied >= {"gpt2", "bert", "t5", "transformer"}
    assert len(model("transformer").net.ties) == 2  # source, target and output are one matrix


def test_a_loaded_model_can_be_trained_and_the_file_does_not_change(tmp_path):
    model().save(tmp_path / "it")
    before = contents(tmp_path)
    loaded = ch.load(tmp_path / "it")
    assert not loaded.net.training
    assert all(parameter.requires_grad for parameter in loaded.net.parameters())
    start = run(loaded)
    start.logsumexp(-1).sum().backward()
    with torch.no_grad():
        for parameter in loaded.net.parameters():
            parameter.sub_(0.1 * parameter.grad)
    assert not run(loaded).equal(start)
    assert contents(tmp_path) == before


def test_saving_over_the_folder_it_was_loaded_from(tmp_path):
    model().save(tmp_path / "it")
    loaded = ch.load(tmp_path / "it")
    with torch.no_grad():
        loaded.net.embed.tokens.weight.add_(1.0)
    expected = run(loaded)
    loaded.save(tmp_path / "it")
    assert run(loaded).equal(expected)
    assert run(ch.load(tmp_path / "it")).equal(expected)
    assert sorted(contents(tmp_path)) == ["it", "it/config.json", "it/model.safetensors"]


def test_what_an_earlier_save_left_behind_goes(tmp_path, monkeypatch):
    """An old folder that cannot be removed is no failed save."""
    model("gpt2").save(tmp_path / "it")
    model("llama").save(tmp_path / "it-2")
    with monkeypatch.context() as stubborn:
        rmtree = shutil.rmtree

        def refuse(path, ignore_errors=False):
            if not str(path).endswith("-old"):
                rmtree(path, ignore_errors=ignore_errors)
            elif not ignore_errors:
                raise PermissionError(errno.EACCES, "not yours")

        stubborn.setattr(folders.shutil, "rmtree", refuse)
        model("bert").save(tmp_path / "it")
        model("t5").save(tmp_path / "it-2")
    assert ch.load(tmp_path / "it").config.kind == "bert"
    assert len(list(tmp_path.glob(".it-*-old"))) == 2
    model("gpt2").save(tmp_path / "it")
    (other,) = tmp_path.glob(".it-*-old")
    assert other.name.startswith(".it-2-")  # another folder's is not ours to sweep


def test_what_is_in_the_folder(tmp_path):
    model().save(tmp_path / "new" / "parents" / "it")
    folder = tmp_path / "new" / "parents" / "it"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    description = json.loads((folder / "config.json").read_text())
    assert description["format"] == "clearhead/1"
    assert description["family"] == "gpt2"
    assert description["config"]["n_kv_heads"] == 2
    assert os.stat(folder).st_mode & 0o777 == 0o755


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_precision_stays(dtype, tmp_path):
    saved = model()
    saved.net.to(dtype)
    saved.save(tmp_path / "it")
    assert {p.dtype for p in ch.load(tmp_path / "it").net.parameters()} == {dtype}


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    """As `latest` is: what it points to is replaced."""
    model("gpt2").save(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to("step-1")
    other = model("llama")
    other.save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert ch.load(tmp_path / "step-1").config == other.config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


# --- a save that fails ---

ERRORS = {
    "error": RuntimeError("boom"),
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
    "interrupt": KeyboardInterrupt(),
}


def raised(name: str) -> type[BaseException]:
    """What the user sees: a sentence for what a disk refuses, the rest as it is."""
    return ClearheadError if name == "full disk" else type(ERRORS[name])


def break_weights(monkeypatch, error):
    def half(tensors, path, metadata=None):
        Path(path).write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(folders, "save_file", half)


def break_config(monkeypatch, error):
    def half(self, text, *args, **more):
        raise error

    monkeypatch.setattr(Path, "write_text", half)


def break_first_rename(monkeypatch, error):
    monkeypatch.setattr(Path, "rename", failing_at(1, Path.rename, error))


def break_second_rename(monkeypatch, error):
    """The old folder is already out of the way."""
    monkeypatch.setattr(Path, "rename", failing_at(2, Path.rename, error))


def failing_at(number: int, function, error):
    calls = []

    def called(*args, **more):
        calls.append(args)
        if len(calls) == number:
            raise error
        return function(*args, **more)

    return called


BREAKS = [break_weights, break_config, break_first_rename, break_second_rename]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("break_it", BREAKS)
def test_failed_save_leaves_the_old_model(break_it, error, tmp_path, monkeypatch):
    old = model("gpt2")
    old.save(tmp_path / "it")
    before = contents(tmp_path)
    with monkeypatch.context() as patched:
        break_it(patched, ERRORS[error])
        with pytest.raises(raised(error)):
            model("llama").save(tmp_path / "it")
    assert contents(tmp_path) == before
    assert run(ch.load(tmp_path / "it")).equal(run(old))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("break_it", BREAKS[:3])
def test_failed_first_save_leaves_nothing(break_it, error, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        break_it(patched, ERRORS[error])
        with pytest.raises(raised(error)):
            model().save(tmp_path / "it")
    assert contents(tmp_path) == {}


def test_saving_onto_a_file(tmp_path):
    (tmp_path / "it").write_text("my notes")
    with pytest.raises(ClearheadError, match=r"it is a file: choose a folder"):
        model().save(tmp_path / "it")
    assert contents(tmp_path) == {"it": b"my notes"}


def test_saving_below_a_file(tmp_path):
    (tmp_path / "notes").write_text("my notes")
    with pytest.raises(ClearheadError, match=r"notes is a file"):
        model().save(tmp_path / "notes" / "it")
    assert contents(tmp_path) == {"notes": b"my notes"}


def test_saving_onto_a_folder_with_other_things(tmp_path):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(ClearheadError, match=r"other things too \(thesis.tex\).*another folder"):
        model().save(tmp_path / "it")
    assert contents(tmp_path) == before


def test_saving_into_an_empty_folder(tmp_path):
    (tmp_path / "it").mkdir()
    saved = model()
    saved.save(str(tmp_path / "it"))
    assert run(ch.load(str(tmp_path / "it"))).equal(run(saved))


def test_a_model_without_weights_is_not_saved(tmp_path):
    """On the meta device there is nothing to write."""
    empty = ch.build("gpt2", device="meta", **tiny.SIZES)
    with pytest.raises(ClearheadError, match="meta"):
        empty.save(tmp_path / "it")
    assert contents(tmp_path) == {}


def test_a_tie_that_came_apart_is_one_again_or_refused(tmp_path):
    made = model()
    before = run(made)
    made.net.load_state_dict({k: v.clone() for k, v in made.net.state_dict().items()}, assign=True)
    assert made.net.head.proj.weight is not made.net.embed.tokens.weight
    made.fast("int8").save(tmp_path / "packed")
    ch.load(tmp_path / "packed")
    made.net.load_state_dict({k: v.clone() for k, v in made.net.state_dict().items()}, assign=True)
    made.save(tmp_path / "same")
    assert made.net.head.proj.weight is made.net.embed.tokens.weight
    assert run(ch.load(tmp_path / "same")).equal(before)
    made.net.head.proj.weight = torch.nn.Parameter(made.net.head.proj.weight.detach() * 2)
    for write in (
        lambda: made.save(tmp_path / "other"),
        lambda: made.fast("int8"),
        lambda: ch.export(made, tmp_path / "other"),
    ):
        with pytest.raises(ClearheadError, match=r"now they differ\. net\.tie\(\) makes"):
            write()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pickle_is_as_large_as_the_model(dtype, tmp_path, monkeypatch):
    """Also where the tensors of a file were parts of one another, and after a text was written."""
    made = model()
    made.net.to(dtype)
    net = made.net
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    tensors, first = {}, 0
    for name, parameter in net.named_parameters():
        tensors[name] = flat[first : first + parameter.numel()].view(parameter.shape)
        first += parameter.numel()
    with torch.inference_mode():
        other = ch.Model(folders.assemble(made.config, tensors), made.config)
    assert not any(p.is_inference() for p in other.net.parameters())
    assert all(p.equal(dict(net.named_parameters())[n]) for n, p in other.net.named_parameters())
    size = len(pickle.dumps(other))
    assert size < 1.5 * flat.nbytes + 60_000
    flat.zero_()  # it is the same memory
    assert not any(bool(p.any()) for p in other.net.parameters())
    monkeypatch.setattr(forms, "WRITING", 1)
    if dtype == torch.float32:
        other._quick(other.net)
        assert other._quick._made is not None
        assert len(pickle.dumps(other)) < size + 1000
