"""Taps: looking changes nothing, changing what it should, and nothing is left behind."""

from __future__ import annotations

import re

import pytest
import torch

import clearhead as ch
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Softmax, TopKConfig
from clearhead.errors import ClearheadError
from clearhead.models.base import EncoderDecoder
from clearhead.tap import taps
from tiny import (
    DECODERS,
    ENCODERS,
    MODELS,
    POSITIONS,
    SEQ2SEQ,
    SIZES,
    attention,
    close,
    positioned,
    stacked,
    tiny,
    tokens,
)

SELF = [f"self_attn.{tap}" for tap in ("q", "k", "v", "pattern", "z")]
CROSS = [f"cross_attn.{tap}" for tap in ("q", "k", "v", "pattern", "z")]
WITHOUT = ("rnn", "rnn-lstm", "rnn-gru", "rnn_seq2seq-lstm")  # attention
BLOCK = ["enter", "leave", *SELF, "self_residual.branch", "ffn.hidden", "ffn_residual.branch"]


def run(net, rows=2, time=6):
    """The output of any network for some ids."""
    if isinstance(net, EncoderDecoder):
        return net(tokens(rows, 5, seed=8), tokens(rows, time))
    return net(tokens(rows, time))


def listeners(net):
    """How many listeners there are in a whole network."""
    return sum(len(tap.listeners) for tap in taps(net).values())


# --- names ---


def stack_names(prefix, cross, recurrent=False):
    """The names of one side."""
    block = [*BLOCK, *CROSS, "cross_residual.branch"] if cross else BLOCK
    if recurrent:
        block = ["enter", "leave", *(["cross_attn.pattern"] if cross else [])]
    return {f"{prefix}embed.out"} | {f"{prefix}stack.blocks.*.{name}" for name in block}


@pytest.mark.parametrize("name", MODELS)
def test_names_on_every_family(name):
    """Names are public: the lens, saved scripts and the docs know them."""
    old = name.startswith("rnn")
    if name in SEQ2SEQ:
        looks = name != "rnn_seq2seq-lstm"  # which has the encoder's last state alone
        expected = stack_names("encoder.", False, old) | stack_names("decoder.", looks, old)
    else:
        expected = stack_names("", cross=False, recurrent=old)
    net = tiny(name)
    assert {re.sub(r"\d+", "*", tap) for tap in taps(net)} == expected
    with ch.capture(net, "**") as acts:
        run(net)
    assert set(acts) == set(taps(net))  # every one of them is passed in a forward


def test_shapes_and_values_of_the_taps():
    net = tiny("gpt2")  # 4 heads on 2 key/value heads
    with ch.capture(net, "**") as acts:
        net(tokens(2, 6))
    block = "stack.blocks.1."
    shapes = {
        "self_attn.q": (2, 4, 6, 4),
        "self_attn.k": (2, 2, 6, 4),
        "self_attn.v": (2, 2, 6, 4),
        "self_attn.pattern": (2, 4, 6, 6),
        "self_attn.z": (2, 4, 6, 4),
        "ffn.hidden": (2, 6, 64),
        "enter": (2, 6, 16),
    }
    for name, shape in shapes.items():
        assert tuple(acts[block + name].shape) == shape, name
    # The stream: what enters and what both sublayers write is what leaves, and enters the next.
    assert torch.equal(acts["embed.out"], acts["stack.blocks.0.enter"])
    assert torch.equal(acts["stack.blocks.0.leave"], acts["stack.blocks.1.enter"])
    written = acts[block + "self_residual.branch"] + acts[block + "ffn_residual.branch"]
    close(acts[block + "enter"] + written, acts[block + "leave"])
    # Inside: pattern v = z, and z through the output projection is the branch.
    v = acts[block + "self_attn.v"].repeat_interleave(2, dim=1)
    z = acts[block + "self_attn.z"]
    close(acts[block + "self_attn.pattern"] @ v, z)
    out = net.stack.blocks[1].self_attn.out_proj(z.transpose(1, 2).flatten(2))
    close(out, acts[block + "self_residual.branch"])


# --- looking changes nothing ---


@pytest.mark.parametrize("case", [*MODELS, *(f"gpt2:{p}" for p in POSITIONS)])
def test_capture_changes_no_bit(case):
    net = positioned(case.partition(":")[2]) if ":" in case else tiny(case)
    before = run(net)
    with ch.capture(net, "**") as acts:
        seen = run(net)
    assert torch.equal(seen, before)
    assert torch.equal(run(net), before)
    assert len(acts) > (4 if case.startswith("rnn") else 10)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "transformer", "gpt_neox", "bert"])
