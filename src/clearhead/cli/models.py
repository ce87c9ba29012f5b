"""The model that a command was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.paths import check_there


def open_model(source: str) -> Any:
    """Load it; a path where nothing is is refused at once, before torch is imported."""
    check_there(source)
    from clearhead.api import load

    return load(source)


def open_reader(source: str) -> Any:
    """A model that reads text; without a tokeniser it is refused, and the missing file is named."""
    model = open_model(source)
    if model.tokenizer is None:
        raise ClearheadError(f"{source} has no tokeniser, so it reads no text: {_missing(source)}")
    return model


def _missing(source: str) -> str:
    """What to do about it."""
    from clearhead.weights.files import file_kind, single_file
    from clearhead.weights.folder import CONFIG, model_inside

    path = Path(source).expanduser()
    inside = model_inside(path) if path.is_dir() else path
    if inside.is_dir() and not (inside / CONFIG).exists():
        inside = single_file(inside)
    if not inside.is_file():
        where = inside if inside.is_dir() else "the model's folder"
        return f"put the tokenizer.json that it was trained with into {where}."
    if file_kind(inside) == "llama2c":
        return f"put the tokenizer.bin that belongs to it into {inside.parent}."
    return "a file of this kind brings its own, and this one was written without: take another."
