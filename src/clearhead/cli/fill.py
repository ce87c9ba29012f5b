"""Fill the masks of a text: the likeliest tokens behind each [MASK].

clearhead fill MODEL "The capital of [MASK] is Paris." Without texts, and without --file, standard
input is read, a text a line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from clearhead.cli.texts import TextArgs


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead fill` takes."""

    best: int = 5
    """How many tokens a mask, the likeliest first."""


def run(args: Args) -> None:
    """Load, fill, print."""
    from clearhead.cli.models import open_model
    from clearhead.cli.texts import read_texts, say_json

    texts = read_texts(args.texts, args.file)
    model = open_model(args.model)
    for text in texts:
        found = model.fill(text, best=args.best)
        masks = found if isinstance(found[0], list) else [found]
        for number, candidates in enumerate(masks, 1):
            if args.json:
                say_json(text=text, mask=number, candidates=[asdict(one) for one in candidates])
                continue
            if len(masks) > 1 or len(texts) > 1:
                print(f"{text}  [{number}]")
            for one in candidates:
                print(f"{one.probability:.3f}  {one.token:<16} {one.text}", flush=True)
