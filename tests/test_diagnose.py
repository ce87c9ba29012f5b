"""Diagnosis: every check finds a thing that was broken for it, and is quiet about a healthy run."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.attention.mask import All
from clearhead.attention.positions import Positions
from clearhead.cli.main import main
from clearhead.data.batch import IGNORED, Batch
from clearhead.errors import ClearheadError
from clearhead.models.base import Net
from clearhead.training.checks_attention import check_attention, look_at_heads
from clearhead.training.checks_curves import (
    check_curve,
    check_fit,
    check_spikes,
    check_start,
    find_spikes,
)
from clearhead.training.checks_data import (
    check_context,
    check_labels,
    check_leaks,
    check_left_out,
    check_padding,
    check_unknown,
    check_unused,
    check_waste,
)
from clearhead.training.checks_weights import (
    check_gradients,
    check_numbers,
    check_updates,
    compute_gradients,
    mean_factor,
    try_step,
    weights_to_watch,
)
from clearhead.training.diagnose import check_trainer, diagnose
from clearhead.training.events import Evaluated, Found, Skipped, Step
from clearhead.training.finding import Finding
from clearhead.training.folder import RunFolder
from clearhead.training.job import prepare
from clearhead.training.live import LiveDiagnosis
from clearhead.training.loop import Trainer
from clearhead.training.recipe import Recipe
from clearhead.training.schedule import Constant, WarmupStableDecay

VOCAB = 20


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def decoder(layers=2, **changes):
    sizes = {"n_layers": layers, "d_model": 32, "n_heads": 4, "vocab_size": VOCAB, "max_len": 32}
    return ch.build("llama", **{**sizes, **changes}, seed=0).net


def windows(rows=4, length=16, seed=0):
    ids = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return batch_of(ids[:, :-1], ids[:, 1:])


def batch_of(inputs, targets, **places):
    count = int((targets != IGNORED).sum())
    return Batch((inputs,), targets, places, count, inputs.numel(), inputs.numel())


def ragged(lengths=(16, 7, 3)):
    """Rows of different lengths, what is behind them padded with 0."""
    batch = windows(len(lengths))
    empty = torch.arange(16) >= torch.tensor(lengths)[:, None]
    ids, targets = batch.inputs[0].masked_fill(empty, 0), batch.targets.masked_fill(empty, IGNORED)
    at = Positions.ragged(lengths)
    return dataclasses.replace(batch_of(ids, targets, at=at), tokens=sum(lengths))


def levels(findings):
    return [finding.level for finding in findings]


def only(findings):
    (finding,) = findings
    assert finding.text
    assert finding.suggestion or finding.level == "good"
    return finding


# --- weights ---


def test_gradients_of_a_healthy_network_are_even():
    net = decoder(4)
    compute_gradients(net, windows(), "tokens")
    finding = only(check_gradients(net))
    assert finding.level == "good"
    layers = finding.details["layers"]
    assert finding.number == pytest.approx(
        layers["stack.blocks.0"] / layers["stack.blocks.3"], rel=1e-6
    )
    squares = [float(p.grad.square().sum()) for n, p in net.named_parameters() if "blocks.0." in n]
    assert layers["stack.blocks.0"] == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


@pytest.mark.parametrize(
    ("factor", "word", "level"),
    [(1e-3, "vanish", "warning"), (1e3, "explode", "warning"), (1e-7, "vanish", "bad")],
)
def test_vanishing_and_exploding_gradients(factor, word, level):
    net = decoder(2)
    compute_gradients(net, windows(), "tokens")
    for name, parameter in net.named_parameters():
        if "blocks.0." in name:
            parameter.grad *= factor
    finding = only(check_gradients(net))
    assert finding.level == level
    assert word in finding.text


def test_parameters_without_a_gradient_are_named():
    net = decoder(2)
    compute_gradients(net, windows(), "tokens")
    net.get_parameter("stack.blocks.1.ffn.in_proj.weight").grad.zero_()
    net.get_parameter("stack.blocks.1.self_attn.q_proj.weight").grad = None
    good, dead = check_gradients(net)
    assert (good.level, dead.level) == ("good", "warning")
    assert set(dead.details["dead"]) == {
        "stack.blocks.1.ffn.in_proj.weight",
        "stack.blocks.1.self_attn.q_proj.weight",
    }


def test_frozen_parameters_are_not_dead():
    net = decoder(2)
    net.embed.requires_grad_(False)
    compute_gradients(net, windows(), "tokens")
    assert levels(check_gradients(net)) == ["good"]


def test_numbers_that_are_not_finite():
    net = decoder()
    assert only(check_numbers(net, windows())).level == "good"
    with torch.no_grad():
        net.get_parameter("stack.blocks.1.ffn.in_proj.weight")[0, 0] = math.nan
    finding = only(check_numbers(net, windows()))
    assert finding.level == "bad"
    assert "stack.blocks.1.ffn.in_proj.weight" in finding.text
    compute_gradients(net, windows(), "tokens")
    assert only(check_gradients(net)).level == "bad"


@pytest.mark.parametrize(
    ("lr", "level"), [(1e-3, "good"), (1.0, "bad"), (1e-6, "warning")], ids=["fit", "high", "low"]
)
def test_updates_by_layer(lr, level):
    net = decoder()
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0)
    before = weights_to_watch(net)
    for parameter in net.parameters():  # a step of exactly lr of its length
        parameter.grad = lr * parameter.detach()
    optimiser.step()
    finding = only(check_updates(before, net))
    assert finding.level == level
    for ratio in finding.details["layers"].values():
        assert ratio == pytest.approx(lr, rel=0.1)
    if lr < 1e-3:  # said only where it is asked for
        assert only(check_updates(before, net, slow=False)).level == "good"


def test_a_step_is_tried_on_a_copy():
    net = decoder()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
    optimiser.param_groups[0]["base_lr"] = 1e-3
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    state = torch.get_rng_state()
    assert only(try_step(net, [optimiser], windows(), "tokens", 1.0, 1.0)).level == "good"
    assert all(torch.equal(p, weights[name]) for name, p in net.named_parameters())
    assert not optimiser.state
    assert torch.equal(torch.get_rng_state(), state)
    assert only(try_step(net, [optimiser], windows(), "tokens", 1e3, 1.0)).level == "bad"


def test_the_mean_rate_of_a_run():
    assert mean_factor(Constant(), 100, 0) == 1
    assert mean_factor(WarmupStableDecay(decay=1.0), 1000, 0) == pytest.approx(0.5, abs=0.01)


# --- attention ---


def scale(net, layer, heads, factor):
    """Scale the queries of some heads; their patterns become sharp."""
    weight = net.get_submodule(f"stack.blocks.{layer}.self_attn").q_proj.weight
    with torch.no_grad():
        for head in heads:
            weight.unflatten(0, (4, -1))[head] *= factor


def test_attention_of_a_healthy_network_is_mixed():
    net = decoder()
    scale(net, 0, range(4), 100)
    scale(net, 1, range(4), 100)
    batch = windows()
    finding = only(check_attention(net, batch))
    assert finding.level == "good"
    assert 0.5 < finding.number < 0.99
    assert len(finding.details["heads"]) == 8


def test_new_heads_look_at_everything_alike():
    finding = only(check_attention(decoder(), windows()))
    assert finding.level == "warning"
    assert "8 of 8 heads look at everything alike" in finding.text


def test_a_collapsed_head_is_found():
    net = decoder()
    scale(net, 0, range(4), 100)
    scale(net, 1, range(4), 100)
    scale(net, 1, [2], 1e5)
    note, good = check_attention(net, windows())
    assert (note.level, good.level) == ("note", "good")
    assert "1 of 8 heads have collapsed" in note.text
    assert "blocks.1.self_attn 2" in note.text
    scale(net, 1, [0, 1, 3], 1e5)
    finding = only(check_attention(net, windows()))
    assert finding.level == "warning"
    assert finding.number == 0.5


def test_a_dead_head_is_found():
    net = decoder()
    scale(net, 0, range(4), 100)
    scale(net, 1, range(4), 100)
    with torch.no_grad():
        net.get_submodule("stack.blocks.0.self_attn").v_proj.weight[8:16] = 0
    finding = only(check_attention(net, windows()))
    assert finding.level == "warning"
    assert "blocks.0.self_attn 1" in finding.text


@pytest.mark.parametrize("place", ["first", "itself", "previous"])
def test_where_a_head_looks(place):
    def pattern(x):
        new = torch.zeros_like(x)
        t = torch.arange(x.shape[-1])
        keys = {"first": t * 0, "itself": t, "previous": (t - 1).clamp(min=0)}[place]
        new[:, :, t, keys] = 1.0
        return new

    net = decoder()
    attention = net.get_submodule("stack.blocks.0.self_attn")
    real = attention.kernel.pattern

    def drawn(q, k, view, bias=None):
        usual = real(q, k, view, bias)
        return usual if bool((q == 0).all()) else pattern(usual)

    attention.kernel.pattern = drawn
    heads = [h for h in look_at_heads(net, windows()) if h.layer == "stack.blocks.0.self_attn"]
    assert [head.does for head in heads] == [place] * 4
    assert all(head.entropy == pytest.approx(0, abs=1e-6) for head in heads)


def test_looking_changes_nothing():
    net = decoder(dropout=0.5).train()
    state = torch.get_rng_state()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    look_at_heads(net, windows())
    check_leaks(net, windows())
    compute_gradients(net, windows(), "tokens")
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


# --- leaks ---


def test_a_causal_network_does_not_leak():
    assert only(check_leaks(decoder(), windows())).level == "good"
    assert only(check_leaks(decoder(), ragged())).level == "good"


def test_a_mask_that_leaks_is_found(monkeypatch):
    net = decoder()
    kind = net.stack.kinds[0]
    assert hasattr(kind, "mask")
    monkeypatch.setattr(kind, "mask", All())
    finding = only(check_leaks(net, windows()))
    assert finding.level == "bad"
    assert "leaks into the past" in finding.text
    assert finding.number > 0


def test_an_encoder_decoder_is_tested_on_its_target_side():
    net = ch.build("transformer", n_layers=2, d_model=32, n_heads=4, vocab_size=VOCAB, seed=0).net
    batch = windows()
    both = dataclasses.replace(batch, inputs=(torch.randint(VOCAB, (4, 9)), *batch.inputs))
    assert only(check_leaks(net, both)).level == "good"

    class Leaky(type(net)):
        def forward(self, source, target, **places):
            out = super().forward(source, target, **places)
            return out + 1e-6 * target.sum(1)[:, None, None]

    net.__class__ = Leaky
    assert only(check_leaks(net, both)).level == "bad"


def test_a_network_that_does_not_look_at_its_input():
    net = decoder()
    with torch.no_grad():
        net.embed.tokens.weight.zero_()
    assert "does not look" in only(check_leaks(net, windows())).text


def test_content_of_empty_slots():
    net, batch = decoder(), ragged()
    assert check_padding(net, [windows()]) == []
    assert only(check_padding(net, [windows(), batch])).level == "good"

    class Sums(type(net)):
        def forward(self, ids, at=None):
            return super().forward(ids, at) + ids.sum(1)[:, None, None]

    net.__class__ = Sums
    finding = only(check_padding(net, [batch]))
    assert finding.level == "bad"
    assert "empty slots" in finding.text


# --- labels ---


def test_shifted_labels():
    assert only(check_labels([windows(), ragged()], causal=True)).level == "good"


@pytest.mark.parametrize(
    ("shift", "words"),
    [(0, "not shifted: 100%"), (2, "shifted by 2"), (-1, "shifted by -1"), (None, "Only")],
)
def test_labels_that_are_not_shifted(shift, words):
    ids = windows(8).inputs[0]
    if shift is None:
        targets = torch.randint(VOCAB, ids.shape)
    else:
        targets = ids.roll(-shift, dims=1)
    finding = only(check_labels([batch_of(ids, targets)], causal=True))
    assert finding.level == "bad"
    assert words in finding.text


def test_masked_tokens_that_are_not_masked():
    ids = windows().inputs[0]
    targets = torch.where(torch.arange(16) % 4 == 0, ids, IGNORED)
    hidden = ids.masked_fill(targets != IGNORED, VOCAB)
    assert only(check_labels([batch_of(hidden, targets)], causal=False)).level == "good"
    assert only(check_labels([batch_of(ids, targets)], causal=False)).level == "bad"


# --- waste, context, tokens ---


def test_wasteful_padding():
    assert only(check_waste([windows()])).number == 0
    finding = only(check_waste([ragged((16, 2, 1))]))
    assert finding.level == "warning"
    assert finding.number == pytest.approx(1 - 19 / 48)
    assert "data.by=tokens" in finding.suggestion
    assert (
        "data.by=tokens" not in only(check_waste([ragged((16, 2, 1))], by_tokens=True)).suggestion
    )
    assert only(check_waste([ragged((16, 12, 8))])).level == "note"


class Positional(Net):
    """Knows the answer the better the further it is in the window."""

    def __init__(self, sharpness):
        super().__init__(())
        self.sharpness = sharpness

    def forward(self, ids):
        right = torch.nn.functional.one_hot(ids.roll(-1, 1), VOCAB).float()
        return right * self.sharpness[None, :, None]


def test_a_loss_that_still_falls_at_the_end_of_the_window():
    ids = windows(16).inputs[0]
    batches = [batch_of(ids, ids.roll(-1, 1))]
    finding = only(check_context(Positional(torch.linspace(0, 3, 16)), batches, 16))
    assert finding.level == "note"
    assert "longer context" in finding.suggestion
    flat = torch.tensor([0.0] * 4 + [2.0] * 12)
    assert only(check_context(Positional(flat), batches, 16)).level == "good"
    assert check_context(Positional(flat), batches, 32) == []  # no whole window


def test_unknown_and_unused_tokens():
    ids = np.array([1] * 95 + [0] * 5)
    assert only(check_unknown(ids, 0)).level == "warning"
    assert only(check_unknown(ids, 7)).level == "good"
    assert only(check_unknown(ids, None)).level == "good"
    used = np.arange(40_000) % 1000
    assert only(check_unused(used, 1000)).level == "good"
    assert only(check_unused(used, 1500)).level == "note"
    assert only(check_unused(used % 10, 300)).level == "good"  # an alphabet of bytes
    assert check_unused(used, 4000) == []  # too few tokens to say


# --- figures ---


def figures(losses, valid=()):
    lines = [{"step": i, "loss": loss, "grad_norm": 1.0} for i, loss in enumerate(losses, start=1)]
    return [*lines, *({"step": step, "valid": {"loss": loss}} for step, loss in valid)]


def noisy(count, start=4.0, end=2.0, noise=0.05, seed=0):
    dice = np.random.default_rng(seed)
    fall = end + (start - end) * np.exp(-np.arange(count) / (count / 20))
    return (fall + noise * dice.standard_normal(count)).tolist()


def test_spikes_are_found_where_they_are():
    losses = noisy(400)
    assert only(check_spikes(figures(losses))).level == "good"
    losses[250] = 6.0
    ((step, loss, usual),) = find_spikes(list(enumerate(losses, start=1)))
    assert (step, loss) == (251, 6.0)
    assert usual == pytest.approx(2.0, abs=0.1)
    finding = only(check_spikes(figures(losses)))
    assert finding.level == "warning"
    assert "step 251" in finding.text


def test_skipped_steps():
    lines = figures(noisy(400))
    lines[100] |= {"loss": math.nan, "skipped": "the loss is nan"}
    finding = only(check_spikes(lines))
    assert finding.level == "note"
    assert "the loss is nan" in finding.text
    for line in lines[200:220]:
        line["skipped"] = "a spike"
    assert only(check_spikes(lines)).level == "warning"


@pytest.mark.parametrize(
    ("losses", "level", "words"),
    [
        (noisy(400), "good", "levelled off"),
        (np.linspace(4, 2, 400).tolist(), "note", "still falling"),
        (noisy(300) + np.linspace(2, 3, 100).tolist(), "warning", "rises"),
        ([3.0] * 400, "bad", "hardly learnt"),
        ([3.0] * 10, "note", "too few"),
    ],
)
def test_where_the_loss_is_going(losses, level, words):
    finding = only(check_curve(figures(losses)))
    assert finding.level == level
    assert words in finding.text


def test_overfitting():
    falling = [(100, 2.5), (200, 2.2), (300, 2.1), (400, 2.05)]
    assert only(check_fit(figures(noisy(400), falling))).level == "good"
    rising = [(100, 2.2), (200, 2.0), (300, 2.1), (400, 2.2)]
    finding = only(check_fit(figures(noisy(400), rising)))
    assert finding.level == "warning"
    assert "best at step 200" in finding.text
    assert finding.number == pytest.approx(0.1)


def test_a_gap_between_training_and_validation():
    lines = figures(noisy(400, end=1.0), [(200, 2.1), (400, 2.0)])
    assert "gap is wide" in only(check_fit(lines)).text
    assert only(check_fit(lines, smoothing=0.1)).level == "good"  # the two are no longer alike


def test_underfitting():
    lines = figures(np.linspace(4, 2, 400).tolist(), [(200, 3.0), (400, 2.03)])
    finding = only(check_fit(lines))
    assert finding.level == "note"
    assert "Underfitting" in finding.text


def test_the_first_loss():
    assert only(check_start(figures([3.0]), VOCAB)).level == "good"
    assert only(check_start(figures([9.0]), VOCAB)).level == "warning"
    assert only(check_start(figures([0.5]), VOCAB)).level == "warning"
    assert check_start(figures([0.5]), VOCAB, pretrained=True) == []
    assert check_start([{"step": 7, "loss": 0.5}], VOCAB) == []


# --- a run ---


def recipe(source, **changes):
    tables = {
        "data": {"source": str(source)},
        "tokenizer": "characters",
        "model": {
            "family": "llama",
            "n_layers": 2,
            "d_model": 32,
            "n_heads": 2,
            "max_len": 16,
            "dropout": 0.1,
        },
        "train": {"steps": 120, "batch": 16, "eval_every": 40, "checkpoint_every": 60},
        "optim": {"name": "muon", "lr": 0.02, "adam_lr": 5e-3, "warmup": 5},
        "eval": {"limit": 50},
    }
    return Recipe.from_dict(tables).changed(**changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences with a rule: what follows depends on what was said before."""
    dice = np.random.default_rng(0)
    names, verbs = ["ann", "bob", "cleo", "dan"], ["sees", "hears", "likes", "helps"]
    words = [
        f"{names[a]} {verbs[(a + b) % 4]} {names[b]}.\n"
        for a, b in dice.integers(4, size=(3000, 2))
    ]
    path = tmp_path_factory.mktemp("text") / "names.txt"
    path.write_text("".join(words))
    return path


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "names")
    made = recipe(text)
    trainer = Trainer(prepare(made), folder)
    folder.start(made)
    steps = list(trainer.steps())
    trainer.finish()
    return folder, steps


