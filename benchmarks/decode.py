"""How fast text is written and read: ours beside the engines that people use, on a CPU.

    python benchmarks/decode.py --task gpt2 --nanogpt path/to/nanoGPT
    python benchmarks/decode.py --task batch16
    python benchmarks/decode.py --task translation
    python benchmarks/decode.py --task encoder
    python benchmarks/decode.py --task start

gpt2         GPT-2 124M, one prompt of 32 tokens, 128 new ones, greedily: `model.generate` with the
             form that it takes by itself (clearhead), and in bf16, int8, int4; transformers'
             `generate`, CTranslate2, llama.cpp, nanoGPT (no cache)
batch16      the same with 16 prompts
translation  an encoder-decoder (6+6 layers x 512), 64 sentences of 25 tokens to 32 new ones,
             greedily and with 4 beams; and the peak memory of the beams, in child processes
encoder      6 layers x 384, 256 sentences of mixed length, as vectors
start        from the shell to the first token of a 124M checkpoint, in child processes, beside
             `python -c "import torch"`

The same random weights are in all, and nobody stops early. A run ends with an error if somebody
writes fewer tokens than asked, or if one that computes in fp32 begins otherwise than ours; "same"
is the share of tokens that are ours in the same place (a near tie changes all that follow it, and
fewer bits change many), or of vectors. "Roof" is the share of the measured memory bandwidth that
reading every weight once a token takes.

Contenders take turns, another first in every round, each in a process of its own that sleeps while
it waits: in one process their thread pools count each other's threads, and all of them are two or
three times slower. There is a pause before each turn, since the threads of some spin on. "Ratio" is
the median over the rounds of (their time / our time): above 1 they are slower. Ours is that with as
many bits: "beside" says which. "workers" are CTranslate2 with a worker for every thread, which its
documentation advises for many texts.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import decode_memory as memory
import decode_models as models
import decode_peers as peers
import torch
import torch.multiprocessing
import tyro
from decode_models import Contender, Work
from torch import Tensor
from train_step import summary

from clearhead.measure.roofs import measure

OURS = "clearhead"
SPAWN = torch.multiprocessing.get_context("spawn")
REST = 0.3  # seconds; OpenMP's threads spin for up to 0.2
ROUNDS = {"gpt2": 5, "batch16": 3, "translation": 5, "encoder": 7, "start": 5}
NEW = {"gpt2": 128, "batch16": 128, "translation": 32, "start": 1}
PROMPT, SOURCE, SENTENCES = 32, 25, (64, 256)
ROUNDED = ("bf16", "f16", "int8", "q8_0", "int4")
BESIDE = {"f16": "bf16", "int8": "int8", "q8_0": "int8", "beam4": "beam4"}
ALIKE = 0.9999  # cosine of vectors that are the same but for rounding

Offers = dict[str, Callable[[], Contender]]


@dataclass(frozen=True)
class Args:
    """What the benchmark takes."""

    task: Literal["gpt2", "batch16", "translation", "encoder", "start"] = "gpt2"
    """What is measured."""
    nanogpt: Path | None = None
    """The folder of a nanoGPT checkout (with model.py); left out: nanoGPT does not take part."""
    tokens: int | None = None
    """New tokens of each text; None: 128, for translation 32."""
    only: tuple[str, ...] = ()
    """Only these contenders, and ours that they stand beside; none named: all."""
    rounds: int | None = None
    """How often each contender runs; None: 3 to 7."""
    threads: int = 2
    """For everybody."""
    tiny: bool = False
    """Tiny models, only to try the program."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Stage:
    """A task: the work, and who may do it."""

    work: Work
    """What is to be done."""
    offers: Offers
    """Name -> what makes the contender, ours first."""
    units: str = "tokens"
    """What is counted."""

    @property
    def count(self) -> int:
        """How many of them a round makes."""
        return len(self.work.rows) * (self.work.new or 1)


@dataclass(frozen=True)
class Result:
    """What one contender took."""

    per_second: float
    """Tokens (of an encoder: sentences) by the median of its times."""
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
    beside: str
    """Which of ours it is compared with."""
    same: float | None
    """The share of tokens or vectors that are ours; None where there are none."""
    roof: float | None
    """The share of the memory bandwidth that its weights take; None where that says nothing."""


