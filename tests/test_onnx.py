"""ONNX: what onnxruntime computes from the files is what the network computes.

For batches and lengths, too, that no example had.
"""

from __future__ import annotations

import json
import logging
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import clearhead as ch
import tiny
from architectures import ROWS, randomise
from clearhead.attention.mask import Causal, Segments
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Softmax, TopKConfig
from clearhead.errors import ClearheadError
from clearhead.models.base import Net
from clearhead.tap import capture
from clearhead.weights import onnx as exporter
from clearhead.weights.onnx import export_onnx

REASON = "files are written and run by the extra: pip install 'clearhead[export]'"
onnx = pytest.importorskip("onnx", reason=REASON)
runtime = pytest.importorskip("onnxruntime", reason=REASON)
pytest.importorskip("onnxscript", reason=REASON)

# The shape checker would compare symbols, and so fix the lengths that are to stay free.
pytestmark = pytest.mark.usefixtures("unchecked")

IMAGE = {"image_size": 8, "patch_size": 4}
TOWER = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24}
MODELS = {
    name: (family, tiny.sizes_of(family) | changes)
    for name, (family, changes) in tiny.MODELS.items()
}
MODELS |= {
    "bert-small": ("bert", tiny.SIZES | {"n_layers": 1}),
    "t5-small": ("t5", tiny.SIZES | tiny.SEQ2SEQ["t5"][1] | {"n_layers": 1}),
    "marian": (
        "bart",
        tiny.SIZES
        | {"position": {"kind": "sinusoidal", "layout": "halves"}}
        | {"scaled": True, "embed_norm": False, "activation": "silu"},
    ),
    "whisper": (
        "whisper",
        {"vocab_size": tiny.VOCAB, "n_mels": 8, "d_model": 16, "n_layers": 2, "n_heads": 4}
        | {"source_len": 20, "max_len": 64},
    ),
    "vit": (
        "vit",
        {"d_model": 16, "n_layers": 1, "n_heads": 4, "head": {"kind": "classification"}} | IMAGE,
    ),
    "clip": (
        "clip",
        {"vocab_size": tiny.VOCAB, "max_len": 64, "text": TOWER, "image": TOWER, "width": 8}
        | IMAGE,
    ),
}
BERTS = [f"bert-{head}" for head in ("pooling", "classification", "tagging", "span")]
for bert in BERTS:
    MODELS[bert] = ("bert", tiny.SIZES | {"head": {"kind": bert.removeprefix("bert-")}})
