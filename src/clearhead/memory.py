"""Freed memory is kept for the next step, and what a library does not need any more is given back.

glibc asks the system for every large block and gives it back when it is freed. The system fills it
with zeros, page by page, at each step anew: a training step of a small model with many words spends
a quarter of its time there, and so does an encoder that reads a batch of texts. After
`keep_freed_memory` freed blocks stay with the process for the next ones; its peak may grow by a few
of the largest. It is asked for by training, by the commands, and by a model that reads or writes on
a CPU; `CLEARHEAD_RETURN_MEMORY=1` in the environment forbids it. Where there is no glibc nothing
happens.

What a task leaves that is done once, such as compiling, goes back all the same: `give_back`. And
LLVM's library has 180 MB, of which the loading of some kilobytes of code reads a quarter: `let_go`
takes that from the process; the system's copy of the file stays, from which what is called again
comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
from pathlib import Path

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # mallopt(3)
NEVER = 2**31 - 1
DONT_NEED = 4  # madvise(2)


@functools.cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed; whether it will."""
    if not sys.platform.startswith("linux") or os.environ.get("CLEARHEAD_RETURN_MEMORY"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(MMAP_MAX, 0) and mallopt(TRIM_THRESHOLD, NEVER))


def give_back() -> None:
    """Give freed memory back to the system, also where it is otherwise kept; what only refers to
    itself is freed first.
    """
    gc.collect()
    trim()


def trim() -> None:
    """Give freed memory back to the system."""
    if not sys.platform.startswith("linux"):  # another C library: it decides by itself
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def let_go(library: str) -> None:
    """Take the code of a loaded library, given by how its file's name begins, from this process's
    memory until it is called again. Code alone: it is what its file has, and nobody changed it.
    """
    try:
        maps = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # another system: it stays
        return
    for line in maps:
        ends, kind, _, _, _, *path = line.split(maxsplit=5)
        if kind == "r-xp" and path and Path(path[0]).name.startswith(library):
            first, last = (int(end, 16) for end in ends.split("-"))
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONT_NEED)
