"""Compiled attention that learns: values and gradients are those of its slow twin."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch

from clearhead.attention.mask import All, Causal, Window
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Kernel, Softmax
from clearhead.attention.view import View
from clearhead.fast import attending
from clearhead.fast import compile as compiled
from clearhead.fast.words import Shape

llvm = pytest.importorskip("llvmlite.binding", reason="pip install 'clearhead[fast]'")
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def drawn(rows, heads, tokens, d):
    """As projections give it: a token's heads beside each other."""
    return torch.randn(rows, tokens, heads, d).transpose(1, 2)


def ragged(lengths):
    return Positions.ragged(lengths)


def gradients(way, tensors, asked):
    inputs = [x.detach().requires_grad_() for x in tensors]
    out = way(*inputs)
    return out.detach(), torch.autograd.grad(out, inputs, asked.to(out.dtype))


def check(tensors, view, kernel=None):
    """Against the slow twin in double precision."""
    kernel = kernel or Softmax(0.3)
    asked = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3])
    wide = [x.double() for x in tensors]
    right, right_gradients = gradients(
        lambda *x: Kernel.forward(kernel, *x, view), wide, asked.double()
    )
    found, found_gradients = gradients(
        lambda *x: attending.attend(kernel, *x, view), tensors, asked
    )
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(found_gradients, right_gradients, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=2e-5)
    return found


@pytest.fixture
def only_compiled(monkeypatch):
    """PyTorch's kernel must not be taken."""
    monkeypatch.setattr(Softmax, "forward", lambda *given: pytest.fail("it was not compiled"))


def positions(tokens):
    return Positions.span(0, tokens)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("d", [16, 32, 48, 64])
@pytest.mark.parametrize("tokens", [1, 12, 13, 40, 100])
@pytest.mark.parametrize("mask", [All(), Causal()])
def test_whole_sequences(mask, tokens, d, threads, only_compiled, monkeypatch):
    monkeypatch.setattr(compiled, "threads", lambda: threads)
    tensors = [drawn(2, 3, tokens, d) for _ in range(3)]
    check(tensors, View.of(mask, positions(tokens)))


@pytest.mark.parametrize("mask", [All(), Causal()])
@pytest.mark.parametrize("lengths", [(7, 3, 1), (33, 40, 12), (5, 5, 5)])
def test_padded_sequences(mask, lengths, only_compiled):
    tensors = [drawn(3, 2, max(lengths), 32) for _ in range(3)]
    out = check(tensors, View.of(mask, ragged(lengths)))
    for row, length in enumerate(lengths):
        assert not out[row, :, length:].any()


@pytest.mark.parametrize("lengths", [(7, 3, 1), (33, 40, 12), (50, 50, 50)])
@pytest.mark.parametrize("queries", [1, 13, 30])
def test_another_sequence(queries, lengths, only_compiled):
    q = drawn(3, 2, queries, 16)
    k, v = (drawn(3, 2, max(lengths), 16) for _ in range(2))
    check([q, k, v], View.across(ragged(lengths)))


def test_what_lies_otherwise_and_what_is_large(only_compiled):
    tensors = [torch.randn(2, 3, 16, 20).transpose(2, 3) * 3 for _ in range(3)]  # steps of 20
    check(tensors, View.of(Causal(), positions(20)), Softmax(0.2))


def test_a_gradient_that_lies_otherwise(only_compiled):
    q, k, v = (drawn(1, 2, 9, 16).requires_grad_() for _ in range(3))
    out = attending.attend(Softmax(0.3), q, k, v, View.of(None, positions(9)))
    out.sum().backward()  # the gradient of a sum has no steps at all
    torch.testing.assert_close(v.grad.sum(dim=2), torch.full((1, 2, 16), 9.0))


