"""Weights on large pages of memory.

A processor that reads 500 MB a token looks up where each page of it is: at 4 KB that is 120,000
times, and in a virtual machine each costs two searches. With pages of 2 MB memory is read 1.1 to
1.4 times as quickly there. Linux gives them to whoever asks, before the memory is first used; so
weights are copied once into memory for which that was done. What is mapped from a file stays
there, since the copy would be a second one. Where there are no such pages nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from bisect import bisect
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor

from clearhead.memory import trim

PAGE = 2**21
CHUNK = 2**26  # bytes that are asked for at a time
SMALLEST = 2**18  # bytes of a tensor: a smaller one stays where it is
LINE = 64
HUGE = 14  # madvise(2)
LINUX = sys.platform.startswith("linux")
_chunks: WeakSet[mmap.mmap] = WeakSet()


class LargePages:
    """Memory that is filled with one tensor after the other."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor there; the tensor itself, where that is of no use."""
        if not _useful(tensor):
            return tensor
        with torch.inference_mode(False), torch.no_grad():
            place = self._place(tensor.nbytes, tensor.dtype)
            return tensor if place is None else place.view(tensor.shape).copy_(tensor.detach())

    def room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape there, whose numbers are still to come; elsewhere, where that is
        of no use.
        """
        size = math.prod(shape) * dtype.itemsize
        place = self._place(size, dtype) if LINUX and size >= SMALLEST else None
        return torch.empty(shape, dtype=dtype, device="cpu") if place is None else place.view(shape)

    def _place(self, size: int, dtype: torch.dtype) -> Tensor | None:
        """Room for so many bytes."""
        if self._chunk is None or self._used + size > len(self._chunk):
            trim()  # what was copied may be gone
            self._chunk = _new_chunk(max(CHUNK, size))
            if self._chunk is None:
                return None
            self._used = -_address(self._chunk) % PAGE
        start = self._used
        self._used += -(-size // LINE) * LINE
        count = size // dtype.itemsize
        return torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=start)


def _useful(tensor: Tensor) -> bool:
    if not LINUX or not tensor.is_cpu or tensor.nbytes < SMALLEST:
        return False
    address = tensor.data_ptr()
    return not any(0 <= address - _address(chunk) < len(chunk) for chunk in list(_chunks))


def _new_chunk(size: int) -> mmap.mmap | None:
    """Memory for so many bytes from the first large page in it on; None: the system has none."""
    size = -(-size // PAGE) * PAGE + PAGE
    try:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        chunk.madvise(HUGE)
    except (OSError, ValueError, OverflowError):  # no room, or a system without them
        return None
    _chunks.add(chunk)
    return chunk


def _address(chunk: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(chunk))


class Files:
    """Which memory is that of files, now."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.last: list[int] = []
        with contextlib.suppress(OSError):
            maps = Path("/proc/self/maps").read_text(errors="surrogateescape")
            for line in maps.splitlines():
                ends, _, _, _, _, *path = line.split(maxsplit=5)
                if path and not path[0].startswith("["):
                    first, last = (int(end, 16) for end in ends.split("-"))
                    self.first.append(first)
                    self.last.append(last)

    def have(self, tensor: Tensor) -> bool:
        """Whether the tensor's numbers stand in one."""
        address = tensor.data_ptr()
        i = bisect(self.first, address) - 1
        return i >= 0 and address < self.last[i]
