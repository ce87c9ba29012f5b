"""What users may say to `generate`, `stream` and `chat`, read into settings of the decoding core.

What a call leaves open is what came with the model (generation_config.json, see `settings`), else
what says nothing. Tokens may be named by their ids or by texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clearhead.errors import did_you_mean, require
from clearhead.generate.beam import Beam
from clearhead.generate.constrain import Constraint
from clearhead.generate.row import Constrain
from clearhead.generate.rules import NONE, Rules
from clearhead.generate.sampling import Sampling
from clearhead.generate.search import Contrast, Way, check_way
from clearhead.generate.settings import drawing_said, end_ids, patience_said, rules_said
from clearhead.generate.speculative import DraftModel, PromptLookup
from clearhead.text.pieces import pieces_of, tokens_that_write, ways_to_write

# What a call may say -> one line each; the help of `generate` and the documentation have these.
DRAWING = {
    "max_new_tokens": "how many tokens at most (200)",
    "temperature": "0 takes the best token each time, above 0 tokens are drawn (0)",
    "top_k": "draw from the k best; 0: from all (0)",
    "top_p": "draw from the smallest set that has this probability (1)",
    "min_p": "draw only what has this share of the best one's probability (0)",
    "typical": "draw from the most typical tokens that have this probability (1)",
    "seed": "for draws that can be repeated",
}
RULES = {  # the user's name -> the name in Rules
    "logit_bias": "bias",
    "repetition_penalty": "repetition",
    "presence_penalty": "presence",
    "frequency_penalty": "frequency",
    "no_repeat_ngram": "no_repeat",
    "banned": "banned",
    "min_new_tokens": "least",
    "begin_with": "first",
}
OTHERS = ("stop", "n", "details", "log_probabilities", "remember")
CONSTRAINTS = ("regex", "schema", "constraint")
BEAMS = ("length_penalty", "groups", "diversity_penalty", "coverage_penalty")
WAYS = ("beams", "draft", "look_up", "contrast")
KNOWN = (*DRAWING, *RULES, *OTHERS, *CONSTRAINTS, *WAYS, *BEAMS)


@dataclass(frozen=True)
class Options:
    """One call's settings."""

    sampling: Sampling
    """How tokens are chosen."""
    stop: tuple[str, ...] = ()
    """Texts that end the text."""
    n: int = 1
    """How many texts of each prompt."""
    details: bool = False
    """Whether `Written` is wanted, and not only its text."""
    log_probabilities: int | None = None
    """How many of the likeliest tokens are noted a step; 0: the chosen one's only, None: nothing.
    """
    remember: bool = False
    """Whether what is read is kept for later calls."""
    min_length: int = 0
    """No stop id before prompt and text have so many tokens (what came with a model)."""
    constrain: Constrain | None = None
    """Makes the constraint of each text."""
    way: Way | None = None
    """How else than token by token the text is found."""

    def sampling_for(self, prompt: Sequence[int]) -> Sampling:
        """The settings of a prompt: how many tokens must come depends on its length."""
        sampling = self.sampling
        least = min(self.min_length - len(prompt), sampling.max_new_tokens)
        if least <= sampling.rules.least:
            return sampling
        return replace(sampling, rules=replace(sampling.rules, least=least))


def read_options(
    settings: Mapping[str, Any], said: Mapping[str, Any], tokenizer: Any, vocab_size: int
) -> Options:
    """A call's settings, checked; `said` came with the model, `tokenizer` is the target's."""
    for name in settings:
        require(
            name in KNOWN,
            f'generate has no setting "{name}".{did_you_mean(name, KNOWN)} It has: '
            f"{', '.join(KNOWN)}.",
        )
    given = {name: value for name, value in settings.items() if name in DRAWING}
    if given.get("temperature"):
        given = drawing_said(said) | given
    if said.get("max_new_tokens") is not None:
        given = {"max_new_tokens": said["max_new_tokens"]} | given
    # An end that the vocabulary does not have never comes.
    ends = end_ids(said) | frozenset(tokenizer.eos_ids)
    stop = frozenset(id for id in ends if 0 <= id < vocab_size)
    never, rules = _rules(settings, said, tokenizer, stop, vocab_size)
    sampling = Sampling(**given, stop=stop, never=never, rules=rules)
    n, details = settings.get("n", 1), bool(settings.get("details", False))
    require(type(n) is int and n >= 1, f"n is how many texts of each prompt, 1 or more: {n!r}.")
    constrain = _constrain(settings, tokenizer, stop, vocab_size)
    way = _way(settings, said, sampling, n, vocab_size)
    min_length = 0 if "min_new_tokens" in settings else said.get("min_length") or 0
    if way is not None:
        check_way(way, sampling, constrain is not None, min_length)
        require(
            not settings.get("log_probabilities"),
            "log_probabilities are noted where tokens are written one by one: not with beams, "
            "draft, look_up and contrast.",
        )
    return Options(
        sampling,
        _stops(settings.get("stop", ())),
        n,
        details,
        _likely(settings.get("log_probabilities"), details),
        bool(settings.get("remember", False)),
        min_length,
        constrain,
        way,
    )


