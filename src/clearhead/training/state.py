"""The state of a run on disk and back: what `loop.Trainer` holds, as a checkpoint's files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clearhead.errors import require
from clearhead.model import Model
from clearhead.training.average import LastConfig, mean_weights
from clearhead.training.checkpoint import (
    EMA_FILE,
    OPTIM,
    STATE,
    fault,
    optimiser_parameter,
    optimiser_tensors,
    read_state,
    regular,
    restore_optimisers,
)
from clearhead.training.lora import merged_copy
from clearhead.training.sharded import (
    SHARDS,
    is_shared,
    read_shards,
    read_whole,
    shard_sizes,
    shared_like,
    whole,
    write_shards,
)
from clearhead.training.world import World
from clearhead.weights.folder import WEIGHTS, assemble

if TYPE_CHECKING:
    from clearhead.training.job import Job
    from clearhead.training.loop import Trainer


def check_processes(job: Job, world: World) -> None:
    """Refuse what several processes cannot do, before the first step."""
    if world.size == 1:
        return
    require(
        job.objective.ask != "contrast",
        "The contrast of pairs compares every text of a batch with every other, so a batch cannot "
        f"be cut into the rows of {world.size} processes: train with one process, or with scores.",
    )
    world.check_same(job.mark, "The data and the tokeniser")


def write_state(trainer: Trainer, folder: Path) -> None:
    """Write everything a run is into an empty folder: the first process alone, or each its rows.

    A checkpoint is a model's folder as well, unless the model has additions that are not merged or
    is shared out among processes.
    """
    if is_shared(trainer.net):
        write_shards(folder / SHARDS, _all_tensors(trainer))
    elif trainer.world.first:
        _write_files(trainer, folder)
    if trainer.world.first:
        (folder / STATE).write_text(json.dumps(_numbers(trainer)) + "\n")


def _write_files(trainer: Trainer, folder: Path) -> None:
    if trainer.recipe.train.lora is None:
        inner = folder / "inner"
        trainer.job.model.save(inner)
        for path in inner.iterdir():
            path.rename(folder / path.name)
        inner.rmdir()
    else:
        save_file(_tensors(trainer.net), folder / WEIGHTS)
    save_file(optimiser_tensors(trainer.optimisers), folder / OPTIM)
    if trainer.ema is not None:
        save_file(trainer.ema.weights, folder / EMA_FILE)


def _all_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Every tensor of a run under one name."""
    ema = trainer.ema.weights if trainer.ema is not None else {}
    optim = optimiser_tensors(trainer.optimisers)
    return {
        **{f"model.{name}": tensor for name, tensor in _tensors(trainer.net).items()},
        **{f"optim.{name}": tensor for name, tensor in optim.items()},
        **{f"ema.{name}": tensor for name, tensor in ema.items()},
    }


def _numbers(trainer: Trainer) -> dict[str, Any]:
    """Everything that is no tensor."""
    return {
        "step": trainer.done,
        "steps": trainer.recipe.train.steps,
        "data": trainer.job.mark,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "best": trainer.best if math.isfinite(trainer.best) else None,  # JSON has no infinity
        "waited": trainer.waited,
        "guard": trainer.guard.state(),
        "ema_updates": trainer.ema.updates if trainer.ema is not None else 0,
        "scaler": trainer.scaler.state_dict() if trainer.scaler is not None else {},
    }


def read_into(trainer: Trainer, folder: Path) -> None:
    """Take up the state that `write_state` wrote, with whatever number of processes it did."""
    state = read_state(folder)
    require(
        state["data"] == trainer.job.mark,
        f"{folder} belongs to a run on other data, or with another tokeniser: what it read has "
        "changed since, so it cannot be taken up. Start a new run.",
    )
    if (folder / SHARDS).is_dir():
        _read_pieces(trainer, folder)
    else:
        _read_files(trainer, folder)
    if trainer.ema is not None:
        trainer.ema.updates = int(state["ema_updates"])
    if trainer.scaler is not None:
        trainer.scaler.load_state_dict(state["scaler"])
    trainer.done, trainer.tokens = int(state["step"]), int(state["tokens"])
    trainer.seconds = float(state["seconds"])
    trainer.best = math.inf if state["best"] is None else float(state["best"])
    # A run that was made longer begins to wait anew, however often it is killed before it saves.
    longer = trainer.recipe.train.steps > int(state["steps"])
    trainer.waited = 0 if longer else int(state["waited"])
    trainer.guard.restore(state["guard"])


