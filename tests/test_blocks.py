"""The feed-forward, the norms and the blocks are their formulas."""

from __future__ import annotations

import pytest
import torch

from clearhead.attention.dropout import Dropout, drop
from clearhead.attention.mask import Causal
from clearhead.attention.positions import Positions
from clearhead.attention.rms import RMSNorm
from clearhead.attention.view import View
from clearhead.layers.block import RESIDUALS, Block, Look, ParallelBlock
from clearhead.layers.ffn import ACTIVATIONS, FFN, GatedFFN
from clearhead.layers.norm import LayerNormConfig, RMSNormConfig
from tiny import attention, close

# --- the feed-forward ---


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_feed_forward_is_two_convolutions_of_width_1(activation, bias):
    ffn = FFN(16, 24, activation, bias)
    x = torch.randn(2, 5, 16)
    close(ffn.as_convolutions()(x.transpose(1, 2)).transpose(1, 2), ffn(x), 1e-6)


@pytest.mark.parametrize("make", [FFN, GatedFFN])
def test_the_feed_forward_is_position_wise(make):
    ffn = make(16, 24)
    x = torch.randn(2, 8, 16)
    out = ffn(x)
    close(ffn(x.roll(3, 1)), out.roll(3, 1), 1e-6)  # shift-equivariant
    for t in range(8):
        close(ffn(x[:, t : t + 1]), out[:, t : t + 1], 1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_feed_forward_is_its_formula(activation):
    bend = {
        "relu": lambda x: x.clamp(min=0),
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": lambda x: (
            0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        ),
        "silu": lambda x: x / (1 + torch.exp(-x)),
        "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
        "relu_squared": lambda x: x.clamp(min=0) ** 2,
    }[activation]
    x = torch.randn(2, 5, 16)
    plain, gated = FFN(16, 24, activation), GatedFFN(16, 24, activation)
    a, b = plain.in_proj, plain.out_proj
    close(plain(x), bend(x @ a.weight.T + a.bias) @ b.weight.T + b.bias)
    gate = bend(x @ gated.gate_proj.weight.T)
    close(gated(x), (gate * (x @ gated.in_proj.weight.T)) @ gated.out_proj.weight.T)


# --- blocks and norms ---


def normed(norm, x):
    """LayerNorm or RMSNorm by its formula."""
    if isinstance(norm, torch.nn.RMSNorm):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + norm.eps).sqrt() * norm.weight + norm.bias


FORMULAS = {
    "pre": lambda x, f, r: x + f(normed(r.norm, x)),
    "post": lambda x, f, r: normed(r.norm, x + f(x)),
    "sandwich": lambda x, f, r: x + normed(r.norm_out, f(normed(r.norm, x))),
}


def block_of(kind, placement, norm, cross):
    attn, source_attn = attention().build(), attention().build() if cross else None
    block = kind(attn, FFN(16, 24), source_attn, lambda: RESIDUALS[placement](norm, 16, 0.0))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return block


def sublayers(block, look):
    """Each sublayer as a function, with its residual."""
    parts = [(block.self_residual, lambda x: block.self_attn(x, look.view))]
    if block.cross_attn is not None:
        across = look.source_view, None, look.source
        parts.append((block.cross_residual, lambda x: block.cross_attn(x, *across)))
    return [*parts, (block.ffn_residual, block.ffn)]


def looking(cross):
    view = View.of(Causal(), Positions.span(0, 5))
    if not cross:
        return Look(view)
    return Look(view, None, torch.randn(2, 3, 16), View.across(Positions.ragged([3, 2])))


@pytest.mark.parametrize("norm", [LayerNormConfig(1e-3), RMSNormConfig(1e-3)], ids=["layer", "rms"])
@pytest.mark.parametrize("cross", [False, True], ids=["alone", "cross"])
@pytest.mark.parametrize("placement", FORMULAS)
def test_a_block_is_its_formula(placement, cross, norm):
    block, look = block_of(Block, placement, norm, cross), looking(cross)
    x = torch.randn(2, 5, 16)
    expected = x
    for residual, sublayer in sublayers(block, look):
        expected = FORMULAS[placement](expected, sublayer, residual)
    close(block(x, look), expected, 2e-5)


@pytest.mark.parametrize("cross", [False, True], ids=["alone", "cross"])
@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_a_parallel_block_is_its_formula(placement, cross):
    block, look = block_of(ParallelBlock, placement, LayerNormConfig(), cross), looking(cross)
    x = torch.randn(2, 5, 16)
    expected = x
    for residual, sublayer in sublayers(block, look):
        expected = expected + FORMULAS[placement](x, sublayer, residual) - x
    close(block(x, look), expected, 2e-5)


@pytest.mark.parametrize("placement", FORMULAS)
def test_delta_is_what_a_sublayer_writes(placement):
    residual = RESIDUALS[placement](LayerNormConfig(), 16, 0.0)
    x, f = torch.randn(2, 5, 16), torch.nn.Linear(16, 16)
    written = residual.delta(x, f)
    whole = normed(residual.norm, x + written) if placement == "post" else x + written
    close(residual(x, f), whole)


# --- dropout ---


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_dropout_drops_so_many_and_keeps_the_mean(p):
    x = torch.ones(400, 500)
    dropped = drop(x, p)
    rate = (dropped == 0).double().mean()
    assert abs(rate - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5  # five standard deviations
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / (1 - p), rel=1e-4)]
    rows = (dropped == 0).double().mean(dim=1)  # no row, and no column, is treated otherwise
    assert (rows - p).abs().max() < 6 * (p * (1 - p) / 500) ** 0.5


def test_dropout_is_drawn_from_pytorchs_dice_and_passes_its_mask_to_the_gradient():
    x = torch.randn(7, 9, requires_grad=True)
    torch.manual_seed(3)
    first = drop(x, 0.4)
    torch.manual_seed(3)
    assert drop(x, 0.4).equal(first)
    assert not drop(x, 0.4).equal(first)
    first.sum().backward()
    assert (x.grad == 0).equal(first == 0)
    assert x.grad[first != 0].unique().numel() == 1


def test_dropout_at_rest_or_of_nothing_changes_nothing():
    x = torch.randn(3, 5)
    assert Dropout(0.5).eval()(x) is x
    assert drop(x, 0.0) is x
    assert isinstance(Dropout(0.5), torch.nn.Dropout)


# --- RMSNorm ---


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 4, 5, 8), (1, 7)])
def test_the_learning_norm_is_pytorchs_with_its_gradients(shape):
    ours, theirs = RMSNorm(shape[-1], 1e-5), torch.nn.RMSNorm(shape[-1], 1e-5)
    with torch.no_grad():
        ours.weight.uniform_(0.5, 1.5)
        theirs.weight.copy_(ours.weight)
    x = torch.randn(*shape, requires_grad=True)
    weight = torch.randn(*shape)
    found, wanted = ours(x), theirs(x)
    torch.testing.assert_close(found, wanted)
    assert type(found.grad_fn).__name__ == "_LearningBackward"
    (dx, dw) = torch.autograd.grad((found * weight).sum(), [x, ours.weight])
    (ex, ew) = torch.autograd.grad((wanted * weight).sum(), [x, theirs.weight])
    torch.testing.assert_close(dx, ex)
    torch.testing.assert_close(dw, ew)
    with torch.no_grad():
        assert ours(x).equal(theirs(x))  # at rest it is PyTorch's own
