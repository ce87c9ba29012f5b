"""Write on: the text that follows a prompt, as it comes.

clearhead generate runs/shakespeare "ROMEO:" --temperature 0.8. An encoder-decoder writes what it
makes of the prompt. Without a prompt, standard input is read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class Args:
    """What `clearhead generate` takes."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help_behavior_hint="")]
    """A run's folder, a model's folder or file, or a hub name."""
    prompt: Annotated[Positional[str | None], arg(metavar="PROMPT", help_behavior_hint="")] = None
    """What to start from; none: standard input."""
    max_new_tokens: int = 200
    """How many tokens at most."""
    temperature: float = 0.8
    """0 takes the best token each time; above, tokens are drawn."""
    top_k: int = 0
    """Draw from the k best only; 0: from all."""
    top_p: float = 1.0
    """Draw from the smallest set that has this probability."""
    seed: int | None = None
    """For texts that can be repeated."""


def run(args: Args) -> None:
    """Load and write."""
    from clearhead.api import load
    from clearhead.models.base import EncoderDecoder

    model = load(args.model)
    prompt = sys.stdin.read().rstrip("\n") if args.prompt is None else args.prompt
    pieces = model.stream(
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    begun = isinstance(model.net, EncoderDecoder)
    for piece in pieces:
        print(piece if begun else prompt + piece, end="", flush=True)
        begun = True
    print()
