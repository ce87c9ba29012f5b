"""Where tables are printed: as wide as the terminal is, and as they are in a file or a pipe."""

from __future__ import annotations

import os

from rich.console import Console

PIPE = 160  # columns where nobody sets a number


class PlainConsole(Console):
    """Prints text as it is, without markup."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """The reader (`head`) has left: `main` ends every command in the same way."""
        raise BrokenPipeError


def table_console() -> Console:
    """One for tables: no column is cut where there is no edge."""
    console = PlainConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE
    return console
