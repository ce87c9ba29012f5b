"""From a name to a run: reads a recipe, opens its folder, and steps.

for step in ch.train("shakespeare"): ...
for step in ch.train("my.txt", out="runs/mine", **{"train.minutes": 5}): ...
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.fast.compile import available
from clearhead.measure.hardware import read_processor
from clearhead.recipes import recipe_names, recipe_text
from clearhead.training.average import LastConfig
from clearhead.training.budget import fit_budget
from clearhead.training.curves import Curves
from clearhead.training.events import Evaluated, Say, Step, silent
from clearhead.training.folder import RunFolder
from clearhead.training.guess import guess_recipe
from clearhead.training.job import Job, prepare
from clearhead.training.loop import Trainer
from clearhead.training.machine import pick_device, settle_machine, takes_compiled
from clearhead.training.recipe import Recipe
from clearhead.training.room import check_precision, check_room
from clearhead.training.tune import describe_start, settle
from clearhead.training.world import World, own_device, restarted


def read_recipe(what: str | Path | Mapping[str, Any], changes: Mapping[str, Any] = {}) -> Recipe:
    """A recipe by its name, from a YAML file, from tables, or made for a data file."""
    if isinstance(what, Mapping):
        return Recipe.from_dict(settle(what, changes))
    name, path = str(what), Path(what).expanduser()
    if path.suffix in (".yaml", ".yml"):
        require(path.is_file(), f"There is no recipe {path}.")
        return Recipe.from_dict(settle(_parsed(path.read_text("utf-8"), name), changes), path.stem)
    if name in recipe_names():
        return Recipe.from_dict(settle(_parsed(recipe_text(name), name), changes), name)
    try:
        return guess_recipe(name, changes)
    except ClearheadError as error:
        near = did_you_mean(name, recipe_names())
        there = any(Path(part).expanduser().exists() for part in (name, *name.split(",")))
        if there or not near:
            raise
        raise ClearheadError(f'There is no recipe and no file "{name}".{near}') from error


class _Loader(yaml.SafeLoader):
    """Plain data; 3e-4 is a number too, which YAML 1.1 takes for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ClearheadError(f"{name} is no YAML: {error}") from error
    require(isinstance(data, dict), f"{name} is no recipe: it has no sections.")
    return data


def open_run(
    recipe: Recipe | None,
    folder: RunFolder | None,
    resume: bool = False,
    say: Say = silent,
    steps: int | None = None,
) -> Trainer:
    """A run that is ready to step: a new one of a recipe, or the one of a folder taken up again.

    Everything that can be wrong is found here, before anything is written. `steps` makes a run that
    is taken up again longer.
    """
    if resume or recipe is None:
        assert folder is not None
        recipe = folder.read_recipe()
    device = own_device(pick_device(recipe.train.machine))
    check_precision(recipe.train.machine, device)
    world = World.join(device)
    again = folder is not None and folder.begun and restarted(folder.launch)
    if world.agree(again) and not resume:  # in all processes, or in none
        resume = True
        say("torchrun started this run again: it goes on.")
    given = recipe

    def begin() -> Job:
        recipe = _settled(given, folder, resume, world.first, steps)
        _set_threads(recipe, resume)
        job = prepare(recipe, folder.tokenizer() if folder is not None and resume else None)
        check_room(job, device, world.size)
        return job

    job = world.in_turn(begin)
    job = settle_arithmetic(job, device, world, resume)
    if resume:
        assert folder is not None
        if world.first:
            folder.keep_tokenizer(job.model.tokenizer)
        trainer = Trainer(job, folder)
        if not trainer.resume(say):
            say("There is no whole checkpoint: the run starts from its beginning.")
        _lengthen(trainer, steps)
        return trainer
    job, said = fit_budget(job)
    for sentence in filter(None, (describe_start(job), said, _long_warmup(job.recipe))):
        say(sentence)
    if folder is not None:
        tokenizer = job.model.tokenizer
        world.in_turn(lambda: folder.start(job.recipe, tokenizer) if world.first else None)
    trainer = Trainer(job, folder)
    if recipe.train.minutes is not None and world.size == 1:
        trainer.deadline = 60 * recipe.train.minutes
    return trainer


