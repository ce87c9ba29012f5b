"""Recipes: those that come along, those that are guessed, and those with a mistake in them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.measure.roofs import Report, Roofs, Torch
from clearhead.recipes import recipe_header, recipe_names, recipe_text
from clearhead.training import budget, machine, room
from clearhead.training.budget import Speed, decide
from clearhead.training.figures import check_metric
from clearhead.training.job import prepare
from clearhead.training.recipe import SECTIONS, MachineConfig, Recipe, merge
from clearhead.training.run import open_run, read_recipe
from clearhead.training.summary import changed_settings

PROMISED = [
    "add",
    "copy",
    "dates",
    "dates-de",
    "fra-eng",
    "manual",
    "mlm",
    "multi30k-de-en",
    "multi30k-en-de",
    "multi30k-en-de-long",
    "multi30k-en-fr",
    "reverse",
    "shakespeare",
    "shakespeare-best",
    "sort",
    "span",
    "sst2",
    "trec",
]
TINY = {
    "data": {"source": "reverse", "objective": "seq2seq"},
    "model": {"family": "transformer", "n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 32},
}


def test_what_is_promised_is_there():
    assert set(PROMISED) <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_says_its_command_its_minutes_and_its_figure(name):
    first, second, third = recipe_text(name).splitlines()[:3]
    assert re.fullmatch(rf"# clearhead train {name}( --from \S+)?", first)
    assert re.fullmatch(r"# \d+ minutes? on two cores", second)
    assert third.startswith("# ")
    assert recipe_header(name).about
    recipe = read_recipe(name, {})
    if recipe.eval.expect is None:
        assert "not measured yet" in third
    else:
        stated = [float(figure) for figure in re.findall(r"\d+\.?\d*", third)]
        assert recipe.eval.expect in stated


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_read_back_as_it_was(name):
    recipe = read_recipe(name, {})
    assert Recipe.from_dict(recipe.to_dict(), name) == recipe
    assert recipe.model.config().shape == recipe.data.objective.shape


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optim.lrr": 1}, 'no setting "lrr". Did you mean "lr"'),
        ({"lr": 1}, "Did you mean optim.lr"),
        ({"optin.lr": 1}, 'no section "optin". Did you mean "optim"'),
        ({"model.n_layer": 3}, 'Did you mean "n_layers"'),
        ({"model.family": "lama"}, 'Did you mean "llama"'),
        ({"data.objective": "maskd"}, 'Did you mean "masked"'),
        ({"optim.schedule": "cosin"}, 'Did you mean "cosine"'),
        ({"tokenizer": "caracters"}, 'Did you mean "characters"'),
        ({"train.steps": 0}, "train.steps must be 1 or more"),
        ({"train.steps": "many"}, "must be a whole number"),
        ({"train.average": {"kind": "ema", "decay": 2.0}}, "decay"),
        ({"data.split": 1.5}, "data.split"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest(changes, said):
    with pytest.raises(ClearheadError, match=re.escape(said)):
        read_recipe(TINY, changes)


def test_a_model_whose_family_is_misspelt():
    model = {"famly": "gpt2", "n_layers": 2}
    with pytest.raises(ClearheadError, match=r'It has "famly". Did you mean "family"'):
        read_recipe({**TINY, "model": model})


def test_a_change_reaches_into_a_short_form():
    recipe = read_recipe(TINY, {"optim.schedule": "cosine", "optim.schedule.to": 0.5})
    assert recipe.optim.schedule.to == 0.5
    assert merge({"data": {"objective": "masked"}}, {"data.objective.rate": 0.3}) == {
        "data": {"objective": {"kind": "masked", "rate": 0.3}}
    }


def test_a_recipe_lacks_nothing_it_needs():
    with pytest.raises(ClearheadError, match='lacks its section "model"'):
        Recipe.from_dict({"data": {"source": "copy"}})
    with pytest.raises(ClearheadError, match="either"):
        Recipe.from_dict(TINY | {"model": {"n_layers": 2}})
    assert set(SECTIONS) == set(read_recipe(TINY).to_dict())


def test_files_that_are_no_recipe(tmp_path: Path):
    with pytest.raises(ClearheadError, match="no recipe"):
        read_recipe(tmp_path / "gone.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("data: [")
    with pytest.raises(ClearheadError, match="is no YAML"):
        read_recipe(path)
    path.write_text("just a text")
    with pytest.raises(ClearheadError, match="no sections"):
        read_recipe(path)
    with pytest.raises(ClearheadError, match='Did you mean "shakespeare"'):
        read_recipe("shakespear")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt", "To be, or not to be.\n" * 200, "next_token"),
        ("b.csv", "text,label\n" + "good,yes\nbad,no\n" * 30, "classification"),
        ("c.tsv", "en\tfr\n" + "the cat\tle chat\n" * 30, "seq2seq"),
        ("d.jsonl", '{"text": "hello there"}\n' * 50, "next_token"),
        ("e.jsonl", '{"id": 3, "text": "hello there"}\n' * 50, "next_token"),
    ],
)
def test_a_recipe_is_guessed_from_a_file(tmp_path: Path, name, content, kind):
    (tmp_path / name).write_text(content)
    recipe = read_recipe(tmp_path / name, {"train.steps": 7})
    assert recipe.data.objective.kind == kind
    check_metric(recipe.eval.metric, kind)
    assert recipe.train.steps == 7
    assert recipe.train.minutes is None  # the guess has a budget of minutes, which is not asked for
    assert recipe.name == name[0]


def test_too_little_text_is_refused(tmp_path: Path):
    path = tmp_path / "one.txt"
    path.write_text("hello world\n")
    with pytest.raises(ClearheadError, match=r"one.txt has \d+ characters to learn from.*200"):
        read_recipe(str(path))


def test_a_context_that_was_asked_for_is_not_shortened(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("the cat sat on the mat\n" * 40)
    assert (read_recipe(str(path)).data.length or 0) < 128
    asked = read_recipe(str(path), {"model.max_len": 4096})
    assert asked.data.length is None  # as long as the model, for which the text is too short


def test_masked_text_is_batched_by_tokens_as_the_guess_says(tmp_path: Path):
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    changes = {"data.objective": "masked", "train.steps": 2, "tokenizer": "characters"}
    job = prepare(read_recipe(tmp_path / "a.txt", changes))
    batch = job.batches.batch(0)
    assert job.recipe.data.by == "tokens"
    assert batch.inputs[0].numel() <= job.recipe.train.batch


@pytest.mark.parametrize(
    ("columns", "read"),
    [
        ("id,text,label", ("text", "label")),
        ("label,idx,review", ("review", "label")),
        ("title,text,label", ("text", "label")),
        ("text,label,fine", ("text", "label")),
        ("premise,hypothesis,label", ("premise", "hypothesis", "label")),
        ("pairID,sentence1,sentence2,label", ("sentence1", "sentence2", "label")),
        ("id,text", ("text",)),
        ("text,author", ("text",)),
        ("id,en,de", ("en", "de")),
        ("en,id", ("en", "id")),
    ],
)
def test_the_columns_that_are_read(tmp_path: Path, columns, read):
    """An id is not a text, but Indonesian is."""
    names = columns.split(",")
    rows = [",".join(_cell(name, names, i) for name in names) for i in range(20)]
    (tmp_path / "a.csv").write_text("\n".join([columns, *rows]))
    assert read_recipe(tmp_path / "a.csv").data.objective.columns == read


@pytest.mark.parametrize("columns", ["title,body,label", "en,de,fr", "id,review", "id,label"])
def test_columns_that_could_be_read_in_more_than_one_way(tmp_path: Path, columns):
    names = columns.split(",")
    rows = [",".join(_cell(name, names, i) for name in names) for i in range(20)]
    (tmp_path / "a.csv").write_text("\n".join([columns, *rows]))
    with pytest.raises(ClearheadError, match=rf"{', '.join(names)}.*data\.objective"):
        read_recipe(tmp_path / "a.csv")
    said = {"data.objective": {"kind": "classification", "text": names[0], "label": names[1]}}
    objective = read_recipe(tmp_path / "a.csv", said).data.objective
    assert objective.columns == (names[0], names[1])


def _cell(name: str, names: list[str], i: int) -> str:
    """An id where the column is one of ids, else words."""
    ids = ("id", "idx", "pairID")
    return str(i) if name in ids and names != ["en", "id"] else f"some words {i}"


@pytest.mark.parametrize(
    ("objective", "family", "metric", "said"),
    [
        ("seq2seq", "transformer", "blue", 'Did you mean "bleu"'),
        ("seq2seq", "transformer", "accuracy", "It has: loss, perplexity, bleu"),
        ("next_token", "gpt2", "bleu", "bits_per_character"),
    ],
)
def test_a_figure_that_nobody_measures_is_refused(objective, family, metric, said, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    source = "reverse" if objective == "seq2seq" else str(tmp_path / "a.txt")
    sizes = {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 32}
    recipe = read_recipe(
        {
            "data": {"source": source, "objective": objective},
            "model": {"family": family, **sizes},
            "eval": {"metric": metric},
        }
    )
    with pytest.raises(ClearheadError, match=re.escape(said)):
        prepare(recipe)


@pytest.mark.parametrize("name", recipe_names())
def test_the_figure_of_a_recipe_is_measured(name):
    recipe = read_recipe(name)
    check_metric(recipe.eval.metric, recipe.data.objective.kind)


def test_noam_has_the_models_width_and_the_rate_of_the_formula(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    table = TINY | {"data": {"source": "reverse:longest=4", "objective": "seq2seq"}}
    recipe = prepare(read_recipe(table, {"optim.schedule": "noam", "optim.warmup": 10})).recipe
    assert recipe.optim.lr == 1.0
    assert recipe.optim.schedule.d_model == 16
    assert Recipe.from_dict(recipe.to_dict(), recipe.name) == recipe
    assert recipe.optim.schedule.factor(10, 100, 10) == pytest.approx((16 * 10) ** -0.5)
    by_hand = {"optim.schedule": {"kind": "noam", "d_model": 512}, "optim.lr": 2.0}
    recipe = prepare(read_recipe(table, by_hand)).recipe
    assert (recipe.optim.lr, recipe.optim.schedule.d_model) == (2.0, 512)
    tuned = read_recipe(table, {"model.from": "somewhere", "optim.schedule": "noam"})
    assert tuned.optim.lr == 1.0


def test_a_type_of_numbers_that_ends_the_program_is_refused(monkeypatch):
    """A child process tries it: here it dies, as on processors that promise too much."""
    asked = []

    def dies(probes):
        asked.append(probes)
        torch_here = Torch("2.13.0", 2, "AVX512", ("cpu",), cuda_build=False, cuda_bf16=False)
        return Report(torch_here, Roofs(), died_in=probes[0], reason="Illegal instruction")

    monkeypatch.setattr(room, "measure", dies)
    cpu = torch.device("cpu")
    for precision in ("bf16", "fp16"):
        with pytest.raises(ClearheadError, match=f"A {precision} matrix product ends the program"):
            room.check_precision(MachineConfig(precision=precision), cpu)
    assert asked == [("bf16",), ("fp16",)]
    room.check_precision(MachineConfig(), cpu)
    room.check_precision(MachineConfig(precision="bf16"), torch.device("cuda"))
    assert len(asked) == 2
    with pytest.raises(ClearheadError, match="Stay with fp32"):
        open_run(read_recipe(TINY, {"train.machine.precision": "bf16"}), None)


@pytest.mark.parametrize(("every", "evaluation"), [(10, 1.0), (500, 1.0), (500, 0.01)])
def test_a_budget_counts_the_checkpoints_that_are_made(every, evaluation):
    changes = {"train.minutes": 5, "train.eval_every": 50, "train.checkpoint_every": every}
    speed = Speed(0.1, evaluation, 2.0, 3.0)
    train = decide(read_recipe(TINY, changes), speed, 300).train
    saved = -(-train.steps // train.checkpoint_every)
    evaluated = -(-train.steps // train.eval_every)
    seconds = 3 + 0.1 * train.steps + evaluation * evaluated + 2 * saved
    assert 0.93 * 300 < seconds <= 300


def test_a_budget_says_that_measuring_comes_on_top(monkeypatch, tmp_path):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    monkeypatch.setattr(budget, "measure_speed", lambda job, seconds: Speed(0.2, 0.1, 0.0, 0.0))
    for metric, more in (("loss", ""), ("bleu", ", plus measuring bleu at the end")):
        table = TINY | {"data": {"source": "reverse:longest=4", "objective": "seq2seq"}}
        job = prepare(read_recipe(table, {"train.minutes": 1, "eval.metric": metric}))
        _, said = budget.fit_budget(job)
        assert re.search(r"evaluated every \d+(.*)$", said)[1] == more


@pytest.mark.parametrize(("batch", "same"), [(64, "of the same"), (67, "of nearly the same")])
def test_a_batch_that_does_not_fit_names_one_that_does(monkeypatch, tmp_path, batch, same):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    table = TINY | {"data": {"source": "reverse:longest=4", "objective": "seq2seq"}}
    job = prepare(read_recipe(table, {"train.batch": batch}))
    need = room.predict_need(job, torch.device("cpu"))
    free = int((need.state + 33 * need.row) / room.MARGIN)
    monkeypatch.setattr(room, "free_memory", lambda device: free)
    with pytest.raises(ClearheadError, match=f"is a step {same} size") as refused:
        room.check_room(job, torch.device("cpu"))
    rows, parts = re.findall(r"train.(?:batch|accumulate)=(\d+)", str(refused.value))
    assert (int(rows) * int(parts) == batch) == (same == "of the same")


def test_a_file_that_says_nothing_about_its_use_is_refused(tmp_path: Path):
    (tmp_path / "x.csv").write_text("number\n1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n")
    with pytest.raises(ClearheadError, match=r"data\.objective"):
        read_recipe(tmp_path / "x.csv")


def test_the_device_is_the_one_that_doctor_advises(monkeypatch):
    found = ["cpu", "cuda:0 (Some GPU)", "cuda:1 (Some GPU)"]
    for devices, wanted in ((found, "cuda"), (["cpu", "mps"], "mps"), (["cpu"], "cpu")):
        monkeypatch.setattr(machine, "find_devices", lambda devices=devices: devices)
        picked = machine.pick_device(MachineConfig())
        assert picked == torch.device(wanted)
        assert picked.index is None  # each process takes its own


def test_the_choice_of_numbers_has_a_reason():
    cpu = torch.device("cpu")
    said = machine.describe_choice(MachineConfig(), cpu)
    assert re.fullmatch(r"fp32 \(exact; .*doctor.*\), no torch.compile: .*", said)
    said = machine.describe_choice(MachineConfig(precision="bf16", compile=True), cpu)
    assert said == "bf16 (as set), torch.compile first"


def test_a_guess_goes_by_characters_whether_they_lie_in_one_text_or_in_many(tmp_path: Path):
    (tmp_path / "one.txt").write_text("hello there" * 50)
    (tmp_path / "many.jsonl").write_text('{"text": "hello there"}\n' * 50)
    one, many = read_recipe(tmp_path / "one.txt"), read_recipe(tmp_path / "many.jsonl")
    assert one.data.length == many.data.length == 45 * 11 // 20
    assert one.train == many.train
    assert many.train.patience == 5


def test_numbers_may_be_written_as_people_write_them(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    model = "{family: transformer, n_layers: 1, d_model: 16, n_heads: 2}"
    path.write_text(
        "data: {source: reverse, objective: seq2seq}\n"
        f"model: {model}\noptim: {{lr: 3e-3, weight_decay: 1E-2, adam_lr: 2.5e-4}}\n"
    )
    optim = read_recipe(path).optim
    assert (optim.lr, optim.weight_decay, optim.adam_lr) == (3e-3, 1e-2, 2.5e-4)


def test_files_that_are_there_are_not_taken_for_a_misspelt_recipe(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.en").write_text("one\ntwo\n")
    Path("a.de").write_text("eins\n")
    with pytest.raises(ClearheadError, match="same number of lines"):
        read_recipe("a.en,a.de")


def test_a_run_knows_in_what_it_differs_from_its_recipe():
    for name in recipe_names():
        assert changed_settings(read_recipe(name)) == []
    changed = read_recipe("shakespeare", {"model.family": "rnn", "train.eval_every": 7})
    # What both families have a setting for stays, and what only the first one has goes.
    assert changed.model.settings == {"n_layers": 4, "d_model": 128, "max_len": 128}
    keys = changed_settings(changed)
    assert keys[:2] == ["model.family", "model.n_heads"]
    assert all(key.startswith("model.") for key in keys)
    assert changed_settings(dataclasses.replace(changed, name="mine")) == []
    few = read_recipe("fra-eng", {"eval.beams": 1, "train.machine.threads": 1})
    assert changed_settings(few) == ["eval.beams"]
    own = read_recipe("shakespeare", {"eval.expect": 7.0, "model.n_layers": 1})
    assert changed_settings(own) == []  # somebody's own, of the same name
    with pytest.raises(ClearheadError, match="There is no model"):
        read_recipe("shakespeare", {"model.family": ["a"]})
