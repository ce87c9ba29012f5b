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

from clearhead.measure.hardware import read_processor
from clearhead.measure.roofs import Report, measure
from clearhead.paths import cache_folder

FILE = "machine.json"
WORTH_IT = 1.1  # less than this is no gain that would be noticed


def quicker_products() -> Literal["torch", "onednn"]:
    """Who multiplies the matrices of a training step in fp32 quicker on this CPU."""
    known = _read().get(_name(), {})
    ratio = known.get("onednn")
    if not isinstance(ratio, float):
        report = measure(("onednn",))
        ratio = remember(report)
    return better_products(ratio)


def better_products(ratio: float | None) -> Literal["torch", "onednn"]:
    """The choice that follows from oneDNN's speed as a multiple of PyTorch's."""
    return "onednn" if ratio is not None and ratio >= WORTH_IT else "torch"


def remember(report: Report) -> float:
    """Keep what a report says of oneDNN: 0 where it ends the program or is not there."""
    ratio = float((report.roofs and report.roofs.onednn) or 0.0)
    folder = cache_folder()
    with contextlib.suppress(OSError):  # a disk that cannot be written to costs time, no more
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{FILE}.{os.getpid()}"
        new.write_text(json.dumps({**_read(), _name(): {"onednn": ratio}}, indent=1) + "\n")
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
