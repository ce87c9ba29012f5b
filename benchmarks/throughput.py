"""Tokens a second of whole training steps: forward, backward, fused AdamW, fp32.

    python benchmarks/throughput.py --shape small --nanogpt path/to/nanoGPT [--compile]
    python benchmarks/throughput.py --shape base --nanogpt path/to/nanoGPT [--batch 64]
    python benchmarks/throughput.py --shape translation

small and base are nanoGPT's two Shakespeare models, on random ids: ours, nanoGPT (eager and under
torch.compile), transformers' GPT-2 (with sdpa, and its own tanh GELU as it ships it; the others
have the exact one), x-transformers (with flash) and nn.TransformerEncoder (with a causal mask). All
but x-transformers, which has no such layout, get the same weights, and the run stops if their
losses differ.

translation is an encoder-decoder on pairs of multi30k: ours, nn.Transformer and transformers'
MarianMTModel, with the same weights. A round is the same sentences for all, in as many steps.
They come in two ways, and each line says which:

    bucketed   sentences of similar length together, as our training batches them

    random     in random order, each batch padded to its longest, as the peers' own tutorials do

Ours is "clearhead" (bucketed); a peer's own figure is its random line, and its bucketed line says
what is left of the difference when it gets our batches. Tokens are real ones of source and target;
padding counts for nothing. Making batches is outside the clock, for all.

Where our compiled products are quicker than PyTorch's (`clearhead doctor` says so), our training
takes them, and so does "clearhead" here; "clearhead-torch" is ours without them.

Freed memory is kept by the process (`clearhead.memory`), as in our training, for all contenders;
`--memory returned` leaves it to the C library, as the peers' own programs do.

Contenders take turns in one process, another first in every round. "Ratio to ours" is the median
over the rounds of (their time / ours): above 1 they are slower.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from peers import Marian, TorchTranslator, make_torch_encoder, make_x_transformers
from torch import Tensor, nn
from train_step import (
    SHAPES,
    TOLERANCE,
    Contender,
    Shape,
    batch,
    cross_entropy,
    make_nanogpt,
    make_transformers,
    named,
    ours,
    race,
    summary,
)

from clearhead.data.batch import Batch
from clearhead.fast.products import any_large, use_compiled
from clearhead.measure.choices import quicker_products
from clearhead.memory import keep_freed_memory
from clearhead.models import bart, gpt2
from clearhead.training.adam import Adam
from clearhead.training.job import Job, prepare
from clearhead.training.loss import batch_loss, token_loss
from clearhead.training.run import read_recipe
from clearhead.weights.convert import to_theirs

OURS = "clearhead"
RATE = 1e-4  # of AdamW: its value costs nothing, but the losses should stay finite
ROUNDS = {"tiny": 2, "small": 100, "base": 12, "translation": 5}
DECODERS = SHAPES | {"tiny": Shape(layers=2, width=32, heads=2, length=16, batch=2)}
INSTALL = "pip install -e '.[bench]'"
# The model of the goal; post-norm and ReLU are what all three have in common.
TRANSLATION = {
    "model.n_layers": 4,
    "model.d_model": 128,
    "model.n_heads": 4,
    "model.d_ff": 256,
    "model.placement": "post",
    "model.activation": "relu",
    "model.position": {"kind": "sinusoidal", "layout": "halves"},  # Marian's order of sines
    "model.dropout": 0.0,
    "tokenizer": {"kind": "bpe", "vocab_size": 6000},
}


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    shape: Literal["small", "base", "translation", "tiny"] = "small"
    """small: 4 x 128, length 64, batch 12; base: 6 x 384, length 256, batch 16; translation: 4+4
    layers x 128; tiny: only to try the program."""
    nanogpt: Path | None = None
    """The folder of a nanoGPT checkout (with model.py); left out: nanoGPT does not take part."""
    compile: bool = False
    """Ours takes part under torch.compile, too (not for translation)."""
    batch: int | None = None
    """Sequences in a batch of small and base; None: as the shape says (nanoGPT's base has 64)."""
    tokens: int = 4096
    """Slots in a bucketed batch of translation, on the side that has more."""
    batches: int = 12
    """Batches in a round of translation."""
    only: tuple[str, ...] = ()
    """Only these contenders, and ours; none named: all."""
    rounds: int | None = None
    """How often each contender runs; None: 100 for small, 12 for base, 5 for translation."""
    threads: int = 2
    """PyTorch's threads."""
    memory: Literal["kept", "returned"] = "kept"
    """kept: freed memory stays with the process, as in our training, for all contenders; returned:
    it goes back to the system, as in a program that does nothing about it."""
    json: bool = False
    """Print JSON."""


@dataclass
class Entry:
    """A model in training."""

    net: nn.Module
    """The model."""
    losses: Sequence[Callable[[], Tensor]]
    """The loss of each step of a round."""
    tokens: int
    """Real tokens in a round."""
    slots: int
    """Slots in a round, padding included."""
    same: bool = True
    """Whether it has the same weights as ours, so that its first loss must be the same."""
    ours: bool = False
    """Whether it is ours, which has our optimiser: torch's fused AdamW with kept lists."""
    optimiser: torch.optim.Optimizer = field(init=False)
    """Its own."""

    def __post_init__(self) -> None:
        more: dict[str, Any] = {"lr": RATE, "weight_decay": 1e-2, "fused": True}
        if self.ours:
            self.optimiser = Adam(self.net.parameters(), decoupled_weight_decay=True, **more)
        else:
            self.optimiser = torch.optim.AdamW(self.net.parameters(), **more)

    def round(self) -> None:
        """One step for each loss."""
        for loss in self.losses:
            self.optimiser.zero_grad(set_to_none=True)
            loss().backward()
            self.optimiser.step()

    def first_loss(self) -> float:
        """Before anything is learnt; with gradients, so that torch.compile compiles once."""
        return float(self.losses[0]().detach())


@dataclass(frozen=True)
class Result:
    """What one contender took."""

    parameters: int
    """Those that are trained, tied ones once."""
    first_loss: float
    """Its loss before the first step."""
    padding: float
    """The part of its slots that hold nothing."""
    tokens_a_second: float
    """Real tokens in a round by the median of its times."""
    median_ms: float
    """The median of its times of a round."""
    best_ms: float
    """The shortest."""
    ratio: float
    """Median over the rounds of its time divided by ours: above 1 it is slower than ours."""
    ratio_low: float
    """First quartile of these ratios."""
    ratio_high: float
    """Third quartile."""


Made = Iterator[tuple[str, Callable[[], Entry]]]


def main(args: Args) -> None:
    """Run and print."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.memory == "kept":
        keep_freed_memory()
    warnings.filterwarnings("ignore", message=".*(nested tensor|functional_call|norm_first).*")
    made = translators(args) if args.shape == "translation" else decoders(args)
    entries: dict[str, Entry] = {}
    absent: dict[str, str] = {}
    losses: dict[str, float] = {}
    known = []
    for name, make in made:
        known.append(name)
        if not args.only or name in (OURS, *args.only):
            attempt(name, make, entries, losses, absent)
    unknown = sorted(set(args.only) - set(known))
    assert not unknown, f"--only: there is no {', '.join(unknown)}; there are {', '.join(known)}"
    check(entries, losses)
    rounds = args.rounds or ROUNDS[args.shape]
    times = race({name: entry.round for name, entry in entries.items()}, rounds)
    results = {}
    for name, entry in entries.items():
        median, *rest = summary(times[name], times[OURS])
        speed = 1e3 * entry.tokens / median
        padding = 1 - entry.tokens / entry.slots
        count = sum(p.numel() for p in entry.net.parameters() if p.requires_grad)
        results[name] = Result(count, losses[name], padding, speed, median, *rest)
    report(args, rounds, results, absent)


def attempt(
    name: str,
    make: Callable[[], Entry],
    entries: dict[str, Entry],
    losses: dict[str, float],
    absent: dict[str, str],
) -> None:
    """Make a contender and take a step of it, or say why it cannot take part."""
    try:
        entry = make()
        losses[name] = entry.first_loss()
        if name.endswith("-compiled"):
            entry.round()  # a machine without a compiler fails here
    except ImportError as error:
        absent[name] = f"{error.name} is not installed ({INSTALL})"
    except FileNotFoundError as error:
        absent[name] = str(error)
    except Exception as error:
        if not name.endswith("-compiled"):
            raise
        absent[name] = f"torch.compile fails: {str(error).strip().splitlines()[0]}"
    else:
        entries[name] = entry
    if name in absent:
        print(f"{name} is left out: {absent[name]}", file=sys.stderr)


def check(entries: dict[str, Entry], losses: dict[str, float]) -> None:
    """Equal work: stop if a model that should be the same has another loss."""
    for name, entry in entries.items():
        alike = TOLERANCE["gpt2" if name == "transformers" else "exact"]  # it has its own GELU
        # random batches begin with other sentences than bucketed ones do
        beside = f"{OURS}-random" if name.endswith("-random") else OURS
        if entry.same and beside in losses:
            gap = abs(losses[name] - losses[beside])
            assert gap < alike, f"the losses differ, so the work does: {losses}"


# --- nanoGPT's two shapes ---


def decoders(args: Args) -> Made:
    """All contenders of a decoder's shape, each as something that makes it."""
    shape = DECODERS[args.shape]
    if args.batch is not None:
        shape = dataclasses.replace(shape, batch=args.batch)
    ids, targets = batch(shape)
    model = ours(shape)
    assert isinstance(model.config, gpt2.Config)
    weights = to_theirs(named(model.net), gpt2.keys(model.config), shape.layers)
    weights = {name: tensor.clone() for name, tensor in weights.items()}

    def entry(contender: Contender, same: bool = True, ours: bool = False) -> Entry:
        loss = partial(contender.loss, ids, targets)
        return Entry(contender.net, [loss], ids.numel(), ids.numel(), same, ours)

    chosen = as_trained(model.net)
    yield OURS, lambda: entry(own(chosen), ours=True)
    if chosen is not model.net:
        yield f"{OURS}-torch", lambda: entry(own(model.net), ours=True)
    if args.compile:
        twin = ours(shape).net
        yield f"{OURS}-compiled", lambda: entry(own_compiled(twin), ours=True)
    if args.nanogpt is None:
        yield "nanoGPT", no_checkout
    else:
        folder = args.nanogpt
        yield "nanoGPT", lambda: entry(make_nanogpt(shape, folder, weights))
        yield "nanoGPT-compiled", lambda: entry(compiled(make_nanogpt(shape, folder, weights)))
    yield "transformers", lambda: entry(make_transformers(shape, weights, "gelu_new"))
    yield "x-transformers", lambda: entry(make_x_transformers(shape), same=False)
    yield "nn.TransformerEncoder", lambda: entry(make_torch_encoder(shape, weights))


def as_trained(net: nn.Module) -> nn.Module:
    """A copy with compiled products, where our training takes them here; or the same."""
    if not any_large(net) or quicker_products() == "torch":
        return net
    copied = copy.deepcopy(net)
    use_compiled(copied)
    return copied


def no_checkout() -> Entry:
    """What stands for a peer whose folder was not named."""
    raise FileNotFoundError("--nanogpt names no checkout of it")


def own(net: nn.Module) -> Contender:
    """Ours, with the loss of our training."""
    return Contender(net, lambda ids, asked: token_loss(net(ids), asked) / asked.numel())


def own_compiled(net: nn.Module) -> Contender:
    """Ours as our training compiles it: the model with the loss in it."""
    return Contender(net, torch.compile(own(net).loss))


def compiled(contender: Contender) -> Contender:
    """nanoGPT as its train.py compiles it: the model with the loss in it."""
    forward: Any = torch.compile(contender.net)
    return Contender(contender.net, lambda ids, targets: forward(ids, targets)[1])


# --- translation ---


def translators(args: Args) -> Made:
    """All contenders of the encoder-decoder, each as something that makes it."""
    changes = TRANSLATION | {"train.batch": args.tokens, "data.by": "tokens"}
    job = prepare(read_recipe("multi30k-en-de", changes))
    bucketed = [job.batches.batch(n) for n in range(args.batches)]
    ways = {"": bucketed, "-bucketed": bucketed, "-random": shuffled(job, bucketed)}
    config = job.model.config
    assert config.vocab_size == 6000
    table = bart.keys(bart.Config(position=bart.MARIAN, embed_norm=False))
    weights = to_theirs(named(job.model.net), table, config.n_layers)
    weights = {name: tensor.clone() for name, tensor in weights.items()}

    def entry(
        net: nn.Module, way: str, loss: Callable[[Batch], Tensor], ours: bool = False
    ) -> Entry:
        batches = ways[way]
        tokens, slots = sum(b.tokens for b in batches), sum(b.slots for b in batches)
        losses = [partial(loss, b) for b in batches]
        return Entry(net.train(), losses, tokens, slots, ours=ours)

    def mine(way: str) -> Entry:
        net = as_trained(prepare(job.recipe).model.net)  # the same weights in memory of its own
        loss = partial(batch_loss, net, ask=job.objective.ask)
        return entry(net, way, lambda b: loss(b) / b.count, ours=True)

    def peer(make: Callable[..., nn.Module], way: str) -> Entry:
        net = make(config, weights)
        masks = {id(b): empty(b) for b in ways[way]}

        def loss(b: Batch) -> Tensor:
            return cross_entropy(net(*b.inputs, *masks[id(b)]), b.targets)

        return entry(net, way, loss)

    for way in ("", "-random"):
        yield f"{OURS}{way}", partial(mine, way)
    for name, make in (("nn.Transformer", TorchTranslator.filled), ("marian", Marian)):
        for way in ("-random", "-bucketed"):
            yield f"{name}{way}", partial(peer, make, way)


def shuffled(job: Job, batches: Sequence[Batch]) -> list[Batch]:
    """The same sentences in random order, in as many batches, which have equally many of them."""
    examples = [example for b in batches for example in rows(b)]
    dice = np.random.default_rng(0)
    parts = np.array_split(dice.permutation(len(examples)), len(batches))
    return [job.objective.collate([examples[i] for i in part], dice) for part in parts]


def rows(b: Batch) -> Iterator[dict[str, np.ndarray]]:
    """The examples that a batch was made of."""
    no_source, no_target = empty(b)
    source, shown = b.inputs
    for row in range(len(source)):
        begun, asked = shown[row][~no_target[row]], b.targets[row][~no_target[row]]
        yield {
            "source": source[row][~no_source[row]].numpy(),
            "target": torch.cat([begun, asked[-1:]]).numpy(),
        }


def empty(b: Batch) -> tuple[Tensor, Tensor]:
    """Which slots of source and target hold nothing."""
    found = []
    for side, ids in zip(("source_at", "target_at"), b.inputs, strict=True):
        at = b.places.get(side)
        found.append(torch.zeros_like(ids, dtype=torch.bool) if at is None else at.pos < 0)
    return found[0], found[1]


# --- what is said ---


def report(args: Args, rounds: int, results: dict[str, Result], absent: dict[str, str]) -> None:
    """As JSON or as a table."""
    if args.json:
        facts = {
            "shape": args.shape,
            "batch": args.batch,
            "rounds": rounds,
            "threads": args.threads,
            "torch": torch.__version__,
            "left_out": absent,
            "results": {name: asdict(result) for name, result in results.items()},
        }
        print(json.dumps(facts, indent=1))
        return
    size = f"{args.batches} batches of {args.tokens} slots a round, multi30k en-de"
    if args.shape != "translation":
        shape = DECODERS[args.shape]
        size = str(dataclasses.replace(shape, batch=args.batch or shape.batch))
    print(f"{args.shape}: {size}; {rounds} rounds, {args.threads} threads, torch", end=" ")
    print(f"{torch.__version__}; {OURS} is ours" + translation_note(args))
    print(f"{'':24}{'parameters':>12}{'padding':>9}{'median ms':>11}{'best ms':>10}", end="")
    print(f"{'tokens/s':>10}{'ratio to ours':>15}  middle half")
    for name, r in results.items():
        print(f"{name:24}{r.parameters:12,}{r.padding:9.1%}{r.median_ms:11.1f}", end="")
        print(f"{r.best_ms:10.1f}{r.tokens_a_second:10.0f}{r.ratio:15.3f}", end="")
        print(f"  {r.ratio_low:.3f} to {r.ratio_high:.3f}")


def translation_note(args: Args) -> str:
    """Which batches are whose."""
    if args.shape != "translation":
        return ""
    return (
        " and has bucketed batches\n-random: the same sentences shuffled and padded to the longest;"
        " -bucketed: a peer with our batches"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
