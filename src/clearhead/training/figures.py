"""The figures that `evaluate` finds for each objective, and which way they are better."""

from __future__ import annotations

from clearhead.errors import did_you_mean, require

WRITING = ("loss", "perplexity")
FIGURES: dict[str, tuple[str, ...]] = {
    "next_token": (*WRITING, "bits_per_character", "bits_per_byte"),
    "masked": WRITING,
    "spans": WRITING,
    "seq2seq": (*WRITING, "bleu", "bleu_lower", "chrf", "exact_match"),
    "classification": ("loss", "accuracy", "f1"),
    "tagging": ("loss", "accuracy", "f1"),
    "span_qa": ("loss", "exact_match", "f1"),
    "pairs": ("loss", "spearman", "pearson", "accuracy"),
}
"""The loss is of the run's own evaluations where `evaluate` has none."""
LOWER = {"loss", "perplexity", "bits_per_character", "bits_per_byte"}
"""Better if they are less; all others if they are more."""


def check_metric(metric: str, kind: str) -> None:
    """Refuse a figure that nobody will measure, before a run begins."""
    known = FIGURES[kind]
    require(
        metric in known,
        f'eval.metric: the objective {kind} has no figure "{metric}".{did_you_mean(metric, known)} '
        f"It has: {', '.join(known)}.",
    )
