"""Another head on a body that others trained.

The body stays as it is, the head is drawn, and the report says which is which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import clearhead as ch
from architectures import ROWS, randomise
from clearhead.errors import ClearheadError
from clearhead.weights.convert import Report

LABELS = {"kind": "classification", "n_labels": 3}
TAGS = {"kind": "tagging", "n_labels": 3}
MEAN = {"kind": "pooling", "mode": "mean", "normalise": True}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a row of the table; nobody writes there."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            row = next(row for row in ROWS if row.name == name)
            made[name] = tmp_path_factory.mktemp("hf")
            randomise(row.make()).save_pretrained(made[name])
        return made[name]

    return of


def body(model: ch.Model) -> dict[str, torch.Tensor]:
    return {k: t for k, t in model.net.state_dict().items() if not k.startswith("head.")}


def head(model: ch.Model) -> dict[str, torch.Tensor]:
    return {k: t for k, t in model.net.state_dict().items() if k.startswith("head.")}


def reloaded(folder: Path, new: Any) -> tuple[ch.Model, Report]:
    """With the new head; the body must be that of the file."""
    own, (model, report) = ch.load(folder), ch.load(folder, head=new, report=True)
    assert body(model).keys() == body(own).keys()
    assert all(tensor.equal(body(own)[key]) for key, tensor in body(model).items())
    assert all(tensor.isfinite().all() for tensor in head(model).values())
    assert set(report.drawn) <= set(head(model))
    file = load_file(folder / "model.safetensors")
    assert report.became.keys() | report.dropped.keys() == file.keys()
    assert not report.became.keys() & report.dropped.keys()
    return model, report


PROJ = {"head.proj.weight", "head.proj.bias"}
DENSE = {"head.pooling.dense.weight", "head.pooling.dense.bias"}
# The file's model, the new head, what is drawn, what of the file is left out, the output's width
CASES: dict[str, tuple[str, Any, set[str], set[str], int]] = {
    "gpt2 to labels": ("gpt2 lm", LABELS, {"head.proj.weight"}, set(), 3),
    "gpt2 to tags": ("gpt2 lm", TAGS, PROJ, set(), 3),
    "gpt2 to a span": ("gpt2 lm", "span", PROJ, set(), 2),
    "gpt2 untied to labels": (
        "gpt2 untied lm", LABELS, {"head.proj.weight"}, {"lm_head.weight"}, 3,
    ),
    "gpt2 states to labels": ("gpt2 none", LABELS, {"head.proj.weight"}, set(), 3),
    "gpt2 states to text": ("gpt2 none", "lm", set(), set(), 99),
    "gpt2 to vectors": ("gpt2 lm", MEAN, set(), set(), 32),
    "llama to labels": ("llama lm", LABELS, {"head.proj.weight"}, {"lm_head.weight"}, 3),
    "llama to tags": ("llama lm", TAGS, PROJ, {"lm_head.weight"}, 3),
    "llama states to text": (
        "llama none", {"kind": "lm", "tied": False}, {"head.proj.weight"}, set(), 99,
    ),
    "llama labels to tags": ("llama classification", TAGS, PROJ, {"score.weight"}, 3),
    "llama tags to labels": (
        "llama tagging", LABELS, {"head.proj.weight"}, {"score.weight", "score.bias"}, 3,
    ),
    "neox to labels": ("neox lm", LABELS, {"head.proj.weight"}, {"embed_out.weight"}, 3),
    "bert masked to labels": (
        "bert masked_lm", LABELS, PROJ | DENSE,
        {
            "cls.predictions.bias",
            "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
            "cls.predictions.transform.LayerNorm.weight",
            "cls.predictions.transform.LayerNorm.bias",
        }, 3,
    ),
    "bert states to labels": ("bert none", LABELS, PROJ, set(), 3),
    "bert states to tags": (
        "bert none", TAGS, PROJ, {"pooler.dense.weight", "pooler.dense.bias"}, 3,
    ),
    "bert states to a span": (
        "bert none", "span", PROJ, {"pooler.dense.weight", "pooler.dense.bias"}, 2,
    ),
    "bert labels to more labels": (
        "bert classification", LABELS | {"n_labels": 7}, PROJ,
        {"classifier.weight", "classifier.bias"}, 7,
    ),
    "bert tags to as many labels": (
        "bert tagging", LABELS, PROJ | DENSE, {"classifier.weight", "classifier.bias"}, 3,
    ),
    "roberta masked to labels": (
        "roberta masked_lm", LABELS, PROJ | DENSE,
        {
            "lm_head.bias", "lm_head.dense.weight", "lm_head.dense.bias",
            "lm_head.layer_norm.weight", "lm_head.layer_norm.bias",
        }, 3,
    ),
    "roberta labels to more labels": (
        "roberta classification", LABELS | {"n_labels": 5}, PROJ,
        {"classifier.out_proj.weight", "classifier.out_proj.bias"}, 5,
    ),
    "distilbert states to labels": ("distilbert none", LABELS, PROJ | DENSE, set(), 3),
    "distilbert labels to vectors": (
        "distilbert classification", MEAN, set(),
        {"pre_classifier.weight", "pre_classifier.bias", "classifier.weight", "classifier.bias"},
        32,
    ),
    "vit to more labels": (
        "vit classification", LABELS | {"n_labels": 10}, PROJ,
        {"classifier.weight", "classifier.bias"}, 10,
    ),
    "vit states to labels": (
        "vit none", LABELS, PROJ, {"pooler.dense.weight", "pooler.dense.bias"}, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_another_head(name, folder_of):
    row, new, drawn, left_out, width = CASES[name]
    model, report = reloaded(folder_of(row), new)
    assert set(report.drawn) == drawn
    assert set(report.dropped) == left_out
    inputs = next(r for r in ROWS if r.name == row).feed.whole().ours
    assert model(*inputs).shape[-1] == width
    # What is kept of the file's head is kept exactly; what is drawn is not the file's.
    assert set(head(model)) - set(report.drawn) - set(report.tied) == {
        ours for names in report.became.values() for ours in names if ours.startswith("head.")
    }


def test_the_pooler_of_a_body_serves_the_new_labels(folder_of):
    """BERT's classifier stands on the pooler, which a plain body has: it is used, not drawn."""
    model, report = reloaded(folder_of("bert none"), LABELS)
    pooler = ch.load(folder_of("bert none"), head={"kind": "pooling", "dense": True})
    assert model.net.head.pooling.dense.weight.equal(pooler.net.head.dense.weight)
    assert report.became["pooler.dense.weight"] == ("head.pooling.dense.weight",)


