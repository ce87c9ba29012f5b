"""From tokens to texts, piece by piece: what was given out never changes.

A piece holds no half character (`text.stream`), and nothing that may still become a stop string:
that is held back until it is one, and then the text ends before it, or until it cannot be one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clearhead.errors import require
from clearhead.generate.batch import by_length, check_prompts, decode_steps, encode_sources
from clearhead.generate.beam import Beam, Hypothesis, beam_search
from clearhead.generate.options import Options
from clearhead.generate.prefix import Prefixes
from clearhead.generate.row import Constraint, End, Row, Step
from clearhead.generate.search import searched_steps
from clearhead.text.stream import DecodeStream

BEFORE = 4  # tokens of a prompt that say how the next one is written
SLOTS = 16384  # of prompts and what follows them, worked on at once
Piece = tuple[int, str]  # a row's number, and what is new of its text


@dataclass(frozen=True)
class Written:
    """A text that a model wrote, and how that went."""

    text: str
    """What it says; a stop string is not part of it."""
    ids: list[int]
    """Its tokens, without a stop id; those of a stop string are among them."""
    end: End
    """Why it ended: at a stop "token" or stop "string", at the "limit" of new tokens, at the
    model's last "positions", because its "constraint" is fulfilled.
    """
    log_probabilities: list[float] = field(default_factory=list)
    """Of each token, by the model alone (no temperature, no rules), in nats; a stop id's comes
    last.
    """
    best: list[dict[int, float]] = field(default_factory=list)
    """For each token the k likeliest ids with theirs, if k were asked for."""
    prompt_tokens: int = 0
    """How many tokens the prompt had (of an encoder-decoder: its source)."""
    first: float = 0.0
    """Seconds until the first token was there."""
    seconds: float = 0.0
    """Seconds until the last was, of the whole call."""
    slid: int = 0
    """How often the start of the context was forgotten, because it was full."""
    score: float | None = None
    """Of beams: what texts are ordered by, log p / length ** length_penalty."""

    @property
    def tokens_a_second(self) -> float:
        """The speed behind the first token."""
        after = self.seconds - self.first
        return (len(self.ids) - 1) / after if len(self.ids) > 1 and after > 0 else 0.0


def split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, bool]:
    """What is certain of a text, what of its end may become a stop string, and whether one came.

    Of several the one that is complete first counts.
    """
    hits = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    if hits:
        return text[: min(hits)[1]], "", True
    held = 0
    for stop in stops:
        lengths = range(held + 1, min(len(stop), len(text) + 1))
        held = max((n for n in lengths if text.endswith(stop[:n])), default=held)
    cut = len(text) - held
    return text[:cut], text[cut:], False


class Writer:
    """The text of one row as its tokens come."""

    def __init__(self, row: Row, stream: DecodeStream, stops: Sequence[str], size: int) -> None:
        self.row, self.stream, self.stops, self.size = row, stream, stops, size
        self.started = time.perf_counter()
        self.pieces: list[str] = []
        self.held = ""
        self.first = self.last = 0.0
        self.log_probabilities: list[float] = []
        self.best: list[dict[int, float]] = []
        self.score: float | None = None

    def feed(self, step: Step) -> str:
        """The text that a step has made certain; may close the row."""
        self.last = time.perf_counter() - self.started
        self.first = self.first or self.last
        if step.log_probability is not None:
            self.log_probabilities.append(step.log_probability)
        if step.best:
            self.best.append(dict(step.best))
        piece = "" if step.end == "token" else self._certain(self.stream.feed(step.token))
        if self.row.end not in (None, "string"):
            piece += self._certain(self.stream.flush())
            if self.row.end != "string":
                piece, self.held = piece + self.held, ""
        if piece:
            self.pieces.append(piece)
        return piece

    def _certain(self, piece: str) -> str:
        if not self.stops or self.row.end == "string":
            return "" if self.row.end == "string" else piece
        out, self.held, stopped = split_at_stop(self.held + piece, self.stops)
        if stopped:
            self.row.end = "string"
        return out

    def written(self) -> Written:
        """The text as it stands, with all that is known of it."""
        row = self.row
        return Written(
            "".join(self.pieces),
            row.text,
            row.end or "limit",
            self.log_probabilities,
            self.best,
            self.size,
            self.first,
            self.last,
            row.slid,
            self.score,
        )


def write_texts(
    net: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    options: Options,
    max_len: int,
    sources: Sequence[Sequence[int]] | None = None,
    prefixes: Prefixes | None = None,
) -> Generator[Piece, None, list[list[Written]]]:
    """The texts of all prompts, `options.n` of each, in pieces (row, text) as they come; returns
    those of each prompt whole, in the order given. Beams may find fewer, where groups find the
    same.

    Prompts are worked on in batches of similar length; `sources` are those of an encoder-decoder.
    """
    check_prompts(prompts, max_len)
    if prefixes is None and len(prompts) > 1 and sources is None:
        prefixes = Prefixes()  # for this call alone
    given = prompts if sources is None else sources
    done: dict[int, Written] = {}
    sizes = [len(ids) + min(options.sampling.max_new_tokens, max_len) for ids in given]
    width = options.way.width if isinstance(options.way, Beam) else options.n
    for chosen in by_length(sizes, max(1, SLOTS // width)):
        own = [prompts[i] for i in chosen]
        their = None if sources is None else [sources[i] for i in chosen]
        writers = [
            writer
            for i in chosen
            for writer in _writers(i, prompts[i], len(given[i]), options, tokenizer)
        ]
        if isinstance(options.way, Beam):
            books = _search(net, own, options, max_len, their)
            writers = yield from _beams(books, writers, options, tokenizer)
        else:
            steps = _steps(
                net, [writer.row for writer in writers], options, max_len, their, prefixes
            )
            yield from _pieces(steps, {writer.row.number: writer for writer in writers}, max_len)
        done |= {writer.row.number: writer.written() for writer in writers}
    found: list[list[Written]] = [[] for _ in prompts]
    for number in sorted(done):
        found[number // options.n].append(done[number])
    return found


def _steps(
    net: Any,
    rows: Sequence[Row],
    options: Options,
    max_len: int,
    sources: Sequence[Sequence[int]] | None,
    prefixes: Prefixes | None,
) -> Iterator[list[Step]]:
    """The tokens of the rows, in the way that is asked for."""
    if options.way is None:
        memory = None if sources is None else encode_sources(net, sources)
        return decode_steps(net, rows, max_len, memory, options.n, prefixes=prefixes)
    each = None if sources is None else [one for one in sources for _ in range(options.n)]
    return searched_steps(net, rows, options.way, max_len, each)


def _search(
    net: Any,
    prompts: Sequence[Sequence[int]],
    options: Options,
    max_len: int,
    sources: Sequence[Sequence[int]] | None,
) -> list[list[Hypothesis]]:
    """The best texts of all prompts; those of one length have the same rules."""
    assert isinstance(options.way, Beam)
    found: list[list[Hypothesis]] = [[] for _ in prompts]
    sizes = {len(prompt) if options.min_length else 0 for prompt in prompts}
    for size in sizes:
        own = [i for i, prompt in enumerate(prompts) if size in (0, len(prompt))]
        beam = replace(options.way, rules=options.sampling_for(prompts[own[0]]).rules)
        memory = None if sources is None else encode_sources(net, [sources[i] for i in own])
        books = beam_search(net, [prompts[i] for i in own], beam, max_len, memory)
        for i, book in zip(own, books, strict=True):
            found[i] = book
    return found


def _beams(
    books: Sequence[Sequence[Hypothesis]],
    writers: Sequence[Writer],
    options: Options,
    tokenizer: Any,
) -> Generator[Piece, None, list[Writer]]:
    """Texts that are there only when the search has ended; returns the writers that have one."""
    pairs = [
        (one, writers[i * options.n + j]) for i, b in enumerate(books) for j, one in enumerate(b)
    ]
    for one, writer in pairs:
        whole = writer.stream.feed(*one.ids) + writer.stream.flush()
        text, held, stopped = split_at_stop(whole, options.stop)
        short: End = "limit" if len(one.ids) == writer.row.limit else "positions"
        writer.row.end = "string" if stopped else short if one.end is None else "token"
        writer.row.text = one.ids
        writer.first = writer.last = time.perf_counter() - writer.started
        writer.score = one.score
        writer.pieces = [text + held]
        yield writer.row.number, text + held
    return [writer for _, writer in pairs]


def _writers(
    i: int, prompt: Sequence[int], size: int, options: Options, tokenizer: Any
) -> list[Writer]:
    """The writers of one prompt, all with the same settings."""
    sampling = options.sampling_for(prompt)
    found = []
    for j in range(options.n):
        own = None if options.constrain is None else options.constrain()
        require(
            own is None or isinstance(own, Constraint),
            f"constraint made {own!r:.60}: it makes an object with mask(), advance(token), done.",
        )
        number = i * options.n + j
        row = Row(
            number, prompt, sampling, sampling.max_new_tokens, j, own, options.log_probabilities
        )
        stream = tokenizer.decode_stream()
        stream.follow(*prompt[-BEFORE:])
        found.append(Writer(row, stream, options.stop, size))
    return found


def _pieces(
    steps: Iterator[list[Step]], writers: dict[int, Writer], max_len: int
) -> Iterator[Piece]:
    told = False
    for found in steps:
        for step in found:
            if piece := writers[step.row].feed(step):
                yield step.row, piece
        if not told and any(writer.row.slid for writer in writers.values()):
            told = True
            warnings.warn(
                f"The text has come to the model's last position ({max_len}): it goes on with the "
                "last half of its context, and what was before is forgotten. Ask for fewer tokens "
                "(max_new_tokens), or take a model with a longer context.",
                stacklevel=2,
            )


def whole(pieces: Generator[Any, None, list[list[Written]]]) -> list[list[Written]]:
    """All texts of each prompt, when nobody wants the pieces."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value
