"""The recipes that come along, and what they reach.

With a name: that recipe's YAML, to be copied and changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from clearhead.errors import ClearheadError, did_you_mean


@dataclass(frozen=True)
class Args:
    """What `clearhead recipes` takes."""

    name: Annotated[Positional[str], arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """Print this one: clearhead recipes shakespeare > my.yaml."""
    json: bool = False
    """Print the list as JSON."""


def run(args: Args) -> None:
    """Print one, or the list."""
    from clearhead.recipes import recipe_header, recipe_names, recipe_text

    names = recipe_names()
    if args.name:
        if args.name not in names:
            near = did_you_mean(args.name, names)
            raise ClearheadError(f'There is no recipe "{args.name}".{near} All: clearhead recipes')
        print(recipe_text(args.name), end="")
        return
    headers = {name: recipe_header(name) for name in names}
    if args.json:
        import json

        rows = [{"name": name, **asdict(header)} for name, header in headers.items()]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    from rich.table import Table

    from clearhead.cli.console import table_console

    console = table_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("recipe", style="cyan", no_wrap=True)
    for heading in ("on two cores", "reaches", "is"):
        table.add_column(heading)
    for name, header in headers.items():
        minutes = header.minutes.removesuffix(" on two cores")
        table.add_row(name, minutes, header.figure, header.about)
    console.print(table)
    console.print("\nclearhead train NAME       run one", style="dim")
    console.print("clearhead recipes NAME     its YAML, to be copied and changed", style="dim")
