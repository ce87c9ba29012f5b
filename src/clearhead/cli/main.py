"""The `clearhead` command: looks the verb up, imports that verb alone, makes one line of an error.

A verb is a module with a frozen dataclass `Args`, whose field docstrings are its help, and with a
function `run(args)`. Nothing on the way to `--help` may import torch, which takes too long.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from clearhead.errors import ClearheadError, did_you_mean
from clearhead.memory import keep_freed_memory

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of what standard output goes to
OK, WRONG_USE, INTERRUPTED, CLOSED_PIPE = 0, 2, 130, 141  # the last two: 128 + the signal

# verb -> (module, one line of help), in the order in which a newcomer needs them
VERBS = {
    "doctor": ("clearhead.cli.doctor", "what this machine has and what to expect of it"),
    "train": ("clearhead.cli.train", "train a model from your own file or a recipe"),
    "recipes": ("clearhead.cli.recipes", "the recipes that come along, and what they reach"),
    "generate": ("clearhead.cli.generate", "the text that follows a prompt"),
    "translate": ("clearhead.cli.translate", "what an encoder-decoder makes of texts"),
    "classify": ("clearhead.cli.classify", "the label of texts, with its probability"),
    "tag": ("clearhead.cli.tag", "every word of a sentence with its label"),
    "answer": ("clearhead.cli.answer", "the piece of a text that answers a question"),
    "fill": ("clearhead.cli.fill", "the likeliest tokens behind the masks of a text"),
    "embed": ("clearhead.cli.embed", "texts as vectors, and how alike they are"),
    "eval": ("clearhead.cli.eval", "how good a model is on data, with confidence intervals"),
    "runs": ("clearhead.cli.runs", "the runs so far, side by side"),
    "diagnose": ("clearhead.cli.diagnose", "what is wrong with a run, and what to do about it"),
    "walk": ("clearhead.cli.walk", "one attention head with all its numbers, step by step"),
    "presets": ("clearhead.cli.presets", "the models that can be built by name"),
    "show": ("clearhead.cli.show", "layers, parameters, FLOPs and memory of a model"),
    "import": ("clearhead.cli.import_", "bring in a model that others made, with a report"),
    "export": ("clearhead.cli.export", "write a model for transformers, ONNX or llama.cpp"),
    "bench": ("clearhead.cli.bench", "this machine's roofs, and a model against them"),
    "quantise": ("clearhead.cli.quantise", "write a model with its weights in 16, 8 or 4 bits"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for wrong use, 130 after Ctrl-C, or 141 where the
    reader of a pipe has left.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("CLEARHEAD_DEBUG", "") not in ("", "0")
    _open_what_is_closed()
    _let_any_text_print()
    if argv is None:  # a process of our own
        gc.set_threshold(50_000, 20, 20)  # importing torch makes a million objects, none is waste
        keep_freed_memory()
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a closed pipe must show here, where it is caught, and not at exit
        return code
    except ClearheadError as error:
        if debug:
            raise
        print(f"clearhead: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        if debug:
            raise
        print("clearhead: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (`head`, a pager) has left
        _stop_printing()
        return CLOSED_PIPE
    except OSError as error:
        if debug or error.filename is not None or error.errno not in FULL:
            raise
        _stop_printing()
        print(f"clearhead: standard output: {os.strerror(error.errno)}", file=sys.stderr)
        return WRONG_USE
    finally:
        if argv is None:
            gc.freeze()  # to look for waste in what ends with the process takes a fifth of a second


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return OK
    if words[0] in ("-V", "--version"):
        from clearhead import __version__

        print(f"clearhead {__version__}")
        return OK
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        near = did_you_mean(verb, VERBS).replace(" Did", "; did")
        raise ClearheadError(f'no such command "{verb}"{near or "."} All: clearhead --help')
    _run(verb, rest)
    return OK


def _run(verb: str, rest: list[str]) -> None:
    import tyro

    home, summary = VERBS[verb]
    module = importlib.import_module(home)
    args = tyro.cli(
        module.Args,
        args=rest,
        prog=f"clearhead {verb}",
        description=module.__doc__ or summary,
        config=(tyro.conf.FlagCreatePairsOff,),  # --json, but no --no-json
    )
    module.run(args)


def _help() -> str:
    lines = ["usage: clearhead COMMAND [...]", ""]
    lines += [f"  {verb:<10} {summary}" for verb, (_, summary) in VERBS.items()]
    lines += [
        "",
        "clearhead COMMAND --help   what a command takes",
        "clearhead --version        the version",
        "CLEARHEAD_DEBUG=1          errors with their traceback",
    ]
    return "\n".join(lines)


def _stop_printing() -> None:
    """Or Python would complain again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_what_is_closed() -> None:
    """A daemon may have no standard streams at all: nothing is read then, and printed nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _let_any_text_print() -> None:
    # A terminal that knows only ASCII gets a question mark for a character, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
