"""Compiled products of training: equal to PyTorch's, chosen once a machine, part of the run."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.fast import compile as compiled
from clearhead.fast import products
from clearhead.fast.products import any_large, drop_compiled, linear, use_compiled
from clearhead.fast.words import Shape
from clearhead.measure import choices
from clearhead.measure.roofs import Report, Roofs
from clearhead.training import machine as machines
from clearhead.training import run as runs
from clearhead.training.job import prepare
from clearhead.training.machine import describe_choice, settle_machine
from clearhead.training.muon import orthogonal
from clearhead.training.recipe import MachineConfig, Recipe
from clearhead.training.world import World
from processes import digest, recipe, run

CPU = torch.device("cpu")

llvm = pytest.importorskip("llvmlite.binding", reason="pip install 'clearhead[fast]'")
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def gradients(way, x, weight, bias, asked):
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = way(*inputs)
    return out.detach(), torch.autograd.grad(out, inputs, asked.to(out.dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1,), (3, 5), (2, 300)])
@pytest.mark.parametrize(("wide", "out"), [(32, 33), (64, 128), (416, 5)])
def test_values_and_gradients_are_those_of_torch(shape, wide, out, bias):
    x, weight = torch.randn(*shape, wide), torch.randn(out, wide)
    b, asked = torch.randn(out) if bias else None, torch.randn(*shape, out)
    exact = [t if t is None else t.double() for t in (x, weight, b)]
    right, right_gradients = gradients(F.linear, *exact, asked)
    found, found_gradients = gradients(linear, x, weight, b, asked)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
    for got, wanted in zip(found_gradients, right_gradients, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.fixture
def only_compiled(monkeypatch):
    """PyTorch's product must not be taken."""
    monkeypatch.setattr(products.F, "linear", lambda *given: pytest.fail("it was not compiled"))


def test_tensors_that_lie_otherwise(only_compiled):
    x, weight = torch.randn(5, 32, 3).mT, torch.randn(20, 32)  # x: [5, 3, 32]
    asked = torch.randn(5, 20, 3).mT
    right, right_gradients = gradients(lambda x, w: x @ w.T, x, weight, None, asked)
    found, found_gradients = gradients(linear, x, weight, None, asked)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(found_gradients, right_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_frozen_gets_no_gradient(only_compiled):
    x, weight = torch.randn(4, 32, requires_grad=True), torch.randn(6, 32)
    bias = torch.zeros(6, requires_grad=True)
    linear(x, weight, bias).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 32))
    torch.testing.assert_close(bias.grad, torch.full((6,), 4.0))
    still = linear(x.detach(), weight)
    assert not still.requires_grad


def test_what_comes_out_can_be_changed_in_place(only_compiled):
    x, weight = torch.randn(2, 3, 32, requires_grad=True), torch.randn(6, 32)
    linear(x, weight).add_(1.0).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3, 32))


@pytest.mark.parametrize("other", [{"x": torch.randn(8, 16)}, {"bias": torch.randn(3)}])
def test_what_does_not_fit_is_refused_as_torch_does(other):
    given = {"x": torch.randn(8, 32), "weight": torch.randn(8, 32), "bias": torch.randn(8)}
    with pytest.raises(RuntimeError):
        linear(**{**given, **other})


def test_what_is_elsewhere_is_not_compiled():
    here, there = torch.randn(8, 32), torch.randn(8, 32, device="meta")
    assert products._fit(here, here, None)
    assert not products._fit(here, there, None)
    assert not products._fit(there, here, None)


