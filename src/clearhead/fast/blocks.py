"""The run-time form on a GPU: every block is one compiled piece.

There a step of decoding waits for the many small kernels that Python starts one by one; torch's
compiler makes few of them. Blocks are what it is given because they hold no book-keeping: where the
tokens stand and which slots of the cache they take is settled before the first of them, so blocks
of a kind, and all lengths of a text, share their code. One row or several, even rows or ragged
ones, and another kind of view each have their own. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from clearhead.layers.block import Block
from clearhead.models.base import Net

GPU = "cuda"  # the devices on which torch's compiler is at home
VARIANTS = 64  # beyond so many torch would run blocks as they are, and say so in a log alone


def compile_blocks(net: Net, backend: str | Callable[..., Any] = "inductor") -> Net:
    """Let torch compile every block when it is first called."""
    limits = torch._dynamo.config  # all blocks of all networks count as one function there
    limits.recompile_limit = max(VARIANTS, limits.recompile_limit)
    for module in net.modules():
        if isinstance(module, Block):
            module.compile(backend=backend, dynamic=True)
    return net
