"""BLEU and chrF of translations, by sacrebleu (extra `eval`), with signature and interval.

Papineni et al. 2002; Popović 2015; Post 2018 on why a BLEU means nothing without its signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError, require
from clearhead.measure.scores import Interval, bootstrap

References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class CorpusScore:
    """A score of a whole corpus, with all that is needed to compare it."""

    value: float
    """From 0 to 100."""
    signature: str
    """How it was computed: case, tokenisation, smoothing, version."""
    interval: Interval | None = None
    """With 95 % confidence, over sentences drawn anew; None if it was not asked for."""


def bleu(
    found: Sequence[str],
    references: References,
    lower: bool = False,
    samples: int = 1000,
    seed: int = 0,
) -> CorpusScore:
    """BLEU of untokenised texts, cased as they are, tokenised as WMT's script 13a does.

    `lower` gives the form that papers on small sets report: lower-cased and tokenised. `references`
    has one text for each of `found`, or a list of texts; `samples` 0 leaves the interval out.
    """
    metric = _sacrebleu().metrics.BLEU(lowercase=lower, tokenize="13a")
    return _score(metric, found, references, samples, seed)


def chrf(
    found: Sequence[str],
    references: References,
    lower: bool = False,
    samples: int = 1000,
    seed: int = 0,
) -> CorpusScore:
    """chrF2: character n-grams up to 6, recall counting twice."""
    metric = _sacrebleu().metrics.CHRF(lowercase=lower)
    return _score(metric, found, references, samples, seed)


def _score(
    metric: Any, found: Sequence[str], references: References, samples: int, seed: int
) -> CorpusScore:
    require(
        len(found) == len(references),
        f"There are {len(found)} translations and {len(references)} references: one for each.",
    )
    require(len(found) > 0, "There are no translations to score.")
    streams = _streams(references)
    value = metric.corpus_score(list(found), streams).score
    interval = None
    if samples:
        # The counts of each sentence; those of a corpus are their sums. sacrebleu's own tests of
        # significance draw sentences by them too.
        counts = np.asarray(metric._extract_corpus_statistics(list(found), streams))

        def measure(rows: Any) -> float:
            return metric._compute_score_from_stats(counts[rows].sum(axis=0).tolist()).score

        interval = bootstrap(measure, len(found), samples, seed)
    return CorpusScore(float(value), str(metric.get_signature()), interval)


def _streams(references: References) -> list[list[str]]:
    """The first reference of every sentence, the second of every sentence, ..."""
    rows = [[row] if isinstance(row, str) else list(row) for row in references]
    counts = sorted({len(row) for row in rows})
    require(
        len(counts) == 1 and counts[0] > 0,
        f"Every sentence needs the same number of references, one at least, not {counts}.",
    )
    return [list(stream) for stream in zip(*rows, strict=True)]


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise ClearheadError(
            "BLEU and chrF are computed by sacrebleu, which is not installed: "
            "pip install 'clearhead[eval]'"
        ) from error
    return sacrebleu
