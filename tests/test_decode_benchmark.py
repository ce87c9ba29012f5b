"""`benchmarks/decode.py` with tiny models: all engines that are installed do the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "decode.py"


def bench(task, *words):
    """What it found, with one round of six tokens."""
    command = [sys.executable, str(SCRIPT), "--task", task, "--tiny", "--json", "--threads", "1"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--tokens", "6", *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gpt2", "batch16", "translation", "encoder"])
def test_engines_in_fp32_write_what_ours_writes(task):
    pytest.importorskip("transformers")
    found = bench(task)
    results, left_out = found["results"], found["left_out"]
    assert results["clearhead"]["same"] == results["clearhead"]["ratio"] == 1
    assert results["transformers"]["same"] == 1
    assert not [reason for reason in left_out.values() if "fails" in reason], left_out
    for name, result in results.items():
        assert result["per_second"] > 0
        if not name.endswith(("bf16", "f16", "int8", "q8_0", "int4")):
            assert result["same"] >= 0.9, name


@pytest.mark.slow
def test_a_contender_stands_beside_ours_with_as_many_bits():
    pytest.importorskip("xllamacpp", reason="llama.cpp's binding xllamacpp is not installed")
    results = bench("gpt2", "--only", "llama.cpp-q8_0")["results"]
    assert list(results) == ["clearhead", "clearhead-int8", "llama.cpp-q8_0"]
    assert [r["beside"] for r in results.values()] == ["clearhead", "clearhead", "clearhead-int8"]


def test_an_unknown_contender_is_named():
    with pytest.raises(AssertionError, match="there is no vllm; there are clearhead"):
        bench("gpt2", "--only", "vllm")
