"""A run that is interrupted and taken up again is the run that was not, to the bit."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import clearhead as ch
import processes
from clearhead.errors import ClearheadError
from clearhead.training import state
from clearhead.training.checkpoint import MANIFEST, fault, newest, steps_of
from clearhead.training.events import Shortened
from clearhead.training.folder import RunFolder
from clearhead.training.guard import IN_A_ROW, Guard
from clearhead.training.loss import batch_loss
from clearhead.training.recipe import Recipe
from clearhead.training.run import open_run
from clearhead.training.summary import summarise
from processes import digest, recipe, run


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def pairs(folder: Path) -> dict[str, Any]:
    """Changes that make a translation of it, in buckets by tokens."""
    lines = [" ".join(processes.WORDS[i % 7 : i % 7 + 2 + i % 5]) for i in range(60)]
    (folder / "all.en").write_text("\n".join(lines) + "\n")
    (folder / "all.de").write_text("\n".join(line[::-1] for line in lines) + "\n")
    return {
        "data": {
            "source": f"{folder / 'all.en'},{folder / 'all.de'}",
            "objective": {"kind": "seq2seq", "source": "en", "target": "de"},
            "by": "tokens",
            "length": 40,
        },
        "model": {
            "family": "transformer",
            "n_layers": 1,
            "d_model": 16,
            "n_heads": 2,
            "max_len": 40,
            "dropout": 0.1,
        },
        "train.batch": 200,
    }


def made(folder: Path) -> dict[str, Any]:
    """Changes that make a run on data without end of it."""
    return {
        **pairs(folder),
        "data": {
            "source": "reverse",
            "objective": {"kind": "seq2seq", "source": "source", "target": "target"},
            "length": 40,
        },
        "tokenizer": "bytes",  # nothing to learn from thousands of records
        "train.batch": 4,
    }


CHANGES: dict[str, Any] = {
    "dropout": {},
    "accumulation": {"train.accumulate": 2},
    "workers": {"data.workers": 2},
    "ema": {"train.average": {"kind": "ema", "decay": 0.9}},
    "last": {"train.average": {"kind": "last", "count": 3}, "train.checkpoint_every": 3},
    "muon": {"optim.name": "muon", "optim.lr": 0.02},
    "adam": {"optim.name": "adam"},
    "patience": {
        "optim.lr": 0.3,
        "optim.warmup": 1,
        "train.patience": 3,
        "train.eval_every": 1,
    },
    "fp16": {"train.machine.precision": "fp16"},
    "recompute": {"train.machine.recompute": True},
    "layer decay and freezing": {"optim.layer_decay": 0.8, "optim.freeze": ["embed.*"]},
    "lora": {"train.lora": {"rank": 2, "targets": ["*.q_proj"]}},
    "rdrop": {"optim.rdrop": 5.0},
    "buckets": pairs,
    "endless": made,
}


def changed(folder: Path, name: str) -> dict[str, Any]:
    changes = CHANGES[name]
    return recipe(folder, **(changes(folder) if callable(changes) else changes))


def assert_same(parts: list[processes.Result], whole: processes.Result) -> None:
    """Losses one behind the other, evaluations and weights, to the bit."""
    for what in ("losses", "norms", "valid"):
        got = [value for part in parts for value in getattr(part, what)]
        assert str(got) == str(getattr(whole, what))  # because a nan is no other nan
    assert whole.weights
    assert digest(parts[-1].weights) == digest(whole.weights)


@pytest.mark.parametrize("name", CHANGES)
def test_asked_to_stop_and_taken_up_is_the_same_run(tmp_path, name):
    settings = changed(tmp_path, name)
    kept = name in ("last", "patience")  # weights of earlier steps need a folder
    whole = run(settings, tmp_path / "whole" if kept else None)
    first = run(settings, tmp_path / "run", stop=5)
    assert first.stopped == "it was asked for"
    assert len(first.losses) == 5
    second = run(settings, tmp_path / "run", resume=True, stop=10)
    third = run(settings, tmp_path / "run", resume=True)
    assert_same([first, second, third], whole)
    model = ch.load(str(tmp_path / "run" / "model"))
    weights = dict(model.net.named_parameters())
    assert digest({n: p.detach() for n, p in weights.items()}) == digest(whole.weights)


@pytest.mark.parametrize("name", ["dropout", "ema", "muon", "accumulation", "patience"])
def test_killed_between_checkpoints_and_taken_up_is_the_same_run(tmp_path, name):
    settings = changed(tmp_path, name)
    whole = run(settings, tmp_path / "whole" if name == "patience" else None)
    killed = run(settings, tmp_path / "run", leave=7)
    assert len(killed.losses) == 7
    again = run(settings, tmp_path / "run", resume=True)
    assert again.losses == whole.losses[4:]  # from the checkpoint of step 4
    assert digest(again.weights) == digest(whole.weights)
    lines = [line for line in RunFolder(tmp_path / "run").metrics() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(whole.losses) + 1))
    assert [line["loss"] for line in lines] == whole.losses


@pytest.mark.parametrize("average", [{}, CHANGES["ema"]], ids=["plain", "ema"])
def test_patience_gives_the_best_weights_and_can_be_given_more(tmp_path, average, monkeypatch):
    settings = recipe(tmp_path, **CHANGES["patience"], **average)
    folder = RunFolder(tmp_path / "run")
    trainer = open_run(Recipe.from_dict(settings), folder)
    # The best evaluation is that of step 6, whatever this processor's random numbers are.
    told = iter([3.0, 3.5, 2.5, 2.75, 2.25, 2.0, 2.5, 2.25, 2.1])
    monkeypatch.setattr(trainer, "_valid_loss", lambda: next(told))
    for step in trainer.steps():
        now = trainer.ema.weights if trainer.ema else state._tensors(trainer.net)
        now = {name: tensor.clone() for name, tensor in now.items()}
        if any(getattr(event, "best", False) for event in step.events):
            best = now
    assert trainer.done == 9
    assert not trainer.interrupted  # it ended by itself
    given = {name: p.detach() for name, p in trainer.finish().net.named_parameters()}
    assert digest(given) == digest(best) != digest(now)
    again = run(settings, folder.path, resume=True)
    assert again.losses == []
    assert digest(again.weights) == digest(best)
    for _ in range(2):  # also if it is killed before it saves
        longer = open_run(None, folder, resume=True, steps=24)
        assert (longer.waited, longer.done) == (0, 9)
    assert next(longer.steps()).number == 10


@pytest.mark.parametrize("name", ["last", "patience"])
def test_weights_of_earlier_steps_are_not_promised_without_a_folder(tmp_path, name):
    assert "which are kept in a run's folder: name one (out=)" in run(changed(tmp_path, name)).error
    both = recipe(tmp_path, **CHANGES["patience"], **CHANGES["last"])
    assert "leave one of them away" in run(both, tmp_path / "run").error
    assert not (tmp_path / "run").exists()


def test_the_time_of_the_step_that_saves_is_in_the_checkpoint(tmp_path):
    run(recipe(tmp_path), tmp_path / "run", leave=5)
    saved = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / "state.json").read_text())
    logged = {line["step"]: line for line in RunFolder(tmp_path / "run").metrics()}
    assert saved["seconds"] == pytest.approx(logged[4]["seconds"], abs=1e-3)


def test_a_large_seed_has_dice_and_a_large_dropout_too(tmp_path):
    assert len(run(recipe(tmp_path, **{"train.seed": 2**62, "train.steps": 2})).losses) == 2
    assert len(run(recipe(tmp_path, **{"model.dropout": 0.999999, "train.steps": 2})).losses) == 2


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_is_the_plain_one(tmp_path):
    """In a process of its own: what checks shapes in the tests cannot be compiled."""
    short = {"model.dropout": 0.0, "train.steps": 4, "train.eval_every": 2}
    one = run(recipe(tmp_path, **short))
    compiled = recipe(tmp_path, **short, **{"train.machine.compile": True})
    (two,) = processes.spawn(tmp_path, [{"recipe": compiled}], processes=1)
    assert two.losses == pytest.approx(one.losses, abs=1e-4)
    assert two.valid == pytest.approx(one.valid, abs=1e-4)


def test_the_random_state_of_the_caller_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(recipe(tmp_path))
    assert torch.equal(torch.rand(3), expected)


# --- accumulation ---


def test_four_batches_of_two_are_one_of_eight(tmp_path):
    plain = {"model.dropout": 0.0}
    one = run(recipe(tmp_path, **plain, **{"train.batch": 8}))
    four = run(recipe(tmp_path, **plain, **{"train.batch": 2, "train.accumulate": 4}))
    assert four.losses == pytest.approx(one.losses, abs=1e-6)
    assert four.norms == pytest.approx(one.norms, abs=1e-6)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(four.weights[name], tensor, rtol=0, atol=1e-6)


def test_batches_of_different_size_count_by_their_targets(tmp_path):
    """The mean of means would weigh the tokens of a short batch more."""
    settings = recipe(tmp_path, **pairs(tmp_path), **{"train.accumulate": 3})
    settings["model"]["dropout"] = 0.0
    trainer = open_run(Recipe.from_dict(settings), None)
    batches = [trainer.job.batches.batch(n) for n in range(3)]
    assert len({batch.count for batch in batches}) > 1
    net, ask = trainer.net, trainer.job.objective.ask
    sums = [float(state_loss(net, batch, ask)) for batch in batches]
    expected = sum(sums) / sum(batch.count for batch in batches)
    assert next(trainer.steps()).loss == pytest.approx(expected, abs=1e-6)


def state_loss(net: Any, batch: Any, ask: str) -> torch.Tensor:
    with torch.no_grad():
        return batch_loss(net, batch, ask)


# --- steps that are not taken ---


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, moments and average."""
    return {name: tensor.clone() for name, tensor in state._all_tensors(trainer).items()}


