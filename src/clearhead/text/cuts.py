"""BPE-dropout: training text is cut into other pieces than its tokeniser would, at random.

    without     t u l i p -> tu l i p -> tu l ip -> tulip
    with        t u l i p -> t u l ip -> t u lip                 (some merges were left out)

Provilkov et al. 2020: each time a merge is chosen, every candidate is left out with probability
`rate`. The model sees a rare word in the pieces of others, and the same sentence never quite the
same: little text goes further. What is read later is cut as always.

A word has sixteen cuts, drawn once from the seed and the word; each time it occurs one of them is
taken. So the same text and seed give the same pieces on every machine.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers import models

from clearhead.errors import require
from clearhead.text.tiktoken import byte_letters
from clearhead.text.tokenizer import Tokenizer

CUTS = 16  # of a word
LONG = 100  # bytes; a longer word is cut there first


class CutAnew(Tokenizer):
    """A tokeniser of byte-level BPE that leaves merges out; for training text alone."""

    def __init__(self, tokenizer: Tokenizer, rate: float, seed: int) -> None:
        backend = tokenizer.backend
        said = json.loads(backend.to_str())
        model, before = said["model"], said["pre_tokenizer"] or {}
        require(
            model["type"] == "BPE"
            and before.get("type") == "ByteLevel"
            and said["normalizer"] is None
            and set(byte_letters().values()) <= set(model["vocab"]),
            "Merges can be left out of a byte-level BPE tokeniser as it is learnt here; this is "
            "another: leave tokenizer.dropout 0.",
        )
        target = tokenizer.target
        other = None if target is tokenizer else CutAnew(target, rate, seed + 1)
        super().__init__(backend, tokenizer.roles, target=other)
        merges = (tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"])
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.rate, self.seed = rate, seed
        self._cuts: dict[str, list[list[str]]] = {}
        self._dice = random.Random(seed)
        whole = [token.content for token in backend.get_added_tokens_decoder().values()]
        self._whole = re.compile("(" + "|".join(map(re.escape, whole)) + ")") if whole else None
        # Pieces are looked up whole; what stands around a text stays as it was.
        any_piece = next(iter(model["vocab"]))  # one must be named; every byte is a piece
        self._pieces = Backend(models.WordLevel(backend.get_vocab(), unk_token=any_piece))
        self._pieces.post_processor = backend.post_processor

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, each word in one of its cuts."""
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Iterable[str], special: bool = True) -> list[list[int]]:
        """The ids of many texts, each word in one of its cuts."""
        texts = list(texts)
        try:
            rows = [self._row(text) for text in texts]
        except (UnicodeError, TypeError):
            return super().encode_batch(texts, special)  # names the text at fault
        found = self._pieces.encode_batch(rows, is_pretokenized=True, add_special_tokens=special)
        return [encoding.ids for encoding in found]

    def _row(self, text: str) -> list[str]:
        """The pieces of a text; special tokens that are written in it stay whole."""
        parts = [text] if self._whole is None else self._whole.split(text)
        row: list[str] = []
        for number, part in enumerate(parts):
            if number % 2:  # what the expression found
                row.append(part)
                continue
            for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(part):
                for start in range(0, len(word), LONG):
                    row += self._one(word[start : start + LONG])
        return row

    def _one(self, word: str) -> list[str]:
        if word not in self._cuts:
            dice = random.Random(f"{self.seed} {word}")
            self._cuts[word] = [cut_word(word, self.ranks, self.rate, dice) for _ in range(CUTS)]
        return self._cuts[word][self._dice.randrange(CUTS)]


def cut_word(
    word: str, ranks: dict[tuple[str, ...], int], rate: float, dice: random.Random
) -> list[str]:
    """The pieces of a word: the best merge of those that are not left out, until none is left."""
    pieces = list(word)
    while True:
        found = [
            (rank, i)
            for i in range(len(pieces) - 1)
            if (rank := ranks.get((pieces[i], pieces[i + 1]))) is not None and dice.random() >= rate
        ]
        if not found:
            return pieces
        _, i = min(found)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
