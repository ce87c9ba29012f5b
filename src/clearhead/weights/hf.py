"""A Hugging Face folder as one of our models, and back: their config in our words, their tensors
under our names.

Nothing in a folder is ever run: code that a config names (`auto_map`) is not looked at, pickles are
read as data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig, check_depth, depth, family
from clearhead.models.heads import PoolingConfig
from clearhead.models.hf import SIZES, hf_rates, hf_sizes
from clearhead.models.keys import Dropped
from clearhead.weights.convert import Report, to_ours, to_theirs
from clearhead.weights.files import inside, open_weights, read_json, read_settings, read_table
from clearhead.weights.folder import assemble
from clearhead.weights.new_head import draw_head, seeded, without_head

# Their model_type -> our family.
MODEL_TYPES: dict[str, str] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "bert": "bert",
    "t5": "t5",
    "gpt_neox": "gpt_neox",
    "roberta": "roberta",
    "distilbert": "distilbert",
    "bart": "bart",
    "marian": "bart",
    "vit": "vit",
    "clip": "clip",
    "whisper": "whisper",
}


def load_hf(
    folder: str | Path, seed: int | None = None, **changes: Any
) -> tuple[Net, FamilyConfig, Report]:
    """The network, its settings, and what became of every key.

    `changes` are made to the settings; with another `head` than the file's the new one is drawn
    anew, from `seed`.
    """
    folder = Path(folder)
    hf = read_settings(folder)
    module = family_of(hf, folder)
    theirs = open_weights(folder)
    own = hf_config(hf, theirs.keys(), folder)
    config = own.changed(**(_sentence_head(folder) | changes))
    replaced = getattr(config, "head", None) != getattr(own, "head", None)
    theirs, gone = without_head(theirs, module, own, config) if replaced else (theirs, {})
    tensors, report, faults = to_ours(theirs, module.keys(config), depth(config), module.PREFIX)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    try:
        drawn = draw_head(config, tensors, seeded(seed)) if replaced else {}
        zeros = _zeros(hf, module, config, tensors)
        net = assemble(config, tensors | drawn | zeros, faults)
    except ClearheadError:
        raise
    except (RuntimeError, ArithmeticError, TypeError, ValueError) as error:
        raise ClearheadError(
            f"{folder}/config.json describes a model that cannot be built "
            f"({str(error).partition(chr(10))[0][:200]})."
        ) from error
    notes = [f"{name} is not in the file: zeros, as in transformers" for name in zeros]
    report = replace(
        report,
        dropped=report.dropped | gone,
        tied=dict(net.ties),
        drawn=tuple(drawn),
        notes=(*notes, *_dropout_note(hf, config)),
    )
    return net, config, report


def hf_config(hf: dict[str, Any], names: Collection[str], folder: Path) -> FamilyConfig:
    """Their config in our words, checked; `names` are the keys of the weights."""
    module = family_of(hf, folder)
    if (name := opened_as(hf, module)) is not None:
        hf = hf | {"architectures": [name]}
    hf_sizes(hf)
    try:
        config: FamilyConfig = module.from_hf(hf, names)
    except KeyError as error:
        raise ClearheadError(
            f"{folder}/config.json lacks {error}, which a {hf['model_type']} must say."
        ) from error
    except ClearheadError:
        raise
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:
        empty = sorted(name for name in SIZES & hf.keys() if hf[name] is None)
        raise ClearheadError(
            f"{folder}/config.json has a setting of the wrong type ({error})"
            + (f"; these are null: {', '.join(empty)}." if empty else ".")
        ) from error
    config = type(config).from_dict(config.to_dict(), where=f"{folder.name}/config.json")
    check_depth(config, len(names), f"{folder}/config.json")
    return config


def family_of(hf: Mapping[str, Any], folder: Path) -> ModuleType:
    """Our family for their model_type."""
    kind = str(hf.get("model_type"))
    if kind not in MODEL_TYPES:
        code = " It names code of its own, which is never run." if hf.get("auto_map") else ""
        raise ClearheadError(
            f'{folder} holds a "{kind}", which is not supported.{did_you_mean(kind, MODEL_TYPES)} '
            f"Supported: {', '.join(MODEL_TYPES)}.{code}"
        )
    require(
        not hf.get("quantization_config"),
        f"{folder} holds quantised weights ({hf.get('quantization_config')}): load the original, "
        "unquantised folder, or a GGUF file.",
    )
    return family(MODEL_TYPES[kind])


def opened_as(hf: Mapping[str, Any], module: ModuleType) -> str | None:
    """The architecture that a config names, or the one that such a file is opened as."""
    named = hf.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return None
    return getattr(module, "OPENED_AS", {}).get(named[0], named[0])


def to_hf(net: Net, config: FamilyConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Their config and their tensors, or a sentence that says why there are none."""
    module = family(config.kind)
    require(
        hasattr(module, "to_hf"),
        f"The family {config.kind} has no architecture in transformers. Save it in our own layout "
        "with model.save(folder).",
    )
    require(
        not any(parameter.is_meta for parameter in net.parameters()),
        'A model on the meta device has no weights to write: build it without device="meta".',
    )
    hf = module.to_hf(config)
    aliases = dict(net.ties)
    ours = {
        name: parameter.detach()
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if name not in aliases
    }
    theirs = to_theirs(ours, module.keys(config), depth(config))
    # A model without a head of transformers' own is saved without the name of its body.
    prefix = module.PREFIX if _bare(config) else ""
    return hf, {name.removeprefix(prefix): t.contiguous() for name, t in theirs.items()}