def test_the_new_head_is_drawn_in_the_style_of_the_family(folder_of):
    folder = folder_of("gpt2 lm")  # making it draws too
    torch.manual_seed(1)
    first = ch.load(folder, head=LABELS | {"n_labels": 50})
    second = ch.load(folder, head=LABELS | {"n_labels": 50})
    assert 0.015 < first.net.head.proj.weight.std() < 0.025
    assert not first.net.head.proj.weight.equal(second.net.head.proj.weight)
    torch.manual_seed(1)
    again = ch.load(folder, head=LABELS | {"n_labels": 50})
    assert again.net.head.proj.weight.equal(first.net.head.proj.weight)


def test_the_head_that_the_file_has_is_not_drawn(folder_of):
    model, report = ch.load(folder_of("bert classification"), head=LABELS, report=True)
    assert report == ch.load(folder_of("bert classification"), report=True)[1]
    assert report.drawn == ()
    assert model.config.head.n_labels == 3


def test_a_new_head_trains_and_survives_our_folder_and_theirs(folder_of, tmp_path):
    model = ch.load(folder_of("gpt2 lm"), head=LABELS)
    ids = torch.randint(5, 90, (4, 7))
    model.net.train()
    loss = torch.nn.functional.cross_entropy(model(ids), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.net.parameters())
    model.net.eval()
    model.save(tmp_path / "own")
    ch.export(model, tmp_path / "hf")
    for folder in ("own", "hf"):
        again = ch.load(tmp_path / folder)
        assert again.config.head == model.config.head
        assert again(ids).equal(model(ids))


