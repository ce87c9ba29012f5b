"""The files that stand beside a vocabulary.

They say which tokens are special, how long a text may be, and how a chat is written.

tokenizer_config.json       bos_token ... (a text, or a table with its flags), model_max_length,
                            added_tokens_decoder, chat_template, tokenizer_class
special_tokens_map.json     the same tokens, in older folders
added_tokens.json           token -> id, what was added behind the vocabulary
config.json                 model_type; generation_config.json: eos_token_id, often several
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, require

ROLES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")
LARGEST_FILE = 512 << 20
LONGEST = 10**9
"""`model_max_length` of 10^30 is transformers' way to say that nobody knows."""


@dataclass(frozen=True)
class SideFiles:
    """What the files beside a vocabulary say."""

    config: dict[str, Any]
    """tokenizer_config.json as it is."""
    roles: dict[str, AddedToken]
    """Role -> token, for the roles of ROLES that are filled."""
    extra: tuple[AddedToken, ...]
    """Special tokens without a role."""
    added: dict[int, AddedToken]
    """Id -> token, for the tokens that were added behind the vocabulary."""
    model_type: str
    """The model's family as Hugging Face names it, or nothing."""
    eos_ids: tuple[int, ...]
    """The ids that end a text, as the model's own files say."""
    role_ids: dict[str, int]
    """Role -> id, as config.json says; used where no file names the token."""
    chat_template: str | None
    """The Jinja template that writes a conversation as one text."""

    @property
    def max_len(self) -> int | None:
        length = self.config.get("model_max_length")
        known = isinstance(length, (int, float)) and 0 < length < LONGEST
        return int(length) if known and length is not None else None

    def kind(self) -> str:
        """The tokeniser's class in small letters ("roberta" of RobertaTokenizerFast), or the
        model's type.
        """
        name = str(self.config.get("tokenizer_class") or "").removesuffix("Fast")
        name = name.removesuffix("Tokenizer").lower()
        return self.model_type if name in ("", "pretrained", "tokenizersbackend") else name

    def token(self, role: str, default: str | None = None) -> str | None:
        """The token that plays a role."""
        return self.roles[role].content if role in self.roles else default


def read_side_files(folder: Path, model_type: str | None = None) -> SideFiles:
    """All files beside the vocabulary; each of them may be missing."""
    config = read_table(folder / "tokenizer_config.json")
    # As in transformers: these two count only in folders from before added_tokens_decoder.
    newer = "added_tokens_decoder" in config
    older = {} if newer else read_table(folder / "special_tokens_map.json")
    ids = {} if newer else read_table(folder / "added_tokens.json")
    model = read_table(folder / "config.json")
    generation = read_table(folder / "generation_config.json")
    roles = {}
    for role in ROLES:
        value = older.get(f"{role}_token") or config.get(f"{role}_token")
        if value:
            roles[role] = added_token(value, f"{role}_token", special=True)
    return SideFiles(
        config=config,
        roles=roles,
        extra=_extra_tokens(config, older),
        added=_added_tokens(config, ids, roles),
        model_type=model_type or str(model.get("model_type") or ""),
        eos_ids=_eos_ids(config.get("eos_ids"), generation, model),
        role_ids={
            role: model[f"{role}_token_id"]
            for role in ROLES
            if type(model.get(f"{role}_token_id")) is int
        },
        chat_template=_chat_template(folder, config),
    )


def added_token(value: Any, where: str, special: bool) -> AddedToken:
    """A token written as a text or as a table with its flags."""
    if isinstance(value, str) and value:
        return AddedToken(value, normalized=False, special=special)
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        flags = {
            name: value[name]
            for name in ("single_word", "lstrip", "rstrip", "normalized")
            if isinstance(value.get(name), bool)
        }
        return AddedToken(
            value["content"], special=special or value.get("special") is True, **flags
        )
    raise ClearheadError(
        f'{where} is {value!r}; a token is a text, or a table with its text under "content".'
    )


def add_tokens(backend: Backend, side: SideFiles) -> None:
    """Make the added and the special tokens known to the tokeniser, each with the id its file
    gives.
    """
    for id, token in sorted(side.added.items()):
        if backend.id_to_token(id) != token.content:
            backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        require(
            found == id,
            f'The files say that the added token "{token.content}" has id {id}, but with this '
            f"vocabulary of {backend.get_vocab_size()} tokens it is {found}: files of two "
            "tokenisers are mixed, or some are missing.",
        )
    listed: dict[str, AddedToken] = {}
    for token in (*side.added.values(), *side.roles.values(), *side.extra):
        listed.setdefault(token.content, token)  # added_tokens_decoder carries the flags
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for name, token in listed.items() if name not in known])


def _extra_tokens(*tables: dict[str, Any]) -> tuple[AddedToken, ...]:
    found: dict[str, AddedToken] = {}
    for table in tables:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            values = table.get(key) or []
            values = list(values.values()) if isinstance(values, dict) else values
            require(isinstance(values, list), f"{key} must be a list of tokens, not {values!r}.")
            for value in values:
                token = added_token(value, key, special=True)
                found.setdefault(token.content, token)
    return tuple(found.values())


def _added_tokens(
    config: dict[str, Any], ids: dict[str, Any], roles: dict[str, AddedToken]
) -> dict[int, AddedToken]:
    special = {token.content for token in roles.values()}
    found = {}
    table = config.get("added_tokens_decoder") or {}
    require(isinstance(table, dict), "added_tokens_decoder must be a table: id -> token.")
    for key, value in table.items():
        require(str(key).isdecimal(), f"added_tokens_decoder has {key!r} where an id belongs.")
        found[int(key)] = added_token(value, f"added_tokens_decoder[{key}]", special=False)
    for name, id in ids.items():
        require(
            type(id) is int and id >= 0 and name != "",
            f'added_tokens.json gives "{name}" the id {id!r}: an id is a whole number from 0.',
        )
        ours = name in special
        found[id] = AddedToken(name, special=ours, normalized=not ours)
    return found


def _eos_ids(own: Any, *tables: dict[str, Any]) -> tuple[int, ...]:
    for value in (own, *(table.get("eos_token_id") for table in tables)):
        values = value if isinstance(value, list) else [value]
        found = tuple(dict.fromkeys(id for id in values if type(id) is int and id >= 0))
        if found:
            return found
    return ()


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The default template: a file of its own, or in tokenizer_config.json (alone or by name)."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    value = config.get("chat_template") or read_table(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) and value else None


def read_text(path: Path) -> str:
    """A text file in UTF-8, or a clear error."""
    try:
        size = path.stat().st_size
        require(
            size <= LARGEST_FILE,
            f"{path} has {size:,} bytes: no tokeniser's file is that large (limit "
            f"{LARGEST_FILE:,}).",
        )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ClearheadError(
            f"{path} is not UTF-8 text ({error}): it is damaged or in another encoding. "
            "Convert it (iconv -t UTF-8) or copy it again."
        ) from error
    except OSError as error:
        raise ClearheadError(f"{path} cannot be read ({error}).") from error


def read_json(path: Path) -> Any:
    """Any JSON file, or a clear error."""
    try:
        return json.loads(read_text(path))
    except ClearheadError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClearheadError(
            f"{path} cannot be read as JSON ({error}): the file is damaged. Copy it again."
        ) from error


def read_table(path: Path) -> dict[str, Any]:
    """A JSON file with a table in it; an empty table if there is no such file."""
    if not path.is_file():
        return {}
    data = read_json(path)
    require(isinstance(data, dict), f"{path} must hold a JSON table, not {type(data).__name__}.")
    return data


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all."""
    data = data.encode("utf-8") if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
