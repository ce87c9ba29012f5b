"""Train a model: from your own file, or as a recipe says.

WHAT is your own data (my.txt, a table, parallel files), for which settings are chosen; a recipe
that comes along (shakespeare; clearhead recipes lists them); a recipe of your own (my.yaml); or a
run to go on with (runs/my --resume).

Ctrl-C finishes the step, saves, and says how to go on; twice stops at once. Exit code: 0 when the
run is complete, 130 after Ctrl-C, 143 after SIGTERM, 2 for wrong use.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.errors import ClearheadError, require

if TYPE_CHECKING:
    from clearhead.cli.progress import Talk
    from clearhead.training.folder import RunFolder
    from clearhead.training.loop import Trainer
    from clearhead.training.track import Tracker

RUNS = "runs"
WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@dataclass(frozen=True)
class Args:
    """What `clearhead train` takes."""

    what: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[WHAT ...]", help_behavior_hint="")
    ] = ()
    """A recipe, a YAML file, data files (two parallel ones: train.en train.de), a named set, or,
    with --resume, a run's folder."""
    set: Annotated[
        UseAppendAction[tuple[tuple[str, ...], ...]],
        arg(metavar="KEY=VALUE ...", help_behavior_hint=""),
    ] = ()
    """Change settings: optim.lr=3e-4 train.batch=32 train.machine.threads=4."""
    out: Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where the run goes (default: runs/ and the recipe's name)."""
    resume: bool = False
    """Go on with the run of that folder, to the bit as if it had never stopped."""
    minutes: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """A budget of time: the speed is measured, and the number of steps follows."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """How many steps; with --resume, a longer run."""
    from_: Annotated[str | None, arg(name="from", metavar="MODEL", help_behavior_hint="")] = None
    """Start with the weights and the tokeniser of a model (fine-tuning)."""
    track: Annotated[
        Literal["tensorboard", "trackio"] | None,
        arg(metavar="{tensorboard,trackio}", help_behavior_hint=""),
    ] = None
    """Send the figures to one of these, too."""


def run(args: Args) -> None:
    """Open the run, step through it, say what came of it."""
    for word in args.what:
        require(
            "=" not in word or Path(word).exists(),
            f"{word} is no file. To change a setting: --set {word}",
        )
    changes = _changes(args)
    folder, recipe = _resolve(args, ",".join(args.what), changes)
    from clearhead.cli.progress import Talk

    talk = Talk(quiet=int(os.environ.get("RANK", 0)) != 0)
    if args.track is not None:
        from clearhead.training.track import check_tracker

        check_tracker(args.track)
    from clearhead.training.run import open_run

    talk.opening(folder, args.resume)
    steps = changes.get("train.steps") if args.resume else None
    trainer = open_run(recipe, folder, args.resume, talk.say, steps)
    talk.choices(trainer, args.resume)
    with _told(trainer, folder), _signals(trainer) as heard:
        tracker = _tracker(args, trainer, folder)
        _follow(trainer, talk, tracker)
        if trainer.interrupted:  # here or in another process: all end alike
            talk.stopped(trainer, go_on(folder))
            trainer.world.wait()  # torchrun ends the others as soon as one has ended
            raise SystemExit(128 + (heard[0] if heard else signal.SIGTERM))
        model = trainer.finish()
    if trainer.world.first:
        talk.finished(trainer, model)


def go_on(folder: RunFolder) -> str:
    """The command that takes a run up again."""
    return f"clearhead train {shlex.quote(str(folder.path))} --resume"


# --- what is to be run ---


def _changes(args: Args) -> dict[str, Any]:
    """All that was said on the command line about the recipe, by dotted key."""
    from clearhead.cli.overrides import read_changes

    changes = read_changes(word for group in args.set for word in group)
    if args.steps is not None:
        changes["train.steps"] = args.steps
    if args.minutes is not None:
        changes["train.minutes"] = args.minutes
    require(
        changes.get("train.steps") is None or changes.get("train.minutes") is None,
        "--steps and --minutes (train.steps, train.minutes) both say how long the run is: give one "
        "of them.",
    )
    if args.from_ is not None:
        changes = {"model": {"from": args.from_}, **changes}
    return changes


def _resolve(args: Args, what: str, changes: dict[str, Any]) -> tuple[RunFolder, Any]:
    """The folder of the run and, for a new one, its recipe."""
    inside = Path(what) if what else None
    is_run = inside is not None and inside.is_dir() and (inside / "recipe.yaml").is_file()
    if args.resume:
        return _to_resume(args, what, changes, inside if is_run else None), None
    require(
        bool(what),
        "Say what to train: clearhead train my.txt, or one of `clearhead recipes`.",
    )
    require(
        not is_run or _is_known(what),
        f"{what} is a run: go on with it (--resume), or train its recipe again "
        f"({what}/recipe.yaml).",
    )
    from clearhead.training.folder import RunFolder
    from clearhead.training.run import read_recipe

    recipe = read_recipe(what, changes)
    folder = RunFolder(args.out or Path(RUNS) / recipe.name)
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # there, another process may have begun it
        folder.refuse_used()
    return folder, recipe


def _is_known(name: str) -> bool:
    """Whether it is a recipe or a set of data, whatever folder of that name there is."""
    from clearhead.data.named import is_named
    from clearhead.recipes import recipe_names

    return name in recipe_names() or is_named(name)


def _to_resume(args: Args, what: str, changes: dict[str, Any], inside: Path | None) -> RunFolder:
    """The folder to go on with; only the number of steps may be another."""
    steps = changes.pop("train.steps", None)
    require(
        not changes,
        f"A run goes on as it began, so {', '.join(changes)} cannot be changed: only train.steps "
        "can, for a longer run. Begin another run for the rest.",
    )
    require(
        steps is None or (type(steps) is int and steps >= 1),
        f"train.steps must be 1 or more, not {steps}.",
    )
    if steps is not None:
        changes["train.steps"] = steps
    require(bool(args.out or what), "Say which run goes on: clearhead train runs/x --resume")
    from clearhead.training.folder import RECIPE, RunFolder

    path = Path(args.out) if args.out else inside or Path(RUNS) / Path(what.split(",")[0]).stem
    require((path / RECIPE).is_file(), f"There is no run in {path}: it has no {RECIPE}.")
    return RunFolder(path)


# --- stepping ---


def _follow(trainer: Trainer, talk: Talk, tracker: Tracker | None) -> None:
    from clearhead.training.run import drawn
    from clearhead.training.track import figures_of

    try:
        with talk.progress(trainer):
            for step in drawn(trainer):
                talk.step(trainer, step)
                if tracker is not None:
                    tracker.log(step.number, figures_of(step))
    finally:
        if tracker is not None:
            tracker.close()


def _tracker(args: Args, trainer: Trainer, folder: RunFolder) -> Tracker | None:
    if args.track is None or not trainer.world.first:
        return None
    from clearhead.training.track import open_tracker

    return open_tracker(args.track, folder, trainer.recipe, trainer.done)


@contextmanager
def _told(trainer: Trainer, folder: RunFolder) -> Iterator[None]:
    """An error of the disk in a sentence, with what to do about it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ClearheadError(
            f"The run stops at step {trainer.done}: {error.strerror or error} "
            f"({error.filename or folder.path}). Its last checkpoint is whole: make room, then go "
            f"on with {go_on(folder)}"
        ) from error


@contextmanager
def _signals(trainer: Trainer) -> Iterator[list[int]]:
    """Within it Ctrl-C and SIGTERM end the run after its step; what was heard is in the list."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        if heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        heard.append(number)
        word = WORDS[signal.Signals(number)]
        trainer.stop(word)
        # Not through Python's streams, which may be in the middle of a write.
        said = f"\n{word}: finishing the step and saving ... (Ctrl-C again stops at once)\n"
        if trainer.world.first:
            os.write(2, said.encode())

    before = {number: signal.signal(number, hear) for number in WORDS}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
