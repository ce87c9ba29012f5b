"""Torch's pickles: weights come out exactly, and nothing in a file is ever run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.weights.pickles import WHISPER_DIMS, read_pickle, read_whisper_pt


class Runs:
    """Runs a shell command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def save(value, path, legacy=False):
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


def zipped(program, path, *, name="archive/data.pkl", compress=zipfile.ZIP_STORED, more=()):
    """A torch zip around any pickle."""
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr(name, program)
        archive.writestr("archive/version", "3\n")
        for other, data in more:
            archive.writestr(other, data)
    return path


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_weights_come_out_exactly(tmp_path, legacy):
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    shared = torch.randn(4)
    state = {
        "model": module.state_dict(),
        "optim": torch.optim.AdamW(module.parameters()).state_dict(),
        "transposed": torch.randn(4, 6).T,
        "slice": torch.arange(20.0)[3:7],
        "half": torch.randn(7).half(),
        "bf16": torch.randn(7).bfloat16(),
        "whole": torch.arange(70000),
        "truths": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "a": shared,
        "b": shared,
        "others": [1, 2.5, "text", None, True, (1, (2, 3)), torch.Size([2, 3]), torch.float16],
    }
    found = read_pickle(save(state, tmp_path / "a.pt", legacy))
    assert found.keys() == state.keys()
    assert found["others"] == state["others"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[name].equal(value)
            assert found[name].dtype == value.dtype
    for name, value in module.state_dict().items():
        assert found["model"][name].equal(value)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert found["optim"]["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_a_zip_is_mapped_and_a_change_never_reaches_it(tmp_path):
    path = save({"x": torch.ones(1000)}, tmp_path / "a.pt")
    before = path.read_bytes()
    read_pickle(path)["x"].add_(1)
    assert path.read_bytes() == before


def test_many_names_are_no_depth(tmp_path):
    """Each thousand entries are one more step in the program, not one more level."""
    state = OrderedDict((str(i), None) for i in range(66_000))
    state["numbers"] = [0] * 66_000
    assert read_pickle(save(state, tmp_path / "a.pt")) == state


# --- programs that would run ---


@pytest.mark.parametrize("form", ["bare", "zip", "legacy", "inside a state dict"])
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_malicious_pickle_is_refused_and_nothing_ran(tmp_path, form, protocol):
    marker, path = tmp_path / "ran", tmp_path / "bad.pt"
    evil = pickle.dumps(Runs(marker), protocol)
    if form == "bare":
        path.write_bytes(evil)
    elif form == "zip":
        zipped(evil, path)
    elif form == "legacy":
        opening = save({}, tmp_path / "good.pt", legacy=True).read_bytes()
        first = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        assert opening.startswith(first)
        path.write_bytes(first + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + evil)
    else:
        torch.save({"x": torch.ones(2), "y": Runs(marker)}, path, pickle_protocol=max(protocol, 2))
    with pytest.raises(ClearheadError, match="refused") as caught:
        read_pickle(path)
    assert "safetensors" in str(caught.value)
    assert not marker.exists()
    pickle.loads(evil)  # that it would have run
    assert marker.exists()


def g(name):
    return b"c" + name.replace(".", "\n", 1).encode() + b"\n"


def program(body):
    return b"\x80\x02" + body + b"."


def call(name, *arguments):
    return g(name) + b"(" + b"".join(arguments) + b"tR"


def word(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"\x8a\x08" + struct.pack("<q", value)


def tensor(size, stride, count=4, offset=0):
    """A tensor of file "0" with any sizes at all."""
    storage = b"(" + word("storage") + g("torch.FloatStorage") + word("0") + word("cpu")
    storage += number(count) + b"tQ"
    sizes = b"(" + b"".join(map(number, size)) + b"t"
    strides = b"(" + b"".join(map(number, stride)) + b"t"
    hooks = g("collections.OrderedDict") + b")R"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    return rebuild + b"(" + storage + number(offset) + sizes + strides + b"\x89" + hooks + b"tR"


def state(value):
    """{"x": value}"""
    return program(b"}" + word("x") + value + b"s")


PROGRAMS = {
    "os.system": (program(call("os.system", word("touch ran"))), "names os.system"),
    "eval": (program(call("builtins.eval", word("1"))), "names builtins.eval"),
    "getattr": (program(call("builtins.getattr", word("a"), word("b"))), "builtins.getattr"),
    "an allowed name with a dot": (
        program(call("collections.OrderedDict.fromkeys", word("a"))),
        "names collections",
    ),
    "memory by bytearray": (state(call("builtins.bytearray", number(1 << 40))), "bytearray"),
    "memory by a tensor type": (state(call("torch.FloatTensor", number(1 << 40))), "FloatTensor"),
    "memory by a storage": (state(call("torch.UntypedStorage", number(1 << 40))), "names torch"),
    "a named thing by the stack": (program(word("os") + word("system") + b"\x93"), "STACK_GLOBAL"),
    "an instance": (program(b"(ios\nsystem\n"), "INST"),
    "an extension": (program(b"\x82\x01"), "EXT1"),
    "a new object": (program(g("collections.OrderedDict") + b")\x81"), "NEWOBJ"),
    "tuples for ever": (program(b"}" + b")" + b"\x85" * 300_000 + b"Ns"), "nests deeper"),
    "a number for ever": (program(b"\x8a\xff" + b"\xff" * 254 + b"\x7f"), "beyond all sizes"),
    "a tensor of nothing": (state(tensor([1 << 40], [0])), "too few"),
    "a tensor beyond its file": (state(tensor([1 << 40], [1])), "not a whole torch file"),
    "an offset beyond its file": (state(tensor([4], [1], offset=9)), "not a whole torch file"),
    "negative sizes": (state(tensor([-4], [1])), "not a whole torch file"),
    "a storage call": (state(call("torch.FloatStorage", number(4))), "not a whole torch file"),
    "a missing storage": (
        state(tensor([4], [1])).replace(word("0"), word("7")),
        "not a whole torch file",
    ),
    "no end": (program(b"}")[:-1], "its pickle is damaged"),
    "an empty stack": (program(b""), "its pickle is damaged|not a whole"),
    "nothing to take": (program(b"}" + b"s"), "its pickle is damaged"),
    "no mark": (program(b"}u"), "its pickle is damaged"),
    "nothing kept": (program(b"h\x09"), "its pickle is damaged"),
    "a text beyond the end": (program(b"X\xff\xff\xff\x7fab"), "its pickle is damaged"),
    "a list": (program(b"]"), "holds a list"),
    "a tensor alone": (program(tensor([4], [1])), "holds a Tensor"),
    "numbers as names": (program(b"}K\x01K\x02s"), "not tensors by name"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bad_program_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, said = PROGRAMS[name]
    path = zipped(code, tmp_path / "bad.pt", more=[("archive/data/0", b"\0" * 16)])
    start = time.perf_counter()
    with pytest.raises(ClearheadError, match=said):
        read_pickle(path)
    assert time.perf_counter() - start < 10
    assert [p.name for p in tmp_path.iterdir()] == ["bad.pt"]


def test_a_good_program_by_hand_is_read(tmp_path):
    """That those above are refused for their one fault."""
    numbers = torch.arange(4.0).numpy().tobytes()
    code = state(tensor([2, 2], [2, 1]))
    path = zipped(code, tmp_path / "a.pt", more=[("archive/data/0", numbers)])
    assert read_pickle(path)["x"].tolist() == [[0, 1], [2, 3]]


# --- files that are no torch files ---

GOOD = state(tensor([4], [1]))
STORAGE = ("archive/data/0", b"\0" * 16)


def saved(legacy=False):
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(100)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def packed(code, **more):
    buffer = io.BytesIO()
    zipped(code, buffer, **more)
    return buffer.getvalue()


BAD_FILES = {
    "nothing": lambda: b"",
    "text": lambda: b"version https://git-lfs.github.com/spec/v1\n",
    "half a zip": lambda: saved()[: len(saved()) // 2],
    "a zip without its end": lambda: saved()[:-30],
    "half a legacy file": lambda: saved(legacy=True)[:-200],
    "a legacy header": lambda: saved(legacy=True)[:60],
    "a legacy file of gigabytes": lambda: saved(legacy=True).replace(b"Kd", b"J\xff\xff\xff\x7f"),
    "a bomb": lambda: packed(
        GOOD, compress=zipfile.ZIP_DEFLATED, more=[("archive/data/0", b"0" * 10**7)]
    ),
    "a compressed program": lambda: packed(b"(" * 10**6 + b".", compress=zipfile.ZIP_DEFLATED),
    "a long program": lambda: packed(program(b"}" + word("x") + word("y" * (9 << 20)) + b"s")),
    "two programs": lambda: packed(GOOD, more=[STORAGE, ("archive/other/data.pkl", GOOD)]),
    "two folders": lambda: packed(GOOD, name="other/data.pkl", more=[STORAGE]),
    "no program": lambda: packed(GOOD, name="archive/data.txt", more=[STORAGE]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, name):
    path = tmp_path / "bad.pt"
    path.write_bytes(BAD_FILES[name]())
    start = time.perf_counter()
    with pytest.raises(ClearheadError) as caught:
        read_pickle(path)
    assert time.perf_counter() - start < 10
    assert str(path) in str(caught.value)


def test_a_name_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = zipped(GOOD, tmp_path / "bad.pt", more=[STORAGE, ("archive/data.pkl", GOOD)])
    with pytest.raises(ClearheadError, match=r"not one that torch\.save wrote"):
        read_pickle(path)


def test_what_is_no_file_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "none.pt"):
        with pytest.raises(ClearheadError, match="There is no file"):
            read_pickle(place)


# --- Whisper ---


def whisper():
    dims = dict(zip(WHISPER_DIMS, (8, 6, 4, 2, 1, 9, 5, 4, 2, 1), strict=True))
    tensors = {
        "encoder.conv1.weight": torch.randn(4, 8, 3).half(),
        "encoder.positional_embedding": torch.randn(6, 4),
        "decoder.token_embedding.weight": torch.randn(9, 4).half(),
        "decoder.positional_embedding": torch.randn(5, 4).half(),
    }
    return {"dims": dims, "model_state_dict": tensors}


def test_a_whisper_file_is_read_as_it_is(tmp_path):
    made = whisper()
    dims, tensors = read_whisper_pt(save(made, tmp_path / "a.pt"))
    assert dims == made["dims"]
    assert tensors.keys() == made["model_state_dict"].keys()
    assert all(tensors[name].equal(t) for name, t in made["model_state_dict"].items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("dims"), "it holds model_state_dict"),
        (lambda w: w.update(more=1), "it holds dims, model_state_dict, more"),
        (lambda w: w.update(dims=3), "no such sizes"),
        (lambda w: w["dims"].pop("n_mels"), "no such sizes"),
        (lambda w: w["dims"].update(n_mels=-1), "no such sizes"),
        (lambda w: w["dims"].update(n_mels=1 << 40), "no such sizes"),
        (lambda w: w["dims"].update(n_mels=True), "no such sizes"),
        (lambda w: w["dims"].update(n_text_layer=10**6), "no such sizes"),
        (lambda w: w["dims"].update(n_vocab=10), r"token_embedding.weight is \(9, 4\), not \(10"),
        (lambda w: w.update(model_state_dict=[]), "not tensors"),
        (lambda w: w["model_state_dict"].update(x=3), "not tensors"),
        (lambda w: w["model_state_dict"].update(x=torch.tensor([1])), "not tensors"),
        (lambda w: w["model_state_dict"].pop("encoder.conv1.weight"), "conv1.weight is missing"),
    ],
)
def test_what_is_no_whisper_file_is_refused(tmp_path, change, said):
    made = whisper()
    change(made)
    with pytest.raises(ClearheadError, match=said):
        read_whisper_pt(save(made, tmp_path / "a.pt"))


def test_the_official_whisper_tiny_is_read():
    path = Path(os.environ.get("CLEARHEAD_WEIGHTS", "/nowhere")) / "whisper" / "tiny.en.pt"
    if not path.is_file():
        pytest.skip("no whisper/tiny.en.pt in CLEARHEAD_WEIGHTS (get-weights DIR whisper)")
    dims, tensors = read_whisper_pt(path)
    assert dims["n_vocab"] == 51864
    assert (dims["n_audio_layer"], dims["n_text_layer"], dims["n_audio_state"]) == (4, 4, 384)
    assert len(tensors) == 167
    assert {t.dtype for t in tensors.values()} == {torch.float16}
