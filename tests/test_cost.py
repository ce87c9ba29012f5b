"""The predicted cost against what PyTorch counts, saves and holds, and against known figures."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.attention.mask import Causal, Window
from clearhead.errors import ClearheadError
from clearhead.layers.ffn import ACTIVATIONS
from clearhead.measure.cost import predict
from tiny import (
    MODELS,
    POSITIONS,
    SEQ2SEQ,
    SIZES,
    VOCAB,
    WIDTH,
    attention,
    sizes_of,
    stacked,
    tokens,
)

BATCH, LENGTH, SOURCE = 3, 10, 14

HEADS = {
    "lm": {"kind": "lm", "tied": False},
    "masked_lm": {"kind": "masked_lm"},
    "pooling": {"kind": "pooling", "dense": True},
    "classification": {"kind": "classification", "n_labels": 3},
    "tagging": {"kind": "tagging", "n_labels": 5},
    "span": "span",
    "none": None,
}
_SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4}
_TOWER = _SMALL | {"d_ff": 24}
IMAGES = {"image_size": 12, "patch_size": 4, "channels": 3}
OTHERS = {
    "vit": ("vit", _SMALL | IMAGES),
    "clip": ("clip", IMAGES | {"vocab_size": VOCAB, "text": _TOWER, "image": _TOWER, "width": 8}),
    "whisper": ("whisper", _SMALL | {"vocab_size": VOCAB, "n_mels": 5, "source_len": SOURCE}),
}


def built(name, **changes):
    family, own = MODELS[name]
    own = {**sizes_of(family), "dropout": 0.0, **own, **changes}
    return ch.build(family, seed=0, **own).net.train()


def inputs(net, name=""):
    """What a call of that network takes, and the lengths that `predict` is told."""
    pixels = torch.randn(BATCH, 3, 12, 12)
    if name == "vit":
        return (pixels,), {"length": 10}
    if name == "clip":
        return (tokens(BATCH, LENGTH), pixels), {"length": LENGTH}
    if name == "whisper":
        mel = torch.randn(BATCH, 5, 2 * SOURCE)
        return (mel, tokens(BATCH, LENGTH)), {"length": LENGTH, "source_length": SOURCE}
    if hasattr(net, "encoder"):
        sizes = {"length": LENGTH, "source_length": SOURCE}
        return (tokens(BATCH, SOURCE), tokens(BATCH, LENGTH)), sizes
    return (tokens(BATCH, LENGTH),), {"length": LENGTH}


def output(net, arguments):
    """What the network returns; an encoder-decoder's source may be ids or sound."""
    if not hasattr(net, "encoder"):
        return net(*arguments)
    source, target = arguments
    return net.decode(target, net.encode(source))


@contextlib.contextmanager
def no_fused_lstm():
    """Step by step, so that its products are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPUs of another maker
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def counted(net, arguments):
    """FLOPs forward, and of both passes; PyTorch's counter knows no fused kernel of the CPU."""
    with sdpa_kernel(SDPBackend.MATH), no_fused_lstm():
        with FlopCounterMode(display=False) as forward:
            output(net, arguments)
        with FlopCounterMode(display=False) as both:
            output(net, arguments).sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


