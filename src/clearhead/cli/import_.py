"""Bring somebody else's model in: read it, say what became of every tensor, save it in our layout.

MODEL is a Hugging Face folder or hub name, a GGUF file, an official Whisper .pt or a llama2.c .bin.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Args:
    """What `clearhead import` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """What to read."""
    out: Annotated[Positional[str], arg(metavar="[OUT]", help_behavior_hint="")] = ""
    """The folder to save it to; without it nothing is written."""
    check: bool = False
    """Compare the outputs with those of transformers, if it is installed (Hugging Face folders)."""
    overwrite: bool = False
    """Replace the model that OUT holds already."""
    json: bool = False
    """Print the report as JSON."""


def run(args: Args) -> None:
    """Load, save, then print what happened. What cannot be compared is said last: by then the model
    is saved.
    """
    from clearhead.api import load
    from clearhead.errors import ClearheadError
    from clearhead.weights.folder import refuse_full

    if args.out:
        refuse_full(args.out, args.overwrite)
    model, report = load(args.model, report=True)
    if args.out:
        model.save(args.out)
    difference, fault = None, None
    if args.check:
        from clearhead.weights.check import difference_to_transformers

        try:
            difference = difference_to_transformers(model.net, model.config, args.model)
        except ClearheadError as error:
            fault = error
    said = {
        "model": repr(model),
        "saved": args.out or None,
        "became": {key: list(ours) for key, ours in report.became.items()},
        "dropped": report.dropped,
        "tied": report.tied,
        "drawn": list(report.drawn),
        "notes": list(report.notes),
        "compared": difference and difference.of,
        "max_difference": difference and difference.largest,
    }
    if args.json:
        import json

        print(json.dumps(said, indent=1))
    else:
        _print(said, report)
    if fault is not None:
        raise fault


def _print(said: dict[str, Any], report: Any) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.console import PlainConsole

    console = PlainConsole()
    console.print(said["model"], style="bold")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), expand=False)
    table.add_column("", justify="right")
    table.add_column("theirs", overflow="fold")
    table.add_column("ours", overflow="fold")
    for (theirs, ours), count in folded(report.became).items():
        table.add_row(str(count), Text(theirs), Text(ours))
    for (theirs, why), count in folded({k: (v,) for k, v in report.dropped.items()}).items():
        table.add_row(str(count), Text(theirs), Text(f"dropped: {why}"), style="yellow")
    for alias, original in report.tied.items():
        table.add_row("", "", f"{alias} is {original} (tied)", style="dim")
    for name in report.drawn:
        table.add_row("", "", f"{name} is drawn anew", style="yellow")
    console.print(table)
    for note in report.notes:
        console.print(note)
    if said["compared"]:
        console.print(
            f"largest difference of {said['compared']} from transformers: "
            f"{said['max_difference']:.2e}"
        )
    if said["saved"]:
        console.print(f"saved to {said['saved']}; load it with ch.load({said['saved']!r})")


def folded(pairs: dict[str, tuple[str, ...]]) -> Counter[tuple[str, str]]:
    """The rows with layer numbers as * and weight and bias as one, each counted."""
    from clearhead.weights.convert import folded as without_layers

    def short(name: str) -> str:
        return re.sub(r"\.(weight|bias)$", "", without_layers(name))

    return Counter(
        (short(theirs), ", ".join(short(name) for name in ours)) for theirs, ours in pairs.items()
    )
