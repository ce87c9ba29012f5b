"""A model's folder: config.json and model.safetensors, written whole or not at all, read with every
check.

config.json          {"format": "clearhead/1", "family": "gpt2", "config": {...}}
model.safetensors    every parameter once (aliases are left out)

A model whose linear layers are packed says "form": "int8" and has a format of its own; its file has
their codes and scales (`fast.formats`).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.fast.form import form_of, packed_tensors, refresh, take_packed
from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig, check_depth, family
from clearhead.weights.convert import NONE, Faults, fill

FORMAT = "clearhead/1"
# Of packed weights: another one whenever a form lies otherwise than before.
PACKED = {"bf16": "clearhead/3", "int8": "clearhead/3", "int4": "clearhead/4"}
FORMATS = (FORMAT, *sorted(set(PACKED.values())))
OLDER = ("clearhead/2", "clearhead/3")  # of int8 and of int4
CONFIG, WEIGHTS = "config.json", "model.safetensors"
LABELS = "labels.json"
COMPANIONS = ("generation_config.json", "preprocessor_config.json", LABELS)
OWN_FILES = {
    CONFIG,
    WEIGHTS,
    *COMPANIONS,
    "tokenizer.json",
    "tokenizer_config.json",
    "target",
    "modules.json",
    "1_Pooling",
    "2_Normalize",
}
Beside = Callable[[Path], None]


def save_model(
    net: Net, config: FamilyConfig, folder: str | Path, beside: Beside | None = None
) -> None:
    """Write a model's folder; an existing one is replaced only when the new one is complete.

    `beside` writes what belongs to the model (its tokeniser) into the same folder.
    """
    require(
        not any(parameter.is_meta for parameter in net.parameters()),
        'A model on the meta device has no weights to save: build it without device="meta".',
    )
    net.retie()
    aliases = dict(net.ties)
    tensors = {
        name: parameter.detach().contiguous()
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if name not in aliases
    }
    description: dict[str, Any] = {
        "format": FORMAT,
        "family": config.kind,
        "config": config.to_dict(),
    }
    if packed := packed_tensors(net):
        tensors |= packed
        form = form_of(net)
        description |= {"format": PACKED[str(form)], "form": form}
    with whole_folder(folder, OWN_FILES) as new:
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        if beside is not None:
            beside(new)
        (new / CONFIG).write_text(json.dumps(description, indent=2) + "\n")


def load_model(folder: str | Path) -> tuple[Net, FamilyConfig]:
    """The network and settings of a folder that `save_model` wrote."""
    folder = Path(folder)
    description = read_config(folder)
    kind, form = description.get("format"), description.get("form")
    require(
        kind not in OLDER or PACKED.get(str(form), kind) == kind != OLDER[0],
        f"{folder} was packed by an older version, which laid weights out otherwise: run clearhead "
        "quantise again on the model that it was made from.",
    )
    require(
        kind in FORMATS,
        f"{folder / CONFIG} is not a Clearhead model (its format is {kind!r}, not one of "
        f"{', '.join(map(repr, FORMATS))}).",
    )
    config = family(str(description.get("family"))).Config.from_dict(
        description.get("config"), where=f"{folder.name}/{CONFIG}"
    )
    tensors = read_safetensors(folder / WEIGHTS)
    check_depth(config, len(tensors), str(folder / CONFIG))
    net = config.outline()
    if kind != FORMAT:
        tensors = take_packed(net, form, tensors, str(folder))
    return _filled(net, tensors), config


def assemble(config: FamilyConfig, tensors: dict[str, Tensor], faults: Faults = NONE) -> Net:
    """The network with these tensors as its parameters; made on the meta device, so nothing is
    drawn or copied. `faults` are those of reading the tensors: said with all others.
    """
    return _filled(config.outline(), tensors, faults)


def _filled(net: Net, tensors: dict[str, Tensor], faults: Faults = NONE) -> Net:
    fill(net, tensors, faults)
    refresh(net)
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                # (empty_like of a meta tensor imports a compiler, for a second)
                new = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                setattr(module, name, new)
    net.reset_tables()
    return net.eval()


def model_inside(folder: Path) -> Path:
    """Where the model of a run is: `model/` once it came out, else its newest whole checkpoint; any
    other folder is its own.
    """
    if not (folder / "recipe.yaml").is_file() or (folder / CONFIG).exists():
        return folder
    if (folder / "model" / CONFIG).is_file():
        return folder / "model"
    named = [(path.name.removeprefix("step-"), path) for path in folder.glob("checkpoints/step-*")]
    found = sorted(((int(n), path) for n, path in named if n.isdecimal()), reverse=True)
    for _, path in found:
        if (path / CONFIG).is_file() and _has_all(path):
            return path
    raise ClearheadError(
        f"{folder} is a run without a model yet: it has no whole checkpoint that is one. Go on "
        f"with it: clearhead train {folder} --resume"
    )


def _has_all(checkpoint: Path) -> bool:
    """Whether a checkpoint's files are there and as long as its manifest, written last, says."""
    try:
        files = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == files[name]["bytes"] for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a table, or a clear error."""
    require(folder.exists(), f"There is no model at {folder}: check the path.")
    require(
        folder.is_dir(), f"{folder} is a file; a model is a folder with {CONFIG} and {WEIGHTS}."
    )
    path = folder / CONFIG
    require(path.is_file(), f"{folder} has no {CONFIG}: it is not a model's folder.")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ClearheadError(
            f"{path} cannot be read as JSON ({error}): the file is damaged."
        ) from error
    require(isinstance(description, dict), f"{path} is not a table of settings.")
    return description


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, memory-mapped; a truncated or foreign file is refused before anything
    is built.
    """
    require(path.is_file(), f"{path.parent} has no {path.name}: the weights are missing.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ClearheadError(
            f"{path} is not a whole safetensors file ({error}): it is truncated, damaged or of "
            "another format. Copy or save it again."
        ) from error


