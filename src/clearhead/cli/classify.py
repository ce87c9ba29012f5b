"""Tell texts apart: the label of each, with its probability.

clearhead classify runs/sst2 "a fine film". A model that judges two texts takes the other one with
--second, or two columns in a line, parted by a tab. Without texts, and without --file, standard
input is read, a text a line.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from clearhead.cli.texts import TextArgs
from clearhead.errors import require


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead classify` takes."""

    second: str | None = None
    """The other text, where labels are about two."""
    best: int = 1
    """How many labels to print, the likeliest first."""
    stats: bool = False
    """Say at the end how fast it was."""


def run(args: Args) -> None:
    """Load, classify, print."""
    from clearhead.cli.models import open_model
    from clearhead.cli.texts import chunks, read_texts, say_json

    require(args.best >= 1, f"--best is how many labels are printed: 1 or more, not {args.best}.")
    texts = read_texts(args.texts, args.file)
    model = open_model(args.model)
    begun = time.perf_counter()
    for some in chunks(texts):
        for text, found in zip(some, model.classify([_asked(t, args) for t in some]), strict=True):
            if args.json:
                say_json(text=text, labels=found)
                continue
            best = list(found.items())[: args.best]
            said = "  ".join(f"{label} {value:.3f}" for label, value in best)
            print(said if len(texts) == 1 else f"{said}\t{text}", flush=True)
    if args.stats:
        took = time.perf_counter() - begun
        print(f"{len(texts)} texts, {took:.2f} s: {len(texts) / took:.1f}/s", file=sys.stderr)


def _asked(text: str, args: Args) -> str | tuple[str, str]:
    if args.second is not None:
        return text, args.second
    first, tab, second = text.partition("\t")
    return (first, second) if tab else text
