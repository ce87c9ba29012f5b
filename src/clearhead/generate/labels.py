"""Labels of texts and of their words, from models with a classification or a tagging head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from clearhead.data.labelled import cut_to
from clearhead.errors import require
from clearhead.generate.vectors import run_encoder, segments, tell_cut

Pair = tuple[str, str]


def classify_texts(
    net: Any,
    tokenizer: Any,
    texts: Sequence[str | Pair],
    labels: Sequence[str],
    max_len: int,
    true: str = "one",
) -> list[dict[str, float]]:
    """For each text, or pair of texts, label -> probability, the most likely first. Where each
    label may be `true` by itself ("several"), these do not add up to 1; a head that measures, as
    one with one output does, has its numbers given as they are. Texts that are too long are cut as
    in training, with a warning.
    """
    encoded = [
        tokenizer.encode_with_offsets(text) if isinstance(text, str) else _pair(tokenizer, text)
        for text in texts
    ]
    kept = [cut_to(one, max_len, "A text") for one in encoded]
    tell_cut((len(one.ids) for one in encoded), max_len)
    rows = [[one.ids[i] for i in places] for one, places in zip(encoded, kept, strict=True)]
    types = [[one.types[i] for i in places] for one, places in zip(encoded, kept, strict=True)]
    found = []
    for logits in run_encoder(net, rows, segments(net, types)):
        values = _values(logits.float(), true)
        best = values.argsort(descending=True, stable=True).tolist()
        found.append({_name(labels, i, len(logits)): float(values[i]) for i in best})
    return found


def _values(logits: Tensor, true: str) -> Tensor:
    if true == "several":
        return logits.sigmoid()
    return logits.softmax(dim=0) if true == "one" and len(logits) > 1 else logits


def tag_sentences(
    net: Any,
    tokenizer: Any,
    sentences: Sequence[Sequence[str]],
    labels: Sequence[str],
    max_len: int,
) -> list[list[str]]:
    """A label for every word; of a word in several tokens, the first one speaks for it."""
    encoded = [tokenizer.encode_words(words) for words in sentences]
    firsts = []
    for words, one in zip(sentences, encoded, strict=True):
        require(
            len(one.ids) <= max_len,
            f"A sentence of {len(words)} words has {len(one.ids)} tokens, and the model reads "
            f"{max_len} at most: cut it into shorter ones.",
        )
        where = {word: place for place, word in reversed(list(enumerate(one.words)))}
        lost = [word for i, word in enumerate(words) if i not in where]
        require(not lost, f"These words have no token, so they cannot be tagged: {lost[:5]}.")
        firsts.append([where[i] for i in range(len(words))])
    types = segments(net, [one.types for one in encoded])
    found = []
    for logits, places in zip(
        run_encoder(net, [one.ids for one in encoded], types), firsts, strict=True
    ):
        found.append(_tags(logits, places, labels))
    return found


def _tags(logits: Tensor, places: Sequence[int], labels: Sequence[str]) -> list[str]:
    best = logits.argmax(dim=1).tolist()
    return [_name(labels, best[place], logits.shape[1]) for place in places]


def _name(labels: Sequence[str], i: int, count: int) -> str:
    """The label's name, or its number where names are not known."""
    require(
        len(labels) in (0, count),
        f"The model tells {count} labels apart, and {len(labels)} have names: "
        'model.companions["labels.json"] lists one name a label.',
    )
    return labels[i] if labels else str(i)


def _pair(tokenizer: Any, texts: Pair) -> Any:
    require(
        isinstance(texts, tuple) and len(texts) == 2,
        f"classify takes texts, or pairs of texts as tuples of two, not {texts!r}.",
    )
    return tokenizer.encode_pair(*texts)
