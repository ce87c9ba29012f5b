"""The compiled products against torch's: y = x W^T for 1 to 1024 rows of x, at GPT-2's shapes.

    python benchmarks/kernels.py [--threads 1] [--rounds 7]

Each contender has its own weights, more than the caches hold where memory allows, and walks through
copies of them as a model walks through its layers. Contenders take turns; a ratio is the median
over the rounds of (torch's time / ours). GB/s counts weights and scales once; the roof is a dot
product over 512 MB, measured in the same run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro

from clearhead.fast.formats import FORMS, pack
from clearhead.fast.linear import FastLinear

SHAPES = {
    "768 -> 2304": (768, 2304),
    "768 -> 768": (768, 768),
    "768 -> 3072": (768, 3072),
    "3072 -> 768": (3072, 768),
    "768 -> 50257": (768, 50257),
}


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    threads: int = 1
    """PyTorch's threads, and ours."""
    rounds: int = 7
    """Turns of each contender."""
    seconds: float = 0.02
    """The least time of a turn."""
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024)
    """Rows of x."""
    megabytes: int = 320
    """Weights of fp32 that the copies of a matrix come to; the others have as many copies."""
    json: bool = False
    """Print JSON."""


def main(args: Args) -> None:
    """Run and print."""
    torch.set_num_threads(args.threads)
    roof = bandwidth()
    results = []
    if not args.json:
        print(f"{args.threads} thread(s), memory {roof:.1f} GB/s. Ratio to torch, GB/s, % of roof")
        print(f"{'shape':14}{'rows':>5}  torch GB/s" + "".join(f"{form:>22}" for form in FORMS))
    for name, (k, n) in SHAPES.items():
        layers = {form: copies(form, n, k, args.megabytes) for form in FORMS}
        for rows in args.rows:
            line = race(layers, torch.randn(rows, k), args)
            results.append({"shape": name, "rows": rows} | line)
            if not args.json:
                print(told(name, rows, line, roof), flush=True)
    if args.json:
        print(json.dumps({"roof": roof, "threads": args.threads, "results": results}, indent=1))


def bandwidth() -> float:
    """GB/s of reading."""
    x = torch.ones(2**27)
    best = min(timed(lambda: x.dot(x)) for _ in range(6))
    return x.nbytes / best / 1e9


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call: on one thread of its processor time, which others do not lengthen."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def copies(form: Any, n: int, k: int, megabytes: int) -> list[FastLinear]:
    """As many layers as come to so many megabytes in fp32, at least one."""
    weight, scales = pack(torch.randn(n, k), form)
    count = max(megabytes * 10**6 // (4 * n * k), 1)
    bias = torch.zeros(n)
    return [FastLinear(form, k, weight.clone(), scales.clone(), bias) for _ in range(count)]


def race(layers: dict[Any, list[FastLinear]], x: torch.Tensor, args: Args) -> dict[str, Any]:
    """Ratios and GB/s of every form, in turns with torch's own product."""
    plain = [(layer.weight, layer.bias) for layer in layers["fp32"]]
    runs: dict[str, list[Callable[[], Any]]] = {
        "torch": [lambda w=w, b=b: F.linear(x, w, b) for w, b in plain]
    }
    runs |= {form: [lambda own=own: own(x) for own in owns] for form, owns in layers.items()}
    times: dict[str, list[float]] = {who: [] for who in runs}
    with torch.inference_mode():
        for number in range(args.rounds + 1):
            for who, calls in runs.items():
                count, spent = 0, 0.0
                while spent < args.seconds:
                    spent += timed(calls[count % len(calls)])
                    count += 1
                if number:  # the first turn warms up
                    times[who].append(spent / count)
    first = {form: owns[0] for form, owns in layers.items()}
    size = {form: own.weight.nbytes + own.tensors[1].nbytes for form, own in first.items()}
    found: dict[str, Any] = {"torch": size["fp32"] / statistics.median(times["torch"]) / 1e9}
    for form in layers:
        ratios = [a / b for a, b in zip(times["torch"], times[form], strict=True)]
        speed = size[form] / statistics.median(times[form]) / 1e9
        found[form] = {"ratio": statistics.median(ratios), "gb_per_s": speed}
    return found


def told(name: str, rows: int, line: dict[str, Any], roof: float) -> str:
    """One line of the table."""
    found = [(line[form]["ratio"], line[form]["gb_per_s"]) for form in FORMS]
    cells = [f"{ratio:8.2f} x{speed:6.1f}{speed / roof:6.0%}" for ratio, speed in found]
    return f"{name:14}{rows:5}  {line['torch']:10.1f}" + "".join(cells)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
