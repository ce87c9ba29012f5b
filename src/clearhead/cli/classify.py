"""Tell texts apart: the label of each, with its probability.

clearhead classify runs/sst2 "a fine film". A model that judges two texts takes the other one with
--second, or two columns in a line, parted by a tab. Without texts, and without --file, standard
input is read, a text a line.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from clearhead.cli.texts import TextArgs
from clearhead.errors import require


@dataclass(frozen=True)
class Args(TextArgs):
    """What `clearhead classify` takes."""

    second: str | None = None
    """The other text, where labels are about two; a run that learned single texts takes none."""
    best: int = 1
    """How many labels to print, the likeliest first."""


def run(args: Args) -> None:
    """Load, classify, print."""
    from clearhead.cli.models import open_reader
    from clearhead.cli.texts import chunks, read_texts, say_json, say_speed

    require(args.best >= 1, f"--best is how many labels are printed: 1 or more, not {args.best}.")
    texts = read_texts(args.texts, args.file)
    asked = _asked(texts, args)
    model = open_reader(args.model)
    begun = time.perf_counter()
    for some in chunks(list(zip(texts, asked, strict=True))):
        answers = model.classify([each for _, each in some])
        for (text, _), found in zip(some, answers, strict=True):
            if args.json:
                say_json(text=text, labels=found)
                continue
            best = list(found.items())[: args.best]
            said = "  ".join(f"{label} {value:.3f}" for label, value in best)
            print(said if len(texts) == 1 else f"{said}\t{text}", flush=True)
    if args.stats:
        say_speed(len(texts), time.perf_counter() - begun)


def _asked(texts: list[str], args: Args) -> list[str | tuple[str, str]]:
    """What is judged: texts, or pairs where there is a second text."""
    tabs = any("\t" in text for text in texts)
    single = (args.second is not None or tabs) and _learned_single_texts(args.model)
    require(
        args.second is None or not single,
        f"{args.model} learned to judge single texts (its recipe names no second one): leave "
        "--second out.",
    )
    if single:
        return list(texts)  # a tab is a character of the text like any other
    return [_pair(text, args.second) for text in texts]


def _pair(text: str, second: str | None) -> str | tuple[str, str]:
    if second is not None:
        return text, second
    first, tab, after = text.partition("\t")
    return (first, after) if tab else text


def _learned_single_texts(source: str) -> bool:
    """Whether that is known: a run says it in its recipe, a model without its run does not."""
    from clearhead.data.labelled import Classification
    from clearhead.training.folder import RunFolder

    run = RunFolder(Path(source).expanduser())
    objective = run.read_recipe().data.objective if run.begun else None
    return isinstance(objective, Classification) and objective.second is None
