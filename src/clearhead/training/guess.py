"""A recipe for a data file without one: what its columns ask for, at a size that fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.data.corpus import Corpus, open_corpus
from clearhead.data.labelled import Classification
from clearhead.data.objectives import Objective, read_objective
from clearhead.errors import require
from clearhead.training.columns import guess_objective
from clearhead.training.recipe import Recipe, merge
from clearhead.training.tune import settle

CHARACTERS = 5_000_000  # of text; longer ones are cut into pieces of words
OFTEN = 500_000  # a text that is shorter is seen several times in that time
MINUTES = 5.0
LEAST = 200  # characters that train; there is nothing to learn from fewer

MUON = {
    "name": "muon",
    "lr": 0.02,
    "adam_lr": 5e-3,
    "weight_decay": 0.01,
    "warmup": 20,
    "schedule": {"kind": "wsd", "decay": 0.4},
}


def guess_recipe(source: str, changes: Mapping[str, Any]) -> Recipe:
    """The settings for a source, with some changed."""
    corpus = open_corpus(source)
    chosen = _said(changes) or guess_objective(corpus)
    if chosen.shape == "decoder":
        data = _language(corpus, "model.max_len" in changes)
    else:
        data = _reader() if chosen.shape == "encoder" else _pairs()
    data["data"] = {"source": source, "objective": chosen.to_dict(), **data["data"]}
    if isinstance(chosen, Classification):
        data["eval"] = {"metric": "accuracy"}
    return Recipe.from_dict(settle(data, changes), Path(source.split(",")[0]).stem or "run")


def _said(changes: Mapping[str, Any]) -> Objective | None:
    """The objective that was set by hand; None: none was."""
    some = {key: value for key, value in changes.items() if key.startswith("data.objective")}
    table = merge({}, some).get("data", {}).get("objective")
    known = isinstance(table, str) or (isinstance(table, Mapping) and "kind" in table)
    return read_objective(table, "data.objective") if known else None


def _language(corpus: Corpus, length_said: bool) -> dict[str, Any]:
    """A text: a decoder that writes on."""
    size = _characters(corpus)
    require(
        size >= LEAST,
        f"{corpus.name} has {size:,} characters to learn from, which is too little for any model: "
        f"give {LEAST:,} or more.",
    )
    small = size <= CHARACTERS
    width, layers, context = (192, 4, 128) if small else (256, 6, 256)
    often = size < OFTEN  # the run will see it many times, and must not learn it by heart
    return {
        "data": {"length": _context(size, context)}
        if size < 20 * context and not length_said
        else {},
        "tokenizer": "characters" if small else {"kind": "bpe", "vocab_size": 8000},
        "model": {
            "family": "llama",
            "n_layers": layers,
            "d_model": width,
            "n_heads": width // 32,
            "d_ff": -(-8 * width // 96) * 32,  # 8/3 of the width, in whole vectors
            "max_len": context,
            "dropout": 0.2 if often else 0.0,
            "variant": {"kind": "variant", "qk_norm": True},
        },
        "train": {
            "minutes": MINUTES,
            "batch": 16,
            "average": {"kind": "ema", "decay": 0.98},
            "patience": 5 if often else None,
        },
        "optim": MUON,
    }


def _characters(corpus: Corpus) -> int:
    """How long the training texts are together; beyond what matters nobody counts on."""
    size = 0
    for record in corpus.records("train"):
        size += len(str(record["text"]))
        if size > CHARACTERS:
            break
    return size


def _context(size: int, most: int) -> int:
    """A context that the validating tenth of a short text still fills."""
    return max(8, min(most, size // 20))


def _pairs() -> dict[str, Any]:
    """Two columns: an encoder-decoder that makes the second of the first."""
    return {
        "data": {"by": "tokens"},
        "tokenizer": {"kind": "bpe", "vocab_size": 8000},
        "model": {
            "family": "transformer",
            "n_layers": 3,
            "d_model": 128,
            "n_heads": 4,
            "d_ff": 512,
            "max_len": 256,
            "placement": "pre",
            "dropout": 0.2,
        },
        "train": {"minutes": MINUTES, "batch": 4096, "label_smoothing": 0.1},
        "optim": {"name": "adamw", "lr": 2e-3, "warmup": 200, "schedule": "cosine"},
    }


def _reader() -> dict[str, Any]:
    """Texts with labels, say: an encoder that tells them apart."""
    return {
        "data": {"by": "tokens"},
        "tokenizer": {"kind": "bpe", "vocab_size": 8000},
        "model": {
            "family": "bert",
            "n_layers": 2,
            "d_model": 128,
            "n_heads": 4,
            "d_ff": 512,
            "max_len": 256,
            "dropout": 0.3,
        },
        "train": {"minutes": MINUTES, "batch": 2048, "patience": 5},
        "optim": {"name": "adamw", "lr": 1e-3, "warmup": 50, "schedule": "cosine"},
    }