def _constrain(
    settings: Mapping[str, Any], tokenizer: Any, stop: frozenset[int], vocab_size: int
) -> Constrain | None:
    """Makes the constraint of each text, where one is asked for."""
    asked = [name for name in CONSTRAINTS if settings.get(name) is not None]
    require(len(asked) <= 1, f"{' and '.join(asked)} cannot hold together: choose one.")
    if not asked:
        return None
    if asked == ["constraint"]:
        require(
            callable(settings["constraint"]),
            "constraint makes a constraint for each text: a function without arguments.",
        )
        return settings["constraint"]
    make = Constraint.regex if asked == ["regex"] else Constraint.schema
    return make(settings[asked[0]], tokenizer, stop, vocab_size).copy


def _way(
    settings: Mapping[str, Any], said: Mapping[str, Any], sampling: Sampling, n: int, size: int
) -> Way | None:
    """The way that is asked for, if one is."""
    beams = settings.get("beams")
    require(
        beams is None or (type(beams) is int and 1 <= beams <= size),
        f"beams is a whole number from 1 up to the vocabulary's {size} tokens, not {beams!r}.",
    )
    asked = [name for name in WAYS if settings.get(name)]
    require(len(asked) <= 1, f"{' and '.join(asked)} are different ways to write: choose one.")
    more = {name: settings[name] for name in BEAMS if name in settings}
    require(
        not more or asked == ["beams"], f"{', '.join(more)}: a setting of beams, say beams=4 too."
    )
    if asked == ["beams"]:
        require(
            n <= settings["beams"],
            f"n is {n} and beams {beams}: a search has no more texts than it follows. Say "
            f"beams={n} or more, or n={beams} or fewer.",
        )
        if said.get("length_penalty") is not None:
            more = {"length_penalty": said["length_penalty"]} | more
        return beam_of(sampling, settings["beams"], n, patience_said(said), **more)
    if asked == ["draft"]:
        draft = settings["draft"]
        require(
            hasattr(draft, "net") and hasattr(draft, "config"),
            "draft is a smaller model with the same vocabulary: ch.load(...).",
        )
        return DraftModel(draft.net, max_len=draft.config.max_len)
    if asked == ["look_up"]:
        return PromptLookup()
    if asked == ["contrast"]:
        alpha = settings["contrast"]
        require(
            isinstance(alpha, (int, float)) and 0 <= alpha <= 1,
            f"contrast is a number from 0 (likely) to 1 (unlike what was said), not {alpha!r}.",
        )
        return Contrast(alpha, settings.get("top_k") or 4)
    return None


def _rules(
    settings: Mapping[str, Any],
    said: Mapping[str, Any],
    tokenizer: Any,
    stop: frozenset[int],
    vocab_size: int,
) -> tuple[frozenset[int], Rules]:
    """The ids that never come, and the other rules."""
    given = {RULES[name]: settings[name] for name in settings if name in RULES}
    if "bias" in given:
        given["bias"] = _bias(given["bias"], tokenizer)
    if "banned" in given:
        given["banned"] = _banned(given["banned"], tokenizer, stop)
    if "first" in given:
        given["first"] = _ids(given["first"], tokenizer, "begin_with")
    values = rules_said(said, vocab_size)
    banned = [tuple(words) for words in (*values.pop("banned", ()), *given.pop("banned", ()))]
    values |= given
    # An end is never banned, as in transformers: the text would run on to its limit.
    never = frozenset(words[0] for words in banned if len(words) == 1) - stop
    never |= values.pop("never", frozenset())
    rules = Rules(**values, banned=tuple(words for words in banned if len(words) != 1))
    wrong = sorted(id for id in rules.ids | never if not 0 <= id < vocab_size)
    require(
        not wrong,
        f"Tokens are named that are not there: {wrong[:5]}. The vocabulary has ids from 0 to "
        f"{vocab_size - 1}.",
    )
    return never, NONE if rules == NONE else rules


