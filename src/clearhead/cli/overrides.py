"""Settings on the command line: `--set n_layers=4 position.theta=5e5`, values in YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from clearhead.errors import ClearheadError

# YAML 1.1 reads 3e-4 as a text (it wants 3.0e-4); nobody who writes it means a text.
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_changes(pairs: Iterable[str]) -> dict[str, Any]:
    """The keys (dotted ones as they are) with their values; the last of two equal keys wins."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ClearheadError(f'--set takes key=value, not "{pair}": --set n_layers=4')
        changes[key.strip()] = _read_value(key, text)
    return changes


def _read_value(key: str, text: str) -> Any:
    import yaml

    if _FLOAT.fullmatch(text.strip()):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ClearheadError(f'The value of "{key}" is no YAML ({problem}): {text}') from error
