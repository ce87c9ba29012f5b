"""GGUF files that are damaged or lie: a clear error, little time, little memory, never a crash."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc

import pytest
import torch

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.weights.gguf import export_gguf, load_gguf, read_gguf, write_gguf
from gguf_bytes import BOOL, F32, I32, LIST, TEXT, U32, entry, file, setting, text

HUGE = (1 << 64) - 1


def u32(key, value):
    return setting(key, U32, struct.pack("<I", value))


def many(kind, count, payload=b""):
    return struct.pack("<IQ", kind, count) + payload


def nested(depth):
    return many(LIST, 1) * depth + many(U32, 0)


def bomb():
    """Half a gigabyte of entries, were they believed, in 48 MB: empty texts."""
    return file([setting("a", LIST, many(TEXT, 6_000_000, b"\0" * 48_000_000))])


DATA = b"\0" * 64
BAD_FILES = {
    "nothing": (b"", "is not a GGUF file"),
    "another format": (b"PK\3\4" + b"\0" * 100, "is not a GGUF file"),
    "the name alone": (b"GGUF", "the version would end beyond"),
    "half a header": (file()[:17], "the number of settings would end"),
    "version 1": (file(version=1), "of version 1"),
    "version 99": (file(version=99), "of version 99"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "2^64 tensors": (file(n_tensors=HUGE), "more than there is room for"),
    "a billion tensors": (file([], [], DATA, n_tensors=10**9), "more than there is room for"),
    "2^64 settings": (file(n_settings=HUGE), "more than there is room for"),
    "one setting too many": (file([u32("a", 1)], n_settings=2), "setting is empty"),
    "a name of 2^64 bytes": (file([struct.pack("<Q", HUGE) + DATA]), "more than 65535"),
    "a name beyond the end": (file([struct.pack("<Q", 999) + DATA]), "beyond the end"),
    "a text of 2^64 bytes": (
        file([setting("a", TEXT, struct.pack("<Q", HUGE))]),
        "a would end beyond the end",
    ),
    "a text that is none": (file([setting("a", TEXT, text(b"\xff\xfe"))]), "not UTF-8"),
    "a name that is none": (file([u32(b"\xc3", 1)]), "not UTF-8"),
    "a list of 2^60": (file([setting("a", LIST, many(U32, 1 << 60))]), "entries in a"),
    "a list of 2^64 texts": (file([setting("a", LIST, many(TEXT, HUGE))]), "entries in a"),
    "a list beyond the end": (file([setting("a", LIST, many(F32, 100, DATA))]), "entries in a"),
    "a list of nothing known": (
        file([setting("a", LIST, many(99, 1, DATA))]),
        "unknown type 99",
    ),
    "lists in lists": (file([setting("a", LIST, nested(9))]), "more than 4 deep"),
    "lists in lists for ever": (file([setting("a", LIST, nested(50000))]), "more than 4 deep"),
    "an empty list of lists of 2^60": (
        file([setting("a", LIST, many(LIST, 1, many(LIST, 1 << 60)))]),
        "more than there is room",
    ),
    "too many entries": (bomb(), "more than 4194304 entries"),
    "an unknown type": (file([setting("a", 13, DATA)]), "unknown type 13"),
    "neither true nor false": (file([setting("a", BOOL, b"\2")]), "neither true"),
    "a list neither true nor false": (
        file([setting("a", LIST, many(BOOL, 2, b"\1\2"))]),
        "neither true",
    ),
    "a setting twice": (file([u32("a", 1), u32("a", 2)]), '"a" is there twice'),
    "alignment 0": (file([u32("general.alignment", 0)]), "power of two"),
    "alignment 24": (file([u32("general.alignment", 24)]), "power of two"),
    "alignment 2^31": (file([u32("general.alignment", 1 << 31)]), "power of two"),
    "alignment -1": (
        file([setting("general.alignment", I32, struct.pack("<i", -1))]),
        "power of two",
    ),
    "alignment as text": (
        file([setting("general.alignment", TEXT, text("32"))]),
        "power of two",
    ),
    "aligned beyond the end": (
        file([u32("general.alignment", 1 << 30)], [entry("x", [16])], DATA),
        "beyond the end",
    ),
    "a tensor twice": (
        file([], [entry("x", [4]), entry("x", [4], offset=32)], DATA),
        "x is there twice",
    ),
    "a tensor's name of 65 bytes": (file([], [entry("x" * 65, [4])], DATA), "more than 64"),
    "no dimensions": (file([], [entry("x", [], n_dims=0)], DATA), "0 dimensions"),
    "five dimensions": (file([], [entry("x", [1] * 5)], DATA), "5 dimensions"),
    "2^32 dimensions": (
        file([], [entry("x", [1], n_dims=(1 << 32) - 1)], DATA),
        "4294967295 dimensions",
    ),
    "an empty dimension": (file([], [entry("x", [4, 0])], DATA), "shape \\[0, 4\\]"),
    "sizes that overflow to 0": (
        file([], [entry("x", [1 << 32, 1 << 32])], DATA),
        "beyond the end",
    ),
    "sizes that overflow to 4": (
        file([], [entry("x", [(1 << 63) + 1, 2])], DATA),
        "beyond the end",
    ),
    "an absurd size": (file([], [entry("x", [HUGE, HUGE, HUGE, HUGE])], DATA), "beyond the end"),
    "one number too many": (file([], [entry("x", [17])], DATA), "beyond the end"),
    "half a block": (file([], [entry("x", [33], kind=8)], DATA), "whole blocks of 32"),
    "an unknown number format": (file([], [entry("x", [4], kind=77)], DATA), "format 77"),
    "a removed number format": (file([], [entry("x", [4], kind=4)], DATA), "format 4"),
    "an offset beyond the end": (
        file([], [entry("x", [4], offset=1 << 40)], DATA),
        "beyond the end",
    ),
    "the last offset there is": (
        file([], [entry("x", [4], offset=HUGE - 31)], DATA),
        "beyond the end",
    ),
    "an offset that is not aligned": (
        file([], [entry("x", [4], offset=4)], DATA),
        "not aligned",
    ),
    "one upon the other": (
        file([], [entry("x", [16]), entry("y", [4], offset=32)], DATA),
        "x and y lie upon each other",
    ),
    "the same place twice": (
        file([], [entry("x", [4]), entry("y", [4])], DATA),
        "lie upon each other",
    ),
    "no data": (file([], [entry("x", [4])]), "beyond the end"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_little_time_and_memory(tmp_path, name):
    data, said = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(ClearheadError, match=said) as caught:
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5
    assert peak < 1 << 22
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ClearheadError, match="There is no file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ClearheadError, match="There is no file"):
        read_gguf(tmp_path / ("n" * 300))
    with pytest.raises(ClearheadError, match="is a folder"):
        read_gguf(tmp_path)


def test_a_good_file_by_hand_is_read(tmp_path):
    """That the files above are refused for their one fault."""
    values = torch.arange(16.0)
    data = values.numpy().tobytes()
    lists = setting("b", LIST, many(LIST, 2, many(U32, 1, struct.pack("<I", 5)) + many(TEXT, 0)))
    settings = [u32("a", 1), lists, setting("c", BOOL, b"\1")]
    (tmp_path / "a.gguf").write_bytes(file(settings, [entry("x", [8, 2])], data, version=2))
    found = read_gguf(tmp_path / "a.gguf")
    assert found.metadata == {"a": 1, "b": [[5], []], "c": True}
    assert found.tensors["x"].tensor().equal(values.view(2, 8))


# --- models ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny llama: its settings and its tensors."""
    sizes = {"vocab_size": 8, "d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
    made = ch.build("llama", seed=0, **sizes, d_ff=8, max_len=16)
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    export_gguf(made.net, made.config, None, path, "f32")
    found = read_gguf(path)
    return found.metadata, {name: t.tensor() for name, t in found.tensors.items()}, path


SET = {
    "another architecture": ({"general.architecture": "lama"}, 'Did you mean "llama"'),
    "no architecture": ({"general.architecture": None}, "not supported"),
    "an adapter": ({"general.type": "adapter"}, "adapter"),
    "a part": ({"split.count": 3}, "llama-gguf-split"),
    "no block count": ({"llama.block_count": None}, "lacks the setting llama.block_count"),
    "four billion blocks": ({"llama.block_count": (1 << 32) - 1}, "from 1 to 1024"),
    "no blocks": ({"llama.block_count": 0}, "from 1 to 1024"),
    "a block more": ({"llama.block_count": 3}, r"missing: stack\.blocks\.2"),
    "a block less": ({"llama.block_count": 1}, r"blk\.1\.attn_q\.weight"),
    "an absurd width": ({"llama.embedding_length": 1 << 31}, "embedding_length"),
    "a wide width": ({"llama.embedding_length": 1 << 24}, "of another shape"),
    "an absurd ffn": ({"llama.feed_forward_length": 1 << 60}, "feed_forward_length"),
    "a wide ffn": ({"llama.feed_forward_length": 1 << 24}, "of another shape"),
    "as many heads as there are numbers": (
        {"llama.attention.head_count": 1 << 24, "llama.attention.head_count_kv": 1 << 24},
        "no model is that wide",
    ),
    "heads as text": ({"llama.attention.head_count": "2"}, "a whole number"),
    "heads by layer": ({"llama.attention.head_count": [2, 2]}, "a whole number"),
    "heads that do not divide": ({"llama.attention.head_count_kv": 3}, "n_kv_heads"),
    "an absurd head": (
        {
            "llama.attention.key_length": 1 << 24,
            "llama.attention.value_length": 1 << 24,
            "llama.rope.dimension_count": 1 << 24,
        },
        "no model is that wide",
    ),
    "half a head turned": ({"llama.rope.dimension_count": 2}, "a head is 4 wide"),
    "two head widths": ({"llama.attention.value_length": 8}, "a head is 4 wide"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon"),
    "epsilon no number": (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        "a positive number",
    ),
    "theta below 0": ({"llama.rope.freq_base": -1.0}, "a positive number"),
    "theta infinite": ({"llama.rope.freq_base": float("inf")}, "a positive number"),
    "experts": ({"llama.expert_count": 8}, "expert_count = 8"),
    "not causal": ({"llama.attention.causal": False}, "causal = False"),
    "an unknown scaling": (
        {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
        "Known: linear, yarn",
    ),
    "a scaling by text": ({"llama.rope.scaling.factor": "two"}, "a positive number"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": ["a"] * 9}, "9 tokens"),
}


@pytest.mark.parametrize("name", SET)
def test_settings_that_lie_are_refused(tmp_path, whole, name):
    changes, said = SET[name]
    metadata, tensors, _ = whole
    metadata = {k: v for k, v in (metadata | changes).items() if v is not None}
    write_gguf(tmp_path / "bad.gguf", metadata, tensors)
    start = time.perf_counter()
    with pytest.raises(ClearheadError, match=said):
        load_gguf(tmp_path / "bad.gguf")
    assert time.perf_counter() - start < 20


def test_all_that_is_missing_is_listed(tmp_path, whole):
    metadata, tensors, _ = whole
    gone = {"blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output_norm.weight"}
    write_gguf(tmp_path / "a", metadata, {k: t for k, t in tensors.items() if k not in gone})
    with pytest.raises(ClearheadError) as caught:
        load_gguf(tmp_path / "a")
    for name in ("blocks.0.self_attn.q_proj", "blocks.1.ffn.out_proj", "stack.norm"):
        assert name in str(caught.value)
    write_gguf(tmp_path / "b", metadata, {k: t for k, t in tensors.items() if "embd" not in k})
    with pytest.raises(ClearheadError, match=r"missing: embed\.tokens\.weight"):
        load_gguf(tmp_path / "b")


def test_all_that_is_too_much_is_listed(tmp_path, whole):
    metadata, tensors, _ = whole
    more = {"blk.0.ffn_gate_exps.weight": torch.ones(8), "blk.9.attn_q.weight": torch.ones(8, 8)}
    write_gguf(tmp_path / "a", metadata, tensors | more)
    with pytest.raises(ClearheadError, match=r"blk\.0\.ffn_gate_exps\.weight, blk\.9\.attn_q"):
        load_gguf(tmp_path / "a")
    write_gguf(tmp_path / "b", metadata, tensors | {"blk.0.attn_k_norm.weight": torch.ones(4)})
    with pytest.raises(ClearheadError, match=r"not of this model: .*k_norm"):
        load_gguf(tmp_path / "b")


def test_all_of_another_shape_are_listed(tmp_path, whole):
    metadata, tensors, _ = whole
    wrong = {"blk.0.attn_q.weight": torch.ones(7, 8), "blk.1.attn_v.weight": torch.ones(4, 8, 1)}
    write_gguf(tmp_path / "a", metadata, tensors | wrong)
    with pytest.raises(ClearheadError, match=r"q_proj\.weight is \(7, 8\).*v_proj.*\(4, 8, 1\)"):
        load_gguf(tmp_path / "a")


def test_rotary_factors_of_no_known_scaling_are_refused(tmp_path, whole):
    metadata, tensors, _ = whole
    for bad in (torch.tensor([1.0, 3.0]), torch.ones(5), torch.tensor([1.0, torch.nan])):
        write_gguf(tmp_path / "a", metadata, tensors | {"rope_freqs.weight": bad})
        with pytest.raises(ClearheadError, match="divides its rotary angles"):
            load_gguf(tmp_path / "a")
    write_gguf(tmp_path / "b", metadata, tensors | {"rope_freqs.weight": torch.ones(2)})
    assert load_gguf(tmp_path / "b")[1].position.scaling is None


def test_tensors_that_cannot_be_decoded_are_named(tmp_path, whole):
    path = tmp_path / "a.gguf"
    settings = [setting("general.architecture", TEXT, text("llama"))]
    entries = [entry("x", [256], kind=11), entry("y", [32], kind=20, offset=128)]
    path.write_bytes(file(settings, entries, b"\0" * 160))
    with pytest.raises(ClearheadError, match=r"x \(Q3_K\), y \(IQ4_NL\).*Supported: F32, F16"):
        load_gguf(path)
    with pytest.raises(ClearheadError, match=r"tensor x is stored as Q3_K.*Supported: F32"):
        read_gguf(path).tensors["x"].numpy()


def test_a_gpt2_whose_fused_tensor_cannot_be_cut_is_refused(tmp_path):
    sizes = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "n_heads": 2, "max_len": 8}
    made = ch.build("gpt2", seed=0, **sizes)
    export_gguf(made.net, made.config, None, tmp_path / "a", "f32")
    found = read_gguf(tmp_path / "a")
    tensors = {name: t.tensor() for name, t in found.tensors.items()}
    write_gguf(
        tmp_path / "b", found.metadata, tensors | {"blk.0.attn_qkv.weight": torch.ones(2, 8)}
    )
    with pytest.raises(ClearheadError, match="of another shape"):
        load_gguf(tmp_path / "b")


def test_every_shorter_file_is_refused(tmp_path, whole):
    data = whole[2].read_bytes()
    path = tmp_path / "short.gguf"
    last = len(data) - 4  # what is left out may be the padding of the last tensor
    for length in [*range(0, 1500, 7), *range(1500, last, 97)]:
        path.write_bytes(data[:length])
        with pytest.raises(ClearheadError):
            read_gguf(path)


def test_no_flipped_byte_does_more_than_raise(tmp_path, whole):
    """Either another model or a clear error: never another exception, never long."""
    data = whole[2].read_bytes()
    header = data.index(b"output_norm.weight") + 60
    rng = random.Random(0)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(250):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(header)] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(changed)
        start = time.perf_counter()
        try:
            load_gguf(path)
        except ClearheadError:
            refused += 1
        assert time.perf_counter() - start < 20
    assert refused > 100
