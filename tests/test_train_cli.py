"""`clearhead train`, `runs`, `recipes`: what the user sees of training."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import yaml

import clearhead as ch
from clearhead.cli.main import main
from clearhead.data.corpus import open_corpus
from clearhead.data.labelled import Classification
from clearhead.data.language import Seq2seq
from clearhead.errors import ClearheadError
from clearhead.recipes import recipe_header, recipe_names
from clearhead.training import budget, checkpoint, room, track
from clearhead.training.budget import Speed, decide, fit_budget
from clearhead.training.columns import guess_objective
from clearhead.training.curves import _limit, draw_curves, read_figures, smoothed
from clearhead.training.folder import RunFolder
from clearhead.training.job import prepare
from clearhead.training.run import open_run, read_recipe
from clearhead.training.summary import differences, summarise
from processes import environment

TEXT = "the quick brown fox jumps over the lazy dog and runs away.\n" * 60
RECIPE = {
    "data": {"source": "my.txt"},
    "tokenizer": "characters",
    "model": {
        "family": "llama",
        "n_layers": 1,
        "d_model": 16,
        "n_heads": 2,
        "max_len": 16,
        "dropout": 0.1,
    },
    "train": {"steps": 12, "batch": 4, "eval_every": 5, "checkpoint_every": 5},
    "optim": {"name": "muon", "lr": 0.02, "warmup": 2},
    "eval": {"prompt": "the", "expect": 3.0},
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a text and a recipe, and nothing of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("CLEARHEAD_DEBUG", raising=False)
    Path("my.txt").write_text(TEXT)
    Path("tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def cli(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


def weights_hash(folder: str | Path) -> str:
    return hashlib.sha256(Path(folder, "model/model.safetensors").read_bytes()).hexdigest()


# --- a run, from its first line to its last ---


def test_a_run_says_what_it_does_and_what_next(home, capsys):
    assert cli("train", "tiny.yaml") == 0
    out = capsys.readouterr().out
    assert "run runs/tiny\n" in out
    assert re.search(r"recipe +tiny: next_token, my.txt", out)
    assert re.search(r"data +\d+ batches show all once, .* 353 tokens validate", out)
    assert re.search(r"tokeniser +characters, \d+ tokens", out)
    assert re.search(r"model +llama, 1 layer x 16, context 16, .* parameters", out)
    assert re.search(r"steps +12 of 4 examples, muon, lr 0.02", out)
    assert re.search(r"machine +cpu, 1 thread, fp32", out)
    assert re.search(r"step 5/12  loss \d\.\d+  [\d,]+ tokens/s  \d:\d\d left  [\d.]+ [MG]B", out)
    assert re.findall(r"step (\d+)  validation loss", out) == ["5", "10", "12"]
    assert "  | the" in out
    assert re.search(r"expected of this recipe: loss 3, here \d", out)
    for said in ("runs/tiny/model", "ch.load('runs/tiny').generate('the'", "clearhead runs"):
        assert said in out
    assert {path.name for path in Path("runs/tiny").iterdir()} == {
        *("recipe.yaml", "env.json", "metrics.jsonl", "checkpoints", "latest", "model"),
        *("curves.png", "tokenizer", ".lock"),
    }


def test_settings_on_the_command_line_are_the_run_s_own(home, capsys):
    assert cli("train", "tiny.yaml", "--set", "optim.lr=3e-3", "--steps", "2", "--out", "a/b") == 0
    written = yaml.safe_load(Path("a/b/recipe.yaml").read_text())
    assert written["optim"]["lr"] == 3e-3
    assert written["train"]["steps"] == 2
    assert "steps      2 of" in capsys.readouterr().out


def test_a_text_without_a_recipe(home, capsys):
    words = ["--steps", "2", "--set", "model.d_model=32", "model.n_heads=2", "model.n_layers=1"]
    assert cli("train", "my.txt", *words) == 0
    assert "runs/my/model" in capsys.readouterr().out
    assert ch.load("runs/my").generate("the", max_new_tokens=3)


def test_from_starts_with_another_model(home, capsys):
    assert cli("train", "tiny.yaml") == 0
    more = ("--from", "runs/tiny", "--out", "more", "--steps", "3", "--set", "optim.lr=1e-9")
    more += ("optim.adam_lr=1e-9", "optim.weight_decay=0")
    assert cli("train", "tiny.yaml", *more) == 0
    before, after = ch.load("runs/tiny"), ch.load("more")
    for (name, a), b in zip(before.net.named_parameters(), after.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_pairs_show_a_source_and_what_becomes_of_it(home, capsys):
    Path("pairs.tsv").write_text("en\tde\n" + "a b c\tx y z\nc b\tz y\n" * 30)
    tiny = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"]
    words = ["--steps", "2", "--set", *tiny, "tokenizer=words", "train.batch=64"]
    assert cli("train", "pairs.tsv", *words) == 0
    out = capsys.readouterr().out
    assert re.search(r"source +(a b c|c b)\n +model .*\n +right +(x y z|z y)\n", out)
    assert ".translate('...')" in out


# --- stopping and going on ---


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    code = "import sys; from clearhead.cli.main import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, "train", *words],
        cwd=home,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(folder: Path, step: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if any(line.get("step", 0) >= step for line in RunFolder(folder).metrics()):
            return
        time.sleep(0.01)
    raise AssertionError("the run does not move")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, id="term", marks=pytest.mark.slow),
    ],
)
def test_interrupted_and_resumed_is_the_run_that_never_stopped(home, capsys, number, code):
    # More steps than a signal can miss; the uninterrupted one runs here meanwhile.
    rare = ("train.eval_every=100", "train.checkpoint_every=100")
    long = ("tiny.yaml", "--steps", "150", "--set", *rare)
    child = start(home, *long, "--out", "broken")
    wait_for_step(home / "broken", 3)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    found = re.search(r"Saved at step (\d+) of 150. To go on: clearhead (.*)\n", out)
    assert found, out
    assert 3 <= int(found[1]) < 150
    assert Path("broken/latest").read_text() == f"step-{found[1]}\n"
    assert not Path("broken/model").exists()
    assert summarise(Path("broken")).state == "stopped"
    half = ch.load("broken")  # the checkpoint
    assert cli(*found[2].split()) == 0
    assert cli("train", *long, "--out", "whole") == 0
    assert weights_hash("broken") == weights_hash("whole")
    assert ch.load("broken").net.embed is not half.net.embed
    losses = [
        [line["loss"] for line in RunFolder(run).metrics() if "loss" in line]
        for run in ("broken", "whole")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 150


WORKER = """
import os, pathlib, sys
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
from clearhead.cli.main import main
sys.exit(main())
"""


def test_a_signal_to_one_of_two_processes_stops_the_run_and_finishes_nothing(home):
    Path("worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "worker.py", "train", "tiny.yaml", "--steps", "5000"]
    rare = ["--set", "train.eval_every=5000", "train.checkpoint_every=5000"]
    with Path("log").open("w") as log:
        both = subprocess.Popen(
            [*command, *rare], env=environment(home), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for_step(home / "runs" / "tiny", 3)
            os.kill(int(Path("pid-1").read_text()), signal.SIGTERM)
            code = both.wait(100)
        finally:
            both.terminate()
            both.wait(60)
    said = Path("log").read_text()
    assert code != 0
    assert re.search(r"Saved at step \d+ of 5,000. To go on: clearhead train runs/tiny", said), said
    assert "What next" not in said
    assert not Path("runs/tiny/model").exists()
    assert summarise(Path("runs/tiny")).state == "stopped"


def test_what_the_live_diagnosis_finds_is_said(home, capsys):
    """A rate at which nothing is learnt, because every step goes much too far."""
    words = ("--set", "optim.name=adamw", "optim.lr=5", "optim.warmup=1", "--steps", "5")
    assert cli("train", "tiny.yaml", *words) == 0
    assert re.search(r"^updates \((warning|bad)\): ", capsys.readouterr().out, re.MULTILINE)


def test_a_run_that_stopped_early_says_so_and_can_be_made_longer(home, capsys):
    words = ("optim.name=adamw", "optim.lr=0.5", "optim.warmup=1", "train.patience=2")
    assert cli("train", "tiny.yaml", "--set", *words, "train.eval_every=1") == 0
    out = capsys.readouterr().out
    assert "2 evaluations brought nothing better" in out
    assert re.search(r"--steps 24 +twice as long \(its rate goes up again, from \S+ to \S+\)", out)
    done = summarise(Path("runs/tiny")).done
    assert done < 12
    assert cli("train", "runs/tiny", "--resume") == 0
    assert f"stopped early at step {done} of 12: 2 evaluations" in capsys.readouterr().out
    assert cli("train", "runs/tiny", "--resume", "--steps", "24") == 0
    assert f"from step {done} of 24" in capsys.readouterr().out
    assert summarise(Path("runs/tiny")).done > done


def test_a_second_ctrl_c_stops_at_once(home, capfd, monkeypatch):
    from clearhead.cli.progress import Talk

    def twice(self, trainer, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr(Talk, "step", twice)
    before = signal.getsignal(signal.SIGINT)  # a shell ignores it in the background
    assert cli("train", "tiny.yaml") == 130
    assert "Ctrl-C again stops at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_in_all_its_forms(home, capsys):
    assert cli("train", "tiny.yaml", "--steps", "6") == 0
    whole = weights_hash("runs/tiny")
    for words in (["runs/tiny"], ["--out", "runs/tiny"], ["tiny.yaml"], ["tiny"]):
        assert cli("train", *words, "--resume") == 0
        out = capsys.readouterr().out
        assert "all 6 steps are done already" in out
        assert "validation loss" in out
    assert weights_hash("runs/tiny") == whole
    assert cli("train", "runs/tiny", "--resume", "--steps", "9") == 0
    assert "from step 6 of 9" in capsys.readouterr().out
    assert yaml.safe_load(Path("runs/tiny/recipe.yaml").read_text())["train"]["steps"] == 9
    assert cli("train", "runs/tiny", "--resume", "--set", "train.steps=11") == 0
    assert RunFolder("runs/tiny").read_recipe().train.steps == 11


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "optim.lr=1"], "optim.lr cannot be changed"),
        (["--minutes", "1"], "train.minutes cannot be changed"),
        (["--from", "x"], "model cannot be changed"),
        (["--steps", "3"], "is at step 6 already"),
        (["--set", "train.steps=many"], "train.steps must be 1 or more"),
    ],
)
def test_resume_changes_nothing_but_the_steps(home, capsys, words, said):
    cli("train", "tiny.yaml", "--steps", "6")
    before = Path("runs/tiny/recipe.yaml").read_text()
    assert cli("train", "runs/tiny", "--resume", *words) == 2
    assert said in capsys.readouterr().err
    assert Path("runs/tiny/recipe.yaml").read_text() == before


def test_a_full_disk_leaves_the_last_checkpoint(home, capsys, monkeypatch):
    real = checkpoint._flush

    def full(path):
        if ".step-10-" in str(path):
            raise OSError(28, "No space left on device")
        real(path)

    monkeypatch.setattr(checkpoint, "_flush", full)
    assert cli("train", "tiny.yaml") == 2
    err = capsys.readouterr().err
    assert "step 10 could not be written (No space left on device)" in err
    assert "--resume" in err
    assert [step for step, _ in checkpoint.steps_of(Path("runs/tiny/checkpoints"))] == [5]
    monkeypatch.undo()
    monkeypatch.chdir(home)
    assert cli("train", "runs/tiny", "--resume") == 0
    assert cli("train", "tiny.yaml", "--out", "whole") == 0
    assert weights_hash("runs/tiny") == weights_hash("whole")


def test_a_disk_that_is_full_between_checkpoints(home, capsys, monkeypatch):
    def full(self, **line):
        if line["step"] == 7:
            raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(RunFolder, "log", full)
    assert cli("train", "tiny.yaml") == 2
    err = capsys.readouterr().err
    assert "No space left on device (metrics.jsonl)" in err
    assert "clearhead train runs/tiny --resume" in err
    assert err.count("\n") == 1


def test_other_processes_are_quiet(home, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert cli("train", "tiny.yaml", "--steps", "2") == 0
    assert capsys.readouterr().out == ""


# --- bad input: an error before any work, and nothing written ---


def bad(home: Path, case: str) -> list[str]:
    if case == "empty":
        Path("bad.txt").write_text("")
    elif case == "one line":
        Path("bad.txt").write_text("hi")
    elif case == "binary":
        Path("bad.txt").write_bytes(bytes(range(256)) * 50)
    return ["bad.txt"] if Path("bad.txt").exists() else ["tiny.yaml"]


@pytest.mark.parametrize(
    ("case", "words", "said"),
    [
        ("empty", [], "empty"),
        ("one line", [], "characters to learn from"),
        ("binary", [], "bad.txt"),
        ("key", ["--set", "optim.learning=1"], "learning"),
        ("key", ["--set", "lr=1"], "Did you mean optim.lr?"),
        ("section", ["--set", "optimm.lr=1"], "optim"),
        ("context", ["--set", "model.max_len=9999"], "context is longer than the text"),
        ("length", ["--set", "data.length=9999"], "data.length is 9999, and the model has"),
        ("long", ["--steps", "5", "--minutes", "1"], "give one of them"),
        ("tracker", ["--track", "trackio"], "pip install 'clearhead[track]'"),
        ("device", ["--set", "train.machine.device=tpu"], "tpu"),
    ],
)
def test_bad_input_writes_nothing(home, capsys, monkeypatch, case, words, said):
    if case == "tracker":
        monkeypatch.setitem(sys.modules, "trackio", None)
    assert cli("train", *bad(home, case), *words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


def test_no_such_thing(home, capsys):
    for words, said in (
        (["train"], "Say what to train"),
        (["train", "shakespear"], 'Did you mean "shakespeare"?'),
        (["train", "none.yaml"], "There is no recipe none.yaml"),
        (["train", "--resume"], "Say which run goes on"),
        (["train", "none", "--resume"], "There is no run in runs/none"),
    ):
        assert cli(*words) == 2
        assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_beside_does_not_hide_a_recipe(home, capsys, monkeypatch):
    Path("sst2").mkdir()
    Path("sst2/recipe.yaml").write_text("data: {}")
    asked: list[str] = []

    def read(name, changes):
        asked.append(name)
        raise ClearheadError("read")

    monkeypatch.setattr("clearhead.training.run.read_recipe", read)
    assert cli("train", "sst2") == 2
    assert asked == ["sst2"]


def test_a_run_folder_that_exists(home, capsys, monkeypatch):
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/mine").write_text("precious")
    monkeypatch.setattr("clearhead.training.run.prepare", None)  # nothing is read before that
    assert cli("train", "tiny.yaml") == 2
    assert "runs/tiny exists already and is no run" in capsys.readouterr().err
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["mine"]
    Path("runs/tiny/recipe.yaml").write_text("data: {}")
    assert cli("train", "runs/tiny") == 2
    assert "is a run: go on with it (--resume)" in capsys.readouterr().err


def test_a_setting_without_set_is_told_where_it_belongs(home, capsys):
    assert cli("train", "my.txt", "optim.lr=1") == 2
    assert "optim.lr=1 is no file. To change a setting: --set optim.lr=1" in capsys.readouterr().err


# --- what is guessed ---


def test_parallel_files_are_two_words(home, capsys):
    Path("train.en").write_text("a red bird sings\nthe dog sleeps\n" * 60)
    Path("train.de").write_text("ein roter Vogel singt\nder Hund schläft\n" * 60)
    tiny = ("model.d_model=16", "model.n_heads=2", "model.n_layers=1", "tokenizer.vocab_size=300")
    words = ("train", "train.en", "train.de", "--steps", "2", "--set", *tiny, "train.batch=200")
    assert cli(*words) == 0
    said = capsys.readouterr().out
    assert "train: seq2seq, train.en,train.de" in said
    assert "The rate rises over 200 steps, and the run has 2" in said
    assert "clearhead export runs/train OUT --to onnx" in said
    assert Path("runs/train/model").is_dir()


@pytest.mark.parametrize("columns", [("text", "mood"), ("mood", "review")])
def test_a_column_of_few_values_is_a_label(home, columns):
    rows = [",".join(columns)]
    for i in range(100):
        row = {columns[0]: f"film number {i}", columns[1]: f"film number {i}"}
        rows.append(",".join((row | {"mood": ("good", "bad")[i % 2]})[c] for c in columns))
    Path("table.csv").write_text("\n".join(rows))
    chosen = guess_objective(open_corpus("table.csv"))
    text = next(name for name in columns if name != "mood")
    assert isinstance(chosen, Classification)
    assert (chosen.text, chosen.label) == (text, "mood")


def test_two_columns_of_texts_are_source_and_target(home):
    rows = ["en,de", *(f"dog number {i},Hund Nummer {i}" for i in range(100))]
    Path("table.csv").write_text("\n".join(rows))
    assert isinstance(guess_objective(open_corpus("table.csv")), Seq2seq)


# --- memory ---


def test_a_batch_too_large_for_memory(home, capsys, monkeypatch):
    free = 2_000_000
    monkeypatch.setattr(room, "free_memory", lambda device: free)
    assert cli("train", "tiny.yaml", "--set", "train.batch=100000") == 2
    err = capsys.readouterr().err
    assert not Path("runs").exists()
    found = re.search(r"The largest train.batch that fits is (\d+); train.batch=(\d+) train", err)
    assert found, err
    most = int(found[1])
    assert cli("train", "tiny.yaml", "--set", f"train.batch={most}", "--steps", "1") == 0
    assert cli("train", "tiny.yaml", "--set", f"train.batch={2 * most}", "--out", "x") == 2
    assert f"fits is {most};" in capsys.readouterr().err


def test_a_model_too_large_for_memory(home, capsys, monkeypatch):
    assert cli("train", "tiny.yaml", "--set", "model.d_model=400000") == 2
    assert "choose a smaller one" in capsys.readouterr().err
    monkeypatch.setattr(room, "free_memory", lambda device: 50_000)
    assert cli("train", "tiny.yaml") == 2
    assert "parameters takes" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("recompute", [False, True])
def test_predicted_activations_are_those_that_autograd_keeps(home, recompute):
    """Bytes saved for the backward pass, counted by autograd itself, against the prediction."""
    changes = {"model.d_model": 64, "model.n_layers": 4, "model.dropout": 0.0}
    changes |= {"train.batch": 8, "train.machine.recompute": recompute}
    job = prepare(read_recipe("tiny.yaml", changes))
    need = room.predict_need(job, torch.device("cpu"))
    from clearhead.training.loop import Trainer
    from clearhead.training.loss import batch_loss

    trainer = Trainer(job)
    weights = {p.untyped_storage().data_ptr() for p in trainer.net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = batch_loss(trainer.net, job.batches.batch(0), job.objective.ask)
    assert loss.requires_grad
    if not recompute:
        assert 0.6 < sum(kept.values()) / (need.row * need.rows) < 1.4
    everything = dataclasses.replace(
        job, recipe=job.recipe.changed(**{"train.machine.recompute": False})
    )
    assert need.row <= room.predict_need(everything, torch.device("cpu")).row


# --- minutes ---


def test_steps_follow_from_the_budget():
    recipe = read_recipe({**RECIPE, "train": {**RECIPE["train"], "minutes": 5, "eval_every": 50}})
    recipe = recipe.changed(**{"optim.warmup": 100})
    got = decide(recipe, Speed(0.1, 1.0, 0.0, 3.0), 300)
    assert 2500 < got.train.steps < 2900
    assert got.train.minutes is None
    assert got.train.steps / got.train.eval_every <= 20
    seconds = 0.1 * got.train.steps + got.train.steps // got.train.eval_every + 3
    assert 0.95 * 300 < seconds <= 300
    assert got.optim.warmup == 100
    short = decide(recipe, Speed(1.0, 1.0, 0.0, 0.0), 60)
    assert short.train.steps // short.train.eval_every >= 4  # and one at the end
    assert short.optim.warmup == short.train.steps // 5
    dear = decide(recipe, Speed(0.1, 100.0, 0.0, 0.0), 300)
    assert dear.train.eval_every == dear.train.steps  # one, at the end
    with pytest.raises(ClearheadError, match="too few here"):
        decide(recipe, Speed(100.0, 1.0, 0.0, 0.0), 60)


def test_measuring_leaves_the_run_untouched(home, monkeypatch):
    """The run that was measured first is, step for step, the run of as many steps."""
    monkeypatch.setattr(budget, "MEASURED", 0.1)
    job = prepare(read_recipe("tiny.yaml", {"train.minutes": 0.05}))
    before = {name: p.clone() for name, p in job.model.net.named_parameters()}
    state = torch.get_rng_state()
    fitted, said = fit_budget(job)
    assert re.fullmatch(r"0.05 minutes here are about [\d,]+ steps of .*, evaluated every .*", said)
    assert fitted.recipe.train.steps >= 1
    assert fitted.recipe.train.minutes is None
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in job.model.net.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_minutes_are_decided_once(home, capsys, monkeypatch):
    monkeypatch.setattr(budget, "MEASURED", 0.1)
    monkeypatch.setattr(budget, "measure_speed", lambda job, seconds: Speed(0.2, 0.1, 0.0, 0.0))
    assert cli("train", "tiny.yaml", "--minutes", "0.1") == 0
    out = capsys.readouterr().out
    steps = int(re.search(r"0.1 minutes here are about (\d+) steps", out)[1])
    recipe = RunFolder("runs/tiny").read_recipe()
    assert (recipe.train.steps, recipe.train.minutes) == (steps, None)
    monkeypatch.setattr(budget, "measure_speed", None)
    assert cli("train", "runs/tiny", "--resume") == 0
    assert cli("train", "runs/tiny/recipe.yaml", "--out", "again") == 0
    assert weights_hash("again") == weights_hash("runs/tiny")


# --- curves and trackers ---


def test_curves_show_every_validation_but_the_first():
    class Axes:
        def set_ylim(self, low, high):
            self.low, self.high = low, high

    axes, losses = Axes(), [9.0] + [0.5] * 100
    _limit(axes, losses, [8.0, 3.0, math.nan, 0.4])
    assert 3.0 < axes.high < 4.0
    assert 0.2 < axes.low < 0.4


def test_a_reader_who_leaves_does_not_stop_a_run(home, monkeypatch):
    closed = []
    monkeypatch.setattr(os, "dup2", lambda *given: closed.append(given))

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return 1

    monkeypatch.setattr(sys, "stdout", Gone())
    assert cli("train", "tiny.yaml") == 0
    assert closed
    assert Path("runs/tiny/model/model.safetensors").is_file()


def test_more_threads_than_cores_are_refused(home, capsys):
    assert cli("train", "tiny.yaml", "--set", "train.machine.threads=4096") == 2
    assert "can run at a time here" in capsys.readouterr().err
    assert not Path("runs/tiny").exists()


def test_curves_are_a_picture(home):
    for _ in ch.train("tiny.yaml", out="run"):
        pass
    path = Path("run/curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    figures = read_figures(RunFolder("run"))
    assert figures.steps == list(range(1, 13))
    assert list(figures.valid) == [5, 10, 12]
    path.unlink()
    (Path("run") / "metrics.jsonl").unlink()  # a run that has not moved has a picture, too
    draw_curves(RunFolder("run"))
    assert path.exists()


def test_a_picture_that_fails_is_no_reason_to_stop(home, monkeypatch):
    def broken(folder):
        raise ValueError("of whatever kind")

    monkeypatch.setattr("clearhead.training.curves.draw_curves", broken)
    assert len(list(ch.train("tiny.yaml", out="run"))) == 12


def test_without_matplotlib_a_run_says_so(home, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.training.curves.can_draw", lambda: False)
    assert cli("train", "tiny.yaml", "--steps", "1") == 0
    assert "pip install 'clearhead[plot]'" in capsys.readouterr().out
    assert not Path("runs/tiny/curves.png").exists()
    with pytest.raises(ClearheadError, match="matplotlib"):
        draw_curves(RunFolder("runs/tiny"))


def test_smoothing_is_a_mean_of_the_last():
    import numpy as np

    got = smoothed(np.array([4.0, 2.0, np.nan, 0.0]), 2)
    assert got.tolist() == [4.0, 3.0, 2.0, 0.0]


class FakeWriter:
    def __init__(self, place, purge_step=None):
        self.place, self.purge_step = place, purge_step
        self.seen: list[tuple[str, float, int]] = []
        self.closed = False
        WRITERS.append(self)

    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))

    def close(self):
        self.closed = True


WRITERS: list[FakeWriter] = []


def test_tensorboard_gets_every_figure(home, monkeypatch, capsys):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    WRITERS.clear()
    assert cli("train", "tiny.yaml", "--track", "tensorboard", "--steps", "6") == 0
    assert cli("train", "runs/tiny", "--resume", "--steps", "7", "--track", "tensorboard") == 0
    first, second = WRITERS
    assert first.place == "runs/tiny/tensorboard"
    assert (first.purge_step, second.purge_step) == (None, 7)
    assert first.closed
    assert second.closed
    logged = [line["loss"] for line in RunFolder("runs/tiny").metrics() if "loss" in line]
    assert [v for name, v, _ in first.seen if name == "train/loss"] == logged[:6]
    assert [step for name, _, step in first.seen if name == "valid/loss"] == [5, 6]
    assert {step for _, _, step in second.seen} == {7}


def test_trackio_gets_every_figure(home, monkeypatch):
    calls: list[tuple] = []
    module = types.ModuleType("trackio")
    module.init = lambda **more: calls.append(("init", more))  # type: ignore[attr-defined]
    module.log = lambda figures, step: calls.append(("log", figures, step))  # type: ignore
    module.finish = lambda: calls.append(("finish",))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    recipe = read_recipe("tiny.yaml")
    tracker = track.open_tracker("trackio", RunFolder("runs/x"), recipe, after=3)
    tracker.log(4, {"train/loss": 1.0})
    tracker.close()
    assert calls[0][1]["name"] == "x"
    assert calls[0][1]["resume"] == "allow"
    assert calls[1:] == [("log", {"train/loss": 1.0}, 4), ("finish",)]
    with pytest.raises(ClearheadError, match='no tracker "tensorbord"'):
        track.check_tracker("tensorbord")


# --- runs and recipes ---


def test_runs_lists_and_compares(home, capsys):
    assert cli("runs") == 0
    assert "There are no runs" in capsys.readouterr().out
    cli("train", "tiny.yaml", "--steps", "6", "--out", "runs/a")
    cli("train", "tiny.yaml", "--steps", "6", "--out", "runs/b", "--set", "optim.lr=0.01")
    trainer = open_run(read_recipe("tiny.yaml"), RunFolder("runs/c"))
    for step in trainer.steps():
        if step.number == 7:
            break
    Path("runs/d").mkdir()
    Path("runs/d/recipe.yaml").write_text("a: [1")
    capsys.readouterr()
    assert cli("runs", "--json") == 0
    rows = {Path(row["path"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "finished",
        "b": "finished",
        "c": "stopped",
        "d": "broken",
    }
    assert (rows["c"]["done"], rows["c"]["total"]) == (7, 12)
    valid = [line["valid"]["loss"] for line in RunFolder("runs/a").metrics() if "valid" in line]
    assert rows["a"]["best"] == min(valid)
    assert rows["a"]["tokens"] == 6 * 4 * 16
    assert (rows["a"]["metric"], rows["a"]["reached"]) == ("loss", valid[-1])
    assert rows["c"]["reached"] is None  # it is not at its end
    RunFolder("runs/b").write_recipe(  # as if it had been this one's figure
        RunFolder("runs/b").read_recipe().changed(**{"eval.metric": "perplexity"})
    )
    RunFolder("runs/b").log(step=6, end={"loss": 1.0, "perplexity": 2.71828})
    assert cli("runs", "runs/a", "runs/b") == 0
    out = capsys.readouterr().out
    assert re.search(r"optim.lr +0.02 +0.01\n", out)
    assert "train.steps" not in out
    assert cli("runs") == 0
    out = capsys.readouterr().out
    assert "clearhead train runs/c --resume" in out
    assert "perplexity 2.7183" in out
    assert differences([summarise(Path("runs/a")), summarise(Path("runs/b"))]) == {
        "optim.lr": [0.02, 0.01],
        "eval.metric": ["loss", "perplexity"],
    }
    assert cli("runs", "nowhere") == 2


def test_recipes_say_command_minutes_and_figure(capsys):
    assert cli("recipes") == 0
    out = capsys.readouterr().out
    for name in recipe_names():
        header = recipe_header(name)
        assert name in out
        assert header.command.startswith(f"clearhead train {name}")
        assert "minute" in header.minutes
        assert header.figure
    assert cli("recipes", "shakespeare") == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["source"] == "tinyshakespeare"
    assert cli("recipes", "shakespear") == 2
    assert 'Did you mean "shakespeare"?' in capsys.readouterr().err


# --- a run's folder as a model ---


def test_a_run_s_folder_is_a_model(home, capsys):
    trainer = open_run(read_recipe("tiny.yaml"), RunFolder("run"))
    with pytest.raises(ClearheadError, match="a run without a model yet"):
        ch.load("run")
    for _ in trainer.steps():
        pass
    newest = ch.load("run")
    assert torch.equal(newest(torch.tensor([[1, 2]])), ch.load("run/checkpoints/step-12")(
        torch.tensor([[1, 2]])
    ))  # fmt: skip
    (Path("run/checkpoints/step-12") / "optim.safetensors").write_bytes(b"torn")
    torn = ch.load("run")
    older = ch.load("run/checkpoints/step-10")
    assert torch.equal(torn(torch.tensor([[1, 2]])), older(torch.tensor([[1, 2]])))
    trainer.finish()
    assert torch.equal(ch.load("run").net.embed.tokens.weight, trainer.net.embed.tokens.weight)
    assert cli("show", "run") == 0
    assert "parameters" in capsys.readouterr().out
