"""What a run reached: the figures of the model that came out, on what its recipe measures."""

from __future__ import annotations

from clearhead.data.corpus import open_corpus
from clearhead.model import Model
from clearhead.training.average import LastConfig
from clearhead.training.evaluate import How, evaluate, with_labels
from clearhead.training.loop import Trainer
from clearhead.training.recipe import Recipe

END = "end"  # the key of the line in metrics.jsonl


def measure_end(trainer: Trainer, model: Model) -> dict[str, float]:
    """Name -> value; written into metrics.jsonl, and read there if the run was complete before.

    The last evaluation of the run is this already where it was of all validation data and of the
    very weights that came out, and where the recipe counts nothing but the loss.
    """
    recipe, folder = trainer.recipe, trainer.folder
    figures: dict[str, float] = {}
    known = False
    if folder is not None:
        for line in folder.metrics():
            figures = line.get("valid") or line.get(END) or figures
            known = END in line
        if figures and (known or measured_already(recipe)):
            return {str(name): float(value) for name, value in figures.items()}
    data = recipe.data
    corpus = open_corpus(data.source, data.valid, data.test, data.split, data.limit)
    objective = with_labels(data.objective, model).prepare(corpus)
    how = How(recipe.eval.beams, recipe.eval.length_penalty, None, data.length)
    scores = evaluate(model, objective, corpus, recipe.eval.split, how)
    figures = {name: score.value for name, score in scores.items()}
    if folder is not None and trainer.world.first:
        folder.log(step=trainer.done, **{END: figures})
    return figures


def measured_already(recipe: Recipe) -> bool:
    """Whether the last evaluation of a run is all that its recipe measures at the end."""
    wanted, train = recipe.eval, recipe.train
    chosen = train.patience is not None or isinstance(train.average, LastConfig)
    whole = wanted.limit is None and wanted.split == "valid"
    return wanted.metric == "loss" and whole and not chosen
