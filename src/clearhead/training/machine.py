"""How a run's arithmetic is done on this machine: device, precision, threads, recomputation."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from clearhead.errors import require
from clearhead.layers.stack import Stack
from clearhead.training.recipe import MachineConfig

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(config: MachineConfig) -> torch.device:
    """The device asked for; "auto" is a GPU where there is one."""
    name = config.device
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    known = ("cpu", "cuda", "mps")
    require(
        device is not None and device.type in known,
        f'train.machine.device is "{name}"; it may be auto, cpu, cuda or mps.',
    )
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    assert device is not None
    require(here[device.type], f"This machine, or this build of PyTorch, has no {device.type}.")
    return device


def autocast(config: MachineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass."""
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=TYPES[config.precision])


def loss_scaler(config: MachineConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """fp16 has so small a range that gradients are scaled up; no other type needs it."""
    return torch.amp.GradScaler(device.type) if config.precision == "fp16" else None


def recompute_blocks(net: nn.Module) -> None:
    """Keep only what enters each block; its inside is computed again in the backward pass."""
    for stack in net.modules():
        if isinstance(stack, Stack):
            for block in stack.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
