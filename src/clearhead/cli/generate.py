"""Write on: the text that follows a prompt, as it comes.

clearhead generate runs/shakespeare "ROMEO:" --temperature 0.8. The prompt is printed in front, but
not where a text has to match something (regex, schema), with --chat, and of an encoder-decoder,
which writes what it makes of the prompt. A text is printed as it comes; with --json, --chat and
several texts when it is whole, or with --json --stream in pieces. Without a prompt, and without
--file, standard input is read as one text. Every other setting of docs/generating.md is taken with
--set: no_repeat_ngram=3 beams=4 top_p=0.9.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.errors import ClearheadError, require

if TYPE_CHECKING:
    from clearhead.cli.notices import Aside
    from clearhead.generate.write import Written
    from clearhead.model import Model


DEFAULTS = {"temperature": 0.8, "n": 1}  # of the command, where nobody says otherwise


@dataclass(frozen=True)
class PromptArgs:
    """What is written by whom, and to what."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A run's folder, a model's folder or file, or a hub name."""
    prompt: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[PROMPT]", help_behavior_hint="")
    ] = ()
    """What to start from; none: standard input."""
    file: str | None = None
    """A file with the prompt."""
    chat: bool = False
    """Put the prompt to a model for chat as a user's message; the answer is printed alone."""


@dataclass(frozen=True)
class Args(PromptArgs):
    """What `clearhead generate` takes."""

    max_new_tokens: int | None = None
    """How many tokens at most; none: what the model came with, or 200."""
    temperature: float | None = None
    """0 takes the best token each time; above, tokens are drawn; none: 0.8, or 0 for a search."""
    top_k: int | None = None
    """Draw from the k best only, 0: from all; none: what the model came with, or 0."""
    top_p: float | None = None
    """Draw from the smallest set with this probability; none: what the model came with, or 1."""
    seed: int | None = None
    """For texts that can be repeated."""
    n: int | None = None
    """How many texts; none: 1."""
    set: Annotated[
        UseAppendAction[tuple[tuple[str, ...], ...]],
        arg(metavar="KEY=VALUE ...", help_behavior_hint=""),
    ] = ()
    """Other settings: stop=["."] beams=4 draft=MODEL regex=[0-9]+ schema=FILE."""
    json: bool = False
    """Print an object a text, with tokens and their log-probabilities; null: not known."""
    stream: bool = False
    """With --json: print each piece as it comes, as an object, and then the whole text's."""
    stats: bool = False
    """Say at the end how fast it was, and beside which limit of the memory."""


def run(args: Args) -> None:
    """Load and write."""
    from clearhead.cli.models import open_reader
    from clearhead.cli.notices import notices
    from clearhead.cli.texts import read_whole

    require(
        len(args.prompt) <= 1,
        "The prompt is one text, and several words were given: put quotes around it, "
        f'"{" ".join(args.prompt)}".',
    )
    require(
        not args.prompt or args.file is None,
        "The prompt was given twice: as an argument, and with --file.",
    )
    settings = _settings(args)
    require(
        not args.stream or (settings["n"] == 1 and not args.chat),
        "--stream prints a single text as it comes: leave it out, or --chat and --n.",
    )
    model = open_reader(args.model)
    prompt = args.prompt[0] if args.prompt else read_whole(args.file)
    with notices() as aside:
        if args.stream and args.json:
            texts = [_stream_json(model, prompt, settings)]
        elif args.json or args.chat or settings["n"] > 1:
            texts = _at_once(model, prompt, settings, args)
        else:
            texts = [_stream(model, prompt, settings, aside)]
    for number, text in enumerate(texts, 1):
        name = "The text" if len(texts) == 1 else f"Text {number}"
        for note in _notes(model, text, settings, args.chat):
            print(f"clearhead: {name} {note}", file=sys.stderr)
        if args.stats:
            print(_speed(model, text), file=sys.stderr)


def _settings(args: Args) -> dict[str, Any]:
    """What was said on the command line, under the names of `generate`."""
    from clearhead.cli.overrides import read_changes

    words = [word for group in args.set for word in group]
    raw = [word for word in words if word.startswith("regex=")]  # its brackets are no YAML
    own = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "n")
    said = {name: getattr(args, name) for name in own}
    settings = {name: value for name, value in said.items() if value is not None}
    more = read_changes(word for word in words if word not in raw)
    twice = ", ".join(sorted(settings.keys() & more.keys()))
    require(not twice, f"{twice}: given twice, as an option and with --set. Say it once.")
    settings |= more
    if raw:
        settings["regex"] = raw[-1].removeprefix("regex=")
    if settings.get("beams") or settings.get("contrast") is not None:
        settings.setdefault("temperature", 0.0)  # these choose by themselves
    settings = DEFAULTS | settings
    n = settings["n"]
    require(type(n) is int and n >= 1, f"n is how many texts to write, 1 or more, not {n!r}.")
    return _opened(settings)


