"""`doctor`: what is read from the system, what is measured, and what is advised from it."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from clearhead.cli import doctor
from clearhead.cli import main as cli
from clearhead.measure import hardware, roofs
from clearhead.measure import machine as machines
from clearhead.measure.hardware import (
    Memory,
    Processor,
    busy_cores,
    cgroup_cores,
    cgroup_memory,
    parse_cpuinfo,
    read_memory,
    read_processor,
    simd_names,
)
from clearhead.measure.roofs import Report, Roofs, Torch

CPU = Processor("a processor", logical=8, physical=4, allowed=8, quota=None, simd=("AVX2",))
TORCH = Torch("2.13.0+cpu", 4, "AVX2", ("cpu",), cuda_build=False, cuda_bf16=False)
GOOD = Report(torch=TORCH, roofs=Roofs(bandwidth=30.0, gemm=150.0, bf16=0.1))

# two real cores with two hyper-threads each
CPUINFO = "\n\n".join(
    f"processor\t: {i}\nmodel name\t: Some CPU: 3 GHz\nphysical id\t: 0\ncore id\t\t: {i % 2}\n"
    "flags\t\t: fpu avx2 fma avx512_vnni"
    for i in range(4)
)


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """A machine on which nothing is wrong, whatever the one that runs the tests is like."""
    for name in machines.DATA_SETS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path))
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machines, "read_processor", lambda: CPU)
    monkeypatch.setattr(machines, "read_memory", lambda: Memory(16 * 2**30, 8 * 2**30))
    monkeypatch.setattr(machines, "measure", lambda probes: GOOD)
    monkeypatch.setattr("shutil.which", lambda name: None)
    return tmp_path


# --- what the system says ---


def test_cpuinfo():
    name, flags, physical = parse_cpuinfo(CPUINFO)
    assert name == "Some CPU: 3 GHz"
    assert physical == 2
    assert simd_names(flags) == ("AVX2", "FMA", "VNNI")


def test_cpuinfo_of_arm_and_of_nothing():
    assert simd_names(parse_cpuinfo("processor : 0\nFeatures : fp asimd sve bf16")[1]) == (
        "NEON",
        "SVE",
        "ARM BF16",
    )
    assert parse_cpuinfo("") == ("", "", None)


def test_cgroup_limits(tmp_path):
    """The smallest limit on the way from the process's own group to the root counts."""
    assert cgroup_cores(tmp_path, "/") is None
    own = tmp_path / "jobs" / "mine"
    own.mkdir(parents=True)
    (own / "cpu.max").write_text("max 100000\n")
    (own / "memory.max").write_text("max\n")
    assert cgroup_cores(tmp_path, "/jobs/mine") is None
    assert cgroup_memory(tmp_path, "/jobs/mine") is None
    (own.parent / "cpu.max").write_text("150000 100000\n")
    (own.parent / "memory.max").write_text("1000\n")
    (tmp_path / "memory.max").write_text("2000\n")
    (tmp_path.parent / "cpu.max").write_text("100 100000\n")  # outside: not ours
    assert cgroup_cores(tmp_path, "/jobs/mine") == 1.5
    assert cgroup_memory(tmp_path, "/jobs/mine") == 1000


def test_cgroup_version_1(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cores(tmp_path, "/") is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert cgroup_cores(tmp_path, "/") == 3.0


@pytest.mark.parametrize(
    ("changes", "usable"),
    [
        ({}, 4),
        ({"physical": None}, 8),
        ({"allowed": 2}, 2),
        ({"quota": 1.5}, 1),
        ({"quota": 0.5}, 1),
        ({"quota": 64.0}, 4),
    ],
)
def test_usable_cores(changes, usable):
    assert replace(CPU, **changes).usable == usable


def test_how_busy_the_cores_are(monkeypatch):
    found = iter([(1000, 5000), (1030, 5040)])
    monkeypatch.setattr(hardware, "_ticks", lambda: next(found))
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 4)
    assert busy_cores(0) == 1.0  # a quarter of the time
    monkeypatch.setattr(hardware, "_ticks", lambda: None)
    assert busy_cores(0) == 0.0
    monkeypatch.undo()
    assert 0 <= busy_cores(0.05) <= os.cpu_count()