def settle_arithmetic(job: Job, device: torch.device, world: World, resume: bool = False) -> Job:
    """The job with its arithmetic decided, in all processes as in the first."""
    train, machine = job.recipe.train, job.recipe.train.machine
    lost = not (takes_compiled(machine, device) and available())  # begun on another machine
    if resume and (machine.products == "auto" or lost):  # or before there was a choice
        machine = dataclasses.replace(machine, products="torch")
    if world.first:
        machine = settle_machine(machine, device, job.model.net)
    own = world.told(int(machine.products == "compiled"))
    machine = dataclasses.replace(machine, products="compiled" if own else "torch")
    recipe = dataclasses.replace(job.recipe, train=dataclasses.replace(train, machine=machine))
    return dataclasses.replace(job, recipe=recipe)


def _long_warmup(recipe: Recipe) -> str:
    """A sentence about a rate that rises until the end; empty where it does not."""
    warmup, steps = recipe.optim.warmup, recipe.train.steps
    if warmup < steps:
        return ""
    return (
        f"The rate rises over {warmup} steps, and the run has {steps}: it never comes to "
        f"{recipe.optim.lr:g} (--set optim.warmup={max(1, steps // 10)})"
    )


def _settled(
    recipe: Recipe, folder: RunFolder | None, resume: bool, first: bool, steps: int | None
) -> Recipe:
    """The recipe that is trained; the first process looks whether the folder may be written to."""
    if folder is not None and resume:
        if first:
            folder.lock()
        recipe = folder.read_recipe()
        recipe = recipe if steps is None else recipe.with_steps(steps)
    elif folder is not None and first:
        folder.refuse_used()
    _check_weights(recipe, folder)
    return recipe


def _check_weights(recipe: Recipe, folder: RunFolder | None) -> None:
    """Refuse to promise weights that could not be given in the end."""
    train = recipe.train
    last = isinstance(train.average, LastConfig)
    require(
        folder is not None or (train.patience is None and not last),
        f"{'train.average last' if last else 'train.patience'} gives weights of earlier steps, "
        "which are kept in a run's folder: name one (out=), or leave it away.",
    )
    require(
        train.patience is None or not last,
        "train.patience gives the best weights and train.average last the mean of the last ones: "
        "leave one of them away.",
    )


def _set_threads(recipe: Recipe, resume: bool) -> None:
    """As many as asked for, or as can run at a time: a container may grant less than it shows."""
    threads, usable = recipe.train.machine.threads, read_processor().usable
    if threads is not None and resume:  # it may have begun on a larger machine
        threads = min(threads, usable)
    require(
        threads is None or 1 <= threads <= usable,
        f"train.machine.threads is {threads}, and {usable} can run at a time here: threads that "
        f"wait for each other are many times slower. Set {usable} or fewer, or leave it away.",
    )
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = min(torch.get_num_threads(), usable)
    if threads is not None:
        torch.set_num_threads(threads)


def _lengthen(trainer: Trainer, steps: int | None) -> None:
    """Write down that a run has another number of steps than it began with."""
    assert trainer.folder is not None
    require(
        steps is None or steps >= trainer.done,
        f"{trainer.folder.path} is at step {trainer.done} already: train.steps can only be more.",
    )
    if steps is not None and trainer.world.first:
        trainer.folder.write_recipe(trainer.recipe)


def drawn(trainer: Trainer) -> Iterator[Step]:
    """The steps of a run, while a picture of its curves is kept up to date in its folder."""
    curves = Curves(trainer.folder) if trainer.folder is not None and trainer.world.first else None
    for step in trainer.steps():
        if curves is not None and any(isinstance(event, Evaluated) for event in step.events):
            curves.update()
        yield step
    if curves is not None:
        curves.update(last=True)


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path | None = None,
    resume: bool = False,
    **changes: Any,
) -> Generator[Step, None, Any]:
    """Train as a recipe says, step by step; what `return`s at the end is the model.

    `recipe` is a name (`clearhead recipes`), a YAML file, tables, or a data file. With `out` the
    run has a folder: checkpoints, figures, and the model in `out`/model; `resume` goes on with it.
    """
    read = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, changes)
    trainer = open_run(read, None if out is None else RunFolder(out), resume)
    yield from drawn(trainer)
    return None if trainer.interrupted else trainer.finish()
