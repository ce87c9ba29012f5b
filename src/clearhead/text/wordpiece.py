"""WordPiece from vocab.txt: BERT and its kin.

Devlin et al. 2018, section 3; Schuster & Nakajima 2012.

A word is cut into the longest pieces that the vocabulary has, from the left; pieces inside a word
are written ##ing.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from clearhead.errors import require
from clearhead.text.special import SideFiles, add_tokens, read_text

KINDS = ("bert", "distilbert", "electra", "mobilebert", "minilm")
DEFAULTS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


def read_wordpiece(folder: Path, side: SideFiles) -> tuple[Backend, dict[str, str]]:
    """The tokeniser of a folder with vocab.txt, and its roles."""
    vocab = read_vocab_txt(folder / "vocab.txt")
    roles = DEFAULTS | {role: token.content for role, token in side.roles.items()}
    for role in ("unk", "sep", "cls"):
        require(
            roles[role] in vocab,
            f'{folder / "vocab.txt"} has no "{roles[role]}", the {role} token: it is not a '
            "WordPiece vocabulary, or tokenizer_config.json names the wrong token.",
        )
    backend = Backend(models.WordPiece(vocab, unk_token=roles["unk"]))
    config = side.config
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is not False,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True) is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    add_tokens(backend, side)
    backend.add_special_tokens([token for token in roles.values() if token in vocab])
    cls, sep = roles["cls"], roles["sep"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    return backend, {r: t for r, t in roles.items() if backend.token_to_id(t) is not None}


def read_vocab_txt(path: Path) -> dict[str, int]:
    """Token -> id: one token a line, the line number is the id."""
    lines = read_text(path).split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    require(bool(lines), f"{path} is empty: copy it again.")
    vocab: dict[str, int] = {}
    for number, token in enumerate(lines):
        require(
            token not in vocab,
            f"{path} has {token!r} twice, in lines {vocab.get(token, 0) + 1} and {number + 1}: a "
            "token has one id. Copy the file again.",
        )
        vocab[token] = number
    return vocab
