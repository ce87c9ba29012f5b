"""What taps cost that nobody listens to, in a training step and in decoding one token.

    python benchmarks/taps.py [--shape small] [--rounds 12]

Two ways that should agree:
(a) the calls of idle taps in one step (counted) times the time of one such call where it stands,
    divided by the time of the step;
(b) the network against itself without taps: the source of every forward is compiled again with the
    tap calls cut out, and the classes of the same modules (same weights, same memory) are swapped
    from step to step. The noise is the same comparison of the real network with itself.
"""

from __future__ import annotations

import ast
import inspect
import json
import statistics
import textwrap
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import tyro
from torch import nn
from train_step import SHAPES, VOCAB, Shape, batch, cross_entropy, ours, quartiles

from clearhead.tap import Tap

CACHED = 256  # tokens before the one that is decoded
GOAL = 0.005


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    shape: Literal["base", "small"] = "base"
    """base: 6 x 384, length 256, batch 16; small: 4 x 128, length 64, batch 12."""
    rounds: int = 12
    """Training steps of each kind; decoding gets a hundred times as many."""
    threads: int = 2
    """PyTorch's threads."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Result:
    """The cost of idle taps in one kind of step."""

    step_ms: float
    """Median time of the step."""
    calls: int
    """Tap calls and look-ups in it."""
    counted: float
    """(a) calls times the cost of one, as a part of the step."""
    compared: float
    """(b) median over the rounds of real / without taps, minus 1."""
    compared_low: float
    """First quartile of it."""
    compared_high: float
    """Third quartile."""
    best: float
    """(b) from the shortest time of each."""
    noise: float
    """(b) for the same network twice: the median."""
    noise_best: float
    """The same from the shortest times."""


def main(args: Args) -> None:
    """Run and print."""
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    call, look = cost_of_call(), cost_of_look()
    results = {
        "training step": measure(training_step(shape), args.rounds, call, look),
        "decoding one token": measure(decoding_step(shape), 100 * args.rounds, call, look),
    }
    if args.json:
        facts = {name: asdict(result) for name, result in results.items()}
        print(json.dumps({"call_ns": 1e9 * call, "look_ns": 1e9 * look} | facts, indent=1))
        return
    print(f"{shape}, {args.threads} threads, torch {torch.__version__}")
    print(f"one idle call {1e9 * call:.0f} ns, one look at listeners {1e9 * look:.0f} ns")
    for name, r in results.items():
        print(f"{name}: {r.step_ms:.3f} ms, {r.calls} tap calls and looks")
        verdict = "within" if r.counted < GOAL else "beyond"
        print(f"  (a) counted    {r.counted:.3%} of the step ({verdict} the goal of {GOAL:.1%})")
        print(f"  (b) compared   {r.compared:+.2%}, middle half of the rounds", end=" ")
        print(f"{r.compared_low:+.2%} to {r.compared_high:+.2%}, best {r.best:+.2%}")
        print(f"      noise      {r.noise:+.2%}, best {r.noise_best:+.2%}")


def training_step(shape: Shape) -> tuple[nn.Module, Callable[[], Any]]:
    """The network and one forward and backward pass of it."""
    net = ours(shape).net
    ids, targets = batch(shape)

    def step() -> torch.Tensor:
        net.zero_grad(set_to_none=True)
        loss = cross_entropy(net(ids), targets)
        loss.backward()
        return loss.detach()

    return net, step


def decoding_step(shape: Shape) -> tuple[nn.Module, Callable[[], Any]]:
    """The network and one token behind a cache of 256; the cache goes back after each."""
    longer = Shape(shape.layers, shape.width, shape.heads, CACHED + 1, 1)
    net: Any = ours(longer).net.eval()
    cache = net.new_cache(1, CACHED + 1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (1, CACHED + 1), generator=generator)
    with torch.no_grad():
        net.decode(ids[:, :CACHED], cache=cache)
    last = ids[:, CACHED:]

    def step() -> torch.Tensor:
        with torch.no_grad():
            logits = net.decode(last, cache=cache)
        cache.trim(CACHED)
        return logits

    return net, step


def measure(
    work: tuple[nn.Module, Callable[[], Any]], rounds: int, call: float, look: float
) -> Result:
    """Both ways, for one kind of step."""
    net, step = work
    calls, looks = count_calls(net, step)
    switch = Switch(net)
    expected = step()
    with switch:
        assert count_calls(net, step) == (0, 0), "a tap was not cut out"
        assert torch.equal(step(), expected), "without taps the result is another one"

    times = race_switched(switch, step, rounds)
    seconds = statistics.median(times["real"])
    over = [r / b - 1 for r, b in zip(times["real"], times["bare"], strict=True)]
    noise = [r / a - 1 for r, a in zip(times["real"], times["again"], strict=True)]
    low, middle, high = quartiles(over)
    least = {name: min(values) for name, values in times.items()}
    return Result(
        step_ms=1e3 * seconds,
        calls=calls + looks,
        counted=(calls * call + looks * look) / seconds,
        compared=middle,
        compared_low=low,
        compared_high=high,
        best=least["real"] / least["bare"] - 1,
        noise=statistics.median(noise),
        noise_best=least["real"] / least["again"] - 1,
    )


def race_switched(switch: Switch, step: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """The real network, the one without taps and the real one again, another first each round."""
    names = ["real", "bare", "again"]
    times: dict[str, list[float]] = {name: [] for name in names}
    step()  # warms up
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            if name == "bare":
                with switch:  # outside the clock
                    times[name].append(timed(step))
            else:
                times[name].append(timed(step))
    return times


def timed(step: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# --- (a) counting ---


class Counting(Tap):
    """A tap that counts its calls and how often somebody looks at its listeners."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    @property
    def listeners(self) -> tuple[()]:  # type: ignore[override]
        self.counts[1] += 1
        return ()

    def __call__(self, x: Any) -> Any:
        self.counts[0] += 1
        return x