def test_a_bad_step_changes_nothing(tmp_path):
    settings = recipe(tmp_path, **CHANGES["ema"])
    trainer = open_run(Recipe.from_dict(settings), None)
    with processes.poisoned(trainer, (3,)):
        steps = trainer.steps()
        next(steps), next(steps)
        before, updates = weights_of(trainer), trainer.ema.updates
        step = next(steps)
    assert math.isnan(step.loss)
    assert "nan" in step.events[0].why
    after = weights_of(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.ema.updates == updates
    assert all(parameter.grad is None for parameter in trainer.net.parameters())
    assert trainer.done == 3
    assert math.isfinite(next(steps).loss)


@pytest.mark.parametrize("name", ["dropout", pytest.param("fp16", marks=pytest.mark.slow)])
def test_bad_steps_are_part_of_what_is_taken_up(tmp_path, name):
    settings, poison = changed(tmp_path, name), (2, 4, 5, 6, 7, 9)
    whole = run(settings, poison=poison)
    assert set(whole.skipped) >= set(poison)  # fp16 skips one more while it finds its scale
    assert not whole.error
    first = run(settings, tmp_path / "run", stop=6, poison=poison)
    second = run(settings, tmp_path / "run", resume=True, poison=poison)
    assert first.skipped + second.skipped == whole.skipped
    losses = first.losses + second.losses
    assert str(losses) == str(whole.losses)
    assert digest(second.weights) == digest(whole.weights)


def test_five_bad_steps_in_a_row_stop_the_run_wherever_it_was_taken_up(tmp_path):
    settings, poison = recipe(tmp_path), (4, 5, 6, 7, 8)
    assert "stops at step 8: 5 steps in a row" in run(settings, poison=poison).error
    run(settings, tmp_path / "run", stop=6, poison=poison)
    again = run(settings, tmp_path / "run", resume=True, poison=poison)
    assert "stops at step 8: 5 steps in a row" in again.error
    assert newest(tmp_path / "run" / "checkpoints", print).name == "step-6"


def test_the_first_bad_layer_is_named(tmp_path):
    settings = recipe(tmp_path, **{"train.eval_every": 50})
    trainer = open_run(Recipe.from_dict(settings), None)
    with torch.no_grad():
        for parameter in trainer.net.stack.blocks[1].ffn.parameters():
            parameter.fill_(1e25)
    with pytest.raises(ClearheadError, match=r"are in stack\.blocks\.1\.ffn\S* \(its output\)"):
        list(trainer.steps())
    trainer = open_run(Recipe.from_dict(settings), None)
    with torch.no_grad():
        trainer.net.stack.blocks[0].ffn.out_proj.weight[0, 0] = math.nan
    with pytest.raises(
        ClearheadError, match=r"are in stack\.blocks\.0\.ffn\.out_proj\.weight \(its weights\)"
    ):
        list(trainer.steps())


@pytest.mark.parametrize("name", ["embed", "stack.blocks.0", "stack.blocks.1"])
def test_a_gradient_that_alone_is_bad_is_traced_to_its_layer(tmp_path, name):
    """Everything before it is bad as well, and clipping must not spoil what is behind it."""
    trainer = open_run(Recipe.from_dict(recipe(tmp_path, **{"train.accumulate": 2})), None)
    layer = trainer.net.get_submodule(name)
    layer.register_forward_hook(lambda module, given, out: spoilt(out))
    with pytest.raises(ClearheadError, match=rf"are in {name}\.\S+ \(its gradient\)"):
        list(trainer.steps())


def spoilt(out: torch.Tensor) -> torch.Tensor:
    """The same, with a gradient that is not a number."""
    if out.requires_grad:
        out.register_hook(lambda grad: grad * math.nan)
    return out


def test_the_bad_layer_may_be_found_in_any_batch_of_a_step(tmp_path):
    trainer = open_run(Recipe.from_dict(recipe(tmp_path, **{"train.accumulate": 2})), None)
    calls = iter(range(10**6))

    def second(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out * math.nan if next(calls) % 2 else out

    trainer.net.stack.blocks[0].register_forward_hook(second)
    with pytest.raises(ClearheadError, match=r"are in stack\.blocks\.0 \(its output\)"):
        list(trainer.steps())


def test_fp16_may_look_for_its_scale_as_long_as_it_needs(tmp_path):
    trainer = open_run(Recipe.from_dict(changed(tmp_path, "fp16")), None)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    skipped = [step.number for step in trainer.steps() if "fp16 cannot hold" in str(step.events)]
    assert len(skipped) > IN_A_ROW
    assert trainer.guard.row == 0
    guard = Guard()
    assert guard.fault(2.0, math.inf, scale=1.0)
    assert guard.fault(math.nan, math.inf, scale=8.0)
    assert guard.row == 2


def test_what_is_no_number_is_null_in_the_figures(tmp_path):
    run(recipe(tmp_path), tmp_path / "run", poison=(3,), leave=6)
    run(recipe(tmp_path), tmp_path / "run", resume=True, poison=(3,))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [line["loss"] for line in read if line["step"] == 3] == [None]
    (third,) = (line for line in RunFolder(tmp_path / "run").metrics() if line["step"] == 3)
    assert math.isnan(third["loss"])


# --- checkpoints that are not whole ---


def truncate(folder: Path) -> None:
    path = folder / "optim.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def change_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "optim.safetensors has": truncate,
    "model.safetensors is not what was written": change_a_byte,
    "never finished": lambda folder: (folder / MANIFEST).unlink(),
    "state.json is missing": lambda folder: (folder / "state.json").unlink(),
    "cannot be read": lambda folder: (folder / MANIFEST).write_text('{"files": '),
    "cannot be read ": lambda folder: (folder / MANIFEST).write_text('["files"]'),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_torn_checkpoint_is_passed_over_with_a_message(tmp_path, said):
    settings = recipe(tmp_path)
    whole = run(settings)
    run(settings, tmp_path / "run", leave=9)
    runs = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in steps_of(runs)] == [8, 4]
    DAMAGE[said](runs / "step-8")
    again = run(settings, tmp_path / "run", resume=True)
    assert len(again.said) == 1
    assert again.said[0].startswith("The checkpoint of step 8 is passed over: ")
    assert said.strip() in again.said[0]
    assert again.losses == whole.losses[4:]
    assert digest(again.weights) == digest(whole.weights)


def test_without_a_whole_checkpoint_a_run_begins_again(tmp_path):
    settings = recipe(tmp_path)
    run(settings, tmp_path / "run", leave=6)
    (tmp_path / "run" / "checkpoints" / "step-4" / MANIFEST).unlink()
    again = run(settings, tmp_path / "run", resume=True)
    assert "starts from its beginning" in again.said[-1]
    assert digest(again.weights) == digest(run(settings).weights)


def test_what_a_kill_left_in_the_middle_of_a_save_is_cleared_away(tmp_path):
    settings = recipe(tmp_path)
    run(settings, tmp_path / "run", leave=6)
    runs = tmp_path / "run" / "checkpoints"
    for name in (".step-8-new", ".step-6-new"):
        (runs / name).mkdir()
        (runs / name / "half.safetensors").write_bytes(b"half")
    again = run(settings, tmp_path / "run", resume=True)
    assert digest(again.weights) == digest(run(settings).weights)
    assert sorted(path.name for path in runs.iterdir()) == ["step-12", "step-8"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch, error):
    settings = recipe(tmp_path)
    whole = run(settings)
    run(settings, tmp_path / "run", leave=6)

    def full(tensors: Any, path: Path) -> None:
        Path(path).write_bytes(b"as much as there was room for")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(state, "save_file", full)
        stopped = run(settings, tmp_path / "run", resume=True)
    assert "The checkpoint of step 8 could not be written" in stopped.error
    assert "No space left on device" in stopped.error
    assert "--resume" in stopped.error
    runs = tmp_path / "run" / "checkpoints"
    assert [path.name for path in runs.iterdir()] == ["step-4"]
    assert fault(runs / "step-4") is None
    again = run(settings, tmp_path / "run", resume=True)
    assert again.losses == whole.losses[4:]
    assert digest(again.weights) == digest(whole.weights)


def test_older_checkpoints_go_when_the_next_is_complete(tmp_path):
    run(recipe(tmp_path, **{"train.checkpoint_every": 2}), tmp_path / "run")
    runs = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in steps_of(runs)] == [12, 10]
    assert (tmp_path / "run" / "latest").read_text() == "step-12\n"
    assert all(fault(path) is None for _, path in steps_of(runs))