def main(args: Args) -> None:
    """Run and print."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for child processes
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        stage = STAGES[args.task](args, Path(folder))
        more = {}
        if args.task == "translation" and not args.only:
            more = memory.beam_memory(stage.work, OURS)
        contenders, absent = gather(args, stage, Path(folder))
        shares = check(stage, {name: one.output for name, one in contenders.items()})
        bandwidth = memory_roof() if args.task in ("gpt2", "batch16") else None
        rounds = args.rounds or ROUNDS[args.task]
        times = take_turns(contenders, rounds)
        results = {}
        for name, one in contenders.items():
            beside = beside_whom(name, times)
            median, best, ratio, low, high = summary(times[name], times[beside])
            roof = None
            held = one.held()
            if bandwidth and held:
                roof = held * stage.work.new / (median / 1e3) / (bandwidth * 1e9)
            speed = 1e3 * stage.count / median
            ratios = (ratio, low, high)
            results[name] = Result(speed, median, best, *ratios, beside, shares[name], roof)
        report(args, stage, results, {"bandwidth": bandwidth, "left_out": absent, **more})


class Player:
    """A contender in a process of its own."""

    def __init__(self, args: Args, folder: Path, name: str) -> None:
        here, there = SPAWN.Pipe()
        self.pipe = here
        self.process = SPAWN.Process(target=play, args=(there, args, folder, name), daemon=True)
        self.process.start()
        there.close()
        self.output = self.answer()

    def answer(self) -> Any:
        """What it says next; what it raised is raised here."""
        try:
            said = self.pipe.recv()
        except EOFError:
            raise RuntimeError("its process died") from None
        if isinstance(said, BaseException):
            raise said
        return said

    def run(self) -> float:
        """The seconds that it takes for all of the work."""
        self.pipe.send("go")
        return self.answer()

    def held(self) -> float:
        """The bytes of weights that a step reads."""
        self.pipe.send("held")
        return self.answer()


def play(pipe: Any, args: Args, folder: Path, name: str) -> None:
    """What a contender's process does: get ready, do the work once, then again when it is told."""
    torch.set_num_threads(args.threads)
    try:
        contender = STAGES[args.task](args, folder).offers[name]()
        pipe.send(contender.read(contender.run()))
        while True:
            if pipe.recv() == "held":
                pipe.send(contender.held() if callable(contender.held) else contender.held)
                continue
            start = time.perf_counter()
            contender.run()
            pipe.send(time.perf_counter() - start)
    except EOFError:  # all is done
        pass
    except (ImportError, FileNotFoundError) as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(RuntimeError(f"it fails: {type(error).__name__}: {error}"))


def gather(args: Args, stage: Stage, folder: Path) -> tuple[dict[str, Player], dict[str, str]]:
    """Those who take part, and why others do not."""
    unknown = sorted(set(args.only) - set(stage.offers))
    known = ", ".join(stage.offers)
    assert not unknown, f"--only: there is no {', '.join(unknown)}; there are {known}"
    chosen = {OURS, *args.only, *(beside_whom(name, stage.offers) for name in args.only)}
    contenders, absent = {}, {}
    for name in stage.offers:
        if args.only and name not in chosen:
            continue
        try:
            contenders[name] = Player(args, folder, name)
        except ImportError as error:
            absent[name] = f"{error} (pip install -e '.[bench]')"
        except (FileNotFoundError, RuntimeError) as error:
            if name.startswith(OURS):
                raise
            absent[name] = str(error)
        state = f"left out: {absent[name]}" if name in absent else "ready"
        print(f"{name} is {state}", file=sys.stderr, flush=True)
    return contenders, absent


def check(stage: Stage, outputs: Mapping[str, Any]) -> dict[str, float | None]:
    """Equal work: the share of what each made that is ours. Stops where somebody did less, or
    computes something else.
    """
    shares: dict[str, float | None] = {}
    for name in outputs:
        mine, its = outputs[beside_whom(name, outputs, rounded=False)], outputs[name]
        shares[name] = None if its is None else agreement(mine, its)
        if its is None or isinstance(its, Tensor):
            first = shares[name]
        else:
            short = [row for row in its if len(row) != stage.work.new]
            assert not short, f"{name} wrote {len(short[0])} tokens of {stage.work.new}: {short[0]}"
            first = agreement([row[:1] for row in mine], [row[:1] for row in its])
        if first is not None and name.rsplit("-", 1)[-1] not in ROUNDED:
            assert first >= 0.9, f"{name} does not compute what {OURS} does: {first:.0%}"
    return shares


