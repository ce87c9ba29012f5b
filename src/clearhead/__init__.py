"""Clearhead, a small and readable Transformer library: its public names, and nothing else.

A name is imported from its module when it is first used (PEP 562), so that `import clearhead` and
`clearhead --help` do not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.api import build as build
    from clearhead.api import export as export
    from clearhead.api import load as load
    from clearhead.api import presets as presets
    from clearhead.attention.positions import Positions as Positions
    from clearhead.errors import ClearheadError as ClearheadError
    from clearhead.model import Model as Model
    from clearhead.tap import capture as capture
    from clearhead.tap import patch as patch
    from clearhead.training.run import train as train

__version__ = "0.1.0"

# Literal on purpose: it can be read at a glance, and a test holds it against the block above.
_HOME = {
    "ClearheadError": "clearhead.errors",
    "Model": "clearhead.model",
    "Positions": "clearhead.attention.positions",
    "build": "clearhead.api",
    "capture": "clearhead.tap",
    "export": "clearhead.api",
    "load": "clearhead.api",
    "patch": "clearhead.tap",
    "presets": "clearhead.api",
    "train": "clearhead.training.run",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # the next access does not come here
        return value
    hint = ""
    if not name.startswith("_"):  # dunder look-ups by tools want a quick no, not a suggestion
        from clearhead.errors import did_you_mean

        hint = did_you_mean(name, _HOME)
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}.{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
