"""Finding a folder's weights: one file or shards with an index, safetensors or (unpickled without
running anything) .bin.

A folder is somebody else's: an index may only name files of this folder, links may not lead out of
it (but for the cache of the Hugging Face hub, whose snapshots are links into its own blobs), and
JSON is read with a limit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.weights.folder import CONFIG, WEIGHTS, read_config, read_safetensors
from clearhead.weights.pickles import read_pickle

INDEX = WEIGHTS + ".index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
JSON_LIMIT = 64 * 2**20


def open_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, memory-mapped where the format allows."""
    if (folder / WEIGHTS).exists():
        return read_safetensors(inside(folder, WEIGHTS))
    if (folder / INDEX).exists():
        return _shards(folder, INDEX)
    if (folder / PICKLE).exists():
        return _tensors(inside(folder, PICKLE))
    if (folder / PICKLE_INDEX).exists():
        return _shards(folder, PICKLE_INDEX)
    raise ClearheadError(
        f"{folder} has no weights: looked for {WEIGHTS}, {INDEX}, {PICKLE} and {PICKLE_INDEX}."
    )


def single_file(folder: Path) -> Path:
    """The one model file of a folder that has no config.json: GGUF, Whisper .pt, llama2.c .bin."""
    files = [p for kind in ("*.gguf", "*.pt", "*.bin") for p in sorted(folder.glob(kind))]
    files = [p for p in files if p.name != "tokenizer.bin"]
    require(
        len(files) == 1,
        f"{folder} has no config.json, so it is not a model's folder"
        + (f"; of its files name one: {', '.join(p.name for p in files)}." if files else "."),
    )
    return inside(folder, files[0].name)


def file_kind(path: Path) -> Literal["gguf", "openai", "llama2c"]:
    """Which of the model files this is, by what is in it."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF" or path.suffix == ".gguf":
        return "gguf"
    if start[:2] == b"PK" or path.suffix == ".pt":
        return "openai"
    whole = (path.parent / CONFIG).is_file()
    todo = (
        f"name its folder, {path.parent}" if whole else "put config.json beside it, name the folder"
    )
    require(
        path.suffix != ".safetensors" and path.suffix != ".json",
        f"{path} is only a part of a model: {todo}.",
    )
    require(
        path.suffix == ".bin",
        f"{path} is none of the files known here: a GGUF file, an official Whisper .pt, a llama2.c "
        ".bin. For other weights name the folder with its config.json.",
    )
    return "llama2c"


def inside(folder: Path, name: str, root: Path | None = None) -> Path:
    """The path of a file of this folder; a name that leads out of it, or out of the model's folder
    `root` above it, is refused.
    """
    require(
        Path(name).name == name and name not in ("", ".", ".."),
        f'{folder} names the file "{name}", which is not in the folder: refused.',
    )
    path, home = folder / name, (root or folder).resolve()
    target = path.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    require(
        target.is_relative_to(home) or target.is_relative_to(blobs),
        f"{path} is a link that leads out of the folder, to {target}: refused. Copy the file "
        "there.",
    )
    require(target.is_file(), f"{path} is missing: the folder is not complete. Download it again.")
    return path


def read_json(path: Path) -> Any:
    """A JSON file of bounded size, or a clear error."""
    require(path.stat().st_size <= JSON_LIMIT, f"{path} is larger than any settings file: refused.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ClearheadError(
            f"{path} cannot be read as JSON ({error}): the file is damaged."
        ) from error


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder, somebody else's or ours."""
    path = folder / CONFIG
    if path.is_file():
        size = inside(folder, CONFIG).stat().st_size
        require(size <= JSON_LIMIT, f"{path} is larger than any settings file: refused.")
    return read_config(folder)


def read_table(path: Path) -> dict[str, Any]:
    """A JSON file with a table in it, or a clear error."""
    table = read_json(path)
    require(isinstance(table, dict), f"{path} must hold a table of settings, not {table!r:.40}.")
    return table


def _shards(folder: Path, index: str) -> dict[str, Tensor]:
    """The tensors of all shards; the index must name each of them once and truly."""
    table = read_json(inside(folder, index))
    where = table.get("weight_map") if isinstance(table, dict) else None
    require(
        isinstance(where, dict)
        and len(where) > 0
        and all(isinstance(name, str) for name in where.values()),
        f'{folder / index} has no "weight_map" from keys to files: it is damaged.',
    )
    files = sorted(set(where.values()))  # type: ignore[union-attr]
    missing = [name for name in files if Path(name).name == name and not _exists(folder / name)]
    require(
        not missing, f"{folder} lacks these of its {len(files)} shards: {', '.join(missing)[:400]}."
    )
    tensors: dict[str, Tensor] = {}
    wrong = []
    for name in files:
        for key, tensor in _tensors(inside(folder, name)).items():
            if where.get(key) != name:  # type: ignore[union-attr]
                wrong.append(f"{key} is in {name}")
            tensors[key] = tensor
    wrong += [f"{key} is in none" for key in where if key not in tensors]  # type: ignore[union-attr]
    require(
        not wrong,
        f"{folder / index} does not agree with the shards: {', '.join(wrong[:8])}"
        f"{' ...' if len(wrong) > 8 else ''}. Download the folder again.",
    )
    return tensors


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is longer than names can be
        return False


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    content = read_pickle(path)
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    others = [str(key) for key in content if key not in tensors]
    require(
        not others and len(tensors) > 0,
        f"{path} should hold tensors by name and nothing else, but it has {', '.join(others[:5])}.",
    )
    return tensors
