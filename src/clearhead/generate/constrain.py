"""Texts that must match: a regular expression, or JSON that a schema describes.

A constraint belongs to one text. Before each token `mask()` says which may come, and `advance`
tells it which came:

    one = Constraint.regex(r"[0-9]{4}-[0-9]{2}", tokenizer)
    logits[~one.mask()] = -inf;  one.advance(token);  one.done

The automaton is llguidance's (an extra). What a token writes is known here from the tokeniser's
decoder, so it works for vocabularies of bytes, byte-level BPE, sentencepiece and characters; not
for those that put blanks between words by themselves. The expression stands for the whole text;
look-around and back-references are not known. Of a schema the JSON is written on one line, as
`json.dumps` does.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from clearhead.errors import ClearheadError, require
from clearhead.text.pieces import pieces_of

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """What one text may be. Make it with `regex` or `schema`."""

    def __init__(
        self, grammar: str, tokenizer: Any, stop: Collection[int], vocab_size: int
    ) -> None:
        self._matcher = _llguidance().LLMatcher(_vocabulary(tokenizer, stop), grammar, log_level=0)
        self._stop, self._size = frozenset(stop), vocab_size
        self._known: Tensor | None = None

    @staticmethod
    def regex(
        pattern: str,
        tokenizer: Any,
        stop: Collection[int] | None = None,
        vocab_size: int | None = None,
    ) -> Constraint:
        """Texts that match the whole of a regular expression.

        stop: the ids that end a text (the tokeniser's); vocab_size: how long a mask is, where the
        model has more rows than its tokeniser tokens.
        """
        require(isinstance(pattern, str), f"A regular expression is a text, not {pattern!r}.")
        what = f'The regular expression "{pattern}"'
        grammar = _llguidance().LLMatcher.grammar_from_regex(pattern)
        _check_grammar(grammar, what)
        letters = _alphabet(_pieces(tokenizer))
        if letters is not None:
            # Without this a text could come to a place where no token of the vocabulary goes on.
            known = "".join(map(_escaped, letters))
            grammar = json.dumps(
                {
                    "grammars": [
                        {"lark_grammar": f"start: T\nT: /{_slashed(pattern)}/ & /[{known}]*/"}
                    ]
                }
            )
        return _first(grammar, tokenizer, stop, vocab_size, what)

    @staticmethod
    def schema(
        schema: dict[str, Any] | str | bool,
        tokenizer: Any,
        stop: Collection[int] | None = None,
        vocab_size: int | None = None,
    ) -> Constraint:
        """JSON that a schema describes; `stop` and `vocab_size` as above."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ClearheadError(f"The JSON schema is no JSON: {error}.") from error
        require(
            isinstance(schema, (dict, bool)),
            f'A JSON schema is an object such as {{"type": "integer"}}, not {schema!r:.60}.',
        )
        what = f"The JSON schema {json.dumps(schema):.80}"
        require(schema is not False, f"{what} is satisfied by no text: true allows all JSON.")
        schema = {} if schema is True else schema
        make = _llguidance().LLMatcher.grammar_from_json_schema
        try:
            grammar = make(json.dumps(schema), overrides=STYLE)
        except ValueError as error:
            raise ClearheadError(f"{what} cannot be used: {_line(error)}.") from error
        _check_grammar(grammar, what)
        return _first(grammar, tokenizer, stop, vocab_size, what)

    def mask(self) -> Bool[Tensor, " v"]:
        """Which tokens may come next; a stop id where the text may end. Where only one text can
        follow, it comes in the tokeniser's own tokens.
        """
        if self._known is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            found = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
            self._known = torch.zeros(self._size, dtype=torch.bool)
            self._known[: len(found)] = torch.from_numpy(found)
        return self._known

    def advance(self, token: int) -> None:
        """This token came."""
        require(
            bool(self._matcher.consume_token(int(token))),
            f"Token {token} does not fit the constraint here: choose one that mask() allows.",
        )
        self._known = None

    @property
    def accepts(self) -> bool:
        """Whether the text so far is whole: it may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def done(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        if self._matcher.is_stopped():
            return True
        if not self.accepts:
            return False
        mask = self.mask()
        return int(mask.sum()) == sum(bool(mask[id]) for id in self._stop if id < self._size)

    def copy(self) -> Constraint:
        """The same at the same place, for another text."""
        other = object.__new__(Constraint)
        other.__dict__ |= self.__dict__ | {"_matcher": self._matcher.deep_copy()}
        return other

    def _check(self) -> None:
        require(
            not self._matcher.is_error(),
            "The constraint cannot go on: no token of the vocabulary continues the text as it "
            f"must ({_line(self._matcher.get_error())}).",
        )


def _pieces(tokenizer: Any) -> list[bytes | None]:
    """What each token writes."""
    found = pieces_of(tokenizer)
    if found is None:
        raise ClearheadError(
            "A constraint cannot follow this tokeniser: its decoder puts blanks between words by "
            "itself. Byte-level, sentencepiece and character vocabularies work."
        )
    return list(found.of)


class _Tokens:
    """What llguidance asks of a tokeniser: what tokens write, and texts cut into them."""

    def __init__(self, tokenizer: Any, pieces: Sequence[bytes | None], eos: int) -> None:
        # A special token writes what no text can hold, so that no grammar allows it.
        self.tokens = [
            b"\xff<%d>" % id if piece is None else piece for id, piece in enumerate(pieces)
        ]
        self.special_token_ids = [id for id, piece in enumerate(pieces) if piece is None]
        self.eos_token_id, self.bos_token_id = eos, None
        self._pieces, self._backend = pieces, tokenizer.backend
        self._ids = {piece: id for id, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """A text that must come, in the tokens that the model would expect."""
        try:
            own = self._backend.encode(text.decode(), add_special_tokens=False).ids
        except Exception:  # half a character, or what the tokeniser does not know
            return self._longest_each(text)
        # Some tokenisers put a blank before a text, or a token for what they do not know.
        written = b"".join(self._pieces[id] or b"\xff" for id in own)
        return own if written == text else self._longest_each(text)

    def _longest_each(self, text: bytes) -> list[int]:
        """The longest token each time, up to where none fits."""
        found, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self._ids), 0)
            if size == 0:
                break
            found.append(self._ids[text[at : at + size]])
            at += size
        return found


_KNOWN: weakref.WeakKeyDictionary[Any, dict[frozenset[int], Any]] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Any, stop: Collection[int]) -> Any:
    """llguidance's view of a tokeniser; made once, it takes a while for large ones."""
    known = _KNOWN.setdefault(tokenizer, {})
    ends = frozenset(stop)
    if ends not in known:
        package = _llguidance()
        pieces = _pieces(tokenizer)
        for id in ends & set(range(len(pieces))):
            pieces[id] = None
        # Where no token ends a text, one behind the last stands for it; no mask shows it.
        last = sorted(ends) or [len(pieces)]
        pieces += [None] * (max(last) + 1 - len(pieces))
        wrapper = package.TokenizerWrapper(_Tokens(tokenizer, pieces, last[0]))
        known[ends] = package.LLTokenizer(wrapper, eos_token=last)
    return known[ends]


def _first(
    grammar: str, tokenizer: Any, stop: Collection[int] | None, vocab_size: int | None, what: str
) -> Constraint:
    """A constraint that at least one text can satisfy."""
    ends = tokenizer.eos_ids if stop is None else stop
    found = Constraint(grammar, tokenizer, ends, vocab_size or tokenizer.vocab_size)
    try:
        possible = bool(found.mask().any()) or found.accepts
    except ClearheadError as error:
        raise ClearheadError(
            f"{what} is satisfied by no text that this vocabulary can write: change it. ({error})"
        ) from error
    require(possible, f"{what} is satisfied by no text that this vocabulary can write: change it.")
    return found


def _check_grammar(grammar: str, what: str) -> None:
    said = _llguidance().LLMatcher.validate_grammar(grammar)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    require(not said, f"{what} cannot be used: {why.removeprefix('error: ')}.")


def _alphabet(pieces: Sequence[bytes | None]) -> list[str] | None:
    """The characters of a vocabulary that can write these alone; None: it can write every byte, or
    has characters only within longer tokens.
    """
    known = {piece for piece in pieces if piece}
    if all(bytes([byte]) in known for byte in range(256)):
        return None
    try:
        texts = [piece.decode() for piece in known]
    except UnicodeDecodeError:
        return None
    letters = {text for text in texts if len(text) == 1}
    return sorted(letters) if letters >= set("".join(texts)) else None


def _escaped(letter: str) -> str:
    return f"\\x{{{ord(letter):x}}}"


def _slashed(pattern: str) -> str:
    return _llguidance().regex_to_lark(pattern, "")


def _line(text: object) -> str:
    return str(text).strip().partition("\n")[0][:120]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ClearheadError(
            "Constraints need the package llguidance: pip install 'clearhead[constrain]'."
        ) from error
    return llguidance
