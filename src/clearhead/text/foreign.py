"""Tokenisers inside other files: GGUF's metadata (and back), and llama2.c's tokenizer.bin.

GGUF keeps a tokeniser as lists under "tokenizer.ggml.": `model` says "llama" (sentencepiece's BPE
by scores, with byte tokens) or "gpt2" (byte-level BPE with `merges`, cut as `pre` says); numbers
in `token_type` are sentencepiece's. llama2.c keeps (token, score), with blanks written as blanks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.bytelevel import around_text
from clearhead.text.protobuf import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece
from clearhead.text.sentencepiece import BLANK, add_pieces, blanks, scored_bpe
from clearhead.text.split import byte_level_split, composing, split_name
from clearhead.text.stream import BYTE_TOKEN
from clearhead.text.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",  # sic
    "mask": "mask_token_id",
}
LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
PAST_VOCABULARY = -1e6


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokeniser that a GGUF file carries."""
    model = str(metadata.get(KEY + "model"))
    known = ("gpt2", "llama")
    require(
        model in known,
        f'The GGUF file\'s tokeniser is of kind "{model}".{did_you_mean(model, known)} '
        f"Known: {', '.join(known)}.",
    )
    pieces = _pieces(metadata)
    roles = _roles(metadata, pieces, model)
    build = _gguf_byte_level if model == "gpt2" else _gguf_scored
    backend, add_bos = build(metadata, pieces, roles)
    bos = roles.get("bos") if metadata.get(KEY + "add_bos_token", add_bos) else None
    eos = roles.get("eos") if metadata.get(KEY + "add_eos_token", False) else None
    backend.post_processor = around_text(backend, bos, eos)
    ends = [metadata.get(KEY + name) for name in ("eot_token_id", "eom_token_id")]
    template = metadata.get(TEMPLATE)
    return Tokenizer(
        backend,
        roles,
        eos_ids=[end for end in ends if type(end) is int and 0 <= end < len(pieces)],
        chat_template=template if isinstance(template, str) else None,
    )


def from_llama2c(entries: Sequence[tuple[str, float]]) -> Tokenizer:
    """The tokeniser of llama2.c's tokenizer.bin, from its (token, score) entries."""
    require(
        len(entries) > 3,
        f"A llama2.c tokeniser has at least 4 tokens, this one {len(entries)}: it is damaged.",
    )
    pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    for id, (text, score) in enumerate(entries[3:], 3):
        # The bytes stand behind the first three, as <0x41> or, in older files, as what they are:
        # there "A" is written twice, and the later one is the letter.
        if id < 259 and text in (f"<0x{id - 3:02X}>", chr(id - 3)):
            pieces.append(Piece(f"<0x{id - 3:02X}>", 0.0, BYTE))
        else:
            pieces.append(Piece(text.replace(" ", BLANK), float(score)))
    backend = _scored_backend(pieces, unk_id=0, prefix=True)
    backend.post_processor = around_text(backend, "<s>", None)
    # Its texts stand one behind the other, each begun by <s>: where the next begins, one has ended
    # (run.c stops there).
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    return Tokenizer(backend, names, eos_ids=(1,))


def gguf_metadata(tokenizer: Tokenizer, vocab_size: int | None = None) -> dict[str, Any]:
    """What a GGUF file keeps of a tokeniser; the reverse of `from_gguf`.

    With `vocab_size` (the rows of the model's embedding), unused tokens fill the list up to it.
    """
    described = json.loads(tokenizer.backend.to_str())
    model = described["model"]
    require(
        model["type"] == "BPE",
        f"GGUF export knows byte-level BPE and sentencepiece's BPE, not {model['type']}.",
    )
    name = split_name(tokenizer.backend)
    pieces = _exported_pieces(tokenizer, described["added_tokens"], scored=name is None)
    size = max(vocab_size or 0, len(pieces))
    require(
        vocab_size is None or vocab_size >= len(pieces),
        f"The tokeniser has {len(pieces)} tokens but the model only {vocab_size}: they do not "
        "belong together.",
    )
    pieces += [Piece(f"[PAD{id}]", PAST_VOCABULARY, 5) for id in range(len(pieces), size)]
    found: dict[str, Any] = {KEY + "tokens": [piece.text for piece in pieces]}
    if name is not None:
        merges = [" ".join(pair) for pair in model["merges"]]
        found |= {KEY + "model": "gpt2", KEY + "pre": name, KEY + "merges": merges}
    elif model.get("byte_fallback") and BLANK in json.dumps(described, ensure_ascii=False):
        found[KEY + "model"] = "llama"
        found[KEY + "pre"] = "default"
        found[KEY + "scores"] = _scores(pieces, model["merges"])
        found[KEY + "add_space_prefix"] = _prefixed(described)
    else:
        raise ClearheadError(
            "GGUF has no name for the way this tokeniser cuts text, so llama.cpp would cut it "
            "differently: export to Hugging Face instead."
        )
    found[KEY + "token_type"] = [piece.type for piece in pieces]
    ids = {role: getattr(tokenizer, f"{role}_id") for role in ROLE_KEYS}
    found |= {KEY + ROLE_KEYS[role]: id for role, id in ids.items() if id is not None}
    around = tokenizer.encode("a")
    found[KEY + "add_bos_token"] = tokenizer.bos_id is not None and around[0] == tokenizer.bos_id
    found[KEY + "add_eos_token"] = tokenizer.eos_id is not None and around[-1] == tokenizer.eos_id
    other = [id for id in tokenizer.eos_ids if id != tokenizer.eos_id]
    if other:
        found[KEY + "eot_token_id"] = other[0]
    if tokenizer.chat_template is not None:
        found[TEMPLATE] = tokenizer.chat_template
    return found


