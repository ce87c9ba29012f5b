"""Write a model with its weights in fewer bits: bf16, int8 or int4.

clearhead quantise runs/shakespeare shakespeare-int8 --to int8. What it writes is a model's folder
like any other, for running on a CPU and not for training. With --data the loss on a text is
measured before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

if TYPE_CHECKING:
    from clearhead.model import Model

MOST = 200  # pieces of a text that are measured


@dataclass(frozen=True)
class Args:
    """What `clearhead quantise` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A run's folder, a model's folder or file, or a hub name."""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """The folder to write."""
    to: Literal["bf16", "int8", "int4"] = "int8"
    """16, 8 or 5 bits a weight."""
    data: Path | None = None
    """A text file on which the loss is measured, before and after."""
    overwrite: bool = False
    """Replace what OUT holds already."""


def run(args: Args) -> None:
    """Load, pack, measure, write."""
    from clearhead.paths import check_there

    check_there(args.model)
    from rich.console import Console

    from clearhead.cli.models import open_model
    from clearhead.fast.compile import told
    from clearhead.weights.folder import WEIGHTS, refuse_full

    refuse_full(args.out, args.overwrite)
    text = None if args.data is None else _read(args.data)
    console = Console(stderr=True)
    with told(lambda said: console.print(said, style="dim")):
        model = open_model(args.model)
        if text is not None:
            _check_reads(model)
        with console.status(f"rounding to {args.to}"):
            small = model.fast(args.to)
            small.save(args.out)
        before, after = _bytes(model), (Path(args.out) / WEIGHTS).stat().st_size
        print(_sizes(before, after))
        if text is not None:
            with console.status("measuring"):
                print(_losses(_loss(model, text), _loss(small, text)))
    use = "generate" if small.config.shape in ("decoder", "encoder-decoder") else "embed"
    print(f"{small} written to {args.out}. Run it: clearhead {use} {args.out} ...")


def _sizes(before: int, after: int) -> str:
    from clearhead.cli.units import size

    return f"weights  {size(before)} -> {size(after)} ({after / before:.1%})"


def _losses(before: float, after: float) -> str:
    return f"loss     {before:.4f} -> {after:.4f} nats a token ({after / before - 1:+.2%})"


def _bytes(model: Model) -> int:
    from clearhead.fast.form import held_bytes

    return held_bytes(model.net)


def _read(path: Path) -> str:
    from clearhead.errors import ClearheadError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClearheadError(f"{path} cannot be read as a text ({error}).") from error


def _check_reads(model: Model) -> None:
    """Refuse a text for a model that cannot be measured on one, before anything is written."""
    from clearhead.errors import require

    require(
        model.config.shape == "decoder",
        f"--data measures how well a decoder predicts a text; this is a {model.config.shape}: "
        "leave it out, and use clearhead eval on the folder that is written.",
    )
    require(model.tokenizer is not None, "This model has no tokenizer, so --data means nothing.")


def _loss(model: Model, text: str) -> float:
    """The mean loss of a text's tokens in pieces of the model's length."""
    import torch

    from clearhead.errors import require
    from clearhead.generate.score import score_tokens

    ids = model.tokenizer.encode(text)  # type: ignore[union-attr]
    length = min(model.config.max_len, 512)
    pieces = [ids[start : start + length + 1] for start in range(0, len(ids), length)][:MOST]
    found = [score_tokens(model.net, piece, length) for piece in pieces if len(piece) > 1]
    require(bool(found), "The text of --data has no two tokens to tell a loss by.")
    return -float(torch.cat(found).mean())
