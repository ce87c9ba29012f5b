"""Attention: the fused kernel and its slow twin, symmetries, and the lectures' worked examples."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.attention.additive import AdditiveAttention
from clearhead.attention.attention import Attention
from clearhead.attention.mask import All, Causal, Prefix, Window
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import (
    Softmax,
    SoftmaxConfig,
    TopK,
    TopKConfig,
    attend,
    scores,
    softmax,
)
from clearhead.attention.view import View, merge
from clearhead.errors import ClearheadError
from tiny import close

ROWS, HEADS, TIME, WIDTH = 3, 4, 6, 8
AT = {
    "span": Positions.span(0, TIME),
    "right": Positions.ragged([4, 6, 1], "right"),
    "left": Positions.ragged([4, 6, 1], "left"),
    "holes": Positions.of(torch.tensor([[0, -1, 1, -1, 2, 3], [-1] * 6, [5, 0, 3, -1, 7, 1]])),
}
MASKS = {
    "all": All(),
    "causal": Causal(),
    "window": Causal() & Window(2),
    "both sides": Window(2),
    "prefix": Causal() | Prefix(),
}
BIASES = ["none", "layer", "stack", "both"]


def draw(*shape, seed=0):
    """Random numbers with a gradient."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, requires_grad=True)


def seen(mask, at):
    """The view of one mask, with prefixes for those that ask."""
    return View.of(mask, at.with_data(prefix=torch.tensor([2, 3, 1])))


def inputs(kv, time=TIME):
    return (
        draw(ROWS, HEADS, time, WIDTH, seed=1),
        draw(ROWS, kv, time, WIDTH, seed=2),
        draw(ROWS, kv, time, WIDTH, seed=3),
    )


def biased(view, which):
    """The view and the layer's bias, and the leaves whose gradients count."""
    layer = draw(ROWS, HEADS, TIME, TIME, seed=4) if which in ("layer", "both") else None
    stack = draw(1, HEADS, TIME, TIME, seed=5) if which in ("stack", "both") else None
    if stack is not None:
        view = dataclasses.replace(view, bias=merge(view.booleans(), stack))
    return view, layer, [leaf for leaf in (layer, stack) if leaf is not None]


def gradients(out, leaves):
    """Of a sum that weighs every output differently."""
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True)


# --- the fused kernel and its twin ---


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv", [4, 2, 1], ids=["multi-head", "grouped", "multi-query"])
def test_fused_equals_reference(kv, mask, at, bias):
    q, k, v = inputs(kv)
    view, layer, leaves = biased(seen(MASKS[mask], AT[at]), bias)
    kernel = Softmax(0.3)
    fused = kernel(q, k, v, view, layer)
    slow = attend(softmax(scores(q, k, 0.3), view, layer), v)
    close(fused, slow)
    for a, b in zip(
        gradients(fused, [q, k, v, *leaves]), gradients(slow, [q, k, v, *leaves]), strict=True
    ):
        assert torch.isfinite(a).all()
        close(a, b)
    pattern = kernel.pattern(q, k, view, layer)
    allowed = seen(MASKS[mask], AT[at]).mask.allowed(view.q, view.k)
    allowed = allowed.expand(ROWS, -1, -1).unsqueeze(1).expand_as(pattern)
    assert (pattern[~allowed] == 0).all()
    anything = allowed.any(-1)
    close(pattern.sum(-1), anything.float())
    # A query with nothing to look at: exactly zeros from both.
    assert (fused[~anything] == 0).all()
    assert (slow[~anything] == 0).all()


