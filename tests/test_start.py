"""Starting is quick: nothing is imported, and no page of memory asked for, that is not needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import clearhead as ch

SMALL = {"n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": 50, "max_len": 32}


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_path_that_is_not_there_is_refused_before_torch_is_imported():
    said = in_new_process(
        "import sys; from clearhead.cli.main import main; sys.stderr = sys.stdout\n"
        "print(main(['generate', './nothing', 'a prompt']), 'torch' in sys.modules)"
    )
    assert said == "clearhead: There is no model at ./nothing: check the path.\n2 False\n"


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_loading_and_a_forward_import_no_compiler(family, tmp_path):
    ch.build(family, seed=0, **SMALL).save(tmp_path / "model")
    given = "ids, ids" if family == "t5" else "ids"
    said = in_new_process(
        "import sys, torch, clearhead as ch\n"
        f"net = ch.load({str(tmp_path / 'model')!r}).net\n"
        f"ids = torch.arange(5)[None]\nwith torch.inference_mode(): net({given})\n"
        "print([name for name in ('sympy', 'torch._dynamo') if name in sys.modules])"
    )
    assert said.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone gives memory back at once")
def test_freed_memory_is_kept_until_it_is_given_back():
    said = in_new_process(
        "import resource, torch\n"
        "from clearhead.memory import give_back, keep_freed_memory\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def work():\n"
        "    before = faults()\n"
        "    for _ in range(4): torch.ones(25_000_000)\n"  # 100 MB each, 24,000 pages
        "    return faults() - before\n"
        "work(); given_back = work()\n"
        "if not keep_freed_memory(): print('another C library')\n"
        "else:\n"
        "    for _ in range(4): work()\n"
        "    kept = work(); give_back(); print(given_back, kept, work())"
    )
    if "another" in said:
        pytest.skip(said)
    given_back, kept, after_all = map(int, said.split())
    assert given_back > 10_000
    assert kept < 100
    assert after_all > 10_000  # once: the next work finds the memory kept again


@pytest.mark.skipif(sys.platform != "linux", reason="the system's list of mappings is read")
def test_what_llvm_does_not_need_any_more_is_given_back():
    pytest.importorskip("llvmlite", reason="the extra fast (llvmlite) is not installed")
    said = in_new_process(
        "import torch\n"
        "from clearhead.fast import compile as compiled\n"
        "def code():\n"
        "    with open('/proc/self/smaps') as file: lines = iter(file.read().splitlines())\n"
        "    return sum(int(next(l for l in lines if l.startswith('Rss:')).split()[1])\n"
        "               for line in lines if 'libllvmlite' in line and ' r-xp ' in line)\n"
        "import llvmlite.binding\n"
        "before = code(); compiled.steps()\n"
        "after = code(); compiled.product('fp32')\n"  # what was given back is there when called
        "print(before, after)"
    )
    before, after = map(int, said.split())
    assert before > 1_000
    assert after < before / 4