def test_this_machine_can_be_read():
    processor, memory = read_processor(), read_memory()
    assert processor.name
    assert 1 <= processor.usable <= processor.logical
    assert memory.total is None or memory.total > 2**28
    if memory.total is not None and memory.available is not None:
        assert 0 < memory.available <= memory.total


# --- what is measured ---


def test_roofs_by_hand():
    """150 GFLOP/s over 6 x 124,439,808 operations; 30 GB/s over 4 x 124,439,808 bytes."""
    assert roofs.training_roof(150.0, 124_439_808) == pytest.approx(200.9, abs=0.05)
    assert roofs.decoding_roof(30.0, 124_439_808) == pytest.approx(60.27, abs=0.005)


def test_a_quick_look_at_torch():
    import torch

    report = roofs.measure(())
    assert report.torch is not None
    assert report.torch.version == torch.__version__
    assert report.torch.devices[0] == "cpu"
    assert report.roofs is None
    assert report.died_in == ""


@pytest.mark.slow
def test_this_machine_can_be_measured():
    report = roofs.measure()
    assert report.died_in in ("", "bf16")
    assert report.roofs is not None
    assert 0.5 < report.roofs.bandwidth < 5000
    assert 0.5 < report.roofs.gemm < 50000


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


ABOUT = f"print({json.dumps({'torch': TORCH.__dict__ | {'devices': ['cpu']}})!r}, flush=True); "


def test_a_crash_loses_nothing_that_came_before():
    code = ABOUT + "print('{\"gemm\": 2.5}', flush=True); import os; os.kill(os.getpid(), 4)"
    report = roofs.measure(("gemm", "bf16"), child(code))
    assert report.torch == TORCH
    assert report.roofs == Roofs(gemm=2.5)
    assert report.died_in == "bf16"
    assert "llegal instruction" in report.reason


def test_torch_that_cannot_be_imported():
    report = roofs.measure((), child("import no_such_torch"))
    assert report.torch is None
    assert report.died_in == "import"
    assert report.reason == "ModuleNotFoundError: No module named 'no_such_torch'"


def test_a_child_that_hangs(monkeypatch):
    monkeypatch.setattr(roofs, "TIME_LIMIT", 1.0)
    report = roofs.measure(("gemm",), child(ABOUT + "import time; time.sleep(60)"))
    assert report.torch == TORCH
    assert report.died_in == "gemm"
    assert report.reason == "no answer in 1 s"


# --- what is advised ---


@pytest.mark.parametrize(
    ("devices", "cuda_bf16", "ratio", "device", "dtype"),
    [
        (("cpu",), False, 0.1, "cpu", "fp32"),
        (("cpu",), False, 1.1, "cpu", "fp32"),
        (("cpu",), False, 2.0, "cpu", "bf16"),
        (("cpu",), False, None, "cpu", "fp32"),
        (("cpu", "cuda:0 (Some GPU)"), True, 0.1, "cuda:0", "bf16"),
        (("cpu", "cuda:0 (Some GPU)"), False, 2.0, "cuda:0", "fp32"),
        (("cpu", "mps"), False, 2.0, "mps", "fp32"),
    ],
)
def test_device_and_dtype(devices, cuda_bf16, ratio, device, dtype):
    found = replace(TORCH, devices=devices, cuda_bf16=cuda_bf16)
    report = Report(torch=found, roofs=Roofs(30.0, 150.0, ratio))
    advice = machines.advise(report, CPU)
    assert (advice.device, advice.dtype, advice.threads) == (device, dtype, 4)
    assert advice.train_tokens == pytest.approx(200.9, abs=0.05)
    assert advice.decode_tokens == pytest.approx(60.27, abs=0.005)


def test_nothing_is_promised_without_a_measurement():
    advice = machines.advise(Report(torch=TORCH), CPU)
    assert advice.train_tokens is None
    assert advice.decode_tokens is None
    assert advice.dtype == "fp32"


