"""Large numbers for people: 124.4 M parameters, 33.6 MB (a megabyte is a million bytes)."""

from __future__ import annotations

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def short(count: float) -> str:
    """A count with M, B (10^9), T: as the field writes sizes of models."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.99995 * size:
            return f"{_digits(count / size)} {letter}"
    return f"{count:.4g}"


def flops(count: float) -> str:
    """An amount of arithmetic."""
    return _scaled(count, "FLOP")


def size(count: float) -> str:
    """An amount of memory."""
    return _scaled(count, "B")


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    return f"{part / whole:.1%}" if whole else "-"


def _scaled(count: float, unit: str) -> str:
    power = 0
    while abs(count) >= 999.95 and power < len(PREFIXES) - 1:
        count, power = count / 1000, power + 1
    return f"{_digits(count)} {PREFIXES[power]}{unit}"


def _digits(x: float) -> str:
    """Four digits, without zeros at the end: 1.558, 124.4, 213."""
    return f"{x:.4g}"
