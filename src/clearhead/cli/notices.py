"""What is said beside a command's output: what is waited for, and what a call warns of."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Aside:
    """Notices, which must not fall into the middle of a line."""

    waiting: bool = False
    """Whether a line is being written."""
    held: list[str] = field(default_factory=list)
    """What is to be said behind it."""


@contextmanager
def notices() -> Iterator[Aside]:
    """Within it notices (a full context, a product being compiled) go to standard error."""
    from clearhead.fast.compile import told

    aside = Aside()

    def say(text: str) -> None:
        if aside.waiting:
            aside.held.append(text)
        else:
            print(f"clearhead: {text}", file=sys.stderr)

    with warnings.catch_warnings(), told(say):
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: say(str(message))
        try:
            yield aside
        finally:
            aside.waiting = False
            for text in aside.held:
                say(text)
