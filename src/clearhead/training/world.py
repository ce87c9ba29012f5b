"""The processes of a run: one, or as many as torchrun started.

Each process takes its rows of every batch, so the run is the same run whatever their number: the
gradient is summed over all rows and divided by how many targets the whole step asked for. Every
decision (a step is skipped, the run ends, which checkpoint is taken up) is made from numbers that
all processes have, or is asked of all; a process that went its own way would leave the others
waiting for ever.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clearhead.errors import ClearheadError, require
from clearhead.training.sharded import is_shared

T = TypeVar("T")


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process, where torchrun started one for each."""
    if device.type != "cuda" or device.index is not None or "LOCAL_RANK" not in os.environ:
        return device
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own


def launch() -> str | None:
    """What torchrun calls this start of all processes (--rdzv-id); None where nobody said so."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name


def restarted(began: str | None = None) -> bool:
    """Whether torchrun started the processes again, because one of them had died or machines joined
    or left; that is not counted, but the `launch` that a run `began` in is the one of now.
    """
    died = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return died or (began is not None and began == launch())


@dataclass(frozen=True)
class World:
    """Which process this is."""

    rank: int = 0
    """Its number."""
    size: int = 1
    """How many there are."""
    local: int = 0
    """Its number on its machine."""

    @staticmethod
    def join(device: torch.device) -> World:
        """The processes that torchrun started, or this one alone."""
        if "WORLD_SIZE" not in os.environ or not dist.is_available():
            return World()
        if not dist.is_initialized():
            # Votes and barriers go by the CPU, so that none of them waits for a GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            # The others wait while the first reads and tokenises, however much there is.
            dist.init_process_group(backend, timeout=timedelta(hours=12))
            atexit.register(dist.destroy_process_group)
        return World(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def copied(self, net: nn.Module, device: torch.device) -> nn.Module:
        """The network to call: itself, or wrapped so that gradients are averaged."""
        if self.size == 1 or is_shared(net):
            return net
        where = [device.index] if device.index is not None else None
        # Buffers are tables that every process computes alike: nobody needs to send them.
        tables = [name for name, _ in net.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, tables)
        return DistributedDataParallel(net, device_ids=where)

    @contextmanager
    def quiet(self, forward: nn.Module) -> Iterator[None]:
        """Within it gradients are kept and not exchanged yet (accumulation)."""
        if isinstance(forward, DistributedDataParallel):
            with forward.no_sync():
                yield
        elif is_shared(forward):
            exchange: Any = forward.set_requires_gradient_sync
            exchange(False)
            try:
                yield
            finally:
                exchange(True)
        else:
            yield

    def mean(self, value: Tensor) -> float:
        """The mean of a number over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return float(value) / self.size

    def total(self, value: float) -> float:
        """The sum of a number over all processes."""
        if self.size == 1:
            return value
        voice = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(voice)
        return float(voice)

    def agree(self, yes: bool) -> bool:
        """Whether any process says yes."""
        if self.size == 1:
            return yes
        voice = torch.tensor(float(yes))
        dist.all_reduce(voice, op=dist.ReduceOp.MAX)
        return bool(voice > 0)

    def told(self, number: int) -> int:
        """What the first process says."""
        if self.size == 1:
            return number
        voice = torch.tensor(number)
        dist.broadcast(voice, 0)
        return int(voice)

    def check_same(self, mark: str, what: str) -> None:
        """Refuse to go on where something is not the same in all processes."""
        number = int.from_bytes(hashlib.sha256(mark.encode()).digest()[:7], "big")
        require(
            not self.agree(self.told(number) != number),
            f"{what} must be the same in all {self.size} processes, and are not: give every "
            "machine the same files.",
        )

    def in_turn(self, make: Callable[[], T]) -> T:
        """What `make` gives: in the first process first, so that the others find its caches, then
        in the first process of each machine, then in all others. If one refuses, all do.
        """
        turn = 0 if self.first else 1 if self.local == 0 else 2
        made: list[T] = []
        wrong: ClearheadError | None = None
        for now in range(3 if self.size > 1 else 1):
            if now == turn:
                try:
                    made.append(make())
                except ClearheadError as error:
                    wrong = error
            if self.agree(wrong is not None):
                raise wrong or ClearheadError("Another process cannot begin, and says why.")
        return made[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()
