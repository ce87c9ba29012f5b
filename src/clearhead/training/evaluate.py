"""How good a model is on data: the figures that belong to what it was trained for.

next_token, masked, spans   loss, perplexity; of running text also bits per character and byte
seq2seq                     loss, BLEU (cased; lower-cased as papers have it), chrF, exact match
classification              loss, accuracy, macro F1
tagging                     accuracy, F1 of entities (or of tags where they name none)
span_qa                     exact match, F1 of words
pairs                       Spearman and Pearson against the scores; without scores, how often the
                            right partner is the nearest

Every figure comes with an interval: 95 % of what one would find on other data of this kind, by
drawing examples anew (bootstrap).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.corpus import Corpus
from clearhead.data.labelled import Classification, Tagging
from clearhead.data.language import NextToken, Seq2seq
from clearhead.data.masking import Masked
from clearhead.data.objectives import Objective
from clearhead.data.pairs import Pairs, SpanQA
from clearhead.errors import require
from clearhead.measure import scores as ms
from clearhead.measure.translation import bleu, chrf
from clearhead.model import Model
from clearhead.training.columns import known_pair, labelled, two_columns
from clearhead.training.job import fits, in_order, make_store, suited

SAMPLES = 1000  # draws of the bootstrap
ROWS = 1024  # texts that are compared with all others at a time


@dataclass(frozen=True)
class Score:
    """One figure."""

    value: float
    """What was found."""
    interval: ms.Interval | None = None
    """Where it lies with 95 % confidence; None where that is not known."""
    note: str = ""
    """How it was computed: sacrebleu's signature."""


@dataclass(frozen=True)
class How:
    """How texts are written for an evaluation."""

    beams: int = 1
    """Beams of the decoding; 1: the best token each time."""
    length_penalty: float = 1.0
    """Above 1 favours long texts."""
    limit: int | None = None
    """Only so many records (of running text, characters); None: all."""
    length: int | None = None
    """Tokens in a window of running text; None: as many as the model has positions."""


def evaluate(
    model: Model, objective: Objective, corpus: Corpus, split: str, how: How | None = None
) -> dict[str, Score]:
    """All figures of a model on a split of the data, by name."""
    how = how or How()
    require(
        split in corpus.splits,
        f'{corpus.name} has no split "{split}"; it has {", ".join(corpus.splits)}.',
    )
    require(
        fits(objective, model),
        f"The objective {objective.kind} is for an {objective.shape}; the model is a "
        f"{model.config.shape}.",
    )
    corpus = _limited(corpus, split, how.limit)
    records = [] if objective.stream else list(corpus.records(split))
    with model.net.at_rest():
        if isinstance(objective, Seq2seq):
            # First what is written: beams that cannot be are refused before the loss is measured.
            written = _written(model, objective, records, how)
            return _loss(model, objective, corpus, split, how) | written
        if isinstance(objective, Classification):
            return _classified(model, objective, records)
        if isinstance(objective, Tagging):
            return _tagged(model, objective, records)
        if isinstance(objective, SpanQA):
            return _answered(model, objective, records)
        if isinstance(objective, Pairs):
            return _compared(model, objective, records)
        return _loss(model, objective, corpus, split, how)


def _limited(corpus: Corpus, split: str, limit: int | None) -> Corpus:
    """The corpus with the first part of a split, which is another content with another print."""
    if limit is None:
        require(
            corpus.count(split) is not None,
            f"The {split} data of {corpus.name} have no end: say how many to measure on (--limit).",
        )
        return corpus
    return replace(corpus, parts={**corpus.parts, split: corpus.parts[split].part(0, limit)})


# -- what is likely


