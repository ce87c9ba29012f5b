"""Translate texts, or whatever else an encoder-decoder makes of them: a line of output a text.

clearhead translate runs/multi30k-en-de "A dog runs." Without texts, and without --file, standard
input is read, a text a line. Texts are worked on in batches of similar length; the order stays.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from clearhead.cli.texts import TextArgs


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead translate` takes."""

    beams: int | None = None
    """Translations that are followed at once; none: what the model came with, or 5."""
    length_penalty: float | None = None
    """Above 1 favours long texts; none: what the model came with, or 1."""


def run(args: Args) -> None:
    """Load, translate, print."""
    from clearhead.cli.models import open_reader
    from clearhead.cli.texts import chunks, read_texts, say_json

    texts = read_texts(args.texts, args.file)
    model = open_reader(args.model)
    known = model.companions.get("generation_config.json", {})
    beams = (known.get("num_beams") or 5) if args.beams is None else args.beams
    begun, written = time.perf_counter(), 0
    for some in chunks(texts):
        found = model.translate(list(some), beams=beams, length_penalty=args.length_penalty)
        written += sum(len(ids) for ids in model.tokenizer.target.encode_batch(found))
        for text, translation in zip(some, found, strict=True):
            if args.json:
                say_json(source=text, translation=translation)
            else:
                print(translation.replace("\n", " "), flush=True)
    if args.stats:
        took = time.perf_counter() - begun
        print(
            f"{len(texts)} texts, {written} tokens, {took:.2f} s: {len(texts) / took:.1f} texts/s, "
            f"{written / took:.0f} tokens/s, {beams} beams",
            file=sys.stderr,
        )
