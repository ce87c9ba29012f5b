"""tiktoken's rank files, and Whisper's tokenisers, which are made from them.

A .tiktoken file has a line for each token: its bytes in base64, its rank. The rank is the id and
the order of merging. The official Whisper .pt files carry no vocabulary; it is `gpt2.tiktoken`
(English) or `multilingual.tiktoken` in the package openai-whisper, with special tokens behind it
(Radford et al. 2022, section 2.3).
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from clearhead.errors import ClearheadError, require
from clearhead.text.bytelevel import around_text, whisper_template
from clearhead.text.special import read_text
from clearhead.text.split import byte_level_split
from clearhead.text.tokenizer import Tokenizer

END = "<|endoftext|>"
# In the order of their ids. English-only models have the first 99 too, without using them.
_CODES = """
en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th
ur hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr
pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt
haw ln ha ba jw su yue
"""
LANGUAGES = tuple(_CODES.split())
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
RANK_FILES = {
    51864: "gpt2.tiktoken",
    51865: "multilingual.tiktoken",
    51866: "multilingual.tiktoken",
}
PACKAGES = ("whisper", "mlx_whisper")


def from_tiktoken(
    path: str | Path, specials: Sequence[str] = (), split: str = "gpt-2"
) -> Tokenizer:
    """The tokeniser of a rank file, with special tokens numbered behind it."""
    ranks = read_ranks(Path(path))
    letters = byte_letters()
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _merged(token, ranks, rank)
        if len(parts) == 2:
            merges.append((spelt[parts[0]], spelt[parts[1]]))
    # tiktoken looks a whole word up before it merges, so tokens that no merge reaches count too.
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = byte_level_split(split)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    backend.post_processor = around_text(backend, None, None)
    roles = {"bos": END, "eos": END, "unk": END} if END in specials else {}
    return Tokenizer(backend, roles)


def whisper_specials(vocab_size: int) -> list[str]:
    """Whisper's special tokens in the order of their ids, for a model with that many tokens."""
    require(
        vocab_size in RANK_FILES,
        f"No Whisper model has {vocab_size} tokens: they have {', '.join(map(str, RANK_FILES))}.",
    )
    languages = LANGUAGES if vocab_size == 51866 else LANGUAGES[:99]
    marks = ["startoftranscript", *languages, *TASKS]
    times = [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    return [END, *(f"<|{mark}|>" for mark in marks), *times]


def whisper_tokenizer(vocab_size: int, folder: str | Path | None = None) -> Tokenizer:
    """The tokeniser of an official Whisper model with that many tokens.

    The rank file is looked for in `folder`, then in the packages that carry it, if one is
    installed.
    """
    specials = whisper_specials(vocab_size)
    name = RANK_FILES[vocab_size]
    places = [] if folder is None else [Path(folder) / name]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # finds it without running it
        for place in (spec.submodule_search_locations or ()) if spec else ():
            places.append(Path(place) / "assets" / name)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ClearheadError(
            f"Whisper's vocabulary, {name}, is not inside its .pt file and was not found. Put it "
            "beside the model: pip download --no-deps mlx-whisper==0.4.3 && unzip -j "
            f"mlx_whisper-*.whl mlx_whisper/assets/{name} (pip install openai-whisper works too)."
        )
    tokenizer = from_tiktoken(path, specials)
    require(
        tokenizer.vocab_size == vocab_size,
        f"{path} makes {tokenizer.vocab_size} tokens but the model has {vocab_size}: the wrong "
        "rank file.",
    )
    tokenizer.backend.post_processor = whisper_template(tokenizer.backend, tokenizer.roles, {})
    tokenizer.max_len = 448
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank; ranks are 0, 1, 2, ... and every single byte is there."""
    require(path.is_file(), f"There is no file {path}.")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            # Whisper's multilingual file has an empty token, written "=".
            token = b"" if parts[0] == "=" else base64.b64decode(parts[0], validate=True)
            fine = len(parts) == 2 and int(parts[1]) == len(ranks) and token not in ranks
        except (ValueError, IndexError, binascii.Error):
            fine = False
        require(
            fine,
            f"{path}, line {number}: {line[:40]!r} is not a token in base64 and the rank "
            f"{len(ranks)}: it is not a tiktoken file, or damaged.",
        )
        ranks[token] = len(ranks)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    require(not missing, f"{path} lacks {len(missing)} of the 256 bytes: it is not complete.")
    return ranks


def byte_letters() -> dict[int, str]:
    """Byte -> the printable character that byte-level BPE writes it with: itself, or one from
    U+0100 on for blanks and controls.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def _merged(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """The parts that merges of lower rank leave of a token: two, and these two make it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = [ranks.get(parts[i] + parts[i + 1], below) for i in range(len(parts) - 1)]
        best = min(pairs)
        if best >= below:
            break
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
