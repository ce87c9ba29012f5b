"""Whole sequences as one list of calls, against the blocks one by one."""

from __future__ import annotations

import copy
import struct
from array import array
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.attention.mask import Window
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import TopK
from clearhead.fast import compile as compiled
from clearhead.fast.compile import FACTS
from clearhead.fast.form import make_fast
from clearhead.layers.ffn import ACTIVATIONS
from clearhead.layers.stack import Stack
from tiny import noisy

llvm = pytest.importorskip("llvmlite.binding", reason="the extra fast (llvmlite) is not installed")
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

from clearhead.fast import reading  # noqa: E402
from clearhead.fast.words import Shape  # noqa: E402

SIZES = {"vocab_size": 40, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_len": 400, "d_ff": 96}
READERS = {
    "bert": ("bert", {}),
    "wide heads": ("bert", {"d_model": 96, "n_heads": 2}),
    "post": ("transformer", {}),
    "rope": ("transformer", {"placement": "pre", "position": "rope"}),
    "sandwich": ("transformer", {"placement": "sandwich", "position": "learned"}),
    "bart": ("bart", {}),
}
LENGTHS = [[1], [7], [5, 9, 5], [33, 2, 17, 64], [100, 90, 95, 80], [129, 128, 1, 140, 120, 131]]


@pytest.fixture(autouse=True)
def at_rest():
    with torch.inference_mode():
        yield


def plain(name):
    family, own = READERS[name]
    return noisy(ch.build(family, seed=0, **SIZES | {"dropout": 0.0} | own).net, 0.1)


def stack_of(net):
    return next(part for part in net.modules() if isinstance(part, Stack) and part.read is not None)


def read(net, ids, at):
    return net.encode(ids, at).x if hasattr(net, "encode") else net(ids, at)


def rows(lengths, seed=0):
    """Ids with anything in the empty slots."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(40, (len(lengths), max(lengths)), generator=generator)
    return ids, Positions.ragged(lengths)


@pytest.fixture
def ran(monkeypatch):
    """How many lists each call worked off."""
    counts, steps = [], compiled.steps()

    class Noted(dict):
        def __getitem__(self, name):
            if name != "run_each":
                return steps[name]
            return lambda *given: (counts.append(given[6]), steps[name](*given))

    noted = Noted()
    monkeypatch.setattr(compiled, "steps", lambda: noted)
    return counts


def filled(x, lengths):
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


CASES = [(name, "fp32", lengths) for name in READERS for lengths in LENGTHS]
CASES += [
    (name, form, lengths)
    for name in ("bert", "rope")
    for form in ("bf16", "int8", "int4")
    for lengths in LENGTHS[3::2]
]


@pytest.mark.parametrize(("name", "form", "lengths"), CASES, ids=str)
def test_it_reads_the_same_both_ways(name, form, lengths, ran):
    net = plain(name)
    fast = make_fast(net, form)
    stack = stack_of(fast)
    given = rows(lengths)
    found = read(fast, *given)
    assert len(ran) == 1
    stack.read = None
    expected = read(fast, *given)
    assert len(ran) == 1
    found, expected = (filled(x, lengths) if x.dim() == 3 else x for x in (found, expected))
    if form == "fp32":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        slow = read(net, *given)
        slow = filled(slow, lengths) if slow.dim() == 3 else slow
        torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-4)
    else:
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_sequence_does_not_depend_on_its_company(threads, ran):
    fast = make_fast(plain("post"), "fp32")
    stack, lengths = stack_of(fast), [140, 131, 139, 128, 129, 138, 3]
    x = torch.randn(len(lengths), max(lengths), 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = stack.read(x, Positions.ragged(lengths))
    finally:
        torch.set_num_threads(before)
    assert ran == [threads]
    for i, length in enumerate(lengths):
        alone = stack.read(x[i : i + 1, :length], Positions.span(0, length))
        torch.testing.assert_close(together[i, :length], alone[0], rtol=1e-5, atol=1e-5)
        assert not together[i, length:].any()


def test_a_row_that_is_no_number_stays_alone():
    fast = make_fast(plain("post"), "fp32")
    x = torch.randn(3, 8, 64)
    expected = stack_of(fast).read(x, Positions.ragged([8, 5, 8]))
    x[1, 2] = torch.nan
    found = stack_of(fast).read(x, Positions.ragged([8, 5, 8]))
    assert found[1, :5].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=0, atol=0)


def test_what_it_does_not_know_goes_the_ordinary_way():
    fast = make_fast(plain("rope"), "fp32")
    stack, at = stack_of(fast), Positions.ragged([6, 4])
    x = torch.randn(2, 6, 64)
    assert stack.read(x, at) is not None
    assert stack.read(x.double(), at) is None
    assert stack.read(x[:, :0], Positions.ragged([0, 0])) is None
    assert stack.read(x, Positions.ragged([6, 0])) is None  # a row without anything
    assert stack.read(x, Positions.ragged([6, 4], side="left")) is None
    long = reading.ROOM // 16 + 1
    assert stack.read(torch.zeros(1, long, 64), Positions.span(0, long)) is None
    with torch.inference_mode(False):
        learning = torch.randn(2, 6, 64, requires_grad=True)
        assert stack.read(learning, at) is None


def test_rotary_positions_are_those_of_the_call():
    fast = make_fast(plain("rope"), "fp32")
    stack, x = stack_of(fast), torch.randn(2, 6, 64)
    for at in (Positions.span(5, 6), Positions.ragged([6, 4], start=[9, 2])):
        found, taken = stack.read(x, at), stack.read
        stack.read = None
        expected = stack(x, at)
        stack.read = taken
        mask = at.filled().expand(2, -1)
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_taps_and_hooks_are_heard(ran):
    model = ch.build("bert", seed=0, **SIZES)
    fast = make_fast(model.net, "fp32")
    ids, at = rows([6, 4])
    fast(ids, at)
    assert len(ran) == 1
    heard = []
    block = stack_of(fast).blocks[1]
    with ch.capture(fast, "*blocks.1.leave") as acts:
        fast(ids, at)
    heard += [value.shape for value in acts.values()]
    assert heard == [(2, 6, 64)]
    handle = block.register_forward_hook(lambda *_: heard.append("hook"))
    fast(ids, at)
    handle.remove()
    assert heard[1:] == ["hook"]
    assert len(ran) == 1
    fast(ids, at)
    assert len(ran) == 2


def test_a_copy_reads_with_its_own_weights(ran):
    fast = make_fast(plain("post"), "bf16")
    twin = copy.deepcopy(fast)
    ids, at = rows([6, 4])
    expected = read(fast, ids, at)
    assert stack_of(twin).read.stack is stack_of(twin)
    for parameter in twin.parameters():
        parameter.zero_()
    torch.testing.assert_close(read(fast, ids, at), expected, rtol=0, atol=0)
    assert not read(twin, ids, at).equal(expected)
    assert len(ran) == 3


CHANGES = {
    "kernel": lambda stack: setattr(stack.blocks[1].self_attn, "kernel", TopK(0.25, k=1)),
    "mask": lambda stack: setattr(stack.kinds[0], "mask", Window(2)),
    "feed-forward": lambda stack: setattr(stack.blocks[1], "ffn", torch.nn.Identity()),
    "norm": lambda stack: setattr(stack.blocks[1].ffn_residual, "norm", torch.nn.Identity()),
    "activation": lambda stack: setattr(
        stack.blocks[1].ffn, "activation", ACTIVATIONS["relu_squared"]
    ),
    "scale": lambda stack: setattr(stack.blocks[1].self_attn.kernel, "scale", 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_exchanged_is_noticed(change):
    fast = make_fast(plain("bert"), "fp32")
    stack, (given, at) = stack_of(fast), rows([9, 7])
    before = read(fast, given, at)
    CHANGES[change](stack)
    found, stack.read = read(fast, given, at), None
    expected = read(fast, given, at)
    torch.testing.assert_close(
        filled(found, [9, 7]), filled(expected, [9, 7]), rtol=1e-5, atol=1e-5
    )
    assert not filled(before, [9, 7]).allclose(filled(found, [9, 7]), atol=1e-2)


def test_rows_are_shared_out():
    assert reading.shared_out([300], 2) == ([[0]], 2)
    assert reading.shared_out([9, 8, 7], 2) == ([[0, 1, 2]], 2)  # too little for two
    assert reading.shared_out([500, 130], 2) == ([[0, 1]], 2)  # too uneven
    assert reading.shared_out([100, 130, 90, 128], 2) == ([[1, 2], [3, 0]], 1)
    assert reading.shared_out([100, 130], 1) == ([[1, 0]], 1)


def bits(number):
    return struct.unpack("<i", struct.pack("<f", number))[0]


@pytest.mark.parametrize("lanes", [None, 4, 8, 16])
@pytest.mark.parametrize(("heads", "group", "d"), [(4, 1, 32), (4, 2, 64), (3, 3, 48), (2, 1, 16)])
def test_attention_within_sequences(lanes, heads, group, d, attending):
    lengths = [1, 16, 17, 5, 33, 100, 6, 7]
    own, count = heads // group, sum(lengths)
    torch.manual_seed(0)
    q, k, v = (torch.randn(count, n * d) for n in (heads, own, own))
    q[20:23] *= 40  # whose weights are all but one
    out = torch.full((count, heads * d), 7.0)
    facts = dict.fromkeys(FACTS, 0) | {"heads": heads, "group": group, "d": d, "most": 128}
    told = array("q", (facts | {"scale": bits(0.3)}).values())
    starts = array("q", accumulate(lengths, initial=0))
    ends = [t.data_ptr() for t in (q, k, v, out)]
    places = told.buffer_info()[0], starts.buffer_info()[0]
    attending(lanes)(*ends, *places, len(lengths) * heads, 0, 1 if lanes else 2, 0)
    for a, b in pairwise(starts):
        parts = (t[a:b].view(b - a, -1, d).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        expected = F.scaled_dot_product_attention(*parts, scale=0.3, enable_gqa=True)
        expected = expected[0].transpose(0, 1).reshape(b - a, -1)
        torch.testing.assert_close(out[a:b], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def attending():
    """The function as for processors with so many lanes."""
    made = {None: compiled.steps()}

    def of(lanes):
        if lanes not in made:
            machine = llvm.Target.from_default_triple().create_target_machine(
                features=llvm.get_host_cpu_features().flatten(), opt=1
            )
            tile = {4: 3, 8: 6, 16: 12}[lanes]
            code = compiled.compiled_code("steps", Shape(lanes, 3, 2, tile=tile), machine)
            made[lanes] = compiled.functions("steps", code)
        return made[lanes]["sequences"]

    return of
