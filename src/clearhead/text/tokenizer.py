"""The tokeniser a model is given: text to ids and back, with its special tokens by role.

It stands around a `tokenizers.Tokenizer` (`backend`), which does the work in Rust and is what
tokenizer.json describes:

    text -> normalise -> split -> subwords -> special tokens around it -> ids
    ids -> tokens -> decoder -> text
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.special import ROLES, write_whole
from clearhead.text.stream import DecodeStream


@dataclass(frozen=True)
class Encoded:
    """A text, or two, as ids, with what tagging and question answering need to find back."""

    ids: list[int]
    """The tokens."""
    types: list[int]
    """The segment of each token: 0 for the first text, 1 for the second (BERT's token types)."""
    offsets: list[tuple[int, int]]
    """Where each token begins and ends in its text, in characters; (0, 0) for special tokens."""
    parts: list[int | None]
    """Which text each token is from, 0 or 1; None for the special tokens around them."""
    words: list[int | None]
    """Which word each token is from, None for special tokens."""


class Tokenizer:
    """Text to ids and back. `Tokenizer.load(folder)`, `tokenizer.save(folder)`."""

    hf_class = "PreTrainedTokenizerFast"
    """What tokenizer_config.json names, so that transformers takes tokenizer.json as it is."""

    def __init__(
        self,
        backend: Backend,
        roles: Mapping[str, str] | None = None,
        *,
        max_len: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
        target: Tokenizer | None = None,
    ) -> None:
        # Both may be set in a tokenizer.json; here texts are whole unless the caller cuts them.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.roles = dict(roles or {})
        for role, token in self.roles.items():
            require(
                role in ROLES,
                f'"{role}" is no role of a token.{did_you_mean(role, ROLES)} '
                f"Roles: {', '.join(ROLES)}.",
            )
            require(
                backend.token_to_id(token) is not None,
                f'The {role} token "{token}" is not in the vocabulary: add it, or name another.',
            )
        self.max_len = max_len
        self.chat_template = chat_template
        own = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids = tuple(dict.fromkeys((*own, *eos_ids)))
        self._target = target
        self._special = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, folder: str | Path, model_type: str | None = None) -> Tokenizer:
        """The tokeniser of a folder, from whichever files it has; see `clearhead.text.folder`."""
        from clearhead.text.folder import load_tokenizer  # it builds Tokenizers, so it stands above

        return load_tokenizer(folder, model_type)

    # -- text to ids

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; with `special`, the tokens that the model expects around it too.

        Special tokens that are written in the text count as such.
        """
        return self._encoding(text, special=special).ids

    def encode_batch(self, texts: Iterable[str], special: bool = True) -> list[list[int]]:
        """The ids of many texts, faster than one by one; not padded."""
        texts = list(texts)
        try:
            found = self.backend.encode_batch_fast(texts, add_special_tokens=special)
        except BaseException as error:
            for text in texts:  # names the text at fault
                self._encoding(text, special=special)
            raise _mended(error, "These texts cannot be tokenised") from error
        return [encoding.ids for encoding in found]

    def encode_pair(self, first: str, second: str, special: bool = True) -> Encoded:
        """Two texts as one sequence, as models for sentence pairs and question answering take
        them.
        """
        return _encoded(self._encoding(first, second, special=special))

    def encode_with_offsets(self, text: str, special: bool = True) -> Encoded:
        """The ids of a text and where each token stands in it."""
        return _encoded(self._encoding(text, special=special))

    def encode_words(self, words: Sequence[str], special: bool = True) -> Encoded:
        """A sentence that is already cut into words; `Encoded.words` says which is whose."""
        require(
            not isinstance(words, str), "encode_words takes a list of words: text.split() is one."
        )
        return _encoded(self._encoding(list(words), special=special, is_pretokenized=True))

    def _encoding(self, text: Any, second: Any = None, *, special: bool, **more: bool) -> Encoding:
        try:
            return self.backend.encode(text, second, add_special_tokens=special, **more)
        except BaseException as error:
            raise _mended(error, f"{_shown(text)} cannot be tokenised") from error

    # -- ids to text

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; special tokens are left out unless `special`."""
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        try:
            numbers = [index(id) for id in values]
        except TypeError:
            numbers = [-1]
        require(
            all(0 <= id < 1 << 32 for id in numbers),
            f"Ids are whole numbers from 0, not {_shown(values)}: leave out padding such as -100, "
            "and decode one sequence at a time.",
        )
        return self._decoded(numbers, special)

    def decode_stream(self, special: bool = False) -> DecodeStream:
        """A decoder that is fed ids and returns text, never half a character."""

        def token(id: int) -> str | None:
            left_out = not special and id in self._special
            return None if left_out else self.backend.id_to_token(id)

        return DecodeStream(lambda ids: self._decoded(list(ids), special), token)

    def _decoded(self, ids: list[int], special: bool) -> str:
        try:
            return self.backend.decode(ids, skip_special_tokens=not special)
        except BaseException as error:
            raise _mended(error, f"{_shown(ids)} cannot be decoded") from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """A conversation as the text the model was trained on; encode it with special=False."""
        from clearhead.text.chat import render_chat  # templates take Jinja; most starts do not

        require(
            self.chat_template is not None,
            "This tokeniser has no chat template: use a model that was trained for chat, or write "
            "the prompt yourself.",
        )
        extra = {f"{role}_token": token for role, token in self.roles.items()} | extra
        bos, eos = extra.pop("bos_token", ""), extra.pop("eos_token", "")
        assert self.chat_template is not None
        return render_chat(self.chat_template, messages, bos, eos, add_generation_prompt, **extra)

    # -- the vocabulary

    @cached_property
    def vocab_size(self) -> int:
        """How many rows an embedding needs: the largest id plus one."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def id(self, token: str) -> int:
        """The id of a token."""
        found = self.backend.token_to_id(token)
        if found is None:
            special = [self.token(id) for id in sorted(self._special)]
            raise ClearheadError(
                f'The vocabulary has no token "{token}".{did_you_mean(token, special)} '
                "To cut a text into tokens, use encode."
            )
        return found

    def token(self, id: int) -> str:
        """The token of an id, as the vocabulary spells it."""
        found = self.backend.id_to_token(id) if 0 <= id < 1 << 32 else None
        require(
            found is not None,
            f"There is no token with id {id}: the vocabulary has {self.vocab_size} tokens.",
        )
        assert found is not None
        return found

    def __contains__(self, token: str) -> bool:
        return self.backend.token_to_id(token) is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        return self._special

    @property
    def target(self) -> Tokenizer:
        """The tokeniser of the other side of a translation: itself, unless there are two."""
        return self if self._target is None else self._target

    def _role_id(self, role: str) -> int | None:
        token = self.roles.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_id(self) -> int | None:
        """What a text begins with."""
        return self._role_id("bos")

    @property
    def eos_id(self) -> int | None:
        """What a text ends with; `eos_ids` has all that end a model's answer."""
        return self._role_id("eos")

    @property
    def pad_id(self) -> int | None:
        """What fills up the short rows of a batch."""
        return self._role_id("pad")

    @property
    def unk_id(self) -> int | None:
        """What stands for anything the vocabulary cannot write."""
        return self._role_id("unk")

    @property
    def mask_id(self) -> int | None:
        """What hides a token in masked language modelling."""
        return self._role_id("mask")

    @property
    def cls_id(self) -> int | None:
        """Whose place in the output stands for the whole text."""
        return self._role_id("cls")

    @property
    def sep_id(self) -> int | None:
        """What parts two texts."""
        return self._role_id("sep")

    # -- files

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers opens with equal ids;
        a tokeniser for another target language goes into the folder "target".
        """
        folder = Path(folder)
        try:
            for name, data in self._files().items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(folder / name, data)
        except OSError as error:
            raise ClearheadError(f"The tokeniser cannot be saved to {folder}: {error}.") from error

    def _files(self) -> dict[str, str | bytes]:
        """Name -> content, in the order of writing."""
        config = json.dumps(self._config(), indent=2, ensure_ascii=False) + "\n"
        own: dict[str, str | bytes] = {
            "tokenizer_config.json": config,
            "tokenizer.json": self.backend.to_str(pretty=True),
        }
        target = {} if self._target is None else self._target._files()
        return {f"target/{name}": data for name, data in target.items()} | own

    def _config(self) -> dict[str, Any]:
        inputs = ["input_ids", "attention_mask"]
        if self.cls_id is not None and 1 in self.encode_pair("a", "a").types:
            inputs.insert(1, "token_type_ids")
        named = {f"{role}_token": token for role, token in self.roles.items()}
        extra = [self.token(id) for id in sorted(self._special)]
        extra = [token for token in extra if token not in self.roles.values()]
        config: dict[str, Any] = {
            "tokenizer_class": self.hf_class,
            "clean_up_tokenization_spaces": False,
            "model_input_names": inputs,
            **named,
        }
        if extra:
            config["additional_special_tokens"] = extra
        if self.max_len is not None:
            config["model_max_length"] = self.max_len
        if self.eos_ids not in ((), (self.eos_id,)):
            config["eos_ids"] = list(self.eos_ids)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return config

    def __repr__(self) -> str:
        kind = type(self.backend.model).__name__
        return f"Tokenizer({kind}, {self.vocab_size:,} tokens)"


def _encoded(encoding: Encoding) -> Encoded:
    return Encoded(
        ids=encoding.ids,
        types=encoding.type_ids,
        offsets=encoding.offsets,
        parts=encoding.sequence_ids,
        words=encoding.word_ids,
    )


def _mended(error: BaseException, what: str) -> BaseException:
    """What to raise: the error itself if the user pressed Ctrl-C, else one with an explanation.

    A Rust panic is no Exception: a hostile tokenizer.json can cause one when it is used.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        if isinstance(error, ClearheadError):
            return error
        return ClearheadError(
            f"{what} ({error}). A text is a str in valid Unicode (no lone surrogates); if it is, "
            "the tokeniser's files are damaged."
        )
    return error


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
