"""llama2.c files: the numbers of run.c's own algorithm, and files that lie."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from clearhead.cli.main import main
from clearhead.errors import ClearheadError
from clearhead.text.foreign import from_llama2c
from clearhead.weights.llama2c import load_llama2c, read_llama2c_vocab

SIZES = {"dim": 16, "hidden": 24, "layers": 2, "heads": 4, "kv": 2, "vocab": 11, "seq": 12}
LAYERED = {"rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3"}


def shapes(s):
    """The order of the file, as in run.c's memory_map_weights."""
    d, width = s["dim"], s["dim"] // s["heads"]
    kv, table = s["kv"] * width, (s["seq"], width // 2)
    made = {
        "embed": (abs(s["vocab"]), d),
        "rms_att": (d,),
        "wq": (d, d),
        "wk": (kv, d),
        "wv": (kv, d),
        "wo": (d, d),
        "rms_ffn": (d,),
        "w1": (s["hidden"], d),
        "w2": (d, s["hidden"]),
        "w3": (s["hidden"], d),
        "rms_final": (d,),
        "freq_real": table,
        "freq_imag": table,
    }
    return made | ({"wcls": made["embed"]} if s["vocab"] < 0 else {})


def weights(s, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.5, (s["layers"], *shape) if name in LAYERED else shape).astype("<f4")
        for name, shape in shapes(s).items()
    }


def write(path, s, w):
    path.write_bytes(struct.pack("<7i", *s.values()) + b"".join(t.tobytes() for t in w.values()))
    return path


def run(w, s, ids):
    """run.c in numpy: one token after the other, rotary pairs side by side."""
    heads, kv, width = s["heads"], s["kv"], s["dim"] // s["heads"]

    def norm(x, gain):
        return gain * x / np.sqrt((x * x).mean() + 1e-5)

    def turn(x, p):
        angle = p / 10000.0 ** (np.arange(0, width, 2) / width)
        a, b = x[:, 0::2], x[:, 1::2]
        pairs = (a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle))
        return np.stack(pairs, axis=-1).reshape(x.shape)

    keys = [[] for _ in range(s["layers"])]
    values = [[] for _ in range(s["layers"])]
    logits = []
    for p, token in enumerate(ids):
        x = w["embed"][token].astype(np.float64)
        for i in range(s["layers"]):
            h = norm(x, w["rms_att"][i])
            q = turn((w["wq"][i] @ h).reshape(heads, width), p)
            keys[i].append(turn((w["wk"][i] @ h).reshape(kv, width), p))
            values[i].append((w["wv"][i] @ h).reshape(kv, width))
            out = []
            for j in range(heads):
                group = j // (heads // kv)
                scores = np.array([q[j] @ k[group] for k in keys[i]]) / np.sqrt(width)
                pattern = np.exp(scores - scores.max())
                pattern /= pattern.sum()
                out.append(sum(a * v[group] for a, v in zip(pattern, values[i], strict=True)))
            x = x + w["wo"][i] @ np.concatenate(out)
            h = norm(x, w["rms_ffn"][i])
            gate = w["w1"][i] @ h
            x = x + w["w2"][i] @ (gate / (1 + np.exp(-gate)) * (w["w3"][i] @ h))
        logits.append(w.get("wcls", w["embed"]) @ norm(x, w["rms_final"]))
    return np.stack(logits)


@pytest.mark.parametrize("vocab", [11, -11], ids=["tied", "untied"])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_the_numbers_are_those_of_run_c(tmp_path, vocab, kv):
    sizes = SIZES | {"vocab": vocab, "kv": kv}
    w = weights(sizes)
    net, config, report = load_llama2c(write(tmp_path / "a.bin", sizes, w))
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 10, 0]
    expected = torch.from_numpy(run(w, sizes, ids)).float()
    torch.testing.assert_close(net(torch.tensor([ids]))[0], expected, rtol=1e-4, atol=1e-4)
    assert (config.vocab_size, config.max_len, config.n_kv_heads) == (11, 12, kv)
    assert config.head.tied == (vocab > 0)
    assert set(report.dropped) == {"freq_cis_real", "freq_cis_imag"}
    assert len(report.became) == 2 * 9 + 2 + (vocab < 0)
    assert bool(report.tied) == (vocab > 0)


def test_a_change_never_reaches_the_file(tmp_path):
    path = write(tmp_path / "a.bin", SIZES, weights(SIZES))
    before = path.read_bytes()
    net, *_ = load_llama2c(path)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    assert path.read_bytes() == before


def head(**lies):
    return struct.pack("<7i", *(SIZES | lies).values())


