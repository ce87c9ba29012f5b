"""Where things are: a path or a model of the hub, and what can be made or downloaded again."""

from __future__ import annotations

import os
from pathlib import Path

from clearhead.errors import require


def cache_folder() -> Path:
    """Where Clearhead keeps what can be made or downloaded again: `CLEARHEAD_CACHE` names it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CLEARHEAD_CACHE") or Path(home) / "clearhead")


def looks_like_path(source: str) -> bool:
    """Whether a name that is not there was meant as a path and not as a model of the hub."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith("/")


def check_there(source: str) -> None:
    """Refuse a path where nothing is."""
    path = Path(source).expanduser()
    require(
        path.exists() or not looks_like_path(source),
        f"There is no model at {source}: check the path.",
    )
