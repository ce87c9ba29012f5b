"""What README and docs say is run: Python blocks in order, commands, and the errata's numbers."""

import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import tyro

import clearhead as ch
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Softmax, attend, softmax
from clearhead.attention.view import View
from clearhead.cli.main import VERBS, main
from tiny import SIZES, VOCAB, WIDTH

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [block for kind, block in fences if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for i, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, block {i + 1}", "exec"), names)


def commands() -> list[str]:
    lines = [
        line
        for page in PAGES
        for block in blocks(page, "")
        for line in block.splitlines()
        if line.startswith("clearhead ")
    ]
    assert len(lines) >= 5, "the README shows at least these"
    return lines


@pytest.mark.parametrize("line", commands())
def test_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split(line, comments=True)[1:])
    assert code in (0, None)
    assert len(capsys.readouterr().out) > 100


def shown() -> list[str]:
    """Commands that take too long to run here: `$ clearhead ...` in blocks of a console."""
    lines = [
        line.removeprefix("$ ")
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ clearhead ")
    ]
    assert len(lines) >= 5
    return lines


@pytest.mark.parametrize("line", shown())
def test_commands_that_are_only_shown_are_understood(line: str) -> None:
    verb, *words = shlex.split(line, comments=True)[1:]
    module = importlib.import_module(VERBS[verb][0])
    assert tyro.cli(module.Args, args=words) is not None


def test_readme_results() -> None:
    """The shapes that the README's comments state."""
    ids = torch.randint(65, (2, 16))
    gpt = ch.build("gpt2", n_layers=4, d_model=128, n_heads=4, vocab_size=65, max_len=256, seed=0)
    assert gpt(ids).shape == (2, 16, 65)
    with ch.capture(gpt.net, "blocks.*.self_attn.pattern") as acts:
        gpt(ids)
    assert acts["stack.blocks.3.self_attn.pattern"].shape == (2, 4, 16, 16)
    with ch.patch(gpt.net, {"blocks.2.ffn.hidden": torch.zeros_like}):
        without = gpt(ids)
    assert not torch.allclose(without, gpt(ids))


def table_rows(page: str) -> list[list[str]]:
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


TAPPED = {  # a model and its letters: rows, tokens, d_model, heads, key/value heads, ...
    "bert": {},
    "gpt2": {"n_kv_heads": 2},
    "t5": {"head_dim": 6, "ffn": {"kind": "plain", "d_ff": 24, "activation": "relu"}},
    "whisper": {},
}


@pytest.mark.parametrize("name", TAPPED)
def test_taps_are_those_of_the_table(name: str) -> None:
    """Every tap that passes in a call is in the table, with this shape, and none else is there."""
    more = {"n_mels": 4, "source_len": 5} if name == "whisper" else {}
    net = ch.build(name, **SIZES, **more, **TAPPED[name]).net.eval()
    target, source = torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5))
    inputs = [source, target] if name == "t5" else [target]
    inputs = [torch.randn(2, 4, 10), target] if name == "whisper" else inputs
    with ch.capture(net, "**") as acts:
        net(*inputs)
    rows = {row[0].strip("`"): row[1].split() for row in table_rows("docs/taps.md")}
    seen = set()
    for tap, value in acts.items():
        side, _, short = re.fullmatch(r"(encoder\.|decoder\.)?(stack\.)?(.*)", tap).groups()
        short = re.sub(r"\d+", "*", short)
        attn = net.get_submodule(f"{side or ''}stack.blocks.0.self_attn")
        ffn = net.get_submodule(f"{side or ''}stack.blocks.0.ffn.in_proj")
        t = 5 if side == "encoder." else 7
        sizes = {"b": 2, "t": t, "n": t, "s": 5, "m": WIDTH, "f": ffn.out_features}
        sizes |= {"h": attn.n_heads, "g": attn.n_kv_heads, "d": attn.head_dim}
        assert tuple(value.shape) == tuple(sizes[letter] for letter in rows[short]), tap
        seen.add(short)
    crossed = set() if len(inputs) == 1 else {row for row in rows if "cross" in row}
    assert seen == {row for row in rows if "cross" not in row} | crossed


def test_the_table_of_taps_names_where_they_are() -> None:
    for row in table_rows("docs/taps.md"):
        folder = ""
        for file in re.findall(r"`([\w/]+\.py)`", row[3]):
            folder = file.rpartition("/")[0] or folder
            code = (Path(ch.__file__).parent / folder / Path(file).name).read_text()
            attribute = row[0].strip("`").rpartition(".")[2]
            assert re.search(rf"self\.{attribute}\b.*= .*Tap\(\)", code), row[0]


def test_the_example_stops_cleanly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ch, "build", stop)
    monkeypatch.setattr("sys.argv", ["first_model.py"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "examples" / "first_model.py"), run_name="__main__")
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def numbers(cell: str) -> torch.Tensor:
    return torch.tensor([float(x) for x in re.findall(r"-?\d*\.\d+", cell)])


def test_errata_are_what_the_library_computes() -> None:
    right = [numbers(row[2]) for row in table_rows("docs/errata.md")]
    x = torch.tensor(
        [[1, 0.5, 0.2], [0.3, 1.2, 0.8], [0.7, 0.4, 1.1], [1.5, 0.9, 0.3], [0.6, 1.3, 0.7]]
    )
    w_q = torch.tensor([[1, 0, 0.5], [0.5, 1, 0], [0, 0.5, 1]])
    torch.testing.assert_close((x @ w_q).flatten(), right[0], atol=5e-5, rtol=0)
    y = torch.tensor(
        [[1, 0.5, 0.2], [0.8, 1.2, 0.3], [0.6, 0.9, 1.1], [1.1, 0.4, 0.7], [0.9, 0.7, 0.8]]
    )
    heads = y.view(1, 1, 5, 3)
    view = View.of(None, Positions.span(0, 5))
    pattern = Softmax(3**-0.5).pattern(heads, heads, view)
    torch.testing.assert_close(pattern[0, 0, 0], right[1], atol=5e-5, rtol=0)
    torch.testing.assert_close(attend(pattern, heads)[0, 0, 0], right[2], atol=5e-5, rtol=0)
    scores = torch.tensor([2.1, 0.3, -0.5, 1.8]).view(1, 1, 1, 4)
    view = View.of(None, Positions.span(0, 1), Positions.span(0, 4))
    torch.testing.assert_close(softmax(scores, view).flatten(), right[3], atol=6e-5, rtol=0)