@pytest.mark.parametrize(
    ("report", "what", "mend"),
    [
        (Report(died_in="import", reason="OSError: no"), "OSError: no", "pip install"),
        (Report(replace(TORCH, version="1.9.0")), "PyTorch 1.9.0 is not among", "pip install"),
        (Report(replace(TORCH, threads=16)), "16 threads, but 4", "export OMP_NUM_THREADS=4"),
        (Report(replace(TORCH, threads=1)), "1 of 4 cores", "export OMP_NUM_THREADS=4"),
        (Report(TORCH, Roofs(), "bf16", "Illegal instruction"), "bf16 matrix", "Stay with fp32"),
        (Report(TORCH, Roofs(), "gemm", "Killed"), "gemm: Killed", "Install it again"),
    ],
)
def test_problems_with_torch(report, what, mend, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    (problem,) = machines.torch_problems(report, CPU)
    assert what in problem.what
    assert mend in problem.mend


def test_amx_that_is_named_but_not_granted():
    report = Report(TORCH, Roofs(), "bf16", "Illegal instruction")
    (problem,) = machines.torch_problems(report, replace(CPU, simd=("AVX-512", "AMX")))
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in problem.mend


def test_gpu_that_torch_cannot_see(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    (problem,) = machines.torch_problems(GOOD, CPU)
    assert "PyTorch sees no GPU" in problem.what
    assert "CUDA build" in problem.mend


def test_little_room():
    assert machines.room_problems(Memory(2**34, 2**33), 2**35) == []
    assert machines.room_problems(Memory(None, None), 2**35) == []
    problems = machines.room_problems(Memory(2**31, 2**30), 2**20)
    assert ["memory" in problems[0].what, "disk" in problems[1].what] == [True, True]


def test_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    (problem,) = machines.data_problems(machines.find_data())
    assert "is not set" in problem.what
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path / "nowhere"))
    (problem,) = machines.data_problems(machines.find_data())
    assert "is no folder" in problem.what
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    (problem,) = machines.data_problems(machines.find_data())
    assert "no known set" in problem.what
    (tmp_path / "mnist" / "images").touch()
    data = machines.find_data()
    assert data.found == ("mnist",)
    assert len(data.missing) == len(machines.DATA_SETS) - 1
    assert machines.data_problems(data) == []


def test_extras_and_torch_range_are_those_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = machines.missing_extras()
    assert set(extras) == set(project["optional-dependencies"])
    assert "pytest" not in extras["dev"]
    for name, lacking in extras.items():
        wanted = {re.split(r"[<>=!~ ]", need)[0] for need in project["optional-dependencies"][name]}
        assert set(lacking) <= wanted
    low, high = (".".join(map(str, bound)) for bound in machines.TORCH_RANGE)
    assert f"torch>={low},<{high}" in project["dependencies"]


# --- what is printed ---


def test_sound_machine(quiet, capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "memory read 30 GB/s" in out
    assert "fp32 matrix product 150 GFLOP/s" in out
    assert "bf16 runs at 0.1 times its speed" in out
    assert "training 201 tokens/s" in out
    assert "decoding 60 tokens/s" in out
    assert "Nothing to mend." in out


def test_json_is_the_machine(quiet, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    expected = json.loads(json.dumps(machines.examine().to_dict()))
    for facts in (data, expected):
        facts.pop("disk_free")
    assert data == expected
    assert data["roofs"]["gemm"] == 150.0
    assert data["problems"] == []


def test_quick_measures_nothing(quiet, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(machines, "measure", lambda probes: asked.append(probes) or Report(TORCH))
    assert cli.main(["doctor", "--quick"]) == 0
    assert asked == [()]
    out = capsys.readouterr().out
    assert "nothing (--quick)" in out
    assert "tokens/s" not in out


def test_problems_are_printed_with_how_to_mend_them(quiet, monkeypatch, capsys):
    monkeypatch.setattr(machines, "measure", lambda probes: Report(died_in="import", reason="gone"))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "To mend" in out
    assert "PyTorch cannot be used: gone." in out
    assert "Nothing to mend" not in out


def test_what_cannot_be_read_is_called_unknown(quiet):
    machine = replace(
        machines.examine(), processor=replace(CPU, physical=None), memory=Memory(None, None)
    )
    lines = dict(reversed(doctor._lines(machine)))
    assert "unknown real" in lines["cores"]
    assert lines["memory"] == "unknown, unknown free"
