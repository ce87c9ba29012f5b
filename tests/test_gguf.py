"""GGUF: what we read is what others wrote, what we write others read, and the numbers agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.attention.rotary import Llama3Scaling
from clearhead.errors import ClearheadError
from clearhead.weights.gguf import export_gguf, load_gguf, read_gguf, write_gguf
from clearhead.weights.gguf_quant import KINDS, LAYOUTS, NUMBERS, SUPPORTED, dequantise, quantise
from clearhead.weights.interleaved import Interleaved
from tiny import noisy

SETTINGS = {
    "general.architecture": "llama",
    "a.whole": 7,
    "a.large": 1 << 40,
    "a.negative": -3,
    "a.very.negative": -(1 << 40),
    "a.fraction": 0.25,
    "a.truth": True,
    "a.text": "Ġgrün\0",
    "a.list": [1, -2, 3],
    "a.large.list": [1, 1 << 40],
    "a.fractions": [0.5, 2.0],
    "a.truths": [True, False],
    "a.texts": ["a", "", "ü"],
    "a.nothing": [],
}

SIZES = {"vocab_size": 64, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_len": 64}
ROPE = {"kind": "rope", "theta": 500.0}
MODELS = {
    "llama": ("llama", {"n_kv_heads": 2, "position": ROPE}),
    "llama-tied": ("llama", {"head": {"kind": "lm", "tied": True}, "variant": {"eps": 1e-6}}),
    "llama-wide-heads": ("llama", {"n_kv_heads": 2, "variant": {"head_dim": 32}}),
    "qwen2": ("llama", {"n_kv_heads": 2, "variant": {"qkv_bias": True}}),
    "llama-bias": ("llama", {"n_kv_heads": 2, "variant": {"qkv_bias": True, "head_dim": 32}}),
    "llama-out-bias": ("llama", {"variant": {"qkv_bias": True, "out_bias": True}}),
    "llama-ffn-bias": ("llama", {"variant": {"ffn_bias": True}}),
    "qwen3": ("llama", {"n_kv_heads": 2, "variant": {"qk_norm": True, "head_dim": 32}}),
    "linear": ("llama", {"position": ROPE | {"scaling": {"kind": "linear", "factor": 4.0}}}),
    "yarn": (
        "llama",
        {"position": ROPE | {"scaling": {"kind": "yarn", "factor": 4.0, "trained_len": 16}}},
    ),
    "llama3": ("llama", {"position": {"kind": "rope", "theta": 5e5, "scaling": "llama3"}}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"head": {"kind": "lm", "tied": False}, "d_ff": 96}),
}
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2", "gpt2-untied": "gpt2"}
IDS = torch.tensor([[3, 17, 42, 8, 55, 21, 9, 30, 2, 60, 11, 12, 13, 14, 50, 33, 22, 1]])


def model(name):
    family, changes = MODELS[name]
    made = ch.build(family, seed=0, **SIZES, **changes)
    noisy(made.net, 0.2)
    return made


def tokenizer(size=64):
    """A vocabulary that llama.cpp accepts."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(33 + i) for i in range(size)],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ['! "'],
        "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.ggml.bos_token_id": size - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def equal_nets(one, other):
    theirs = dict(other.named_parameters())
    assert theirs.keys() == dict(one.named_parameters()).keys()
    return all(p.equal(theirs[name]) for name, p in one.named_parameters())


# --- the container ---


