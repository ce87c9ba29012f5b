"""What all tests share: checked shapes, fixed seeds, no network, no chatter.

The shapes and types in clearhead's signatures are checked in every call that a test makes
(jaxtyping's import hook with beartype). CLEARHEAD_NO_SHAPES=1 switches that off, to see whether a
failure is one of the code or of an annotation.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Before anything imports them: transformers reads these once, and so do OpenMP and MKL.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# The models are tiny: a second thread costs more than it gives, and much more on a busy machine.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import hypothesis
import jaxtyping
import pytest
import torch

if os.environ.get("CLEARHEAD_NO_SHAPES", "0") in ("", "0"):
    # Before the first import of these modules, because it works on imports. Not the specs' own
    # module: beartype knows `Self` only where it decorates a class, and specs check their types.
    root = Path(importlib.util.find_spec("clearhead").origin).parent
    names = {path.stem for path in root.iterdir()} - {"__init__", "__pycache__", "config"}
    jaxtyping.install_import_hook([f"clearhead.{name}" for name in names], "shapecheck.typed")

torch.set_num_threads(1)

# Times differ between machines; examples do not, so that a failure can be repeated.
hypothesis.settings.register_profile("clearhead", deadline=None, derandomize=True)
hypothesis.settings.load_profile("clearhead")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def unchecked():
    """Shapes are not checked, as for a user: to test what the library itself says about them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
