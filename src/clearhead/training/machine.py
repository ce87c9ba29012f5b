"""How a run's arithmetic is done on this machine: device, precision, threads, recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from clearhead.errors import require
from clearhead.fast.compile import MISSING, available
from clearhead.fast.products import any_large
from clearhead.layers.stack import Stack
from clearhead.measure.choices import quicker_products
from clearhead.measure.machine import best_device
from clearhead.measure.roofs import find_devices
from clearhead.training.recipe import MachineConfig

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(config: MachineConfig) -> torch.device:
    """The device asked for; "auto" is the one that `clearhead doctor` advises."""
    name = config.device
    if name == "auto":  # without its number: each process has its own
        return torch.device(best_device(find_devices()).partition(":")[0])
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


def settle_machine(config: MachineConfig, device: torch.device, net: nn.Module) -> MachineConfig:
    """The same with all that was left open decided for this machine and this network.

    What is decided goes into the recipe of the run, so that taking it up again decides nothing.
    """
    products, can = config.products, takes_compiled(config, device)
    require(
        can or products != "compiled",
        "train.machine.products=compiled is for fp32 on a CPU, without torch.compile: leave it "
        "away.",
    )
    require(products != "compiled" or available(), MISSING)
    if products == "auto":
        products = quicker_products() if can and any_large(net) else "torch"
    return dataclasses.replace(config, products=products)


def takes_compiled(config: MachineConfig, device: torch.device) -> bool:
    """Whether products can be compiled ones."""
    return device.type == "cpu" and config.precision == "fp32" and not config.compile


def describe_choice(config: MachineConfig, device: torch.device) -> str:
    """The type of numbers and who multiplies them, with the reason."""
    reason = "as set"
    if config.precision == "fp32":
        reason = "exact; clearhead doctor measures whether bf16 is faster"
        if device.type == "cuda" and torch.cuda.is_bf16_supported():
            reason = "exact; bf16 is faster on this GPU"
    products = ", compiled products" if config.products == "compiled" else ""
    compiled = "torch.compile first" if config.compile else "no torch.compile"
    if not config.compile and device.type == "cpu":
        compiled += ": it gains little"
    return f"{config.precision} ({reason}){products}, {compiled}"


def loss_scaler(config: MachineConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """fp16 has so small a range that gradients are scaled up; no other type needs it."""
    return torch.amp.GradScaler(device.type) if config.precision == "fp16" else None


def recompute_blocks(net: nn.Module) -> None:
    """Keep only what enters each block; its inside is computed again in the backward pass."""
    for stack in net.modules():
        if isinstance(stack, Stack):
            for block in stack.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
