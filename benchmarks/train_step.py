"""One forward and backward pass of a GPT-2-shaped model: ours, nanoGPT's and transformers'.

    python benchmarks/train_step.py --nanogpt path/to/nanoGPT [--shape small] [--rounds 12]

Equal work: the same weights are copied into all, and the run stops if parameter counts or losses
differ. The activation is the exact GELU in all, which is nanoGPT's; with `--activation gpt2` ours
and transformers' have GPT-2's tanh form, each as it ships it. Contenders take turns in one process
and the order rotates from round to round, so a disturbance of the machine meets all of them alike.
The figure to look at is the ratio to ours in each round: its median, and the middle half of the
rounds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.models import gpt2
from clearhead.weights.convert import to_theirs

VOCAB = 65  # tiny Shakespeare's characters
TOLERANCE = {"exact": 1e-4, "gpt2": 1e-2}  # of the losses, which are near ln(65) = 4.2
ACTIVATIONS = {"exact": ("gelu", "gelu"), "gpt2": ("gelu_tanh", "gelu_new")}  # ours, theirs


@dataclass(frozen=True)
class Shape:
    """The size of model and batch."""

    layers: int
    """Blocks."""
    width: int
    """Of the residual stream."""
    heads: int
    """Attention heads."""
    length: int
    """Tokens in a sequence."""
    batch: int
    """Sequences."""


SHAPES = {
    "base": Shape(layers=6, width=384, heads=6, length=256, batch=16),
    "small": Shape(layers=4, width=128, heads=4, length=64, batch=12),
}


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    nanogpt: Path | None = None
    """The folder of a nanoGPT checkout (with model.py); left out: nanoGPT does not take part."""
    shape: Literal["base", "small"] = "base"
    """base: 6 x 384, length 256, batch 16; small: 4 x 128, length 64, batch 12."""
    activation: Literal["exact", "gpt2"] = "exact"
    """exact: the same GELU in all; gpt2: its tanh form (nanoGPT has the exact one only)."""
    rounds: int = 12
    """How often each contender runs."""
    threads: int = 2
    """PyTorch's threads."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Contender:
    """A model, and how its loss is computed."""

    net: nn.Module
    """The model."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(ids, targets) -> loss."""

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward, from gradients that are not there."""
        self.net.zero_grad(set_to_none=True)
        loss = self.loss(ids, targets)
        loss.backward()
        return loss


@dataclass(frozen=True)
class Result:
    """What one contender took."""

    parameters: int
    """Parameters, tied ones once."""
    flops: int
    """Matrix products of a step, counted by PyTorch with the unfused attention kernel."""
    median_ms: float
    """The median of its times."""
    best_ms: float
    """The shortest."""
    ratio: float
    """Median over the rounds of its time divided by ours: above 1 it is slower than ours."""
    ratio_low: float
    """First quartile of these ratios."""
    ratio_high: float
    """Third quartile."""


def main(args: Args) -> None:
    """Run and print."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = SHAPES[args.shape]
    contenders = make(shape, args.nanogpt, args.activation)
    ids, targets = batch(shape)
    counts = {name: parameters(c.net) for name, c in contenders.items()}
    assert len(set(counts.values())) == 1, f"parameter counts differ: {counts}"
    flops = {name: count_flops(c, ids, targets) for name, c in contenders.items()}
    losses = {name: c.step(ids, targets).item() for name, c in contenders.items()}  # and warms up
    spread = max(losses.values()) - min(losses.values())
    assert spread < TOLERANCE[args.activation], f"the losses differ, so the work does: {losses}"
    steps = {name: partial(c.step, ids, targets) for name, c in contenders.items()}
    times = race(steps, args.rounds)
    results = {
        name: Result(counts[name], flops[name], *summary(times[name], times["clearhead"]))
        for name in contenders
    }
    report(args, shape, results, losses)


def make(shape: Shape, nanogpt: Path | None, activation: str) -> dict[str, Contender]:
    """All contenders that are there, with the same weights."""
    here, there = ACTIVATIONS[activation]
    model = ours(shape, here)
    assert isinstance(model.config, gpt2.Config)
    table = gpt2.keys(model.config)
    theirs = to_theirs(named(model.net), table, shape.layers)
    contenders = {"clearhead": Contender(model.net, lambda i, t: cross_entropy(model.net(i), t))}
    if nanogpt is not None:
        contenders["nanoGPT"] = make_nanogpt(shape, nanogpt, theirs)
    with contextlib.suppress(ImportError):
        contenders["transformers"] = make_transformers(shape, theirs, there)
    return contenders


