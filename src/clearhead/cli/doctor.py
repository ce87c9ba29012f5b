"""What this machine has and what to expect of it.

Processor, memory, PyTorch, measured roofs, data sets, and what to mend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.measure.machine import Machine


@dataclass(frozen=True)
class Args:
    """What `clearhead doctor` takes."""

    quick: bool = False
    """Look only, measure nothing."""
    json: bool = False
    """Print everything as JSON."""


def run(args: Args) -> None:
    """Examine the machine, then print what was found."""
    from clearhead.cli.console import PlainConsole
    from clearhead.measure.machine import examine

    console = PlainConsole()
    if args.json:
        import json

        print(json.dumps(examine(quick=args.quick).to_dict(), indent=1, allow_nan=False))
        return
    if console.is_terminal and not args.quick:
        with console.status("measuring memory and matrix products ..."):
            machine = examine()
    else:
        machine = examine(quick=args.quick)
    _print_machine(console, machine)


def _print_machine(console: Console, machine: Machine) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, text in _lines(machine):
        table.add_row(name, Text(text))
    console.print(table)
    if not machine.problems:
        console.print("\nNothing to mend.", style="green")
        return
    console.print("\nTo mend", style="bold yellow")
    for problem in machine.problems:
        console.print(f"- {problem.what}")
        console.print(f"  {problem.mend}", style="green")


def _lines(machine: Machine) -> list[tuple[str, str]]:
    lines = [
        ("system", f"{machine.system}, Python {machine.python}"),
        ("processor", machine.processor.name),
        ("cores", _cores(machine)),
        ("vectors", ", ".join(machine.processor.simd) or "unknown"),
        ("memory", f"{_gb(machine.memory.total)}, {_gb(machine.memory.available)} free"),
        ("disk here", f"{_gb(machine.disk_free)} free"),
    ]
    if machine.torch is not None:
        found = machine.torch
        lines.append(("PyTorch", f"{found.version}, threads: {found.threads}, {found.capability}"))
        lines.append(("devices", ", ".join(found.devices)))
    lines += _measured(machine)
    advice = machine.advice
    lines.append(("choose", f"{advice.device}, threads: {advice.threads}"))
    lines.append(("", f"{advice.dtype}: {advice.dtype_reason}"))
    if advice.products == "compiled":
        lines.append(("", "compiled products in training; it takes them by itself"))
    lines += _expected(machine)
    lines += _parts(machine)
    return lines


def _cores(machine: Machine) -> str:
    cpu = machine.processor
    physical = "unknown" if cpu.physical is None else cpu.physical
    quota = "none" if cpu.quota is None else f"{cpu.quota:g}"
    return f"{cpu.logical} shown, {physical} real, {cpu.allowed} allowed, cgroup limit: {quota}"


def _measured(machine: Machine) -> list[tuple[str, str]]:
    if machine.roofs is None:
        return [("measured", "nothing (--quick)")]
    roofs = machine.roofs
    return [
        ("measured", f"memory read {_figure(roofs.bandwidth, 'GB/s')}"),
        ("", f"fp32 matrix product {_figure(roofs.gemm, 'GFLOP/s')}"),
        ("", f"compiled products of training {_times(roofs.compiled, 'that')}"),
        ("", f"bf16 matrix product {_times(roofs.bf16, 'fp32')}"),
    ]


def _expected(machine: Machine) -> list[tuple[str, str]]:
    advice = machine.advice
    if advice.train_tokens is None or advice.decode_tokens is None:
        return []
    return [
        ("expect", "GPT-2 124M on this CPU, fp32, at most:"),
        ("", f"training {advice.train_tokens:.0f} tokens/s (6N operations a token)"),
        ("", f"decoding {advice.decode_tokens:.0f} tokens/s (4N bytes a token, one sequence)"),
    ]


def _parts(machine: Machine) -> list[tuple[str, str]]:
    ready = [name for name, lacking in machine.extras.items() if not lacking]
    absent = [name for name, lacking in machine.extras.items() if lacking]
    lines = [("extras", f"installed: {', '.join(ready) or 'none'}")]
    if absent:
        lines.append(("", f"not: {', '.join(absent)} (pip install 'clearhead[{absent[0]}]')"))
    if machine.data.path is not None:
        lines.append(("data", machine.data.path))
        lines.append(("", f"there: {', '.join(machine.data.found) or 'none'}"))
        if machine.data.missing:
            lines.append(("", f"not there: {', '.join(machine.data.missing)}"))
    return lines


def _gb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def _times(ratio: float | None, what: str) -> str:
    return "failed" if ratio is None else f"{ratio:.2g} x {what}"


def _figure(value: float | None, unit: str) -> str:
    return "failed" if value is None else f"{value:.0f} {unit}"