def test_capture_moves_no_random_stream(name):
    net = tiny(name, dropout=0.3).train()

    def drawn(looking):
        torch.manual_seed(5)
        if not looking:
            return run(net), torch.rand(1)
        with ch.capture(net, "**"):
            return run(net), torch.rand(1)

    for a, b in zip(drawn(False), drawn(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_capture_changes_no_gradient(name):
    net = tiny(name)
    parameters = list(net.parameters())
    before = torch.autograd.grad(run(net).square().sum(), parameters)
    with ch.capture(net, "**"):
        out = run(net)
    after = torch.autograd.grad(out.square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT])
def test_patterns_are_distributions_and_causal_ones_see_no_future(name):
    net = tiny(name)
    with ch.capture(net, "*_attn.pattern") as acts:
        run(net)
    for tap, pattern in acts.items():
        close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
        assert (pattern >= 0).all()
        if "self_attn" in tap and "encoder." not in tap and name not in ENCODERS:
            assert (pattern.triu(1) == 0).all()
    layers = 2 if name not in SEQ2SEQ else 6
    assert len(acts) == (1 if name == "rnn_seq2seq" else layers)


def test_patterns_of_padded_rows():
    net = tiny("llama")
    at = Positions.ragged([3, 5], "left")
    with ch.capture(net, "self_attn.pattern") as acts:
        net(tokens(2, 5), at)
    for pattern in acts.values():
        assert (pattern[0, :, :2] == 0).all()
        assert (pattern[0, :, :, :2] == 0).all()
        close(pattern[0, :, 2:].sum(-1), torch.ones(4, 3))


# --- changing ---


@pytest.mark.parametrize("name", MODELS)
def test_an_identity_patch_changes_no_bit(name):
    net = tiny(name)
    before = run(net)
    with ch.patch(net, {"**": lambda x: x}):
        assert torch.equal(run(net), before)
    assert torch.equal(run(net), before)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "transformer", "bert"])
def test_a_patch_at_any_tap_moves_the_output(name):
    net = tiny(name)
    before = run(net)
    for tap in taps(net):
        # Not one factor for all numbers: the next norm would undo it.
        with ch.patch(net, {tap: lambda x: x * torch.linspace(0.5, 1.5, x.shape[-1])}):
            assert (run(net) - before).abs().max() > 1e-3, tap


@pytest.mark.parametrize("kernel", [{}, {"kernel": TopKConfig(3)}], ids=["softmax", "top_k"])
def test_a_patched_pattern_is_attended_with(kernel):
    net = stacked(attention(kv=2, **kernel), n_layers=1)
    uniform = torch.ones(6, 6).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    ids = tokens(2, 6)
    with (
        ch.patch(net, {"self_attn.pattern": lambda x: uniform.expand_as(x)}),
        ch.capture(net, "self_attn.v", "enter", "self_residual.branch", "pattern") as acts,
    ):
        out = net(ids)
    prefix = "stack.blocks.0."
    attn = net.stack.blocks[0].self_attn
    mean = acts[prefix + "self_attn.v"].cumsum(2) / torch.arange(1, 7).view(1, 1, -1, 1)
    z = mean.repeat_interleave(2, dim=1).transpose(1, 2).flatten(2)
    close(acts[prefix + "self_residual.branch"], attn.out_proj(z))
    assert torch.equal(acts[prefix + "self_attn.pattern"], uniform.expand(2, 4, 6, 6))
    assert (out - net(ids)).abs().max() > 1e-2


def test_a_pattern_patched_with_its_own_copy_is_the_slow_twin():
    net = tiny("llama")
    with ch.patch(net, {"pattern": torch.clone}):
        slow = run(net)
    close(slow, run(net))


def test_a_pattern_changed_in_place_counts_too():
    net = tiny("gpt2")

    def blind(x):
        x[:, 0] = 0
        return x

    with ch.patch(net, {"blocks.0.self_attn.pattern": blind}), torch.no_grad():
        in_place = run(net)
    mask = torch.tensor([0.0, 1, 1, 1]).view(1, 4, 1, 1)
    with ch.patch(net, {"blocks.0.self_attn.pattern": lambda x: x * mask}):
        close(in_place, run(net))
    with ch.patch(net, {"blocks.0.self_attn.z": lambda x: x * mask}):
        close(in_place, run(net))
    assert (in_place - run(net)).abs().max() > 1e-2