def agreement(mine: Any, its: Any) -> float:
    """The share of tokens in the same place, or of vectors, that are the same."""
    if isinstance(mine, Tensor):
        return float(((mine * its).sum(dim=-1) > ALIKE).float().mean())
    pairs = [
        pair for a, b in zip(mine, its, strict=True) for pair in zip_longest(a, b, fillvalue=-1)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def beside_whom(name: str, known: Mapping[str, Any], rounded: bool = True) -> str:
    """Which of ours a contender is compared with: that with as many bits, and as many beams."""
    kind = BESIDE.get(name.rsplit("-", 1)[-1])
    if kind is None or (kind != "beam4" and (not rounded or name.startswith(OURS))):
        return OURS
    return f"{OURS}-{kind}" if f"{OURS}-{kind}" in known else OURS


def memory_roof() -> float | None:
    """GB/s."""
    roofs = measure(("bandwidth",)).roofs
    return None if roofs is None else roofs.bandwidth


def take_turns(contenders: Mapping[str, Player], rounds: int) -> dict[str, list[float]]:
    """Times in seconds: one run each a round, another first in every round."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(REST)
            times[name].append(contenders[name].run())
    return times


# --- the tasks ---


def decoder_stage(args: Args, folder: Path) -> Stage:
    """One prompt."""
    work = decoder_work(args, folder, 1)
    offers: Offers = {OURS: partial(peers.own_decoder, work)}
    for form in ("bf16", "int8", "int4"):
        offers[f"{OURS}-{form}"] = partial(peers.own_decoder, work, form)
    offers["transformers"] = partial(peers.transformers_decoder, work)
    offers["ctranslate2"] = partial(peers.ct2_decoder, work, "fp32")
    offers["ctranslate2-int8"] = partial(peers.ct2_decoder, work, "int8")
    offers["llama.cpp"] = partial(peers.llama_cpp, work, "f32")
    for kind in ("f16", "q8_0"):
        offers[f"llama.cpp-{kind}"] = partial(peers.llama_cpp, work, kind)
    offers["nanoGPT"] = partial(peers.nanogpt_decoder, work)
    return Stage(work, offers)


def batch_stage(args: Args, folder: Path) -> Stage:
    """Sixteen prompts."""
    work = decoder_work(args, folder, 16)
    offers: Offers = {
        OURS: partial(peers.own_decoder, work),
        f"{OURS}-int8": partial(peers.own_decoder, work, "int8"),
        "transformers": partial(peers.transformers_decoder, work),
    }
    for form, tail in (("fp32", ""), ("int8", "-int8")):
        offers[f"ctranslate2{tail}"] = partial(peers.ct2_decoder, work, form)
        offers[f"ctranslate2-workers{tail}"] = partial(peers.ct2_decoder, work, form, True)
    return Stage(work, offers)


def decoder_work(args: Args, folder: Path, rows: int) -> Work:
    model = models.make_decoder(args.tiny)
    prompts = models.draw_rows(model, [PROMPT] * rows)
    return Work(model, prompts, new_tokens(args), args.threads, folder, args.nanogpt)


def new_tokens(args: Args) -> int:
    return NEW[args.task] if args.tokens is None or args.task == "start" else args.tokens


def translation_stage(args: Args, folder: Path) -> Stage:
    """Greedily and with beams."""
    model = models.make_translator(args.tiny)
    sources = models.draw_rows(model, [SOURCE] * SENTENCES[0])
    work = Work(model, sources, new_tokens(args), args.threads, folder)
    offers: Offers = {}
    for beams, tail in ((1, ""), (4, "-beam4")):
        offers[f"{OURS}{tail}"] = partial(peers.own_translator, work, beams)
        offers[f"transformers{tail}"] = partial(peers.transformers_translator, work, beams)
        offers[f"ctranslate2{tail}"] = partial(peers.ct2_translator, work, beams, False)
        offers[f"ctranslate2-workers{tail}"] = partial(peers.ct2_translator, work, beams, True)
    return Stage(work, offers)


def encoder_stage(args: Args, folder: Path) -> Stage:
    """Sentences whose lengths are as uneven as those of a language: half of them below 28."""
    model, dice = models.make_encoder(args.tiny), random.Random(0)
    lengths = [min(max(round(dice.lognormvariate(3.33, 0.7)), 4), 128) for _ in range(SENTENCES[1])]
    work = Work(model, models.draw_rows(model, lengths), 0, args.threads, folder)
    offers: Offers = {
        OURS: partial(peers.own_encoder, work),
        "transformers": partial(peers.transformers_encoder, work, False),
        "transformers-sorted": partial(peers.transformers_encoder, work, True),
        "onnxruntime": partial(peers.onnx_encoder, work, True),
        "onnxruntime-plain": partial(peers.onnx_encoder, work, False),
        "ctranslate2": partial(peers.ct2_encoder, work, False),
        "ctranslate2-workers": partial(peers.ct2_encoder, work, True),
    }
    return Stage(work, offers, "sentences")


# --- child processes ---

FIRST_TOKEN = {
    "transformers": """
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json")
net = GPT2LMHeadModel.from_pretrained(folder).eval()
given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(net.generate(**given, max_new_tokens=1, do_sample=False)[0]))
""",
    "ctranslate2": """
