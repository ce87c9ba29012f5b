"""Runs that start from a model: its weights, its tokeniser, another head, fewer weights that move.

Every model is tiny and random, so what is asserted is which weights moved, and what was saved.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.cli.main import main
from clearhead.errors import ClearheadError
from clearhead.training.evaluate import evaluate
from clearhead.training.folder import RunFolder
from clearhead.training.job import prepare
from clearhead.training.loop import Trainer
from clearhead.training.optim import build_optimisers
from clearhead.training.recipe import Recipe
from clearhead.training.run import open_run, read_recipe
from clearhead.training.tune import LORA_RATE, RATE, describe_start
from processes import digest, text

WORDS = {"good": "the cat sat on a mat", "bad": "two dogs run far away"}
TRAIN = {
    "steps": 6,
    "batch": 8,
    "eval_every": 3,
    "checkpoint_every": 2,
    "machine": {"device": "cpu", "threads": 1},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Texts with labels, which words tell apart."""
    path = tmp_path_factory.mktemp("data") / "reviews.tsv"
    rows = []
    for i in range(80):
        label = ("good", "bad")[i % 2]
        words = WORDS[label].split()
        rows.append(f"{' '.join(words[i % 3 : i % 3 + 3] * (1 + i % 4))}\t{label}\n")
    path.write_text("text\tlabel\n" + "".join(rows))
    return path


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """The run of a tiny masked language model."""
    return pretrained(tmp_path_factory.mktemp("own"), "bert", "masked")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    """The run of a tiny decoder."""
    return pretrained(tmp_path_factory.mktemp("decoder"), "llama", "next_token")


def pretrained(folder: Path, family: str, objective: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(folder / "cache"))
        (folder / "text.txt").write_text(text())
        recipe = {
            "data": {"source": str(folder / "text.txt"), "objective": objective},
            "tokenizer": "characters",
            "model": {
                "family": family,
                "n_layers": 2,
                "d_model": 16,
                "n_heads": 2,
                "max_len": 24,
                "dropout": 0.1,
            },
            "train": {**TRAIN, "steps": 2},
        }
        for _ in ch.train(recipe, folder / "run"):
            pass
    return folder / "run"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """A tiny random BERT as transformers saves it, with a tokeniser."""
    return saved_by_transformers(tmp_path_factory.mktemp("bert"), "BertForMaskedLM")


def saved_by_transformers(folder: Path, name: str, **more: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    words = sorted({word for line in WORDS.values() for word in line.split()})
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
        **more,
    )
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def settings(table: Path, source: Path, **changes: Any) -> Recipe:
    recipe = {
        "data": {"source": str(table), "objective": {"kind": "classification"}},
        "model": {"from": str(source)},
        "train": TRAIN,
    }
    return read_recipe(recipe, changes)


def weights(model: ch.Model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.net.named_parameters()}


def moved(trainer: Trainer) -> set[str]:
    """The parameters that a run changes."""
    before = weights(trainer.job.model)
    for _ in trainer.steps():
        pass
    after = weights(trainer.job.model)
    return {name for name in before if not before[name].equal(after[name])}


def logits(model: ch.Model, words: str = "the cat sat on a mat") -> torch.Tensor:
    assert model.tokenizer is not None
    with torch.no_grad(), model.net.at_rest():
        return model.net(torch.tensor([model.tokenizer.encode(words)]))


# --- what a recipe becomes ---


def test_from_replaces_the_model_the_tokeniser_and_the_rates():
    for changes in ({"model": {"from": "some/model"}}, {"model.from": "some/model"}):
        recipe = read_recipe("sst2", {**changes, "optim.clip": 0.5})
        assert recipe.model.to_dict() == {"from": "some/model"}
        assert recipe.tokenizer.kind == "ready"
        optim = recipe.optim
        assert (optim.name, optim.lr, optim.schedule.kind) == ("adamw", RATE, "linear")
        assert (optim.warmup, optim.weight_decay, optim.clip) == (50, 0.01, 0.5)
        assert recipe.data.objective.kind == "classification"
        assert recipe.train.patience == 4


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"train.steps": 100}, "warmup", 10),
        ({"train.steps": 100, "optim.warmup": 3}, "warmup", 3),
        ({"train.minutes": 2}, "warmup", 50),
        ({"optim.lr": 1e-3}, "lr", 1e-3),
        ({"train.lora": {"rank": 2}}, "lr", LORA_RATE),
        ({"train.lora.rank": 2, "optim.lr": 1e-4}, "lr", 1e-4),
        ({"optim.name": "adam"}, "name", "adam"),
    ],
)
def test_what_was_set_by_hand_stays(changes, name, expected):
    recipe = read_recipe("sst2", {"model": {"from": "some/model"}, **changes})
    assert getattr(recipe.optim, name) == expected


