"""Optimisers, schedules, losses and averages against closed forms and other people's code."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch
from clearhead.data.batch import IGNORED, Batch
from clearhead.errors import ClearheadError
from clearhead.training.adam import Adam
from clearhead.training.average import EMA, mean_weights, swapped
from clearhead.training.loss import (
    LOSSES,
    batch_loss,
    contrast_loss,
    slow_token_loss,
    span_loss,
    token_loss,
)
from clearhead.training.muon import Muon, orthogonal
from clearhead.training.optim import OptimConfig, build_optimisers, freeze, set_rates
from clearhead.training.schedule import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Noam,
    WarmupStableDecay,
)


def net(seed: int = 0) -> nn.Module:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 11, "max_len": 8}
    return ch.build("llama", seed=seed, **sizes).net


def names_of(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, dict]:
    """Parameter -> the group it is in."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in optimiser.param_groups for p in group["params"]}


# -- schedules


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (Constant(), 1, 0.1),
        (Constant(), 10, 1.0),
        (Constant(), 110, 1.0),
        (Linear(), 11, 1.0),
        (Linear(), 61, 0.5),
        (Linear(to=0.2), 61, 0.6),
        (Linear(), 110, 0.01),
        (Cosine(to=0.0), 11, 1.0),
        (Cosine(to=0.0), 61, 0.5),
        (Cosine(to=0.1), 36, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
        (Cosine(to=0.1), 111, 0.1),
        (InverseSqrt(), 5, 0.5),
        (InverseSqrt(), 40, 0.5),
        (Noam(d_model=64), 5, 5 * 10**-1.5 / 8),
        (Noam(d_model=64), 40, 40**-0.5 / 8),
        (WarmupStableDecay(decay=0.2), 89, 1.0),
        (WarmupStableDecay(decay=0.2), 100, 0.5),
        (WarmupStableDecay(decay=0.2), 110, 1 / 22),
        (WarmupStableDecay(decay=0.2, to=0.1), 111, 0.1),
        (WarmupStableDecay(decay=0.2, again=1 / 11), 91, 0.5),
        (WarmupStableDecay(decay=0.2, again=1 / 11), 100, 1 / 20),
        (WarmupStableDecay(decay=0.2, again=1 / 11), 101, 1.0),
        (WarmupStableDecay(decay=0.2, again=1 / 11), 106, 0.5),
        (WarmupStableDecay(decay=0.2, to=0.5, again=1 / 11), 110, 0.5 + 0.5 / 10),
    ],
)
def test_schedules_have_their_closed_form(schedule, step, factor):
    assert schedule.factor(step, 110, 10) == pytest.approx(factor, rel=1e-12)


def test_a_run_that_goes_down_again_begins_as_the_shorter_one():
    short, long = WarmupStableDecay(decay=0.5), WarmupStableDecay(decay=0.5, again=0.3333)
    for step in range(1, 8001):
        assert long.factor(step, 12_000, 100) == short.factor(step, 8000, 100)


def test_noam_is_the_formula_of_the_paper_and_is_highest_at_the_end_of_the_warmup():
    factors = [Noam(512).factor(step, 10_000, 4000) for step in range(1, 10_001)]
    assert max(factors) == factors[3999] == pytest.approx(512**-0.5 * 4000**-0.5)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(to=0.0), WarmupStableDecay(decay=0.5)])
def test_schedules_equal_pytorchs(schedule):
    """torch.optim.lr_scheduler, step by step: the rate that each step is taken at."""
    parameter = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    theirs: torch.optim.lr_scheduler.LRScheduler
    if isinstance(schedule, Cosine):
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=20)
    elif isinstance(schedule, Linear):
        theirs = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, total_iters=20)
    else:
        theirs = torch.optim.lr_scheduler.SequentialLR(
            optimiser,
            [
                torch.optim.lr_scheduler.ConstantLR(optimiser, 1.0),
                torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, total_iters=10),
            ],
            milestones=[10],
        )
    for step in range(1, 21):
        wanted = optimiser.param_groups[0]["lr"]
        assert schedule.factor(step, 20, 0) == pytest.approx(wanted, abs=1e-6)
        optimiser.step()
        theirs.step()


