"""The runs so far, side by side.

Of several runs that are named, the settings in which they differ as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.training.summary import Summary

RUNS = "runs"
NARROW = 100  # columns of a terminal in which not all figures find room
STYLES = {
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "begun": "yellow",
    "broken": "red",
}


@dataclass(frozen=True)
class Args:
    """What `clearhead runs` takes."""

    folders: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[FOLDER ...]", help_behavior_hint="")
    ] = ()
    """Runs, or folders of runs (default: runs)."""
    json: bool = False
    """Print everything as JSON."""


def run(args: Args) -> None:
    """Read the folders, print a table."""
    from clearhead.training.summary import differences, find_runs, summarise

    places = args.folders or ((RUNS,) if Path(RUNS).is_dir() else ())
    found = [summarise(path) for path in find_runs(places)]
    several = len(found) > 1 and len(args.folders) > 0
    other = differences(found) if several else {}
    if args.json:
        import json

        print(json.dumps([asdict(one) for one in found], indent=1, ensure_ascii=False))
        return
    from clearhead.cli.console import table_console

    console = table_console()
    if not found:
        where = ", ".join(args.folders) or RUNS
        console.print(f"There are no runs in {where} yet: clearhead train shakespeare")
        return
    console.print(_table(found, console.width < NARROW))
    if several:
        console.print(f"\n{'settings that differ' if other else 'the settings are the same'}")
        if other:
            console.print(_differences(found, other))
    for one in found:
        if one.state in ("stopped", "begun"):
            console.print(f"\nto go on: clearhead train {one.path} --resume", style="dim")
            break


def _table(found: list[Summary], narrow: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.progress import duration
    from clearhead.cli.units import short

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    left_out = ("last loss", "tokens") if narrow else ()
    headings = ("run", "steps", "best valid", "last loss", "reached", "tokens", "time", "state")
    for heading in headings:
        if heading not in left_out:
            left = heading in ("run", "state")
            table.add_column(
                heading,
                justify="left" if left else "right",
                no_wrap=heading != "run",
                overflow="fold",
            )
    for one in found:
        total = "" if one.total is None else f"/{one.total:,}"
        cells: tuple[str | Text, ...] = (
            one.path,
            f"{one.done:,}{total}",
            _number(one.best),
            _number(one.loss),
            "-" if one.reached is None else f"{one.metric} {one.reached:.4f}",
            short(one.tokens),
            duration(one.seconds),
            Text(one.state, style=STYLES[one.state]),
        )
        both = zip(headings, cells, strict=True)
        table.add_row(*(cell for heading, cell in both if heading not in left_out))
    return table


def _differences(found: list[Summary], other: dict[str, list[Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("setting", style="cyan", no_wrap=True)
    for one in found:
        table.add_column(Path(one.path).name, justify="right")
    for key, values in other.items():
        table.add_row(key, *("-" if value is None else str(value) for value in values))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