def saved_bytes(net, arguments, fused=True):
    """Bytes of all distinct memory that autograd keeps, the parameters' own left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    kernel = contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
    with kernel, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output(net, arguments)
    return sum(kept.values())


def check_flops(net, name=""):
    arguments, sizes = inputs(net, name)
    cost = predict(net, batch=BATCH, **sizes)
    assert (cost.forward, cost.training) == counted(net, arguments)
    assert cost.parameters == sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_flops_and_parameters_are_what_torch_counts(name):
    check_flops(built(name))


@pytest.mark.parametrize("name", OTHERS)
def test_flops_of_images_and_sound(name):
    family, settings = OTHERS[name]
    check_flops(ch.build(family, seed=0, **settings).net.train(), name)


@pytest.mark.parametrize("position", POSITIONS)
def test_flops_of_positions(position):
    tied = position != "sinusoidal-beside"
    check_flops(built("gpt2", position=POSITIONS[position], head={"kind": "lm", "tied": tied}))


@pytest.mark.parametrize("head", HEADS)
def test_flops_of_heads(head):
    check_flops(built("bert", head=HEADS[head]))


def test_flops_of_local_and_global_layers():
    window = attention(Causal() & Window(3))
    check_flops(stacked(attention(), window, n_layers=4).train())


def test_backward_is_twice_forward():
    cost = predict(built("llama"), batch=2, length=7)
    assert cost.training == 3 * cost.forward


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_activations_are_what_autograd_keeps(name, fused):
    net = built(name)
    arguments, sizes = inputs(net)
    memory = predict(net, batch=BATCH, **sizes).memory
    predicted = memory.activations if fused else memory.activations_written
    # Ids and positions, which are not counted, are all that is missing in these two.
    assert predicted == pytest.approx(saved_bytes(net, arguments, fused), rel=0.02)


@pytest.mark.parametrize("name", [name for name in MODELS if "lstm" not in name])
def test_activations_of_all_families(name):
    net = built(name)
    arguments, sizes = inputs(net)
    memory = predict(net, batch=BATCH, **sizes).memory
    assert memory.activations == pytest.approx(saved_bytes(net, arguments), rel=0.25)
    assert memory.activations_written == pytest.approx(saved_bytes(net, arguments, False), rel=0.25)


@pytest.mark.parametrize("name", ["rnn-lstm", "rnn_seq2seq-lstm"])
def test_activations_of_an_lstm(name):
    """The fused layer's own memory is not small beside tiny texts."""
    net, ids = built(name, d_model=64), tokens(8, 40)
    arguments = (ids, ids) if name in SEQ2SEQ else (ids,)
    predicted = predict(net, batch=8, length=40).memory.activations
    assert predicted == pytest.approx(saved_bytes(net, arguments), rel=0.25)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_activations_of_each_bend(family, activation):
    own = {"activation": activation}
    net = built(family, **({"variant": own} if family == "llama" else own))
    arguments, sizes = inputs(net)
    predicted = predict(net, batch=BATCH, **sizes).memory.activations
    assert predicted == pytest.approx(saved_bytes(net, arguments), rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "bert", "transformer", "t5"])
def test_activations_with_dropout(name):
    """On a CPU dropout of the weights rules the fused kernel out; the paper of 2017 has none."""
    net = built(name, dropout=0.1)
    arguments, sizes = inputs(net)
    memory = predict(net, batch=BATCH, **sizes).memory
    predicted = memory.activations if name == "transformer" else memory.activations_written
    assert predicted == pytest.approx(saved_bytes(net, arguments), rel=0.05)


@pytest.mark.parametrize("length", [3, 12])
@pytest.mark.parametrize("name", [name for name in MODELS if "bert" not in name])
def test_cache_is_what_the_cache_holds(name, length):
    net = built(name).eval()
    if name in SEQ2SEQ:
        with torch.no_grad():
            cache = net.new_cache(net.encode(tokens(BATCH, SOURCE)), length)
            net.decode(tokens(BATCH, 1), cache=cache)  # fills in the sources' keys and values
        memory = predict(net, batch=BATCH, length=length, source_length=SOURCE).memory
    else:
        cache = net.new_cache(BATCH, length)
        memory = predict(net, batch=BATCH, length=length).memory
    assert memory.cache + memory.cross_cache == cache.nbytes
    looks = name in SEQ2SEQ and name != "rnn_seq2seq-lstm"  # that one has no attention
    assert (memory.cross_cache > 0) == looks


def test_cache_of_a_window_stops_growing():
    net = built("llama-window")
    sizes = [predict(net, batch=1, length=length).memory.cache for length in (2, 4, 8, 16)]
    number = 2 * 2 * 1 * 4 * 4  # layers, keys and values, heads, their width, bytes
    assert sizes == [2 * number, 4 * number, 4 * number, 4 * number]


