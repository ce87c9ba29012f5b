"""The run-time form: compiled products = their slow twins, and the model is the same model."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch
from clearhead.fast import compile as compiled
from clearhead.fast import form as forms
from clearhead.fast.form import Quick, count_weights, form_of, make_fast, worth_it
from clearhead.fast.formats import (
    FORMS,
    GROUP,
    MANY,
    READ,
    WHOLE,
    as_read,
    pack,
    scratch_bytes,
    stored_as,
    unpack,
)
from clearhead.fast.linear import FastEmbedding, FastLinear
from clearhead.fast.rounding import draw_text, round_to_int4
from clearhead.fast.words import Shape
from clearhead.models.base import EncoderDecoder
from tiny import DECODERS, MODELS, SEQ2SEQ, close, noisy, sizes_of, tokens

llvm = pytest.importorskip("llvmlite.binding", reason="pip install 'clearhead[fast]'")
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
PACKED = FORMS[1:]
SIZES = {"vocab_size": 37, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_len": 64}
OTHERS = [
    *(Shape(8, 3, 2, dot) for dot in ("plain", "sign", "vnni")),
    Shape(8, 3, 2, "sign", 6, ahead=compiled.AHEAD),
    Shape(16, 4, 4, "sign", 12),
    Shape(16, 4, 4, "vnni", 12, ahead=compiled.AHEAD),
    Shape(16, 4, 4, "plain", 12),
]
SHAPES = [(4, 32), (7, 64), (130, 96), (9, 2 * 1024 + 32)]  # rows of W, and their length


def layer(form, n, k, bias=True):
    weight, scales = pack(torch.randn(n, k), form)
    return FastLinear(form, k, weight, scales, torch.randn(n) if bias else None)


def wide(name, **more):
    """A tiny network of which every product can be compiled."""
    family, own = MODELS[name]
    own = {key: value for key, value in own.items() if key not in ("ffn", "head", "variant")}
    sizes = {key: SIZES[key] for key in sizes_of(family)}
    return noisy(ch.build(family, seed=0, **{**sizes, "dropout": 0.0, **own, **more}).net, 0.1)


def tiny_model(**more):
    model = ch.build("gpt2", seed=0, **SIZES | {"dropout": 0.0} | more)
    noisy(model.net, 0.1)
    return model


# --- formats ---


@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_are_near_the_weights(form):
    weight = torch.randn(20, 100)
    stored, scales = pack(weight, form)
    lost = (unpack(stored, scales, form, 100) - weight).square().mean().sqrt()
    assert lost <= {"fp32": 0.0, "bf16": 2e-3, "int8": 7e-3, "int4": 8e-2}[form]
    assert form == "fp32" or lost > 0
    said = stored_as(form, 20, 100)
    assert (stored.dtype, tuple(stored.shape)) == said["weight"]
    assert scales.shape[1] == 0 or (scales.dtype, tuple(scales.shape)) == said["scales"]


@pytest.mark.parametrize("form", PACKED)
def test_what_was_packed_packs_to_itself(form):
    once = unpack(*pack(torch.randn(6, 64), form), form, 64)
    twice = unpack(*pack(once, form), form, 64)
    close(twice, once, 1e-2 if form == "int4" else 1e-6)


@pytest.mark.parametrize("form", PACKED)
def test_zeros_and_equal_weights_stay_what_they_are(form):
    for weight in (torch.zeros(5, GROUP), torch.full((5, GROUP), -0.5)):
        close(unpack(*pack(weight, form), form, GROUP), weight, 1e-6)


def test_int4_finds_a_better_range_than_the_widest():
    """A group with one weight far away."""
    weight = torch.randn(50, GROUP)
    weight[:, 3] = 6.0
    least, most = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
    step = (most - least) / 15
    widest = ((weight - least) / step).round() * step + least
    found = unpack(*pack(weight, "int4"), "int4", GROUP)
    assert (found - weight).square().sum() < 0.99 * (widest - weight).square().sum()


# --- products ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_compiled_product_is_its_slow_twin(form, n, k):
    fast = layer(form, n, k)
    assert fast.here
    for rows in (*range(1, 10), 13, MANY, MANY + 1, 145, 300, 1000):
        x = torch.randn(rows, k)
        expected = fast.plain(x)
        scale = float(expected.abs().max())
        torch.testing.assert_close(fast(x), expected, rtol=1e-5, atol=1e-5 * scale)


def test_fp32_is_torch_s_product_and_a_row_does_not_depend_on_the_others():
    linear = nn.Linear(96, 50)
    fast = FastLinear("fp32", 96, linear.weight, torch.empty(50, 0), linear.bias)
    x = torch.randn(MANY, 96)
    with torch.no_grad():
        close(fast(x), linear(x))
        alone = torch.cat([fast(row) for row in x.split(1)])
        assert all(fast(x[:rows]).equal(alone[:rows]) for rows in (2, 3, 5, 8, MANY))
        many = torch.randn(400, 96)  # more rows have additions of their own
        close(fast(many), linear(many))
        assert all(fast(many[:rows]).equal(fast(many)[:rows]) for rows in (MANY + 1, 145, 300))


def test_long_sums_are_as_exact_as_torch_s():
    """Parts of a sum are added up: a single chain of so many numbers would lose a digit."""
    weight, x = torch.rand(40, 11008), torch.rand(70, 11008)
    fast = FastLinear("fp32", 11008, *pack(weight, "fp32"), None)
    exact = x.double() @ weight.double().T
    off = [float((y - exact).norm() / exact.norm()) for y in (fast(x), F.linear(x, weight))]
    assert off[0] < 4 * off[1]


@pytest.mark.parametrize("form", FORMS)
def test_threads_share_the_work_and_not_the_result(form):
    fast = layer(form, 77, 64)
    for rows in (5, 40, 150):
        x = torch.randn(rows, 64)
        given = [tensor.data_ptr() for tensor in (x, *fast.tensors)]
        scratch = torch.empty(scratch_bytes(rows, 64), dtype=torch.uint8)
        found = []
        for threads in (1, 2, 3, 40):
            out = torch.full((rows, 77), torch.nan)
            ends = (rows, 77, 64, threads, scratch.data_ptr())
            compiled.product(form).run(*given, out.data_ptr(), *ends)
            found.append(out)
        assert all(out.equal(found[0]) for out in found)


@pytest.mark.parametrize("shape", OTHERS, ids=lambda s: f"{s.lanes}-{s.dot}-{s.ahead}")
@pytest.mark.parametrize("form", FORMS)
def test_code_for_other_processors_is_right_too(form, shape):
    """Vectors of 8, as AVX2 and ARM have them, and other ways to multiply bytes; this processor
    runs them as well.
    """
    features = llvm.get_host_cpu_features()
    wanted = {"vnni": "avx512vnni", "sign": "avx2", "plain": ""}[shape.dot]
    if form in WHOLE and wanted and not features.get(wanted):
        pytest.skip(f"this processor has no {wanted}")
    machine = llvm.Target.from_default_triple().create_target_machine(
        features=features.flatten(), opt=2
    )
    other = compiled.loaded(form, compiled.compiled_code(form, shape, machine))
    scratch = torch.empty(scratch_bytes(150, 320), dtype=torch.uint8)
    for n in (11, 130):  # less than a block, and more than two
        fast = layer(form, n, 320)
        for rows in (1, 2, 3, 4, 7, 150):
            x, out = torch.randn(rows, 320), torch.empty(rows, n)
            given = [tensor.data_ptr() for tensor in (x, *fast.tensors, out)]
            other.run(*given, rows, n, 320, 1, scratch.data_ptr())
            expected = fast.plain(x)
            close(out / expected.abs().max(), expected / expected.abs().max())


def test_x_is_rounded_in_groups_and_sums_of_whole_numbers_are_exact():
    """Numbers that are whole already lose nothing, whatever the processor."""
    fast = FastLinear("int8", 512, *pack(torch.randint(-127, 128, (8, 512)).float(), "int8"), None)
    x = torch.randint(-127, 128, (5, 512)).float()
    x[:, :: READ["int8"]] = 127.0  # every group has the scale 1, and so has every row of W
    fast.scales.fill_(1.0)
    whole = unpack(*fast.tensors[:2], "int8", 512)
    assert fast(x).double().equal(x.double() @ whole.double().T)
    y = torch.randn(4, 700)
    for form, most in (("fp32", 0.0), ("bf16", 0.0), ("int8", 0.02), ("int4", 0.02)):
        assert float((as_read(y, form) - y).abs().max()) <= most
        assert (most == 0) == as_read(y, form).equal(y)


@pytest.mark.parametrize("form", WHOLE)
def test_tiny_numbers_are_zero_and_the_default_device_does_not_matter(form):
    fast = layer(form, 70, 96, bias=False)
    x = torch.full((3, 96), 1e-38)
    assert not fast(x).any()
    assert not fast.plain(x).any()
    x = torch.randn(3, 96)
    with torch.device("meta"):
        found = fast(x)
    assert found.equal(fast(x))


@pytest.mark.parametrize("form", WHOLE)
def test_what_is_no_number_stays_none(form):
    fast, x = layer(form, 8, 64), torch.randn(3, 64)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    out = fast(x)
    assert out[:2].isnan().all()
    close(out[2:], fast.plain(x[2:]))


def test_shapes_of_x_and_strange_sizes():
    fast = layer("int8", 10, 64, bias=False)
    x = torch.randn(2, 3, 64)
    close(fast(x), fast.plain(x))
    close(fast(x.transpose(0, 1)), fast.plain(x).transpose(0, 1))
    assert fast(x[:0]).shape == (0, 3, 10)
    for n, k in ((3, 64), (10, 40)):  # fewer rows than a strip; no whole number of groups
        odd = layer("int4", n, k)
        assert not odd.here
        close(odd(torch.ones(2, k)), odd.plain(torch.ones(2, k)))


def test_other_types_and_copies():
    fast = layer("int8", 10, 64)
    x = torch.randn(3, 64)
    expected = fast(x)
    assert copy.deepcopy(fast)(x).equal(expected)
    assert fast.to(torch.float32)(x).equal(expected)
    close(fast(x.double()).float(), expected, 1e-4)


def test_compiled_code_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    said = []
    make = compiled.product.__wrapped__
    with compiled.told(said.append):
        make("fp32")
        make("fp32")
    assert len(said) == 1
    assert "fp32" in said[0]
    (kept,) = tmp_path.rglob("fp32-*.o")
    kept.write_bytes(b"")  # a file that a crash left behind
    make("fp32")
    assert kept.stat().st_size > 1000


# --- models ---


def near(form, found, expected, tolerance):
    """Close; where x is rounded (int8, int4) a last digit, which is another on every processor, may
    tip a number over, and with it a token; of a source in int4, the text that looks at it.
    """
    if form not in WHOLE:
        close(found, expected, tolerance)
        return
    off = (found - expected).abs().amax(dim=-1)
    assert len(off) > 1
    tipped = off > tolerance
    assert int(tipped.sum() if form == "int8" else tipped.any(dim=1).sum()) <= 1
    assert float(off.max()) < 5e-2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "transformer", "bart", "bert"])
def test_every_family_computes_what_its_unpacked_weights_compute(name, form):
    net = wide(name)
    fast = make_fast(net, form)
    assert form_of(fast) == form
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for path, module in fast.named_modules():
            if isinstance(module, FastLinear):
                weight, scales, _ = module.tensors
                own = unpack(weight, scales, module.form, module.in_features)
                linear = twin.get_submodule(path)
                linear.weight.copy_(own)
                linear.register_forward_pre_hook(
                    lambda _, given, form=module.form: as_read(given[0], form)
                )
        ids = tokens(2, 9)
        given = (ids, ids[:, :5]) if isinstance(net, EncoderDecoder) else (ids,)
        near(form, fast(*given), twin(*given), 2e-5)


@pytest.mark.parametrize("form", ["fp32", "int8"])
@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_cached_steps_are_the_uncached_call(name, form):
    fast = make_fast(wide(name), form)
    ids = tokens(3, 8)
    with torch.inference_mode():
        first, memory = 3, ()
        if isinstance(fast, EncoderDecoder):
            first = fast.encode(tokens(3, 5, seed=4))
            memory = (first,)
        cache = fast.new_cache(first, 16)
        steps = [fast.decode(part, cache=cache) for part in ids.split((3, 1, 1, 3), dim=1)]
        found, expected = torch.cat(steps, dim=1), fast.decode(ids, *memory)
    near(form, found, expected, 5e-5)


def test_the_fp32_form_shares_its_weights_and_follows_them():
    net = wide("gpt2")
    fast = make_fast(net, "fp32")
    shared = dict(net.named_parameters())
    assert all(p.data_ptr() == shared[name].data_ptr() for name, p in fast.named_parameters())
    assert not any(p.requires_grad for p in fast.parameters())
    with torch.no_grad():
        net.head.proj.weight *= 2
        ids = tokens(1, 4)
        close(fast(ids), net(ids))
    assert type(net.head.proj) is nn.Linear
    assert net.head.proj.weight.requires_grad


def test_a_tied_table_is_kept_once():
    net = wide("gpt2")
    fast = make_fast(net, "int8")
    table = fast.embed.tokens
    assert isinstance(table, FastEmbedding)
    ids = tokens(2, 5)
    expected = fast.head.proj._unpacked(slice(0, 64))[ids]
    assert table(ids).equal(expected)
    assert table(ids[:0]).shape == (0, 5, 32)
    assert count_weights(fast) == count_weights(net)
    for wrong in (37, 63, 64, -1):  # (a block has 64 rows)
        with pytest.raises(ch.ClearheadError, match="outside the vocabulary"):
            fast(torch.tensor([[wrong]]))


def test_it_refuses_to_learn():
    fast = make_fast(wide("gpt2"), "int8")
    with pytest.raises(ch.ClearheadError, match="does not learn"):
        fast.train()
    with pytest.raises(ch.ClearheadError, match="does not learn"):
        fast.head.proj(torch.randn(1, 32, requires_grad=True))


def test_bad_forms_are_refused(unchecked):
    model = tiny_model()
    with pytest.raises(ch.ClearheadError, match='Did you mean "int8"'):
        make_fast(model.net, "int-8")
    with pytest.raises(ch.ClearheadError, match="int8 already"):
        make_fast(model.fast("int8").net, "int4")
    with pytest.raises(ch.ClearheadError, match="meta device"):
        make_fast(ch.build("gpt2", device="meta").net, "int8")


def test_without_llvmlite_it_runs_by_unpacking(monkeypatch):
    net, ids = wide("llama"), tokens(2, 5)
    expected = make_fast(net, "int8")(ids)
    compiled.product.cache_clear()
    monkeypatch.setattr(compiled, "available", lambda: False)
    slow = make_fast(net, "int8")
    assert not worth_it(net)
    close(slow(ids), expected)
    with pytest.raises(ch.ClearheadError, match=r"clearhead\[fast\]"):
        compiled.product("int8")


def test_taps_are_the_same_ones():
    net, ids = wide("gpt2"), tokens(1, 6)
    fast = make_fast(net, "fp32")
    with ch.capture(net, "**.pattern") as seen, torch.no_grad():
        fast(ids)
    with ch.capture(fast, "**.pattern") as own, torch.no_grad():
        net(ids)
    assert len(seen) == 2
    assert seen.keys() == own.keys()
    with ch.patch(fast, {"blocks.0.ffn.hidden": torch.zeros_like}), torch.no_grad():
        patched = fast(ids)
    with ch.patch(net, {"blocks.0.ffn.hidden": torch.zeros_like}), torch.no_grad():
        close(patched, net(ids))
    assert not patched.equal(fast(ids))


# --- the automatic choice ---


def test_large_models_take_the_fp32_form_by_themselves(monkeypatch):
    model = tiny_model()
    net, quick = model.net, Quick()
    assert quick(net) is net  # too small to be worth it
    monkeypatch.setattr(forms, "WRITING", 1)
    monkeypatch.setattr(forms, "WORTH", 1)
    fast = quick(net)
    assert form_of(fast) == "fp32"
    assert quick(net) is fast
    net.head.proj.weight.data = net.head.proj.weight.data.clone()
    assert quick(net) is not fast
    assert quick(fast) is fast
    hook = net.register_forward_hook(lambda *_: None)
    assert quick(net) is net
    hook.remove()
    assert quick(net) is not net


def test_small_ones_that_write_take_it_where_a_step_is_one_call(monkeypatch):
    monkeypatch.setattr(forms, "WRITING", 1)
    sizes = SIZES | {"d_model": 64, "d_ff": 96}
    net = ch.build("gpt2", seed=0, **sizes).net
    assert form_of(Quick()(net)) == "fp32"
    for other in (
        ch.build("gpt2", seed=0, **sizes, position="alibi").net,
        ch.build("rnn", seed=0, vocab_size=37, d_model=64).net,
        ch.build("bert", seed=0, **sizes).net,
    ):
        quick = Quick()
        assert quick(other) is other
        assert quick(other) is other


@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer"])
def test_the_tokens_are_those_of_the_plain_network(name):
    net = wide(name)
    fast = make_fast(net, "fp32")
    memory = ()
    if isinstance(net, EncoderDecoder):
        memory = (net.encode(tokens(1, 5)),)
    ids = [[1, 2], [1, 2]]
    for _ in range(20):
        for row, own in zip(ids, (net, fast), strict=True):
            with torch.inference_mode():
                row.append(int(own.decode(torch.tensor([row]), *memory)[0, -1].argmax()))
    assert ids[0] == ids[1]


# --- files ---


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_a_packed_model_is_saved_and_opened_again(name, form, tmp_path):
    family, _ = MODELS[name]
    model = ch.build(family, seed=0, **SIZES | {"dropout": 0.0}).fast(form)
    model.save(tmp_path / "a")
    again = ch.load(tmp_path / "a")
    assert form_of(again.net) == form
    ids = tokens(2, 6)
    given = (ids, ids) if isinstance(model.net, EncoderDecoder) else (ids,)
    assert again(*given).equal(model(*given))
    again.save(tmp_path / "b")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_packed_folder_says_what_it_is(tmp_path):
    tiny_model().fast("int8").save(tmp_path / "a")
    said = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (said["format"], said["form"]) == ("clearhead/3", "int8")
    for change, error in (
        ({"form": "int3"}, "does not know"),
        ({"form": "int4"}, "packed by an older version"),  # which laid int4 out otherwise
        ({"form": "int4", "format": "clearhead/4"}, "must be"),
        ({"form": None}, "does not know"),
        ({"format": "clearhead/9"}, "not a Clearhead model"),
        ({"format": "clearhead/2"}, "packed by an older version"),
        ({"format": "clearhead/1"}, "do not fit"),
    ):
        (tmp_path / "a" / "config.json").write_text(json.dumps(said | change))
        with pytest.raises(ch.ClearheadError, match=error):
            ch.load(tmp_path / "a")


def test_the_fp32_form_is_saved_as_the_model_it_is(tmp_path):
    model = tiny_model()
    model.save(tmp_path / "a")
    model.fast("fp32").save(tmp_path / "b")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# --- rounding ---


def test_rounding_for_inputs_changes_outputs_less():
    """Inputs with few directions, as those of a network are."""
    x = torch.randn(400, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(400, 64)
    weight = torch.randn(40, 64)
    stored, scales = round_to_int4(weight, x.T @ x)
    found, plain = unpack(stored, scales, "int4", 64), unpack(*pack(weight, "int4"), "int4", 64)
    errors = [(F.linear(x, w) - F.linear(x, weight)).square().mean() for w in (found, plain)]
    assert errors[0] < 0.5 * errors[1]


def test_int4_of_a_decoder_is_rounded_for_what_it_writes():
    model = tiny_model()
    text = draw_text(model.net, 64, 37)
    assert text.equal(draw_text(model.net, 64, 37))
    assert text.shape[1] == 64
    expected = make_fast(model.net, "int4", text)(tokens(1, 5))
    assert model.fast("int4")(tokens(1, 5)).equal(expected)
    assert not make_fast(model.net, "int4")(tokens(1, 5)).equal(expected)
    layers = {m.form for m in model.fast("int4").net.modules() if isinstance(m, FastLinear)}
    assert layers == {"int8", "int4"}  # the head keeps more bits


# --- with published weights ---

TALE = (
    "Once upon a time, there was a small boy named Tom. Tom had a red ball that he loved very "
    "much. Every morning he took the ball to the park and played with his friend Anna. One day "
    "the ball rolled down the hill and fell into the pond. Tom was sad and began to cry. "
)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "most"), [("int8", 0.005), ("int4", 0.03)])
def test_the_loss_of_a_trained_model_changes_little(form, most):
    folder = Path(os.environ.get("CLEARHEAD_WEIGHTS") or "nowhere", "stories15m")
    if not folder.exists():
        missing = pytest.fail if os.environ.get("CLEARHEAD_REQUIRE") else pytest.skip
        missing("CLEARHEAD_WEIGHTS has no stories15m: see tests/test_real_weights.py")
    model = ch.load(folder)
    starts = ("Once upon a time", "One day", "Lily", "The dog", "There was a big")
    settings = {"max_new_tokens": 200, "temperature": 1.0}
    texts = [TALE, *(start + model.generate(start, **settings, seed=9) for start in starts)]
    small = model.fast(form)
    before, after = (-torch.cat([m.score(text) for text in texts]).mean() for m in (model, small))
    assert abs(float(after / before) - 1) < most


# --- what addresses alone must not decide ---


def test_a_wrong_width_or_device_never_comes_to_the_product():
    layer = FastLinear("fp32", 32, *pack(torch.randn(8, 32), "fp32"), None)
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, 64))
    assert layer(torch.zeros(1, 32, device="meta")).is_meta


def test_numbers_beside_packed_weights_are_fp32():
    """Biases of another type would be read as what they are not."""
    net = ch.build(
        "llama",
        seed=0,
        vocab_size=64,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_len=64,
        variant={"qkv_bias": True},
        head={"kind": "lm", "tied": True},
    ).net.eval()
    noisy(net, 0.1)
    half = copy.deepcopy(net).bfloat16()
    fast = make_fast(half, "int8")
    assert {p.dtype for p in fast.parameters()} == {torch.float32}
    ids = torch.arange(8)[None]
    slow = make_fast(copy.deepcopy(half).float(), "int8")
    torch.testing.assert_close(fast(ids), slow(ids))
    assert next(half.parameters()).dtype == torch.bfloat16


def test_a_form_of_a_form_and_copies_follow_their_own_weights():
    net = ch.build("gpt2", seed=0, **SIZES).net.eval()
    first = make_fast(net, "fp32")
    assert form_of(make_fast(first, "int8")) == "int8"
    twin = copy.deepcopy(first)
    layer = next(m for m in twin.modules() if isinstance(m, FastLinear))
    assert layer.tensors[0].data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_damaged_weights_are_not_rounded_to_sound_ones(form):
    net = ch.build("gpt2", seed=0, **SIZES).net
    net.stack.blocks[0].ffn.in_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ch.ClearheadError, match=r"blocks\.0\.ffn\.in_proj are not all numbers"):
        make_fast(net, form)


def test_ties_that_are_not_the_heads_stay(tmp_path):
    head = {"kind": "t5_lm", "tied": False, "scaled": False}
    sizes = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_len": 32}
    model = ch.build("t5", seed=0, head=head, **sizes)
    fast = model.fast("int8")
    fast.save(tmp_path / "m")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(ch.load(tmp_path / "m")(ids, ids), fast(ids, ids))


def test_packed_weights_are_not_exported(tmp_path):
    sizes = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_len": 32}
    model = ch.build("gpt2", seed=0, **sizes)
    with pytest.raises(ch.ClearheadError, match="int8 of our own kind"):
        ch.export(model.fast("int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fewer_threads_than_asked_for_do_all_the_work():
    """OpenMP may give fewer, by a limit from outside."""
    code = (
        "import torch; torch.set_num_threads(2)\n"
        "from clearhead.fast.formats import pack\n"
        "from clearhead.fast.linear import FastLinear\n"
        "w, x = torch.randn(512, 512), torch.randn(1, 512)\n"
        "layer = FastLinear('fp32', 512, *pack(w, 'fp32'), None)\n"
        "torch.testing.assert_close(layer(x), x @ w.T, rtol=1e-3, atol=1e-3)"
    )
    limits = {"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | limits, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
