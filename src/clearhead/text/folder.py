"""Which files of a folder make its tokeniser, in this order:

tokenizer.json                         anything, complete
source.spm, target.spm, vocab.json     Marian
vocab.txt                              WordPiece
vocab.json, merges.txt                 byte-level BPE
*.model, *.spm                         sentencepiece
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.text.bytelevel import read_byte_level, word_end_decoder
from clearhead.text.marian import SOURCE, load_marian
from clearhead.text.sentencepiece import read_sentencepiece
from clearhead.text.special import ROLES, SideFiles, add_tokens, read_side_files
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.wordpiece import KINDS as WORDPIECE_KINDS
from clearhead.text.wordpiece import read_wordpiece

SENTENCEPIECE = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "*.model", "*.spm")
# Where no file says what a token is for: names that mean the same everywhere.
WELL_KNOWN = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "pad": ("<pad>", "[PAD]", "<|padding|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


def load_tokenizer(folder: str | Path, model_type: str | None = None) -> Tokenizer:
    """The tokeniser of a folder, from whichever files it has.

    `model_type` ("roberta") says which family's special tokens belong around a text, where neither
    tokenizer_config.json nor config.json does.
    """
    folder = Path(folder)
    require(folder.exists(), f"There is no folder {folder}: check the path.")
    require(folder.is_dir(), f"{folder} is a file; a tokeniser is loaded from its folder.")
    side = read_side_files(folder, model_type)
    try:
        return _load(folder, side)
    except ClearheadError:
        raise
    except BaseException as error:
        # Rust panics are no Exceptions; whatever the format's reader did not foresee comes here.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ClearheadError(
                f"The tokeniser in {folder} cannot be read ({error}): a file is damaged, or files "
                "of two tokenisers are mixed."
            ) from error
        raise


def _load(folder: Path, side: SideFiles) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        backend, roles = read_tokenizer_json(folder / "tokenizer.json", side)
    elif (folder / SOURCE).is_file():
        return load_marian(folder, side)
    elif (folder / "vocab.txt").is_file():
        said = side.kind()
        require(
            said in ("", *WORDPIECE_KINDS),
            f'vocab.txt of a "{said}" tokeniser is not known.{did_you_mean(said, WORDPIECE_KINDS)} '
            f"Known: {', '.join(WORDPIECE_KINDS)}.",
        )
        backend, roles = read_wordpiece(folder, side)
    elif (folder / "vocab.json").is_file():
        backend, roles = read_byte_level(folder, side)
    else:
        backend, roles = read_sentencepiece(_sentencepiece_file(folder), side)
    other = folder / "target" / "tokenizer.json"
    return Tokenizer(
        backend,
        roles,
        max_len=side.max_len,
        eos_ids=side.eos_ids,
        chat_template=side.chat_template,
        target=load_tokenizer(folder / "target") if other.is_file() else None,
    )


def read_tokenizer_json(path: Path, side: SideFiles) -> tuple[Backend, dict[str, str]]:
    """The tokeniser that a tokenizer.json describes, and its roles."""
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:
        raise ClearheadError(
            f"{path} cannot be read as a tokeniser ({error}): it is damaged, or of a newer version "
            "of the tokenizers package."
        ) from error
    suffix = getattr(backend.model, "end_of_word_suffix", None)
    if suffix and isinstance(backend.decoder, decoders.ByteLevel):
        backend.decoder = word_end_decoder(suffix)  # CLIP's file leaves that to its class
    add_tokens(backend, side)
    return backend, _roles(backend, side)


def _roles(backend: Backend, side: SideFiles) -> dict[str, str]:
    """What the files say; where nothing is said, config.json's ids, then names everyone uses."""
    roles = {role: token.content for role, token in side.roles.items()}
    if roles:
        return roles
    for role, id in side.role_ids.items():
        token = backend.id_to_token(id) if 0 <= id < 1 << 32 else None
        if token is not None:
            roles[role] = token
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for role in ROLES:
        found = next((name for name in WELL_KNOWN[role] if name in special), None)
        if found is not None:
            roles.setdefault(role, found)
    unknown = getattr(backend.model, "unk_token", None)
    if isinstance(unknown, str) and backend.token_to_id(unknown) is not None:
        roles.setdefault("unk", unknown)
    return roles


def _sentencepiece_file(folder: Path) -> Path:
    for pattern in SENTENCEPIECE:
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    raise ClearheadError(
        f"{folder} has no tokeniser: none of tokenizer.json, vocab.txt, vocab.json with "
        "merges.txt, or a sentencepiece .model is there. Copy the tokeniser's files into it."
    )
