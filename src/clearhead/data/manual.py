"""The text of Python's own manual, which every Python carries: `pydoc_data.topics`.

Each topic is a document: its name as a heading, then the text. About a tenth of the characters
validates, whole topics chosen by a hash of their names. Some topics hold others ("compound" has all
of "if"): topics that share a paragraph go to the same side, so that nothing of the validation text
is in the training text. The text is that of the running Python, and so is the fingerprint.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from clearhead.data.holdout import mark
from clearhead.data.readers import Record, Rows, open_rows

PARAGRAPH = 80  # characters from which on a paragraph that occurs twice was copied
VALID = 0.1  # of the characters, about


def open_manual() -> dict[str, Rows]:
    """The splits train and valid."""
    return {
        split: open_rows(functools.partial(read_manual, split), f"the manual ({split})")
        for split in ("train", "valid")
    }


def read_manual(split: str) -> Iterator[Record]:
    """The topics of a split in the order of their names."""
    topics = _topics()
    held = _held(frozenset(topics.items()))
    for name in sorted(topics):
        if (name in held) == (split == "valid"):
            yield {"text": f"{name}\n{'=' * len(name)}\n\n{topics[name].strip()}\n\n\n"}


def families(topics: Mapping[str, str]) -> list[list[str]]:
    """Topics that share a paragraph, directly or through others, together."""
    family = {name: [name] for name in topics}
    seen: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) < PARAGRAPH:
                continue
            ours, theirs = family[name], family[seen.setdefault(words, name)]
            if ours is not theirs:
                theirs.extend(ours)
                family.update(dict.fromkeys(ours, theirs))
    return sorted(sorted(f) for f in {id(f): f for f in family.values()}.values())


@functools.cache
def _held(items: frozenset[tuple[str, str]]) -> frozenset[str]:
    """The topics that validate: families in the order of their marks, while there is room."""
    topics = dict(items)
    room = VALID * sum(map(len, topics.values()))
    held: set[str] = set()
    for family in sorted(families(topics), key=lambda names: mark(names[0])):
        size = sum(len(topics[name]) for name in family)
        if size <= room:
            held.update(family)
            room -= size
    return frozenset(held)


def _topics() -> dict[str, str]:
    from pydoc_data import topics  # half a megabyte: only where it is wanted

    return topics.topics
