"""What is between the compiled products: attention of a few queries, activations, joined products.

Each is compared with its plain twin, on this processor's vectors and on narrower ones.
"""

from __future__ import annotations

import copy
import ctypes
import pickle

import pytest
import torch

import clearhead as ch
from clearhead.attention.mask import Causal
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Kernel, Softmax
from clearhead.attention.view import View
from clearhead.fast import compile as compiled
from clearhead.fast.between import (
    COMPILED,
    KEYS,
    FastActivation,
    FastSoftmax,
    Joint,
    fast_activation,
    joint,
)
from clearhead.fast.form import make_fast
from clearhead.fast.formats import FORMS, pack
from clearhead.fast.linear import FastLinear
from clearhead.layers.ffn import ACTIVATIONS

llvm = pytest.importorskip("llvmlite.binding", reason="the extra fast (llvmlite) is not installed")
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

from clearhead.fast.steps import FACTS  # noqa: E402
from clearhead.fast.words import Shape  # noqa: E402


def everybody(queries, keys):
    """A view in which everybody sees everybody."""
    return View.of(None, Positions.span(0, queries), Positions.span(0, keys))


def heads(rows, count, length, d, size=None):
    """Numbers as a cache has them: the filled part of a longer one."""
    return torch.randn(rows, count, size or length, d)[:, :, :length]


@pytest.fixture
def ran(monkeypatch):
    """The names of the compiled functions that were run."""
    names, steps = [], compiled.steps()

    class Noted(dict):
        def __getitem__(self, name):
            names.append(name)
            return steps[name]

    monkeypatch.setattr(compiled, "steps", Noted)
    return names


CASES = [  # rows, heads, key heads, queries, d, keys
    (1, 12, 12, 1, 64, 160),
    (3, 4, 2, 2, 48, 7),
    (2, 8, 1, 8, 16, 33),
    (2, 2, 2, 3, 80, 1),
    (1, 1, 1, 1, 256, 4),
]


@pytest.mark.parametrize(("rows", "n", "groups", "queries", "d", "keys"), CASES)
def test_attention_of_a_few_queries_is_its_slow_twin(rows, n, groups, queries, d, keys, ran):
    q = torch.randn(rows, queries, n, d).transpose(1, 2)
    k, v = heads(rows, groups, keys, d, keys + 5), heads(rows, groups, keys, d, keys + 5)
    fast, view = FastSoftmax(Softmax(0.3)), everybody(queries, keys)
    expected = Kernel(0.3)(q, k, v, view)
    torch.testing.assert_close(fast(q, k, v, view), expected, rtol=1e-5, atol=1e-5)
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]  # as projected
    torch.testing.assert_close(fast(q, *across, view), expected, rtol=1e-5, atol=1e-5)
    folded = q.contiguous()  # as beams come
    torch.testing.assert_close(fast(folded, k, v, view), expected, rtol=1e-5, atol=1e-5)
    assert ran == ["attend"] * 3


def test_attention_keeps_far_apart_scores_and_what_is_no_number():
    q, k, v = torch.zeros(1, 2, 1, 16), heads(1, 2, 9, 16), heads(1, 2, 9, 16)
    q[..., 0] = 100.0
    k[0, 0, :, 0] = torch.tensor([-100.0, *[0.0] * 7, 100.0])  # e^20000 apart
    k[0, 1, 4, 0] = torch.nan
    out = FastSoftmax(Softmax(1.0))(q, k, v, everybody(1, 9))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 8])
    assert out[0, 1].isnan().all()


