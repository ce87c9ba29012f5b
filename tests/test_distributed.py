"""Several processes give what one gives at the same global batch, and can be interrupted like it.

Every group of scenarios is one start of torchrun with two processes (gloo, on the CPU).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.data.batch import IGNORED, Batch
from clearhead.training import state, world
from clearhead.training.checkpoint import fault, steps_of
from clearhead.training.recipe import Recipe, merge
from clearhead.training.run import open_run
from clearhead.training.sharded import SHARDS, read_whole
from clearhead.training.world import launch
from processes import Result, digest, recipe, run, spawn
from test_resume import pairs

STILL = {"model.dropout": 0.0}  # dice are thrown by process, so dropout is not that of one
SHARD = {"train.machine.shard": True}
EMA = {"train.average": {"kind": "ema", "decay": 0.9}}
LAST = {"train.average": {"kind": "last", "count": 2}}
MUON = {"optim.name": "muon", "optim.lr": 0.02}
TWICE = {"train.accumulate": 2, "train.batch": 3}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def assert_near(one: Result, two: Result) -> None:
    """The same run but for the order of sums."""
    assert not two.error
    for what in ("losses", "norms", "valid"):
        assert getattr(two, what) == pytest.approx(getattr(one, what), rel=1e-6, abs=1e-6)
    assert two.weights.keys() == one.weights.keys()
    for name, tensor in one.weights.items():
        if name.endswith("k_proj.bias"):
            continue  # no output depends on it: its gradient is rounding, made a step by Adam
        torch.testing.assert_close(two.weights[name], tensor, rtol=0, atol=1e-6)


def masked(folder: Path) -> dict[str, Any]:
    """Changes that make a masked language model of it."""
    model = {"family": "bert", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
    return {
        "data.objective": {"kind": "masked", "rate": 0.3},
        "model": {**model, "max_len": 16, "dropout": 0.0},
    }


def scored(folder: Path) -> dict[str, Any]:
    """Changes that make vectors of pairs of texts of it."""
    rows = [f"the cat number {i}\ta dog number {i * i}\t{i % 5 / 4}" for i in range(40)]
    path = folder / "pairs.tsv"
    path.write_text("\n".join(["first\tsecond\tscore", *rows]) + "\n")
    objective = {"kind": "pairs", "first": "first", "second": "second", "score": "score"}
    changes = {**masked(folder), "data.objective": objective, "data.source": str(path)}
    changes["model"] = {**changes["model"], "max_len": 32}
    return {**changes, "data.length": 32, "train.batch": 5, "optim.lr": 3e-4}


def contrast(folder: Path) -> dict[str, Any]:
    """The same without scores."""
    changes = scored(folder)
    return {**changes, "data.objective": {**changes["data.objective"], "score": None}}


def quiet_pairs(folder: Path) -> dict[str, Any]:
    """A translation without dropout, in buckets."""
    changes = pairs(folder)
    return {**changes, "model": {**changes["model"], "dropout": 0.0}}


COPIED: dict[str, Any] = {
    "plain": {},
    "accumulation": TWICE,
    "ema": EMA,
    "clipping": {"optim.clip": 0.1},
    "muon": MUON,
    "workers": {"data.workers": 2},
    "a row for one process only": {"train.batch": 1},
    "an odd number of rows": {"train.batch": 3},
    "buckets": quiet_pairs,
    "masked": masked,
    "similarity": scored,
}
# Where a last digit grows, so that another processor's order of sums would be seen: in fp64.
DOUBLE = ("muon", "similarity")
SHARED: dict[str, Any] = {
    "plain": {},
    "much at once": {**TWICE, **EMA, **MUON, "model.d_ff": 25, "optim.clip": 0.1},
    "a row for one process only": {"train.batch": 1},
    "last": LAST,
}
SHARED_TOO: dict[str, Any] = {  # takes longer
    "accumulation": TWICE,
    "ema": EMA,
    "clipping": {"optim.clip": 0.1},
    "muon": MUON,
    "patience": {"train.patience": 3},
    "adam": {"optim.name": "adam"},
    "uneven": {"model.d_ff": 25},
    "masked": masked,
    "encoder-decoder": quiet_pairs,
    "recompute": {"train.machine.recompute": True},
}


def made_of(folder: Path, changes: Any, **more: Any) -> dict[str, Any]:
    return recipe(folder, **STILL, **(changes(folder) if callable(changes) else changes), **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def copied(folder) -> dict[str, Result]:
    """What two processes with copies of the weights (DDP) give."""
    plans: dict[str, dict[str, Any]] = {
        name: {"recipe": made_of(folder, changes), "double": name in DOUBLE}
        for name, changes in COPIED.items()
    }
    dropout, out = recipe(folder), folder / "copied"
    plans |= {
        "skipped": {"recipe": made_of(folder, {}), "poison": (2, 5, 6)},
        "five": {"recipe": made_of(folder, {}), "poison": (2, 3, 4, 5, 6)},
        "contrast": {"recipe": made_of(folder, contrast)},
        "whole": {"recipe": dropout, "out": out / "whole"},
        "first": {"recipe": dropout, "out": out / "stopped", "stop": 5},
        "second": {"recipe": dropout, "out": out / "stopped", "resume": True},
        "killed": {"recipe": dropout, "out": out / "killed", "leave": 7},
        "again": {"recipe": dropout, "out": out / "killed", "resume": True},
        "left": {"recipe": dropout, "out": out / "left", "leave": 7},
        "by itself": {"recipe": dropout, "out": out / "left", "again": True},
        "used": {"recipe": dropout, "out": folder / "used"},
    }
    run(dropout, folder / "used", leave=2)  # by another launch than that of the others
    base = folder / "spawn-copied"
    base.mkdir()
    return dict(zip(plans, spawn(base, list(plans.values())), strict=True))


@pytest.fixture(scope="module")
def shared(folder) -> dict[str, Result]:
    """What two processes that share the weights (FSDP2) give."""
    out = folder / "shared"
    plans: dict[str, dict[str, Any]] = {
        name: {"recipe": made_of(folder, changes, **SHARD), "out": out / name.replace(" ", "-")}
        for name, changes in SHARED.items()
    }
    tied = {"model.family": "gpt2", **SHARD}
    dropout = recipe(folder, **SHARD, **EMA, **MUON)
    alone = folder / "alone"
    run(made_of(folder, {**EMA, **MUON, **SHARD}), alone / "ended")
    run(made_of(folder, {**EMA, **MUON, **SHARD}), alone / "stopped", stop=6)
    plans |= {
        "tied": {"recipe": recipe(folder, **STILL, **tied)},
        "skipped": {"recipe": made_of(folder, SHARD), "poison": (2, 5, 6)},
        "five": {"recipe": made_of(folder, SHARD), "poison": (2, 3, 4, 5, 6)},
        "lora": {"recipe": recipe(folder, **SHARD, **{"train.lora": {"rank": 2}})},
        "fp16": {"recipe": recipe(folder, **SHARD, **{"train.machine.precision": "fp16"})},
        "whole": {"recipe": dropout, "out": out / "whole"},
        "first": {"recipe": dropout, "out": out / "stopped", "stop": 5},
        "second": {"recipe": dropout, "out": out / "stopped", "resume": True},
        "left": {"recipe": made_of(folder, {**EMA, **MUON, **SHARD}), "out": out / "l", "leave": 6},
        "from one, ended": {"recipe": {}, "out": alone / "ended", "resume": True},
        "from one, stopped": {"recipe": {}, "out": alone / "stopped", "resume": True},
    }
    for plan in plans.values():
        plan["recipe"] = plan["recipe"] or dropout
    base = folder / "spawn-shared"
    base.mkdir()
    return dict(zip(plans, spawn(base, list(plans.values())), strict=True))


# --- copies: DDP ---


@pytest.mark.parametrize("name", COPIED)
def test_two_processes_are_one(folder, copied, name):
    assert_near(run(made_of(folder, COPIED[name]), double=name in DOUBLE), copied[name])


def test_what_is_bad_in_one_process_is_skipped_in_all(folder, copied):
    one = run(made_of(folder, {}), poison=(2, 5, 6))
    two = copied["skipped"]
    assert two.skipped == one.skipped == [2, 5, 6]
    assert not two.error
    for name, tensor in one.weights.items():
        torch.testing.assert_close(two.weights[name], tensor, rtol=0, atol=1e-6)


def test_five_bad_steps_stop_all_processes(copied):
    assert "stops at step 6: 5 steps in a row" in copied["five"].error


def test_a_contrast_is_refused_where_rows_are_apart(copied):
    assert "compares every text of a batch with every other" in copied["contrast"].error


def test_a_used_folder_is_refused_in_all_processes(copied):
    assert "--resume" in copied["used"].error


def test_two_processes_interrupted_are_two_that_were_not(folder, copied):
    """With dropout, to the bit; the one that asks for the end is not the one that writes."""
    whole, first, second = (copied[name] for name in ("whole", "first", "second"))
    assert first.stopped in ("it was asked for", "another process asked for it")
    assert len(first.losses) == 5
    assert first.losses + second.losses == whole.losses
    assert first.norms + second.norms == whole.norms
    assert digest(second.weights) == digest(whole.weights)
    assert copied["again"].losses == whole.losses[4:]
    assert digest(copied["again"].weights) == digest(whole.weights)
    model = ch.load(str(folder / "copied" / "whole" / "model"))
    loaded = {name: p.detach() for name, p in model.net.named_parameters()}
    assert digest(loaded) == digest(whole.weights)


def test_one_process_that_was_started_again_takes_all_with_it(copied):
    """Whatever each of them sees: one that began anew would leave the others waiting."""
    assert "torchrun started this run again: it goes on." in copied["by itself"].said
    assert copied["by itself"].losses == copied["whole"].losses[4:]
    assert digest(copied["by itself"].weights) == digest(copied["whole"].weights)


def test_a_launch_that_goes_on_with_other_machines_is_known_by_its_name(tmp_path, monkeypatch):
    """torchrun does not count that as a restart."""
    settings, out = recipe(tmp_path), tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    run(settings, out, leave=5)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    assert "--resume" in run(settings, out).error
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert len(run(settings, out).losses) == 8
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun says if nobody gave a name
    assert launch() is None


def test_processes_wait_as_long_as_the_first_may_need(monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setenv("WORLD_SIZE", "1")
    fakes = {
        "is_initialized": lambda: False,
        "init_process_group": lambda backend, **more: given.update(more),
        "get_rank": lambda: 0,
        "get_world_size": lambda: 1,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(world.dist, name, fake)
    monkeypatch.setattr(world.atexit, "register", lambda act: None)
    world.World.join(torch.device("cpu"))
    assert given["timeout"].total_seconds() >= 12 * 3600


# --- shares: FSDP2 ---


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_that_share_the_weights_are_one(folder, shared, name):
    out = folder / "one" if name == "last" else None
    assert_near(run(made_of(folder, SHARED[name]), out), shared[name])


@pytest.mark.slow
def test_more_runs_of_processes_that_share(tmp_path):
    settings = [made_of(tmp_path, changes) for changes in SHARED_TOO.values()]
    plans = [
        {"recipe": merge(one, SHARD), "out": tmp_path / f"run-{n}"}
        for n, one in enumerate(settings)
    ]
    for n, two in enumerate(spawn(tmp_path, plans)):
        assert_near(run(settings[n], tmp_path / f"one-{n}"), two)


def test_tied_weights_are_shared_out_once(folder, shared):
    settings = recipe(folder, **STILL, **{"model.family": "gpt2"})
    assert_near(run(settings), shared["tied"])


def test_bad_steps_are_skipped_where_weights_are_shared(folder, shared):
    assert shared["skipped"].skipped == [2, 5, 6]
    assert "stops at step 6: 5 steps in a row" in shared["five"].error


def test_what_cannot_be_shared_out_is_refused(shared):
    assert "leave train.machine.shard away" in shared["lora"].error
    assert "take bf16" in shared["fp16"].error


def test_processes_that_share_interrupted_are_those_that_were_not(folder, shared):
    whole, first, second = (shared[name] for name in ("whole", "first", "second"))
    assert first.losses + second.losses == whole.losses
    assert first.norms + second.norms == whole.norms
    assert digest(second.weights) == digest(whole.weights)
    runs = folder / "shared" / "whole" / "checkpoints"
    assert [step for step, _ in steps_of(runs)] == [12, 8]
    assert [path.name for path in runs.iterdir() if path.name.startswith(".")] == []
    for _, path in steps_of(runs):
        assert fault(path) is None
        names = sorted(p.name for p in (path / SHARDS).iterdir())
        assert len(names) == 2  # one file a process
        assert all(name.endswith(".safetensors") for name in names)  # and none is pickled
    model = ch.load(str(folder / "shared" / "whole" / "model"))  # an ordinary one
    loaded = {name: p.detach() for name, p in model.net.named_parameters()}
    assert digest(loaded) == digest(whole.weights)


def test_pieces_of_two_are_taken_up_by_one(folder, shared):
    """A finished run gives the same model, and one that was left goes on."""
    ended = run({**recipe(folder)}, folder / "shared" / "whole", resume=True)
    assert ended.losses == []
    assert digest(ended.weights) == digest(shared["whole"].weights)
    one = run(made_of(folder, {**EMA, **MUON}))
    rest = run(recipe(folder), folder / "shared" / "l", resume=True)
    assert rest.losses == pytest.approx(one.losses[4:], abs=1e-6)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(rest.weights[name], tensor, rtol=0, atol=1e-6)


def test_everything_in_pieces_is_read_as_it_was_written(folder, shared):
    path = folder / "shared" / "whole" / "checkpoints" / "step-8"
    trainer = open_run(Recipe.from_dict(recipe(folder, **EMA, **MUON)), None)
    next(trainer.steps())
    state.read_into(trainer, path)
    held = read_whole(path / SHARDS, "")
    own = state._all_tensors(trainer)
    assert own.keys() == held.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor.reshape(tensor.shape or (1,)), held[name]), name


def test_a_checkpoint_of_one_is_taken_up_by_two_that_share(folder, shared):
    one = run(made_of(folder, {**EMA, **MUON}))
    assert shared["from one, ended"].losses == []
    assert digest(shared["from one, ended"].weights) == digest(one.weights)
    rest = shared["from one, stopped"]
    assert rest.losses == pytest.approx(one.losses[6:], abs=1e-6)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(rest.weights[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_pieces_of_two_are_taken_up_by_three(tmp_path):
    """Rows that three do not share evenly, and dropout, to the bit within each number."""
    settings = recipe(tmp_path, **SHARD, **EMA)
    (two,) = spawn(tmp_path, [{"recipe": settings, "out": tmp_path / "run"}])
    three, whole, _, again = spawn(
        tmp_path,
        [
            {"recipe": settings, "out": tmp_path / "run", "resume": True},
            {"recipe": settings, "out": tmp_path / "whole"},
            {"recipe": settings, "out": tmp_path / "cut", "leave": 9},
            {"recipe": settings, "out": tmp_path / "cut", "resume": True},
        ],
        processes=3,
    )
    assert three.losses == []
    assert digest(three.weights) == digest(two.weights)
    assert again.losses == whole.losses[8:]
    assert digest(again.weights) == digest(whole.weights)


# --- processes that die ---


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, SHARD])
def test_torchrun_starts_again_and_the_run_goes_on(tmp_path, changes):
    settings = recipe(tmp_path, **changes)
    (whole,) = spawn(tmp_path, [{"recipe": settings, "out": tmp_path / "whole"}])
    plan = {"recipe": settings, "out": tmp_path / "run", "die": 10}
    (again,) = spawn(tmp_path, [plan], restarts=3)
    assert again.losses == whole.losses[8:]  # from the checkpoint of step 8, by itself
    assert digest(again.weights) == digest(whole.weights)


# --- parts of a batch ---


def test_parts_of_a_batch_add_up_to_it():
    ids = torch.arange(15).reshape(5, 3)
    batch = Batch((ids,), ids + 1, count=15)
    parts = [batch.part(rank, 2) for rank in range(2)]
    assert [part.inputs[0].shape[0] for part in parts] == [3, 2]
    rows = torch.cat([part.targets for part in parts])
    assert sorted(rows.flatten().tolist()) == (ids + 1).flatten().tolist()
    assert [part.count for part in parts] == [15, 15]
    assert batch.part(0, 1) is batch


def test_a_part_without_rows_counts_for_nothing():
    batch = Batch((torch.zeros(1, 3, dtype=torch.long),), torch.tensor([IGNORED]), count=1)
    assert batch.part(0, 3).count == 1
    assert [batch.part(rank, 3).count for rank in (1, 2)] == [0, 0]
    assert batch.part(2, 3).inputs[0].shape == (1, 3)


def test_parts_of_pairs_keep_the_pairs():
    first, second = torch.arange(5), torch.arange(5) + 100
    at = ch.Positions.ragged([1, 2, 3, 1, 2, 3, 1, 2, 3, 1])
    ids = torch.cat([first, second]).unsqueeze(1).expand(10, 3)
    batch = Batch((ids,), torch.arange(5.0), {"at": at}, count=5)
    part = batch.part(1, 2)
    assert part.inputs[0][:, 0].tolist() == [1, 3, 101, 103]
    assert part.targets.tolist() == [1.0, 3.0]
    assert part.places["at"].ends == (2, 1, 1, 3)
    assert part.places["at"].pos.shape == (4, 3)
