"""The model that a command was given."""

from __future__ import annotations

from typing import Any

from clearhead.paths import check_there


def open_model(source: str) -> Any:
    """Load it; a path where nothing is is refused at once, before torch is imported."""
    check_there(source)
    from clearhead.api import load

    return load(source)