def test_a_recipe_that_starts_from_a_model_keeps_its_rates(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: {source: sst2, objective: classification}\nmodel: {from: a/b}\noptim: {lr: 0.001}\n"
    )
    assert read_recipe(path).optim.lr == 0.001
    assert read_recipe(path).optim.schedule.kind == "linear"
    other = read_recipe(path, {"model": {"from": "c/d"}})
    assert (other.model.source, other.optim.lr) == ("c/d", 0.001)
    assert Recipe.from_dict(other.to_dict()) == Recipe.from_dict(other.to_dict())
    assert read_recipe("sst2").optim.lr == 0.001  # and new weights keep theirs
    assert read_recipe("sst2").tokenizer.kind == "bpe"


# --- heads ---


def test_from_a_run_of_ours(table, own, tmp_path):
    folder = RunFolder(tmp_path / "run")
    said: list[str] = []
    trainer = open_run(settings(table, own), folder, say=said.append)
    start, model = ch.load(own), trainer.job.model
    body = {name for name in weights(start) if not name.startswith("head.")}
    assert body
    assert all(weights(model)[name].equal(weights(start)[name]) for name in body)
    assert model.tokenizer.backend.to_str() == start.tokenizer.backend.to_str()
    assert model.labels == ["bad", "good"]
    assert {"head.proj.weight", "head.proj.bias"} <= set(trainer.job.drawn)
    assert f"starts from {own}: " in said[0]
    assert "adamw, lr 5e-05, linear, 1 steps of warm-up" in said[0]
    assert trainer.job.length == 24
    assert trainer.job.objective.max_len == 24  # longer texts are cut, not left out
    assert trainer.job.batches.left_out == 0
    assert moved(trainer) == set(weights(model))
    finished = trainer.finish()
    opened = ch.load(folder.path)
    assert digest(weights(opened)) == digest(weights(finished))
    assert sum(opened.classify("the cat").values()) == pytest.approx(1)


def test_from_a_folder_of_transformers(table, foreign):
    job = prepare(settings(table, foreign, **{"optim.lr": 1e-2, "train.steps": 60}))
    start = ch.load(foreign)
    assert weights(job.model)["embed.tokens.weight"].equal(weights(start)["embed.tokens.weight"])
    assert job.length == 20
    trainer = Trainer(job)
    for _ in trainer.steps():
        pass
    model = trainer.finish()
    assert next(iter(model.classify("the cat sat"))) == "good"
    assert next(iter(model.classify("dogs run far"))) == "bad"


def test_the_new_head_is_a_function_of_the_seed(table, foreign):
    first, same = (weights(prepare(settings(table, foreign)).model) for _ in range(2))
    other = weights(prepare(settings(table, foreign, **{"train.seed": 1})).model)
    assert digest(first) == digest(same)
    assert not first["head.proj.weight"].equal(other["head.proj.weight"])
    assert first["embed.tokens.weight"].equal(other["embed.tokens.weight"])


@pytest.mark.filterwarnings("ignore:.* texts have more than the")
def test_a_decoder_tells_texts_apart_too(table, decoder, tmp_path):
    recipe = settings(table, decoder, **{"optim.lr": 1e-2})
    trainer = open_run(recipe, RunFolder(tmp_path / "run"))
    assert trainer.job.drawn == ("head.proj.weight",)
    assert moved(trainer)
    model = trainer.finish()
    assert set(model.classify("the cat")) == {"good", "bad"}
    from clearhead.data.corpus import open_corpus

    scores = evaluate(model, trainer.job.objective, open_corpus(str(table)), "valid")
    assert 0 <= scores["accuracy"].value <= 1


def test_a_packed_model_does_not_learn(decoder, tmp_path):
    ch.load(decoder).fast("int8").save(tmp_path / "small")
    data = {"source": "manual", "objective": "next_token"}
    with pytest.raises(ClearheadError, match="packed as int8, to run and not to learn"):
        prepare(read_recipe({"data": data, "model": {"from": str(tmp_path / "small")}}))


def test_other_objectives_refuse_a_decoder(decoder, tmp_path):
    data = {"source": "notes", "objective": "tagging", "limit": 20}
    with pytest.raises(ClearheadError, match=r"tagging trains an encoder, and .* is a decoder"):
        prepare(read_recipe({"data": data, "model": {"from": str(decoder)}}))


