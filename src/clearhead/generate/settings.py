"""The generation settings that come with a model (generation_config.json): which are used, which
are not, and what they may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.errors import require
from clearhead.generate.beam import STEEPEST

FILE = "generation_config.json"
ONE = ("decoder_start_token_id", "forced_bos_token_id", "bos_token_id", "pad_token_id")
INPUTS = frozenset(ONE[:2])  # these are read by the model itself; the others are only compared
# Setting -> what says nothing. The search does not know these yet.
WITHOUT_EFFECT: dict[str, Any] = {
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "min_length": 0,
    "max_length": 20,
    "early_stopping": False,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}


def check_generation(said: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse settings that are used here and cannot be right; null is as good as nothing."""
    for name in ONE:
        if (id := said.get(name)) is not None:
            known = _id(id) and (name not in INPUTS or 0 <= id < vocab_size)
            _require(known, name, id, "the id of a token", vocab_size)
    ends = said.get("eos_token_id")
    good = ends is None or _id(ends) or (isinstance(ends, list) and all(map(_id, ends)))
    _require(good, "eos_token_id", ends, "the id of a token, or a list of these", vocab_size)
    banned = said.get("bad_words_ids")
    good = banned is None or isinstance(banned, list)
    for words in banned if isinstance(banned, list) else ():
        good &= isinstance(words, list) and all(_id(id) and 0 <= id < vocab_size for id in words)
    _require(good, "bad_words_ids", banned, "a list of words, each a list of ids", vocab_size)
    beams = said.get("num_beams")
    good = beams is None or (_id(beams) and 1 <= beams <= vocab_size)
    _require(good, "num_beams", beams, "a whole number from 1", vocab_size)
    penalty = said.get("length_penalty")
    good = penalty is None or (type(penalty) in (int, float) and abs(penalty) <= STEEPEST)
    what = f"a number from -{STEEPEST} to {STEEPEST}"
    _require(good, "length_penalty", penalty, what, vocab_size)


def ignored_settings(said: Mapping[str, Any]) -> list[str]:
    """A sentence that names the settings without effect, if there are any."""
    names = [
        name
        for name, nothing in WITHOUT_EFFECT.items()
        if said.get(name) is not None and said[name] not in (nothing, [])
    ]
    if not names:
        return []
    return [
        f"{FILE} sets {', '.join(names)}, which have no effect here yet: say what you want to "
        "generate or translate"
    ]


def _id(value: Any) -> bool:
    return type(value) is int


def _require(good: bool, name: str, value: Any, what: str, vocab_size: int) -> None:
    require(
        good,
        f"{FILE} says {name} = {value!r:.60}, which must be {what} (the vocabulary has "
        f"{vocab_size} tokens).",
    )
