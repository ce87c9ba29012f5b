"""What a name means that may be a path or a model of the hub; known before torch is imported."""

from __future__ import annotations

from pathlib import Path

from clearhead.errors import require


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
