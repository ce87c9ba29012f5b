"""A recipe: everything that a run is made from, as YAML with six sections.

data        what is read, and what is asked of the model
tokenizer   how text becomes tokens
model       a family or preset with its settings, or the model to start `from`
train       how long, how much at a time, what is kept
optim       how the weights move
eval        what is measured, and what to expect

`read_recipe("shakespeare")` is one that comes with Clearhead, `read_recipe("my.yaml")` your own,
and "my.txt" a text, for which the settings are chosen. `train.batch` counts examples, or tokens
where `data.by` says so. An unknown section, key or kind is an error that names the nearest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.config import Spec
from clearhead.data.language import NextToken
from clearhead.data.objectives import Objective
from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.models.family import FamilyConfig
from clearhead.models.presets import resolve
from clearhead.training.average import AverageConfig
from clearhead.training.lora import LoRAConfig
from clearhead.training.optim import OptimConfig
from clearhead.training.schedule import Noam


@dataclass(frozen=True)
class DataConfig(Spec, kind="data"):
    """What is read."""

    source: str = ""
    """A file, a folder, parallel files ("a.en,a.de"), a named set, or "hf:name" of a data set."""
    valid: str | None = None
    """What validates; None: the set's own, or a part of the source."""
    test: str | None = None
    """What is kept for the end."""
    split: float = 0.1
    """The part that validates where nothing else is said."""
    objective: Objective = NextToken()
    """What is asked of the model."""
    length: int | None = None
    """Tokens in each example; None: as many as the model has positions."""
    by: Literal["examples", "tokens"] = "examples"
    """What train.batch counts: examples, or tokens (padding included)."""
    limit: int | None = None
    """Read so many records and no more."""
    workers: int = 0
    """Threads that prepare batches ahead of time."""

    def __post_init__(self) -> None:
        require(0 < self.split < 1, f"data.split is a part, between 0 and 1, not {self.split}.")
        require(self.workers >= 0, f"data.workers must be 0 or more, not {self.workers}.")
        for name in ("length", "limit"):
            size = getattr(self, name)
            require(size is None or size >= 1, f"data.{name} must be 1 or more, not {size}.")


class TokenizerConfig(Spec):
    """How text becomes tokens."""


@dataclass(frozen=True)
class Characters(TokenizerConfig, kind="characters"):
    """One token a character."""


@dataclass(frozen=True)
class Bytes(TokenizerConfig, kind="bytes"):
    """One token a byte."""


@dataclass(frozen=True)
class Words(TokenizerConfig, kind="words"):
    """One token a word."""

    vocab_size: int = 8000
    """How many at most, special ones included."""
    shared: bool = True
    """Whether source and target have one vocabulary."""


@dataclass(frozen=True)
class BPE(TokenizerConfig, kind="bpe"):
    """Pieces of words by merging."""

    vocab_size: int = 8000
    """How many, special ones included."""
    shared: bool = True
    """Whether source and target have one vocabulary."""
    dropout: float = 0.0
    """The part of merges that is left out at random in training text (BPE-dropout)."""
    readings: int = 8
    """With it: in how many ways the training text is cut."""

    def __post_init__(self) -> None:
        require(0 <= self.dropout < 1, f"tokenizer.dropout is in [0, 1), not {self.dropout}.")
        require(self.readings >= 1, f"tokenizer.readings must be 1 or more, not {self.readings}.")


@dataclass(frozen=True)
class Unigram(TokenizerConfig, kind="unigram"):
    """Pieces of words by probability."""

    vocab_size: int = 8000
    """How many, special ones included."""
    shared: bool = True
    """Whether source and target have one vocabulary."""


@dataclass(frozen=True)
class Ready(TokenizerConfig, kind="ready"):
    """A tokeniser that exists."""

    folder: str = ""
    """Its folder; none: that of the model the run starts from."""


