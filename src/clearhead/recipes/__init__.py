"""The recipes that come with Clearhead, one YAML file each.

The first lines of each say its command, its minutes on two CPU cores, and the figure to expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from itertools import takewhile


@dataclass(frozen=True)
class Header:
    """What the first lines of a recipe say."""

    command: str = ""
    """How it is run."""
    minutes: str = ""
    """How long that takes."""
    figure: str = ""
    """What it reaches."""
    about: str = ""
    """What it is."""


def recipe_names() -> list[str]:
    """Their names, in order."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The YAML of one."""
    return (resources.files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")


def recipe_header(name: str) -> Header:
    """Three lines of comment, an empty one, and what the recipe is about."""
    lines = takewhile(lambda line: line.startswith("#"), recipe_text(name).splitlines())
    words = [line.removeprefix("#").strip() for line in lines]
    head = list(takewhile(bool, words))
    about = " ".join(takewhile(bool, words[len(head) + 1 :]))
    command, minutes, figure = (*head, "", "", "")[:3]
    return Header(command, minutes, figure, about)
