"""Equivalences of whole models: what must not matter does not, in inference and in training."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.attention.mask import Adjacency, All, Causal, Prefix, Segments, Window
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import TopKConfig
from clearhead.attention.spec import (
    ALiBiConfig,
    RopeConfig,
    ShawConfig,
    T5BucketsConfig,
    TransformerXLConfig,
)
from clearhead.attention.view import View
from clearhead.layers.position import SinusoidalConfig
from clearhead.models.base import EncoderDecoder
from tiny import (
    DECODERS,
    ENCODERS,
    MODELS,
    POSITIONS,
    SEQ2SEQ,
    SIZES,
    VOCAB,
    attention,
    close,
    padded,
    positioned,
    stacked,
    tiny,
    tokens,
)

INSIDE = {
    "none": None,
    "rope": RopeConfig(),
    "alibi": ALiBiConfig(),
    "t5_buckets": T5BucketsConfig(8, 16),
    "shaw": ShawConfig(2),
    "transformer_xl": TransformerXLConfig(),
}
STACKS = {
    "pre": {},
    "post": {"placement": "post"},
    "sandwich": {"placement": "sandwich"},
    "parallel": {"topology": "parallel"},
    "parallel sandwich": {"topology": "parallel", "placement": "sandwich"},
}


def run(net, ids, at=None, source=None, source_at=None):
    """The output of any network; a source for those that take one."""
    if not isinstance(net, EncoderDecoder):
        return net(ids, at)
    source = tokens(ids.shape[0], 5, seed=8) if source is None else source
    return net(source, ids, source_at, at)


def cases():
    """Every family, every position in a GPT-2, every placement and kernel."""
    return (
        [("family", name) for name in MODELS]
        + [("position", name) for name in POSITIONS]
        + [("stack", name) for name in STACKS]
        + [("stack", "top_k"), ("stack", "window")]
    )


def made(case):
    kind, name = case
    if kind == "family":
        return tiny(name)
    if kind == "position":
        return positioned(name)
    if name == "top_k":
        return stacked(attention(kernel=TopKConfig(2), position=RopeConfig()))
    if name == "window":
        return stacked(attention(Causal() & Window(3), kv=1, position=ALiBiConfig()))
    return stacked(attention(position=ShawConfig(2)), position=SinusoidalConfig(), **STACKS[name])


named = {"ids": lambda case: "-".join(case)}
every_case = pytest.mark.parametrize("case", cases(), **named)


# --- padding and batches ---


@settings(max_examples=5)
@given(filler=st.integers(0, VOCAB - 1), side=st.sampled_from(["left", "right"]))
@every_case
def test_what_empty_slots_hold_cannot_matter(case, filler, side):
    net = made(case)
    rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]]
    source, source_at = padded([[2, 7], [1], [8, 2, 8]], side)
    ids, at = padded(rows, side)
    other, _ = padded(rows, side, filler)
    other_source = torch.where(source_at.pos >= 0, source, filler)
    filled = at.pos >= 0
    with torch.no_grad():
        before = run(net, ids, at, source, source_at)
        after = run(net, other, at, other_source, source_at)
    assert torch.equal(after[filled], before[filled])
    assert torch.isfinite(after).all()


@every_case
def test_left_pad_is_right_pad_is_no_pad_is_each_alone(case):
    net = made(case)
    rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]]
    sources = [[2, 7], [1], [8, 2, 8]]
    with torch.no_grad():
        alone = [
            run(net, torch.tensor([row]), source=torch.tensor([source]))[0]
            for row, source in zip(rows, sources, strict=True)
        ]
        for side in ("left", "right"):
            ids, at = padded(rows, side)
            source, source_at = padded(sources, side)
            together = run(net, ids, at, source, source_at)
            for row, expected in enumerate(alone):
                close(together[row][at.pos[row] >= 0], expected, 2e-5)


@every_case
def test_a_batch_of_three_is_three_of_one(case):
    net, ids, source = made(case), tokens(3, 7), tokens(3, 5, seed=8)
    with torch.no_grad():
        together = run(net, ids, source=source)
        for row in range(3):
            close(
                run(net, ids[row : row + 1], source=source[row : row + 1])[0], together[row], 2e-5
            )


def test_an_empty_row_is_finite_and_changes_nobody():
    for name in MODELS:
        net = tiny(name)
        ids, at = padded([[3, 1, 4], []], "right")
        source, source_at = padded([[2, 7], []], "right")
        out = run(net, ids, at, source, source_at)
        assert torch.isfinite(out).all(), name
        close(out[:1], run(net, ids[:1], source=source[:1]), 2e-5)
        gradients = torch.autograd.grad(out[0].sum() + out[1].sum(), list(net.parameters()))
        assert all(torch.isfinite(g).all() for g in gradients), name


# --- causality ---


def influence(net, ids, at=None):
    """[t, t]: how much the input at slot j moves the output at slot i, by autograd."""
    grabbed = []

    def hold(x):
        x = x.detach().requires_grad_()
        grabbed.append(x)
        return x

    decoder = net.decoder if isinstance(net, EncoderDecoder) else net
    with ch.patch(decoder, {"embed.out": hold}):
        out = run(net, ids, at)
    rows = []
    for i in range(ids.shape[1]):
        weights = torch.linspace(-1, 1, out.shape[-1])
        gradient = torch.autograd.grad((out[:, i] * weights).sum(), grabbed, retain_graph=True)[0]
        rows.append(gradient.abs().amax(dim=(0, 2)))
    return torch.stack(rows)


CAUSAL = [case for case in cases() if case[1] not in ENCODERS]


@pytest.mark.parametrize("case", CAUSAL, **named)
def test_the_future_cannot_move_the_past(case):
    moved = influence(made(case), tokens(2, 7))
    assert (moved.triu(1) == 0).all()
    assert (moved.diagonal() > 0).all()
    if case[1] not in ("window", "llama-window", "top_k"):
        assert (moved.tril()[torch.ones(7, 7).tril().bool()] > 0).all()


@pytest.mark.parametrize("name", ENCODERS)
def test_in_an_encoder_everybody_moves_everybody(name):
    assert (influence(tiny(name), tokens(2, 7)) > 0).all()


def test_a_window_reaches_as_far_as_its_layers():
    """Two layers that see 3 positions: what is 4 back still counts, what is 5 back does not."""
    net = stacked(attention(Causal() & Window(3), position=RopeConfig()))
    moved = influence(net, tokens(2, 9)) > 0
    distance = torch.arange(9).unsqueeze(1) - torch.arange(9)
    assert torch.equal(moved, (distance >= 0) & (distance <= 4))


def test_a_prefix_sees_itself_whole():
    net = stacked(attention(Causal() | Prefix(), position=RopeConfig()))
    ids = tokens(2, 7)
    at = Positions.span(0, 7).with_data(prefix=torch.tensor([3, 3]))
    moved = influence(net, ids, at) > 0
    q, k = torch.arange(7).unsqueeze(1), torch.arange(7)
    assert torch.equal(moved, (k <= q) | (k < 3))
    # A prefix of one is the plain causal model; of everything, an encoder.
    causal = stacked(attention(position=RopeConfig()))
    one = Positions.span(0, 7).with_data(prefix=torch.tensor([1, 1]))
    close(net(ids, one), causal(ids))
    encoder = stacked(attention(All(), position=RopeConfig()))
    both = Positions.span(0, 7).with_data(prefix=torch.tensor([7, 1]))
    close(net(ids, both)[0], encoder(ids)[0])
    close(net(ids, both)[1], causal(ids)[1])


def test_a_graph_is_walked_along_its_edges():
    net = stacked(attention(Adjacency()), n_layers=2)
    chain = torch.eye(6).bool() | torch.eye(6).bool().roll(1, 0).tril(-1)
    at = Positions.span(0, 6).with_data(pairs=chain.unsqueeze(0))
    moved = influence(net, tokens(2, 6), at) > 0
    reached = torch.matrix_power(chain.float(), 2) > 0
    assert torch.equal(moved, reached)


# --- symmetries and packing ---


@pytest.mark.parametrize("kernel", [{}, {"kernel": TopKConfig(3)}], ids=["softmax", "top_k"])
@pytest.mark.parametrize("stack", STACKS)
def test_an_encoder_without_positions_is_permutation_equivariant(stack, kernel):
    net = stacked(attention(All(), **kernel), **STACKS[stack])
    ids, order = tokens(2, 7), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    close(net(ids[:, order]), net(ids)[:, order], 2e-5)


def test_bert_without_positions_is_permutation_equivariant_and_with_them_not():
    ids, order = tokens(2, 7), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    net = tiny("bert", position=None)
    close(net(ids[:, order]), net(ids)[:, order], 2e-5)
    net = tiny("bert")
    assert (net(ids[:, order]) - net(ids)[:, order]).abs().max() > 0.1


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("position", INSIDE)
def test_packed_documents_are_each_alone(position, stack):
    mask = Causal() & Segments()
    net = stacked(
        attention(mask, position=INSIDE[position]), position=SinusoidalConfig(), **STACKS[stack]
    )
    lengths = [4, 1, 6]
    ids = tokens(1, sum(lengths))
    out = net(ids, Positions.packed(lengths))
    plain = stacked(
        attention(position=INSIDE[position]), position=SinusoidalConfig(), **STACKS[stack]
    )
    for part, one in zip(ids.split(lengths, 1), out.split(lengths, 1), strict=True):
        close(one, plain(part), 2e-5)


def test_tied_parameters_are_one():
    for name in MODELS:
        net = tiny(name)
        for alias, original in net.ties:
            assert net.get_parameter(alias) is net.get_parameter(original), name


def test_a_tied_matrix_is_drawn_as_an_embedding():
    """The head's projection is the embedding: it must not be drawn once more as a projection."""
    sizes = SIZES | {"vocab_size": 1000, "d_model": 64}
    for family, std in [("transformer", 64**-0.5), ("t5", 1.0), ("gpt2", 0.02), ("bert", 0.02)]:
        net = ch.build(family, seed=0, **sizes).net
        embed = (net.encoder if isinstance(net, EncoderDecoder) else net).embed
        assert embed.tokens.weight.std().item() == pytest.approx(std, rel=0.05), family
        if isinstance(net, EncoderDecoder):
            assert net.head.proj.weight is embed.tokens.weight