def test_a_healthy_run_has_nothing_to_mend(run):
    folder, steps = run
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.path.rglob("*"))
    diagnosis = diagnose(folder.path)
    assert [str(f) for f in diagnosis.findings if f.worrying] == []
    assert (diagnosis.step, diagnosis.total) == (120, 120)
    assert {f.check for f in diagnosis.findings} == {
        *("numbers", "gradients", "updates", "attention", "start", "spikes", "curve", "fit"),
        *("leaks", "labels", "waste", "context", "tokens"),
    }
    assert [e for step in steps for e in step.events if isinstance(e, Found)] == []
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.path.rglob("*")) == before


def test_pairs_are_diagnosed_on_both_sides(tmp_path):
    made = recipe(
        "reverse",
        **{
            "data.objective": "seq2seq",
            "model": {
                "family": "transformer",
                "n_layers": 2,
                "d_model": 32,
                "n_heads": 2,
                "d_ff": 64,
            },
        },
    )
    trainer = Trainer(prepare(made))
    found = {finding.check: finding.level for finding in check_trainer(trainer)}
    assert found["labels"] == found["leaks"] == found["padding"] == "good"
    assert found["waste"] != "good"  # made data are not sorted by length
    assert all(p.grad is None for p in trainer.net.parameters())


def test_pairs_that_are_left_out(tmp_path):
    rows = ["en\tde", *(f"{'ab' * (1 + i % 4)}\t{'ba' * (1 + i % 4)}" for i in range(40))]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    made = recipe(
        tmp_path / "pairs.tsv",
        **{
            "data.objective": "seq2seq",
            "data.length": 7,
            "model": {"family": "transformer", "n_layers": 1, "d_model": 32, "n_heads": 2},
        },
    )
    finding = only(check_left_out(prepare(made)))
    assert finding.level == "warning"
    assert finding.number == 0.25
    assert "9 training examples" in finding.text
    assert only(check_left_out(prepare(made.changed(**{"data.length": 9})))).level == "good"


