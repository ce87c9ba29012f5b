"""Real pretrained weights: what published models say, through the calls that users make.

CLEARHEAD_WEIGHTS is a folder as `get-weights` lays it out (minilm/ stories15m/ whisper/ smollm2/;
beside Whisper's file gpt2.tiktoken), CLEARHEAD_DATA one with data sets (stsb/ jfk/). Without them
these tests are skipped, or fail where CLEARHEAD_REQUIRE is set.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.measure.scores import spearman
from clearhead.media.audio import read_audio

PUBLISHED_SPEARMAN = 0.8203
STORY = ", there was a little girl named Lily. She loved to play outside in the sunshine."
SPEECH = (
    "And so my fellow Americans ask not what your country can do for you, ask what you can do for "
    "your country."
)


def under(variable: str, *names: str) -> Path:
    """A file below the folder that a variable names, or a skip that says what is missing."""
    missing = pytest.fail if os.environ.get("CLEARHEAD_REQUIRE") else pytest.skip
    if not os.environ.get(variable):
        missing(f"{variable} is not set: see the top of this file")
    path = Path(os.environ[variable]).joinpath(*names)
    if not path.exists():
        missing(f"{path} is not there: see the top of this file")
    return path


@pytest.mark.parametrize("required", [False, True])
def test_what_is_missing_fails_where_it_is_required(required, tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_REQUIRE", "1" if required else "")
    monkeypatch.setenv("CLEARHEAD_WEIGHTS", str(tmp_path))
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match="is not there"):
        under("CLEARHEAD_WEIGHTS", "minilm")


# --- MiniLM ---


@pytest.fixture(scope="module")
def minilm() -> ch.Model:
    return ch.load(under("CLEARHEAD_WEIGHTS", "minilm"))


def sentence_pairs() -> tuple[list[str], list[str], list[float]]:
    with under("CLEARHEAD_DATA", "stsb", "stsb-en-test.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return [row[0] for row in rows], [row[1] for row in rows], [float(row[2]) for row in rows]


def test_minilm_ranks_sentence_pairs_as_published(minilm):
    first, second, scores = sentence_pairs()
    assert len(scores) == 1379
    similarity = (minilm.embed(first) * minilm.embed(second)).sum(dim=1)
    got = spearman(scores, similarity.tolist())
    assert got == pytest.approx(PUBLISHED_SPEARMAN, abs=1e-4)


def test_minilm_gives_the_vectors_of_transformers(minilm):
    transformers = pytest.importorskip("transformers")
    folder = under("CLEARHEAD_WEIGHTS", "minilm")
    first, second, _ = sentence_pairs()
    texts = first[:200] + second[:200]
    hf = transformers.AutoModel.from_pretrained(folder).eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    with torch.inference_mode():
        for start in range(0, len(texts), 50):
            batch = words(texts[start : start + 50], padding=True, return_tensors="pt")
            mask = batch["attention_mask"].unsqueeze(2)
            x = hf(**batch).last_hidden_state
            expected.append(F.normalize((x * mask).sum(dim=1) / mask.sum(dim=1), dim=1))
    torch.testing.assert_close(minilm.embed(texts), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:1 of 2 texts have more than the 256 tokens")
def test_minilm_survives_our_folder_and_theirs(minilm, tmp_path):
    texts = ["A girl is styling her hair.", "A plane is taking off. " * 90]
    expected = minilm.embed(texts)
    minilm.save(tmp_path / "own")
    ch.export(minilm, tmp_path / "hf")
    for name in ("own", "hf"):
        assert ch.load(tmp_path / name).embed(texts).equal(expected)


# --- stories15M ---


def test_stories15m_tells_the_story_of_llama2c():
    model = ch.load(under("CLEARHEAD_WEIGHTS", "stories15m"))
    assert model.generate("Once upon a time", max_new_tokens=40).startswith(STORY)


# --- Whisper ---


def test_whisper_hears_every_word():
    pytest.importorskip("soundfile")
    folder = under("CLEARHEAD_WEIGHTS", "whisper")
    under("CLEARHEAD_WEIGHTS", "whisper", "gpt2.tiktoken")
    # Checked signatures hide from torch that decoding is a generator, so it is told here.
    with torch.inference_mode():
        heard = ch.load(folder).transcribe(under("CLEARHEAD_DATA", "jfk", "jfk.flac"))
    assert spoken(heard) == spoken(SPEECH)


@pytest.mark.filterwarnings("ignore")  # transformers' own, about its own arguments
def test_an_exported_whisper_hears_in_transformers(tmp_path):
    pytest.importorskip("soundfile")
    transformers = pytest.importorskip("transformers")
    sound = read_audio(under("CLEARHEAD_DATA", "jfk", "jfk.flac"))
    under("CLEARHEAD_WEIGHTS", "whisper", "gpt2.tiktoken")
    ch.export(ch.load(under("CLEARHEAD_WEIGHTS", "whisper")), tmp_path / "hf")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "hf")
    hf = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "hf").eval()
    mel = processor(sound.numpy(), sampling_rate=16000, return_tensors="pt").input_features
    (heard,) = processor.batch_decode(hf.generate(mel), skip_special_tokens=True)
    assert spoken(heard) == spoken(SPEECH)


def spoken(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


# --- SmolLM2 ---


def test_smollm2_knows_a_capital():
    model = ch.load(under("CLEARHEAD_WEIGHTS", "smollm2"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in model.chat(question, max_new_tokens=20)
