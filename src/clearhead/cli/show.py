"""Layers, parameters, FLOPs and memory of a model.

Predicted from its settings: no weight is read or allocated, so the largest can be looked at.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from clearhead.measure.cost import Cost, Memory, Share
    from clearhead.measure.outline import Node, Weight
    from clearhead.measure.target import Target, Weights
    from clearhead.models.family import FamilyConfig

LENGTH = 512  # unless the model's table of positions is shorter


@dataclass(frozen=True)
class Args:
    """What `clearhead show` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A preset (clearhead presets), a family, or a model's folder."""
    length: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 512, or max_len if less)")
    ] = None
    """Tokens in each sequence (of the target, where there is a source)."""
    batch: int = 8
    """Sequences in a batch."""
    source_length: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: as the target, or source_len)")
    ] = None
    """Tokens in each source of an encoder-decoder."""
    set: Annotated[
        UseAppendAction[tuple[tuple[str, ...], ...]],
        arg(metavar="KEY=VALUE ...", help_behavior_hint=""),
    ] = ()
    """Change settings first: n_layers=4 variant.window=64."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        arg(
            metavar="{float32,bfloat16,float16}",
            help_behavior_hint="(default: as in the folder, or float32)",
        ),
    ] = None
    """The type of all numbers."""
    json: bool = False
    """Print everything as JSON."""


def run(args: Args) -> None:
    """Predict, then print."""
    from clearhead.api import build
    from clearhead.measure.cost import predict
    from clearhead.measure.outline import outline
    from clearhead.measure.target import find

    target = find(args.model)
    config = _changed(target.config, args.set)
    net = build(config, device="meta").net
    cost = predict(
        net,
        batch=args.batch,
        length=min(LENGTH, config.max_len) if args.length is None else args.length,
        source_length=getattr(config, "source_len", None)
        if args.source_length is None
        else args.source_length,
        dtype=_dtype(args, target),
    )
    if args.json:
        _print_json(target, config, outline(net), cost)
        return
    from clearhead.cli.console import PlainConsole

    console = PlainConsole()
    _print_title(console, target, config, cost)
    console.print(_tree_table(outline(net)))
    _print_cost(console, cost)
    _print_memory(console, cost, dropout=bool(getattr(config, "dropout", 0.0)))


def _changed(config: FamilyConfig, words: tuple[tuple[str, ...], ...]) -> FamilyConfig:
    from clearhead.cli.overrides import read_changes

    return config.changed(**read_changes(word for group in words for word in group))


def _dtype(args: Args, target: Target) -> Any:
    import torch

    if args.dtype is not None:
        return getattr(torch, args.dtype)
    return (target.weights and target.weights.dtype) or torch.float32


def _print_json(target: Target, config: FamilyConfig, tree: Node, cost: Cost) -> None:
    import json

    facts = {
        "model": target.name,
        "is": target.kind,
        "family": config.kind,
        "shape": config.shape,
        "config": config.to_dict(),
        "weights": asdict(target.weights) if target.weights else None,
        "cost": cost.to_dict(),
        "outline": asdict(tree),
    }
    print(json.dumps(facts, indent=1, ensure_ascii=False))


# --- the tree ---


def _print_title(console: Console, target: Target, config: FamilyConfig, cost: Cost) -> None:
    from rich.text import Text

    from clearhead.cli.units import short

    title = Text(target.name, style="bold")
    kind = "" if target.kind in ("preset", "family") else f"{target.kind}, "
    family = "" if config.kind == target.name else f"family {config.kind}, "
    count = f"{short(cost.parameters)} parameters ({cost.parameters:,})"
    console.print(title.append(f"  {kind}{family}{config.shape}, {count}", style="not bold"))
    if target.weights is not None:
        console.print(_weights_line(target.weights), style="dim")
    console.print()


def _weights_line(weights: Weights) -> str:
    from clearhead.cli.units import short, size

    types = ", ".join(f"{short(count)} {name}" for name, count in weights.numbers.items())
    files = weights.files[0] if len(weights.files) == 1 else f"{len(weights.files)} files"
    line = f"{files}: {size(weights.size)}, {weights.tensors} tensors, numbers: {types or 'none'}"
    return line + (f"; not there: {', '.join(weights.missing)}" if weights.missing else "")


def _tree_table(tree: Node) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("module", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_row("net", Text(tree.kind, style="cyan"), f"{tree.parameters:,}")
    for guide, node in _lines(tree.children, ""):
        name = Text(guide, style="dim").append(node.name, style="not dim")
        if node.times > 1:
            name.append(f" ({node.times} x)", style="bold")
        table.add_row(name, _what(node), _count(node))
    return table


def _lines(nodes: tuple[Node, ...], before: str) -> Iterator[tuple[str, Node]]:
    """Every node below with the guide lines that stand before its name."""
    for node in nodes:
        last = node is nodes[-1]
        yield before + ("└─ " if last else "├─ "), node
        yield from _lines(node.children, before + ("   " if last else "│  "))


def _what(node: Node) -> Text:
    from rich.text import Text

    if node.weights:
        return Text(", ".join(_shape(weight) for weight in node.weights))
    return Text(node.note, style="dim") if node.note else Text(node.kind, style="cyan")


def _shape(weight: Weight) -> str:
    if weight.tied:
        return f"{weight.name} = {weight.tied}"
    return f"{weight.name} {' x '.join(map(str, weight.shape)) or 'number'}"


def _count(node: Node) -> str:
    if node.times > 1:
        return f"{node.times} x {node.parameters:,}"
    if node.weights and all(weight.tied for weight in node.weights):
        return "tied"
    return f"{node.parameters:,}" if node.parameters else ""


# --- the cost ---


def _print_cost(console: Console, cost: Cost) -> None:
    from rich import box
    from rich.table import Table

    source = f", source {cost.source_length}" if cost.source_length else ""
    console.print(f"\nbatch {cost.batch}, length {cost.length}{source}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("component", no_wrap=True)
    for heading in ("parameters", "forward\nFLOP", "training\nFLOP", "share", "activations"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, share in cost.by_component().items():
        table.add_row(*_cost_row(name, share, cost))
    table.add_section()
    for name, share in _folded_layers(cost):
        table.add_row(*_cost_row(name, share, cost))
    table.add_section()
    table.add_row(*_cost_row("all", cost.total, cost), style="bold")
    console.print(table)
    for line in _cost_notes(cost):
        console.print(line, style="dim")


def _cost_notes(cost: Cost) -> list[str]:
    from clearhead.cli.units import flops

    forward, training = cost.forward / cost.tokens, cost.training / cost.tokens
    token = f"{flops(forward)} forward, {flops(training)} training"
    giga = cost.training / 1e9
    seconds = f"{giga:,.0f}" if giga >= 100 else f"{giga:.3g}"
    return [
        f"a token of either side: {token}"
        if cost.tokens != cost.batch * cost.length
        else f"a token: {token}, {training / cost.parameters:.1f} a parameter",
        f"seconds a step, at best: {seconds} / the GFLOP/s of `clearhead doctor`",
        "FLOPs of matrix products, 2 a multiply-add; masked scores count like others",
    ]


def _cost_row(name: str, share: Share, cost: Cost) -> list[str]:
    from clearhead.cli import units

    training = share.forward + share.backward
    return [
        name,
        units.short(share.parameters) if share.parameters else "-",
        units.flops(share.forward).removesuffix("FLOP") if share.forward else "-",
        units.flops(training).removesuffix("FLOP") if training else "-",
        units.share(training, cost.training) if training else "",
        units.size(share.activations) if share.activations else "-",
    ]


def _folded_layers(cost: Cost) -> list[tuple[str, Share]]:
    """Each layer, equal neighbours as one row with what a single one costs."""
    rows: list[tuple[list[str], Share]] = []
    for name, share in cost.by_layer().items():
        if not name:
            continue
        same_stack = rows and rows[-1][0][0].rpartition(".")[0] == name.rpartition(".")[0]
        # The first block may keep a source for all others: that alone does not make it different.
        if same_stack and _alike(rows[-1][1], share):
            rows[-1] = ([*rows[-1][0], name], share)
        else:
            rows.append(([name], share))
    return [(_layer_names(names), share) for names, share in rows]


def _alike(one: Share, other: Share) -> bool:
    return (one.parameters, one.forward, one.patterns) == (
        other.parameters,
        other.forward,
        other.patterns,
    )


def _layer_names(names: list[str]) -> str:
    first = names[0].replace("stack.", "")
    if len(names) == 1:
        return first
    return f"{first}-{names[-1].rpartition('.')[2]}, each"


def _print_memory(console: Console, cost: Cost, dropout: bool) -> None:
    from rich.table import Table

    from clearhead.cli.units import size

    memory = cost.memory
    console.print(f"\nmemory, {cost.number_size} bytes a number", style="bold")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("weights", size(memory.weights), "")
    table.add_row("gradients", size(memory.gradients), "")
    table.add_row("optimiser", size(memory.optimiser), "AdamW's two moments")
    table.add_row("activations", size(memory.activations), _activations_note(memory, dropout))
    if memory.logits:
        table.add_row("logits", size(memory.logits), "kept for the loss's gradient")
    table.add_row("training", size(memory.training), "together", style="bold")
    layers = [share for name, share in cost.by_layer().items() if name]
    most = max((share.patterns for share in layers), default=0)
    note = f"{size(most)} a layer, where they are written down"
    if memory.patterns:
        table.add_row("attention matrices", size(memory.patterns), note)
    if memory.cache:
        sources = " and their sources" if memory.cross_cache else ""
        note = f"{cost.batch} x {cost.length} tokens{sources}"
        what = "key/value cache" if memory.patterns else "states"
        table.add_row(what, size(memory.cache + memory.cross_cache), note)
        table.add_row("generating", size(memory.generating), "weights and cache", style="bold")
    console.print(table)


def _activations_note(memory: Memory, dropout: bool) -> str:
    from clearhead.cli.units import size

    if not memory.patterns:
        return ""
    if memory.activations == memory.activations_written:
        return "attention cannot be fused"
    where = "a CPU with dropout" if dropout else "where attention is not fused"
    return f"{size(memory.activations_written)}: {where}"
