"""All objectives, by name.

next_token       clearhead.data.language
seq2seq
masked           clearhead.data.masking
spans
classification   clearhead.data.labelled
tagging
span_qa          clearhead.data.pairs
pairs
"""

from __future__ import annotations

from typing import Any

from clearhead.data.labelled import Classification, Tagging
from clearhead.data.language import NextToken, Seq2seq
from clearhead.data.masking import Masked, Spans
from clearhead.data.objective import Objective, StreamObjective
from clearhead.data.pairs import Pairs, SpanQA
from clearhead.errors import ClearheadError, did_you_mean, require

__all__ = [
    "OBJECTIVES",
    "Classification",
    "Masked",
    "NextToken",
    "Objective",
    "Pairs",
    "Seq2seq",
    "SpanQA",
    "Spans",
    "StreamObjective",
    "Tagging",
    "read_objective",
]

OBJECTIVES: dict[str, type[Objective]] = {
    cls.kind: cls
    for cls in (NextToken, Masked, Spans, Seq2seq, Classification, Tagging, SpanQA, Pairs)
}


def read_objective(data: Any, where: str = "objective") -> Objective:
    """The objective that a name, or a table with its "kind", describes."""
    if isinstance(data, Objective):
        return data
    table = {"kind": data} if isinstance(data, str) else data
    if not isinstance(table, dict) or not isinstance(kind := table.get("kind"), str):
        raise ClearheadError(
            f'{where} must be one of {", ".join(OBJECTIVES)} (a name, or a table with "kind"), not '
            f"{data!r}."
        )
    require(
        kind in OBJECTIVES,
        f'{where}: there is no objective "{kind}".{did_you_mean(kind, OBJECTIVES)} There are: '
        f"{', '.join(OBJECTIVES)}.",
    )
    return OBJECTIVES[kind].from_dict(table, where)
