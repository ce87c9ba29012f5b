"""sentencepiece vocabularies as tokenisers (Kudo & Richardson 2018): T5 and Llama 2.

Blanks are letters (U+2581), so text comes back exactly as it was normalised. Unigram takes the
most probable way to cut a text (Kudo 2018); BPE merges the pair whose result has the best score.
Unknown characters become the unknown piece, or their bytes (<0xE2> <0x82> <0xAC>) where the
vocabulary has them.

Differs from sentencepiece: special tokens that are written in a text count as such, as in
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.bytelevel import around_text
from clearhead.text.protobuf import (
    BPE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    SentencePieceModel,
    read_model,
)
from clearhead.text.special import SideFiles, add_tokens

BLANK = "\u2581"
T5_KINDS = ("t5", "mt5", "flan-t5")
LLAMA_KINDS = ("llama", "codellama", "mistral", "mixtral")
_DEFAULTS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def read_sentencepiece(path: Path, side: SideFiles) -> tuple[Backend, dict[str, str]]:
    """The tokeniser of a sentencepiece file, and its roles."""
    model = read_model(path)
    said = side.kind()
    known = (*T5_KINDS, *LLAMA_KINDS)
    require(
        said in ("", *known),
        f'{path.name} of a "{said}" tokeniser is not known.{did_you_mean(said, known)} Known: '
        f"{', '.join(known)}. Save it with transformers as tokenizer.json, which is read as it "
        "stands.",
    )
    extra = _extra_ids(side) if said in T5_KINDS else []
    first = said in LLAMA_KINDS and side.config.get("legacy") is False
    backend = sentencepiece_backend(model, extra, first=first)
    roles = _DEFAULTS | {role: token.content for role, token in side.roles.items()}
    roles["unk"] = model.pieces[model.unk_id].text
    roles = {
        role: token
        for role, token in roles.items()
        if role in side.roles or backend.token_to_id(token) is not None
    }
    add_tokens(backend, side)
    backend.add_special_tokens([*roles.values(), *reversed(extra)])
    backend.post_processor = _around(backend, said, roles, side.config)
    return backend, roles


def sentencepiece_backend(
    model: SentencePieceModel, extra: Sequence[str] = (), first: bool = False
) -> Backend:
    """The tokeniser of a model, with no special tokens around the text.

    With `first`, only the very beginning of a text gets its blank, not what follows a special
    token.
    """
    pieces = [*model.pieces, *(Piece(token, 0.0, CONTROL) for token in extra)]
    if model.algorithm == BPE:
        backend = Backend(scored_bpe(pieces, model.unk_id, model.byte_fallback))
    else:
        scores = [(piece.text, piece.score) for piece in pieces]
        backend = Backend(models.Unigram(scores, model.unk_id, model.byte_fallback))
    steps: list[Any] = []
    if model.charsmap:
        try:
            steps.append(normalizers.Precompiled(model.charsmap))
        except Exception as error:
            raise ClearheadError(
                f"The model's table of characters is damaged ({error}): copy the file again."
            ) from error
    if model.single_blanks:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    blanks(backend, model.dummy_prefix, first, _whole_words(pieces), model.byte_fallback)
    add_pieces(backend, pieces)
    return backend


def blanks(backend: Backend, prefix: bool, first: bool, split: bool, byte_fallback: bool) -> None:
    """Blanks to U+2581 and back, with a blank before the text or not.

    `first` is what transformers calls not legacy: no blank behind a special token. It is
    Metaspace's way, which adds none before a blank either; the normalisers here always do, as
    sentencepiece does.
    """
    if first and prefix:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first", split)
    else:
        before = [backend.normalizer] if backend.normalizer is not None else []
        steps = [normalizers.Prepend(BLANK)] if prefix else []
        backend.normalizer = normalizers.Sequence(
            [*before, *steps, normalizers.Replace(" ", BLANK)]
        )
        if split:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "never", split=True)
    if not byte_fallback:
        backend.decoder = decoders.Metaspace(BLANK, "always" if prefix else "never", split)
        return
    back = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)


def add_pieces(backend: Backend, pieces: Sequence[Piece]) -> None:
    """Control pieces are special tokens; user-defined ones are only never cut."""
    backend.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.type != USER_DEFINED)
            for piece in pieces
            if piece.type in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def scored_bpe(pieces: Sequence[Piece], unk_id: int | None, byte_fallback: bool) -> models.BPE:
    """BPE that merges the pair whose result scores best: the merges are all ways to part each
    piece in two others, best piece first.
    """
    vocab = {piece.text: id for id, piece in enumerate(pieces)}
    require(len(vocab) == len(pieces), "The vocabulary has some pieces twice: it is damaged.")
    # Only these take part in merges: "<0x0A>" or "</s>" written out is no such piece.
    parts = {piece.text: piece.score for piece in pieces if piece.type == NORMAL}
    merges = []
    for text, score in parts.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in parts and right in parts:
                merges.append((-score, vocab[text], vocab[left], vocab[right], left, right))
    return models.BPE(
        vocab,
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token=None if unk_id is None else pieces[unk_id].text,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _whole_words(pieces: Sequence[Piece]) -> bool:
    """May the text be cut before every blank? Not if a piece has one inside."""
    return not any(
        BLANK in piece.text[1:] for piece in pieces if piece.type in (NORMAL, USER_DEFINED)
    )


def _extra_ids(side: SideFiles) -> list[str]:
    """T5's sentinels, which stand behind the vocabulary from the last to the first."""
    count = side.config.get("extra_ids", 100)
    require(
        type(count) is int and 0 <= count <= 10_000,
        f"extra_ids is {count!r}; it is a number of tokens, T5 has 100.",
    )
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def _around(backend: Backend, said: str, roles: dict[str, str], config: dict[str, Any]) -> Any:
    if said in T5_KINDS:
        eos = roles.get("eos")
        require(eos is not None, "A T5 vocabulary has </s>; this one does not.")
        return processors.TemplateProcessing(
            single=["$A", f"{eos}"],
            pair=["$A", f"{eos}", "$B", f"{eos}"],
            special_tokens=[(eos, backend.token_to_id(str(eos)))],
        )
    bos = config.get("add_bos_token", said in LLAMA_KINDS) is True
    eos_too = config.get("add_eos_token") is True
    return around_text(
        backend, roles.get("bos") if bos else None, roles.get("eos") if eos_too else None
    )
