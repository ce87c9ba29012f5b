"""Parity with PyTorch: the Transformer of 2017, multi-head attention, the fused kernel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from clearhead.attention.attention import Attention
from clearhead.attention.mask import All, Causal, Mask, Window
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Softmax, attend, scores, softmax
from clearhead.attention.view import View
from clearhead.layers.stack import Memory
from clearhead.models.keys import Fused
from clearhead.weights.convert import fill, to_ours

WIDTH, HEADS, INNER, LAYERS, VOCAB = 32, 4, 48, 2, 37
LENGTHS = (6, 9, 2)


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


# --- the whole model ---


class Theirs(nn.Module):
    """nn.Transformer with embeddings, sinusoids and a tied head, as the paper has them.

    After every post-norm block nn.Transformer has one more norm, which the paper has not: its own
    encoder and decoder are handed in.
    """

    def __init__(self, norm_first: bool, activation: str = "relu") -> None:
        super().__init__()
        shared = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
        sizes = (WIDTH, HEADS, INNER)
        encoder, decoder = (
            kind(*sizes, activation=activation, **shared)
            for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        )
        norms = [nn.LayerNorm(WIDTH) if norm_first else None for _ in range(2)]
        self.body = nn.Transformer(
            *sizes[:2],
            custom_encoder=nn.TransformerEncoder(
                encoder, LAYERS, norms[0], enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(decoder, LAYERS, norms[1]),
            **shared,
        )
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def embed(self, ids: Tensor) -> Tensor:
        rows = [
            [
                trig(p / 10000 ** (2 * i / WIDTH))
                for i in range(WIDTH // 2)
                for trig in (math.sin, math.cos)
            ]
            for p in range(ids.shape[1])
        ]
        return self.tokens(ids) * math.sqrt(WIDTH) + torch.tensor(rows)

    def forward(self, source: Tensor, target: Tensor, empty=None, target_empty=None) -> Tensor:
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        states = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=ahead,
            src_key_padding_mask=empty,
            memory_key_padding_mask=empty,
            tgt_key_padding_mask=target_empty,
        )
        return states @ self.tokens.weight.T


def key_table() -> dict[str, object]:
    table: dict[str, object] = {"tokens.weight": "encoder.embed.tokens.weight"}
    for side in ("encoder", "decoder"):
        theirs, ours = f"body.{side}.layers.{{i}}.", f"{side}.stack.blocks.{{i}}."
        parts = {"linear1": "ffn.in_proj", "linear2": "ffn.out_proj", "norm1": "self_residual.norm"}
        attentions = {"self_attn": "self_attn"}
        if side == "encoder":
            parts["norm2"] = "ffn_residual.norm"
        else:
            parts |= {"norm2": "cross_residual.norm", "norm3": "ffn_residual.norm"}
            attentions["multihead_attn"] = "cross_attn"
        for a, b in attentions.items():
            parts[f"{a}.out_proj"] = f"{b}.out_proj"
            for kind in ("weight", "bias"):
                table[f"{theirs}{a}.in_proj_{kind}"] = Fused(ours + b + ".{}_proj." + kind)
        for a, b in parts.items():
            for kind in ("weight", "bias"):
                table[f"{theirs}{a}.{kind}"] = f"{ours}{b}.{kind}"
        for kind in ("weight", "bias"):
            table[f"body.{side}.norm.{kind}"] = f"{side}.stack.norm.{kind}"
    return table


def both(norm_first: bool, activation: str = "relu") -> tuple[Theirs, nn.Module]:
    theirs = randomised(Theirs(norm_first, activation))
    net = ch.build(
        "transformer",
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        d_ff=INNER,
        placement="pre" if norm_first else "post",
        activation=activation,
        dropout=0.0,
    ).net
    weights = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    fill(net, to_ours(weights, key_table(), LAYERS)[0])
    return theirs, net


def check_gradients(theirs: Theirs, net: nn.Module) -> None:
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    expected, _, _ = to_ours(gradients, key_table(), LAYERS)
    got = {name: p.grad for name, p in net.named_parameters()}
    assert set(got) == set(expected)
    for name, gradient in got.items():
        same(gradient, expected[name])
        assert gradient.abs().max() > 1e-6 or name.endswith("k_proj.bias"), name


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_whole_transformer(norm_first, activation):
    theirs, net = both(norm_first, activation)
    source, target = torch.randint(VOCAB, (3, 9)), torch.randint(VOCAB, (3, 7))
    labels = torch.randint(VOCAB, (3 * 7,))
    logits = theirs(source, target), net(source, target)
    same(logits[1], logits[0])
    for output in logits:
        F.cross_entropy(output.flatten(0, 1), labels).backward()
    check_gradients(theirs, net)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_whole_transformer_padded(norm_first):
    theirs, net = both(norm_first)
    at, target_at = Positions.ragged(LENGTHS), Positions.ragged([7, 3, 5])
    real = target_at.filled()
    source, target = torch.randint(VOCAB, (3, 9)), torch.randint(VOCAB, (3, 7))
    logits = theirs(source, target, ~at.filled(), ~real), net(source, target, at, target_at)
    same(logits[1][real], logits[0][real])
    labels = torch.randint(VOCAB, (int(real.sum()),))
    for output in logits:
        F.cross_entropy(output[real], labels).backward()
    check_gradients(theirs, net)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_each_stack_on_given_states(norm_first):
    """Without embeddings: the same states into both, and the gradient comes back to them too."""
    theirs, net = both(norm_first)
    source, target = torch.randn(2, 9, WIDTH), torch.randn(2, 7, WIDTH)
    ahead = torch.ones(7, 7, dtype=torch.bool).triu(1)
    places = Positions.span(0, 9), Positions.span(0, 7)
    inputs = [(source.clone().requires_grad_(), target.clone().requires_grad_()) for _ in range(2)]
    (s, t), (s2, t2) = inputs
    states = theirs.body.encoder(s), net.encoder.stack(s2, places[0])
    same(states[1], states[0])
    outs = (
        theirs.body.decoder(t, states[0], tgt_mask=ahead),
        net.decoder.stack(t2, places[1], memory=Memory(states[1], places[0])),
    )
    same(outs[1], outs[0])
    weights = torch.randn_like(outs[0])
    for out in outs:
        (out * weights).sum().backward()
    same(s2.grad, s.grad)
    same(t2.grad, t.grad)


# --- attention ---


def attention_pair(bias: bool = True, d_source: int | None = None):
    theirs = nn.MultiheadAttention(
        WIDTH, HEADS, bias=bias, kdim=d_source, vdim=d_source, batch_first=True
    )
    randomised(theirs)
    ours = Attention(WIDTH, HEADS, d_source=d_source, biases=(bias,) * 4)
    if d_source is None:
        matrices = theirs.in_proj_weight.chunk(3)
    else:
        matrices = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    with torch.no_grad():
        for part, matrix in zip("qkv", matrices, strict=True):
            getattr(ours, f"{part}_proj").weight.copy_(matrix)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
        if bias:
            for part, vector in zip("qkv", theirs.in_proj_bias.chunk(3), strict=True):
                getattr(ours, f"{part}_proj").bias.copy_(vector)
            ours.out_proj.bias.copy_(theirs.out_proj.bias)
    return theirs, ours


def joined(ours: Attention, kind: str) -> Tensor:
    return torch.cat([getattr(getattr(ours, f"{part}_proj"), kind).grad for part in "qkv"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_self_attention(bias, causal):
    theirs, ours = attention_pair(bias)
    x = torch.randn(3, 9, WIDTH)
    ahead = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    out, weights = theirs(x, x, x, attn_mask=ahead, average_attn_weights=False)
    view = View.of(Causal() if causal else All(), Positions.span(0, 9))
    with ch.capture(ours, "pattern") as acts:
        mine = ours(x, view)
    same(mine, out)
    same(acts["pattern"], weights)
    target = torch.randn_like(out)
    for output in (out, mine):
        F.mse_loss(output, target).backward()
    same(joined(ours, "weight"), theirs.in_proj_weight.grad)
    same(ours.out_proj.weight.grad, theirs.out_proj.weight.grad)
    if bias:
        same(joined(ours, "bias"), theirs.in_proj_bias.grad)
        same(ours.out_proj.bias.grad, theirs.out_proj.bias.grad)


def test_cross_attention_to_a_source_of_another_width():
    theirs, ours = attention_pair(d_source=20)
    x, source = torch.randn(3, 4, WIDTH), torch.randn(3, 9, 20)
    at = Positions.ragged(LENGTHS)
    out, weights = theirs(
        x, source, source, key_padding_mask=~at.filled(), average_attn_weights=False
    )
    with ch.capture(ours, "pattern") as acts:
        mine = ours(x, View.across(at), source=source)
    same(mine, out)
    same(acts["pattern"], weights)
    assert (acts["pattern"][0, :, :, LENGTHS[0] :] == 0).all()
    target = torch.randn_like(out)
    for output in (out, mine):
        F.mse_loss(output, target).backward()
    for part in "qkv":
        same(getattr(ours, f"{part}_proj").weight.grad, getattr(theirs, f"{part}_proj_weight").grad)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("mask", [All(), Causal(), Causal() & Window(3)], ids=lambda m: m.kind)
def test_kernel_is_the_formula_and_pytorchs(mask: Mask, scale, groups):
    """softmax(q k^T scale) v written out, by PyTorch's fused function, and by our fused kernel."""
    q = torch.randn(2, HEADS, 7, 8, requires_grad=True)
    k, v = (torch.randn(2, groups, 7, 8, requires_grad=True) for _ in range(2))
    number = 8**-0.5 if scale is None else scale
    view = View.of(mask, Positions.span(0, 7))
    allowed = torch.tensor(
        [
            [
                mask.kind == "all" or (j <= i and (mask.kind != "both" or i - j < 3))
                for j in range(7)
            ]
            for i in range(7)
        ]
    )
    outs = {
        "pytorch": F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True
        ),
        "slow": attend(softmax(scores(q, k, number), view), v),
        "fused": Softmax(number)(q, k, v, view),
    }
    weights = torch.randn_like(q)
    gradients = {
        name: torch.autograd.grad((o * weights).sum(), (q, k, v)) for name, o in outs.items()
    }
    for name in ("slow", "fused"):
        same(outs[name], outs["pytorch"])
        for ours, theirs in zip(gradients[name], gradients["pytorch"], strict=True):
            same(ours, theirs)