# Not post-norm, where a norm stands on the stream itself.
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in DECODERS if name not in WITHOUT),
        *("t5", "t5-gated", "transformer-pre", "transformer-sandwich"),
    ],
)
def test_a_silenced_branch_leaves_the_stream_as_it_was(name):
    net = tiny(name)
    side = "decoder." if name in SEQ2SEQ else ""
    with (
        ch.patch(net, {f"{side}stack.blocks.*.*_residual.branch": torch.zeros_like}),
        ch.capture(net, f"{side}embed.out", f"{side}stack.blocks.1.leave") as acts,
    ):
        run(net)
    assert torch.equal(acts[f"{side}stack.blocks.1.leave"], acts[f"{side}embed.out"])


def test_patched_dropout_is_still_drawn():
    """Weights that somebody changed are dropped at the same rate."""
    net = tiny("gpt2", dropout=0.5).train()
    kernel = net.stack.blocks[0].self_attn.kernel
    v = torch.eye(4).expand(64, 2, 4, 4)
    dropped = kernel.attend(torch.full((64, 4, 64, 4), 0.25), v)
    assert abs((dropped == 0).float().mean() - 0.5) < 0.02
    assert (dropped.unique() == torch.tensor([0.0, 0.5])).all()


def test_a_patch_of_another_shape_is_refused():
    net = tiny("gpt2")
    with (
        ch.patch(net, {"blocks.1.ffn.hidden": lambda x: x[:, :-1]}),
        pytest.raises(
            ClearheadError, match=r"blocks\.1\.ffn\.hidden.*\(2, 6, 64\), not \(2, 5, 64\)"
        ),
    ):
        run(net)
    with (
        ch.patch(net, {"embed.out": lambda x: None}),
        pytest.raises(ClearheadError, match=r"embed\.out.*not None"),
    ):
        run(net)
    assert listeners(net) == 0


def test_a_tensor_stands_in_the_place_of_a_value():
    net = tiny("gpt2")
    with ch.capture(net, "blocks.0.leave") as acts:
        net(tokens(2, 6, seed=3))
    other = acts["stack.blocks.0.leave"]
    with ch.patch(net, {"blocks.0.leave": other}):
        assert torch.equal(run(net), net(tokens(2, 6, seed=3)))
    with (
        ch.patch(net, {"blocks.0.leave": other[:1]}),
        pytest.raises(ClearheadError, match=r"must give a tensor of shape \(2, 6, 16\)"),
    ):
        run(net)
    with (
        ch.patch(net, {"blocks.0.leave": other.double()}),
        pytest.raises(ClearheadError, match=r"must give torch.float32 on cpu, not torch.float64"),
    ):
        run(net)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed.out": 3}, r'The patch at "embed.out" must be a function .* not int'),
        ({"embed.out": None}, r"must be a function .* not NoneType"),
        ("embed.out", r"patch takes a table .* not str"),
        (torch.zeros_like, r"patch takes a table"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_patches_that_are_none(changes, message):
    with pytest.raises(ClearheadError, match=message), ch.patch(tiny("gpt2"), changes):
        pass


def test_a_model_is_as_good_as_its_network():
    model = ch.build("gpt2", **SIZES, seed=0)
    ids = tokens(2, 6)
    with ch.capture(model, "embed.out") as acts, ch.patch(model, {"ffn.hidden": torch.zeros_like}):
        patched = model(ids)
    assert acts["embed.out"].shape == (2, 6, 16)
    assert not torch.equal(patched, model(ids))
    assert taps(model) == taps(model.net)
    for wrong in ("gpt2", 3, None):
        said = f"give a model or its net, not {type(wrong).__name__}"
        with pytest.raises(ClearheadError, match=said), ch.capture(wrong, "**"):
            pass


# --- nothing is left behind ---


def test_no_listeners_are_left():
    net = tiny("t5")
    before = run(net)
    with ch.capture(net, "**"):
        run(net)
    assert listeners(net) == 0
    with pytest.raises(RuntimeError, match="on purpose"), ch.capture(net, "**"):
        raise RuntimeError("on purpose")
    assert listeners(net) == 0

    def broken(x):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), ch.patch(net, {"**": broken}):
        run(net)
    assert listeners(net) == 0
    with pytest.raises(ClearheadError), ch.capture(net, "embed.out", "nonsense"):
        pass
    assert listeners(net) == 0
    assert torch.equal(run(net), before)


