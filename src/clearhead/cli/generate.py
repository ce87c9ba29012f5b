"""Write on: the text that follows a prompt, as it comes.

clearhead generate runs/shakespeare "ROMEO:" --temperature 0.8. An encoder-decoder writes what it
makes of the prompt. Without a prompt, and without --file, standard input is read as one text. Every
other setting of docs/generating.md is taken with --set: no_repeat_ngram=3 beams=4 top_p=0.9.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.errors import ClearheadError, require

if TYPE_CHECKING:
    from clearhead.generate.write import Written
    from clearhead.model import Model


@dataclass(frozen=True)
class Args:
    """What `clearhead generate` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A run's folder, a model's folder or file, or a hub name."""
    prompt: Annotated[Positional[str | None], arg(metavar="PROMPT", help_behavior_hint="")] = None
    """What to start from; none: standard input."""
    file: str | None = None
    """A file with the prompt."""
    max_new_tokens: int | None = None
    """How many tokens at most; none: what the model came with, or 200."""
    temperature: float = 0.8
    """0 takes the best token each time; above, tokens are drawn."""
    top_k: int | None = None
    """Draw from the k best only, 0: from all; none: what the model came with, or 0."""
    top_p: float | None = None
    """Draw from the smallest set with this probability; none: what the model came with, or 1."""
    seed: int | None = None
    """For texts that can be repeated."""
    n: int = 1
    """How many texts."""
    set: Annotated[
        UseAppendAction[tuple[tuple[str, ...], ...]],
        arg(metavar="KEY=VALUE ...", help_behavior_hint=""),
    ] = ()
    """Other settings: stop=["."] repetition_penalty=1.2 beams=4 regex=[0-9]+ schema=FILE."""
    json: bool = False
    """Print an object a text, with tokens and their log-probabilities."""
    stats: bool = False
    """Say at the end how fast it was, and beside which limit of the memory."""


def run(args: Args) -> None:
    """Load and write."""
    from clearhead.cli.models import open_model
    from clearhead.cli.texts import read_whole, say_json

    require(
        args.prompt is None or args.file is None,
        "The prompt was given twice: as an argument, and with --file.",
    )
    require(args.n >= 1, f"--n is how many texts to write, 1 or more, not {args.n}.")
    settings = _settings(args)
    model = open_model(args.model)
    prompt = read_whole(args.file) if args.prompt is None else args.prompt
    with _aside() as aside:
        if args.json or args.n > 1:
            found = model.generate([prompt], **settings | {"n": args.n, "details": True})[0]
            texts = found if args.n > 1 else [found]
            for number, text in enumerate(texts, 1):
                if args.json:
                    say_json(prompt=prompt, **_record(text))
                else:
                    print(f"--- {number}\n{_whole(model, prompt, text.text)}")
        else:
            texts = [_stream(model, prompt, settings, aside)]
    if args.stats:
        for text in texts:
            print(_speed(model, text), file=sys.stderr)


def _settings(args: Args) -> dict[str, Any]:
    """What was said on the command line, under the names of `generate`."""
    from clearhead.cli.overrides import read_changes

    words = [word for group in args.set for word in group]
    raw = [word for word in words if word.startswith("regex=")]  # its brackets are no YAML
    own = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    said = {name: getattr(args, name) for name in own}
    settings = {name: value for name, value in said.items() if value is not None}
    settings |= read_changes(word for word in words if word not in raw)
    if raw:
        settings["regex"] = raw[-1].removeprefix("regex=")
    if isinstance(settings.get("schema"), str):
        settings["schema"] = _read_schema(settings["schema"])
    if settings.get("beams") or settings.get("contrast") is not None:
        settings["temperature"] = 0.0  # these choose by themselves
    return settings


def _read_schema(path: str) -> Any:
    import json
    from pathlib import Path

    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ClearheadError(f"{path} is no file with a JSON schema: {error}.") from error


def _stream(model: Model, prompt: str, settings: dict[str, Any], aside: Aside) -> Written:
    """Print a text as it comes; notices behind its first piece wait for its end."""
    pieces, before = model.stream(prompt, **settings), _whole(model, prompt, "")
    while True:
        try:
            piece = next(pieces)
            aside.waiting = True
            print(before + piece, end="", flush=True)
            before = ""
        except StopIteration as end:
            print(before)
            return end.value


def _whole(model: Model, prompt: str, text: str) -> str:
    """The text behind its prompt; what an encoder-decoder writes stands alone."""
    return text if model.config.shape == "encoder-decoder" else prompt + text


def _record(text: Written) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(text) | {"tokens_a_second": text.tokens_a_second}


def _speed(model: Model, text: Written) -> str:
    """How fast it was, and how fast reading every weight once a token would be."""
    from clearhead.fast.form import form_of, packed_tensors
    from clearhead.measure.roofs import measure

    said = f"{text.prompt_tokens} tokens of prompt, {len(text.ids)} new: "
    if text.tokens_a_second == 0:  # a single token, or a search, which gives all at once
        return said + f"after {text.first:.2f} s"
    said += f"the first after {text.first:.2f} s, then {text.tokens_a_second:.1f} tokens/s"
    roofs = measure(("bandwidth",)).roofs
    if roofs is None or roofs.bandwidth is None:
        return said
    packed = packed_tensors(model.net).values()
    held = sum(tensor.nbytes for tensor in (*model.net.parameters(), *packed))
    roof = roofs.bandwidth * 1e9 / held
    form = form_of(model.net) or "fp32"
    return (
        f"{said}: {text.tokens_a_second / roof:.0%} of what the memory allows ({form}, "
        f"{held / 1e6:.0f} MB a token, {roofs.bandwidth:.0f} GB/s)"
    )


@dataclass
class Aside:
    """Notices, which must not fall into the middle of a line."""

    waiting: bool = False
    """Whether a line is being written."""
    held: list[str] = field(default_factory=list)
    """What is to be said behind it."""


@contextmanager
def _aside() -> Iterator[Aside]:
    """Within it notices (a full context, a product being compiled) go to standard error."""
    import warnings

    from clearhead.fast.compile import told

    aside = Aside()

    def say(text: str) -> None:
        if aside.waiting:
            aside.held.append(text)
        else:
            print(f"clearhead: {text}", file=sys.stderr)

    with warnings.catch_warnings(), told(say):
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_: say(str(message))
        try:
            yield aside
        finally:
            aside.waiting = False
            for text in aside.held:
                say(text)
