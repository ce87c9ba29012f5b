"""What a check of a run found: how bad it is, in words, with its number, and what to do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["good", "note", "warning", "bad"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "note", "good")


@dataclass(frozen=True)
class Finding:
    """One answer of one check."""

    check: str
    """Which check gave it."""
    level: Level
    """good: as it should be; note: worth knowing; warning: costs quality; bad: is wrong."""
    text: str
    """What was found, with its number."""
    number: float | None = None
    """The number the level was decided by."""
    suggestion: str = ""
    """What to do; nothing where all is well."""
    details: dict[str, Any] = field(default_factory=dict)
    """All that was measured: by layer, by head, by step."""

    def __str__(self) -> str:
        said = f"{self.check} ({self.level}): {self.text}"
        return f"{said} {self.suggestion}".rstrip()

    @property
    def worrying(self) -> bool:
        """Whether a run should be interrupted to read it."""
        return self.level in ("bad", "warning")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a number that JSON has no word for becomes null."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def listed(names: list[str], most: int = 4) -> str:
    """Some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
