"""What is measured of a machine once and then remembered, so that all its runs choose alike.

A choice that depended on the noise of the moment would change the last digits of a run, and a run
and its repetition would not be the same. So it is kept in `machine.json` of the cache folder, under
the names of processor, PyTorch and what makes our own code; `clearhead doctor` measures anew.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from typing import Any, Literal

from clearhead.fast.compile import BEGUN, available
from clearhead.measure.hardware import read_processor
from clearhead.measure.roofs import Report, measure
from clearhead.paths import cache_folder

FILE = "machine.json"
WORTH_IT = 1.05  # less than this is no gain that would be noticed


def quicker_products() -> Literal["torch", "compiled"]:
    """How the matrices of a training step are multiplied quicker in fp32 on this CPU."""
    if not available():
        return "torch"
    known = _read().get(_name())
    if isinstance(known, float):
        return better_products(known)
    return better_products(remember(measure(("compiled",))))


def better_products(ratio: float | None) -> Literal["torch", "compiled"]:
    """The choice that follows from the speed of compiled products as a multiple of PyTorch's."""
    return "compiled" if ratio is not None and ratio >= WORTH_IT else "torch"


def remember(report: Report) -> float | None:
    """Keep what a report says of compiled products: their speed as a multiple of PyTorch's, 0 where
    they end the program. What was not measured is not kept.
    """
    ratio = report.roofs.compiled if report.roofs is not None else None
    ratio = 0.0 if report.died_in == "compiled" else ratio
    if ratio is None or not available():
        return None
    folder = cache_folder()
    with contextlib.suppress(OSError):  # a disk that cannot be written to costs time, no more
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{FILE}.{os.getpid()}"
        new.write_text(json.dumps({**_read(), _name(): float(ratio)}, indent=1) + "\n")
        os.replace(new, folder / FILE)
    return float(ratio)


def _read() -> dict[str, Any]:
    try:
        known = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _name() -> str:
    """The processor, and whatever makes the code that is compared."""
    processor = read_processor()
    versions = " ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "llvmlite"))
    return f"{processor.name}, {' '.join(processor.simd)}, {versions}, {BEGUN[:8]}"
