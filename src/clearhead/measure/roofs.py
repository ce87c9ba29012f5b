"""The roofs of this machine, measured: memory bandwidth and matrix products, in two seconds.

A program cannot run faster than the memory delivers or the arithmetic units multiply (the roofline
model, Williams et al. 2009). With N parameters, in fp32:

    training:  6 N operations a token (Kaplan et al. 2020, 2.1)    tokens/s <= GEMM rate / 6 N
    decoding:  4 N bytes a token, each weight read once            tokens/s <= bandwidth / 4 N

All of it runs in a child process: a processor (or a virtual machine around it) that promises
instructions it does not have kills the process that uses them, and that is worth reporting.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROBES = ("bandwidth", "gemm", "compiled", "bf16")  # the riskiest last
TIME_LIMIT = 120.0  # seconds, for a child that hangs; three or four are enough for a sound one


@dataclass(frozen=True)
class Torch:
    """The PyTorch that is installed, as a fresh process sees it."""

    version: str
    """Its version, with the build: 2.13.0+cpu."""
    threads: int
    """Threads that it uses for one operation."""
    capability: str
    """The vector instructions that its own kernels chose."""
    devices: tuple[str, ...]
    """Where it can compute: cpu, cuda:0 (with its name), mps."""
    cuda_build: bool
    """Whether it was built for CUDA."""
    cuda_bf16: bool
    """Whether there is a CUDA device that computes in bf16."""


@dataclass(frozen=True)
class Roofs:
    """The best of a few tries with all of PyTorch's threads; None where it did not finish."""

    bandwidth: float | None = None
    """Memory read, GB/s."""
    gemm: float | None = None
    """fp32 matrix product, GFLOP/s."""
    bf16: float | None = None
    """bf16 matrix product as a multiple of the fp32 one of the same size: below 1 it is slower."""
    fp16: float | None = None
    """The same of fp16; only for those who ask."""
    compiled: float | None = None
    """Compiled fp32 products of a layer in training, as a multiple of PyTorch's own speed."""


@dataclass(frozen=True)
class Report:
    """What the child process found before it ended."""

    torch: Torch | None = None
    """PyTorch, or None where it cannot be imported."""
    roofs: Roofs | None = None
    """What was measured; None if nothing was asked for."""
    died_in: str = ""
    """The measurement during which the child died, or "import"; empty if all went well."""
    reason: str = ""
    """Why it died: a signal, or the last line of its error."""


def training_roof(gemm: float, n_parameters: int) -> float:
    """The most tokens a second that training can reach, from GFLOP/s."""
    return gemm * 1e9 / (6 * n_parameters)


def decoding_roof(bandwidth: float, n_parameters: int) -> float:
    """The most tokens a second that fp32 decoding of one sequence can reach, from GB/s."""
    return bandwidth * 1e9 / (4 * n_parameters)


def measure(probes: tuple[str, ...] = PROBES, command: list[str] | None = None) -> Report:
    """Let a child process look at PyTorch and measure, and report whatever happens to it."""
    call = "from clearhead.measure.roofs import _child; _child()"
    argv = command or [sys.executable, "-c", call, *probes]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIME_LIMIT)
        out, reason = done.stdout, _reason(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        out = raw.decode() if isinstance(raw, bytes) else raw
        reason = f"no answer in {TIME_LIMIT:g} s"
    return _read_report(out, probes, reason)


def _read_report(out: str, probes: tuple[str, ...], reason: str) -> Report:
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            facts.update(json.loads(line))
    about = facts.pop("torch", None)
    if about is None:
        return Report(died_in="import", reason=reason)
    missing = next((probe for probe in probes if probe not in facts), "") if reason else ""
    return Report(
        torch=Torch(**about | {"devices": tuple(about["devices"])}),
        roofs=Roofs(**facts) if probes else None,
        died_in=missing,
        reason=reason if missing else "",
    )


def _reason(code: int, stderr: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return signal.strsignal(-code) or f"signal {-code}"
    return stderr.strip().rpartition("\n")[2] or f"exit code {code}"


# --- in the child process ---


def _child() -> None:
    """One JSON object a line, written at once: the lines before a crash are not lost."""
    _say(torch=_about_torch())
    measures = {
        "bandwidth": _bandwidth,
        "gemm": _gemm,
        "compiled": _compiled,
        "bf16": _bf16,
        "fp16": _fp16,
    }
    for probe in sys.argv[1:]:
        _say(**{probe: measures[probe]()})


def _say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def find_devices() -> list[str]:
    """Where PyTorch can compute: cpu, cuda:0 (with its name), mps."""
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count)]
    return [*devices, *(["mps"] if torch.backends.mps.is_available() else [])]


def _about_torch() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "devices": find_devices(),
        "cuda_build": torch.version.cuda is not None,
        "cuda_bf16": cuda and torch.cuda.is_bf16_supported(),
    }


def _bandwidth() -> float:
    import torch

    # 512 MB, the size of GPT-2 124M: a server's cache holds 256 MB and would look twice as fast.
    x = torch.ones(128 * 2**20)
    return x.numel() * 4 / _best(lambda: x.dot(x)) / 1e9


def _gemm() -> float:
    import torch

    return _product_rate(1024, torch.float32)


def _compiled() -> float | None:
    import torch
    from torch.nn import functional

    from clearhead.fast.compile import available
    from clearhead.fast.products import linear

    if not available():
        return None
    x, weight = torch.ones(1024, 256, requires_grad=True), torch.ones(1024, 256, requires_grad=True)
    asked = torch.ones(1024, 1024)

    def one(way: Callable[..., Any]) -> float:
        return _best(lambda: torch.autograd.grad(way(x, weight), (x, weight), asked), 0.05)

    # Turn by turn: a machine that slows down meanwhile slows both.
    theirs, ours = zip(*((one(functional.linear), one(linear)) for _ in range(3)), strict=True)
    return min(theirs) / min(ours)


def _bf16() -> float:
    import torch

    # Smaller than above: where bf16 is emulated, one product of that size takes seconds.
    return _product_rate(512, torch.bfloat16) / _product_rate(512, torch.float32)


def _fp16() -> float:
    import torch

    return _product_rate(512, torch.float16) / _product_rate(512, torch.float32)


def _product_rate(size: int, dtype: Any) -> float:
    import torch

    a = torch.ones(size, size, dtype=dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / _best(lambda: torch.mm(a, a, out=out)) / 1e9


def _best(work: Callable[[], object], seconds: float = 0.25, least: int = 2) -> float:
    """The shortest time of a few calls: what disturbs a measurement only ever makes it longer."""
    work()  # the first call allocates, picks a kernel and starts threads
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
