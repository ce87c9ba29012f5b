"""The command line: help without torch, errors in one line, fixed exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import clearhead as ch
from clearhead import __version__
from clearhead.cli import main as cli
from clearhead.errors import ClearheadError
from clearhead.text.trained import train_tokenizer

VERBS = [
    "doctor",
    "train",
    "recipes",
    "generate",
    "translate",
    "classify",
    "tag",
    "answer",
    "fill",
    "embed",
    "eval",
    "runs",
    "diagnose",
    "walk",
    "presets",
    "show",
    "import",
    "export",
    "bench",
    "quantise",
]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from clearhead.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | environment,
    )


def modules_after(*words: str) -> set[str]:
    """What is imported once that command has run, printed by the process itself."""
    code = f"""
import json, sys
from clearhead.cli.main import main
try:
    main({list(words)!r})
except SystemExit:
    pass
sys.stderr.write(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr))


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(words, capsys):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    for verb, (_, summary) in cli.VERBS.items():
        assert f"  {verb} " in out
        assert summary in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_verbs_are_these():
    """A new verb is a line here and a line in the table: nothing appears or goes by accident."""
    assert list(cli.VERBS) == VERBS


def test_help_imports_neither_torch_nor_tyro():
    assert not {"torch", "numpy", "tyro", "rich"} & modules_after("--help")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_does_not_import_torch(verb):
    loaded = modules_after(verb, "--help")
    assert cli.VERBS[verb][0] in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_lists_its_options(verb):
    done = run(verb, "--help")
    assert done.returncode == 0
    assert f"usage: clearhead {verb}" in done.stdout
    assert "--no-" not in done.stdout  # a switch is on or left out


def test_walk_does_not_import_torch():
    assert "torch" not in modules_after("walk")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"clearhead {__version__}\n"


def test_unknown_verb_suggests_the_nearest():
    done = run("wlak")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        'clearhead: no such command "wlak"; did you mean "walk"? All: clearhead --help\n'
    )


def test_verb_far_from_all(capsys):
    assert cli.main(["qqqqqq"]) == 2
    assert 'no such command "qqqqqq". All:' in capsys.readouterr().err


def test_unknown_option_exits_with_2():
    done = run("walk", "--widht", "4")
    assert done.returncode == 2
    assert "--width" in done.stderr


def test_error_is_one_line_without_traceback():
    done = run("walk", "--example", "9")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("clearhead: There is no worked example 9")
    assert done.stderr.count("\n") == 1


def test_debug_shows_the_traceback():
    done = run("walk", "--example", "9", CLEARHEAD_DEBUG="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "ClearheadError" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ClearheadError("too small. Take 4."), 2, "clearhead: too small. Take 4.\n"),
        (KeyboardInterrupt(), 130, "clearhead: interrupted\n"),
    ],
)
def test_exit_codes(error, code, line, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.delenv("CLEARHEAD_DEBUG", raising=False)
    install_verb(monkeypatch, fail)
    assert cli.main(["fake"]) == code
    assert capsys.readouterr().err == line


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch):
    def fail(args):
        raise RuntimeError("a bug")

    install_verb(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["fake"])


@pytest.mark.parametrize("verb", ["--help", "walk", "recipes"])
def test_closed_pipe_is_quiet(verb):
    """As in `clearhead walk | head -1`: the reader leaves before anything is written. Commands that
    print with rich end as the others do: 128 + SIGPIPE.
    """
    code = f"""
import sys, time
from clearhead.cli.main import main
sys.stdin.readline()
sys.exit(main([{verb!r}]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    with child:
        child.stdout.close()
        child.stdin.write(b"go\n")
        child.stdin.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141


def test_ascii_terminal_gets_no_traceback():
    done = run("walk", "日本語", "the", "the", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "the? looks most at" in done.stdout
    assert done.stderr == ""


def install_verb(monkeypatch, work):
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Args:
        """No arguments."""

    module = types.ModuleType("fake_verb", "A verb for tests.")
    module.Args = Args  # type: ignore[attr-defined]
    module.run = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_verb", module)
    monkeypatch.setitem(cli.VERBS, "fake", ("fake_verb", "a verb for tests"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["presets"], ["show", "gpt2"]])
def test_a_full_disk_behind_standard_output_is_told_in_a_line(words):
    code = "import sys; from clearhead.cli.main import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "clearhead: standard output: No space left on device\n"


def test_streams_that_are_closed_are_nobodys(tmp_path):
    model = ch.build("gpt2", seed=0, vocab_size=300, n_layers=1, d_model=16, n_heads=2, max_len=16)
    model.tokenizer = train_tokenizer("bytes", "")
    model.save(tmp_path / "model")
    code = (
        "import os, sys\nos.close(0), os.close(1)\nsys.stdin = sys.stdout = None\n"
        "from clearhead.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    for words in (["presets"], ["generate", str(tmp_path / "model"), "--max-new-tokens", "2"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True, check=False
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == 0, done.stderr