def test_cache_in_half_precision():
    net = built("gpt2")
    whole, half = (
        predict(net, batch=2, length=9, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.memory.cache == net.new_cache(2, 9, dtype=torch.bfloat16).nbytes
    halves = {f.name: 2 * getattr(half.memory, f.name) for f in dataclasses.fields(half.memory)}
    assert halves == dataclasses.asdict(whole.memory)
    assert half.forward == whole.forward


def test_gpt3_forward_of_2048_tokens():
    cost = predict(ch.build("gpt3", device="meta").net, batch=1, length=2048)
    assert cost.forward == pytest.approx(7e14, rel=0.1)
    scores = cost.by_component()["attention scores"].forward
    assert scores == 96 * 4 * 2048**2 * 12288
    assert cost.memory.weights == 4 * cost.parameters
    assert cost.memory.optimiser == 8 * cost.parameters


def test_attention_matrices_of_a_layer():
    """The lectures' figure: 8 heads, 1024 tokens, fp32: 33.5 MB a layer."""
    net = ch.build("gpt2", device="meta", n_heads=8, n_layers=3).net
    cost = predict(net, batch=1, length=1024)
    layers = [share.patterns for name, share in cost.by_layer().items() if name]
    assert layers == [8 * 1024 * 1024 * 4] * 3
    assert layers[0] / 1e6 == pytest.approx(33.5, abs=0.1)
    assert cost.memory.patterns == sum(layers)
    # Whoever does not fuse keeps them for the backward pass, less one number a row of the pattern.
    kept = cost.memory.activations_written - cost.memory.activations
    assert kept == sum(layers) - 3 * 8 * 1024 * 4


def test_parts_add_up():
    net = built("transformer")
    cost = predict(net, batch=BATCH, length=LENGTH, source_length=SOURCE)
    for groups in (cost.by_component(), cost.by_layer()):
        for field in ("parameters", "forward", "backward", "activations", "patterns"):
            whole = sum(getattr(share, field) for share in groups.values())
            assert whole == getattr(cost.total, field), field
    assert list(cost.by_component()) == [
        *("embedding", "attention projections", "attention scores", "cross-attention"),
        *("ffn", "norms", "head"),
    ]
    sides = ("encoder", "decoder")
    blocks = [f"{side}.stack.blocks.{i}" for side in sides for i in range(2)]
    assert [name for name in cost.by_layer() if name] == blocks


def test_components_by_hand():
    """One layer of width 16 with 24 inside, all of it small enough for a pencil."""
    b, t, m, ff, h = 2, 5, WIDTH, 24, 4
    net = ch.build("gpt2", **SIZES | {"n_layers": 1, "d_ff": ff}).net
    cost = predict(net, batch=b, length=t)
    parts = cost.by_component()
    assert parts["embedding"].parameters == VOCAB * m + 64 * m
    assert parts["attention projections"].parameters == 4 * (m * m + m)
    assert parts["attention projections"].forward == 4 * 2 * b * t * m * m
    assert parts["attention scores"].forward == 2 * 2 * b * t * t * m
    assert parts["ffn"].parameters == 2 * m * ff + ff + m
    assert parts["ffn"].forward == 2 * 2 * b * t * m * ff
    assert parts["norms"].parameters == 3 * 2 * m
    assert parts["head"].parameters == 0  # tied
    assert parts["head"].forward == 2 * b * t * m * VOCAB
    assert cost.memory.logits == 4 * b * t * VOCAB
    assert cost.memory.patterns == 4 * b * h * t * t
    assert cost.tokens == b * t


def test_logits_of_a_classifier_are_one_row_a_text():
    cost = predict(built("bert", head=HEADS["classification"]), batch=7, length=LENGTH)
    assert cost.memory.logits == 4 * 7 * 3
    assert predict(built("bert", head=None), batch=7, length=LENGTH).memory.logits == 0


def test_nothing_is_allocated_and_nothing_changes():
    model = ch.build("gpt2", device="meta", **SIZES)
    on_meta = predict(model.net, batch=2, length=6)
    assert all(parameter.is_meta for parameter in model.net.parameters())
    assert on_meta == predict(ch.build("gpt2", **SIZES).net, batch=2, length=6)


def test_plain_data():
    cost = predict(built("t5"), batch=2, length=6, source_length=8)
    data = json.loads(json.dumps(cost.to_dict()))
    assert data["total"]["training"] == cost.training
    assert data["source_length"] == 8
    assert data["memory"]["training"] == cost.memory.training
    assert len(data["layers"]) == 4


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("gpt2", {"length": 65}, "beyond the learned table of 64 positions"),
        ("transformer-sandwich", {"length": 8, "source_length": 65}, "table of 64"),
        ("gpt2", {"length": 0}, "length must be 1 or more"),
        ("gpt2", {"length": 4, "batch": 0}, "batch must be 1 or more"),
        ("gpt2", {"length": 4, "source_length": 4}, "Only an encoder-decoder has a source"),
        ("t5", {"length": 4, "source_length": 0}, "source's length must be 1 or more"),
    ],
)
def test_wrong_sizes(name, sizes, words):
    with pytest.raises(ClearheadError, match=words):
        predict(built(name), **sizes)


def test_an_image_has_its_own_length():
    net = ch.build("vit", device="meta", **OTHERS["vit"][1]).net
    with pytest.raises(ClearheadError, match="An image is 10 tokens for this model, not 12"):
        predict(net, length=12)
