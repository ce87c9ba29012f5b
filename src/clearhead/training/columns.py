"""What a table is for, judged by the names of its columns: said where it is clear, else asked.

label and one text, or two that   classification
are known to belong together
two columns, one of few values    classification of the other
text, whatever else               next_token
two columns                       seq2seq, the second from the first

Ids are left out of account. A guess that could as well be another is an error that names the
columns: training on the wrong one would look like training.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from clearhead.data.corpus import Corpus
from clearhead.data.labelled import Classification
from clearhead.data.language import NextToken, Seq2seq
from clearhead.data.objectives import Objective
from clearhead.errors import ClearheadError

IDS = {"", "id", "idx", "index", "guid", "uid", "uuid", "key", "unnamed: 0"}
LOOK, MOST = 2000, 50  # records that are looked at; more different values are no labels
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("first", "second"),
    ("text", "second"),
    ("text", "text_pair"),
    ("question1", "question2"),
    ("question", "answer"),
    ("question", "context"),
    ("question", "passage"),
    ("question", "sentence"),
    ("query", "passage"),
)


def guess_objective(corpus: Corpus) -> Objective:
    """What the data are for."""
    if "label" in corpus.columns:
        return labelled(corpus)
    if (few := _few_values(corpus)) is not None:
        return few
    return NextToken() if "text" in corpus.columns else two_columns(corpus)


def labelled(corpus: Corpus, labels: tuple[str, ...] = ()) -> Classification:
    """The label of a text, or of two."""
    texts = [name for name in _contents(corpus) if name != "label"]
    pair = known_pair(corpus)
    if len(texts) == 2 and pair:
        return Classification(text=pair[0], second=pair[1], labels=labels)
    if len(texts) != 1 and "text" not in texts:
        raise _unclear(corpus)
    return Classification(text="text" if "text" in texts else texts[0], labels=labels)


def _few_values(corpus: Corpus) -> Classification | None:
    """Two columns of which one says the same few short things over and over: what the other is."""
    names = _contents(corpus)
    if len(names) != 2 or corpus.endless:
        return None
    rows = list(islice(corpus.records("train"), LOOK))
    seen = {name: {str(row.get(name)) for row in rows} for name in names}
    label, text = sorted(names, key=lambda name: len(seen[name]))
    few = len(seen[label]) <= min(MOST, len(rows) // 5) and len(seen[text]) > len(rows) // 2
    short = all(len(value) <= 40 for value in seen[label])
    return Classification(text=text, label=label) if few and short else None


def two_columns(corpus: Corpus) -> Seq2seq:
    """The second from the first, where there are two."""
    names = _contents(corpus)
    if len(names) != 2:
        raise _unclear(corpus)
    return Seq2seq(source=names[0], target=names[1])


def known_pair(corpus: Corpus) -> tuple[str, str] | None:
    """Two columns whose names say that they belong together."""
    columns = corpus.columns
    return next(((a, b) for a, b in PAIRS if a in columns and b in columns), None)


def _contents(corpus: Corpus) -> list[str]:
    """The columns that are no ids."""
    record = next(corpus.records("train"), {})
    return [name for name in corpus.columns if not _is_id(name, record.get(name))]


def _is_id(name: str, value: Any) -> bool:
    called = name.lower() in IDS or name.endswith(("_id", "ID"))
    return called and " " not in str(value)  # sentences in Indonesian are called "id", too


def _unclear(corpus: Corpus) -> ClearheadError:
    return ClearheadError(
        f"{corpus.name} has the columns {', '.join(corpus.columns)}, and what is to be learnt from "
        'them is not clear: Clearhead guesses with "text", with "label" and one text, and with two '
        "columns of texts. Say it in a recipe: data.objective, as {kind: classification, text: "
        "COLUMN, label: COLUMN} or {kind: seq2seq, source: COLUMN, target: COLUMN}."
    )
