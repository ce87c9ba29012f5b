"""Texts as vectors, and how alike they are.

clearhead embed MODEL "a dog" "a puppy" "a car" prints the cosine of each pair. So it is for 2 to 20
texts; of a single one, or of more, the numbers of each vector are printed, a line a text. --json
prints the vectors, one object a line, and --out writes them as a NumPy file. Without texts, and
without --file, standard input is read, a text a line.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.texts import TextArgs
from clearhead.errors import require

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 20  # texts that are compared with each other on a screen


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead embed` takes."""

    out: str | None = None
    """Write the vectors here (.npy), one row a text."""
    overwrite: bool = False
    """Replace the file of --out if it is there already."""


def run(args: Args) -> None:
    """Load, embed, print."""
    from clearhead.cli.models import open_reader
    from clearhead.cli.texts import chunks, read_texts, say_json, say_speed

    if args.out is not None:
        _check_free(Path(args.out), args.overwrite)
    texts = read_texts(args.texts, args.file)
    model = open_reader(args.model)
    import torch

    begun, parts = time.perf_counter(), []
    for some in chunks(texts):
        vectors = model.embed(list(some))
        parts.append(vectors)
        if args.json:
            for text, vector in zip(some, vectors.tolist(), strict=True):
                say_json(text=text, vector=vector)
    took = time.perf_counter() - begun
    found = torch.cat(parts)
    if args.out is not None:
        _save(args.out, found)
        print(f"{found.shape[0]} vectors of {found.shape[1]} numbers: {args.out}", file=sys.stderr)
    elif not args.json:
        _print(texts, found)
    if args.stats:
        say_speed(len(texts), took)


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse a place that cannot be written, or is taken, before any work is done."""
    require(
        out.parent.is_dir() and (out.is_file() or not out.exists()),
        f'"{out}" cannot be written: name a file, in a folder that is there.',
    )
    from clearhead.weights.folder import refuse_full

    refuse_full(out, overwrite)


def _save(out: str, vectors: Tensor) -> None:
    import numpy as np

    from clearhead.cli.texts import whole_file

    with whole_file(out) as file:
        np.save(file, vectors.float().numpy())


def _print(texts: list[str], vectors: Tensor) -> None:
    """The cosine of every pair; of very many texts, or of one, the numbers themselves."""
    if not 2 <= len(texts) <= SHOWN:
        for vector in vectors.tolist():
            print(" ".join(f"{x:.5g}" for x in vector))
        return
    import torch.nn.functional as F
    from rich.table import Table

    from clearhead.cli.console import table_console

    unit = F.normalize(vectors.float(), dim=1)
    cosines = (unit @ unit.T).tolist()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("cosine", overflow="fold")
    for i in range(len(texts)):
        table.add_column(str(i + 1), justify="right", no_wrap=True)
    for i, (text, row) in enumerate(zip(texts, cosines, strict=True)):
        table.add_row(f"{i + 1} {text}", *(f"{x:.3f}" for x in row))
    table_console().print(table)
