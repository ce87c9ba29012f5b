"""One attention head computed with all its numbers, step by step.

Without a sentence: a worked example of the lectures. With one: a small head over its words.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from clearhead.errors import ClearheadError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from clearhead.lens.walk import Step, Walk

TABLE_COLUMNS = 12  # wider matrices are drawn, not printed: nobody reads 20 columns of digits
LABEL_CELLS, HEADING_CELLS = 14, 8  # longer words are cut with an ellipsis
SHADES = " ░▒▓█"


@dataclass(frozen=True)
class Args:
    """What `clearhead walk` takes."""

    words: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[SENTENCE]", help_behavior_hint="")
    ] = ()
    """Its words, with or without quotes; - reads them from standard input."""
    example: Annotated[int | None, arg(metavar="1..4", help_behavior_hint="(default: 1)")] = None
    """A worked example of the lectures, in place of a sentence."""
    width: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 4)")] = None
    """How many numbers a word of the sentence has: an even number."""
    seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 0)")] = None
    """Another seed makes another head for the sentence."""
    causal: bool = False
    """Let each word look only at itself and back."""
    temperature: float = 1.0
    """Divides the scores: below 1 the pattern gets sharper, above 1 flatter."""
    json: bool = False
    """Print the steps as JSON, in full precision; a masked score is null."""


def run(args: Args) -> None:
    """Work it out, then print it."""
    walk = _work_out(args)
    if args.json:
        import json

        print(json.dumps(walk.to_dict(), ensure_ascii=False, indent=1, allow_nan=False))
        return
    from clearhead.cli.console import PlainConsole

    # No markup and no highlighting: a sentence may well contain "[red]" or a number.
    _print_walk(PlainConsole(), walk)


def _work_out(args: Args) -> Walk:
    from clearhead.lens.walk import walk_sentence
    from clearhead.lens.worked import walk_example

    if args.words:
        if args.example is not None:
            raise ClearheadError("Give a sentence or --example, not both.")
        sentence = sys.stdin.read() if args.words == ("-",) else " ".join(args.words)
        return walk_sentence(
            sentence,
            width=4 if args.width is None else args.width,
            seed=0 if args.seed is None else args.seed,
            causal=args.causal,
            temperature=args.temperature,
        )
    for name in ("width", "seed"):
        if getattr(args, name) is not None:
            raise ClearheadError(
                f"--{name} belongs to a sentence, but a worked example has its own numbers. "
                f'Give a sentence (clearhead walk "the cat sat" --{name} ...) or leave it out.'
            )
    number = 1 if args.example is None else args.example
    return walk_example(number, causal=args.causal, temperature=args.temperature)


def _print_walk(console: Console, walk: Walk) -> None:
    from rich.text import Text

    console.print(Text(walk.title, style="bold"))
    shaded = False
    for number, step in enumerate(walk.steps, 1):
        console.print()
        heading = Text(f"{number}. {step.name}", style="bold cyan")
        told = not step.formula.startswith(("given", "made up"))
        formula = f" = {step.formula}" if told else f" ({step.formula})"
        console.print(heading.append(formula, style="cyan"))
        console.print(step.meaning, style="dim")
        if len(step.columns) > TABLE_COLUMNS:
            shaded = True
            _print_shades(console, step)
        else:
            _print_tables(console, step)
    console.print()
    for query, token, weight in walk.strongest():
        console.print(f"{query} looks most at {token}: {weight:.4f}")
    if shaded:
        console.print(
            "\nWide matrices were drawn as shades; all their numbers: --json", style="dim"
        )


def _print_tables(console: Console, step: Step) -> None:
    """The numbers to four decimals, in several tables where one would be too wide."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[_number(x) for x in row] for row in step.values]
    names = [_label(name, HEADING_CELLS) for name in step.columns]
    room = console.width - max(_label(row).cell_len for row in step.rows)
    # A number is at most this wide, and three blanks stand before it; rich would cut digits off.
    widest = max(len(x) for row in cells for x in row)
    per_table = max(1, room // (max(widest, *(name.cell_len for name in names)) + 3))
    for start in range(0, len(names), per_table):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
        table.add_column("", no_wrap=True)
        for name in names[start : start + per_table]:
            table.add_column(name, justify="right", no_wrap=True)
        for row, numbers in zip(step.rows, cells, strict=True):
            shown = [Text(x) for x in numbers[start : start + per_table]]
            table.add_row(_label(row), *shown)
        console.print(table)


def _print_shades(console: Console, step: Step) -> None:
    """One block a number, darker for larger, where digits would not fit."""
    widest = max(_label(row).cell_len for row in step.rows)
    cell = 2 if widest + 1 + 2 * len(step.columns) <= console.width else 1
    for row, numbers in zip(step.rows, step.values.tolist(), strict=True):
        line = _label(row)
        line.pad_right(widest + 1 - line.cell_len)
        line.append("".join(shade * cell for shade in _shades(numbers)), style="cyan")
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    legend = f"each row from its smallest (blank) to its largest ({SHADES[-1]})"
    if step.columns == step.rows:
        legend += "; the columns are the same words as the rows"
    console.print(legend, style="dim")


def _shades(numbers: list[float]) -> list[str]:
    # Row by row, as softmax works; over the whole matrix a row of many small weights would vanish.
    finite = [x for x in numbers if math.isfinite(x)]
    low, high = min(finite), max(finite)
    if low == high:
        return [SHADES[-1] if math.isfinite(x) else SHADES[0] for x in numbers]
    shares = [(x - low) / (high - low) if math.isfinite(x) else 0.0 for x in numbers]
    return [SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))] for share in shares]


def _number(x: float) -> str:
    text = f"{x:.4f}"
    return text.removeprefix("-") if float(text) == 0 else text  # no -0.0000


def _label(name: str, cells: int = LABEL_CELLS) -> Text:
    from rich.text import Text

    text = Text(name)
    text.truncate(cells, overflow="ellipsis")
    return text