@dataclass(frozen=True)
class MachineConfig(Spec, kind="machine"):
    """How the arithmetic is done; `clearhead doctor` says what this machine is good at."""

    device: str = "auto"
    """auto, cpu, cuda, mps."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type of products (the weights stay fp32)."""
    products: Literal["auto", "torch", "compiled"] = "auto"
    """How matrices are multiplied in fp32 on a CPU: by PyTorch, or by code that Clearhead compiles
    for the processor; auto: the quicker."""
    compile: bool = False
    """Whether torch.compile makes kernels for this model first."""
    recompute: bool = False
    """Whether blocks are computed again in the backward pass instead of kept: less memory."""
    threads: int | None = None
    """Threads of the CPU; None: as many as it has cores."""
    shard: bool = False
    """With several processes: whether weights are shared out among them (FSDP2) or copied (DDP)."""


@dataclass(frozen=True)
class TrainConfig(Spec, kind="train"):
    """How long, how much at a time, what is kept."""

    steps: int = 1000
    """How many updates; with `minutes` as many as fit."""
    minutes: float | None = None
    """A budget of time: the speed is measured first, and the steps follow from it."""
    batch: int = 16
    """Examples (or tokens, `data.by`) in a batch."""
    accumulate: int = 1
    """Batches in a step."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    eval_every: int = 250
    """Steps between evaluations."""
    seed: int = 0
    """Of the weights, the order of the data and dropout."""
    patience: int | None = None
    """Stop after so many evaluations without a new best, and take the best; None: never."""
    label_smoothing: float = 0.0
    """The part of the target that is spread over all tokens."""
    average: AverageConfig | None = None
    """Which weights are given in the end; None: the last."""
    lora: LoRAConfig | None = None
    """Train small additions to the matrices instead of the matrices."""
    machine: MachineConfig = MachineConfig()
    """How the arithmetic is done."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "checkpoint_every", "eval_every"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name} must be 1 or more, not {value}.")
        require(self.seed >= 0, f"train.seed must be 0 or more, not {self.seed}.")
        require(
            self.minutes is None or self.minutes > 0,
            f"train.minutes must be above 0, not {self.minutes}.",
        )
        require(
            0 <= self.label_smoothing < 1,
            f"train.label_smoothing is in [0, 1), not {self.label_smoothing}.",
        )
        require(
            self.patience is None or self.patience >= 1,
            f"train.patience must be 1 or more, not {self.patience}.",
        )


@dataclass(frozen=True)
class EvalConfig(Spec, kind="eval"):
    """What is measured, and what to expect."""

    metric: str = "loss"
    """The figure that counts: loss, bits_per_character, bleu, exact_match, accuracy, f1, ..."""
    expect: float | None = None
    """Its value at the end of this recipe, as measured."""
    split: Literal["valid", "test"] = "valid"
    """What it is measured on at the end."""
    prompt: str = ""
    """What samples start with while it learns; none: a piece of the validation data."""
    beams: int = 1
    """Beams of the decoding."""
    length_penalty: float = 1.0
    """Of beam search: above 1 favours long texts."""
    limit: int | None = None
    """Measure on so many validation examples while training; None: on all."""