@pytest.mark.parametrize(
    "other",
    [
        {"weight": torch.randn(32, 8).t()},
        {"bias": torch.randn(8, 2)[:, 0]},
        {"weight": torch.randn(2, 32), "bias": torch.randn(2)},
    ],
)
def test_what_lies_as_compiled_code_cannot_read_it_is_torchs(other):
    given = {"x": torch.randn(5, 32), "weight": torch.randn(8, 32), "bias": torch.randn(8)}
    given |= other
    torch.testing.assert_close(linear(**given), F.linear(*given.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_empty_batches_are_torchs(dtype):
    x, weight = torch.randn(3, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert linear(torch.zeros(0, 8), torch.zeros(6, 8)).shape == (0, 6)


def wide_model():
    settings = {"n_layers": 2, "d_model": 128, "n_heads": 4, "vocab_size": 50, "max_len": 32}
    return ch.build("gpt2", seed=0, dropout=0.0, **settings)


def test_a_network_is_the_same_with_them():
    net = wide_model().net
    twin = copy.deepcopy(net)
    use_compiled(twin)
    assert all(type(b) is type(a) for a, b in zip(net.modules(), twin.modules(), strict=True))
    swapped = [m for m in twin.modules() if "forward" in vars(m)]
    assert len(swapped) == 2 * 7  # attention, too; the head has 50 x 128 weights: too few
    ids = torch.randint(50, (3, 20))
    for model in (net, twin):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    torch.testing.assert_close(twin(ids), net(ids), rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_copy_has_weights_of_its_own():
    net = wide_model().net
    use_compiled(net)
    ids = torch.randint(50, (1, 9))
    before = net(ids)
    new = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    assert torch.equal(net(ids), before)
    assert not new(ids).any()


def test_they_can_be_dropped_again():
    net = wide_model().net
    use_compiled(net)
    drop_compiled(net)
    assert all("forward" not in vars(module) for module in net.modules())


def test_small_layers_are_left_as_they_are():
    net = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    assert not any_large(net)
    use_compiled(net)
    assert all("forward" not in vars(layer) for layer in net)
    assert any_large(nn.Sequential(nn.Linear(128, 128)))


@pytest.mark.parametrize("shape", [(192, 192), (256, 128), (128, 384)])
def test_muon_turns_matrices_alike(shape):
    x = torch.randn(2, *shape)
    torch.testing.assert_close(orthogonal(x, compiled=True), orthogonal(x), rtol=1e-4, atol=1e-5)


def functions_for(lanes):
    """Those for this processor, or for one with such vectors."""
    if lanes is None:
        return compiled.learning()
    machine = llvm.Target.from_default_triple().create_target_machine(
        features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    code = compiled.compiled_code("learning", Shape(lanes, 3, 2), machine)
    return compiled.functions("learning", code)


@pytest.mark.parametrize(("lanes", "threads"), [(None, 1), (None, 3), (4, 1), (8, 2)])
def test_sums_of_lines(lanes, threads):
    learning = functions_for(lanes)
    for rows, depth, width in ((1, 1, 16), (13, 300, 48), (50, 256, 400), (25, 7, 784)):
        b = torch.randn(depth, width)
        for a in (torch.randn(rows, depth), torch.randn(depth, rows).t()):
            out = torch.full((rows, width), torch.nan)
            ends = *(4 * step for step in a.stride()), out.data_ptr(), depth, rows, width
            learning["lines"](a.data_ptr(), b.data_ptr(), *ends, threads, 0)
            torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-4)


# --- the choice ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(cache, monkeypatch):
    """A machine where compiled code is so much quicker; how often it was measured."""
    asked = []

    def measure(probes):
        asked.append(probes)
        return Report(roofs=Roofs(compiled=measure.ratio))

    measure.ratio, measure.asked = 2.0, asked
    monkeypatch.setattr(choices, "measure", measure)
    return measure


@pytest.mark.parametrize(("ratio", "wanted"), [(2.0, "compiled"), (1.04, "torch"), (0.5, "torch")])
def test_the_quicker_is_taken_and_remembered(measured, ratio, wanted):
    measured.ratio = ratio
    assert choices.quicker_products() == wanted
    measured.ratio = 0.1 if wanted == "compiled" else 9.0  # noise of another moment
    assert choices.quicker_products() == wanted
    assert measured.asked == [("compiled",)]


def test_a_child_that_died_chooses_torch(measured, monkeypatch):
    died = Report(died_in="compiled", reason="Illegal instruction", roofs=Roofs())
    monkeypatch.setattr(choices, "measure", lambda probes: died)
    assert choices.quicker_products() == "torch"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', '{"NAME": "much"}', '{"NAME": {}}'])
def test_a_spoilt_memory_is_measured_anew(measured, cache, content):
    cache.mkdir()
    (cache / choices.FILE).write_text(content.replace("NAME", choices._name()))
    assert choices.quicker_products() == "compiled"
    assert choices.quicker_products() == "compiled"
    assert len(measured.asked) == 1
    assert isinstance(json.loads((cache / choices.FILE).read_text()), dict)


def test_what_was_not_measured_is_not_remembered(measured, monkeypatch):
    measured.ratio = None  # the child hung, say
    assert choices.quicker_products() == "torch"
    monkeypatch.setattr(choices, "available", lambda: False)
    assert choices.remember(Report(roofs=Roofs(compiled=2.0))) is None  # a doctor before llvmlite
    monkeypatch.setattr(choices, "available", lambda: True)
    measured.ratio = 2.0
    assert choices.quicker_products() == "compiled"


def test_doctor_measures_anew(measured, monkeypatch):
    assert choices.quicker_products() == "compiled"
    choices.remember(Report(roofs=Roofs(compiled=0.9)))
    assert choices.quicker_products() == "torch"


def test_a_cache_that_cannot_be_written_to_costs_time_only(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "file" / "cache"))
    assert choices.quicker_products() == "compiled"
    assert choices.quicker_products() == "compiled"
    assert len(measured.asked) == 2


def test_what_is_left_open_is_decided_for_the_network(measured):
    wide, narrow = nn.Linear(128, 128), nn.Linear(8, 8)
    chosen = settle_machine(MachineConfig(), CPU, nn.Sequential(wide))
    assert chosen.products == "compiled"
    assert "compiled products" in describe_choice(chosen, CPU)
    assert settle_machine(chosen, CPU, narrow) == chosen
    small = settle_machine(MachineConfig(), CPU, nn.Sequential(narrow))
    assert small.products == "torch"
    assert "compiled" not in describe_choice(small, CPU)
    for other in ({"precision": "bf16"}, {"compile": True}):
        config = MachineConfig(**other)
        assert settle_machine(config, CPU, nn.Sequential(wide)).products == "torch"
        with pytest.raises(ClearheadError, match="fp32 on a CPU"):
            settle_machine(replace(config, products="compiled"), CPU, wide)


def test_without_llvmlite_it_is_torch(measured, monkeypatch):
    for place in (choices, machines):
        monkeypatch.setattr(place, "available", lambda: False)
    wide = nn.Sequential(nn.Linear(128, 128))
    assert settle_machine(MachineConfig(), CPU, wide).products == "torch"
    assert measured.asked == []
    with pytest.raises(ClearheadError, match=r"clearhead\[fast\]"):
        settle_machine(MachineConfig(products="compiled"), CPU, wide)


def test_on_a_gpu_it_is_torch(measured):
    chosen = settle_machine(MachineConfig(), torch.device("cuda"), nn.Linear(512, 512))
    assert chosen.products == "torch"
    assert "gains little" not in describe_choice(chosen, torch.device("mps"))
    assert measured.asked == []


# --- the run ---


def wide_recipe(folder, **changes):
    more = {"model.d_model": 128, "model.n_heads": 4, "optim.name": "muon", "optim.lr": 0.02}
    return recipe(folder, **more, **changes)


def test_a_run_with_them_is_taken_up_to_the_bit(tmp_path, cache, measured):
    settings = wide_recipe(tmp_path, **{"train.accumulate": 2})
    whole = run(settings)
    first = run(settings, tmp_path / "run", stop=5)
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert kept["train"]["machine"]["products"] == "compiled"
    measured.ratio = 0.5
    choices.remember(Report(roofs=Roofs(compiled=0.5)))  # the run has decided: it stays with it
    second = run(settings, tmp_path / "run", resume=True)
    assert [*first.losses, *second.losses] == whole.losses
    assert digest(second.weights) == digest(whole.weights)


def test_they_change_a_run_by_rounding_alone(tmp_path, cache):
    ways = [{"train.machine.products": way} for way in ("torch", "compiled")]
    plain, own = (run(wide_recipe(tmp_path, **way)).losses for way in ways)
    assert plain == pytest.approx(own, rel=1e-3)
    assert plain != own


def test_a_run_from_before_there_was_a_choice_stays_as_it_was(tmp_path, cache, measured):
    settings = wide_recipe(tmp_path)
    whole = run(wide_recipe(tmp_path, **{"train.machine.products": "torch"}))
    first = run(
        wide_recipe(tmp_path, **{"train.machine.products": "torch"}), tmp_path / "run", stop=5
    )
    path = tmp_path / "run" / "recipe.yaml"
    old = yaml.safe_load(path.read_text())
    del old["train"]["machine"]["products"]
    path.write_text(yaml.safe_dump(old))
    second = run(settings, tmp_path / "run", resume=True)
    assert [*first.losses, *second.losses] == whole.losses
    assert measured.asked == []


def test_a_run_goes_on_where_there_is_no_llvmlite(tmp_path, cache, measured, monkeypatch):
    settings = wide_recipe(tmp_path)
    first = run(settings, tmp_path / "run", stop=5)
    for place in (choices, machines, runs):
        monkeypatch.setattr(place, "available", lambda: False)
    second = run(settings, tmp_path / "run", resume=True)
    assert len(first.losses) == 5
    assert len(second.losses) == 7


def test_a_run_goes_on_on_another_kind_of_machine(tmp_path, cache, measured):
    settings = wide_recipe(tmp_path)
    run(settings, tmp_path / "run", stop=5)
    path = tmp_path / "run" / "recipe.yaml"
    path.write_text(path.read_text().replace("threads: null", "threads: 4096"))
    job = prepare(Recipe.from_dict(yaml.safe_load(path.read_text())))
    assert job.recipe.train.machine.products == "compiled"
    settled = runs.settle_arithmetic(job, torch.device("cuda"), World(), resume=True)
    assert settled.recipe.train.machine.products == "torch"
    assert len(run(settings, tmp_path / "run", resume=True).losses) == 7  # fewer threads


def test_a_tiny_run_measures_nothing(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(machines, "quicker_products", lambda: pytest.fail("measured"))
    assert run(recipe(tmp_path), stop=2).losses
    assert products.LEAST > 64 * 64
