"""The best token without most of the head: the very token, and the very logit, of the whole one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.fast import likeliest as module
from clearhead.fast.form import held_bytes, make_fast, refresh, step_bytes
from clearhead.fast.formats import MANY, as_read, pack
from clearhead.fast.likeliest import (
    ROWS,
    Likeliest,
    _candidates,
    _make,
    _reaches,
    likeliest,
    plain_candidates,
)
from clearhead.fast.linear import FastLinear
from clearhead.measure.speed import Work, decoder
from clearhead.models.base import Decoder
from clearhead.models.heads import LMHead
from clearhead.text.trained import train_tokenizer
from tiny import DECODERS, MODELS, SEQ2SEQ, noisy, sizes_of

pytest.importorskip("llvmlite", reason="pip install 'clearhead[fast]'")
N, K = 1500, 96
SMALL = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4}


class Text:
    """What a cache is to it: something that a text has of its own."""


def token(found):
    """The best of the first row."""
    logits, which = found
    return which[logits[:1].argmax(dim=1)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Heads of any size have codes from the first step on."""
    for name, value in {"WORTH": 0, "AFTER": 1, "SETTLED": 1, "PART": 1}.items():
        monkeypatch.setattr(module, name, value)


def head(form="fp32", n=N, k=K, bias=False, seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(n, k)
    if form == "bf16":
        weight = weight.bfloat16()
    return FastLinear(form, k, weight, torch.empty(n, 0), torch.randn(n) if bias else None)


def shaped(kind, x, linear):
    """Weights and inputs that are hard on bounds."""
    weight = linear.weight
    if kind == "outliers":
        weight[::7] *= 50
        x[..., 3] = 200
    elif kind == "zeros":
        weight[: N // 2] = 0
        x[..., K // 2 :] = 0
    elif kind == "tiny":
        weight *= 1e-20
        x *= 1e-12
    elif kind == "tiny inputs":  # whose squares are 0
        x *= 1e-24
    elif kind == "tiny weights":
        weight *= 1e-30
        weight[::3] *= 1e-12
        x *= 1e17
    elif kind == "equals":  # the first of equals is the best
        weight[20:40] = weight[20]
    elif kind == "near":
        weight[:200] = weight[0] + 1e-4 * torch.randn(200, K)
        x[:] = weight[0].float()


KINDS = ("plain", "outliers", "zeros", "tiny", "tiny inputs", "tiny weights", "equals", "near")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_largest_logit_is_that_of_the_whole_product(form, bias, kind):
    linear = head(form, bias=bias)
    for rows in (1, 2, 3, 16, MANY, MANY + 1, 100, ROWS):
        x = torch.randn(rows, K)
        shaped(kind, x, linear)
        (found, which), whole = Likeliest(linear)(x, Text()), linear(x)
        assert found.shape == (rows, len(which))
        assert torch.equal(which[found.argmax(dim=1)], whole.argmax(dim=1))
        assert torch.equal(found, whole[:, which])
        if kind == "plain" and rows == 1:
            assert 0 < len(which) < N // 10


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [32, 512, 800, 1600])
def test_some_outputs_are_those_of_the_whole_product(k, form):
    linear = head(form, n=700, k=k, bias=True)
    for rows in (1, 7, MANY, MANY + 1, 47, 64, 150):
        x = torch.randn(rows, k)
        whole = linear(x)
        for count in (1, 3, 5, 31, 32, 33, 130):
            which = torch.randperm(700)[:count].sort().values
            assert torch.equal(linear.some(x, which), whole[:, which]), (rows, count)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_no_logit_is_wrong_by_more_than_its_bound(kind):
    linear = head(bias="tiny" not in kind)
    x = torch.randn(8, K)
    shaped(kind, x, linear)
    codes = _make(linear)
    exact = x.double() @ linear.weight.double().T
    exact += 0 if linear.bias is None else linear.bias.double()
    wrong = (codes.product(x)[:, :N].double() - exact).abs().numpy()
    reaches = _reaches(x)
    own, length, spare = codes.bounds.numpy()
    bounds = reaches[:, :1].numpy() * own + reaches[:, 1:].numpy() * length + spare
    bounds = bounds[:, :N]
    assert (wrong <= bounds).all()
    if kind != "tiny weights":  # (of which most have a bound that is the smallest there is)
        assert (wrong[wrong > 0] > bounds[wrong > 0] / 1000).mean() > 0.9  # they say something
    x, lost = x.double(), (x - as_read(x, "int8")).double().norm(dim=1)
    reaches = reaches.double()
    assert torch.allclose(reaches[:, 0], x.norm(dim=1) * 1.002, rtol=1e-5, atol=0)
    assert torch.allclose(reaches[:, 1], lost * 1.002, rtol=0.02, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_those_of_the_slow_twin(kind):
    linear = head(bias="tiny" not in kind)
    for rows in (1, 5, 64):
        x = torch.randn(rows, K)
        shaped(kind, x, linear)
        codes = _make(linear)
        found, slow = _candidates(x, codes), plain_candidates(x, codes)
        together = set(found.tolist()) & set(slow.tolist())
        # A bound of theirs may differ in its last place.
        assert len(together) >= 0.99 * max(len(found), len(slow))
        assert found.tolist() == sorted(set(found.tolist()))
        assert set(linear(x).argmax(dim=1).tolist()) <= together
        assert found.max() < N


@torch.no_grad()
@pytest.mark.parametrize("where", ["weight", "x"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_a_candidate_or_ends_the_search(what, where):
    linear, x = head(), torch.randn(3, K)
    if where == "x":
        x[1, 5] = what
        assert _candidates(x, _make(linear)) is plain_candidates(x, _make(linear)) is None
        return
    linear.weight[7, 3] = what
    codes = _make(linear)
    assert 7 in _candidates(x, codes).tolist()
    assert 7 in plain_candidates(x, codes).tolist()


@torch.no_grad()
def test_a_bound_that_is_too_narrow_would_be_noticed(monkeypatch):
    linear, x = head(), torch.randn(400, K)
    narrow = _reaches

    def best(factor):
        monkeypatch.setattr(module, "_reaches", lambda x: factor * narrow(x))
        finder = Likeliest(linear)
        return torch.cat([token(finder(one.unsqueeze(0), Text())) for one in x])

    assert torch.equal(best(1.0), linear(x).argmax(dim=-1))
    assert not torch.equal(best(0.0), linear(x).argmax(dim=-1))


@torch.no_grad()
def test_tokens_that_a_bias_rules_out_do_not_come():
    linear = head(bias=True)
    best = linear(x := torch.randn(1, K)).argmax()
    linear.bias[best] = -torch.inf
    linear.bias[::3] = -1e9
    found = token(Likeliest(linear)(x, Text()))
    assert found == linear(x).argmax()
    assert found != best


@torch.no_grad()
def test_weights_that_change_are_noticed():
    linear, x, text = head(), torch.randn(1, K), Text()
    finder = Likeliest(linear)

    def agrees(text):
        found, whole = finder(x, text), linear(x)
        return found is not None and token(found) == whole.argmax()

    assert agrees(text)
    linear.weight.mul_(-1)  # at once
    assert finder(x, text) is None
    assert agrees(text)
    linear.weight.data.mul_(-1)  # at the next text
    assert not agrees(text)
    assert agrees(Text())
    linear.weight.data[5] = 100 * x.flatten()
    assert agrees(Text())


@torch.no_grad()
def test_codes_are_made_late_and_not_for_who_changes_weights(monkeypatch):
    monkeypatch.setattr(module, "AFTER", 6)
    monkeypatch.setattr(module, "SETTLED", 2)
    linear, x = head(), torch.randn(1, K)
    finder, text, next_text = Likeliest(linear), Text(), Text()
    assert [finder(x, text) is None for _ in range(7)] == [True] * 5 + [False] * 2
    assert [finder(x, next_text) is None for _ in range(3)] == [True, False, False]
    for _ in range(5):
        linear.weight.add_(1)
        assert finder(x, text) is None
    assert finder._codes is None


@torch.no_grad()
def test_who_cannot_tell_tokens_apart_is_not_asked_again_and_again(monkeypatch):
    monkeypatch.setattr(module, "PART", 8)
    linear = head()
    linear.weight[:] = linear.weight[0]
    finder, calls = Likeliest(linear), []
    monkeypatch.setattr(module, "_candidates", lambda *a: calls.append(1) or _candidates(*a))
    text = Text()
    assert all(finder(torch.randn(1, K), text) is None for _ in range(40))
    assert 0 < len(calls) < 12
    assert finder._codes is None
    assert finder.left_out == 0
    linear.weight.copy_(torch.randn(N, K))  # it has learnt to
    assert finder(torch.randn(1, K), text) is None
    assert finder(torch.randn(1, K), text) is not None
    assert finder.left_out > 0


@torch.no_grad()
def test_others_take_the_whole_product():
    linear = head()
    finder = Likeliest(linear)
    assert finder(torch.randn(ROWS + 1, K), Text()) is None
    assert finder(torch.randn(1, K).double(), Text()) is None
    assert finder(torch.randn(0, K), Text()) is None
    assert finder(torch.full((1, K), torch.nan), Text()) is None
    assert finder(torch.full((1, K), torch.inf), Text()) is None
    seen = []
    handle = linear.register_forward_hook(lambda *_: seen.append(1))
    assert finder(torch.randn(1, K), Text()) is None
    handle.remove()
    assert finder(torch.randn(1, K), Text()) is not None
    with torch.inference_mode():
        assert likeliest(head()) is None  # torch does not count their changes
    assert likeliest(FastLinear("int8", K, *_packed())) is None
    assert likeliest(torch.nn.Linear(K, N)) is None


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_it_asks_nobody_for_the_usual_type(form):
    linear, x = head(form), torch.randn(3, K)
    torch.set_default_dtype(torch.float64)
    try:
        found, which = Likeliest(linear)(x, Text())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.equal(linear(x)[:, which])
    assert which[found.argmax(dim=1)].equal(linear(x).argmax(dim=1))


@torch.no_grad()
def test_threads_share_the_codes(monkeypatch):
    made = []
    monkeypatch.setattr(module, "_make", lambda linear: made.append(1) or _make(linear))
    linear, x = head(), torch.randn(1, K)
    finder, best = Likeliest(linear), linear(x).argmax()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: token(finder(x, Text())), range(16)))
    assert found == [best] * 16
    assert len(made) == 1


def _packed():
    return (*pack(torch.randn(N, K), "int8"), None)


@torch.no_grad()
@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_have_codes_of_their_own(again):
    linear, x = head(), torch.randn(1, K)
    finder = Likeliest(linear)
    finder(x, Text())
    other = again(finder)
    assert other.linear is not linear
    assert other._codes is None
    other.linear.weight.mul_(-1)
    assert token(other(x, Text())) == other.linear(x).argmax()
    assert token(finder(x, Text())) == linear(x).argmax()


# --- models ---


def wide(name, form="fp32"):
    family, own = MODELS[name]
    own = {key: value for key, value in own.items() if key not in ("ffn", "variant")}
    sizes = {"vocab_size": 300, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_len": 64}
    sizes = {key: sizes[key] for key in sizes_of(family)}
    model = ch.build(family, seed=0, **{**sizes, "dropout": 0.0, **own})
    noisy(model.net, 0.3)
    model.tokenizer = train_tokenizer("bytes", "")
    return model.fast(form)


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_in_every_family_the_next_token_is_that_of_all_logits(name, form):
    net = wide(name, form).net
    memory = (net.encode(torch.randint(300, (3, 5))),) if name in SEQ2SEQ else (3,)
    caches = [net.new_cache(*memory, 64) for _ in range(2)]
    best = set()
    for _ in range(10):
        ids = torch.randint(300, (3, 1))
        found, which = net.decode_next(ids, caches[0], greedy=True)
        whole, all_of_them = net.decode_next(ids, caches[1])
        assert all_of_them is None
        assert len(which) < whole.shape[1] == 300
        assert torch.equal(found, whole[:, which])
        assert torch.equal(which[found.argmax(dim=1)], whole.argmax(dim=1))
        best |= set(which[found.argmax(dim=1)].tolist())
    assert len(best) > 3 or name == "bart"  # whose bias decides


@pytest.mark.parametrize("name", ["gpt2", "llama", "rnn", "bart"])
def test_texts_are_those_of_the_whole_head(name):
    model = wide(name)
    model.companions["generation_config.json"] = {"decoder_start_token_id": 65}
    prompts = ["ab", "to be or not", "q"]

    def write():
        settings = {"max_new_tokens": 12, "temperature": 0.0}
        together = model.generate(prompts, **settings)
        return [*together, *(model.generate(one, **settings) for one in prompts)]

    found = write()
    assert found[:3] == found[3:]
    assert model.net.head.likeliest._hits > 2 * 11  # (a text may end early)
    model.net.head.likeliest = None
    assert write() == found


@pytest.mark.parametrize("within", [torch.inference_mode, torch.no_grad])
def test_texts_may_be_written_within_anything(within):
    model = wide("gpt2")
    with within():
        once = model.generate("to be", max_new_tokens=12, temperature=0.0)
    assert model.generate("to be", max_new_tokens=12, temperature=0.0) == once
    net = wide("gpt2").net
    with within():
        refresh(net)
        assert Likeliest(net.head.proj)(torch.randn(1, 32), Text()) is not None


@torch.no_grad()
def test_a_head_or_a_model_of_ones_own_is_asked_as_ever():
    class Capped(LMHead):
        def forward(self, x, at):
            return super().forward(x, at).clamp(max=0.1)

    class Other(Decoder):
        def decode(self, ids, at=None, cache=None):
            return super().decode(ids, at, cache).neg()

    def reads_less(net):
        ids = torch.randint(300, (1, 1))
        return net.decode_next(ids, net.new_cache(1, 64), greedy=True)[1] is not None

    net = wide("gpt2").net
    assert reads_less(net)
    seen = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    assert not reads_less(net)
    handle.remove()
    assert net.head in seen
    net.head.__class__ = Capped
    assert not reads_less(net)
    net.head.__class__ = LMHead
    net.__class__ = Other
    assert not reads_less(net)
    net.__class__ = Decoder
    assert reads_less(net)
    net.head.proj = copy.deepcopy(net.head.proj)
    assert not reads_less(net)


def test_a_step_reads_less_once_there_are_codes():
    model = wide("gpt2")
    net, held = model.net, held_bytes(model.net)
    assert step_bytes(net) == held
    model.generate("to be", max_new_tokens=5)
    head, codes = net.head.proj.weight, 512 * 64 + 3 * 512 * 4  # 300 tokens x 32 fill blocks
    assert held - step_bytes(net) == head.nbytes - codes
    assert step_bytes(ch.build("gpt2", seed=0, **SMALL).net) > 0
    assert step_bytes(ch.build("bert", seed=0, **SMALL).net) > 0


def test_a_measured_decoder_asks_for_the_best_token():
    net = wide("gpt2").net
    decoder(net, 300)(Work(prompt=3, new=6, rows=2))
    assert net.head.likeliest._hits == 5


def test_whoever_asks_for_more_gets_the_whole_head():
    model = wide("gpt2")
    finder = model.net.head.likeliest

    def hits(**settings):
        before = finder._hits
        model.generate("to be", max_new_tokens=5, **settings)
        return finder._hits - before

    assert hits() == 4  # the first token comes of the prompt
    for settings in (
        {"details": True},
        {"temperature": 1.0},
        {"repetition_penalty": 1.5},
        {"banned": ["x"]},
        {"logit_bias": {"x": 1.0}},
    ):
        assert hits(**settings) == 0, settings
    model.net.head.register_forward_hook(lambda *_: None)
    assert hits() == 0


def test_damaged_weights_are_refused_as_ever():
    model = wide("gpt2")
    model.generate("to be", max_new_tokens=5)
    with torch.no_grad():
        model.net.head.proj.weight[7] = torch.nan
    with pytest.raises(ClearheadError, match="not numbers"):
        model.generate("to be", max_new_tokens=5)


def test_a_small_head_and_one_of_few_bits_have_none(monkeypatch):
    monkeypatch.undo()
    net = ch.build("gpt2", seed=0, vocab_size=64, d_model=32, n_layers=1, n_heads=4).net
    assert make_fast(net, "fp32").head.likeliest is None
    monkeypatch.setattr(module, "WORTH", 0)
    assert make_fast(net, "fp32").head.likeliest is not None
    assert make_fast(net, "int8").head.likeliest is None
    assert make_fast(make_fast(net, "fp32"), "int8").head.likeliest is None
