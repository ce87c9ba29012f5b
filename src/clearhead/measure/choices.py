"""What is measured of a machine once and then remembered, so that all its runs choose alike.

A choice that depended on the noise of the moment would change the last digits of a run, and a run
and its repetition would not be the same. So it is kept in `machine.json` of the cache folder, under
the names of processor and PyTorch; `clearhead doctor` measures anew.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from typing import Any, Literal

from clearhead.fast.compile import available
from clearhead.measure.hardware import read_processor
from clearhead.measure.roofs import Report, measure
from clearhead.paths import cache_folder

FILE = "machine.json"
WORTH_IT = 1.05  # less than this is no gain that would be noticed


def quicker_products() -> Literal["torch", "compiled"]:
    """How the matrices of a training step are multiplied quicker in fp32 on this CPU."""
    if not available():
        return "torch"
    known = _read().get(_name(), {})
    ratio = known.get("compiled")
    if not isinstance(ratio, float):
        report = measure(("compiled",))
        ratio = remember(report)
    return better_products(ratio)


def better_products(ratio: float | None) -> Literal["torch", "compiled"]:
    """The choice that follows from the speed of compiled products as a multiple of PyTorch's."""
    return "compiled" if ratio is not None and ratio >= WORTH_IT else "torch"


def remember(report: Report) -> float:
    """Keep what a report says of compiled products: 0 where they end the program."""
    ratio = float((report.roofs and report.roofs.compiled) or 0.0)
    folder = cache_folder()
    with contextlib.suppress(OSError):  # a disk that cannot be written to costs time, no more
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{FILE}.{os.getpid()}"
        new.write_text(json.dumps({**_read(), _name(): {"compiled": ratio}}, indent=1) + "\n")
        os.replace(new, folder / FILE)
    return ratio


def _read() -> dict[str, Any]:
    try:
        known = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _name() -> str:
    processor = read_processor()
    simd = " ".join(processor.simd)
    return f"{processor.name}, {simd}, torch {importlib.metadata.version('torch')}"