@dataclass(frozen=True)
class ModelChoice:
    """The model section: a family or preset with changes, or a model to start from."""

    family: str = ""
    """A family, or a preset."""
    source: str = ""
    """`from` in YAML: a folder or hub name whose weights the run starts with."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Changes, in the words of `ch.build`."""

    @staticmethod
    def from_dict(data: Any) -> ModelChoice:
        """Read the section; the settings are checked against the family."""
        require(isinstance(data, Mapping), f"model must be a table of settings, not {data!r}.")
        settings = dict(data)
        family, source = str(settings.pop("family", "")), str(settings.pop("from", ""))
        near = "" if family or source else _meant(settings)
        require(
            bool(family) != bool(source),
            f'model says either which "family" to build or which model to start "from".{near}',
        )
        choice = ModelChoice(family, source, settings)
        if family:
            choice.config()  # so that a misspelt key is found before anything is read
        return choice

    def config(self, **more: Any) -> FamilyConfig:
        """The full settings of a new model."""
        return resolve(self.family).changed(**{**self.settings, **more})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it was read."""
        first = {"from": self.source} if self.source else {"family": self.family}
        return {**first, **self.settings}


@dataclass(frozen=True)
class Recipe:
    """A run, before it is one."""

    data: DataConfig
    """What is read."""
    tokenizer: TokenizerConfig
    """How text becomes tokens."""
    model: ModelChoice
    """Which model."""
    train: TrainConfig = TrainConfig()
    """How long, how much at a time."""
    optim: OptimConfig = OptimConfig()
    """How the weights move."""
    eval: EvalConfig = EvalConfig()
    """What is measured."""
    name: str = "run"
    """What the run is called."""

    @staticmethod
    def from_dict(data: Mapping[str, Any], name: str = "run") -> Recipe:
        """Read six sections; every key must be known."""
        for key in data:
            require(
                key in SECTIONS,
                f'A recipe has no section "{key}".{did_you_mean(str(key), SECTIONS)} '
                f"Sections: {', '.join(SECTIONS)}.",
            )
        for key in ("data", "model"):
            require(key in data, f'The recipe lacks its section "{key}".')
        holder = _Tokenizer.from_dict({"tokenizer": data.get("tokenizer", "characters")}, "recipe")
        return Recipe(
            DataConfig.from_dict(data["data"] or {}, "data"),
            holder.tokenizer,
            ModelChoice.from_dict(data["model"] or {}),
            TrainConfig.from_dict(data.get("train") or {}, "train"),
            OptimConfig.from_dict(_rated(data.get("optim") or {}), "optim"),
            EvalConfig.from_dict(data.get("eval") or {}, "eval"),
            name,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        sections = {name: getattr(self, name).to_dict() for name in SECTIONS}
        for name in ("data", "train", "optim", "eval"):
            sections[name].pop("kind")
        return sections

    def changed(self, **changes: Any) -> Recipe:
        """A copy with some keys replaced: `changed(**{"optim.lr": 1e-3})`."""
        return Recipe.from_dict(merge(self.to_dict(), changes), self.name)

    def with_steps(self, steps: int) -> Recipe:
        """The same with another number of steps."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, steps=steps))


def _meant(settings: Mapping[str, Any]) -> str:
    """Which of these keys was to be one that says what the model is."""
    for key in settings:
        if hint := did_you_mean(str(key), ("family", "from")):
            return f' It has "{key}".{hint}'
    return ""


def _rated(optim: Any) -> Any:
    """Noam's formula is the rate itself: where nothing else is said it is multiplied by 1."""
    return {"lr": 1.0, **optim} if has_noam(optim) else optim


def has_noam(optim: Any) -> bool:
    """Whether the table of the section names that schedule."""
    schedule = optim.get("schedule") if isinstance(optim, Mapping) else None
    return (schedule.get("kind") if isinstance(schedule, Mapping) else schedule) == Noam.kind


@dataclass(frozen=True)
class _Tokenizer(Spec, kind="tokenizer"):
    """So that the sum type is read as every other."""

    tokenizer: TokenizerConfig
    """The choice."""


SPECS: dict[str, Any] = {
    "data": DataConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "eval": EvalConfig,
}
SECTIONS = ("data", "tokenizer", "model", "train", "optim", "eval")


def merge(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with dotted keys set: {"optim.lr": 1e-3}; a name on the way becomes a table."""
    merged = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()
    }
    for key, value in changes.items():
        *path, last = key.split(".")
        if not path and last not in SECTIONS:
            homes = {f.name: s for s, spec in SPECS.items() for f in dataclasses.fields(spec)}
            near = f" Did you mean {homes[last]}.{last}?" if last in homes else ""
            hint = near or did_you_mean(last, SECTIONS)
            raise ClearheadError(f'"{key}" names no section: --set optim.lr=3e-4.{hint}')
        table: Any = merged
        for part in path:
            inner = table.get(part)
            if isinstance(inner, str):  # `schedule: cosine` is short for {kind: cosine}
                inner = {"kind": inner}
            table[part] = dict(inner or {})
            table = table[part]
        table[last] = value
    return merged
