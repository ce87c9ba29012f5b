"""Fine-tuning: a run that starts with the weights of a model instead of new ones.

    clearhead train sst2 --from MODEL        model: {from: MODEL}

The model keeps its settings and its tokeniser, and gets the head that the objective asks for. What
a recipe says about rates is meant for new weights, so a recipe that is given a model takes these
(Devlin et al. 2019, appendix A.3), but for what was set by hand: AdamW, a rate of 5e-5 that rises
over a tenth of the run (50 steps at most) and falls in a straight line. LoRA's additions start at
nothing and take ten times that rate (Hu et al. 2021, appendix D).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from clearhead.models.family import FAMILIES, family
from clearhead.training.recipe import has_noam, merge

if TYPE_CHECKING:
    from clearhead.training.job import Job

RATE, LORA_RATE = 5e-5, 5e-4
WARMUP = 50  # steps at most
OPTIM: dict[str, Any] = {
    "name": "adamw",
    "betas": [0.9, 0.999],
    "schedule": "linear",
    "weight_decay": 0.01,
}


def settle(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a recipe with changes, and with what fine-tuning wants if it starts from a
    model.
    """
    rest, source = _source(changes)
    if "train.steps" in rest and "train.minutes" not in rest:
        rest["train.minutes"] = None  # the nearer word counts
    if source is not None and not _starts(data):
        data = {name: table for name, table in data.items() if name not in ("optim", "tokenizer")}
    if source is not None:
        data = {**data, "model": {"from": source}}
    elif "model.family" in rest:
        data = {**data, "model": _in_common(data.get("model") or {}, rest["model.family"])}
    merged = merge(data, rest)
    if not _starts(merged):
        return merged
    train = merged.get("train") or {}
    optim = merged.get("optim") or {}
    chosen = {
        **OPTIM,
        "lr": RATE if train.get("lora") is None else LORA_RATE,
        "warmup": _warmup(train),
    }
    if has_noam(optim):
        del chosen["lr"]  # its height follows from the width
    merged["optim"] = {**chosen, **optim}
    merged.setdefault("tokenizer", "ready")
    return merged


def _in_common(model: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """Of a recipe's model what another family has a setting for as well: a width, say."""
    if not isinstance(name, str) or name == model.get("family") or name not in FAMILIES:
        return dict(model)
    known = {field.name for field in fields(family(name).Config)}
    return {key: value for key, value in model.items() if key in known}


def _source(changes: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The other changes, and the model to start from if they name one; it replaces the section."""
    rest, model = dict(changes), changes.get("model")
    source = changes.get("model.from")
    if source is None and isinstance(model, Mapping) and model.keys() == {"from"}:
        source = model["from"]
    if source is not None:
        rest = {key: value for key, value in rest.items() if key not in ("model", "model.from")}
    return rest, None if source is None else str(source)


def _starts(data: Mapping[str, Any]) -> bool:
    """Whether the tables say which model to start from."""
    model = data.get("model")
    return isinstance(model, Mapping) and bool(model.get("from"))


def _warmup(train: Mapping[str, Any]) -> int:
    """A tenth of the run; how many steps a budget of minutes has is not known yet."""
    steps = train.get("steps", 1000)
    if train.get("minutes") is not None or not isinstance(steps, int):
        return WARMUP
    return min(WARMUP, -(-steps // 10))


def describe_start(job: Job) -> str:
    """A sentence about where a run starts from; empty for new weights."""
    recipe, optim = job.recipe, job.recipe.optim
    if not recipe.model.source:
        return ""
    drawn = f"{', '.join(job.drawn)} new" if job.drawn else "nothing new"
    lora = recipe.train.lora
    how = f"LoRA of rank {lora.rank}, " if lora is not None else ""
    how += f"{optim.name}, lr {optim.lr:g}, {optim.schedule.kind}, {optim.warmup} steps of warm-up"
    return f"starts from {recipe.model.source}: {drawn}; {how} (--set optim...)"