@pytest.mark.parametrize(
    ("objective", "source", "kind"),
    [
        ("tagging", "notes:sentences=1", "tagging"),
        ("span_qa", "notes:sentences=1", "span"),
        ({"kind": "pairs", "first": "question", "second": "context"}, "notes", "pooling"),
        ({"kind": "classification", "text": "text", "second": "label"}, None, "classification"),
    ],
)
def test_every_head_that_reads(objective, source, kind, table, own, tmp_path):
    if source is None:  # two texts and a label
        path = tmp_path / "pairs.tsv"
        rows = [f"a cat\ta {'dog' if i % 2 else 'cat'}\t{i % 2}\n" for i in range(40)]
        path.write_text("text\tsecond\tlabel\n" + "".join(rows))
        source, objective = str(path), {"kind": "classification", "second": "second"}
    recipe = {
        "data": {"source": source, "objective": objective, "limit": 60},
        "model": {"from": str(wide(own, tmp_path))},
        "train": {**TRAIN, "steps": 2},
    }
    trainer = Trainer(prepare(read_recipe(recipe)))
    assert trainer.job.model.config.head.kind == kind
    assert "stack.blocks.0.ffn.in_proj.weight" in moved(trainer)


def wide(own: Path, folder: Path) -> Path:
    """A model with the tokeniser of `own` that reads longer texts."""
    old = ch.load(own)
    model = ch.build(old.config.changed(max_len=160), seed=0)
    model.tokenizer = old.tokenizer
    model.save(folder / "wide")
    return folder / "wide"


def test_the_same_labels_keep_the_head_and_others_do_not(table, own, tmp_path):
    for _ in ch.train(settings(table, own), tmp_path / "first"):
        pass
    first = ch.load(tmp_path / "first")
    job = prepare(settings(table, tmp_path / "first"))
    assert digest(weights(job.model)) == digest(weights(first))
    assert job.drawn == ()
    assert "nothing new" in describe_start(job)
    backwards = {"data.objective.labels": ["good", "bad"]}
    job = prepare(settings(table, tmp_path / "first", **backwards))
    assert job.objective.labels == tuple(first.labels) == ("bad", "good")
    renamed = tmp_path / "renamed.tsv"
    renamed.write_text(table.read_text().replace("good", "yes").replace("bad", "no"))
    job = prepare(settings(renamed, tmp_path / "first"))
    assert job.model.labels == ["no", "yes"]
    assert set(job.drawn) == {"head.proj.weight", "head.proj.bias"}
    old, new = weights(first), weights(job.model)
    assert {name for name in old if not old[name].equal(new[name])} == set(job.drawn)


def test_a_model_without_segments(tmp_path, foreign, own):
    """DistilBERT's tokeniser tells segments apart, and the model does not."""
    old = ch.load(own)
    model = ch.build(
        "distilbert", n_layers=1, d_model=16, n_heads=2, d_ff=16, max_len=160,
        vocab_size=old.config.vocab_size,
    )  # fmt: skip
    model.tokenizer = old.tokenizer
    model.save(tmp_path / "model")
    recipe = {
        "data": {"source": "notes", "objective": "span_qa", "limit": 40},
        "model": {"from": str(tmp_path / "model")},
        "train": {**TRAIN, "steps": 2},
    }
    trainer = Trainer(prepare(read_recipe(recipe)))
    assert "types" not in trainer.job.batches.batch(0).places
    assert moved(trainer)


# --- what moves ---


def test_a_frozen_body(table, own):
    recipe = settings(table, own, **{"optim.freeze": ["embed.*", "stack.*"]})
    trainer = Trainer(prepare(recipe))
    found = moved(trainer)
    assert found
    assert all(name.startswith("head.") for name in found)


def test_rates_by_layer(table, own):
    recipe = settings(table, own, **{"optim.layer_decay": 0.5, "optim.lr": 1.0})
    model = prepare(recipe).model
    (optimiser,) = build_optimisers(model.net, recipe.optim)
    names = {p: name for name, p in model.net.named_parameters()}
    rates = {names[p]: g["base_lr"] for g in optimiser.param_groups for p in g["params"]}
    expected = {"head.": 1.0, "stack.blocks.1.": 0.5, "stack.blocks.0.": 0.25, "embed.": 0.125}
    for name, rate in rates.items():
        assert rate == next(r for start, r in expected.items() if name.startswith(start)), name


# --- LoRA ---

LORA = {"train.lora": {"rank": 2}, "optim.lr": 5e-2}


def run_lora(table: Path, source: Path, out: Path, **changes: Any) -> tuple[Trainer, ch.Model]:
    trainer = open_run(settings(table, source, **LORA, **changes), RunFolder(out))
    for _ in trainer.steps():
        pass
    return trainer, trainer.finish()


