"""Recipes: those that come along, those that are guessed, and those with a mistake in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clearhead.errors import ClearheadError
from clearhead.recipes import recipe_names, recipe_text
from clearhead.training.recipe import SECTIONS, Recipe, merge
from clearhead.training.run import read_recipe

PROMISED = [
    "add",
    "copy",
    "dates",
    "fra-eng",
    "manual",
    "mlm",
    "multi30k-de-en",
    "multi30k-en-de",
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
    ],
)
def test_a_recipe_is_guessed_from_a_file(tmp_path: Path, name, content, kind):
    (tmp_path / name).write_text(content)
    recipe = read_recipe(tmp_path / name, {"train.steps": 7})
    assert recipe.data.objective.kind == kind
    assert recipe.train.steps == 7
    assert recipe.name == name[0]


def test_a_file_that_says_nothing_about_its_use_is_refused(tmp_path: Path):
    (tmp_path / "x.csv").write_text("number\n1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n")
    with pytest.raises(ClearheadError, match=r"data\.objective"):
        read_recipe(tmp_path / "x.csv")