def test_write_then_read(tmp_path):
    tensors = {
        "vector": torch.arange(5.0),
        "matrix": torch.randn(3, 64),
        "cube": torch.randn(2, 3, 32),
        "strided": torch.randn(32, 4).T,
        "half": torch.randn(4, 7).half(),
    }
    kinds = {"matrix": "Q8_0", "cube": "F16"}
    write_gguf(tmp_path / "deep" / "a.gguf", SETTINGS, tensors, kinds)
    file = read_gguf(tmp_path / "deep" / "a.gguf")
    assert file.metadata == SETTINGS
    assert all(type(file.metadata[key]) is type(SETTINGS[key]) for key in SETTINGS)
    assert {name: t.kind for name, t in file.tensors.items()} == {
        "vector": "F32",
        "matrix": "Q8_0",
        "cube": "F16",
        "strided": "F32",
        "half": "F32",
    }
    for name, tensor in tensors.items():
        found = file.tensors[name].tensor()
        assert found.dtype == torch.float32
        tolerance = {"matrix": 0.02, "cube": 1e-3}.get(name, 0.0)
        torch.testing.assert_close(found, tensor.float(), rtol=tolerance, atol=tolerance)


def test_reading_is_lazy_and_a_change_never_reaches_the_file(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, {}, {"x": torch.ones(4)})
    before = path.read_bytes()
    tensor = read_gguf(path).tensors["x"].tensor()
    tensor += 1
    assert path.read_bytes() == before
    assert read_gguf(path).tensors["x"].tensor().equal(torch.ones(4))


def test_alignment_of_ones_own(tmp_path):
    path = tmp_path / "a.gguf"
    tensors = {"x": torch.ones(3), "y": torch.arange(3.0)}
    write_gguf(path, {"general.alignment": 128}, tensors)
    assert path.stat().st_size % 128 == 0
    found = read_gguf(path).tensors
    assert all(found[name].tensor().equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("settings", "tensors", "kinds", "said"),
    [
        ({"a": None}, {}, {}, "a = None"),
        ({"a": [1, "b"]}, {}, {}, "mixes"),
        ({"a": [[1]]}, {}, {}, "a = "),
        ({"a": 1e300}, {}, {}, "a = 1e"),
        ({"a": 1 << 70}, {}, {}, "a = "),
        ({"a": "\udc80"}, {}, {}, "a = "),
        ({"general.alignment": 33}, {}, {}, "power of two"),
        ({}, {"x" * 64: torch.ones(1)}, {}, "too long"),
        ({}, {"x": torch.tensor(1.0)}, {}, "dimensions"),
        ({}, {"x": torch.ones(0)}, {}, "dimensions"),
        ({}, {"x": torch.ones(1, 1, 1, 1, 1)}, {}, "dimensions"),
        ({}, {"x": torch.ones(31)}, {"x": "Q8_0"}, "blocks of 32"),
        ({}, {"x": torch.ones(32)}, {"x": "Q4_K"}, "F32, F16 or Q8_0"),
        ({}, {"x": torch.full((3,), 1e6)}, {"x": "F16"}, "too large"),
        ({}, {"x": torch.full((32,), 1e9)}, {"x": "Q8_0"}, "too large"),
        ({}, {"x": torch.full((32,), torch.nan)}, {"x": "Q8_0"}, "no numbers"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, settings, tensors, kinds, said):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ClearheadError, match=said):
        write_gguf(path, settings, tensors, kinds)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ClearheadError, match="is a folder"):
        write_gguf(tmp_path, {}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ClearheadError, match="cannot be written"):
        write_gguf(tmp_path / "file" / "a.gguf", {}, {})
    with pytest.raises(ClearheadError, match="cannot be written"):
        write_gguf(tmp_path / ("n" * 300), {}, {})


# --- against the `gguf` package ---