BODY = b"\0" * 4 * 100
BAD_MODELS = {
    "nothing": (b"", "too short"),
    "half a header": (head()[:20], "too short"),
    "a header alone": (head(), "28 bytes long"),
    "one byte short": (None, "bytes long, but its sizes"),
    "one byte more": (None, "bytes long, but its sizes"),
    "version 1": (struct.pack("<2i", 0x616B3432, 1) + BODY, "version 1"),
    "another format": (b"GGUF" + struct.pack("<I", 3) + BODY, "is not a llama2.c model|bytes long"),
    "no width": (head(dim=0) + BODY, "is not a llama2.c model"),
    "a negative width": (head(dim=-16) + BODY, "is not a llama2.c model"),
    "no heads": (head(heads=0) + BODY, "is not a llama2.c model"),
    "heads that do not divide": (head(heads=3) + BODY, "is not a llama2.c model"),
    "heads of odd width": (head(heads=16, kv=16) + BODY, "is not a llama2.c model"),
    "key heads that do not divide": (head(kv=3) + BODY, "is not a llama2.c model"),
    "no tokens": (head(vocab=0) + BODY, "is not a llama2.c model"),
    "the least number of tokens": (head(vocab=-(1 << 31)) + BODY, "more than any"),
    "two billion layers": (head(layers=(1 << 31) - 1) + BODY, "is not a llama2.c model"),
    "an absurd width": (
        head(dim=1 << 30, hidden=(1 << 31) - 1, seq=(1 << 31) - 1) + BODY,
        "more than any",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_model_is_refused(tmp_path, name):
    data, said = BAD_MODELS[name]
    path = write(tmp_path / "a.bin", SIZES, weights(SIZES))
    if data is None:
        whole = path.read_bytes()
        data = whole[:-1] if name == "one byte short" else whole + b"\0"
    path.write_bytes(data)
    with pytest.raises(ClearheadError, match=said):
        load_llama2c(path)


def test_the_command_names_the_missing_vocabulary(tmp_path, capsys):
    file = write(tmp_path / "tiny.bin", SIZES, weights(SIZES))
    for source in (file, tmp_path):
        assert main(["generate", str(source), "a"]) == 2
        said = f"put the tokenizer.bin that belongs to it into {tmp_path}."
        assert said in capsys.readouterr().err


def test_what_is_no_file_is_refused(tmp_path):
    for read in (load_llama2c, read_llama2c_vocab):
        for place in (tmp_path / "none.bin", tmp_path):
            with pytest.raises(ClearheadError, match="There is no file"):
                read(place)


# --- tokenizer.bin ---


def packed(tokens, longest=8):
    body = b"".join(struct.pack("<fi", score, len(t)) + t for t, score in tokens)
    return struct.pack("<i", longest) + body


def test_the_vocabulary_is_read(tmp_path):
    tokens = [(b"<unk>", 0.0), (b"\xff", -0.5), (b"", 1.0), (" grün".encode(), -3.0)]
    (tmp_path / "t.bin").write_bytes(packed(tokens))
    assert read_llama2c_vocab(tmp_path / "t.bin") == tokens


def test_a_story_ends_where_the_next_begins():
    entries = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), (" a", -1.0), ("a", -2.0)]
    assert from_llama2c(entries).eos_ids == (2, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\0",
        packed([(b"abc", 0.0)])[:-1],
        packed([(b"abc", 0.0)])[:9],
        packed([(b"abc", 0.0)], longest=2),
        packed([(b"abc", 0.0)], longest=-1),
        struct.pack("<ifi", 8, 0.0, -1),
        struct.pack("<ifi", (1 << 31) - 1, 0.0, (1 << 31) - 1),
    ],
)
def test_a_bad_vocabulary_is_refused(tmp_path, data):
    (tmp_path / "t.bin").write_bytes(data)
    with pytest.raises(ClearheadError, match=r"not a whole llama2\.c tokenizer\.bin"):
        read_llama2c_vocab(tmp_path / "t.bin")


# --- stories15M ---

STORY = (
    " Once upon a time, there was a little girl named Lily. She loved to play outside in the "
    "sunshine. One day, she saw a big, red ball in the sky."
)


@pytest.fixture(scope="module")
def stories():
    folder = Path(os.environ.get("CLEARHEAD_WEIGHTS", "/nowhere")) / "stories15m"
    if not (folder / "stories15M.bin").is_file():
        pytest.skip(
            "no stories15m/stories15M.bin in CLEARHEAD_WEIGHTS (get-weights DIR stories15m)"
        )
    return folder


@torch.no_grad()
def test_stories15m_tells_the_story_of_llama2_c(stories):
    net, config, _ = load_llama2c(stories / "stories15M.bin")
    tokens = [token for token, _ in read_llama2c_vocab(stories / "tokenizer.bin")]
    assert len(tokens) == config.vocab_size == 32000
    ids = [1, *(tokens.index(word) for word in (b" Once", b" upon", b" a", b" time"))]
    cache = net.new_cache(1, 64)
    new = ids
    for _ in range(35):
        new = [net.decode(torch.tensor([new]), cache=cache)[0, -1].argmax().item()]
        ids += new
    said = b"".join(tokens[i] for i in ids[1:]).decode()
    assert said.startswith(STORY)


@torch.no_grad()
def test_stories15m_computes_what_run_c_computes(stories):
    sizes = np.fromfile(stories / "stories15M.bin", "<i4", 7).tolist()
    s = dict(zip(SIZES, sizes, strict=True))
    numbers = np.fromfile(stories / "stories15M.bin", "<f4", offset=28)
    w, at = {}, 0
    for name, shape in shapes(s).items():
        shape = (s["layers"], *shape) if name in LAYERED else shape
        w[name] = numbers[at : at + int(np.prod(shape))].reshape(shape)
        at += int(np.prod(shape))
    ids = [1, 9038, 2501, 263, 931, 29892]
    net, *_ = load_llama2c(stories / "stories15M.bin")
    expected = torch.from_numpy(run(w, s, ids)).float()
    torch.testing.assert_close(net(torch.tensor([ids]))[0], expected, rtol=1e-3, atol=1e-3)