def _pieces(metadata: Mapping[str, Any]) -> list[Piece]:
    """The vocabulary, each list checked against the others."""
    tokens = _list(metadata, "tokens", str)
    require(bool(tokens), "The GGUF file has no tokens (tokenizer.ggml.tokens): it is damaged.")
    assert tokens is not None
    types = _list(metadata, "token_type", int) or [_plain_type(token) for token in tokens]
    scores = _list(metadata, "scores", float) or [0.0] * len(tokens)
    for name, values in (("token_type", types), ("scores", scores)):
        require(
            len(values) == len(tokens),
            f"The GGUF file has {len(tokens)} tokens but {len(values)} of {name}: it is damaged.",
        )
    pieces = [Piece(*values) for values in zip(tokens, scores, types, strict=True)]
    seen: dict[str, int] = {}
    for id, piece in enumerate(pieces):
        require(
            piece.text not in seen,
            f"The GGUF file has the token {piece.text!r} twice, as number "
            f"{seen.get(piece.text)} and {id}.",
        )
        seen[piece.text] = id
    return pieces


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any] | None:
    values = metadata.get(KEY + name)
    if values is None:
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    allowed = (int, float) if kind is float else kind
    require(
        isinstance(values, (list, tuple)) and all(isinstance(value, allowed) for value in values),
        f"{KEY}{name} must be a list of {kind.__name__}: the GGUF file is damaged.",
    )
    return list(values)


def _roles(metadata: Mapping[str, Any], pieces: list[Piece], model: str) -> dict[str, str]:
    default = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    roles = {}
    for role, name in ROLE_KEYS.items():
        id = metadata.get(KEY + name, default.get(role))
        if type(id) is int and 0 <= id < len(pieces):
            roles[role] = pieces[id].text
    return roles


def _gguf_byte_level(
    metadata: Mapping[str, Any], pieces: list[Piece], roles: dict[str, str]
) -> tuple[Backend, bool]:
    vocab = {piece.text: id for id, piece in enumerate(pieces)}
    merges = []
    for number, line in enumerate(_list(metadata, "merges", str) or []):
        rest, _, right = line[1:].partition(" ")
        left = line[:1] + rest
        require(
            left in vocab and right in vocab and left + right in vocab,
            f"Merge {number} of the GGUF file, {line!r}, names a token that is not in the "
            "vocabulary: the file is damaged.",
        )
        merges.append((left, right))
    require(bool(merges), "The GGUF file has no merges (tokenizer.ggml.merges): it is damaged.")
    pre = metadata.get(KEY + "pre", "default")
    backend = Backend(models.BPE(vocab, merges, ignore_merges=pre in LLAMA3))
    normalizer = composing(str(pre))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = byte_level_split(str(pre))
    backend.decoder = decoders.ByteLevel()
    add_pieces(backend, pieces)
    _add_roles(backend, roles)
    return backend, pre in LLAMA3


def _gguf_scored(
    metadata: Mapping[str, Any], pieces: list[Piece], roles: dict[str, str]
) -> tuple[Backend, bool]:
    require(
        KEY + "scores" in metadata,
        "The GGUF file has no scores (tokenizer.ggml.scores), which say what is merged first.",
    )
    prefix = metadata.get(KEY + "add_space_prefix", True) is not False
    unknown = roles.get("unk")
    unk_id = next((id for id, piece in enumerate(pieces) if piece.text == unknown), None)
    backend = _scored_backend(pieces, unk_id, prefix)
    _add_roles(backend, roles)
    return backend, True


def _scored_backend(pieces: list[Piece], unk_id: int | None, prefix: bool) -> Backend:
    fallback = any(piece.type == BYTE for piece in pieces)
    backend = Backend(scored_bpe(pieces, unk_id, fallback))
    blanks(backend, prefix, first=False, split=False, byte_fallback=fallback)
    add_pieces(backend, pieces)
    return backend


def _add_roles(backend: Backend, roles: dict[str, str]) -> None:
    tokens = [AddedToken(token, special=True, normalized=False) for token in roles.values()]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if token.content not in known])


def _exported_pieces(
    tokenizer: Tokenizer, added: list[dict[str, Any]], scored: bool
) -> list[Piece]:
    """The vocabulary with sentencepiece's types; ids that nothing has become unused tokens."""
    vocab = tokenizer.backend.get_vocab()
    types = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in added}
    if scored and tokenizer.unk_id is not None:
        types[tokenizer.unk_id] = UNKNOWN
    pieces = [Piece(f"[PAD{id}]", PAST_VOCABULARY, 5) for id in range(tokenizer.vocab_size)]
    for token, id in vocab.items():
        pieces[id] = Piece(token, 0.0, types.get(id, _plain_type(token) if scored else NORMAL))
    return pieces


def _plain_type(token: str) -> int:
    return BYTE if BYTE_TOKEN.fullmatch(token) else NORMAL


def _scores(pieces: Sequence[Piece], merges: Sequence[Sequence[str]]) -> list[float]:
    """Minus the place of the first merge that makes a piece: then best score first is the same
    order.
    """
    first: dict[str, float] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, -float(place + 1))
    last = -float(len(merges) + 1)
    return [
        first.get(piece.text, last) if piece.type == NORMAL else piece.score for piece in pieces
    ]


def _prefixed(described: dict[str, Any]) -> bool:
    """Does a text get a blank in front?"""
    text = json.dumps([described["normalizer"], described["pre_tokenizer"]], ensure_ascii=False)
    return '"Prepend"' in text or '"first"' in text or '"always"' in text