MODELS["gpt2-classification"] = ("gpt2", tiny.SIZES | {"head": {"kind": "classification"}})


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(name):
    family, settings = MODELS[name]
    model = ch.build(family, seed=0, **settings)
    tiny.noisy(model.net)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model by name with its folder; each is written once."""

    @cache
    def get(name):
        model, folder = build(name), tmp_path_factory.mktemp("onnx") / name
        export_onnx(model.net, model.config, folder)
        return model.net, folder

    return get


class Session:
    """A file in onnxruntime: tensors in by name, tensors out by name."""

    def __init__(self, path: Path) -> None:
        self.session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def __call__(self, **given):
        given = {name.replace("__", "."): value.numpy() for name, value in given.items()}
        out = self.session.run(None, given)
        return dict(zip(self.outputs, map(torch.from_numpy, out), strict=True))

    def empty_past(self, rows):
        """Of every layer, nothing."""
        past = {name: shape for name, shape in self.inputs.items() if name.startswith("past")}
        return {
            name: torch.zeros(rows, heads, 0, width) for name, (_, heads, _, width) in past.items()
        }


def equal(actual, expected):
    tiny.close(actual, expected.detach(), 1e-4)


def ragged(lengths, side="right"):
    """Ids, their mask, and the same as positions."""
    at = Positions.ragged(lengths, side)
    return tiny.tokens(len(lengths), max(lengths)), at.filled().long(), at


BATCHES = [(1, 1), (1, 2), (3, 11), (2, 30)]
CHUNKS = {1: [1] * 7, 3: [4, 1, 3, 6, 1], 2: [20, 1, 1]}


# --- decoders ---

DECODERS = ["llama-window", *slow("gpt2", "llama", "llama-qwen", "gpt_neox")]


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder(name, exported):
    """At once, and in chunks of any size from an empty past."""
    net, folder = exported(name)
    run, step = (Session(folder / f"{x}.onnx") for x in ("model", "decoder_with_past"))
    assert run.inputs == {"ids": ["batch", "length"]}
    for rows, length in BATCHES:
        ids = tiny.tokens(rows, length)
        equal(run(ids=ids)["logits"], net(ids))
    attn = net.stack.blocks[0].self_attn
    past = ["batch", attn.n_kv_heads, "past", attn.head_dim]
    assert step.inputs["past_key_values.1.value"] == past
    for rows, chunks in CHUNKS.items():
        ids = tiny.tokens(rows, sum(chunks))
        follow(step, ids, chunks, net(ids))


def follow(run, ids, chunks, expected, **fixed):
    """Decode in chunks, each with what the one before gave back."""
    past, at = run.empty_past(len(ids)), 0
    for size in chunks:
        out = run(ids=ids[:, at : at + size], **past, **fixed)
        equal(out["logits"], expected[:, at : at + size])
        at += size
        past = {name: out[name.replace("past_key_values", "present")] for name in past}
        assert {value.shape[2] for value in past.values()} == {at}


# Those that ask for facts about positions, and so could fix a length.
@pytest.mark.slow
@pytest.mark.parametrize("position", ["alibi", "shaw", "transformer_xl", "learned_2d", "rope_2d"])
def test_every_position(position, tmp_path):
    net = tiny.positioned(position)
    export_onnx(net, build("gpt2").config, tmp_path / "it")
    run, step = (Session(tmp_path / "it" / f"{x}.onnx") for x in ("model", "decoder_with_past"))
    for rows, chunks in CHUNKS.items():
        ids = tiny.tokens(rows, sum(chunks))
        equal(run(ids=ids)["logits"], net(ids))
        follow(step, ids, chunks, net(ids))


# --- encoders ---

LENGTHS = [[5], [1, 3], [9, 2, 17, 17]]


@pytest.mark.parametrize(
    "name",
    [
        "bert-small",
        *slow("bert", "bert-alibi", "roberta", "distilbert", "gpt2-classification"),
        *slow(*BERTS),
    ],
)
def test_an_encoder(name, exported):
    """Ragged, padded on either side; empty slots give the same numbers too."""
    net, folder = exported(name)
    run = Session(folder / "model.onnx")
    (out,) = run.outputs
    assert out == {"bert-pooling": "vector", "distilbert": "states"}.get(name, "logits")
    assert ("types" in run.inputs) == (name in ("bert", "bert-small", *BERTS))
    for lengths in LENGTHS:
        for side in ("right", "left"):
            ids, mask, at = ragged(lengths, side)
            more = {"types": torch.randint(2, ids.shape)} if "types" in run.inputs else {}
            equal(run(ids=ids, mask=mask, **more)[out], net(ids, at, **more))


def test_what_is_masked_does_not_matter(exported):
    _, folder = exported("bert-small")
    run = Session(folder / "model.onnx")
    ids, mask, _ = ragged([3, 8])
    others = torch.where(mask == 1, ids, (ids + 5) % tiny.VOCAB)
    types = torch.zeros_like(ids)
    first, second = (run(ids=x, mask=mask, types=types)["logits"] for x in (ids, others))
    assert first[mask == 1].equal(second[mask == 1])
    assert not first.equal(second)


@pytest.mark.slow  # the default run has them below, with their weights beside
def test_images(exported):
    net, folder = exported("vit")
    run = Session(folder / "model.onnx")
    assert run.inputs == {"pixels": ["batch", 3, 8, 8]}
    for rows in (1, 2, 5):
        pixels = torch.randn(rows, 3, 8, 8)
        equal(run(pixels=pixels)["logits"], net(pixels))


@pytest.mark.slow
def test_two_towers(exported):
    net, folder = exported("clip")
    text, image = Session(folder / "text.onnx"), Session(folder / "image.onnx")
    for lengths in LENGTHS:
        ids, mask, at = ragged(lengths)
        vectors = text(ids=ids, mask=mask)["vector"]
        equal(vectors, net.embed_text(ids, at))
        equal(vectors.norm(dim=1), torch.ones(len(ids)))
    for rows in (1, 3):
        pixels = torch.randn(rows, 3, 8, 8)
        equal(image(pixels=pixels)["vector"], net.embed_image(pixels))


# --- encoder-decoders ---


def seq2seq(folder):
    return [
        Session(folder / f"{name}.onnx") for name in ("encoder", "decoder", "decoder_with_past")
    ]


@pytest.mark.parametrize(
    "name",
    ["t5-small", *slow("t5", "t5-gated", "transformer", "transformer-pre", "bart", "marian")],
)
def test_an_encoder_decoder(name, exported):
    """Sources of different lengths; the target at once and step by step."""
    net, folder = exported(name)
    encoder, decoder, step = seq2seq(folder)
    for lengths in ([6], [9, 2, 17]):
        source, mask, at = ragged(lengths)
        memory = net.encode(source, at)
        encoded = encoder(ids=source, mask=mask)
        states = encoded.pop("states")
        equal(states, memory.x)
        target = tiny.tokens(len(source), 8, seed=3)
        expected = net.decode(target, memory)
        equal(decoder(ids=target, states=states, source_mask=mask)["logits"], expected)
        assert set(encoded) == {name for name in step.inputs if name.startswith("cross")}
        for chunks in ([1] * 8, [3, 1, 4]):
            follow(step, target, chunks, expected, source_mask=mask, **encoded)


@pytest.mark.slow
def test_sound(exported):
    net, folder = exported("whisper")
    encoder, decoder, step = seq2seq(folder)
    for rows, frames in ((1, 40), (2, 10), (3, 2)):
        mel = torch.randn(rows, 8, frames)
        memory = net.encode(mel)
        encoded = encoder(mel=mel)
        states = encoded.pop("states")
        equal(states, memory.x)
        target, mask = tiny.tokens(rows, 8), torch.ones(rows, frames // 2, dtype=torch.int64)
        expected = net.decode(target, memory)
        equal(decoder(ids=target, states=states, source_mask=mask)["logits"], expected)
        follow(step, target, [4, 1, 1, 2], expected, source_mask=mask, **encoded)


# --- the rows of the battery: what transformers computes, through our files ---


def through(folder, case):
    """What the files make of one call of the battery."""
    if not (folder / "encoder.onnx").exists():
        run = Session(folder / "model.onnx")
        given = {"ids" if "ids" in run.inputs else "pixels": case.ours[0]}
        given |= {"mask": torch.ones_like(case.ours[0])} if "mask" in run.inputs else {}
        given |= {"types": case.more["types"]} if "types" in run.inputs else {}
        (out, *_) = run(**given).values()
        return out
    encoder, decoder, _ = seq2seq(folder)
    source, target = case.ours
    given = {"mel": source} if "mel" in encoder.inputs else {"ids": source}
    given |= {"mask": torch.ones_like(source)} if "mask" in encoder.inputs else {}
    states = encoder(**given)["states"]
    mask = torch.ones(states.shape[:2], dtype=torch.int64)
    return decoder(ids=target, states=states, source_mask=mask)["logits"]


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "clip"], ids=str)
def test_every_row_of_the_battery(row, tmp_path):
    hf = randomise(row.make())
    hf.save_pretrained(tmp_path / "hf")
    if row.beside is not None:
        row.beside(tmp_path / "hf")
    model, case = ch.load(tmp_path / "hf", head=row.head), row.feed.whole()
    export_onnx(model.net, model.config, tmp_path / "onnx")
    with torch.no_grad():
        expected = row.read(hf(**case.theirs), case)
    equal(through(tmp_path / "onnx", case), expected)


# --- the folder ---


def test_what_is_in_the_folder(exported):
    _, folder = exported("bert-small")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.onnx"]
    description = json.loads((folder / "config.json").read_text())
    assert description == {
        "format": "clearhead/1",
        "family": "bert",
        "config": build("bert-small").config.to_dict(),
    }
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    model = onnx.load(folder / "model.onnx")
    assert {entry.version for entry in model.opset_import if not entry.domain} == {20}
    # Nor where on this machine it was made.
    assert str(Path(ch.__file__).parent).encode() not in (folder / "model.onnx").read_bytes()


class Words:
    """A tokeniser as far as an export knows one."""

    def save(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def quick(monkeypatch):
    """Graphs are not traced, for tests of what is around them."""

    def write(net, graph, path):
        node = onnx.helper.make_node("Identity", ["a"], ["b"])
        ends = [onnx.helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, [1]) for x in "ab"]
        made = onnx.helper.make_graph([node], graph.name, ends[:1], ends[1:])
        onnx.save(onnx.helper.make_model(made), path)

    monkeypatch.setattr(exporter, "_write", write)


@pytest.mark.usefixtures("quick")
def test_the_tokenizer_comes_along(tmp_path):
    model = build("gpt2")
    written = export_onnx(model.net, model.config, tmp_path / "it", Words())
    names = ["config.json", "decoder_with_past.onnx", "model.onnx", "tokenizer.json"]
    assert written == [tmp_path / "it" / name for name in names]
    assert all(path.is_file() for path in written)


@pytest.mark.usefixtures("quick")
def test_an_older_export_is_replaced(tmp_path):
    for name in ("gpt2", "bart"):
        model = build(name)
        written = export_onnx(model.net, model.config, tmp_path / "it")
        assert sorted((tmp_path / "it").iterdir()) == written
    assert [path.stem for path in written] == ["config", "decoder", "decoder_with_past", "encoder"]


def test_a_failed_export_leaves_the_old_folder(tmp_path, quick, monkeypatch):
    model = build("gpt2")
    export_onnx(model.net, model.config, tmp_path / "it")
    before = {path: path.read_bytes() for path in (tmp_path / "it").iterdir()}
    write = exporter._write

    def fail(net, graph, path):
        write(net, graph, path)
        if graph.name == "decoder_with_past":
            raise OSError("No space left on device")

    monkeypatch.setattr(exporter, "_write", fail)
    with pytest.raises(ClearheadError, match="No space"):
        export_onnx(build("llama").net, build("llama").config, tmp_path / "it")
    assert {path: path.read_bytes() for path in (tmp_path / "it").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.usefixtures("quick")
def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    model = build("gpt2")
    with pytest.raises(ClearheadError, match=r"thesis.tex.*another folder"):
        export_onnx(model.net, model.config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_large_weights_stand_in_a_file_of_their_own(tmp_path, monkeypatch, capfd, caplog):
    """And nothing is printed or logged; and the network stays as it was: training, in half
    precision, with a listener.
    """
    monkeypatch.setattr(exporter, "ONE_FILE", 0)
    model = build("vit")
    pixels = torch.randn(3, 3, 8, 8)
    net = model.net.half().train()
    with capture(net, "embed.out") as seen:
        written = export_onnx(net, model.config, tmp_path / "it")
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [path.name for path in written] == ["config.json", "model.onnx", "model.onnx.data"]
    assert not seen
    assert net.training
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float16}
    kernels = [module for module in net.modules() if isinstance(module, Softmax)]
    assert kernels
    assert not any("forward" in vars(kernel) for kernel in kernels)
    out = Session(tmp_path / "it" / "model.onnx")(pixels=pixels)["logits"]
    equal(out, net.float().eval()(pixels))


# --- what is refused ---


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_without_the_extra(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    model = build("gpt2")
    with pytest.raises(ClearheadError, match=r"pip install 'clearhead\[export\]'"):
        export_onnx(model.net, model.config, tmp_path / "it")
    assert not list(tmp_path.iterdir())


def test_a_model_without_weights(tmp_path):
    model = ch.build("gpt2", device="meta", **tiny.SIZES)
    with pytest.raises(ClearheadError, match="meta"):
        export_onnx(model.net, model.config, tmp_path / "it")
    assert not list(tmp_path.iterdir())


def test_a_network_of_another_shape(tmp_path):
    net = Net()
    net.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ClearheadError, match=r"A Net has no form in ONNX.*another format"):
        export_onnx(net, build("gpt2").config, tmp_path / "it")
    assert not list(tmp_path.iterdir())


REFUSED = {
    "a kernel that decides by the length": tiny.attention(kernel=TopKConfig(k=3)),
    "a mask that needs data": tiny.attention(Causal() & Segments()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_form_for_every_length(what, tmp_path):
    """Rather no file than one that is right for the example's length alone."""
    net = tiny.stacked(REFUSED[what], n_layers=1)
    with pytest.raises(ClearheadError, match=r'model.onnx cannot be written.*"softmax" kernel'):
        export_onnx(net, build("gpt2").config, tmp_path / "it")
    assert not list(tmp_path.iterdir())


def test_positions_behind_the_table(exported):
    """The runtime refuses them: no numbers that mean nothing."""
    _, folder = exported("bert-small")
    ids, mask, _ = ragged([tiny.SIZES["max_len"] + 1])
    fail = runtime.capi.onnxruntime_pybind11_state.InvalidArgument
    with pytest.raises(fail, match="out of data bounds"):
        Session(folder / "model.onnx")(ids=ids, mask=mask, types=ids * 0)
