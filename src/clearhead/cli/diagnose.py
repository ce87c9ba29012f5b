"""What is wrong with a run, and what to do about it.

The checklist that people run by hand: gradients and updates by layer, collapsed heads, spikes,
over- and underfitting, leaks from the future, shifted labels, padding, context, tokens. The run
stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.training.diagnose import Diagnosis

STYLES = {"bad": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}


@dataclass(frozen=True)
class Args:
    """What `clearhead diagnose` takes."""

    run: Annotated[Positional[str], arg(metavar="RUN", help_behavior_hint="")]
    """The folder of a run, finished or under way."""
    json: bool = False
    """Print everything as JSON, with the figures of each layer and head."""


def run(args: Args) -> None:
    """Check, then print what was found."""
    import sys

    from clearhead.cli.console import PlainConsole
    from clearhead.training.diagnose import diagnose

    def say(message: str) -> None:
        print(message, file=sys.stderr)

    console = PlainConsole()
    if args.json:
        import json

        print(json.dumps(diagnose(args.run, say).to_dict(), indent=1, allow_nan=False))
        return
    if console.is_terminal:
        with console.status("looking at gradients, attention, data and figures ..."):
            diagnosis = diagnose(args.run, say)
    else:
        diagnosis = diagnose(args.run, say)
    _print(console, diagnosis)


def _print(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(_title(diagnosis), style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in diagnosis.findings:
        style = STYLES[finding.level]
        table.add_row(Text(finding.level, style=style), finding.check, Text(finding.text))
        if finding.suggestion:
            table.add_row("", "", Text(finding.suggestion, style="green"))
    console.print(table)
    if not any(finding.worrying for finding in diagnosis.findings):
        console.print("\nNothing here needs mending.", style="green")


def _title(diagnosis: Diagnosis) -> str:
    counts = dict.fromkeys(STYLES, 0)
    for finding in diagnosis.findings:
        counts[finding.level] += 1
    said = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    return f"{diagnosis.run}  step {diagnosis.step:,} of {diagnosis.total:,}: {said}"
