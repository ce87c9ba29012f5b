"""A decoding step as one list of calls, against the blocks one by one."""

from __future__ import annotations

import copy
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook

import clearhead as ch
from clearhead.attention.mask import Causal
from clearhead.attention.positions import Positions
from clearhead.attention.spec import AttentionConfig, Geometry, RopeConfig
from clearhead.fast import compile as compiled
from clearhead.fast.form import make_fast, refresh
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.ffn import ACTIVATIONS, PlainFFNConfig
from clearhead.layers.stack import StackConfig
from clearhead.models.family import decoder
from clearhead.models.heads import HeadStyle, LMConfig
from programs import DECODERS, PAIRS, SIZES, close, ids, plain
from tiny import noisy

llvm = pytest.importorskip("llvmlite.binding", reason="the extra fast (llvmlite) is not installed")
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()

from clearhead.fast.program import Program  # noqa: E402
from clearhead.fast.steps import FACTS  # noqa: E402
from clearhead.fast.words import Shape  # noqa: E402


@pytest.fixture(autouse=True)
def at_rest():
    with torch.inference_mode():
        yield


@pytest.fixture
def ran(monkeypatch):
    """The names of the compiled functions that were asked for: "run" once a step."""
    names, steps = [], compiled.steps()

    class Noted(dict):
        def __getitem__(self, name):
            names.append(name)
            return steps[name]

    noted = Noted()
    monkeypatch.setattr(compiled, "steps", lambda: noted)
    return names


def taken(stack):
    """The lists that were written; forgets none while their caches live."""
    assert isinstance(stack.step, Program)
    return list(stack.step._lists.values())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_writes_the_same_both_ways(name, form, rows, ran):
    net = make_fast(plain(name), form)
    twin = copy.deepcopy(net)
    twin.stack.step = None
    text, cache, other = ids(rows, 12), net.new_cache(rows, 20), twin.new_cache(rows, 20)
    close(form, net.decode(text[:, :5], cache=cache), twin.decode(text[:, :5], cache=other))
    assert taken(net.stack) == []  # a prompt goes through the blocks
    for i in range(5, 12):
        step = text[:, i : i + 1]
        close(form, net.decode(step, cache=cache), twin.decode(step, cache=other))
    assert len(taken(net.stack)) == 1
    assert ran.count("run") == 7
    assert (cache.ends, cache.nbytes) == (other.ends, other.nbytes)


@pytest.mark.parametrize("rows", [32, 33, 130])
@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_many_rows(form, rows, ran):
    net = make_fast(plain("llama"), form)
    twin = copy.deepcopy(net)
    twin.stack.step = None
    cache, other = net.new_cache(rows, 20), twin.new_cache(rows, 20)
    for i in range(2):
        text = ids(rows, 1, seed=i)
        close(form, net.decode(text, cache=cache), twin.decode(text, cache=other))
    assert ran.count("run") == 2


@pytest.mark.parametrize("name", DECODERS)
def test_rows_at_different_positions(name, ran):
    net = make_fast(plain(name), "fp32")
    twin = copy.deepcopy(net)
    twin.stack.step = None
    text, at = ids(3, 6), Positions.ragged([6, 1, 4])
    cache, other = net.new_cache(3, 20), twin.new_cache(3, 20)
    net.decode(text, at, cache)
    twin.decode(text, at, other)
    for i in range(3):
        step = ids(3, 1, seed=i)
        close("fp32", net.decode(step, cache=cache), twin.decode(step, cache=other))
    for each in (cache, other):  # rows that moved, and of which one went back
        each.reorder(torch.tensor([1, 2, 2]))
        each.trim([4, 5, 7])
        for state in each.states:  # what nobody has used yet may be anything
            state.k[:, :, state.slots.used :] = state.v[:, :, state.slots.used :] = torch.nan
    for i in range(3, 5):
        step = ids(3, 1, seed=i)
        close("fp32", net.decode(step, cache=cache), twin.decode(step, cache=other))
    assert ran.count("run") == 5
    assert (cache.ends, other.ends) == ((6, 7, 9), (6, 7, 9))
    # What only others fill is a number to whoever goes through the blocks behind it.
    close("fp32", net.decode(ids(3, 2), cache=cache), twin.decode(ids(3, 2), cache=other))
    assert ran.count("run") == 5


