"""What a recipe becomes before its first step: data on disk, a tokeniser, a model, a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from clearhead.api import load
from clearhead.data.batch import Batch
from clearhead.data.batches import Batches, Buckets, Endless, Windows, fixed
from clearhead.data.corpus import Corpus, open_corpus
from clearhead.data.language import Seq2seq
from clearhead.data.objectives import Objective
from clearhead.data.shards import Store, cached_store
from clearhead.errors import require
from clearhead.fast.form import form_of
from clearhead.model import Model
from clearhead.text.cuts import CutAnew
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.trained import train_tokenizer
from clearhead.training.figures import check_metric
from clearhead.training.lora import add_lora
from clearhead.training.optim import freeze
from clearhead.training.rdrop import SUITED
from clearhead.training.recipe import BPE, Ready, Recipe
from clearhead.training.room import check_weights, rows_of
from clearhead.training.schedule import Noam
from clearhead.weights.folder import LABELS
from clearhead.weights.new_head import draw_head

EVAL_SLOTS = 8192  # in a batch of evaluation, at most
EVAL_LOGITS = 2**26  # numbers that come out of one, at most: 256 MB
VERSION = 2  # of what a store holds: counted up, older caches are made anew


@dataclass
class Job:
    """A run that is ready to start."""

    recipe: Recipe
    """What it is made from."""
    objective: Objective
    """What is asked, with what it learnt from the data (labels)."""
    model: Model
    """The model to train."""
    batches: Batches
    """The endless stream of training batches."""
    valid: Store
    """The validation examples."""
    length: int
    """Tokens in a window."""
    drawn: tuple[str, ...] = ()
    """Parameters that the model to start from did not have."""
    mark: str = ""
    """A hash of every character of the data and of the tokeniser."""

    def validation(self, limit: int | None = None) -> Iterator[Batch]:
        """The validation examples in a fixed order, each once."""
        batches = in_order(self.valid, self.objective, self.model, self.length)
        seen = 0
        for batch in batches:
            if limit is not None and seen >= limit:
                return
            seen += batch.inputs[-1].shape[0]
            yield batch


def in_order(store: Store, objective: Objective, model: Model, length: int) -> Iterator[Batch]:
    """Examples for an evaluation, each once, so many at a time that the output stays small."""
    slots = EVAL_SLOTS
    if objective.ask == "tokens":
        own = model.config
        words = getattr(own, "target_vocab_size", None) or own.vocab_size
        slots = max(length, min(slots, EVAL_LOGITS // words))
    size = {"length": length} if objective.stream else {"max_len": length}
    return fixed(store, objective, tokens=slots, **size)


def prepare(recipe: Recipe, tokenizer: Tokenizer | None = None) -> Job:
    """Read the data, learn the tokeniser, build the model: everything but the first step.

    `tokenizer` is that of the run, where it was begun before.
    """
    data = recipe.data
    corpus = open_corpus(data.source, data.valid, data.test, data.split, data.limit)
    objective = data.objective.prepare(corpus)
    check_metric(recipe.eval.metric, objective.kind)
    start: Model | None = None
    drawn: tuple[str, ...] = ()
    if recipe.model.source:
        start, objective, drawn = _start(recipe, objective)
    tokenizer = tokenizer or _tokenizer(recipe, corpus, objective, start)
    model = start or _new_model(recipe, objective, tokenizer)
    model.tokenizer = tokenizer
    _companions(model, objective, tokenizer)
    recipe = _with_width(recipe, model)
    _check_rdrop(recipe, objective, model)
    freeze(model.net, recipe.optim.freeze)
    if recipe.train.lora is not None:
        add_lora(model.net, recipe.train.lora, torch.Generator().manual_seed(recipe.train.seed))
    length = _length(recipe, model)
    objective = suited(objective.bind(tokenizer), model, length)
    stream = _stream(recipe, corpus, objective, tokenizer, length)
    valid = make_store(corpus, "valid", objective, tokenizer)
    mark = _hash(corpus.fingerprint, _vocabularies(tokenizer))
    return Job(recipe, objective, model, stream, valid, length, drawn, mark)


def _check_rdrop(recipe: Recipe, objective: Objective, model: Model) -> None:
    """Two passes can be compared where each target is asked by a distribution."""
    require(
        not recipe.optim.rdrop or objective.ask in SUITED,
        f"optim.rdrop compares predictions of tokens, labels or tags, and {objective.kind} asks "
        "for none: leave it out.",
    )
    rates = [getattr(part, "p", getattr(part, "dropout", 0.0)) for part in model.net.modules()]
    require(
        not recipe.optim.rdrop or any(isinstance(rate, float) and rate > 0 for rate in rates),
        "optim.rdrop compares two passes under other dropout, and this model has none: set "
        "model.dropout, or leave it out.",
    )


def _length(recipe: Recipe, model: Model) -> int:
    """Tokens in an example: as many as were asked for, or as the model has positions."""
    most: int = model.config.max_len
    asked = recipe.data.length
    require(
        asked is None or asked <= most,
        f"data.length is {asked}, and the model has {most} positions: set model.max_len to "
        f"{asked}, or data.length to {most} at most."
        if not recipe.model.source
        else f"data.length is {asked}, and {recipe.model.source} has {most} positions: set "
        f"data.length to {most} at most.",
    )
    return asked or most


def _with_width(recipe: Recipe, model: Model) -> Recipe:
    """Noam's schedule with the model's width, unless another was set."""
    schedule = recipe.optim.schedule
    if not isinstance(schedule, Noam) or schedule.d_model is not None:
        return recipe
    width = getattr(model.config, "d_model", None)
    optim = replace(recipe.optim, schedule=Noam(width))
    return replace(recipe, optim=optim)


def suited(objective: Objective, model: Model, length: int) -> Objective:
    """The objective with what the model decides: how long a text can be, whether it has segments,
    what its targets start with.
    """
    changes: dict[str, Any] = {}
    if hasattr(objective, "max_len"):
        changes["max_len"] = min(objective.max_len or length, length)
    if hasattr(objective, "segments") and getattr(model.config, "token_types", 0) < 2:
        changes["segments"] = False
    if isinstance(objective, Seq2seq) and objective.start is None:
        said = model.companions.get("generation_config.json", {})
        changes["start"] = said.get("decoder_start_token_id")
    return objective.changed(**changes)


def make_store(corpus: Corpus, split: str, objective: Objective, tokenizer: Tokenizer) -> Store:
    """The examples of a split on disk, made once for this text, tokeniser and objective."""
    vocabularies = _vocabularies(tokenizer)
    key = _hash(corpus.fingerprint, split, vocabularies, objective.to_dict(), VERSION)
    return cached_store(key, lambda: objective.examples(corpus.records(split), tokenizer), None)


def _training_store(
    recipe: Recipe, corpus: Corpus, objective: Objective, tokenizer: Tokenizer
) -> Store:
    """The examples to train on; with BPE-dropout the whole text in several readings."""
    how = recipe.tokenizer
    if not isinstance(how, BPE) or not how.dropout:
        return make_store(corpus, "train", objective, tokenizer)
    require(
        isinstance(objective, Seq2seq) or objective.stream,
        f"tokenizer.dropout goes with whole texts (a language model, a translation), and "
        f"{objective.kind} asks about places in them: leave it 0.",
    )
    seed = recipe.train.seed
    parts = (_vocabularies(tokenizer), objective.to_dict(), how.to_dict(), seed, VERSION)

    def examples() -> Iterator[Any]:
        cut = CutAnew(tokenizer, how.dropout, seed)
        for _ in range(how.readings):
            yield from objective.examples(corpus.records("train"), cut)

    return cached_store(_hash(corpus.fingerprint, "train", *parts), examples, None)


def _vocabularies(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.backend.to_str(), tokenizer.target.backend.to_str()]


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _stream(
    recipe: Recipe, corpus: Corpus, objective: Objective, tokenizer: Tokenizer, length: int
) -> Batches:
    train, by_tokens = recipe.train, recipe.data.by == "tokens"
    rate = getattr(recipe.tokenizer, "dropout", 0.0)
    require(
        not rate or (not corpus.endless and not recipe.model.source),
        "tokenizer.dropout is for a tokeniser that the run learns, on text that is there: leave it "
        "0 with made data, and with a model to start from.",
    )
    rows = rows_of(recipe, length)
    if corpus.endless:
        return Endless(corpus, objective, tokenizer, rows, train.seed)
    store = _training_store(recipe, corpus, objective, tokenizer)
    if objective.stream:
        return Windows(store, objective, length, rows, train.seed)
    size = {"tokens": train.batch} if by_tokens else {"batch": train.batch}
    return Buckets(store, objective, seed=train.seed, max_len=length, **size)


def _tokenizer(
    recipe: Recipe, corpus: Corpus, objective: Objective, start: Model | None
) -> Tokenizer:
    choice = recipe.tokenizer
    if start is not None and start.tokenizer is not None:
        return start.tokenizer
    if isinstance(choice, Ready):
        require(bool(choice.folder), 'tokenizer: "ready" names a folder with tokenizer.json.')
        return Tokenizer.load(choice.folder)
    size = getattr(choice, "vocab_size", None)
    if getattr(choice, "shared", True) or not isinstance(objective, Seq2seq):
        texts = (text for record in corpus.sample("train") for text in objective.texts(record))
        return _learn(choice.kind, texts, size, objective)
    sides = [
        _learn(choice.kind, (str(r[column]) for r in corpus.sample("train")), size, objective)
        for column in objective.columns
    ]
    return Tokenizer(sides[0].backend, sides[0].roles, target=sides[1])


def _learn(kind: str, texts: Iterator[str], size: int | None, objective: Objective) -> Tokenizer:
    return train_tokenizer(
        kind,
        texts,
        size,
        special_tokens=objective.roles or None,
        extra_tokens=objective.extra_tokens,
        template=objective.template,
        pair_template=objective.pair_template,
    )


def _new_model(recipe: Recipe, objective: Objective, tokenizer: Tokenizer) -> Model:
    choice = recipe.model
    given = choice.config()
    require(
        given.shape == objective.shape,
        f"The objective {objective.kind} trains an {objective.shape}, and {choice.family} is "
        f"{'an' if given.shape[0] == 'e' else 'a'} {given.shape}: change model.family or "
        "data.objective.",
    )
    changes: dict[str, Any] = {}
    if int(choice.settings.get("vocab_size", 0)) < tokenizer.vocab_size:
        changes["vocab_size"] = tokenizer.vocab_size
    if tokenizer.target is not tokenizer:
        changes["target_vocab_size"] = tokenizer.target.vocab_size
    head = _head(objective, getattr(given, "head", None))
    if head is not None and "head" not in choice.settings:
        changes["head"] = head
    config = choice.config(**changes)
    check_weights(config.outline())
    generator = torch.Generator().manual_seed(recipe.train.seed)
    return Model(config.build(generator), config)


def _head(objective: Objective, now: Any) -> dict[str, Any] | None:
    """The head the objective needs; None where the model has it already."""
    labels = getattr(objective, "labels", ())
    own = str(getattr(now, "kind", ""))
    writes = objective.head == "lm" and own.endswith("lm")  # T5 has one of its own
    if objective.head is None or writes or (own == objective.head and not labels):
        return None
    if objective.head == "pooling":
        return {"kind": "pooling", "mode": "mean"}
    return {"kind": objective.head, **({"n_labels": len(labels)} if labels else {})}


def _start(recipe: Recipe, objective: Objective) -> tuple[Model, Objective, tuple[str, ...]]:
    """The model to start from with the objective's head, the objective with the model's order of
    labels, and what was drawn; it keeps its head if that is the same.
    """
    source, seed = recipe.model.source, recipe.train.seed
    require(
        not recipe.model.settings,
        "A model that training starts from keeps its settings: leave "
        f"model.{next(iter(recipe.model.settings), '')} away.",
    )
    model: Model = load(source)
    packed = form_of(model.net)
    require(
        packed is None,
        f"{source} is packed as {packed}, to run and not to learn: start from the model that it "
        "was made of.",
    )
    require(
        fits(objective, model),
        f"The objective {objective.kind} trains an {objective.shape}, and {source} is a "
        f"{model.config.shape}.",
    )
    require(model.tokenizer is not None, f"{source} has no tokeniser, so it cannot read text.")
    drawn: tuple[str, ...] = ()
    own = getattr(model.config, "head", None)
    head, labels = _head(objective, own), getattr(objective, "labels", ())
    if own is not None and own.kind == objective.head and set(labels) == set(model.labels):
        if labels:  # the same in another order, perhaps
            objective = objective.changed(labels=tuple(model.labels))
    elif head is not None:
        model, report = load(source, head=head, seed=seed, report=True)
        drawn = report.drawn or _draw_labels(model, seed)
    for parameter in model.net.parameters():  # they may be views of a file, and of another type
        parameter.data = parameter.data.clone().float()
    model.net.tie()
    return model, objective, drawn


def _draw_labels(model: Model, seed: int) -> tuple[str, ...]:
    """As many labels as it has, but others: what it knows of its own says nothing about them."""
    names = [name for name, _ in model.net.named_parameters() if not name.startswith("head.proj.")]
    drawn = draw_head(model.config, names, torch.Generator().manual_seed(seed))
    for name, tensor in drawn.items():
        model.net.get_parameter(name).data = tensor
    return tuple(drawn)


def fits(objective: Objective, model: Model) -> bool:
    """Whether a model can be trained for it; a decoder, too, can tell whole texts apart."""
    shape = model.config.shape
    last = shape == "decoder" and objective.kind == "classification"
    return bool(shape == objective.shape or last)


def _companions(model: Model, objective: Objective, tokenizer: Tokenizer) -> None:
    """What belongs to the model: the names of labels, and which tokens start and end a text."""
    if labels := getattr(objective, "labels", ()):
        model.companions[LABELS] = list(labels)