def _opened(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with what is in the files that they name."""
    from clearhead.cli.models import open_model

    require(
        "constraint" not in settings,
        "constraint is a function, so it can be given in Python only: here say regex=... or "
        "schema=FILE.",
    )
    if isinstance(settings.get("schema"), str):
        settings["schema"] = _read_schema(settings["schema"])
    if settings.get("draft") is not None:
        name = settings["draft"]
        require(isinstance(name, str), f"draft names a smaller model, draft=MODEL, not {name!r}.")
        settings["draft"] = open_model(name)
    return settings


def _read_schema(path: str) -> Any:
    import json
    from pathlib import Path

    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClearheadError(f"{path} is no file with a JSON schema: {error}.") from error


def _at_once(model: Model, prompt: str, settings: dict[str, Any], args: Args) -> list[Written]:
    """Print texts that are there when all of them are whole."""
    from clearhead.cli.texts import say_json

    settings = settings | {"details": True}
    if args.chat:
        found = model.chat([{"role": "user", "content": prompt}], **settings)
    else:
        found = model.generate(prompt, **settings)
    texts = [found] if settings["n"] == 1 else found
    before = "" if args.chat else _before(model, prompt, settings)
    for number, text in enumerate(texts, 1):
        if args.json:
            say_json(prompt=prompt, **_record(text))
        else:
            heading = "" if settings["n"] == 1 else f"--- {number}\n"
            print(f"{heading}{before}{text.text}")
    return texts


def _stream(model: Model, prompt: str, settings: dict[str, Any], aside: Aside) -> Written:
    """Print a text as it comes; notices behind its first piece wait for its end."""
    pieces, before = model.stream(prompt, **settings), _before(model, prompt, settings)
    while True:
        try:
            piece = next(pieces)
            aside.waiting = True
            print(before + piece, end="", flush=True)
            before = ""
        except StopIteration as end:
            print(before)
            return end.value


def _stream_json(model: Model, prompt: str, settings: dict[str, Any]) -> Written:
    """Print the pieces of a text as objects, and then the whole one."""
    from clearhead.cli.texts import say_json

    pieces = model.stream(prompt, **settings)
    while True:
        try:
            say_json(piece=next(pieces))
        except StopIteration as end:
            say_json(prompt=prompt, **_record(end.value))
            return end.value


def _before(model: Model, prompt: str, settings: dict[str, Any]) -> str:
    """What is printed in front of a text: its prompt. What an encoder-decoder writes stands alone,
    and so does what has to match: with the prompt it would be no JSON any more.
    """
    alone = model.config.shape == "encoder-decoder" or _constraint(settings) is not None
    return "" if alone else prompt


def _constraint(settings: dict[str, Any]) -> str | None:
    """What the text has to match, by the name of the setting."""
    return next((name for name in ("regex", "schema") if settings.get(name) is not None), None)


def _notes(model: Any, text: Written, settings: dict[str, Any], chat: bool) -> Iterator[str]:
    """What a reader would not see in the text itself."""
    if not text.ids:
        hint = ": the end came at once."
        if model.tokenizer.target.chat_template is not None and not chat:
            hint += " This model was trained for chat: --chat puts the prompt to it as a message."
        yield "has not one new token" + hint
    kind = _constraint(settings)
    if kind is None or text.end not in ("limit", "positions"):
        return
    from clearhead.generate.constrain import Constraint

    one = getattr(Constraint, kind)(settings[kind], model.tokenizer.target)
    for id in text.ids:
        one.advance(id)
    if not one.accepts:
        where, mend = {
            "limit": (f"limit of {len(text.ids)} tokens", "give it more with --max-new-tokens"),
            "positions": ("model's last position", "take a model with a longer context"),
        }[text.end]
        yield f"ends at the {where} and does not match the {kind} yet: {mend}."


def _record(text: Written) -> dict[str, Any]:
    """All that is known of a text; what is not is null."""
    from dataclasses import asdict

    known = asdict(text) | {"tokens_a_second": text.tokens_a_second}
    for name in ("log_probabilities", "best", "tokens_a_second"):
        known[name] = known[name] or None
    return known


def _speed(model: Model, text: Written) -> str:
    """How fast it was, and how fast reading the weights once a token would be."""
    from clearhead.fast.form import form_of, step_bytes
    from clearhead.measure.roofs import measure
    from clearhead.measure.speed import ABOVE

    said = f"{text.prompt_tokens} tokens of prompt, {len(text.ids)} new: "
    if text.tokens_a_second == 0:  # a single token, or a search, which gives all at once
        return said + f"after {text.first:.2f} s"
    said += f"the first after {text.first:.2f} s, then {text.tokens_a_second:.1f} tokens/s"
    roofs = measure(("bandwidth",)).roofs
    if roofs is None or roofs.bandwidth is None:
        return said
    read = step_bytes(model._quick(model.net))
    roof = roofs.bandwidth * 1e9 / read
    form = form_of(model.net) or "fp32"
    over = f"; {ABOVE}" if text.tokens_a_second > roof else ""
    return (
        f"{said}: {text.tokens_a_second / roof:.0%} of what the memory allows ({form}, "
        f"{read / 1e6:.0f} MB a token, {roofs.bandwidth:.0f} GB/s{over})"
    )