def ours(shape: Shape, activation: str = "gelu") -> ch.Model:
    """Our model of this shape."""
    model = ch.build(
        "gpt2",
        seed=0,
        n_layers=shape.layers,
        d_model=shape.width,
        n_heads=shape.heads,
        vocab_size=VOCAB,
        max_len=shape.length,
        activation=activation,
        dropout=0.0,
    )
    model.net.train()
    return model


def named(net: Any) -> dict[str, Tensor]:
    """Every parameter once, by its first name."""
    aliases = dict(net.ties)
    return {
        name: parameter.detach()
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if name not in aliases
    }


def load_nanogpt(folder: Path) -> Any:
    """The module model.py of a checkout of nanoGPT."""
    path = folder / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert path.is_file(), f"there is no {path}: --nanogpt is the folder of a nanoGPT checkout"
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    return module


def make_nanogpt(shape: Shape, folder: Path, weights: dict[str, Tensor]) -> Contender:
    """nanoGPT, imported from its checkout."""
    module = load_nanogpt(folder)
    config = module.GPTConfig(
        block_size=shape.length,
        vocab_size=VOCAB,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        dropout=0.0,
        bias=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it announces its parameters
        net = module.GPT(config).train()
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    fill(net, {name: w.T if name.endswith(turned) else w for name, w in weights.items()})
    return Contender(net, lambda ids, targets: net(ids, targets)[1])


def make_transformers(shape: Shape, weights: dict[str, Tensor], activation: str) -> Contender:
    """GPT2LMHeadModel with the same fused attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=shape.length,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function=activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "sdpa"
    net = GPT2LMHeadModel(config).train()
    assert net.config._attn_implementation == "sdpa"
    fill(net, weights)
    return Contender(net, lambda ids, targets: cross_entropy(net(input_ids=ids).logits, targets))


def fill(net: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights in; only a tied head and fixed masks may be left."""
    result = net.load_state_dict(weights, strict=False)
    left = [n for n in result.missing_keys if n != "lm_head.weight" and not n.endswith("attn.bias")]
    assert not left, f"not filled: {left}"
    assert not result.unexpected_keys, f"not used: {result.unexpected_keys}"


def batch(shape: Shape) -> tuple[Tensor, Tensor]:
    """Random ids and targets."""
    generator = torch.Generator().manual_seed(1)
    size = (2, shape.batch, shape.length)
    ids, targets = torch.randint(VOCAB, size, generator=generator).unbind()
    return ids, targets


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def parameters(net: nn.Module) -> int:
    """How many, tied ones once."""
    return sum(p.numel() for p in net.parameters())


def count_flops(contender: Contender, ids: Tensor, targets: Tensor) -> int:
    """Of a step; the counter knows no fused kernel of the CPU, so the plain one runs here."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        contender.step(ids, targets)
    return counter.get_total_flops()


def race(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Times in seconds: one step each a round, another first in every round."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        steps[name]()
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    return times


def summary(times: list[float], ours: list[float]) -> tuple[float, float, float, float, float]:
    """Median and best in ms; median and quartiles of the ratios to ours in the same round."""
    ratios = [mine / reference for mine, reference in zip(times, ours, strict=True)]
    low, middle, high = quartiles(ratios)
    return 1e3 * statistics.median(times), 1e3 * min(times), middle, low, high


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def report(args: Args, shape: Shape, results: dict[str, Result], losses: dict[str, float]) -> None:
    """As JSON or as a table."""
    if args.json:
        facts = {
            "shape": asdict(shape),
            "rounds": args.rounds,
            "threads": args.threads,
            "activation": args.activation,
            "torch": torch.__version__,
            "losses": losses,
            "results": {name: asdict(result) for name, result in results.items()},
        }
        print(json.dumps(facts, indent=1))
        return
    tokens = shape.batch * shape.length
    print(f"{shape}, activation {args.activation}, {args.rounds} rounds,", end=" ")
    print(f"{args.threads} threads, torch {torch.__version__}")
    print(f"{'':14}{'parameters':>12}{'GFLOP':>9}{'median ms':>11}{'best ms':>10}", end="")
    print(f"{'tokens/s':>10}{'ratio to ours':>15}  middle half")
    for name, r in results.items():
        print(f"{name:14}{r.parameters:12,}{r.flops / 1e9:9.2f}{r.median_ms:11.1f}", end="")
        print(f"{r.best_ms:10.1f}{1e3 * tokens / r.median_ms:10.0f}{r.ratio:15.3f}", end="")
        print(f"  {r.ratio_low:.3f} to {r.ratio_high:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