@pytest.mark.parametrize("schedule", [Linear(), Cosine(to=0.0), WarmupStableDecay()])
def test_every_step_moves(schedule):
    assert schedule.factor(1, 1, 0) == 1.0
    assert schedule.factor(20, 20, 5) > 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Linear(to=1.5), "0 to 1"),
        (lambda: WarmupStableDecay(decay=0.0), "decay"),
        (lambda: WarmupStableDecay(again=1.0), "again"),
        (lambda: OptimConfig(lr=0.0), "lr"),
        (lambda: OptimConfig(betas=(0.9,)), "betas"),
        (lambda: OptimConfig(layer_decay=0.0), "layer_decay"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ClearheadError, match=said):
        make()


# -- Muon


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 4), (2, 4, 16)])
def test_orthogonal_brings_singular_values_near_one_and_keeps_the_vectors(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(x)
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.35
    assert values.min() > 0.3  # the quintic trades exactness for speed at 0
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.mT @ found @ v.mT  # diagonal where the singular vectors are the same
    off = inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4


def test_a_copy_of_muon_steps_too():
    """torch copies of an optimiser what it knows of, and no more; `diagnose` steps with a copy."""
    matrix = nn.Parameter(torch.randn(8, 4))
    matrix.grad = torch.randn(8, 4)
    own, other = copy.deepcopy((matrix, Muon([matrix], compiled=True)))
    own.grad = matrix.grad.clone()
    before = own.detach().clone()
    other.step()
    assert not own.equal(before)


def test_muon_equals_pytorchs_up_to_its_bfloat16():
    """torch.optim.Muon orthogonalises in bfloat16; everything else is the same formula."""
    start = [torch.randn(8, 4), torch.randn(8, 4), torch.randn(4, 8)]
    ours = [nn.Parameter(t.clone()) for t in start]
    theirs = [nn.Parameter(t.clone()) for t in start]
    one = Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.1)
    two = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="original"
    )
    dice = torch.Generator().manual_seed(1)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=dice)
            # theirs averages (lerp), ours adds up: the same direction, another length
            b.grad = a.grad.clone()
        one.step()
        two.step()
    for a, b, first in zip(ours, theirs, start, strict=True):
        moved = (b - first).norm()
        assert (a - b).norm() < 0.05 * moved


def test_muon_steps_matrices_of_one_shape_together_as_if_alone():
    together = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    both = Muon(together)
    single = [Muon([p]) for p in alone]
    for a, b in zip(together, alone, strict=True):
        a.grad = torch.randn(6, 4)
        b.grad = a.grad.clone()
    both.step()
    for optimiser in single:
        optimiser.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_muon_leaves_parameters_without_gradient_alone():
    parameter = nn.Parameter(torch.ones(3, 3))
    Muon([parameter], weight_decay=0.5).step()
    assert parameter.equal(torch.ones(3, 3))


# -- groups


def test_muon_gets_the_matrices_of_the_blocks_and_adam_the_rest():
    model = net()
    adam, muon = build_optimisers(model, OptimConfig(name="muon", lr=0.02, adam_lr=1e-3))
    inside = names_of(model, muon)
    rest = names_of(model, adam)
    assert isinstance(muon, Muon)
    assert all(".blocks." in name and name.endswith("proj.weight") for name in inside)
    assert {*inside, *rest} == {name for name, _ in model.named_parameters()}
    assert rest["embed.tokens.weight"]["base_lr"] == 1e-3
    assert len(inside) == 2 * 7


def test_vectors_are_not_decayed():
    model = ch.build("gpt2", n_layers=1, d_model=16, n_heads=2, vocab_size=11, max_len=8).net
    (adam,) = build_optimisers(model, OptimConfig(weight_decay=0.1))
    groups = names_of(model, adam)
    for name, parameter in model.named_parameters():
        assert groups[name]["weight_decay"] == (0.1 if parameter.dim() >= 2 else 0.0)