def count_calls(net: nn.Module, step: Callable[[], Any]) -> tuple[int, int]:
    """How often taps are called in a step, and how often listeners are looked at elsewhere."""
    counts = [0, 0]
    saved = [
        (vars(module), name, tap)
        for module in net.modules()
        for name, tap in vars(module).items()
        if isinstance(tap, Tap)
    ]
    for attributes, name, _ in saved:
        attributes[name] = Counting(counts)
    try:
        step()
    finally:
        for attributes, name, tap in saved:
            attributes[name] = tap
    return counts[0], counts[1]


class Owner(nn.Module):
    """A module with a tap, as attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(1, 1)
        self.q = Tap()


def cost_of_call() -> float:
    """Seconds of `x = self.q(x)` in a method, attribute access included, `x = x` taken off."""
    return unrolled("x = self.q(x)") - unrolled("x = x")


def cost_of_look() -> float:
    """Seconds of `if self.q.listeners:`."""
    return unrolled("if self.q.listeners: pass") - unrolled("pass")


def unrolled(line: str, times: int = 200, tries: int = 2000) -> float:
    """The best time of one such line in a method of many."""
    scope: dict[str, Any] = {}
    exec("def f(self, x):\n" + f"    {line}\n" * times, scope)
    owner, x, f = Owner(), torch.zeros(1), scope["f"]
    return min(timed(lambda: f(owner, x)) for _ in range(tries)) / times


# --- (b) the network without taps ---


class Switch:
    """Inside `with`, the modules of a network have classes whose methods know no taps."""

    def __init__(self, net: nn.Module) -> None:
        self.pairs: list[tuple[nn.Module, type, type]] = []
        bare: dict[type, type] = {}
        for module in net.modules():
            kind = type(module)
            names = {name for name, value in vars(module).items() if isinstance(value, Tap)}
            if names:
                bare.setdefault(kind, without_taps(kind, names))
                self.pairs.append((module, kind, bare[kind]))

    def __enter__(self) -> None:
        for module, _, bare in self.pairs:
            module.__class__ = bare

    def __exit__(self, *error: object) -> None:
        for module, kind, _ in self.pairs:
            module.__class__ = kind


def without_taps(kind: type, taps: set[str]) -> type:
    """A subclass in which every `self.tap(x)` is `x`."""
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("clearhead."):
            continue
        for name, function in vars(base).items():
            if isinstance(function, types.FunctionType) and name != "__init__":
                cut = recompiled(function, taps)
                if cut is not None:
                    methods[name] = cut
    return type(kind.__name__, (kind,), methods)


def recompiled(function: types.FunctionType, taps: set[str]) -> Any:
    """The function without its taps, or None if it has none."""
    source = textwrap.dedent(inspect.getsource(function))
    cutter = Cutter(taps)
    tree = ast.fix_missing_locations(cutter.visit(ast.parse(source)))
    if not cutter.cuts:
        return None
    assert not function.__closure__, f"{function.__qualname__} has a closure"
    scope: dict[str, Any] = {}
    code = "from __future__ import annotations\n"
    flags = compile(code, "", "exec").co_flags  # annotations stay strings, as in the original
    exec(compile(tree, "<without taps>", "exec", flags=flags), function.__globals__, scope)
    return scope[function.__name__]


class Cutter(ast.NodeTransformer):
    """self.tap(x) -> x; self.tap.listeners -> ()."""

    def __init__(self, taps: set[str]) -> None:
        self.taps, self.cuts = taps, 0

    def is_tap(self, node: ast.AST) -> bool:
        """Whether this is `self.tap`."""
        return (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr in self.taps
        )

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self.is_tap(node.func):
            self.cuts += 1
            return node.args[0]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "listeners" and self.is_tap(node.value):
            self.cuts += 1
            return ast.Tuple([], ast.Load())
        self.generic_visit(node)
        return node


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
