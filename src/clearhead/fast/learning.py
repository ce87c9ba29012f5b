"""What a layer needs to learn, for LLVM: sums of lines, and attention there and back."""

from __future__ import annotations

from llvmlite import ir

from clearhead.fast import emit
from clearhead.fast.heads import write_backward, write_forward
from clearhead.fast.lines import write_lines
from clearhead.fast.words import Shape


def write_module(name: str, shape: Shape) -> str:
    """LLVM's text.

    <name>_lines(a, b, row, step, out, depth, rows, width, threads, 0)
    <name>_forward(facts, 0, 0, 0, 0, 0, sequences * heads, 0, threads, 0)
    <name>_backward(the same)
    """
    module = ir.Module(name)
    parts: emit.Parts = {
        "lines": (shape.tile, write_lines),
        "forward": (1, write_forward),
        "backward": (1, write_backward),
    }
    emit.write_parts(module, shape, parts)
    return str(module)
