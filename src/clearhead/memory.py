"""Memory that is given back is kept for the next step.

glibc asks the system for every large block and gives it back when it is freed. The system fills it
with zeros, page by page, at each step anew: a training step of a small model with many words spends
a quarter of its time there, and so does an encoder that reads a batch of texts. After
`keep_freed_memory` freed blocks stay with the process for the next ones; its peak may grow by a few
of the largest. It is asked for by training, by the commands, and by a model that reads or writes on
a CPU; `CLEARHEAD_RETURN_MEMORY=1` in the environment forbids it. Where there is no glibc nothing
happens.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # mallopt(3)
NEVER = 2**31 - 1


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
