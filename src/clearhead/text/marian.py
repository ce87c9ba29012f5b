"""Marian's tokenisers: two sentencepiece models, one list of ids.

One model cuts the source language, another the target, and vocab.json numbers the pieces of both.

So a piece's id is not its place in a model, and a piece that only one of the models has is known to
the other side too. A text may begin with the language to translate to: >>fr<<.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, require
from clearhead.text.bytelevel import read_vocab_json
from clearhead.text.protobuf import CONTROL, UNKNOWN, SentencePieceModel, read_model
from clearhead.text.sentencepiece import BLANK, sentencepiece_backend
from clearhead.text.special import SideFiles, add_tokens
from clearhead.text.tokenizer import Encoded, Tokenizer

SOURCE, TARGET, VOCAB, TARGET_VOCAB = "source.spm", "target.spm", "vocab.json", "target_vocab.json"
ROLES = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
HIDDEN = "\ufdd0"
"""A code point that Unicode promises never to use."""
LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)


class MarianTokenizer(Tokenizer):
    """A tokeniser whose pieces come from `cutter` and whose ids come from `backend`."""

    hf_class = "MarianTokenizer"

    def __init__(
        self, backend: Backend, cutter: Backend, files: dict[str, str | bytes], **more: Any
    ) -> None:
        super().__init__(backend, **more)
        self.cutter, self.files = Tokenizer(cutter), files

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; with `special`, and the end of the sentence."""
        return self.encode_with_offsets(text, special).ids

    def encode_batch(self, texts: Iterable[str], special: bool = True) -> list[list[int]]:
        """The ids of many texts; not padded."""
        return [self.encode(text, special) for text in texts]

    def encode_with_offsets(self, text: str, special: bool = True) -> Encoded:
        """The ids of a text and where each token stands in it."""
        code = LANGUAGE.match(text) if isinstance(text, str) else None
        start = code.end() if code else 0
        cut = self.cutter._encoding(text[start:] if code else text, special=False)
        tokens, offsets = cut.tokens, [(a + start, b + start) for a, b in cut.offsets]
        if code:
            tokens, offsets = [code.group(), *tokens], [(0, start), *offsets]
        unknown = self.backend.token_to_id(self.roles["unk"])
        found = [self.backend.token_to_id(token) for token in tokens]
        ids = [unknown if id is None else id for id in found]
        parts: list[int | None] = [0] * len(ids)
        if special:
            ids, offsets, parts = [*ids, self.eos_id], [*offsets, (0, 0)], [*parts, None]
        numbers = [id for id in ids if id is not None]
        return Encoded(numbers, [0] * len(numbers), offsets, parts, list(parts))

    def encode_pair(self, first: str, second: str, special: bool = True) -> Encoded:
        """Not for translation: an error."""
        raise ClearheadError("A Marian tokeniser takes one text at a time, not pairs.")

    def encode_words(self, words: Any, special: bool = True) -> Encoded:
        """Not for translation: an error."""
        raise ClearheadError("A Marian tokeniser takes whole sentences, not single words.")

    def _files(self) -> dict[str, str | bytes]:
        named = {f"{role}_token": token for role, token in self.roles.items()}
        config = named | {
            "tokenizer_class": self.hf_class,
            "separate_vocabs": TARGET_VOCAB in self.files,
            "model_max_length": self.max_len or 512,
        }
        return self.files | {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def load_marian(folder: Path, side: SideFiles) -> MarianTokenizer:
    """The tokenisers of a folder with source.spm, target.spm and vocab.json."""
    for name in (SOURCE, TARGET, VOCAB):
        require((folder / name).is_file(), f"{folder} has no {name}, which Marian needs: copy it.")
    separate = (folder / TARGET_VOCAB).is_file()
    names = (SOURCE, TARGET, VOCAB, *((TARGET_VOCAB,) if separate else ()))
    models_read = {name: read_model(folder / name) for name in (SOURCE, TARGET)}
    files: dict[str, str | bytes] = {name: (folder / name).read_bytes() for name in names}
    roles = ROLES | {role: token.content for role, token in side.roles.items()}

    def side_of(model: str, vocabulary: str, target: MarianTokenizer | None) -> MarianTokenizer:
        vocab = read_vocab_json(folder / vocabulary)
        for role in ("unk", "eos"):
            require(
                roles[role] in vocab,
                f'{folder / vocabulary} has no "{roles[role]}", the {role} token: it is not a '
                "Marian vocabulary.",
            )
        backend = Backend(models.WordLevel(vocab, unk_token=roles["unk"]))
        ends = decoders.Replace(Regex(r"\A\s+|\s+\z"), "")
        backend.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.Fuse(), ends])
        add_tokens(backend, side)
        backend.add_special_tokens(list(roles.values()))
        cutter = sentencepiece_backend(_text_only(models_read[model]))
        cutter.add_special_tokens(list(roles.values()))
        return MarianTokenizer(
            backend, cutter, files, roles=roles, max_len=side.max_len or 512, target=target
        )

    target = side_of(TARGET, TARGET_VOCAB if separate else VOCAB, None)
    return side_of(SOURCE, VOCAB, target)


def _text_only(model: SentencePieceModel) -> SentencePieceModel:
    """The model with its control pieces renamed, so that no text has them: what counts here are the
    special tokens of vocab.json.
    """
    pieces = tuple(
        replace(piece, text=HIDDEN + piece.text) if piece.type in (CONTROL, UNKNOWN) else piece
        for piece in model.pieces
    )
    return replace(model, pieces=pieces)
