"""The models that can be built by name.

Each with its size, and the parameters that its paper states beside those that are counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from clearhead.errors import ClearheadError, did_you_mean

if TYPE_CHECKING:
    from clearhead.models.presets import Preset


@dataclass(frozen=True)
class Args:
    """What `clearhead presets` takes."""

    word: Annotated[Positional[str], arg(metavar="[WORD]", help_behavior_hint="")] = ""
    """Only those with this word in their name, family or source."""
    json: bool = False
    """Print the table as JSON."""


def run(args: Args) -> None:
    """Count each on the meta device, which allocates nothing, then print the table."""
    from clearhead.api import presets

    chosen = _matching(presets(), args.word)
    rows = [_row(name, preset) for name, preset in chosen.items()]
    if args.json:
        import json

        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    _print_table(rows)


def _matching(presets: dict[str, Preset], word: str) -> dict[str, Preset]:
    def matches(name: str, preset: Preset) -> bool:
        return word.lower() in " ".join((name, preset.family, preset.source)).lower()

    chosen = {name: preset for name, preset in presets.items() if matches(name, preset)}
    if not chosen:
        near = did_you_mean(word, [*presets, *{preset.family for preset in presets.values()}])
        raise ClearheadError(
            f'No preset has "{word}" in its name, family or source.{near} All: clearhead presets'
        )
    return chosen


def _row(name: str, preset: Preset) -> dict[str, Any]:
    from clearhead.api import build

    config: Any = preset.config()
    net = build(config, device="meta").net
    counted = sum(parameter.numel() for parameter in net.parameters())
    heads = getattr(config, "n_heads", None)
    decoder = getattr(config, "n_decoder_layers", None) or config.n_layers
    return {
        "name": name,
        "family": preset.family,
        "shape": config.shape,
        "layers": config.n_layers,
        "decoder_layers": decoder if config.shape == "encoder-decoder" else None,
        "width": getattr(config, "d_model", None),
        "heads": heads,
        "kv_heads": getattr(config, "n_kv_heads", None) or heads,
        "max_len": config.max_len,
        "published": preset.published,
        "counted": counted,
        "difference": counted / preset.published - 1 if preset.published else None,
        "source": preset.source,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.console import table_console
    from clearhead.cli.units import short

    console = table_console()
    gap = 2 if console.width >= 100 else 1
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="underline")
    table.add_column("model", no_wrap=True)
    for heading in ("layers", "width", "heads", "stated", "counted", "off"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("source", style="dim")
    family = ""
    for row in rows:
        if row["family"] != family:
            if family:
                table.add_row()
            family = row["family"]
            table.add_row(Text(family, style="bold cyan"))
        layers, heads = str(row["layers"]), str(row["heads"] or "-")
        if row["decoder_layers"]:
            layers += f"+{row['decoder_layers']}"
        if row["kv_heads"] != row["heads"]:
            heads += f"/{row['kv_heads']}"
        stated, off = row["published"], row["difference"]
        table.add_row(
            f"  {row['name']}",
            layers,
            str(row["width"] or "-"),
            heads,
            short(stated) if stated else "-",
            short(row["counted"]),
            "" if off is None else f"{off:+.1%}",
            row["source"],
        )
    console.print(table)
    console.print("\nstated, counted: parameters in the source, and as built here", style="dim")
    console.print("off: by how much the counted differ from the stated", style="dim")
    if any(row["kv_heads"] != row["heads"] for row in rows):
        console.print("heads 32/8: 32 query heads on 8 key/value heads", style="dim")
    console.print("clearhead show MODEL: layers, FLOPs and memory of one", style="dim")