def _loss(
    model: Model, objective: Objective, corpus: Corpus, split: str, how: How
) -> dict[str, Score]:
    """Loss and what follows from it; the bootstrap draws rows."""
    assert model.tokenizer is not None
    length = min(how.length or model.config.max_len, model.config.max_len)
    bound = suited(objective.bind(model.tokenizer), model, length)
    store = make_store(corpus, split, bound, model.tokenizer)
    rows = [_row_losses(model, batch, bound) for batch in in_order(store, bound, model, length)]
    nats, counts = (np.concatenate(column) for column in zip(*rows, strict=True))
    total, count = float(nats.sum()), int(counts.sum())
    require(count > 0, f"The {split} data ask for nothing: give more of them.")
    interval = ms.bootstrap(
        lambda drawn: float(nats[drawn].sum() / counts[drawn].sum()), len(nats), SAMPLES
    )
    ends = ms.Interval(math.exp(interval.low), math.exp(interval.high))
    found = {
        "loss": Score(total / count, interval),
        "perplexity": Score(ms.perplexity(total, count), ends),
    }
    if isinstance(objective, NextToken):
        characters = size = 0
        for record in corpus.records(split):
            text = str(record["text"])
            characters, size = characters + len(text), size + len(text.encode())
        for name, size_of in (("bits_per_character", characters), ("bits_per_byte", size)):
            per = count / size_of
            low, high = (edge * per / math.log(2) for edge in (interval.low, interval.high))
            found[name] = Score(ms.bits_per(total, size_of), ms.Interval(low, high))
    return found


