"""Other ways to a text than a token at a time: drafts that are checked, and contrast.

These give what `decode_steps` gives, so that stop strings, streams and details are the same for
all. Beams are a way too, but know their texts only at the end: see `write`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clearhead.errors import require
from clearhead.generate.batch import encode_sources
from clearhead.generate.beam import Beam
from clearhead.generate.contrastive import contrastive_search
from clearhead.generate.row import Row, Step
from clearhead.generate.rules import NONE
from clearhead.generate.sampling import Sampling
from clearhead.generate.speculative import DraftModel, PromptLookup, speculate
from clearhead.layers.stack import Memory
from clearhead.models.base import EncoderDecoder


@dataclass(frozen=True)
class Contrast:
    """Likely tokens that are unlike the text so far, see `contrastive`."""

    alpha: float = 0.6
    """How much likeness costs, from 0 to 1."""
    k: int = 4
    """How many of the likeliest tokens are compared."""


Way = Beam | DraftModel | PromptLookup | Contrast


def check_way(way: Way, sampling: Sampling, constrained: bool, min_length: int = 0) -> None:
    """Refuse what a way of writing cannot do."""
    called = {Beam: "beams", DraftModel: "draft", PromptLookup: "look_up", Contrast: "contrast"}
    name = called[type(way)]
    require(
        not constrained,
        f"{name} works without constraints (regex, schema): leave one of them out.",
    )
    require(
        not isinstance(way, Contrast) or (sampling.rules is NONE and not min_length),
        f"{name} works without rules: leave {name} out, or the rule (what came with the model is "
        "switched off by name: repetition_penalty=1, no_repeat_ngram=0, min_new_tokens=0).",
    )
    require(
        not sampling.temperature or not isinstance(way, (Beam, Contrast)),
        f"{name} looks for the best text and draws nothing: leave temperature out.",
    )


def searched_steps(
    net: Any,
    rows: Sequence[Row],
    way: Way,
    max_len: int,
    sources: Sequence[Sequence[int]] | None,
) -> Iterator[list[Step]]:
    """One row after the other, a token at a time; `sources`: one a row."""
    for i, row in enumerate(rows):
        source = None if sources is None else sources[i]
        memory = None if source is None else encode_sources(net, [source])
        for token in _tokens(net, row, way, max_len, memory, source):
            row.step = Step(row.number, token)
            step = row.take(max_len, slide=memory is None and max_len >= 2)
            if row.end is None:
                row.slide(max_len)
            yield [step]
            if row.end is not None:  # a stop string, say
                break
        if row.end is None:
            row.end = "token"
            yield [Step(row.number, -1, "token")]


def _tokens(
    net: Any,
    row: Row,
    way: Way,
    max_len: int,
    memory: Memory | None,
    source: Sequence[int] | None,
) -> Iterator[int]:
    how = row.sampling
    if isinstance(way, Contrast):
        most, stop, never = how.max_new_tokens, how.stop, how.never
        return contrastive_search(
            net, row.prompt, way.k, way.alpha, most, stop, never, max_len=max_len, memory=memory
        )
    if (dice := how.dice(row.sample)) is not None:
        how = replace(how, seed=dice.initial_seed())
    if isinstance(way, DraftModel):
        if source is not None and isinstance(way.net, EncoderDecoder):
            way = replace(way, memory=encode_sources(way.net, [source]))
        return speculate(net, row.prompt, how, max_len, way, memory)
    assert isinstance(way, PromptLookup)
    if source is not None:
        way = replace(way, also=tuple(source))
    return speculate(net, row.prompt, how, max_len, way, memory)
