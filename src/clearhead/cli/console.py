"""Where tables are printed: as wide as the terminal is, and as they are in a file or a pipe."""

from __future__ import annotations

import os

from rich.console import Console

PIPE = 160  # columns where nobody sets a number


def table_console() -> Console:
    """A console that prints text as it is; no column is cut where there is no edge."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE
    return console
