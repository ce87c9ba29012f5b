"""The generation settings that come with a model (generation_config.json): which are used, which
are not, and what they may be.

Rules (penalties, banned and forced tokens) are part of what the model's makers evaluated, and hold
unless a call says otherwise; num_beams holds for `translate` alone. Whether dice are thrown is the
caller's: a text is greedy unless a call gives a temperature; then top_k, top_p, min_p and typical_p
are the makers', if they draw themselves (do_sample) and the call gives none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.errors import require
from clearhead.generate.beam import STEEPEST

FILE = "generation_config.json"
ONE = ("decoder_start_token_id", "forced_bos_token_id", "bos_token_id", "pad_token_id")
INPUTS = frozenset(ONE[:2])  # these are read by the model itself; the others are only compared
LISTS = ("suppress_tokens", "begin_suppress_tokens")
COUNTS = ("no_repeat_ngram_size", "min_length", "min_new_tokens")
DRAWN = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical"}
PATIENCE = {"None": "likely", "False": "likely", "True": "full", "never": "sure"}
# Setting -> what says nothing.
WITHOUT_EFFECT: dict[str, Any] = {
    "max_length": 20,
    "do_sample": False,
    "temperature": 1.0,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": None,
}


def rules_said(said: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The rules that came with a model, by their names in `Rules`, and `never`.

    Tokens that the vocabulary does not have never come anyway, so it does no harm to list them.
    """
    never, not_first = (
        frozenset(id for id in said.get(name) or () if 0 <= id < vocab_size) for name in LISTS
    )
    found: dict[str, Any] = {
        "repetition": said.get("repetition_penalty"),
        "no_repeat": said.get("no_repeat_ngram_size"),
        "least": said.get("min_new_tokens"),
        "banned": said.get("bad_words_ids"),
        "never": never,
        "not_first": not_first,
    }
    last = said.get("forced_eos_token_id")
    found["last"] = last[0] if isinstance(last, list) and last else last
    return {name: value for name, value in found.items() if value not in (None, [], frozenset())}


def drawing_said(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's makers draw from, if they draw, by its names in `Sampling`."""
    if not said.get("do_sample"):
        return {}
    return {DRAWN[name]: said[name] for name in DRAWN if said.get(name) is not None}


def end_ids(said: Mapping[str, Any]) -> frozenset[int]:
    """The ids that end a text."""
    ends = said.get("eos_token_id")
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def patience_said(said: Mapping[str, Any]) -> str:
    """When a beam search ends, by its name in `Beam`."""
    return PATIENCE[str(said.get("early_stopping"))]


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
        good &= _ids(words, vocab_size) and len(words) > 0
    _require(good, "bad_words_ids", banned, "a list of words, each a list of ids", vocab_size)
    beams = said.get("num_beams")
    good = beams is None or (_id(beams) and 1 <= beams <= vocab_size)
    _require(good, "num_beams", beams, "a whole number from 1", vocab_size)
    penalty = said.get("length_penalty")
    good = penalty is None or (type(penalty) in (int, float) and abs(penalty) <= STEEPEST)
    what = f"a number from -{STEEPEST} to {STEEPEST}"
    _require(good, "length_penalty", penalty, what, vocab_size)
    _check_rules(said, vocab_size)


def _check_rules(said: Mapping[str, Any], vocab_size: int) -> None:
    for name in LISTS:
        ids = said.get(name)
        good = ids is None or (isinstance(ids, list) and all(map(_id, ids)))
        _require(good, name, ids, "a list of ids", vocab_size)
    for name in COUNTS:
        value = said.get(name)
        good = value is None or (_id(value) and value >= 0)
        _require(good, name, value, "a whole number from 0", vocab_size)
    most = said.get("max_new_tokens")
    good = most is None or (_id(most) and most >= 1)
    _require(good, "max_new_tokens", most, "a whole number from 1", vocab_size)
    penalty = said.get("repetition_penalty")
    good = penalty is None or (type(penalty) in (int, float) and 0 < penalty < 1e6)
    _require(good, "repetition_penalty", penalty, "a number above 0", vocab_size)
    patience = said.get("early_stopping")
    _require(str(patience) in PATIENCE, "early_stopping", patience, 'a yes or no, or "never"', 0)
    last = said.get("forced_eos_token_id")
    good = last is None or _ids(last if isinstance(last, list) else [last], vocab_size)
    _require(good, "forced_eos_token_id", last, "the id of a token", vocab_size)


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
        f"{FILE} sets {', '.join(names)}, which have no effect here: say what you want to "
        "generate or translate (max_new_tokens, temperature)"
    ]


def _id(value: Any) -> bool:
    return type(value) is int


def _ids(value: Any, vocab_size: int) -> bool:
    return isinstance(value, list) and all(_id(id) and 0 <= id < vocab_size for id in value)


def _require(good: bool, name: str, value: Any, what: str, vocab_size: int) -> None:
    require(
        good,
        f"{FILE} says {name} = {value!r:.60}, which must be {what} (the vocabulary has "
        f"{vocab_size} tokens).",
    )