def test_attention_that_the_compiled_code_has_no_place_for_is_torch_s(monkeypatch):
    monkeypatch.setattr(compiled, "steps", lambda: pytest.fail("the compiled code was run"))
    fast, plain = FastSoftmax(Softmax(0.3)), Softmax(0.3)
    causal = View.of(Causal(), Positions.span(0, 5))
    wide = heads(1, 2, 5, 16)
    for q, view in (
        (wide, causal),
        (heads(1, 2, 9, 16), everybody(9, 5)),
        (heads(1, 2, 2, 32)[..., ::2], everybody(2, 5)),
    ):
        assert fast(q, wide, wide, view).equal(plain(q, wide, wide, view))
    narrow = heads(1, 2, 1, 8)
    assert fast(narrow, narrow, narrow, everybody(1, 1)).equal(narrow)
    double = wide.double()[:, :, :1]
    assert fast(double, double, double, everybody(1, 1)).equal(double)
    one, learning = wide[:, :, :1], wide.clone().requires_grad_()
    assert fast(learning[:, :, :1], wide, wide, everybody(1, 5)).requires_grad
    assert fast(one, wide, learning, everybody(1, 5)).requires_grad
    with pytest.raises(RuntimeError):
        fast(one, wide, wide.double(), everybody(1, 5))
    many = torch.zeros(1, 1, KEYS + 1, 16)
    assert fast(many[:, :, :1], many, many, everybody(1, KEYS + 1)).shape == (1, 1, 1, 16)


def test_attention_follows_its_scale():
    q, k, v = heads(1, 2, 1, 16), heads(1, 2, 5, 16), heads(1, 2, 5, 16)
    fast, view = FastSoftmax(Softmax(0.3)), everybody(1, 5)
    fast.scale = 2.0
    torch.testing.assert_close(fast(q, k, v, view), Kernel(2.0)(q, k, v, view))


@pytest.mark.parametrize("name", COMPILED)
def test_an_activation_is_its_slow_twin(name):
    x = torch.cat(
        (
            torch.linspace(-30, 30, 40_001),
            torch.tensor([0.0, -0.0, 1e-30, -88.0, -89.0, -200.0, 200.0, -3e38, 3e38]),
        )
    )
    exact = ACTIVATIONS[name](x.double())
    fast = fast_activation(ACTIVATIONS[name])
    assert isinstance(fast, FastActivation)
    torch.testing.assert_close(fast(x).double(), exact, rtol=1e-5, atol=1e-6)
    assert fast(torch.tensor([1.0, torch.nan])).isnan().tolist() == [False, True]
    assert fast(x[:0]).shape == (0,)
    for other in (x[::2], x.double(), x.clone().requires_grad_()):
        assert fast(other).equal(ACTIVATIONS[name](other))


def test_other_activations_stay():
    assert fast_activation(ACTIVATIONS["gelu"]) is ACTIVATIONS["gelu"]