def lacks_pooler(config: FamilyConfig) -> bool:
    """Whether transformers has a pooler behind this body, which our model has not and which it
    therefore draws.
    """
    if not hasattr(family(config.kind), "to_hf") or not _bare(config):
        return False
    table = family(config.kind).keys(config)
    return any(".pooler." in key and isinstance(rule, Dropped) for key, rule in table.items())


def _bare(config: FamilyConfig) -> bool:
    """Whether it has no head that transformers would know as one."""
    head = getattr(config, "head", "none of the choices")
    return head is None or isinstance(head, PoolingConfig)


def _zeros(
    hf: Mapping[str, Any], module: ModuleType, config: FamilyConfig, there: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of a body that is opened with its head: what the file cannot have and transformers has as
    zeros.
    """
    names = [name for name in getattr(module, "ZEROS", ()) if name not in there]
    named = hf.get("architectures") or [None]
    if not names or named[0] == opened_as(hf, module):
        return {}
    net = config.outline()
    return {name: torch.zeros(net.get_parameter(name).shape) for name in names}


def _dropout_note(hf: Mapping[str, Any], config: FamilyConfig) -> list[str]:
    """A sentence where their rates of dropout are not all the one that is kept."""
    rates, kept = hf_rates(hf), getattr(config, "dropout", 0.0)
    if all(rate == kept for rate in rates.values()):
        return []
    said = ", ".join(f"{name} {rate}" for name, rate in rates.items())
    return [f"dropout: the config has {said}; there is one rate here, and {kept} is kept"]


def _sentence_head(folder: Path) -> dict[str, Any]:
    """The pooling of a sentence-transformers folder, if it is one."""
    if not (folder / "modules.json").exists():
        return {}
    modules = read_json(inside(folder, "modules.json"))
    require(
        isinstance(modules, list) and all(isinstance(module, dict) for module in modules),
        f"{folder}/modules.json must hold a list of modules.",
    )
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    paths = [str(module.get("path", "")) for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    require(not unknown, f"{folder} has the modules {unknown}, which are not supported.")
    if "Pooling" not in kinds:
        return {}
    home = folder / inside_folder(paths[kinds.index("Pooling")])
    said = read_table(inside(home, "config.json", folder))
    modes = {"cls_token": "first", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}
    asked = [ours for theirs, ours in modes.items() if said.get(f"pooling_mode_{theirs}")]
    require(
        len(asked) == 1, f"{home} asks for the poolings {asked}: one is supported, not several."
    )
    return {"head": PoolingConfig(asked[0], normalise="Normalize" in kinds)}  # type: ignore[arg-type]


def inside_folder(name: str) -> str:
    """The name of a folder directly inside another one."""
    require(
        Path(name).name == name and name not in (".", ".."), f'"{name}" leads out of the folder.'
    )
    return name