import ctranslate2
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(folder + "/../hf/tokenizer.json")
engine = ctranslate2.Generator(folder, intra_threads=threads)
tokens = tokenizer.encode(prompt).tokens
settings = {"max_length": 1, "include_prompt_in_result": False}
(found,) = engine.generate_batch([tokens], **settings)
print(prompt + tokenizer.decode(found.sequences_ids[0]))
""",
}


def start_stage(args: Args, folder: Path) -> Stage:
    """Fresh processes; the files are in the page cache, and what is compiled once is compiled."""
    work = decoder_work(args, folder, 1)
    if not (folder / "own").exists():
        work.model.save(folder / "own")
    command = str(Path(sys.executable).with_name("clearhead"))
    settings = ["--max-new-tokens", "1", "--temperature", "0"]
    own = [command, "generate", str(folder / "own"), work.texts[0], *settings]
    offers: Offers = {
        OURS: lambda: process(work, own),
        "import torch": lambda: process(work, [sys.executable, "-c", "import torch"]),
        "transformers": lambda: process(work, child(work, "transformers", work.hf)),
        "ctranslate2": lambda: process(work, child(work, "ctranslate2", work.ct2)),
    }
    return Stage(work, offers, "starts")


def child(work: Work, who: str, folder: Path) -> list[str]:
    """A peer's own few lines."""
    head = "import sys\nfolder, prompt, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])"
    given = [str(folder), work.texts[0], str(work.threads)]
    return [sys.executable, "-c", head + FIRST_TOKEN[who], *given]


def process(work: Work, command: list[str]) -> Contender:
    """A program that prints the prompt and one token, or nothing."""

    # As on most machines: the second start of a program finds its modules compiled.
    env = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run() -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def read(said: str) -> Any:
        return [work.encode([said.rstrip("\n")])[0][PROMPT:]] if said else None

    return Contender(run, read)


STAGES = {
    "gpt2": decoder_stage,
    "batch16": batch_stage,
    "translation": translation_stage,
    "encoder": encoder_stage,
    "start": start_stage,
}


# --- what is said ---


def report(args: Args, stage: Stage, results: dict[str, Result], more: dict[str, Any]) -> None:
    """As JSON or as a table."""
    rounds = args.rounds or ROUNDS[args.task]
    if args.json:
        facts: dict[str, Any] = {"task": args.task, "tiny": args.tiny, "rounds": rounds}
        facts |= {"threads": args.threads, "rows": len(stage.work.rows)}
        facts |= {"new_tokens": stage.work.new}
        facts |= {"torch": torch.__version__, **more}
        print(json.dumps(facts | {"results": {n: asdict(r) for n, r in results.items()}}, indent=1))
        return
    tokens = statistics.mean(len(row) for row in stage.work.rows)
    print(f"{args.task}{' (tiny)' if args.tiny else ''}: {len(stage.work.rows)} x", end=" ")
    print(f"{tokens:.0f} tokens, {stage.work.new} new; {rounds} round(s), {args.threads}", end=" ")
    roof = more["bandwidth"]
    print(f"thread(s), torch {torch.__version__}" + (f"; memory {roof:.1f} GB/s" if roof else ""))
    print(f"{'':27}{stage.units + '/s':>12}{'median ms':>11}{'best ms':>10}{'roof':>6}", end="")
    print(f"{'same':>6}{'ratio':>8}  {'middle half':16}beside")
    for name, r in results.items():
        shares = "".join(f"{'-' if x is None else f'{x:.0%}':>6}" for x in (r.roof, r.same))
        print(f"{name:27}{r.per_second:12.1f}{r.median_ms:11.1f}{r.best_ms:10.1f}{shares}", end="")
        print(f"{r.ratio:8.3f}  {f'{r.ratio_low:.3f} to {r.ratio_high:.3f}':16}{r.beside}")
    for who, sizes in more.get("memory", {}).items():
        told = ", ".join(f"{name.replace('_', ' ')} {n / 1e6:.0f} MB" for name, n in sizes.items())
        print(f"memory of 4 beams, {who}: {told}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
