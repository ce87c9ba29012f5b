"""What the operating system says of processor, memory and limits, read from its own files.

A container or a job scheduler may give a process less than the machine has: the affinity mask
(which cores) and the cgroup (how much time on them, how much memory) count, not the core count.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

# what is worth telling apart for matrix products, by the names that Linux and macOS use for it
SIMD = {
    "AVX2": ("avx2",),
    "FMA": ("fma",),
    "AVX-512": ("avx512f",),
    "VNNI": ("avx512_vnni", "avx_vnni", "avx512vnni"),
    "AVX-512 BF16": ("avx512_bf16",),
    "AMX": ("amx_tile",),
    "NEON": ("asimd", "neon"),
    "SVE": ("sve",),
    "ARM BF16": ("bf16",),
}


def busy_cores(seconds: float = 0.2) -> float:
    """How many cores' worth of work is done while this process sleeps; 0 where that cannot be
    read.
    """
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    idle, total = after[0] - before[0], after[1] - before[1]
    return (1 - idle / total) * (os.cpu_count() or 1)


def _ticks() -> tuple[int, int] | None:
    """The time that all cores together were idle, and all of their time."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
        user, nice, system, idle, wait, *rest = map(int, line.split()[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return idle + wait, user + nice + system + idle + wait + sum(rest)


@dataclass(frozen=True)
class Processor:
    """The processor, and how much of it this process may use."""

    name: str
    """The maker's name for it, or the kind of machine."""
    logical: int
    """Cores that the operating system shows, hyper-threads counted."""
    physical: int | None
    """Real cores; None where that cannot be read."""
    allowed: int
    """Cores on which this process may run (the affinity mask)."""
    quota: float | None
    """Cores' worth of time that the cgroup grants; None for no limit."""
    simd: tuple[str, ...]
    """Vector instructions that matter for matrix products."""

    @property
    def usable(self) -> int:
        """Threads that can compute at the same time without getting into each other's way."""
        limits = [self.allowed, self.physical or self.logical]
        if self.quota is not None:
            limits.append(max(1, math.floor(self.quota)))
        return min(limits)


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes; None where it cannot be read."""

    total: int | None
    """All of it, or the cgroup's limit if that is less."""
    available: int | None
    """What can be had without swapping."""


def read_processor() -> Processor:
    """The processor of this machine."""
    cpuinfo = _read("/proc/cpuinfo")
    name, flags, physical = parse_cpuinfo(cpuinfo)
    if platform.system() == "Darwin":
        name = _sysctl("machdep.cpu.brand_string")
        flags = _sysctl("machdep.cpu.features", "machdep.cpu.leaf7_features").lower()
        physical = int(_sysctl("hw.physicalcpu") or 0) or None
    if platform.machine() in ("arm64", "aarch64"):
        flags += " neon"  # part of the architecture
    logical = os.cpu_count() or 1
    return Processor(
        name=name or platform.processor() or platform.machine(),
        logical=logical,
        physical=physical,
        allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical,
        quota=cgroup_cores(),
        simd=simd_names(flags),
    )


def parse_cpuinfo(text: str) -> tuple[str, str, int | None]:
    """Name, flags and number of real cores from the text of /proc/cpuinfo."""
    name = flags = ""
    cores: set[tuple[str, str]] = set()
    for block in text.split("\n\n"):
        facts = {
            key.strip(): value.strip()
            for key, sign, value in (line.partition(":") for line in block.splitlines())
            if sign
        }
        name = name or facts.get("model name", "")
        flags = flags or facts.get("flags", "") or facts.get("Features", "")
        if "core id" in facts:
            cores.add((facts.get("physical id", "0"), facts["core id"]))
    return name, flags, len(cores) or None


def simd_names(flags: str) -> tuple[str, ...]:
    """The vector instructions among a processor's flags, under the names that people use."""
    have = set(flags.replace(".", "_").split())
    return tuple(name for name, spellings in SIMD.items() if have.intersection(spellings))


def read_memory() -> Memory:
    """The memory of this machine, or of the cgroup if that grants less."""
    total = available = None
    facts = dict(line.partition(":")[::2] for line in _read("/proc/meminfo").splitlines())
    if "MemTotal" in facts:
        total = int(facts["MemTotal"].split()[0]) * 1024
        available = int(facts.get("MemAvailable", facts["MemTotal"]).split()[0]) * 1024
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_memory()
    if limit is not None and total is not None and limit < total:
        total = limit
        available = min(available, limit) if available is not None else None
    return Memory(total, available)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> float | None:
    """Cores' worth of time that the cgroup (version 2, else 1) grants; None for no limit."""
    found = []
    for text in _cgroup_files(root, own, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            found.append(int(quota) / int(period))
    quota = _read(root / "cpu/cpu.cfs_quota_us").strip()
    period = _read(root / "cpu/cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit():  # no limit is written as -1
        found.append(int(quota) / int(period))
    return min(found, default=None)


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> int | None:
    """Bytes that the cgroup (version 2, else 1) grants; None for no limit."""
    texts = [*_cgroup_files(root, own, "memory.max"), _read(root / "memory/memory.limit_in_bytes")]
    return min((int(text) for text in texts if text.strip().isdigit()), default=None)


def _cgroup_files(root: Path, own: str | None, name: str) -> list[str]:
    """That file of the process's own cgroup and of all above it: the smallest limit counts."""
    if own is None:
        lines = _read("/proc/self/cgroup").splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    place = root / own.strip("/")
    folders = [place, *place.parents]
    return [_read(f / name) for f in folders if f == root or root in f.parents]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _sysctl(*names: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
