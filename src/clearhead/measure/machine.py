"""What this machine has, what to expect of it and what to mend: the facts of `clearhead doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clearhead.measure.choices import better_products, remember
from clearhead.measure.hardware import Memory, Processor, read_memory, read_processor
from clearhead.measure.roofs import (
    PROBES,
    Report,
    Roofs,
    Torch,
    decoding_roof,
    measure,
    training_roof,
)

GPT2_PARAMETERS = 124_439_808
TORCH_RANGE = ((2, 10), (2, 14))  # from, and below; as in pyproject.toml
BF16_WORTH_IT = 1.2  # less than this is no gain for the digits it costs
LITTLE = 2 * 2**30  # bytes of memory or disk below which work soon fails

DATA_VARIABLE = "CLEARHEAD_DATA"
DATA_SETS = (
    *("tinyshakespeare", "multi30k", "fra_eng", "sst2", "trec", "stsb"),
    *("mnist", "emoji", "fsdd", "jfk", "ett", "cora"),
)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong or slows work down."""

    what: str
    """What is wrong, and what follows from it."""
    mend: str
    """How to mend it."""


@dataclass(frozen=True)
class DataFolder:
    """The folder of data sets that CLEARHEAD_DATA names."""

    path: str | None
    """Where it is; None if the variable is not set."""
    found: tuple[str, ...]
    """Known sets that are there."""
    missing: tuple[str, ...]
    """Known sets that are not."""


@dataclass(frozen=True)
class Advice:
    """What to choose on this machine, and the speed that no program can exceed."""

    device: str
    """Where to compute."""
    dtype: str
    """The number format for training and generating."""
    dtype_reason: str
    """Why that format."""
    products: str
    """Who multiplies fp32 matrices in training on the CPU."""
    threads: int
    """Threads for one process."""
    train_tokens: float | None
    """GPT-2 124M on the CPU in fp32: at most so many tokens a second in training."""
    decode_tokens: float | None
    """GPT-2 124M on the CPU in fp32: at most so many tokens a second in decoding one sequence."""


