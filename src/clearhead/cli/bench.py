"""Measure this machine's roofs, and a model against them.

clearhead bench measures the memory and matrix products. clearhead bench MODEL (a run, a folder, or
a preset such as gpt2, which gets random weights) measures how fast it reads and writes in each
form of its weights, and transformers beside it, where that is installed and opens the model.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from clearhead.errors import ClearheadError, require

if TYPE_CHECKING:
    from clearhead.measure.roofs import Roofs
    from clearhead.measure.speed import Speed, Work
    from clearhead.model import Model


@dataclass(frozen=True)
class Args:
    """What `clearhead bench` takes."""

    model: Annotated[Positional[str | None], arg(metavar="[MODEL]", help_behavior_hint="")] = None
    """A run's folder, a model's folder or file, a hub name or a preset; none: the machine alone."""
    forms: tuple[str, ...] = ("fp32", "bf16", "int8", "int4")
    """Forms of the weights; "plain" is PyTorch's own product."""
    prompt: int = 32
    """Tokens that are read at once."""
    new: int = 64
    """Tokens that are written one by one."""
    rows: int = 1
    """Sequences at a time."""
    rounds: int = 3
    """The best of so many counts."""
    json: bool = False
    """Print everything as JSON."""


def run(args: Args) -> None:
    """Measure and print."""
    from rich.console import Console

    from clearhead.measure.roofs import measure
    from clearhead.measure.speed import Work

    for name in ("prompt", "new", "rows", "rounds"):
        number = getattr(args, name)
        require(number >= 1, f"--{name} must be 1 or more, not {number}.")
    known = ("plain", "fp32", "bf16", "int8", "int4")
    for form in args.forms:
        require(form in known, f'There is no form "{form}". There are: {", ".join(known)}.')
    console = Console(stderr=True)
    model = None if args.model is None else _open(args.model)
    with console.status("measuring memory and matrix products ..."):
        report = measure(("bandwidth", "gemm"))
    roofs = report.roofs
    require(roofs is not None, f"The machine could not be measured: {report.reason}.")
    assert roofs is not None
    work = Work(args.prompt, args.new, args.rows)
    speeds: list[Speed] = []
    if model is not None:
        _check_room(model, work)
        with console.status("measuring the model ..."):
            speeds = _measure(model, args, work, roofs)
    if args.json:
        import json

        found: dict[str, Any] = {"roofs": asdict(roofs), "work": asdict(work)}
        print(json.dumps(found | {"speeds": [asdict(speed) for speed in speeds]}, indent=1))
        return
    _print(roofs, work, speeds)


def _open(name: str) -> Model:
    """A model by its place, or a preset with random weights."""
    from clearhead.api import build, load, presets

    return build(name, seed=0) if name in presets() else load(name)


def _check_room(model: Model, work: Work) -> None:
    long = work.prompt + (work.new if model.config.shape == "decoder" else 0)
    most = model.config.max_len
    require(
        max(long, work.new) <= most,
        f"{work.prompt} tokens to read and {work.new} to write are more than the model's {most} "
        "positions: set --prompt and --new.",
    )


def _measure(model: Model, args: Args, work: Work, roofs: Roofs) -> list[Speed]:
    from clearhead.fast.form import form_of, held_bytes, step_bytes
    from clearhead.measure import speed

    writes = model.config.shape in ("decoder", "encoder-decoder")
    require(
        writes or model.config.shape == "encoder",
        f"A {model.config.shape} is not measured: bench takes models of text.",
    )
    make = speed.decoder if writes else speed.encoder
    size = model.config.vocab_size
    contenders, held, reads = {}, {}, {}
    own = form_of(model.net)  # packed weights have the one form
    for form in args.forms if own is None else (own,):
        net = model.net if form == "plain" else model.fast(form).net  # type: ignore[arg-type]
        contenders[form] = make(net, size)
        held[form], reads[form] = held_bytes(net), partial(step_bytes, net)
    with tempfile.TemporaryDirectory() as folder:
        if model.config.shape == "decoder" and _export(model, f"{folder}/peer"):
            contenders["transformers"] = speed.transformers_decoder(f"{folder}/peer", size)
            held["transformers"] = sum(p.nbytes for p in model.net.parameters())
        return speed.race(contenders, held, work, args.rounds, roofs.bandwidth, reads)


def _export(model: Model, folder: str) -> bool:
    """Whether transformers is there and the model could be written for it."""
    import importlib.util

    from clearhead.api import export

    if importlib.util.find_spec("transformers") is None:
        return False
    try:
        export(model, folder, to="hf")
    except ClearheadError:  # a family that transformers does not have, or packed weights
        return False
    return True


def _print(roofs: Roofs, work: Work, speeds: list[Speed]) -> None:
    from rich.table import Table

    from clearhead.cli.console import table_console
    from clearhead.cli.units import size
    from clearhead.measure.speed import ABOVE

    console = table_console()
    memory = "failed" if roofs.bandwidth is None else f"{roofs.bandwidth:.1f} GB/s"
    gemm = "failed" if roofs.gemm is None else f"{roofs.gemm:.0f} GFLOP/s"
    console.print(f"memory read {memory}, fp32 matrix product {gemm}")
    if not speeds:
        return
    rows = "one sequence" if work.rows == 1 else f"{work.rows} sequences"
    console.print(f"{rows}: {work.prompt} tokens read, {work.new} written, tokens/s\n")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("form", no_wrap=True)
    for heading in ("weights", "read", "written", "of the memory's roof"):
        table.add_column(heading, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            speed.name,
            size(speed.held),
            f"{speed.read:,.0f}",
            "-" if speed.written is None else f"{speed.written:,.1f}",
            "-" if speed.share is None else f"{speed.share:.0%}",
        )
    console.print(table)
    if any(speed.share is not None and speed.share > 1 for speed in speeds):
        console.print(f"\n({ABOVE})")
