"""What a model writes while it learns: a text that goes on, or a source and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.data.objectives import NextToken, Seq2seq
from clearhead.errors import ClearheadError
from clearhead.training.loop import Trainer

PROMPT, NEW, TEMPERATURE = 24, 120, 0.8
LONGEST = 160  # characters of a source that is shown


@dataclass(frozen=True)
class Sample:
    """A piece of text from a model."""

    given: str
    """The prompt, or the source."""
    made: str
    """What the model wrote."""
    right: str = ""
    """What it should have written, where that is known."""


def draw_sample(trainer: Trainer) -> Sample | None:
    """A short sample of the model as it is now; None where it does not write."""
    job = trainer.job
    if trainer.recipe.train.machine.shard or job.model.tokenizer is None:
        return None
    try:
        if isinstance(job.objective, Seq2seq):
            return _translated(trainer)
        return _continued(trainer) if isinstance(job.objective, NextToken) else None
    except ClearheadError:  # a prompt with letters that the data lack, say: no reason to stop
        return None


def prompt_of(trainer: Trainer) -> str:
    """What samples start with: the recipe's prompt, or the first words of the validation text."""
    tokenizer = trainer.job.model.tokenizer
    assert tokenizer is not None
    if trainer.recipe.eval.prompt:
        return trainer.recipe.eval.prompt
    most = max(1, min(PROMPT, trainer.job.length // 4))
    return tokenizer.decode(trainer.job.valid.flat("ids")[:most].tolist())


def _continued(trainer: Trainer) -> Sample:
    model, prompt = trainer.job.model, prompt_of(trainer)
    assert model.tokenizer is not None
    new = min(NEW, model.config.max_len - len(model.tokenizer.encode(prompt)))
    seed = trainer.recipe.train.seed
    text = model.generate(prompt, max_new_tokens=new, temperature=TEMPERATURE, seed=seed)
    return Sample(prompt, text)


def _translated(trainer: Trainer) -> Sample:
    job, model = trainer.job, trainer.job.model
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for index in range(min(50, len(job.valid))):  # the first that is easily read
        example = job.valid[index]
        source = tokenizer.decode(example["source"].tolist())
        if len(source) <= LONGEST:
            break
    target = tokenizer.target.decode(example["target"].tolist())
    beams, penalty = trainer.recipe.eval.beams, trainer.recipe.eval.length_penalty
    made = trainer.recipe.eval.prompt or source
    written = str(model.translate(made, beams=min(beams, 4), length_penalty=penalty))
    if len(written) > 2 * LONGEST:  # early in a run it does not know where to end
        written = written[: 2 * LONGEST] + " ..."
    return Sample(made, written, "" if trainer.recipe.eval.prompt else target)