def test_adam_of_2017_has_the_papers_constants():
    (adam,) = build_optimisers(net(), OptimConfig(name="adam"))
    assert isinstance(adam, torch.optim.Adam)
    assert not adam.defaults["decoupled_weight_decay"]
    assert adam.defaults["betas"] == (0.9, 0.98)
    assert adam.defaults["eps"] == 1e-9
    assert all(group["weight_decay"] == 0.0 for group in adam.param_groups)


def test_layer_decay_falls_from_the_head_to_the_embedding():
    model = net()
    (adam,) = build_optimisers(model, OptimConfig(lr=1.0, layer_decay=0.5))
    rates = {name: group["base_lr"] for name, group in names_of(model, adam).items()}
    assert rates["stack.norm.weight"] == 1.0
    assert rates["stack.blocks.1.ffn.in_proj.weight"] == 0.5
    assert rates["stack.blocks.0.ffn.in_proj.weight"] == 0.25
    assert rates["embed.tokens.weight"] == 0.125


def test_freeze_takes_the_gradient_and_names_what_is_not_there():
    model = net()
    frozen = freeze(model, ("embed.*", "stack.blocks.0.*"))
    assert "embed.tokens.weight" in frozen
    held = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert held == set(frozen)
    (adam,) = build_optimisers(model, OptimConfig())
    assert not set(names_of(model, adam)) & held
    with pytest.raises(ClearheadError, match="no parameter is called"):
        freeze(model, ("embedd.*",))
    with pytest.raises(ClearheadError, match="nothing to train"):
        freeze(model, ("*",))


def test_rates_are_set_from_the_base():
    model = net()
    optimisers = build_optimisers(model, OptimConfig(name="muon", lr=0.02, adam_lr=1e-3))
    set_rates(optimisers, 0.5)
    set_rates(optimisers, 0.25)
    found = {group["lr"] for optimiser in optimisers for group in optimiser.param_groups}
    assert found == {0.005, 0.00025}


# -- losses


def test_label_smoothing_has_its_closed_form():
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, 2, IGNORED], [0, 4, 3]])
    logs = logits.log_softmax(-1)
    asked = targets != IGNORED
    right = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    wanted = -(0.9 * right + 0.1 * logs.mean(-1))[asked].sum()
    torch.testing.assert_close(token_loss(logits, targets, 0.1), wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_fast_loss_is_pytorchs_with_its_gradient(smoothing, dtype):
    """Half as many digits are those of the logits alone: sums have those of fp32."""
    logits = torch.randn(8192, 17, dtype=torch.float64).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    targets = torch.randint(0, 17, (8192,))
    targets[::7] = IGNORED
    fast = token_loss(logits, targets, smoothing)
    (found,) = torch.autograd.grad(3.0 * fast, logits)
    slow = slow_token_loss(exact, targets, smoothing)
    (wanted,) = torch.autograd.grad(3.0 * slow, exact)
    assert float(fast.detach()) == pytest.approx(float(slow.detach()), rel=1e-5)
    torch.testing.assert_close(found, wanted.to(dtype), rtol=1.6e-2, atol=1e-5)
    assert found[0].eq(0).all()


def test_parts_of_a_batch_add_up():
    model = net()
    ids = torch.randint(0, 11, (8, 8))
    whole = Batch((ids[:, :-1],), ids[:, 1:], count=56)
    parts = [Batch((p[:, :-1],), p[:, 1:], count=14) for p in ids.split(2)]
    total = batch_loss(model, whole, "tokens")
    torch.testing.assert_close(sum(batch_loss(model, p, "tokens") for p in parts), total)


def test_a_span_is_two_choices_among_the_slots():
    output, targets = torch.randn(3, 7, 2), torch.tensor([[0, 2], [3, 3], [6, 6]])
    wanted = sum(F.cross_entropy(output[:, :, i], targets[:, i], reduction="sum") for i in (0, 1))
    torch.testing.assert_close(span_loss(output, targets), wanted)


def test_contrast_is_least_where_pairs_agree():
    vectors = torch.eye(4)
    targets = torch.arange(4)
    same = contrast_loss(torch.cat([vectors, vectors]), targets)
    mixed = contrast_loss(torch.cat([vectors, vectors.roll(1, 0)]), targets)
    assert same < 1e-6 < mixed
    wanted = -4 * math.log(math.exp(20) / (math.exp(20) + 3))
    assert float(same) == pytest.approx(wanted, abs=1e-6)


def test_similarity_is_the_squared_error_of_the_cosine():
    output = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 3.0]])
    loss = LOSSES["similarity"](output, torch.tensor([0.0, 1.0]), 0.0)
    assert float(loss) == pytest.approx(0.5, abs=1e-6)


