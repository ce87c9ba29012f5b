"""One exception for everything a user can mend: it says what is wrong, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What others call a thing -> what it may be called here, folded as `_fold` does.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "rotary": ("rope",),
    "roformer": ("rope",),
    "sincos": ("sinusoidal",),
    "absolute": ("learned", "sinusoidal"),
    "relative": ("shaw", "t5buckets", "transformerxl"),
    "buckets": ("t5buckets",),
    "xl": ("transformerxl",),
    "ln": ("layernorm",),
    "swish": ("silu",),
    "swiglu": ("gated",),
    "geglu": ("gated",),
    "mlp": ("plain", "ffn"),
    "hiddensize": ("dmodel",),
    "nembd": ("dmodel",),
    "width": ("dmodel",),
    "dim": ("dmodel",),
    "depth": ("nlayers",),
    "numlayers": ("nlayers",),
    "numhiddenlayers": ("nlayers",),
    "nblocks": ("nlayers",),
    "numheads": ("nheads",),
    "numattentionheads": ("nheads",),
    "numkeyvalueheads": ("nkvheads",),
    "intermediatesize": ("dff",),
    "maxpositionembeddings": ("maxlen",),
    "nctx": ("maxlen",),
    "contextlength": ("maxlen",),
    "blocksize": ("maxlen",),
    "nvocab": ("vocabsize",),
    "numlabels": ("nlabels",),
    "numclasses": ("nlabels",),
    "classifier": ("classification",),
    "languagemodel": ("lm",),
    "causallm": ("lm",),
    "mlm": ("maskedlm",),
    "tokenclassification": ("tagging",),
    "questionanswering": ("span",),
    "qwen": ("llama",),
    "qwen2": ("llama",),
    "qwen3": ("llama",),
    "marian": ("bart",),
}


class ClearheadError(ValueError):
    """Wrong use or wrong input. The command line prints its text alone and exits with 2."""


def nearest(name: str, options: Iterable[str], n: int = 5, cutoff: float = 0.5) -> list[str]:
    """The options most like a name, best first; capitals and hyphens do not count."""
    folded: dict[str, list[str]] = {}
    for option in options:
        folded.setdefault(_fold(option), []).append(str(option))
    wanted = _fold(name)
    keys = [key for key in SYNONYMS.get(wanted, ()) if key in folded]
    keys += difflib.get_close_matches(wanted, list(folded), n=n, cutoff=cutoff)
    return [option for key in dict.fromkeys(keys) for option in folded[key]][:n]


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """A sentence that names the nearest option, with a leading blank, or nothing at all."""
    near = nearest(name, options, n=1)
    return f' Did you mean "{near[0]}"?' if near else ""


def require(condition: bool, message: str) -> None:
    """Raise `ClearheadError(message)` unless the condition holds."""
    if not condition:
        raise ClearheadError(message)


def _fold(name: object) -> str:
    """A name without what people write in several ways: n_layers, n-layers, N Layers."""
    return str(name).lower().translate(_WITHOUT)


_WITHOUT = str.maketrans("", "", "-_ ")
