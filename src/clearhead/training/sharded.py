"""Weights shared out among processes (FSDP2, `fully_shard`), and checkpoints in pieces.

Each block, and then what is left of the network, is one group: gathered when its forward or
backward begins, given back when it ends. Of every parameter each process holds some rows, and of
what the optimiser remembers the same rows (Rajbhandari et al. 2020, stage 3; Zhao et al. 2023).

    step-N/shards/   one safetensors file a process, written by torch.distributed.checkpoint

Such a checkpoint may be read by another number of processes, and an ordinary one by processes that
share the weights: a piece says in its file which rows it holds.

PyTorch's modules for all this are imported where they are used: one process needs none of them, and
they take as long to import as the rest of Clearhead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from clearhead.errors import require
from clearhead.layers.stack import Stack

if TYPE_CHECKING:
    from clearhead.training.recipe import TrainConfig

SHARDS = "shards"


def share_out(net: nn.Module, train: TrainConfig) -> None:
    """Share a network's weights out among all processes; call it before optimisers are made."""
    require(
        train.lora is None,
        "train.lora has little to share out: leave train.machine.shard away (the additions are "
        "thin, and copies of the frozen weights need no optimiser).",
    )
    require(
        train.machine.precision != "fp16",
        "train.machine.precision fp16 scales losses by what one process sees, so it does not go "
        "with train.machine.shard: take bf16.",
    )
    require(
        not train.machine.compile,
        "train.machine.compile does not go with train.machine.shard: leave one of them away.",
    )
    from torch.distributed.fsdp import fully_shard

    for stack in net.modules():
        if isinstance(stack, Stack):
            for block in stack.blocks:
                fully_shard(block)
    # Given back behind every forward, so that between two calls the network has its rows only.
    fully_shard(net, reshard_after_forward=True)


def is_shared(net: nn.Module) -> bool:
    """Whether its weights are shared out."""
    return hasattr(net, "set_requires_gradient_sync")


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor that may be shared out; every process must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shared_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, shared out as another one is; nothing is exchanged, all have the whole."""
    if hasattr(tensor, "full_tensor") or not hasattr(other, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(other, DTensor)
    mesh, placements = other.device_mesh, other.placements
    return distribute_tensor(tensor.to(other.device), mesh, placements, src_data_rank=None)


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Each process writes its rows; all must call it, and it fails in all if it does in one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    flat = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(flat, storage_writer=writer)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        disk = [cause for cause in causes if isinstance(cause, OSError)]
        raise (disk or [OSError(str(causes[0] if causes else error))])[0] from error


def shard_sizes(folder: Path) -> dict[str, torch.Size]:
    """The names and shapes of what the pieces hold together."""
    import torch.distributed.checkpoint as dcp

    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.Size(entry.size) for name, entry in found.items()}  # type: ignore[union-attr]


def read_shards(folder: Path, into: dict[str, Tensor]) -> None:
    """Fill tensors, whole or shared out in whatever way, with the rows they hold."""
    import torch.distributed.checkpoint as dcp

    flat = {name: tensor.reshape(tensor.shape or (1,)) for name, tensor in into.items()}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():  # it says that this is one process's own business, which it is
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
        dcp.load(flat, storage_reader=reader, no_dist=True)


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose names start with a prefix, whole, under the names behind it."""
    sizes = {name: size for name, size in shard_sizes(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(size) for name, size in sizes.items()}
    read_shards(folder, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