def test_a_sentence_folder_with_another_head(folder_of, tmp_path):
    """What the user asks for goes before what modules.json says."""
    row = next(row for row in ROWS if row.name.startswith("sentence-transformers"))
    randomise(row.make()).save_pretrained(tmp_path)
    row.beside(tmp_path)
    assert ch.load(tmp_path).config.head.kind == "pooling"
    assert ch.load(tmp_path, head=LABELS).config.head.kind == "classification"


@pytest.mark.parametrize(
    ("row", "new", "message"),
    [
        ("gpt2 lm", "classify", 'unknown kind "classify".*Did you mean "classification"'),
        ("gpt2 lm", {"kind": "classification", "n_labels": 0}, "n_labels must be 1 or more"),
        ("gpt2 lm", {"kind": "classification", "labels": 3}, 'no setting "labels"'),
        ("gpt2 lm", {"n_labels": 3}, "names no kind"),
        ("gpt2 lm", 3, "head must be one of"),
        ("t5 v1.0", "none", "head must be one of"),
        ("t5 v1.0", LABELS, 'head is of unknown kind "classification"'),
        ("bart", LABELS, 'no setting "head"'),
        ("whisper", LABELS, 'no setting "head"'),
        ("clip", LABELS, 'no setting "head"'),
        ("llama lm", {"kind": "lm", "tied": True}, "two different tensors in the file"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_heads_that_cannot_be(row, new, message, folder_of):
    with pytest.raises(ClearheadError, match=message):
        ch.load(folder_of(row), head=new)


# --- folders of our own, and single files ---

# What a folder of ours keeps of its head: the parts that have one name in the file's key table too.
OWN: dict[str, tuple[str, Any, set[str], set[str]]] = {
    "gpt2 to labels": ("gpt2 lm", LABELS, {"head.proj.weight"}, set()),
    "gpt2 untied to labels": (
        "gpt2 untied lm", LABELS, {"head.proj.weight"}, {"head.proj.weight"},
    ),
    "gpt2 to bare states": ("gpt2 untied lm", "none", set(), {"head.proj.weight"}),
    "gpt2 states to text": ("gpt2 none", "lm", set(), set()),
    "llama labels to tags": ("llama classification", TAGS, PROJ, {"head.proj.weight"}),
    "bert masked to labels": (
        "bert masked_lm", LABELS, PROJ | DENSE,
        {
            "head.proj.bias", "head.dense.weight", "head.dense.bias",
            "head.norm.weight", "head.norm.bias",
        },
    ),
    "bert labels to more labels": (
        "bert classification", LABELS | {"n_labels": 7}, PROJ, PROJ,
    ),
    "bert labels to the pooler": (
        "bert classification", {"kind": "pooling", "dense": True}, set(), PROJ,
    ),
    "vit to more labels": ("vit classification", LABELS | {"n_labels": 10}, PROJ, PROJ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_another_head_on_our_own_folder(name, folder_of, tmp_path):
    row, new, drawn, left_out = OWN[name]
    ch.load(folder_of(row)).save(tmp_path / "own")
    model, report = reloaded(tmp_path / "own", new)
    assert set(report.drawn) == drawn
    assert set(report.dropped) == left_out
    assert report.tied == dict(model.net.ties)
    # The same as if the head had been put on the folder that it came from.
    foreign = ch.load(folder_of(row), head=new)
    assert model.config == foreign.config
    shared = head(model).keys() - drawn
    assert all(head(model)[key].equal(head(foreign)[key]) for key in shared)
    inputs = next(r for r in ROWS if r.name == row).feed.whole().ours
    assert model(*inputs).shape == foreign(*inputs).shape


def test_the_pooler_of_our_folder_serves_the_new_labels(folder_of, tmp_path):
    body = ch.load(folder_of("bert none"), head={"kind": "pooling", "dense": True})
    body.save(tmp_path / "own")
    model, report = ch.load(tmp_path / "own", head=LABELS, report=True)
    assert model.net.head.pooling.dense.weight.equal(body.net.head.dense.weight)
    assert report.became["head.dense.weight"] == ("head.pooling.dense.weight",)
    assert set(report.drawn) == PROJ


def test_the_head_that_our_folder_has_is_not_drawn(folder_of, tmp_path):
    own = ch.load(folder_of("bert classification"))
    own.save(tmp_path / "own")
    model, report = ch.load(tmp_path / "own", head=LABELS, report=True)
    assert report == Report()
    assert model.net.head.proj.weight.equal(own.net.head.proj.weight)


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_a_new_head_is_drawn_from_the_seed(own, folder_of, tmp_path):
    folder = folder_of("gpt2 lm")
    if own:
        ch.load(folder).save(tmp_path / "own")
        folder = tmp_path / "own"
    state = torch.get_rng_state()
    first, again, other = (ch.load(folder, head=LABELS, seed=seed) for seed in (1, 1, 2))
    assert torch.get_rng_state().equal(state)
    weight = first.net.head.proj.weight
    assert weight.equal(again.net.head.proj.weight)
    assert not weight.equal(other.net.head.proj.weight)


@pytest.mark.parametrize("own", [False, True], ids=["theirs", "ours"])
def test_labels_are_named_with_the_head(own, folder_of, tmp_path):
    folder = folder_of("gpt2 classification")
    if own:
        ch.load(folder).save(tmp_path / "own")
        folder = tmp_path / "own"
    names = ["bad", "so so", "good", "perfect"]
    model = ch.load(folder, head="classification", labels=names, seed=0)
    assert model.config.head.n_labels == 4
    assert model.labels == names
    model.save(tmp_path / "new")
    assert ch.load(tmp_path / "new").labels == names
    ch.export(model, tmp_path / "hf")
    assert ch.load(tmp_path / "hf").labels == names
    # Other labels without names have none; as many as before may be given names.
    assert ch.load(tmp_path / "new", head=LABELS).labels == []
    assert ch.load(tmp_path / "new", labels=names[::-1]).labels == names[::-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": ["a", "b"]}, "2 labels are named .*has 0"),
        ({"labels": ["a", "b"], "head": LABELS}, "2 labels are named .*has 3"),
        ({"labels": ["a", "b"], "head": "lm"}, 'no setting "n_labels"'),
        ({"labels": "ab", "head": "classification"}, "labels is a list of names"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_labels_that_do_not_fit(more, message, folder_of):
    with pytest.raises(ClearheadError, match=message):
        ch.load(folder_of("gpt2 lm"), **more)


def test_bare_states(folder_of, tmp_path):
    ids = torch.randint(5, 90, (2, 7))
    for row in ("gpt2 lm", "bert masked_lm"):
        model = ch.load(folder_of(row))
        model.save(tmp_path / row)
        for folder in (folder_of(row), tmp_path / row):
            for none in ("none", {"kind": "none"}):
                bare = ch.load(folder, head=none)
                assert bare.config.head is None
                assert bare(ids).shape == (2, 7, 32)
                if row == "gpt2 lm":
                    logits = bare(ids) @ bare.net.embed.tokens.weight.T
                    torch.testing.assert_close(logits, model(ids))


def test_a_gguf_file_with_another_head(folder_of, tmp_path):
    model = ch.load(folder_of("llama lm"))
    ch.export(model, tmp_path / "a.gguf", to="gguf", dtype="f32")
    labels, report = ch.load(tmp_path / "a.gguf", head=LABELS, report=True)
    assert report.drawn == ("head.proj.weight",)
    assert report.dropped["output.weight"] == "of the file's own head, which was replaced"
    assert report.became["token_embd.weight"] == ("embed.tokens.weight",)
    assert labels(torch.randint(5, 90, (2, 7))).shape == (2, 3)