@pytest.mark.parametrize(("lanes", "threads"), [(4, 1), (8, 2)])
def test_code_for_other_processors(lanes, threads, only_compiled, monkeypatch):
    machine = llvm.Target.from_default_triple().create_target_machine(
        features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    code = compiled.compiled_code("learning", Shape(lanes, 3, 2), machine)
    made = compiled.functions("learning", code)
    monkeypatch.setattr(compiled, "learning", lambda: made)
    monkeypatch.setattr(compiled, "threads", lambda: threads)
    for mask in (All(), Causal()):
        tensors = [drawn(2, 3, 37, 48) for _ in range(3)]
        check(tensors, View.of(mask, ragged((37, 20))))


def late(tokens):
    """Rows whose first slots are empty."""
    pos = torch.arange(tokens) - 2
    return Positions(pos.clamp(min=-1).unsqueeze(0), 0, tokens - 3, dense=False, holes=True)


OTHERS = {
    "grouped": lambda: ((2, 4, 9, 16), (2, 2, 9, 16), View.of(None, positions(9))),
    "window": lambda: ((1, 2, 9, 16), (1, 2, 9, 16), View.of(Causal() & Window(3), positions(9))),
    "late": lambda: ((1, 2, 9, 16), (1, 2, 9, 16), View.of(Causal(), late(9))),
    "narrow": lambda: ((1, 2, 9, 8), (1, 2, 9, 8), View.of(None, positions(9))),
    "long": lambda: ((1, 1, 600, 16), (1, 1, 600, 16), View.of(None, positions(600))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_the_fused_kernel_s(name, monkeypatch):
    ours, theirs, view = OTHERS[name]()
    q, k, v = torch.randn(ours), torch.randn(theirs), torch.randn(theirs)
    monkeypatch.setattr(attending._Attend, "apply", lambda *given: pytest.fail("compiled"))
    kernel = Softmax(0.3)
    assert torch.equal(attending.attend(kernel, q, k, v, view), kernel(q, k, v, view))


def test_biases_and_dropout_too(monkeypatch):
    monkeypatch.setattr(attending._Attend, "apply", lambda *given: pytest.fail("compiled"))
    q = torch.randn(1, 2, 9, 16)
    bias, view = torch.randn(1, 2, 9, 9), View.of(None, positions(9))
    kernel = Softmax(0.3)
    assert torch.equal(attending.attend(kernel, q, q, q, view, bias), kernel(q, q, q, view, bias))
    biased = replace(view, bias=bias)
    assert torch.equal(attending.attend(kernel, q, q, q, biased), kernel(q, q, q, biased))
    attending.attend(Softmax(0.3, dropout=0.5).train(), q, q, q, view)


@pytest.mark.parametrize(("queries", "keys", "d"), [(16, 8192, 128), (1, 32768, 64), (8, 8, 8192)])
def test_what_is_too_large_for_a_stack(queries, keys, d, monkeypatch):
    monkeypatch.setattr(attending._Attend, "apply", lambda *given: pytest.fail("compiled"))
    q, k = torch.randn(1, 1, queries, d), torch.randn(1, 1, keys, d)
    view = View.across(positions(keys))
    assert attending.attend(Softmax(0.3), q, k, k, view).shape == q.shape


def test_the_largest_that_is_compiled(only_compiled):
    check([drawn(1, 1, 448, 64) for _ in range(3)], View.of(Causal(), positions(448)))
    tokens = 2**19 // 2 // (32 + 64)
    keys = tokens // 32 * 32
    q, (k, v) = drawn(1, 1, 3, 64), (drawn(1, 1, keys, 64) for _ in range(2))
    check([q, k, v], View.across(positions(keys)))


def test_one_view_for_several_numbers_of_queries(only_compiled):
    view = View.across(ragged((9, 4)))
    k, v = (drawn(2, 2, 9, 16) for _ in range(2))
    for queries in (5, 9, 2):
        check([drawn(2, 2, queries, 16), k, v], view)


def test_values_of_another_width_are_not_compiled():
    q, v, view = torch.randn(1, 2, 9, 32), torch.randn(1, 2, 9, 16), View.of(None, positions(9))
    assert attending._seen(Softmax(0.3), q, q, v, view) is None
    assert attending._seen(Softmax(0.3), q, q, q, view) is not None


def test_a_query_that_stands_nowhere_sees_nothing():
    empty = Positions(torch.tensor([[0], [-1]]), 0, 0, dense=False, holes=True)
    q, k = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 5, 16)
    out = attending.attend(Softmax(0.3), q, k, k, View.of(All(), empty, positions(5)))
    assert not out[1].any()


def test_dropout_at_rest_is_none(only_compiled):
    q = torch.randn(1, 2, 9, 16)
    kernel = Softmax(0.3, dropout=0.5).eval()
    out = attending.attend(kernel, q, q, q, View.of(None, positions(9)))
    assert out.shape == q.shape


def test_a_view_is_read_once_and_forgotten(only_compiled, monkeypatch):
    read, count = attending._read, []
    monkeypatch.setattr(attending, "_read", lambda *given: count.append(1) or read(*given))
    view, q = View.of(Causal(), ragged((4, 9))), torch.randn(2, 2, 9, 16)
    layer = partial(attending.attend, Softmax(0.3), q, q, q)
    assert torch.equal(layer(view), layer(view))
    assert len(count) == 1
    before = len(attending._known)
    del view
    gc.collect()
    assert len(attending._known) == before - 1
