"""The run-time form on a GPU: every block is one compiled piece.

There a step of decoding waits for the many small kernels that Python starts one by one; torch's
compiler makes few of them. Blocks are what it is given because they hold no book-keeping: where the
tokens stand and which slots of the cache they take is settled before the first of them, so all
blocks of a network, and all lengths of a text, share the code of one. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.layers.block import Block
from clearhead.models.base import Net

GPU = "cuda"  # the devices on which torch's compiler is at home


def compile_blocks(net: Net, backend: str | Callable[..., Any] = "inductor") -> Net:
    """Let torch compile every block when it is first called, which takes a minute."""
    for module in net.modules():
        if isinstance(module, Block):
            module.compile(backend=backend, dynamic=True)
    return net