def test_threads_share_the_steps_and_not_the_result():
    q, k, v = heads(5, 3, 2, 32), heads(5, 3, 11, 32), heads(5, 3, 11, 32)
    one = 0x3F800000  # the bits of 1.0
    seen = (ctypes.c_int64 * 1)(11)
    lies = (ctypes.c_int64 * 5)(*range(5))
    told = (3, 1, 32, ctypes.addressof(seen), 0, 11, 2, ctypes.addressof(lies), 8, 0)
    facts = (ctypes.c_int64 * len(FACTS))(*told, *q.stride()[:3], *k.stride()[:3], one)
    x, found = torch.randn(5000), []
    for threads in (1, 2, 3):
        out, y = torch.full((5, 2, 3, 32), torch.nan), torch.full((5000,), torch.nan)
        ends = [t.data_ptr() for t in (q, k, v, out)]
        steps = compiled.steps()
        steps["attend"](*ends, ctypes.addressof(facts), 0, 15, 0, threads, 0)
        steps["silu"](x.data_ptr(), 0, 0, 0, y.data_ptr(), 0, 5000, 0, threads, 0)
        found.append((out, y))
    assert all(out.equal(found[0][0]) and y.equal(found[0][1]) for out, y in found)
    expected = Kernel(1.0)(q, k, v, everybody(2, 11)).transpose(1, 2)
    torch.testing.assert_close(found[0][0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", [4, 8])
def test_steps_for_other_processors_are_right_too(lanes):
    machine = llvm.Target.from_default_triple().create_target_machine(
        features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    code = compiled.compiled_code("steps", Shape(lanes, 3, 2), machine)
    steps = compiled.functions("steps", code)
    q, k, v = heads(2, 3, 1, 48), heads(2, 3, 10, 48), heads(2, 3, 10, 48)
    out, one = torch.empty(2, 1, 3, 48), 0x3F800000  # the bits of 1.0
    seen = (ctypes.c_int64 * 2)(10, 7)  # the second row sees fewer
    lies = torch.randint(2, (2, 10))  # in which row each key and value is
    told = (3, 1, 48, ctypes.addressof(seen), 8, 10, 1, lies.data_ptr(), 80, 8)
    facts = (ctypes.c_int64 * len(FACTS))(*told, *q.stride()[:3], *k.stride()[:3], one)
    ends = [t.data_ptr() for t in (q, k, v, out)]
    steps["attend"](*ends, ctypes.addressof(facts), 0, 6, 0, 1, 0)
    for row, keys in enumerate(seen):
        which = lies[row, :keys], slice(None), torch.arange(keys)
        own = (part[which].transpose(0, 1).unsqueeze(0) for part in (k, v))
        expected = Kernel(1.0)(q[row : row + 1], *own, everybody(1, keys)).transpose(1, 2)
        torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-5, atol=1e-5)
    x, y = torch.randn(37), torch.empty(37)
    steps["gelu_tanh"](x.data_ptr(), 0, 0, 0, y.data_ptr(), 0, 37, 0, 1, 0)
    torch.testing.assert_close(y, ACTIVATIONS["gelu_tanh"](x), rtol=1e-5, atol=1e-6)


def packed(form, n, k=64):
    return FastLinear(form, k, *pack(torch.randn(n, k), form), torch.randn(n))


@pytest.mark.parametrize("form", FORMS)
def test_joined_products_are_each_by_itself(form):
    layers = [packed(form, n) for n in (64, 33, 130)]
    both = joint(*layers)
    assert isinstance(both, Joint)
    for rows in (1, 2, 7, 40):
        x = torch.randn(rows, 3, 64)
        for found, layer in zip(both(x), layers, strict=True):
            assert found.equal(layer(x))
    layers[1].weight = layers[1].weight.clone()  # tensors elsewhere are found again
    layers[1].bias.data = torch.ones(33)
    layers[1].refresh()
    x = torch.randn(2, 64)
    assert both(x)[1].equal(layers[1](x))
    for other in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert all(a.equal(b) for a, b in zip(other(x), both(x), strict=True))
    if form != "fp32":
        assert both(x.double())[0].dtype == torch.float64


def test_a_hook_on_a_joined_layer_is_called():
    layers, called = [packed("int8", 64) for _ in range(2)], []
    layers[1].register_forward_hook(lambda *_: called.append(1))
    joint(*layers)(torch.randn(1, 64))
    assert called == [1]


def test_only_layers_that_are_alike_are_joined():
    assert joint(packed("int8", 64), packed("int4", 64)) is None
    assert joint(packed("int8", 64), packed("int8", 64, 128)) is None
    assert joint(packed("int8", 64), torch.nn.Linear(64, 64)) is None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_fast_model_has_all_of_it_and_says_the_same(family, ran):
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 2, "vocab_size": 50, "max_len": 32}
    model = ch.build(family, seed=0, **sizes)
    net, fast = model.net.eval(), make_fast(model.net, "fp32")
    block = fast.stack.blocks[0]
    assert isinstance(block.self_attn.joint, Joint)
    assert isinstance(block.self_attn.kernel, FastSoftmax)
    assert isinstance(block.ffn.activation, FastActivation)
    assert (getattr(block.ffn, "joint", None) is not None) == (family == "llama")
    assert net.stack.blocks[0].self_attn.joint is None  # the model that it came from has none
    ids = torch.randint(0, 50, (3, 9))
    with torch.inference_mode():
        caches = [each.new_cache(3, 12) for each in (net, fast)]
        for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:8], ids[:, 8:]):
            plain, quick = (
                each.decode(part, cache=c) for each, c in zip((net, fast), caches, strict=True)
            )
            torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-5)
    # Every step but the first, whose queries see by turns; gpt2's are lists, llama's width is odd.
    assert ran.count("run" if family == "gpt2" else "attend") == (3 if family == "gpt2" else 6)