@torch.inference_mode()
def _row_losses(model: Model, batch: Batch, objective: Objective) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and how many targets it has."""
    device = next(model.net.parameters()).device
    moved = batch.to(device)
    output = model.net(*moved.inputs, **moved.places).float()
    losses = F.cross_entropy(
        output.flatten(0, 1), moved.targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(moved.targets.shape)
    counts = (moved.targets != IGNORED).sum(dim=1)
    return losses.double().sum(dim=1).cpu().numpy(), counts.cpu().numpy()


# -- what is written


def _written(
    model: Model, objective: Seq2seq, records: Sequence[Any], how: How
) -> dict[str, Score]:
    assert objective.source is not None
    assert objective.target is not None
    sources = [str(record[objective.source]) for record in records]
    wanted = [str(record[objective.target]) for record in records]
    found = list(model.translate(sources, beams=how.beams, length_penalty=how.length_penalty))
    same = np.array([a.strip() == b.strip() for a, b in zip(found, wanted, strict=True)])
    measured = {
        "bleu": bleu(found, wanted),
        "bleu_lower": bleu(found, wanted, lower=True),
        "chrf": chrf(found, wanted),
    }
    scores = {name: Score(s.value, s.interval, s.signature) for name, s in measured.items()}
    return scores | {"exact_match": _mean(same)}


def _mean(values: np.ndarray) -> Score:
    """The mean of one number an example."""
    return Score(float(values.mean()), ms.mean_interval(values, samples=SAMPLES))


# -- what is told apart


def _classified(
    model: Model, objective: Classification, records: Sequence[Any]
) -> dict[str, Score]:
    texts = [_one_or_two(record, objective.text, objective.second) for record in records]
    wanted = [str(record[objective.label]) for record in records]
    unseen = sorted(set(wanted) - set(model.labels))
    require(
        not unseen,
        f"The data have labels that the model does not know: {', '.join(unseen[:5])}. It knows: "
        f"{', '.join(model.labels[:12])}.",
    )
    likely: Any = model.classify(texts)
    found = [next(iter(row)) for row in likely]
    chances = np.array([row[name] for row, name in zip(likely, wanted, strict=True)])
    losses = -np.log(chances.clip(min=1e-30))
    right = np.array([a == b for a, b in zip(found, wanted, strict=True)])

    def f1(drawn: Any) -> float:
        return ms.macro_f1([wanted[i] for i in drawn], [found[i] for i in drawn])

    everything = range(len(wanted))
    return {
        "loss": _mean(losses),
        "accuracy": _mean(right),
        "f1": Score(f1(everything), ms.bootstrap(f1, len(wanted), SAMPLES // 5)),
    }


def _one_or_two(record: Any, first: str, second: str | None) -> Any:
    return record[first] if second is None else (record[first], record[second])


def _tagged(model: Model, objective: Tagging, records: Sequence[Any]) -> dict[str, Score]:
    words = [_words(record[objective.words]) for record in records]
    wanted = [_words(record[objective.tags]) for record in records]
    found = [[tag for _, tag in model.tag(row)] for row in words]
    pairs = list(zip(wanted, found, strict=True))
    counts = np.array([len(row) for row in wanted])
    right = np.array([sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs])
    marks = {tag[:2] for row in wanted for tag in row if tag != "O"}
    entities = marks <= {"B-", "I-", "E-", "S-"}

    def f1(drawn: Any) -> float:
        some = [pairs[i] for i in drawn]
        if entities:
            return ms.span_f1([a for a, _ in some], [b for _, b in some]).value
        return ms.macro_f1([t for a, _ in some for t in a], [t for _, b in some for t in b])

    def accuracy(drawn: Any) -> float:
        return float(right[drawn].sum() / counts[drawn].sum())

    return {
        "accuracy": Score(
            accuracy(np.arange(len(pairs))), ms.bootstrap(accuracy, len(pairs), SAMPLES)
        ),
        "f1": Score(f1(range(len(pairs))), ms.bootstrap(f1, len(pairs), SAMPLES // 5)),
    }


def _words(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else [str(word) for word in value]


def _answered(model: Model, objective: SpanQA, records: Sequence[Any]) -> dict[str, Score]:
    exact, words = [], []
    for record in records:
        answer = model.answer(
            question=record[objective.question], context=record[objective.context]
        )
        answers = record[objective.answer]
        answers = [answers] if isinstance(answers, str) else list(answers)
        exact.append(ms.exact_match(answer.text, answers))
        words.append(ms.token_f1(answer.text, answers))
    return {"exact_match": _mean(np.array(exact)), "f1": _mean(np.array(words))}


def _compared(model: Model, objective: Pairs, records: Sequence[Any]) -> dict[str, Score]:
    first = model.embed([str(record[objective.first]) for record in records])
    second = model.embed([str(record[objective.second]) for record in records])
    if objective.score is None:
        others = F.normalize(second, dim=-1).T
        rows = F.normalize(first, dim=-1).split(ROWS)  # all by all would be the square of the data
        nearest = torch.cat([(row @ others).argmax(dim=1) for row in rows])
        return {"accuracy": _mean((nearest == torch.arange(len(nearest))).numpy())}
    cosine = F.cosine_similarity(first, second).numpy()
    wanted = np.array([float(record[objective.score]) for record in records])
    found = {}
    for name, measure in (("spearman", ms.spearman), ("pearson", ms.pearson)):

        def drawn_measure(drawn: Any, measure: Any = measure) -> float:
            return float(measure(wanted[drawn], cosine[drawn]))

        interval = ms.bootstrap(drawn_measure, len(wanted), SAMPLES)
        found[name] = Score(float(measure(wanted, cosine)), interval)
    return found


def objective_for(model: Model, corpus: Corpus) -> Objective:
    """What a model is for, judged by its head and the columns of the data."""
    kind = getattr(getattr(model.config, "head", None), "kind", None)

    def pairs() -> Objective:
        first, second = known_pair(corpus) or ("first", "second")
        return Pairs(first, second, score="score" if "score" in corpus.columns else None)

    guesses: dict[str | None, Callable[[], Objective]] = {
        "lm": NextToken if model.config.shape == "decoder" else lambda: two_columns(corpus),
        "t5_lm": lambda: two_columns(corpus),
        "masked_lm": Masked,
        "classification": lambda: labelled(corpus, tuple(model.labels)),
        "tagging": lambda: Tagging(labels=tuple(model.labels)),
        "span": SpanQA,
        "pooling": pairs,
    }
    require(
        kind in guesses,
        f'There is no evaluation for a model with the head "{kind}": name a run folder, whose '
        "recipe says what it was trained for.",
    )
    return guesses[kind]().prepare(corpus)


def with_labels(objective: Objective, model: Model) -> Objective:
    """The objective with the labels the model knows, in its order."""
    if model.labels and hasattr(objective, "labels"):
        return replace(objective, labels=tuple(model.labels))  # type: ignore[type-var]
    return objective