def test_nested_captures_and_patches():
    net = tiny("gpt2")
    with ch.capture(net, "embed.out") as outer:
        with ch.patch(net, {"embed.out": lambda x: 2 * x}):
            with ch.capture(net, "embed.out", "blocks.0.enter") as inner:
                run(net)
            assert listeners(net) == 2
        assert listeners(net) == 1
        first = outer["embed.out"]
        run(net)
    # In the order in which they came: the outer one listens before the patch.
    assert torch.equal(inner["embed.out"], 2 * first)
    assert torch.equal(inner["stack.blocks.0.enter"], 2 * first)
    assert torch.equal(outer["embed.out"], first)
    assert listeners(net) == 0


def test_captures_of_two_networks_are_apart():
    a, b = tiny("gpt2"), tiny("gpt2")
    with ch.capture(a, "embed.out") as acts:
        run(b)
    assert not acts
    with pytest.raises(ClearheadError, match="was the model run inside the with block"):
        acts["embed.out"]


# --- globs ---


def found(net, *globs):
    with ch.capture(net, *globs) as acts:
        run(net)
    return sorted(acts)


def test_globs():
    net = tiny("t5")
    patterns = [name for name in taps(net) if name.endswith("pattern")]
    assert found(net, "**.pattern") == found(net, "*_attn.pattern") == sorted(patterns)
    assert found(net, "encoder.**.pattern") == [
        f"encoder.stack.blocks.{i}.self_attn.pattern" for i in range(2)
    ]
    # A star stays inside one step, a double star does not.
    assert found(net, "decoder.stack.blocks.*.enter") == [
        f"decoder.stack.blocks.{i}.enter" for i in range(2)
    ]
    with pytest.raises(ClearheadError, match="No tap matches"):
        found(net, "decoder.*.pattern")
    # Leading steps may be left out, whole steps only.
    assert found(net, "blocks.1.leave") == [
        f"{s}.stack.blocks.1.leave" for s in ("decoder", "encoder")
    ]
    assert found(net, "out") == ["decoder.embed.out", "encoder.embed.out"]
    with pytest.raises(ClearheadError):
        found(net, "ocks.1.leave")
    # A double star stands for no step at all, too.
    assert found(net, "encoder.**.stack.blocks.0.enter") == ["encoder.stack.blocks.0.enter"]
    assert found(net, "encoder.stack.blocks.0.**") == sorted(
        name for name in taps(net) if name.startswith("encoder.stack.blocks.0.")
    )
    # The dot is a dot, and several globs that meet do not listen twice.
    with pytest.raises(ClearheadError):
        found(net, "embedXout")
    with ch.capture(net, "encoder.embed.out", "**.out", every=True) as acts:
        run(net)
    assert [len(values) for values in acts.history.values()] == [1, 1]


def test_a_glob_that_matches_nothing_suggests():
    net = tiny("gpt2")
    with pytest.raises(
        ClearheadError, match=r'"blocks.\*.self_attn.patern".*Did you mean'
    ) as error:
        found(net, "blocks.*.self_attn.patern")
    assert "stack.blocks.*.self_attn.pattern" in str(error.value)
    with pytest.raises(ClearheadError, match=r"embed\.out"):
        found(net, "embd.out")
    with pytest.raises(ClearheadError, match="Name at least one tap"):
        found(net)
    with (
        pytest.raises(ClearheadError, match="No tap matches"),
        ch.patch(net, {"blocks.7.enter": torch.zeros_like}),
    ):
        pass
    with ch.capture(net, "embed.out") as acts:
        run(net)
    with pytest.raises(ClearheadError, match=r'Did you mean "embed\.out"'):
        acts["embed.ou"]


# --- what looking costs ---


def test_only_layers_with_a_listener_draw_their_pattern(monkeypatch):
    net = tiny("gpt2", n_layers=4)
    drawn = []
    pattern = Softmax.pattern

    def counted(self, *args, **more):
        drawn.append(self)
        return pattern(self, *args, **more)

    monkeypatch.setattr(Softmax, "pattern", counted)
    run(net)
    assert not drawn
    with ch.capture(net, "self_attn.q", "self_attn.z", "ffn.hidden", "enter"):
        run(net)
    assert not drawn
    with ch.capture(net, "blocks.2.self_attn.pattern"):
        run(net)
    assert drawn == [net.stack.blocks[2].self_attn.kernel]


