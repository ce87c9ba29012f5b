"""How long loading takes and how much memory it needs: GPT-2 124M from one safetensors file.

    python benchmarks/load.py [--rounds 5] [--folder DIR]

Ours (`ch.load`) against transformers (`GPT2LMHeadModel.from_pretrained`), each in a fresh process,
in turns. Imports are not counted: a process imports, then measures. Times: the load, and the first
forward of 8 tokens behind it, which reads the weights that a memory-mapped load has not read yet.
Memory: the peak above what the process had after its imports, as a multiple of the weights' size,
after the load and after that forward. The file is in the page cache in every round (one load of
each goes before).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

GOAL_MEMORY = 1.15
CONTENDERS = ("clearhead", "transformers")

# What a child does: import, note the memory, load, run once; figures as JSON on the last line.
CHILD = """
import json, sys, time

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

def peak():
    return status("VmHWM:")

who, folder = sys.argv[1:]
import torch
torch.set_num_threads({threads})
if who == "clearhead":
    import clearhead as ch
    from clearhead import api  # its names are imported when they are first used
    import clearhead.models.gpt2
    load = lambda: ch.load(folder).net
    run = lambda net, ids: net(ids)
else:
    import transformers
    from transformers import GPT2LMHeadModel
    transformers.utils.logging.disable_progress_bar()
    load = lambda: GPT2LMHeadModel.from_pretrained(folder).eval()
    run = lambda net, ids: net(ids).logits
ids = torch.arange(100, 108).unsqueeze(0)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = status("VmRSS:")
start = time.perf_counter()
net = load()
loaded = time.perf_counter()
after_load = peak()
with torch.inference_mode():
    logits = run(net, ids)
done = time.perf_counter()
print(json.dumps({{
    "load": loaded - start, "forward": done - loaded, "memory_load": after_load - before,
    "memory_forward": peak() - before, "sum": float(logits.double().abs().sum()),
}}))
"""


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    rounds: int = 5
    """Processes of each contender."""
    folder: Path | None = None
    """A Hugging Face folder of a GPT-2; without it one is made with random weights (500 MB)."""
    threads: int = 1
    """PyTorch's threads."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Result:
    """Medians of one contender."""

    load: float
    """Seconds to load."""
    forward: float
    """Seconds of the first forward."""
    memory_load: float
    """Peak of the load, in sizes of the weights."""
    memory_forward: float
    """Peak of load and forward, in sizes of the weights."""


def main(args: Args) -> None:
    """Run and print."""
    with ExitStack() as stack:
        folder = args.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make(folder)
        size = (folder / "model.safetensors").stat().st_size
        runs = race(folder, args)
    results = {who: summarise(figures, size) for who, figures in runs.items()}
    mine, theirs = (runs[who] for who in CONTENDERS)
    ratios = [b["load"] / a["load"] for a, b in zip(mine, theirs, strict=True)]
    both = [
        (b["load"] + b["forward"]) / (a["load"] + a["forward"])
        for a, b in zip(mine, theirs, strict=True)
    ]
    ratio, ratio_both = statistics.median(ratios), statistics.median(both)
    if args.json:
        facts: dict[str, Any] = {who: asdict(result) for who, result in results.items()}
        print(json.dumps(facts | {"ratio_load": ratio, "ratio_both": ratio_both}, indent=1))
        return
    print(f"weights {size / 1e6:.0f} MB, {args.rounds} processes each, {args.threads} thread(s)")
    print(f"{'':14}{'load':>10}{'forward':>10}{'memory: load':>15}{'+ forward':>12}")
    for who, r in results.items():
        print(
            f"{who:14}{r.load:8.3f} s{r.forward:8.3f} s{r.memory_load:13.2f} x"
            f"{r.memory_forward:10.2f} x"
        )
    print(f"transformers' time / ours: load {ratio:.2f}, load and first forward {ratio_both:.2f}")
    verdict = "within" if results["clearhead"].memory_forward <= GOAL_MEMORY else "beyond"
    print(f"memory is {verdict} the goal of {GOAL_MEMORY} x the weights")


def make(folder: Path) -> None:
    """GPT-2 124M with random weights, as transformers saves it."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)


def race(folder: Path, args: Args) -> dict[str, list[dict[str, float]]]:
    """The figures of every process; the first of each is not counted."""
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in CONTENDERS}
    for number in range(args.rounds + 1):
        turn = CONTENDERS if number % 2 else CONTENDERS[::-1]
        for who in turn:
            figures = measure(who, folder, args.threads)
            if number:
                runs[who].append(figures)
    sums = {round(figures["sum"], 1) for all_of in runs.values() for figures in all_of}
    assert len(sums) == 1, f"the contenders do not compute the same: {sums}"
    return runs


def measure(who: str, folder: Path, threads: int) -> dict[str, float]:
    """One fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(threads=threads), who, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def summarise(figures: list[dict[str, float]], size: int) -> Result:
    """Medians, with memory in sizes of the weights."""

    def median(name: str) -> float:
        return statistics.median(f[name] for f in figures)

    return Result(
        median("load"),
        median("forward"),
        median("memory_load") / size,
        median("memory_forward") / size,
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