def _stops(stop: Any) -> tuple[str, ...]:
    require(isinstance(stop, Iterable), f"stop is a text, or a list of texts, not {stop!r}.")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for one in stops:
        require(isinstance(one, str), f"A stop string is text, not {one!r}.")
        require(
            len(one) > 0,
            "A stop string is empty: every text has that, so nothing would be written. Leave it "
            "out.",
        )
    return stops


def _likely(value: Any, details: bool) -> int | None:
    if value is None:
        return 0 if details else None
    require(
        type(value) is int and value >= 0,
        f"log_probabilities is how many of the likeliest tokens are noted, 0 or more: {value!r}.",
    )
    require(details, "log_probabilities are among the details: say details=True as well.")
    return value


def _bias(bias: Any, tokenizer: Any) -> tuple[tuple[int, float], ...]:
    require(isinstance(bias, Mapping), 'logit_bias is a table {token: bias}: {" the": -2.0}, say.')
    found: dict[int, float] = {}
    for token, value in bias.items():
        ids = _single(token, tokenizer)
        require(isinstance(value, (int, float)), f"A bias is a number, not {value!r}.")
        found |= dict.fromkeys(ids, float(value))
    return tuple(found.items())


def _single(token: Any, tokenizer: Any) -> Sequence[int]:
    """The tokens that write a text alone, or the one that is named."""
    own = _ids(token, tokenizer, "logit_bias")
    if isinstance(token, str) and (pieces := pieces_of(tokenizer)) is not None:
        special = len(own) == 1 and pieces.of[own[0]] is None
        own = tuple(tokens_that_write(token, tokenizer)) or (own if special else ())
        spaced = tokens_that_write(f" {token}", tokenizer)
        require(
            bool(own),
            f"logit_bias is for single tokens, and none writes {token!r} alone: name an id, or use "
            "banned." + (f" {f' {token}'!r}, with a blank, is one." if spaced else ""),
        )
        return own
    require(
        len(own) == 1,
        f"logit_bias is for single tokens, and {token!r} has {len(own)}: name an id, or use "
        "banned.",
    )
    return own


def _banned(banned: Any, tokenizer: Any, stop: frozenset[int]) -> list[tuple[int, ...]]:
    """A word is banned wherever it stands and behind a blank, in the tokens that the tokeniser
    makes of it; ids as they are. No way that has an end in it is meant.
    """
    require(
        isinstance(banned, (int, Iterable)), f"banned is a list of texts or ids, not {banned!r}."
    )
    found = []
    for words in [banned] if isinstance(banned, (str, int)) else banned:
        require(words != "", "A banned text is empty: name at least one token, or leave it out.")
        if not isinstance(words, str):
            found.append(_ids(words, tokenizer, "banned"))
            continue
        ways = ways_to_write(words, tokenizer)
        if not words[0].isspace():
            ways += ways_to_write(" " + words, tokenizer)
        found += [ids for ids in ways if len(ids) == 1 or not stop & set(ids)]
    return list(dict.fromkeys(found))


def _ids(token: Any, tokenizer: Any, where: str) -> tuple[int, ...]:
    if isinstance(token, str):
        return tuple(tokenizer.encode(token, special=False))
    ids = (token,) if isinstance(token, int) else token
    require(
        isinstance(ids, Sequence) and all(type(id) is int for id in ids),
        f"{where} names tokens by ids or by texts, not {token!r}.",
    )
    return tuple(ids)


def beam_of(sampling: Sampling, beams: int, best: int, patience: Any, **more: Any) -> Beam:
    """A search with the limit, the stop ids and the rules of a sampling."""
    return Beam(
        beams,
        patience=patience,
        max_new_tokens=sampling.max_new_tokens,
        best=best,
        stop=sampling.stop,
        never=sampling.never,
        rules=sampling.rules,
        **more,
    )