# -- averages


def test_the_mean_of_checkpoints_is_the_mean():
    states = [{"a": torch.full((2,), float(i)), "b": torch.tensor([i * 1.0])} for i in range(4)]
    assert mean_weights(states)["a"].equal(torch.full((2,), 1.5))
    with pytest.raises(ClearheadError, match="different models"):
        mean_weights([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(ClearheadError, match="no checkpoint"):
        mean_weights([])


def test_an_ema_has_its_closed_form():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    ema = EMA(model, 0.9)
    wanted = 0.0
    for n in range(1, 30):
        nn.init.constant_(model.weight, float(n))
        ema.update(model)
        keep = min(0.9, (1 + n) / (10 + n))
        wanted = keep * wanted + (1 - keep) * n
    assert float(ema.weights["weight"]) == pytest.approx(wanted, rel=1e-5)
    before = model.weight.detach().clone()
    with swapped(model, ema.weights):
        assert model.weight.item() == pytest.approx(wanted, rel=1e-5)
    assert model.weight.equal(before)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_with_kept_lists_is_torchs_bit_for_bit(decoupled):
    ours, theirs = net(), net()
    more = {"weight_decay": 0.1, "decoupled_weight_decay": decoupled, "fused": True}
    mine, slow = (
        kind([{"params": list(n.parameters())[:5]}, {"params": list(n.parameters())[5:]}], **more)
        for kind, n in ((Adam, ours), (torch.optim.Adam, theirs))
    )
    torch.manual_seed(1)
    ways = set()
    for step in range(12):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 5:  # a parameter that took no part: its own count falls behind
            next(ours.parameters()).grad = next(theirs.parameters()).grad = None
        if step == 8:
            mine.load_state_dict(copy.deepcopy(slow.state_dict()))
        for group in (*mine.param_groups, *slow.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        mine.step()
        slow.step()
        ways.add(bool(mine.kept))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), step
    assert ways == {True, False}  # both ways were gone
    for index, state in slow.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(mine.state_dict()["state"][index][name], value), name


def test_copies_of_adam_know_how_many_steps_it_made():
    ours = net()
    (adam,) = build_optimisers(ours, OptimConfig(name="adamw"))
    for _ in range(3):
        for p in ours.parameters():
            p.grad = torch.ones_like(p)
        adam.step()
    assert adam.kept
    assert float(adam.kept[0].count) == 3
    for one in (adam, copy.deepcopy(adam)):
        assert {float(state["step"]) for state in one.state.values()} == {3.0}
        assert {float(state["step"]) for state in one.state_dict()["state"].values()} == {3.0}


def test_hooks_of_a_step_are_called_once_on_both_ways():
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # its class has its hooks now
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimiser, calls = Adam([first, second], lr=0.1, fused=True), []
    optimiser.register_step_pre_hook(lambda *_: calls.append("before"))
    optimiser.register_step_post_hook(lambda *_: calls.append("behind"))
    for with_second in (True, True, False):  # torch's way, ours, torch's
        first.grad, second.grad = torch.ones(3), torch.ones(3) if with_second else None
        optimiser.step()
    assert calls == ["before", "behind"] * 3