# --- in a decoding loop, and across ---


@pytest.mark.parametrize("name", ["llama", "llama-window", "gpt_neox"])
@torch.no_grad()
def test_history_of_a_decoding_loop(name):
    net, ids = tiny(name), tokens(2, 6)
    plain = net.new_cache(2, 16)
    expected = [net.decode(part, cache=plain) for part in ids.split([3, 1, 1, 1], dim=1)]
    cache = net.new_cache(2, 16)
    with ch.capture(net, "blocks.1.self_attn.*", "embed.out", every=True) as acts:
        out = [net.decode(part, cache=cache) for part in ids.split([3, 1, 1, 1], dim=1)]
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    prefix = "stack.blocks.1.self_attn."
    patterns = acts.history[prefix + "pattern"]
    window = 4 if name == "llama-window" else 16
    assert [tuple(p.shape) for p in patterns] == [
        (2, 4, t, min(n, window)) for t, n in [(3, 3), (1, 4), (1, 5), (1, 6)]
    ]
    assert patterns[-1] is acts[prefix + "pattern"]
    assert [x.shape[1] for x in acts.history["embed.out"]] == [3, 1, 1, 1]
    # The keys that were seen are the new ones, and the patterns those of the whole text.
    with ch.capture(net, "blocks.1.self_attn.*") as whole:
        net(ids)
    close(torch.cat(acts.history[prefix + "k"], dim=2), whole[prefix + "k"])
    close(torch.cat(acts.history[prefix + "z"], dim=2), whole[prefix + "z"])
    if name != "llama-window":  # a ring's keys stand in another order
        for step, pattern in enumerate(patterns[1:], start=3):
            close(pattern[:, :, 0], whole[prefix + "pattern"][:, :, step, : step + 1])


def test_without_every_there_is_no_history():
    net = tiny("gpt2")
    with ch.capture(net, "embed.out") as acts:
        run(net)
    assert acts.history == {}


@pytest.mark.parametrize("name", ["t5", "transformer"])
@torch.no_grad()
def test_cross_attention_in_a_decoding_loop(name):
    net = tiny(name)
    memory = net.encode(tokens(2, 5, seed=8), Positions.ragged([5, 3]))
    cache = net.new_cache(memory, 10)
    ids = tokens(2, 4)
    with ch.capture(net, "decoder.**.cross_attn.*", every=True) as acts:
        for part in ids.split(1, dim=1):
            net.decode(part, cache=cache)
    prefix = "decoder.stack.blocks.0.cross_attn."
    patterns = acts.history[prefix + "pattern"]
    assert [tuple(p.shape) for p in patterns] == [(2, 4, 1, 5)] * 4
    for pattern in patterns:
        assert (pattern[1, :, :, 3:] == 0).all()
        close(pattern.sum(-1), torch.ones(2, 4, 1))
    assert len(acts.history[prefix + "k"]) == 1  # the source is projected once
    with ch.capture(net, "decoder.**.cross_attn.pattern") as whole:
        net.decode(ids, memory)
    close(torch.cat(patterns, dim=2), whole[prefix + "pattern"])


@torch.no_grad()
def test_cross_patterns_of_beams():
    """The beams of a source are folded into the query axis: beam by beam, in each its tokens."""
    net = tiny("transformer")
    memory = net.encode(tokens(2, 5, seed=8))
    ids = tokens(6, 3)
    with ch.capture(net, "blocks.0.cross_attn.*") as acts:
        net.decode(ids, cache=net.new_cache(memory, 10, beams=3))
    with ch.capture(net, "blocks.0.cross_attn.*") as apart:
        net.decode(ids, memory.select(torch.tensor([0, 0, 0, 1, 1, 1])))
    name = "decoder.stack.blocks.0.cross_attn."
    shape = (2, 4, 3, 3, 5)  # source, head, beam, token, key
    folded = acts[name + "pattern"].reshape(shape).transpose(1, 2).flatten(0, 1)
    close(folded, apart[name + "pattern"])
    close(acts[name + "z"], apart[name + "z"])


def test_taps_of_a_part_have_names_of_their_own():
    net = tiny("gpt2")
    block = net.stack.blocks[0]
    assert set(taps(block)) == set(BLOCK)
    assert list(taps(block.ffn)) == ["hidden"]
    with pytest.raises(ClearheadError, match="none in this module"), ch.capture(net.head, "x"):
        pass