@pytest.mark.parametrize("make", [Softmax, lambda s: TopK(s, k=2)], ids=["softmax", "top_k"])
@pytest.mark.parametrize("bias", BIASES)
def test_a_fully_masked_row_gives_zeros_and_zero_gradients(make, bias):
    nothing = Positions.of(torch.full((ROWS, TIME), -1))
    q, k, v = inputs(2)
    view, layer, leaves = biased(View.of(Causal(), nothing), bias)
    kernel = make(0.5)
    twins = kernel(q, k, v, view, layer), kernel.attend(kernel.pattern(q, k, view, layer), v)
    for out in twins:
        assert (out == 0).all()
        for gradient in gradients(out, [q, k, v, *leaves]):
            assert (gradient == 0).all()


def test_queries_that_see_nothing_in_a_source_get_zeros():
    attn = Attention(16, 4)
    source = draw(2, 5, 16)
    empty = Positions.ragged([0, 5])
    x = draw(2, 3, 16)
    out = attn(x, View.across(empty), source=source)
    close(out[0], attn.out_proj.bias.expand(3, 16))
    close(out[1:], attn(x[1:], source=source[1:]))
    gradient = torch.autograd.grad(out.sum(), [source])[0]
    assert (gradient[0] == 0).all()
    assert (gradient[1] != 0).any()