@dataclass(frozen=True)
class Machine:
    """Everything that `clearhead doctor` tells."""

    system: str
    """Operating system and its version."""
    python: str
    """Version of Python."""
    processor: Processor
    """The processor, and how much of it may be used."""
    memory: Memory
    """Main memory."""
    disk_free: int
    """Bytes free where the command runs."""
    torch: Torch | None
    """The PyTorch that is installed."""
    roofs: Roofs | None
    """What was measured; None after a quick look."""
    advice: Advice
    """What to choose, what to expect."""
    extras: dict[str, tuple[str, ...]]
    """For each optional part of Clearhead the packages that it lacks; none means installed."""
    data: DataFolder
    """The data sets."""
    problems: tuple[Problem, ...]
    """What to mend."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def examine(*, quick: bool = False, folder: str | Path = ".") -> Machine:
    """Look at this machine and, unless `quick`, measure its roofs too (two seconds)."""
    processor, memory, data = read_processor(), read_memory(), find_data()
    report = measure(() if quick else PROBES)
    if not quick:
        remember(report)
    disk_free = shutil.disk_usage(folder).free
    problems = [
        *torch_problems(report, processor),
        *room_problems(memory, disk_free),
        *data_problems(data),
    ]
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        processor=processor,
        memory=memory,
        disk_free=disk_free,
        torch=report.torch,
        roofs=report.roofs,
        advice=advise(report, processor),
        extras=missing_extras(),
        data=data,
        problems=tuple(problems),
    )


def advise(report: Report, processor: Processor) -> Advice:
    """Device, number format, threads and expectations from what was found."""
    devices = report.torch.devices if report.torch else ("cpu",)
    device = best_device(devices)
    roofs = report.roofs or Roofs()
    best = max(1.0, roofs.compiled or 0.0)  # the quicker fp32, as a multiple of PyTorch's own
    dtype, reason = _dtype(device, report, roofs.bf16 and roofs.bf16 / best)
    return Advice(
        device=device,
        dtype=dtype,
        dtype_reason=reason,
        products=better_products(roofs.compiled),
        threads=processor.usable,
        train_tokens=roofs.gemm and training_roof(roofs.gemm * best, GPT2_PARAMETERS),
        decode_tokens=roofs.bandwidth and decoding_roof(roofs.bandwidth, GPT2_PARAMETERS),
    )


def best_device(devices: Sequence[str]) -> str:
    """Where to compute, of what PyTorch has here: a GPU if there is one."""
    best = next((d for kind in ("cuda", "mps") for d in devices if d.startswith(kind)), "cpu")
    return best.partition(" ")[0]


def _dtype(device: str, report: Report, ratio: float | None) -> tuple[str, str]:
    if device.startswith("cuda"):
        if report.torch is not None and report.torch.cuda_bf16:
            return "bf16", "the GPU computes in it"
        return "fp32", "the GPU has no bf16"
    if device == "mps":
        return "fp32", "bf16 is not reliable on every Mac"
    if report.died_in == "bf16":
        return "fp32", "bf16 ends the program here"
    if ratio is None:
        return "fp32", "bf16 was not measured"
    if ratio < BF16_WORTH_IT:
        return "fp32", f"bf16 runs at {ratio:.2g} times its speed on this processor"
    return "bf16", f"it runs at {ratio:.2g} times the speed of fp32"


def find_data() -> DataFolder:
    """The folder that CLEARHEAD_DATA names, and the known sets in it."""
    path = os.environ.get(DATA_VARIABLE) or None
    found = tuple(name for name in DATA_SETS if path and _has_content(Path(path) / name))
    return DataFolder(path, found, tuple(name for name in DATA_SETS if name not in found))


def _has_content(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def missing_extras() -> dict[str, tuple[str, ...]]:
    """Each extra of the installed Clearhead with the packages that it still lacks."""
    try:
        needs = importlib.metadata.requires("clearhead") or []
    except importlib.metadata.PackageNotFoundError:  # used from its source, not installed
        return {}
    extras: dict[str, list[str]] = {}
    for need in needs:
        match = re.match(r"([\w.-]+).*\bextra == ['\"](\w+)['\"]", need)
        if match:
            lacking = extras.setdefault(match[2], [])
            if not _installed(match[1]):
                lacking.append(match[1])
    return {extra: tuple(lacking) for extra, lacking in extras.items()}


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def torch_problems(report: Report, processor: Processor) -> list[Problem]:
    """What is wrong with PyTorch here."""
    found = report.torch
    if found is None:
        return [
            Problem(
                f"PyTorch cannot be used: {report.reason or 'it is not there'}.",
                'Install it: pip install "torch>=2.10,<2.14"',
            )
        ]
    problems = []
    if not TORCH_RANGE[0] <= _version(found.version) < TORCH_RANGE[1]:
        problems.append(
            Problem(
                f"PyTorch {found.version} is not among the versions that Clearhead is tested with.",
                'Install one that is: pip install "torch>=2.10,<2.14"',
            )
        )
    if report.died_in:
        problems.append(crash(report, processor))
    problems += _thread_problems(found, processor)
    if not any(d.startswith("cuda") for d in found.devices) and shutil.which("nvidia-smi"):
        mend = "Compare the CUDA version that nvidia-smi prints with the one PyTorch was built for"
        if not found.cuda_build:
            mend = "Install PyTorch's CUDA build (pytorch.org, Get Started)"
        problems.append(Problem("There is an NVIDIA driver, but PyTorch sees no GPU.", mend))
    return problems


def crash(report: Report, processor: Processor) -> Problem:
    """What it means that the child process died."""
    if report.died_in in ("bf16", "fp16"):
        mend = "Stay with fp32"
        if "AMX" in processor.simd:
            mend += (
                ", or keep AMX out of it, which this processor names but may not grant: "
                "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
            )
        what = f"A {report.died_in} matrix product ends the program ({report.reason})."
        return Problem(what, mend)
    return Problem(
        f"PyTorch fails in a plain calculation ({report.died_in}: {report.reason}).",
        "Install it again, from the index that fits this processor (pytorch.org, Get Started)",
    )


def _thread_problems(found: Torch, processor: Processor) -> list[Problem]:
    usable = processor.usable
    if found.threads > usable:
        return [
            Problem(
                f"PyTorch uses {found.threads} threads, but {usable} can run at a time: they will "
                "wait for each other.",
                f"export OMP_NUM_THREADS={usable}",
            )
        ]
    if found.threads < usable:
        return [
            Problem(
                f"PyTorch uses {found.threads} of {usable} cores.",
                f"export OMP_NUM_THREADS={usable} (or unset it)",
            )
        ]
    return []


def room_problems(memory: Memory, disk_free: int) -> list[Problem]:
    """Too little memory or disk."""
    problems = []
    if memory.available is not None and memory.available < LITTLE:
        problems.append(
            Problem(
                f"Only {memory.available / 2**30:.1f} GB of memory are free: to train GPT-2 124M "
                "takes more than 2.",
                "Close other programs, or choose a smaller model or batch",
            )
        )
    if disk_free < LITTLE:
        problems.append(
            Problem(
                f"Only {disk_free / 2**30:.1f} GB of disk are free here: checkpoints need more.",
                "Make room, or work in another folder",
            )
        )
    return problems


def data_problems(data: DataFolder) -> list[Problem]:
    """A data folder that is not named, not there or empty."""
    mend = f"export {DATA_VARIABLE}=/path/to/data, a folder with a sub-folder for each set"
    if data.path is None:
        what = f"{DATA_VARIABLE} is not set: recipes that name a data set must download it."
        return [Problem(what, mend)]
    if not Path(data.path).is_dir():
        return [Problem(f"{DATA_VARIABLE} names {data.path}, which is no folder.", mend)]
    if not data.found:
        return [Problem(f"{DATA_VARIABLE} names {data.path}, but no known set is in it.", mend)]
    return []


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