@pytest.mark.parametrize("source", ["own", "foreign"])
def test_lora_trains_additions_and_the_head_and_saves_an_ordinary_model(
    table, source, tmp_path, request
):
    source = request.getfixturevalue(source)
    trainer = open_run(settings(table, source, **LORA), RunFolder(tmp_path / "run"))
    before = weights(trainer.job.model)
    found = moved(trainer)
    assert found == {n for n in before if ".lora_" in n or n.startswith("head.")}
    assert any(".q_proj.lora_a" in name for name in found)
    finished = trainer.finish()
    opened = ch.load(tmp_path / "run")
    assert not any("lora" in name for name in weights(opened))
    assert weights(opened).keys() == weights(ch.build(opened.config, seed=0)).keys()
    assert digest(weights(opened)) == digest(weights(finished))
    torch.testing.assert_close(logits(opened), logits(trainer.job.model), atol=1e-5, rtol=1e-5)
    still = prepare(settings(table, source)).model
    assert (logits(opened) - logits(still)).abs().max() > 1e-3
    assert opened.labels == ["bad", "good"]


def test_a_merged_model_is_exported(table, foreign, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, model = run_lora(table, foreign, tmp_path / "run")
    ch.export(ch.load(tmp_path / "run"), tmp_path / "hf", "hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        found = theirs.eval()(**tokenizer(["the cat sat on a mat"], return_tensors="pt")).logits
    torch.testing.assert_close(found, logits(model), atol=1e-5, rtol=1e-5)
    assert theirs.config.id2label == {0: "bad", 1: "good"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.patience": 5, "train.eval_every": 1},
        {"train.average": {"kind": "ema", "decay": 0.5}},
        {"train.average": {"kind": "last", "count": 2}},
    ],
    ids=["last", "patience", "ema", "mean"],
)
def test_lora_is_taken_up_again_to_the_bit(table, own, tmp_path, changes):
    _, whole = run_lora(table, own, tmp_path / "whole", **changes)
    trainer = open_run(settings(table, own, **LORA, **changes), RunFolder(tmp_path / "run"))
    losses = []
    for step in trainer.steps():
        losses.append(step.loss)
        if step.number == 3:  # left as by a kill; the checkpoint is of step 2
            break
    again = open_run(None, RunFolder(tmp_path / "run"), resume=True)
    assert again.done == 2
    for _ in again.steps():
        pass
    assert digest(weights(again.finish())) == digest(weights(whole))
    lines = [list(RunFolder(tmp_path / name).metrics()) for name in ("whole", "run")]
    figures = [[line["loss"] for line in some if "loss" in line] for some in lines]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 6
    assert digest(weights(ch.load(tmp_path / "run"))) == digest(weights(whole))


def test_freezing_holds_for_the_head_of_a_lora_too(table, own):
    recipe = settings(table, own, **LORA, **{"optim.freeze": ["head.proj.bias"]})
    assert "head.proj.bias" not in moved(Trainer(prepare(recipe)))


# --- the command line ---


@pytest.mark.filterwarnings("ignore:.* texts have more than the")
def test_the_command(table, own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    more = ["--steps", "4", "--out", "tuned", "--set", "optim.layer_decay=0.9", "train.batch=64"]
    assert main(["train", str(table), "--from", str(own), *more]) in (0, None)
    out = capsys.readouterr().out
    assert f"starts from {own}" in out
    recipe = RunFolder("tuned").read_recipe()
    assert recipe.model.to_dict() == {"from": str(own)}
    assert (recipe.optim.lr, recipe.optim.layer_decay) == (RATE, 0.9)
    assert set(ch.load("tuned").classify("the cat")) == {"good", "bad"}


# --- what the model decides ---


def test_targets_start_as_those_of_the_model_do(tmp_path):
    """BART's targets start with its end token; a run must not teach it another."""
    (tmp_path / "all.tsv").write_text("en\tde\n" + "a b c\tx y z\nc b\tz y\n" * 20)
    recipe = {
        "data": {"source": str(tmp_path / "all.tsv"), "objective": "seq2seq"},
        "tokenizer": "words",
        "model": {
            "family": "transformer",
            "n_layers": 1,
            "d_model": 16,
            "n_heads": 2,
            "max_len": 16,
        },
        "train": {**TRAIN, "steps": 2},
    }
    for _ in ch.train(recipe, tmp_path / "first"):
        pass
    model = ch.load(tmp_path / "first")
    end, pad = model.tokenizer.eos_id, model.tokenizer.pad_id
    assert end != pad
    for start, expected in ((None, pad), (end, end)):
        if start is not None:
            model.companions["generation_config.json"] = {"decoder_start_token_id": start}
        model.save(tmp_path / f"start-{start}")
        job = prepare(read_recipe({**recipe, "model": {"from": str(tmp_path / f"start-{start}")}}))
        assert set(job.batches.batch(0).inputs[1][:, 0].tolist()) == {expected}