def test_rows_with_gaps_go_through_the_blocks(ran):
    net = make_fast(plain("gpt2"), "fp32")
    twin = copy.deepcopy(net)
    twin.stack.step = None
    cache, other = net.new_cache(2, 20), twin.new_cache(2, 20)
    for at in (
        Positions.of(torch.tensor([[0, 1, 5], [0, 1, 2]])),
        Positions.of(torch.tensor([[6], [4]])),
    ):
        step = ids(2, at.length)
        close("fp32", net.decode(step, at, cache), twin.decode(step, at, other))
    close("fp32", net.decode(ids(2, 1), cache=cache), twin.decode(ids(2, 1), cache=other))
    assert ran.count("run") == 0


@pytest.mark.parametrize("beams", [1, 3])
def test_sources_of_different_lengths(beams, ran):
    net = make_fast(plain("pre", PAIRS), "fp32")
    twin = copy.deepcopy(net)
    twin.decoder.stack.step = None
    memory = net.encode(ids(3, 7), Positions.ragged([7, 2, 5]))
    cache, other = (each.new_cache(memory, 20, beams) for each in (net, twin))
    kept = {3: [2, 1], 5: [1, 0], 7: [0, 0]}  # fewer, as many in another order, one twice
    for i in range(9):
        step = ids(cache.rows, 1, seed=i)
        close("fp32", net.decode(step, cache=cache), twin.decode(step, cache=other))
        for each in (cache, other) if i in kept else ():
            each.keep(torch.tensor(kept[i]))
    assert ran.count("run") == 8
    left = net.encode(ids(3, 7), Positions.ragged([7, 2, 5], "left"))
    cache, other = (each.new_cache(left, 20, beams) for each in (net, twin))
    for i in range(3):
        step = ids(cache.rows, 1, seed=i)
        close("fp32", net.decode(step, cache=cache), twin.decode(step, cache=other))
    assert ran.count("run") == 8  # those do not stand at the start


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("form", ["fp32", "int8"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_decoder_with_a_source_writes_the_same_both_ways(name, form, beams, ran):
    net = make_fast(plain(name, PAIRS), form)
    twin = copy.deepcopy(net)
    twin.decoder.stack.step = None
    memory, text = net.encode(ids(2, 7)), ids(2 * beams, 10)
    cache, other = (each.new_cache(memory, 20, beams) for each in (net, twin))
    for i in range(10):
        step = text[:, i : i + 1]
        close(form, net.decode(step, cache=cache), twin.decode(step, cache=other))
        if beams == 3:
            order = torch.tensor([2, 0, 0, 4, 5, 3][: cache.rows])
            cache.reorder(order)
            other.reorder(order)
        if i == 6:
            cache.keep(torch.tensor([1]))
            other.keep(torch.tensor([1]))
            text = text[beams:]
    assert ran.count("run") == 9  # the first step projects the source


def test_many_beams_of_a_source_go_through_the_blocks(ran):
    net = make_fast(plain("pre", PAIRS), "fp32")
    cache = net.new_cache(net.encode(ids(1, 4)), 9, 9)
    for i in range(3):
        net.decode(ids(9, 1, seed=i), cache=cache)
    assert ran.count("run") == 0


def test_layers_of_different_shapes(ran):
    """Kinds of layers that take turns, more kinds than layers, wider heads than the stream."""
    specs = [
        AttentionConfig(Geometry(64, heads, kv, 32), mask=Causal(), position=position)
        for heads, kv, position in ((4, 2, RopeConfig()), (2, 1, None), (6, 6, RopeConfig()))
    ]
    for layers in (5, 2):
        stack = StackConfig(layers, tuple(specs), PlainFFNConfig(96, "gelu"))
        embed = EmbedConfig(40, 64)
        net = make_fast(noisy(decoder(embed, stack, LMConfig(), HeadStyle(64, 40)), 0.1), "fp32")
        twin = copy.deepcopy(net)
        twin.stack.step = None
        cache, other = net.new_cache(2, 20), twin.new_cache(2, 20)
        ran.clear()
        for i in range(5):
            text = ids(2, 1, seed=i)
            close("fp32", net.decode(text, cache=cache), twin.decode(text, cache=other))
        assert ran.count("run") == 5


@pytest.mark.parametrize("later", [False, True])
def test_weights_that_came_the_other_way_round(later, ran, tmp_path):
    """As those of a GPT-2 from Hugging Face: they are laid in rows; those that come later are not,
    and go through the blocks.
    """
    model = ch.build("gpt2", seed=0, **SIZES)
    ch.export(model, tmp_path / "theirs")
    net = ch.load(tmp_path / "theirs").net
    linear = net.stack.blocks[0].ffn.in_proj
    assert not linear.weight.is_contiguous()
    fast, text = make_fast(net, "fp32"), ids(1, 4)
    assert linear.weight.data_ptr() == fast.stack.blocks[0].ffn.in_proj.weight.data_ptr()
    if later:
        weight = fast.stack.blocks[0].ffn.in_proj.weight
        weight.data = weight.data.t().contiguous().t()
        refresh(fast)
    cache = fast.new_cache(1, 9)
    found = torch.cat([fast.decode(text[:, i : i + 1], cache=cache) for i in range(4)], dim=1)
    close("fp32", found, net(text))
    assert ran.count("run") == (0 if later else 4)


@pytest.mark.parametrize("slack", [0, 12])
def test_a_window_goes_through_the_blocks(slack, ran):
    """Also where the cache has room for all of it, and is no ring."""
    net = ch.build("llama", seed=0, **SIZES, variant={"window": 4}).net.eval()
    fast, text = make_fast(net, "fp32"), ids(1, 10)
    cache = fast.new_cache(1, 10, slack=slack)
    found = torch.cat([fast.decode(text[:, i : i + 1], cache=cache) for i in range(10)], dim=1)
    close("fp32", found, net(text))
    assert ran.count("run") == 0


def test_a_stream_of_another_width_is_refused():
    net = make_fast(plain("gpt2"), "fp32")
    with pytest.raises(RuntimeError):
        net.stack(torch.zeros(1, 1, 96), Positions.span(0, 1), net.new_cache(1, 9))


def test_another_default_type(ran):
    net, text = make_fast(plain("llama"), "fp32"), ids(2, 4)
    expected = net(text)
    torch.set_default_dtype(torch.bfloat16)
    try:
        cache = net.new_cache(2, 9)
        found = torch.cat([net.decode(text[:, i : i + 1], cache=cache) for i in range(4)], dim=1)
    finally:
        torch.set_default_dtype(torch.float32)
    close("fp32", found, expected)
    assert ran.count("run") == 4


def test_two_threads_write_with_one_network():
    net = make_fast(plain("llama"), "int8")
    texts = [ids(1, 16, seed=seed) for seed in range(4)]

    def written(text):
        with torch.inference_mode():
            cache = net.new_cache(1, 16)
            return torch.cat([net.decode(text[:, i : i + 1], cache=cache) for i in range(16)], 1)

    alone = [written(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            together = list(pool.map(written, texts))
            assert all(a.equal(b) for a, b in zip(alone, together, strict=True))


def test_a_decoder_without_its_source_is_told_so():
    net = make_fast(plain("pre", PAIRS), "fp32")
    cache = net.decoder.new_cache(1, 9)
    with pytest.raises(ch.ClearheadError, match="looks at a source"):
        net.decoder.states(ids(1, 1), cache=cache)


def test_a_block_that_was_exchanged():
    net = make_fast(plain("gpt2"), "fp32")
    net.stack.blocks[1].ffn = torch.nn.Identity()
    twin = copy.deepcopy(net)
    twin.stack.step = None
    cache, other = net.new_cache(1, 9), twin.new_cache(1, 9)
    close("fp32", net.decode(ids(1, 1), cache=cache), twin.decode(ids(1, 1), cache=other))


def test_going_back_and_copies_of_a_cache():
    net, text = make_fast(plain("llama"), "fp32"), ids(2, 12)
    whole = net(text)
    cache = net.new_cache(2, 20)
    for i in range(9):
        net.decode(text[:, i : i + 1], cache=cache)
    cache.trim(6)
    saved = cache.snapshot()
    for _ in range(2):
        for i in range(6, 12):
            found = net.decode(text[:, i : i + 1], cache=cache)
            torch.testing.assert_close(found[:, 0], whole[:, i], rtol=1e-5, atol=1e-5)
        cache.restore(saved)


def test_whoever_listens_is_served_by_the_blocks():
    net, text = make_fast(plain("gpt2"), "fp32"), ids(1, 4)
    cache, other = net.new_cache(1, 9), net.new_cache(1, 9)
    for i in range(2):
        net.decode(text[:, i : i + 1], cache=cache)
        net.decode(text[:, i : i + 1], cache=other)
    with ch.capture(net, "blocks.*.leave", "self_attn.pattern") as acts:
        heard = net.decode(text[:, 2:3], cache=cache)
    assert acts["stack.blocks.1.self_attn.pattern"].shape == (1, 4, 1, 3)
    torch.testing.assert_close(heard, net.decode(text[:, 2:3], cache=other), rtol=1e-5, atol=5e-6)
    with ch.patch(net, {"blocks.0.leave": torch.zeros_like}):
        changed = net.decode(text[:, 3:], cache=other)
    assert not torch.allclose(changed, net.decode(text[:, 3:], cache=cache), atol=1e-3)
    seen = []
    hook = register_module_forward_hook(lambda *_: seen.append(0))
    net.decode(ids(1, 1), cache=other)
    hook.remove()
    assert len(seen) > 20
    seen.clear()
    hook = net.stack.blocks[2].ffn.register_forward_hook(lambda *_: seen.append(1))
    net.decode(ids(1, 1), cache=cache)
    hook.remove()
    net.decode(ids(1, 1), cache=cache)
    assert seen == [1]


@pytest.mark.parametrize(
    "part", ["ffn.out_proj.weight", "self_residual.norm.weight", "self_residual.norm.bias"]
)
@pytest.mark.parametrize("how", ["in place", "exchanged"])
def test_weights_that_change_are_followed(part, how):
    net, text = plain("gpt2"), ids(1, 6)
    fast = make_fast(net, "fp32")
    cache, other = fast.new_cache(1, 9), net.new_cache(1, 9)
    for i in range(6):
        if i == 3:
            if how == "in place":
                net.stack.blocks[1].get_parameter(part).mul_(3.0)
            else:
                for each in (net, fast):
                    own = each.stack.blocks[1].get_parameter(part)
                    own.data = own.data * 3.0
                refresh(fast)
        found = fast.decode(text[:, i : i + 1], cache=cache)
        expected = net.decode(text[:, i : i + 1], cache=other)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(taken(fast.stack)) == 1


@pytest.mark.parametrize("which", ["states", "cross"])
def test_keys_and_values_that_are_exchanged_are_followed(which):
    net, text = make_fast(plain("post", PAIRS), "fp32"), ids(1, 12)
    memory = net.encode(ids(1, 5))
    cache, other = (net.new_cache(memory, 20) for _ in range(2))
    for i in range(12):
        state = getattr(cache, which)[1]
        old = state.k, state.v  # so that nothing else comes to lie there
        if i == 2:
            state.k, state.v = state.k.clone(), state.v.clone()
        if i == 4:  # with other steps from head to head
            state.k, state.v = (F.pad(x, (0, 0, 0, 3)) for x in (state.k, state.v))
        if i == 6:
            state.k.data = state.k.clone()
        if i == 8:
            vars(state).update(v=state.v.clone())
        if i == 10:
            getattr(cache, which)[1] = copy.deepcopy(state)
            if which == "states":
                cache.states[1].slots = state.slots
        for x in old:
            if i in (2, 4):
                x.fill_(torch.nan)
        found = net.decode(text[:, i : i + 1], cache=cache)
        assert found.equal(net.decode(text[:, i : i + 1], cache=other))
    assert len(taken(net.decoder.stack)) == 2


def test_a_copy_has_lists_of_its_own():
    net, text = make_fast(plain("llama"), "int8"), ids(1, 5)
    cache = net.new_cache(1, 9)
    net.decode(text[:, :1], cache=cache)
    other = copy.deepcopy(net)
    assert other.stack.step.stack is other.stack
    again = other.new_cache(1, 9)
    assert taken(other.stack) == []
    assert other.decode(text[:, :1], cache=again).equal(
        net.decode(text[:, :1], cache=net.new_cache(1, 9))
    )


def test_a_list_goes_with_its_cache():
    net = make_fast(plain("gpt2"), "fp32")
    cache = net.new_cache(1, 9)
    net.decode(ids(1, 1), cache=cache)
    assert len(taken(net.stack)) == 1
    del cache
    assert taken(net.stack) == []


def test_what_it_does_not_know_it_leaves_to_the_blocks():
    odd = ch.build("llama", **SIZES | {"d_ff": 90}).net
    biased = ch.build("gpt2", **SIZES, position="alibi").net
    assert make_fast(odd, "fp32").stack.step is None
    assert make_fast(biased, "fp32").stack.step is None


# --- the small operations ---


def bits(number):
    return struct.unpack("<i", struct.pack("<f", number))[0]


@pytest.mark.parametrize(("lanes", "threads"), [(None, 1), (None, 2), (4, 1), (8, 3)])
def test_small_operations(lanes, threads):
    steps = compiled.steps()
    if lanes is not None:  # as for other processors
        machine = llvm.Target.from_default_triple().create_target_machine(
            features=llvm.get_host_cpu_features().flatten(), opt=2
        )
        steps = compiled.functions(
            "steps", compiled.compiled_code("steps", Shape(lanes, 3, 2), machine)
        )

    def call(name, *given):
        given = [g.data_ptr() if isinstance(g, torch.Tensor) else g for g in given]
        steps[name](*given, *[0] * (10 - len(given)))

    x, y = torch.randn(2, 3, 48), torch.randn(3, 48)
    weight, bias, out = torch.randn(48), torch.randn(48), torch.empty(3, 48)
    call("layer_norm", x, weight, bias, out, 48, bits(1e-5), 3, 0, threads)
    torch.testing.assert_close(out, F.layer_norm(x[0], (48,), weight, bias, 1e-5))
    call("rms_norm", x, weight, 0, out, 48, bits(1e-6), 3, 0, threads)
    torch.testing.assert_close(out, F.rms_norm(x[0], (48,), weight, 1e-6))
    sums = x[0].clone()
    call("add", sums, y, *[0] * 4, 144, 0, threads)
    assert sums.equal(x[0] + y)
    call("times", sums, y, *[0] * 4, 144, 0, threads)
    assert sums.equal((x[0] + y) * y)
    for name in ("gelu", "relu"):
        many = torch.linspace(-9, 9, 901)
        found = torch.empty_like(many)
        call(name, many, 0, 0, 0, found, 0, 901, 0, 1)
        torch.testing.assert_close(found, ACTIVATIONS[name](many), rtol=1e-5, atol=1e-6)

    seen = torch.tensor([4, 2])
    facts = dict.fromkeys(FACTS, 0) | {"heads": 6, "group": 2, "d": 16, "each": 8}
    facts["seen"] = seen.data_ptr()
    slots = torch.zeros(2, 3, 7, 16)
    facts |= dict(zip(("k_row", "k_head", "k_key"), slots.stride(), strict=False))
    own, lies = torch.arange(2), torch.tensor([[0, 0, 0, 5], [0, 25, 0, 0]])
    new = torch.randn(2, 3, 16)
    facts |= {"lies": lies.data_ptr(), "lies_row": 32, "lies_key": 8}
    facts |= {"k_row": 16, "k_key": 0}  # slots that a table names: row 1 has 21 of them before it
    told = torch.tensor([facts[name] for name in FACTS])
    call("put", new, slots, told, *[0] * 3, 2, 0, threads)
    assert slots[0, :, 5].equal(new[0])
    assert slots[1, :, 4].equal(new[1])
    assert slots.count_nonzero() == new.numel()

    facts |= {"lies": own.data_ptr(), "lies_row": 8, "lies_key": 0}
    facts |= {"k_row": slots.stride(0), "k_key": 16}
    told = torch.tensor([facts[name] for name in FACTS])
    call("put", new, slots, told, *[0] * 3, 2, 0, threads)
    assert slots[0, :, 3].equal(new[0])
    assert slots[1, :, 1].equal(new[1])
    assert slots.count_nonzero() == 2 * new.numel()

    rotary = ch.build("llama", **SIZES | {"d_ff": 96}).net.stack.kinds[0].rotary
    cos, sin = rotary.angles(torch.arange(9).unsqueeze(0), torch.float32)
    turned = new.clone()
    call("rotate", turned, cos, sin, told, 3, 16, 2, 16, threads)
    where = rotary.angles(torch.tensor([[3], [1]]), x.dtype)
    expected = rotary.rotate(new.view(2, 3, 1, 16), where)
    torch.testing.assert_close(turned, expected.view(2, 3, 16))
