"""Answer a question with a piece of a text.

clearhead answer runs/answer "Where does Ann live?" --context "Ann lives in Paris." The text comes
from --context, from a file (--file), or from standard input.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from clearhead.errors import require


@dataclass(frozen=True)
class Args:
    """What `clearhead answer` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A run's folder, a model's folder or file, or a hub name."""
    question: Annotated[Positional[str], arg(metavar="QUESTION", help_behavior_hint="")]
    """What is asked."""
    context: str | None = None
    """The text that has the answer."""
    file: str | None = None
    """A file with that text."""
    json: bool = False
    """Print an object, with the place and the probability."""
    stats: bool = False
    """Say at the end how fast it was."""


def run(args: Args) -> None:
    """Load, answer, print."""
    from dataclasses import asdict

    from clearhead.cli.models import open_reader
    from clearhead.cli.notices import notices
    from clearhead.cli.texts import read_whole, say_json, say_speed

    require(
        args.context is None or args.file is None,
        "The text was given twice: with --context, and with --file.",
    )
    context = read_whole(args.file) if args.context is None else args.context
    require(bool(context.strip()), "There is no text to look for the answer in: --context TEXT.")
    model = open_reader(args.model)
    begun = time.perf_counter()
    with notices():
        found = model.answer(args.question, context)
    if args.json:
        say_json(question=args.question, **asdict(found))
    else:
        print(found.text)
    if args.stats:
        say_speed(1, time.perf_counter() - begun)
