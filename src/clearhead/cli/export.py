"""Write a model for others: a folder for transformers, ONNX files, or a GGUF file for llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Args:
    """What `clearhead export` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model's folder, a file, or a hub name."""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """Where to write: a folder, or a file for GGUF."""
    to: Literal["hf", "onnx", "gguf"] = "hf"
    """For whom: transformers, ONNX runtimes, llama.cpp."""
    dtype: Annotated[
        Literal["f32", "f16", "q8_0"] | None,
        arg(metavar="{f32,f16,q8_0}", help_behavior_hint="(default: f16)"),
    ] = None
    """How a GGUF file stores its matrices."""
    overwrite: bool = False
    """Replace what OUT holds already."""


def run(args: Args) -> None:
    """Load the model and write it."""
    from clearhead.paths import check_there

    check_there(args.model)
    from rich.console import Console

    from clearhead.api import export
    from clearhead.cli.models import open_model
    from clearhead.weights.folder import refuse_full
    from clearhead.weights.hf import lacks_pooler

    refuse_full(args.out, args.overwrite)
    model = open_model(args.model)
    with Console(stderr=True).status(f"writing {args.out}"):
        export(model, args.out, to=args.to, dtype=args.dtype, overwrite=args.overwrite)
    opens = {"hf": _transformers, "onnx": _onnxruntime, "gguf": "llama-cli -m {}".format}
    print(f"{model} written to {args.out}. Open it with: {opens[args.to](args.out)}")
    if args.to == "hf" and lacks_pooler(model.config):
        print(
            "transformers has a pooler behind this body, which the model has not, and draws one: "
            "use last_hidden_state, not pooler_output."
        )


def _transformers(out: str) -> str:
    import json
    from pathlib import Path

    from clearhead.models.hf import auto_class

    said = json.loads((Path(out) / "config.json").read_text(encoding="utf-8"))
    return f"transformers.{auto_class(said['architectures'][0])}.from_pretrained({out!r})"


def _onnxruntime(out: str) -> str:
    """A call for each graph, in the order in which they are used."""
    from pathlib import Path

    from clearhead.weights.onnx import FILES

    paths = [Path(out) / f"{name}.onnx" for name in FILES]
    calls = [f"onnxruntime.InferenceSession({str(path)!r})" for path in paths if path.exists()]
    return ", ".join(calls)