def refuse_full(path: str | Path, overwrite: bool) -> None:
    """Refuse to write where a file or a folder with something in it is, unless that was asked
    for.
    """
    path = Path(path)
    full = path.is_file() or (path.is_dir() and any(path.iterdir()))
    require(
        overwrite or not full,
        f"{path} is there already: choose another place, or replace it with --overwrite "
        "(overwrite=True).",
    )


@contextmanager
def whole_folder(folder: str | Path, names: set[str]) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` when the block ends without an
    error.
    """
    folder = Path(folder).resolve()  # a link stays, and what it leads to is replaced
    for path in (folder, *folder.parents):
        require(
            path.is_dir() or not path.exists(), f"{path} is a file: choose a folder to save to."
        )
    if folder.is_dir():
        others = sorted(path.name for path in folder.iterdir() if path.name not in names)
        require(
            not others,
            f"{folder} holds other things too ({', '.join(others[:5])}), which saving there would "
            "delete: choose another folder.",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ClearheadError(f"{folder} cannot be made: {error.strerror or error}.") from error
    try:
        yield new
        os.chmod(new, 0o755)
        for file in new.rglob("*"):  # safetensors leaves its own to their owner alone
            os.chmod(file, 0o755 if file.is_dir() else 0o644)
        _put_in_place(new, folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        why = getattr(error, "strerror", None) or error
        raise ClearheadError(
            f"{folder} could not be written ({why}); what was there before is as it was."
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _put_in_place(new: Path, folder: Path) -> None:
    """`new` becomes `folder`; what stood there before is back if that fails, and goes, with what
    earlier saves could not remove, once the new one stands.
    """
    old = new.with_name(new.name + "-old")
    try:
        if folder.is_dir():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    for left in folder.parent.glob(f".{glob.escape(folder.name)}-????????-old"):
        shutil.rmtree(left, ignore_errors=True)