def test_an_average_of_checkpoints_keeps_those_it_needs(tmp_path):
    settings = recipe(
        tmp_path,
        **{"train.average": {"kind": "last", "count": 4}, "train.checkpoint_every": 2},
    )
    run(settings, tmp_path / "run", stop=5)
    run(settings, tmp_path / "run", resume=True)
    runs = tmp_path / "run" / "checkpoints"
    assert [step for step, _ in steps_of(runs)] == [12, 10, 8, 6]


def test_what_kills_left_of_models_is_cleared_away(tmp_path):
    """If the old model was moved and the new one not yet in its place, the old one is back."""
    settings = changed(tmp_path, "patience")
    run(settings, tmp_path / "run", leave=6)
    out = tmp_path / "run"
    before = (out / "best" / "model.safetensors").read_bytes()
    (out / "best").rename(out / ".best-abcdefgh-old")
    (out / ".best-abcdefgh").mkdir()
    (out / ".model-12345678").mkdir()
    open_run(None, RunFolder(out), resume=True)
    assert (out / "best" / "model.safetensors").read_bytes() == before
    assert not [*out.glob(".best-*"), *out.glob(".model-*")]


@pytest.mark.parametrize("where", ["lock", "write_recipe", "write", "keep_tokenizer"])
@pytest.mark.parametrize("late", [False, True])
def test_a_kill_while_a_run_begins_leaves_what_can_go_on(tmp_path, monkeypatch, where, late):
    settings, folder = recipe(tmp_path), RunFolder(tmp_path / "run")
    real = getattr(RunFolder, where)

    def killed(self: RunFolder, *given: Any) -> None:
        if late:
            real(self, *given)
        else:
            (self.path / ".recipe.yaml.new").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, where, killed)
        with pytest.raises(KeyboardInterrupt):
            run(settings, folder.path)
    again = run(settings, folder.path, resume=folder.begun)
    assert digest(again.weights) == digest(run(settings).weights)
    assert folder.tokenizer() is not None


