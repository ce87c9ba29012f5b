"""Fill the masks of a text: the likeliest tokens behind each [MASK].

clearhead fill MODEL "The capital of [MASK] is Paris." Without texts, and without --file, standard
input is read, a text a line.
"""

from __future__ import annotations

import time
import unicodedata
from dataclasses import asdict, dataclass

from clearhead.cli.texts import TextArgs


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead fill` takes."""

    best: int = 5
    """How many tokens a mask, the likeliest first."""


def run(args: Args) -> None:
    """Load, fill, print."""
    from clearhead.cli.models import open_reader
    from clearhead.cli.notices import notices
    from clearhead.cli.texts import read_texts, say_json, say_speed

    texts = read_texts(args.texts, args.file)
    model = open_reader(args.model)
    begun = time.perf_counter()
    with notices():
        for text in texts:
            found = model.fill(text, best=args.best)
            masks = found if isinstance(found[0], list) else [found]
            for number, candidates in enumerate(masks, 1):
                if args.json:
                    say_json(text=text, mask=number, candidates=[asdict(one) for one in candidates])
                    continue
                if len(masks) > 1 or len(texts) > 1:
                    print(f"{_visible(text)}  [{number}]")
                for one in candidates:
                    name = _visible(one.token).strip() or repr(one.token)  # a blank is in quotes
                    print(f"{one.probability:.3f}  {name:<16} {_visible(one.text)}", flush=True)
    if args.stats:
        say_speed(len(texts), time.perf_counter() - begun)


def _visible(text: str) -> str:
    """The text on one line: a newline as \\n, and so every other control character."""
    hidden = ("Cc", "Zl", "Zp")
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in hidden else c
        for c in text
    )