# --- training ---


@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_accumulating_4_times_2_is_1_times_8(name):
    ids, source = tokens(8, 7), tokens(8, 5, seed=8)

    def gradients(parts):
        net = tiny(name)
        for rows in torch.arange(8).chunk(parts):
            logits = run(net, ids[rows, :-1], source=source[rows])
            target = ids[rows, 1:].flatten()
            (F.cross_entropy(logits.flatten(0, 1), target) / parts).backward()
        return dict(net.named_parameters())

    once, often = gradients(1), gradients(4)
    for key in once:
        close(often[key].grad, once[key].grad)


class Checkpointed(torch.nn.Module):
    """A block whose inside is computed again on the way back."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, look):
        return checkpoint(self.block, x, look, use_reentrant=False)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ("family", "gpt2"),
        ("family", "llama-window"),
        ("family", "gpt_neox"),
        ("family", "t5"),
        ("position", "alibi"),
        ("position", "transformer_xl"),
    ],
    **named,
)
def test_activation_checkpointing_gives_the_same_gradients(case, ragged):
    ids = tokens(3, 7)
    at = Positions.ragged([6, 3, 5]) if ragged else None

    def gradients(wrapped):
        net = made(case).train()
        calls = []
        named_parameters = dict(net.named_parameters())
        for module in list(net.modules()):
            if hasattr(module, "blocks"):
                module.blocks[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
                if wrapped:
                    module.blocks = torch.nn.ModuleList(Checkpointed(b) for b in module.blocks)
        out = run(net, ids[:, :-1], at)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        (out * weights).sum().backward()
        return out, {k: p.grad for k, p in named_parameters.items()}, len(calls)

    out, plain, calls = gradients(False)
    again, checkpointed, calls_again = gradients(True)
    assert calls_again == 2 * calls
    assert torch.equal(out, again)
    for key, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[key]), key


# --- dropout ---


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_for_training_only_and_follows_the_seed(name):
    ids = tokens(2, 6)
    plain, net = tiny(name), tiny(name, dropout=0.4)
    assert torch.equal(run(net, ids), run(plain, ids))
    net.train()

    def drawn(seed):
        torch.manual_seed(seed)
        return run(net, ids)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    plain.train()
    assert torch.equal(run(plain, ids), run(plain.eval(), ids))


def share(x, p):
    """A share of zeros near p, and the rest scaled up."""
    zeros = (x == 0).float().mean().item()
    assert abs(zeros - p) < 4 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-3, zeros
    return x[x != 0]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_of_embeddings_and_sublayers_has_the_right_rate(p):
    net = tiny("gpt2", dropout=p).train()
    ids = tokens(32, 60)
    with ch.capture(net, "embed.out", "blocks.0.*_residual.branch") as acts:
        net(ids)
    kept = share(acts["embed.out"], p)
    assert acts["embed.out"].shape == (32, 60, 16)
    whole = net.embed.tokens(ids) + net.embed.position(Positions.span(0, 60))
    close(kept, whole[acts["embed.out"] != 0] / (1 - p))
    for part in ("self", "ffn"):
        share(acts[f"stack.blocks.0.{part}_residual.branch"], p)


@pytest.mark.parametrize("kernel", [{}, {"kernel": TopKConfig(64)}], ids=["softmax", "top_k"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_of_attention_weights_has_the_right_rate(p, kernel):
    """Values of one-hot vectors make the weights themselves the output."""
    attn = attention(All(), dropout=p, **kernel).build().train()
    view = View.of(All(), Positions.span(0, 64))
    q, k = 0.3 * torch.randn(2, 8, 4, 64, 64)
    v = torch.eye(64).expand(8, 4, 64, 64)
    weights = attn.kernel(q, k, v, view)
    kept = share(weights, p)
    close(kept, attn.kernel.pattern(q, k, view)[weights != 0] / (1 - p), 2e-5)
    attn.eval()
    close(attn.kernel(q, k, v, view), attn.kernel.pattern(q, k, view))


# --- compiled and exported, in a process without checked shapes ---


def script(text):
    """Run a program as a user would; it must not say anything but ok."""
    head = "import torch, clearhead as ch\nfrom clearhead.attention.positions import Positions\n"
    tests = os.path.dirname(__file__)
    env = os.environ | {"PYTHONPATH": tests, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_VERBOSE": "0"}
    program = head + "from tiny import *\ntorch.set_num_threads(1)\n" + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["ok"], done.stdout


COMPILE = """
    for name in {names}:
        torch._dynamo.reset()
        net = tiny(name).double()  # gradients of some hundred that cancel each other
        fast = torch.compile(net, fullgraph=True, backend="aot_eager")
        args = [tokens(2, 5), tokens(2, 7)] if name in SEQ2SEQ else [tokens(2, 7)]
        out, expected = fast(*args), net(*args)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        params = list(net.parameters())
        for a, b in zip(torch.autograd.grad(out.square().sum(), params),
                        torch.autograd.grad(expected.square().sum(), params)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    net = positioned("transformer_xl")
    torch._dynamo.reset()
    fast = torch.compile(net, fullgraph=True, backend="eager")
    at = Positions.ragged([7, 4])
    torch.testing.assert_close(fast(tokens(2, 7), at), net(tokens(2, 7), at), rtol=1e-5, atol=1e-5)
    print("ok")
"""


@pytest.mark.slow
def test_compiled_whole_equals_eager():
    script(COMPILE.format(names=["gpt2", "llama-window", "gpt_neox", "bert", "t5"]))


def test_exported_with_dynamic_batch_and_length():
    script("""
    net = tiny("gpt2")
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=60)
    program = torch.export.export(net, (tokens(2, 7),), dynamic_shapes=({0: batch, 1: length},))
    for rows, time in [(2, 7), (5, 13), (3, 2)]:
        ids = tokens(rows, time)
        torch.testing.assert_close(program.module()(ids), net(ids), rtol=1e-5, atol=1e-5)
    print("ok")
    """)