@pytest.mark.parametrize("kind", SUPPORTED)
def test_number_formats_are_those_of_the_gguf_package(kind):
    gguf = pytest.importorskip("gguf")
    layout = KINDS[NUMBERS[kind]]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (7, 5 * layout.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    found = dequantise(raw.reshape(-1), kind)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.reshape(-1))
    assert np.isfinite(expected).mean() > 0.9


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_numbers_are_written_as_the_gguf_package_does(kind):
    gguf = pytest.importorskip("gguf")
    numbers = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    numbers[0] = 0
    numbers[1, :32] = np.arange(32) / 2 * 127 / 15.5  # halves, which must go away from zero
    expected = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(quantise(numbers, kind), expected.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("kind", ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_file_of_the_gguf_package_is_read(tmp_path, kind):
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    matrix = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(matrix, number)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("a.byte", 200)
    writer.add_int8("a.small", -5)
    writer.add_uint16("a.short", 60000)
    writer.add_int16("a.short.negative", -300)
    writer.add_float64("a.double", 0.1)
    writer.add_int64("a.long", -(1 << 50))
    writer.add_array("a.tokens", ["a", "b"])
    writer.add_tensor("x", packed, raw_dtype=number)
    writer.add_tensor("y", matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "a.gguf")
    theirs = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert file.metadata == {k: f.contents() for k, f in theirs.items() if k[:5] != "GGUF."}
    expected = gguf.quants.dequantize(packed, number)
    np.testing.assert_array_equal(file.tensors["x"].numpy(), expected)
    np.testing.assert_array_equal(file.tensors["y"].numpy(), matrix)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_our_file_opens_with_the_gguf_package(tmp_path, dtype):
    gguf = pytest.importorskip("gguf")
    made = model("llama")
    export_gguf(made.net, made.config, tokenizer(), tmp_path / "a.gguf", dtype)
    ours = read_gguf(tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {k: f.contents() for k, f in reader.fields.items() if k[:5] != "GGUF."}
    assert fields == ours.metadata
    assert [t.name for t in reader.tensors] == list(ours.tensors)
    for theirs in reader.tensors:
        expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(ours.tensors[theirs.name].numpy(), expected)
    # The types that llama.cpp insists on.
    kinds = {key: [t.name for t in f.types] for key, f in reader.fields.items()}
    assert kinds["llama.block_count"] == ["UINT32"]
    assert kinds["llama.rope.freq_base"] == ["FLOAT32"]
    assert kinds["tokenizer.ggml.token_type"] == ["ARRAY", "INT32"]
    assert kinds["tokenizer.ggml.add_bos_token"] == ["BOOL"]


def test_the_table_of_number_formats_is_the_gguf_packages():
    gguf = pytest.importorskip("gguf")
    sizes = gguf.GGML_QUANT_SIZES
    theirs = {int(k): (k.name, *sizes[k]) for k in gguf.GGMLQuantizationType if int(k) in KINDS}
    assert {n: (k.name, k.numbers, k.nbytes) for n, k in KINDS.items()} == theirs
    assert all(KINDS[NUMBERS[name]].nbytes == LAYOUTS[name].itemsize for name in SUPPORTED)


# --- models ---


@pytest.mark.parametrize("name", MODELS)
def test_export_then_load_is_the_same_model(tmp_path, name):
    made = model(name)
    export_gguf(made.net, made.config, None, tmp_path / "a.gguf", "f32")
    net, config, report, file = load_gguf(tmp_path / "a.gguf")
    assert file.metadata["general.architecture"] == ARCHITECTURES.get(name, "llama")
    assert config == made.config.changed(d_ff=config.d_ff, n_kv_heads=config.n_kv_heads)
    assert equal_nets(made.net, net)
    torch.testing.assert_close(net(IDS), made.net(IDS), rtol=0, atol=0)
    assert {**report.became, **report.dropped}.keys() == file.tensors.keys()
    assert report.tied == dict(made.net.ties)


def test_half_precision_rounds_the_matrices_alone(tmp_path):
    made = model("qwen2")
    export_gguf(made.net, made.config, None, tmp_path / "a.gguf", "f16")
    net, *_ = load_gguf(tmp_path / "a.gguf")
    for name, parameter in net.named_parameters():
        exact = made.net.get_parameter(name)
        assert parameter.equal(exact.half().float() if exact.dim() > 1 else exact)


def test_rows_that_q8_0_cannot_hold_are_written_as_f16(tmp_path):
    made = ch.build("llama", seed=0, **SIZES | {"d_model": 48}, d_ff=64)
    export_gguf(made.net, made.config, None, tmp_path / "a.gguf", "q8_0")
    kinds = {name: t.kind for name, t in read_gguf(tmp_path / "a.gguf").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "F16"
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"


def test_a_larger_theta_stands_for_ntk(tmp_path):
    scaling = {"kind": "ntk", "factor": 4.0}
    made = ch.build("llama", seed=0, **SIZES, position={"kind": "rope", "scaling": scaling})
    noisy(made.net, 0.2)
    export_gguf(made.net, made.config, None, tmp_path / "a.gguf", "f32")
    net, config, *_ = load_gguf(tmp_path / "a.gguf")
    assert config.position.scaling is None
    torch.testing.assert_close(net(IDS), made.net(IDS), rtol=1e-4, atol=1e-4)


def test_rows_of_queries_and_keys_are_in_the_order_of_the_converter():
    """The formula of llama.cpp's convert_hf_to_gguf.py, and its inverse."""
    rule = Interleaved("q", 4)
    for rows in (torch.randn(32, 5), torch.randn(32)):
        heads = rows.reshape(4, 2, 4, *rows.shape[1:])
        assert rule.to_theirs([rows]).equal(heads.swapaxes(1, 2).reshape(rows.shape))
        assert rule.to_ours(rule.to_theirs([rows]))[0].equal(rows)


def test_llama_3_factors_are_recognised(tmp_path):
    """Those of Llama 3.1 8B: theta 500000, heads of 128."""
    steps = 500000.0 ** (-torch.arange(0, 128, 2).float() / 128)
    factors = steps / Llama3Scaling().stretch(steps, 500000.0, 128)[0]
    assert factors.min() == 1
    assert factors.max() == 8
    sizes = SIZES | {"d_model": 128, "n_heads": 1}
    position = {"kind": "rope", "theta": 500000.0, "scaling": "llama3"}
    made = ch.build("llama", seed=0, **sizes, position=position)
    export_gguf(made.net, made.config, None, tmp_path / "a.gguf")
    file = read_gguf(tmp_path / "a.gguf")
    torch.testing.assert_close(file.tensors["rope_freqs.weight"].tensor(), factors)
    _, config, report, _ = load_gguf(tmp_path / "a.gguf")
    assert config.position.scaling == Llama3Scaling()
    assert "rope_freqs.weight" in report.dropped


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"variant": {"window": 8}}, "window is 8"),
        ("llama", {"variant": {"activation": "gelu"}}, "activation"),
        ("llama", {"variant": {"qk_norm": True, "qkv_bias": True}}, "qkv_bias"),
        ("llama", {"position": "alibi"}, "alibi"),
        ("llama", {"position": None}, "position is None"),
        ("llama", {"position": {"kind": "rope", "fraction": 0.5}}, "position"),
        (
            "llama",
            {"position": {"kind": "rope", "scaling": "llama3"}, "variant": {"qk_norm": True}},
            "scaling",
        ),
        (
            "llama",
            {
                "position": {
                    "kind": "rope",
                    "scaling": {"kind": "yarn", "factor": 2.0, "trained_len": 8, "beta_fast": 9.0},
                }
            },
            "scaling",
        ),
        ("llama", {"head": {"kind": "classification"}}, "head"),
        ("llama", {"head": {"kind": "lm", "bias": True}}, "head"),
        ("gpt2", {"n_kv_heads": 2}, "n_kv_heads"),
        ("gpt2", {"position": "sinusoidal"}, "sinusoidal"),
        ("gpt2", {"norm": "rms_norm"}, "rms_norm"),
        ("gpt2", {"activation": "relu"}, "relu"),
        ("bert", {}, "Families it writes: llama, gpt2"),
    ],
)
def test_what_gguf_cannot_express_is_refused_before_anything_is_written(
    tmp_path, family, changes, said
):
    made = ch.build(family, seed=0, **SIZES, **changes)
    with pytest.raises(ClearheadError, match=said):
        export_gguf(made.net, made.config, None, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_or_network_that_does_not_fit_is_refused(tmp_path):
    made, other = model("llama"), model("llama-tied")
    path = tmp_path / "a.gguf"
    with pytest.raises(ClearheadError, match="63 entries, but the model has 64"):
        export_gguf(made.net, made.config, tokenizer(63), path)
    with pytest.raises(ClearheadError, match=r"llama\.block_count: not of a tokeniser"):
        export_gguf(made.net, made.config, {"llama.block_count": 9}, path)
    with pytest.raises(ClearheadError, match=r"differ: head\.proj\.weight"):
        export_gguf(made.net, other.config, None, path)
    assert not list(tmp_path.iterdir())


# --- against llama.cpp itself, where its Python binding `xllamacpp` is installed ---

LLAMA_CPP = """
import json, os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 64, 1
params.n_gpu_layers, params.warmup, params.cpuparams.n_threads = 0, False, 1
server = xllamacpp.Server(params)
ask = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "temperature": 0, "n_probs": 5}
answer = server.handle_completions(ask)
answer = answer if isinstance(answer, dict) else json.loads(answer)
top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print("TOP", json.dumps({t["id"]: t["logprob"] for t in top}), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(tmp_path, name):
    pytest.importorskip("xllamacpp", reason="llama.cpp's binding xllamacpp is not installed")
    made = model(name)
    export_gguf(made.net, made.config, tokenizer(), tmp_path / "a.gguf", "f32")
    command = [sys.executable, "-c", LLAMA_CPP, tmp_path / "a.gguf", json.dumps(IDS[0].tolist())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("TOP ")]
    assert lines, done.stderr[-2000:]
    ours = made.net(IDS)[0, -1].log_softmax(-1)
    for token, expected in json.loads(lines[0]).items():  # their attention rounds to 16 bits
        assert abs(ours[int(token)].item() - expected) < 0.03


# --- SmolLM2-135M-Instruct, Q4_1 ---

ENGLISH = "The sun rises in the east and sets in the west, and the day is bright."


@pytest.fixture(scope="module")
def smollm2():
    folder = Path(os.environ.get("CLEARHEAD_WEIGHTS", "/nowhere")) / "smollm2"
    files = sorted(folder.glob("*.gguf"))
    if not files:
        pytest.skip("no smollm2/*.gguf in CLEARHEAD_WEIGHTS (get-weights DIR smollm2)")
    net, config, _, file = load_gguf(files[0])
    return net, config, file


def encoder(file):
    """The tokeniser inside the file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@torch.no_grad()
def test_smollm2_continues_as_in_llama_cpp(smollm2):
    net, config, file = smollm2
    assert (config.n_layers, config.n_kv_heads, config.vocab_size) == (30, 3, 49152)
    assert config.variant.eps == 1e-5
    made = encoder(file)
    ids = made.encode("The capital of France is").ids
    assert ids == [504, 3575, 282, 4649, 314]
    for _ in range(5):
        ids.append(net(torch.tensor([ids]))[0, -1].argmax().item())
    # llama.cpp (xllamacpp 2026.10.11549), greedily, from the same file
    assert ids[5:] == [7042, 30, 198, 198, 504]
    assert made.decode(ids).startswith("The capital of France is Paris.")


@torch.no_grad()
def test_smollm2_finds_english_likely_and_shuffled_words_not(smollm2):
    net, _, file = smollm2
    made = encoder(file)

    def perplexity(text):
        ids = torch.tensor([made.encode(text).ids])
        return torch.nn.functional.cross_entropy(net(ids)[0, :-1], ids[0, 1:]).exp().item()

    words = ENGLISH.split()
    shuffled = [words[i * 7 % len(words)] for i in range(len(words))]
    assert sorted(shuffled) == sorted(words)
    english = perplexity(" ".join(words))
    assert english < 60
    assert perplexity(" ".join(shuffled)) > 5 * english