# --- two at a time ---

HOLDER = """
import sys
from clearhead.training.folder import RunFolder
RunFolder(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked on Windows")
def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    settings, out = recipe(tmp_path), tmp_path / "run"
    run(settings, out, leave=6)
    assert summarise(out).state == "stopped"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout.readline() == "locked\n"
        said = run(settings, out, resume=True).error
        assert f"this run is training already, in process {other.pid}" in said
        assert summarise(out).state == "running"
        other.kill()
    assert summarise(out).state == "stopped"
    assert len(run(settings, out, resume=True).losses) == 8


# --- what must not be taken up ---


@pytest.mark.parametrize("where", ["everywhere", "end", "target"])
def test_a_run_whose_data_changed_is_not_taken_up(tmp_path, where):
    settings = recipe(tmp_path, **(pairs(tmp_path) if where == "target" else {}))
    run(settings, tmp_path / "run", leave=6)
    source = Path(settings["data"]["source"].split(",")[-1])
    text = source.read_text()
    source.write_text(text.replace("cat", "act") if where != "end" else text[:-8] + text[:8])
    if where == "target":
        source.write_text(text[:-4] + "far\n")
    assert source.read_text() != text
    assert "on other data" in run(settings, tmp_path / "run", resume=True).error


def test_a_checkpoint_of_another_model_is_not_taken_up(tmp_path):
    settings = recipe(tmp_path)
    run(settings, tmp_path / "run", leave=6)
    other = open_run(Recipe.from_dict(recipe(tmp_path, **{"model.n_layers": 1})), None)
    with pytest.raises(ClearheadError, match="a checkpoint of another model"):
        state.read_into(other, tmp_path / "run" / "checkpoints" / "step-4")


def test_what_is_no_run_is_not_taken_up(tmp_path):
    with pytest.raises(ClearheadError, match=r"is no run: it has no recipe\.yaml"):
        open_run(None, RunFolder(tmp_path / "nothing"), resume=True)


def test_a_folder_that_is_used_is_not_begun_in(tmp_path):
    settings = recipe(tmp_path)
    run(settings, tmp_path / "run", leave=6)
    before = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / MANIFEST).read_text())
    assert "--resume" in run(settings, tmp_path / "run").error
    after = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / MANIFEST).read_text())
    assert before == after


# --- kills ---


def kill(count: int, steps: int) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", str(count), "--steps", str(steps)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} kills" in done.stdout


def test_three_kills_change_nothing():
    kill(3, steps=60)


@pytest.mark.slow
def test_thirty_kills_change_nothing():
    kill(30, steps=400)


def test_a_run_that_becomes_slower_than_planned_keeps_its_time(tmp_path):
    """Fewer steps, written down: what is taken up again is the shorter run."""
    folder = RunFolder(tmp_path / "run")
    changes = {"train.steps": 400, "train.eval_every": 400}
    trainer = open_run(Recipe.from_dict(recipe(tmp_path)).changed(**changes), folder)
    trainer.deadline = 1e-6
    steps = list(trainer.steps())
    shortened = [e for step in steps for e in step.events if isinstance(e, Shortened)]
    assert [event.steps for event in shortened] == [30]
    assert len(steps) == 30
    assert steps[-1].lr < steps[0].lr  # the rate came down to the new end
    assert all(after.lr > before.lr / 3 for before, after in pairwise(steps[:-1]))  # not at once
    assert folder.read_recipe().train.steps == 30
    assert open_run(None, folder, resume=True).done == 30


def test_a_loss_near_nothing_may_jump_without_being_a_spike():
    guard = Guard()
    for _ in range(30):
        assert guard.fault(0.003, 0.15) is None
    assert guard.fault(0.018, 7.3) is None  # six times the loss, and still next to nothing
    assert "spike" in str(guard.fault(0.9, 7.3))
