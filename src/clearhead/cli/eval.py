"""Measure a model on data: loss, perplexity, BLEU, accuracy, F1, ... with confidence intervals.

A run knows its own data: `clearhead eval runs/shakespeare`. Any model can be measured on a file or
a named set: `clearhead eval runs/mine other.txt`, `clearhead eval MODEL multi30k --split test`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from clearhead.training.evaluate import Score


@dataclass(frozen=True)
class Args:
    """What `clearhead eval` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A run's folder, a model's folder or file, or a hub name."""
    data: Annotated[Positional[str | None], arg(metavar="DATA", help_behavior_hint="")] = None
    """A file, a folder, parallel files ("a.en,a.de") or a named set; none: the run's own."""
    split: Literal["valid", "test", "train"] | None = None
    """Which part; none: what the recipe says, or all of a file."""
    beams: int | None = None
    """Beams, where texts are written; none: what the recipe says, or 1."""
    length_penalty: float | None = None
    """Of beam search: above 1 favours long texts."""
    limit: int | None = None
    """Only so many records; of running text, characters."""
    objective: str | None = None
    """What to measure, where it cannot be guessed: '{kind: seq2seq, source: en, target: de}'."""
    json: bool = False
    """Print the figures as JSON."""


def run(args: Args) -> None:
    """Load, measure, print."""
    import json
    from pathlib import Path

    import yaml
    from rich.console import Console
    from rich.table import Table

    from clearhead.cli.console import PlainConsole
    from clearhead.cli.models import open_reader
    from clearhead.data.corpus import open_corpus
    from clearhead.data.objectives import read_objective
    from clearhead.errors import require
    from clearhead.training.evaluate import How, evaluate, objective_for, with_labels
    from clearhead.training.folder import RECIPE, RunFolder
    from clearhead.training.recipe import EvalConfig

    folder = Path(args.model)
    recipe = RunFolder(folder).read_recipe() if (folder / RECIPE).is_file() else None
    require(
        args.data is not None or recipe is not None or folder.exists(),
        f"There is no run {args.model}: `clearhead runs` lists them.",
    )
    require(
        args.data is not None or recipe is not None,
        f"{args.model} is no run, so it has no data of its own: clearhead eval MODEL DATA",
    )
    model = open_reader(args.model)
    if args.data is not None:
        corpus = open_corpus(args.data, split=0)
        split = args.split or ("test" if "test" in corpus.splits else "train")
    else:
        assert recipe is not None
        d = recipe.data
        corpus = open_corpus(d.source, d.valid, d.test, d.split, d.limit)
        split = args.split or recipe.eval.split
    if args.objective is not None:
        asked = read_objective(yaml.safe_load(args.objective), "--objective")
        objective = with_labels(asked, model).prepare(corpus)
    elif recipe is not None:
        objective = with_labels(recipe.data.objective, model).prepare(corpus)
    else:
        objective = objective_for(model, corpus)
    own = recipe.eval if recipe else EvalConfig()
    how = How(
        beams=own.beams if args.beams is None else args.beams,
        length_penalty=own.length_penalty if args.length_penalty is None else args.length_penalty,
        limit=args.limit,
        length=recipe.data.length if recipe else None,
    )
    with Console(stderr=True).status(f"measuring on {corpus.name}, {split}"):
        found = evaluate(model, objective, corpus, split, how)
    if args.json:
        print(json.dumps({name: _plain(score) for name, score in found.items()}, indent=1))
        return
    table = Table(title=f"{args.model} on {corpus.name}, {split}", title_justify="left")
    for heading in ("figure", "value", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for name, score in found.items():
        table.add_row(name.replace("_", " "), f"{score.value:.4f}", _range(score))
    console = PlainConsole()
    console.print(table)
    for name, score in found.items():
        if score.note:
            console.print(f"{name}: {score.note}", soft_wrap=True)


def _range(score: Score) -> str:
    between = score.interval
    return f"{between.low:.4f} to {between.high:.4f}" if between else ""


def _plain(score: Score) -> dict[str, Any]:
    between = score.interval
    interval = [between.low, between.high] if between else None
    return {"value": score.value, "interval": interval, "note": score.note}
