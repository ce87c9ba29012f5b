"""Two processes that write at the same time, as OpenMP comes and as Clearhead sets it.

    python benchmarks/crowded.py [--rounds 2] [--tokens 32]

Threads that wait for one another spin before they sleep; OpenMP's own measure for it is 300,000
turns, milliseconds, during which the other process cannot have the core. A line has the tokens per
second of one process: alone, and beside a second one that does the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

SETTINGS = {"as OpenMP comes": "300000", "as Clearhead sets it": "10000"}
CHILD = """
import sys, time, torch
import clearhead as ch
model = ch.build("gpt2", d_model=384, n_layers=6, n_heads=6, vocab=8000, max_len=256)
options = dict(max_new_tokens=int(sys.argv[1]), temperature=0.0)
model.generate([[1, 2, 3]] * 8, **options)
start = time.perf_counter()
model.generate([[1, 2, 3]] * 8, **options)
print(8 * int(sys.argv[1]) / (time.perf_counter() - start))
"""


def tokens_per_second(processes: int, spin: str, tokens: int) -> float:
    """The mean of so many processes that run at the same time."""
    env = os.environ | {"GOMP_SPINCOUNT": spin}
    command = [sys.executable, "-c", CHILD, str(tokens)]
    children = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    found = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("A process failed; what it said stands above.")
    return statistics.mean(map(float, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    cases = [(name, n) for name in SETTINGS for n in (1, 2)]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for name, processes in cases:
            rate = tokens_per_second(processes, SETTINGS[name], args.tokens)
            found[name, processes].append(rate)
    for (name, processes), rates in found.items():
        beside = "alone" if processes == 1 else "beside another"
        print(f"{name:22} {beside:16} {statistics.median(rates):10.1f} tokens/s")


if __name__ == "__main__":
    main()
