"""One exception for everything a user can mend: it says what is wrong, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClearheadError(ValueError):
    """Wrong use or wrong input. The command line prints its text alone and exits with 2."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """A sentence that names the nearest option, with a leading blank, or nothing at all."""
    near = difflib.get_close_matches(
        str(name), [str(option) for option in options], n=1, cutoff=0.5
    )
    return f' Did you mean "{near[0]}"?' if near else ""


def require(condition: bool, message: str) -> None:
    """Raise `ClearheadError(message)` unless the condition holds."""
    if not condition:
        raise ClearheadError(message)