def test_a_run_whose_weights_are_broken(run, tmp_path):
    folder, _ = run
    trainer = Trainer(prepare(folder.read_recipe()), folder)
    trainer.resume(lambda message: None)
    with torch.no_grad():
        next(trainer.net.parameters()).fill_(math.nan)
    found = {finding.check: finding.level for finding in check_trainer(trainer)}
    assert found["numbers"] == "bad"
    assert "attention" not in found


def test_a_run_without_checkpoint_or_data(run, text, tmp_path):
    folder = RunFolder(tmp_path / "new")
    folder.start(recipe(text))
    diagnosis = diagnose(folder.path)
    assert diagnosis.step == 0
    assert "checkpoint" in {f.check for f in diagnosis.findings}
    gone = RunFolder(tmp_path / "gone")
    gone.start(recipe(tmp_path / "nothing.txt"))
    assert {f.check for f in diagnose(gone.path).findings} >= {"data", "fit"}
    with pytest.raises(ClearheadError, match="is no run"):
        diagnose(tmp_path)


def test_the_command_prints_the_worst_first(run, capsys):
    folder, _ = run
    assert main(["diagnose", str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert "step 120 of 120" in out
    assert "Nothing here needs mending." in out
    first_words = [line.split()[0] for line in out.splitlines() if line[:4] in ("note", "good")]
    assert first_words == sorted(first_words, reverse=True)
    assert main(["diagnose", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["findings"]) > 10
    assert set(found["findings"][0]) == {
        *("check", "level", "text", "number", "suggestion", "details"),
    }


def test_json_has_no_nan():
    finding = Finding("numbers", "bad", "x", math.nan, details={"layers": {"a": math.inf}})
    assert finding.to_dict()["number"] is None
    json.dumps(finding.to_dict(), allow_nan=False)


# --- live ---


def live_step(number, loss):
    return Step(number, 1000, loss, 1e-3, 1.0, 1, 1, 0.1)


def test_live_findings_are_told_once():
    live = LiveDiagnosis(every=10)
    told = []
    for number, loss in enumerate(noisy(100), start=1):
        valid = [Evaluated({"loss": 2.0 + number / 100}, False)] if number % 10 == 0 else []
        told += [(number, event) for event in live.report(live_step(number, loss), valid)]
    assert [number for number, _ in told] == [20]
    event = told[0][1]
    assert isinstance(event, Found)
    assert str(event).startswith(
        "fit (warning): Overfitting: the validation loss was best at step 10"
    )
    assert str(event).endswith("or give more data.")


def test_live_gradients_updates_and_skipped_steps():
    net = decoder()
    live = LiveDiagnosis(every=2)
    compute_gradients(net, windows(), "tokens")
    net.get_parameter("stack.blocks.0.ffn.in_proj.weight").grad.zero_()
    live.before_update(net, 1)
    assert not live.before
    live.before_update(net, 2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2.0)
    live.after_update(net)
    events = live.report(live_step(2, 3.0), [Skipped("a spike"), Evaluated({"loss": 3.0}, True)])
    assert [(e.finding.check, e.finding.level) for e in events] == [
        ("gradients", "warning"),
        ("updates", "bad"),
        ("spikes", "warning"),
    ]


def test_live_diagnosis_goes_on_where_it_was():
    live = LiveDiagnosis(every=10)
    live.remember(figures(noisy(100), [(50, 2.0), (100, 2.02)]))
    (event,) = live.report(live_step(110, 2.0), [Evaluated({"loss": 2.4}, False)])
    assert "best at step 50" in str(event)


def test_live_diagnosis_changes_no_bit(text, monkeypatch):
    def final(made):
        trainer = Trainer(prepare(made))
        losses = [step.loss for step in trainer.steps()]
        return losses, [p.detach().clone() for p in trainer.net.parameters()]

    made = recipe(text, **{"train.steps": 12, "train.eval_every": 3})
    with_it = final(made)
    monkeypatch.setattr(LiveDiagnosis, "before_update", lambda self, net, number: None)
    monkeypatch.setattr(LiveDiagnosis, "report", lambda self, step, events: [])
    without = final(made)
    assert with_it[0] == without[0]
    assert all(torch.equal(a, b) for a, b in zip(with_it[1], without[1], strict=True))


def test_what_is_learnt_by_heart_is_not_told_to_train_longer():
    losses = [{"step": i, "loss": 4.0 * math.exp(-i / 12)} for i in range(1, 201)]
    (learnt,) = check_curve(losses)
    assert learnt.level == "good"
    assert "learnt" in learnt.text
    falling = [{"step": i, "loss": 4.0 - i / 100} for i in range(1, 201)]
    assert "Train longer" in check_curve(falling)[0].suggestion
    valid = [{"step": 100, "valid": {"loss": 0.001}}, {"step": 200, "valid": {"loss": 5.0}}]
    (found,) = check_curve([*falling, *valid])
    assert "does not help" in found.suggestion
    assert "many times as much" in check_fit(valid)[0].text