def test_the_reference_is_the_formula():
    """pattern = softmax(q k^T / sqrt(d)), by loops."""
    q, k, v = (x.detach() for x in inputs(2))
    view = View.of(Causal(), AT["span"])
    out = Softmax(WIDTH**-0.5)(q, k, v, view)
    for row in range(ROWS):
        for head in range(HEADS):
            for i in range(TIME):
                weights = [
                    math.exp(float(q[row, head, i] @ k[row, head // 2, j]) / math.sqrt(WIDTH))
                    for j in range(i + 1)
                ]
                context = sum(w * v[row, head // 2, j] for j, w in enumerate(weights))
                close(out[row, head, i], context / sum(weights))


def test_what_masked_slots_hold_cannot_matter():
    q, k, v = inputs(4)
    at = AT["holes"]
    view = View.of(Causal(), at)
    before = Softmax(0.5)(q, k, v, view)
    empty = ~at.filled().unsqueeze(1).unsqueeze(3)
    after = Softmax(0.5)(q, k.masked_fill(empty, 1e4), v.masked_fill(empty, -1e4), view)
    assert torch.equal(before, after)


# --- temperature and top-k ---


@pytest.mark.parametrize("mask", [All(), Causal()], ids=["all", "causal"])
def test_temperature_towards_zero_is_the_hard_look_up(mask):
    q, k, v = inputs(4)
    view = View.of(mask, AT["span"])
    best = merge(view.booleans(), scores(q, k, 1.0)).argmax(-1)
    looked_up = v.gather(2, best.unsqueeze(3).expand(-1, -1, -1, WIDTH))
    cold = SoftmaxConfig(temperature=1e-5).build(1.0, 0.0)
    close(cold(q, k, v, view), looked_up)
    warm = SoftmaxConfig().build(1.0, 0.0)(q, k, v, view)
    assert (warm - looked_up).abs().max() > 0.1
    close(
        SoftmaxConfig(temperature=2.0).build(1.0, 0.0)(q, k, v, view), Softmax(0.5)(q, k, v, view)
    )


def test_a_high_temperature_is_the_mean():
    q, k, v = inputs(4)
    hot = SoftmaxConfig(temperature=1e7).build(1.0, 0.0)
    mean = v.mean(2, keepdim=True).expand_as(q)
    close(hot(q, k, v, View.of(All(), AT["span"])), mean)


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_top_k_keeps_exactly_k(kept):
    q, k, v = inputs(2)
    view = View.of(Causal(), AT["span"])
    kernel = TopKConfig(kept).build(0.7, 0.0)
    pattern = kernel.pattern(q, k, view)
    counts = torch.arange(1, TIME + 1).clamp(max=kept).expand(ROWS, HEADS, -1)
    assert torch.equal((pattern > 0).sum(-1), counts)
    close(pattern.sum(-1), torch.ones(ROWS, HEADS, TIME))
    # The kept ones are the largest, in their own proportions.
    full = Softmax(0.7).pattern(q, k, view)
    smallest_kept = torch.where(pattern > 0, full, math.inf).amin(-1)
    largest_left = torch.where(pattern > 0, -math.inf, full).amax(-1)
    assert (smallest_kept >= largest_left).all()
    ratio = full / pattern.clamp(min=1e-9)
    lowest = torch.where(pattern > 0, ratio, math.inf).amin(-1)
    highest = torch.where(pattern > 0, ratio, -math.inf).amax(-1)
    close(lowest, highest)
    close(kernel(q, k, v, view), attend(pattern, v))


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("kept", [TIME, TIME + 1, 100])
def test_top_k_of_everything_is_full_attention(kept, at):
    q, k, v = inputs(2)
    view = View.of(Causal(), AT[at])
    close(TopK(0.7, k=kept)(q, k, v, view), Softmax(0.7)(q, k, v, view))


def test_top_1_is_the_hard_look_up():
    q, k, v = inputs(4)
    view = View.of(All(), AT["span"])
    best = scores(q, k, 1.0).argmax(-1).unsqueeze(3).expand(-1, -1, -1, WIDTH)
    close(TopK(1.0, k=1)(q, k, v, view), v.gather(2, best))


# --- why sqrt(d) ---


@pytest.mark.parametrize("width", [4, 64, 512])
def test_the_scale_keeps_the_variance_of_scores_at_1(width):
    generator = torch.Generator().manual_seed(width)
    q = torch.randn(4, 1, 128, width, generator=generator)
    k = torch.randn(4, 1, 128, width, generator=generator)
    assert abs(scores(q, k, width**-0.5).var().item() - 1) < 0.05
    assert abs(scores(q, k, 1.0).var().item() / width - 1) < 0.05
    # The default of an attention layer is that scale.
    assert Attention(2 * width, 2).kernel.scale == pytest.approx(width**-0.5)


# --- heads ---


@pytest.mark.parametrize(("kv", "head_dim"), [(4, None), (2, None), (1, 6)])
def test_multi_head_attention_is_a_loop_over_heads(kv, head_dim):
    attn = Attention(16, 4, n_kv_heads=kv, head_dim=head_dim)
    width = attn.head_dim
    x = draw(2, 5, 16)
    heads = []
    for h in range(4):
        g = h * kv // 4
        q = attn.q_proj(x)[..., h * width : (h + 1) * width]
        k = attn.k_proj(x)[..., g * width : (g + 1) * width]
        v = attn.v_proj(x)[..., g * width : (g + 1) * width]
        heads.append((q @ k.transpose(1, 2) / math.sqrt(width)).softmax(-1) @ v)
    close(attn(x), attn.out_proj(torch.cat(heads, -1)))


def test_grouped_heads_are_repeated_key_value_heads():
    q, k, v = inputs(2)
    view = View.of(Causal(), AT["span"])
    repeated = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    close(Softmax(0.3)(q, k, v, view), Softmax(0.3)(q, *repeated, view))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ClearheadError, match="does not divide"):
        Attention(16, 3)
    with pytest.raises(ClearheadError, match="n_kv_heads = 3"):
        Attention(16, 4, n_kv_heads=3)


def test_cross_attention_reads_a_source_of_another_width():
    attn = Attention(16, 4, d_source=10)
    x, source = draw(2, 3, 16), draw(2, 5, 10)
    q = attn.q_proj(x).view(2, 3, 4, 4).transpose(1, 2)
    k = attn.k_proj(source).view(2, 5, 4, 4).transpose(1, 2)
    v = attn.v_proj(source).view(2, 5, 4, 4).transpose(1, 2)
    out = ((q @ k.transpose(2, 3)) / 2).softmax(-1) @ v
    close(attn(x, source=source), attn.out_proj(out.transpose(1, 2).reshape(2, 3, 16)))


# --- symmetries ---


@pytest.mark.parametrize("kernel", [None, TopK(0.5, k=3)], ids=["softmax", "top_k"])
@pytest.mark.parametrize("kv", [4, 1])
def test_without_positions_attention_is_permutation_equivariant(kv, kernel):
    attn = Attention(16, 4, n_kv_heads=kv, kernel=kernel)
    x, order = draw(2, 7, 16), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    close(attn(x[:, order]), attn(x)[:, order])
    assert (attn(x[:, order]) - attn(x)).abs().max() > 1e-3


def test_cross_attention_does_not_care_about_the_order_of_the_source():
    attn = Attention(16, 4)
    x, source = draw(2, 3, 16), draw(2, 6, 16)
    order = torch.tensor([3, 0, 2, 5, 1, 4])
    close(attn(x, source=source[:, order]), attn(x, source=source))


# --- additive attention ---


@pytest.mark.parametrize("own_values", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_additive_attention_is_the_loop(holes, own_values):
    attn = AdditiveAttention(query_dim=6, key_dim=10, width=5)
    queries, keys = draw(2, 3, 6), draw(2, 4, 10)
    values = draw(2, 4, 7) if own_values else None
    k_at = Positions.ragged([2, 4], "left") if holes else Positions.span(0, 4)
    view = View.of(None, Positions.span(0, 3), k_at)
    with ch.capture(attn, "pattern") as acts:
        out = attn(queries, keys, view, values)
    w1, w2, w = attn.q_proj.weight, attn.k_proj.weight, attn.score.weight[0]
    for row in range(2):
        real = [j for j in range(4) if int(k_at.pos.expand(2, -1)[row, j]) >= 0]
        for i in range(3):
            raw = [w @ torch.tanh(w1 @ queries[row, i] + w2 @ keys[row, j]) for j in real]
            weights = torch.stack(raw).softmax(0)
            source = keys if values is None else values
            context = sum(a * source[row, j] for a, j in zip(weights, real, strict=True))
            close(out[row, i], context)
            close(acts["pattern"][row, 0, i, real], weights)
            rest = [j for j in range(4) if j not in real]
            assert (acts["pattern"][row, 0, i, rest] == 0).all()


def test_additive_attention_over_nothing_is_zero():
    attn = AdditiveAttention(6, 10, 5)
    queries, keys = draw(2, 3, 6), draw(2, 4, 10)
    out = attn(queries, keys, View.across(Positions.ragged([0, 4])))
    assert (out[0] == 0).all()
    gradient = torch.autograd.grad(out.sum(), [keys, attn.score.weight])
    assert all(torch.isfinite(g).all() for g in gradient)
    assert (gradient[0][0] == 0).all()


def test_additive_attention_has_a_pattern_tap():
    attn = AdditiveAttention(6, 10, 5)
    view = View.of(Causal(), Positions.span(0, 4))
    queries, keys = torch.randn(2, 4, 6), torch.randn(2, 4, 10)
    before = attn(queries, keys, view)
    with ch.capture(attn, "pattern") as acts:
        assert torch.equal(attn(queries, keys, view), before)
    assert acts["pattern"].shape == (2, 1, 4, 4)
    close(acts["pattern"].squeeze(1) @ keys, before)
    with ch.patch(attn, {"pattern": torch.zeros_like}):
        assert (attn(queries, keys, view) == 0).all()


# --- the lectures' worked examples, to four decimals ---


def printed(actual, expected, decimals=4):
    """Equal to the printed digits."""
    difference = (actual.detach().squeeze() - torch.tensor(expected)).abs().max()
    assert difference <= 0.5 * 10**-decimals + 1e-7, difference


def test_example_1_the_query_that_looks_for_an_animal():
    q = torch.tensor([0.9, 0.1, 0.2, 0.3]).view(1, 1, 1, 4)
    k = torch.tensor(
        [
            [0, 0, 0, 1],
            [1, 0, 0.3, 0],
            [0, 1, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 1],
            [0, 0, 1, 0],
        ]
    ).view(1, 1, 6, 4)
    v = torch.tensor(
        [
            [0.1, 0, 0, 0.8],
            [0.9, 0, 0.1, 0.7],
            [0, 0.9, 0, 0.3],
            [0, 0, 0.5, 0],
            [0, 0, 0, 0.9],
            [0, 0, 0.9, 0.6],
        ]
    ).view(1, 1, 6, 4)
    view = View.of(None, Positions.span(0, 1), Positions.span(0, 6))
    kernel = Softmax(4**-0.5)
    printed(scores(q, k, 1.0), [0.30, 0.96, 0.10, 0.00, 0.30, 0.20])
    printed(kernel.pattern(q, k, view), [0.1637, 0.2277, 0.1481, 0.1409, 0.1637, 0.1557])
    printed(kernel(q, k, v, view), [0.2213, 0.1333, 0.2334, 0.5756])


def one_head(wq, wk, wv):
    """An attention layer of one head of width 3 with these matrices (x W) and no output matrix."""
    attn = Attention(3, 1, biases=(False, False, False, False))
    pairs = [(attn.q_proj, wq), (attn.k_proj, wk), (attn.v_proj, wv), (attn.out_proj, torch.eye(3))]
    for linear, matrix in pairs:
        linear.weight = nn.Parameter(matrix.T.clone())
    return attn


def test_example_2_with_projections():
    x = torch.tensor(
        [[1, 0.5, 0.2], [0.3, 1.2, 0.8], [0.7, 0.4, 1.1], [1.5, 0.9, 0.3], [0.6, 1.3, 0.7]]
    )
    wq = torch.tensor([[1, 0, 0.5], [0.5, 1, 0], [0, 0.5, 1]])
    wk = torch.tensor([[0.8, 0.2, 0.3], [0.3, 0.9, 0.1], [0.2, 0.1, 0.8]])
    wv = torch.tensor([[1, 0.3, 0.2], [0.2, 1, 0.4], [0.1, 0.3, 1]])
    attn = one_head(wq, wk, wv)
    with ch.capture(attn, "*") as acts:
        out = attn(x.unsqueeze(0))
    printed(
        acts["q"],
        [
            [1.25, 0.6, 0.7],
            [0.9, 1.6, 0.95],
            [0.9, 0.95, 1.45],
            [1.95, 1.05, 1.05],
            [1.25, 1.65, 1],
        ],
    )
    q, k, v = x.double() @ wq.double(), x.double() @ wk.double(), x.double() @ wv.double()
    pattern = (q @ k.T / math.sqrt(3)).softmax(-1)
    printed(acts["k"], k.tolist())
    printed(acts["v"], v.tolist())
    printed(acts["pattern"], pattern.tolist())
    printed(out, (pattern @ v).tolist())


def test_example_3_without_projections():
    x = torch.tensor(
        [[1, 0.5, 0.2], [0.8, 1.2, 0.3], [0.6, 0.9, 1.1], [1.1, 0.4, 0.7], [0.9, 0.7, 0.8]]
    )
    attn = one_head(torch.eye(3), torch.eye(3), torch.eye(3))
    with ch.capture(attn, "pattern") as acts:
        out = attn(x.unsqueeze(0))
    printed(acts["pattern"][0, 0, 0], [0.1903, 0.2100, 0.1882, 0.2076, 0.2040])
    printed(out[0, 0], [0.8831, 0.7423, 0.6165])


def test_example_4_softmax():
    raw = torch.tensor([2.1, 0.3, -0.5, 1.8]).view(1, 1, 1, 4)
    view = View.of(None, Positions.span(0, 1), Positions.span(0, 4))
    printed(softmax(raw, view), [0.505, 0.0835, 0.0375, 0.3741])
