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


def run(args: Args) -> None:
    """Load the model and write it."""
    from rich.console import Console

    from clearhead.api import export, load

    model = load(args.model)
    with Console(stderr=True).status(f"writing {args.out}"):
        export(model, args.out, to=args.to, dtype=args.dtype)
    opens = {
        "hf": f"transformers.AutoModel.from_pretrained({args.out!r})",
        "onnx": "onnxruntime.InferenceSession(...)",
        "gguf": f"llama-cli -m {args.out}",
    }
    print(f"{model} written to {args.out}. Open it with: {opens[args.to]}")
