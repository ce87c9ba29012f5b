"""What stands behind the masks of a text: p(token | all the others), for each mask.

Devlin et al. 2019, section 3.1 (masked language modelling). Every mask is judged by itself: the
other masks of the text are read as masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clearhead.errors import require
from clearhead.generate.vectors import run_encoder

MASK = "[MASK]"  # understood for every model, whatever its own mask is called


@dataclass(frozen=True)
class Candidate:
    """A token that may stand behind a mask."""

    token: str
    """Its text."""
    probability: float
    """How likely the model finds it there."""
    id: int
    """Its number in the vocabulary."""
    text: str
    """The whole text with this mask filled; other masks stay."""


def fill_masks(
    net: Any, tokenizer: Any, texts: Sequence[str], max_len: int, best: int = 5
) -> list[list[list[Candidate]]]:
    """For every text, for each of its masks, the likeliest tokens, the best first."""
    require(type(best) is int and best >= 1, f"best is how many tokens a mask, not {best!r}.")
    mask = tokenizer.mask_id
    require(
        mask is not None,
        "This model's tokeniser has no mask token, so there is nothing to fill: use a model that "
        "was trained with masks.",
    )
    own = tokenizer.token(mask)
    rows = []
    for text in texts:
        require(isinstance(text, str), f"fill takes texts, not {text!r}.")
        ids = tokenizer.encode(text if own in text else text.replace(MASK, own))
        require(
            mask in ids,
            f"There is no mask in {text[:60]!r}: write {own} where a token is wanted.",
        )
        require(
            len(ids) <= max_len,
            f"The text has {len(ids)} tokens, and the model reads {max_len}: shorten it.",
        )
        rows.append(ids)
    outputs = run_encoder(net, rows)
    return [
        _candidates(ids, logits, tokenizer, mask, best)
        for ids, logits in zip(rows, outputs, strict=True)
    ]


def _candidates(
    ids: list[int], logits: torch.Tensor, tokenizer: Any, mask: int, best: int
) -> list[list[Candidate]]:
    found = []
    for place in (i for i, id in enumerate(ids) if id == mask):
        # The vocabulary may be padded: rows without a token are never an answer.
        p = logits[place].float().softmax(dim=-1)[: tokenizer.vocab_size]
        top = p.topk(min(best, len(p)))
        found.append(
            [
                _candidate(ids, place, id, probability, tokenizer)
                for id, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        )
    return found


def _candidate(
    ids: list[int], place: int, id: int, probability: float, tokenizer: Any
) -> Candidate:
    filled = [*ids[:place], id, *ids[place + 1 :]]
    # Masks that are left are shown, the tokens around a text are not.
    around = tokenizer.special_ids - {tokenizer.mask_id, id}
    text = tokenizer.decode([one for one in filled if one not in around], special=True)
    token = tokenizer.decode([id], special=True)
    return Candidate(token.strip(" ") or token, probability, id, text.strip(" "))
