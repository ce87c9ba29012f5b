"""Tag words: every word of a sentence with its label.

clearhead tag runs/tag "Ann lives in Paris". Without texts, and without --file, standard input is
read, a sentence a line, its words parted by blanks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from clearhead.cli.texts import TextArgs


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead tag` takes."""


def run(args: Args) -> None:
    """Load, tag, print."""
    from clearhead.cli.models import open_reader
    from clearhead.cli.notices import notices
    from clearhead.cli.texts import read_texts, say_json, say_speed

    texts = read_texts(args.texts, args.file)
    model = open_reader(args.model)
    begun = time.perf_counter()
    with notices():
        for text in texts:
            found = model.tag(text)
            if args.json:
                say_json(
                    text=text, words=[word for word, _ in found], tags=[tag for _, tag in found]
                )
            else:
                print(" ".join(f"{word}/{tag}" for word, tag in found), flush=True)
    if args.stats:
        say_speed(len(texts), time.perf_counter() - begun)