def _read_files(trainer: Trainer, folder: Path) -> None:
    put_weights(trainer.net, load_file(folder / WEIGHTS), folder)
    _put_optimisers(trainer, load_file(folder / OPTIM))
    if trainer.ema is not None:
        put_weights(trainer.ema.weights, load_file(folder / EMA_FILE), folder)


def _put_optimisers(trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
    """Give the optimisers what they remember; of shared parameters each process its rows."""
    shared = {}
    for key, tensor in tensors.items():
        parameter = optimiser_parameter(trainer.optimisers, key)
        same = tensor.shape == parameter.shape
        shared[key] = shared_like(tensor, parameter) if same else tensor
    restore_optimisers(trainer.optimisers, shared)


def _read_pieces(trainer: Trainer, folder: Path) -> None:
    """The same from pieces: every process reads the rows that it holds."""
    sizes = shard_sizes(folder / SHARDS)
    own = _tensors(trainer.net)
    held = {name.removeprefix("model."): size for name, size in sizes.items()}
    _check_shapes(own, {name: size for name, size in held.items() if name in own}, folder)
    wanted = {f"model.{name}": tensor for name, tensor in own.items()}
    optim = {}
    for key in (name.removeprefix("optim.") for name in sizes if name.startswith("optim.")):
        parameter, size = optimiser_parameter(trainer.optimisers, key), sizes[f"optim.{key}"]
        same = size == parameter.shape
        optim[key] = torch.zeros_like(parameter) if same else torch.zeros(size)
    wanted |= {f"optim.{key}": tensor for key, tensor in optim.items()}
    if trainer.ema is not None:
        wanted |= {f"ema.{name}": tensor for name, tensor in trainer.ema.weights.items()}
    read_shards(folder / SHARDS, wanted)
    numbers = {key: t if "step" not in key else t.reshape(()) for key, t in optim.items()}
    restore_optimisers(trainer.optimisers, numbers)


@torch.no_grad()
def put_weights(
    net: nn.Module | Mapping[str, Tensor], tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Copy tensors into the parameters of the same names; all must be there, of the same shapes."""
    own = net if isinstance(net, Mapping) else _tensors(net)
    _check_shapes(own, {name: tensor.shape for name, tensor in tensors.items()}, folder)
    for name, parameter in own.items():
        parameter.copy_(shared_like(tensors[name], parameter))


def _check_shapes(own: Mapping[str, Tensor], sizes: Mapping[str, torch.Size], folder: Path) -> None:
    wrong = [name for name, tensor in own.items() if sizes.get(name) != tensor.shape]
    require(
        not wrong and sizes.keys() == own.keys(),
        f"{folder} is a checkpoint of another model ({', '.join(wrong[:3]) or 'more weights'}).",
    )


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def _weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, whole, however it was written."""
    if (folder / SHARDS).is_dir():
        return read_whole(folder / SHARDS, "model.")
    return load_file(folder / WEIGHTS)


def chosen_weights(trainer: Trainer) -> Mapping[str, Tensor] | None:
    """The weights a run gives in the end: the best (of the averaged ones, where there are such), or
    averaged; None: the last.
    """
    train, folder = trainer.recipe.train, trainer.folder
    if folder is not None and train.patience is not None and folder.best.is_dir():
        return load_file(folder.best / WEIGHTS)
    if trainer.ema is not None:
        return trainer.ema.weights
    if folder is not None and isinstance(train.average, LastConfig):
        due = regular(folder.checkpoints, train.checkpoint_every, train.steps)
        whole_ones = (path for path in due if fault(path) is None)
        return mean_weights(map(_weights_in, islice(whole_ones, train.average.count)))
    return None


def model_with(trainer: Trainer, weights: Mapping[str, Tensor] | None) -> Model:
    """A model of its own with these weights (None: those of now), additions merged."""
    model, net = trainer.job.model, trainer.net
    if trainer.recipe.train.lora is not None:
        return _like(model, merged_copy(net, weights))
    taken = weights or _tensors(net)
    copied = {name: whole(tensor).detach().cpu().clone() for name, tensor in taken.items()}
    return _like(model, assemble(model.config, copied))


def _like(model: Model, net: Any) -> Model:
    return Model(net, model.config, model.tokenizer, model.companions)
