"""Masks against loops over positions: what they allow, what their facts claim, and their JSON."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention.cache import Slots
from clearhead.attention.mask import (
    Adjacency,
    All,
    Both,
    Causal,
    Either,
    Prefix,
    Segments,
    Window,
)
from clearhead.attention.positions import Positions
from clearhead.attention.spec import AttentionConfig, Geometry
from clearhead.attention.view import View
from clearhead.errors import ClearheadError
from tiny import attention, stacked, tiny, tokens

NODES = 12

# --- the formula in loops ---


def sees(mask, q, k, row, i, j):
    """Whether the query in slot i may look at the key in slot j, without empty slots."""
    qi, kj = at(q.pos, row)[i], at(k.pos, row)[j]
    match mask:
        case All():
            return True
        case Causal():
            return kj <= qi
        case Window(width):
            return abs(qi - kj) < width
        case Segments():
            return at(q.segment, row)[i] == at(k.segment, row)[j]
        case Prefix():
            return kj < int(at(q.prefix, row))
        case Adjacency():
            return bool(at(q.pairs, row)[qi, kj])
        case Both(left, right):
            return sees(left, q, k, row, i, j) and sees(right, q, k, row, i, j)
        case Either(left, right):
            return sees(left, q, k, row, i, j) or sees(right, q, k, row, i, j)
    raise AssertionError(mask)


def at(data, row):
    """A row of something that may have one row for all."""
    return data[row if data.shape[0] > 1 else 0]


def brute(mask, q, k):
    """[b, q, k] by three loops."""
    rows = max(q.pos.shape[0], k.pos.shape[0])
    out = torch.zeros(rows, q.length, k.length, dtype=torch.bool)
    for row in range(rows):
        for i in range(q.length):
            for j in range(k.length):
                filled = at(q.pos, row)[i] >= 0 and at(k.pos, row)[j] >= 0
                out[row, i, j] = bool(filled) and bool(sees(mask, q, k, row, i, j))
    return out


def facts_hold(p):
    """A `Positions` never claims what its numbers deny."""
    filled = p.pos[p.pos >= 0]
    assert filled.numel() == 0 or (filled.min() >= p.lo and filled.max() <= p.hi)
    assert p.holes or bool((p.pos >= 0).all())
    if p.dense:
        assert bool((p.pos == torch.arange(p.lo, p.hi + 1)).all())
    if p.ends is not None and len(p.ends) == p.pos.shape[0]:
        assert all(end >= int(row.max()) + 1 for end, row in zip(p.ends, p.pos, strict=True))


# --- what hypothesis draws ---

leaves = st.one_of(
    st.sampled_from([All(), Causal(), Segments(), Prefix(), Adjacency()]),
    st.integers(1, 6).map(Window),
)
formulas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=4,
)
without_data = st.recursive(
    st.one_of(st.sampled_from([All(), Causal()]), st.integers(1, 6).map(Window)),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=3,
)


@st.composite
def any_positions(draw, rows=None):
    """A recipe for positions from each of their makers, with holes.

    A recipe, because beartype draws random numbers and hypothesis forbids that while it draws.
    """
    rows = draw(st.integers(1, 3)) if rows is None else rows
    maker = draw(st.sampled_from(["span", "ragged", "of"]))
    if maker == "span":
        return partial(Positions.span, draw(st.integers(0, 4)), draw(st.integers(1, 6)))
    if maker == "ragged":
        lengths = draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
        starts = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
        width = max(1, max(lengths) + draw(st.integers(0, 2)))
        side = draw(st.sampled_from(["left", "right"]))
        return partial(Positions.ragged, lengths, side, starts, width)
    width = draw(st.integers(1, 6))
    number = st.integers(-1, NODES - 1)
    lines = st.lists(st.lists(number, min_size=width, max_size=width), min_size=rows, max_size=rows)
    return partial(Positions.of, torch.tensor(draw(lines)))


@st.composite
def calls(draw):
    """A recipe for queries and keys of one call with all the data that masks ask for."""
    rows = draw(st.integers(1, 3))
    queries = draw(any_positions(rows))
    keys = None if draw(st.booleans()) else draw(any_positions(rows))
    return partial(make_call, rows, queries, keys, draw(st.integers(0, 1000)))


def make_call(rows, queries, keys, seed):
    generator = torch.Generator().manual_seed(seed)

    def random(high, *shape):
        return torch.randint(high, shape, generator=generator)

    q = queries()
    pairs = random(2, rows, NODES, NODES).bool()
    q = q.with_data(random(3, rows, q.length), random(NODES, rows), pairs)
    if keys is None:
        return q, q
    k = keys()
    return q, k.with_data(random(3, rows, k.length), q.prefix, pairs)


@settings(max_examples=150)
@given(formulas, calls())
def test_any_formula_is_what_the_loops_say(mask, call):
    q, k = call()
    expected = brute(mask, q, k)
    rows = max(q.pos.shape[0], k.pos.shape[0], q.prefix.shape[0])
    allowed = mask.allowed(q, k).expand(rows, -1, -1)
    assert torch.equal(allowed, expected_rows(mask, q, k, rows, expected))
    plain = mask.plain(q, k)
    if plain == "all":
        assert expected.all()
    if plain == "causal":
        assert q.length == k.length
        assert torch.equal(expected, torch.ones_like(expected).tril())
    view = View.of(mask, q, k)
    assert (view.allowed is None) == (plain is not None)


def expected_rows(mask, q, k, rows, expected):
    """The loops' answer for as many rows as the call's data has."""
    if expected.shape[0] == rows:
        return expected
    whole = Positions.of(q.pos.expand(rows, -1)).with_data(q.segment, q.prefix, q.pairs)
    keys = Positions.of(k.pos.expand(rows, -1)).with_data(k.segment, k.prefix, k.pairs)
    return brute(mask, whole, keys)


@settings(max_examples=100)
@given(formulas, calls())
def test_reach_and_causal_never_claim_too_much(mask, call):
    q, k = call()
    distance = q.distance(k)
    allowed = mask.allowed(q, k)
    if mask.causal:
        assert not (allowed & (distance < 0)).any()
    if mask.reach is not None:
        assert not (allowed & (distance >= mask.reach)).any()


def test_reach_and_causal_are_as_tight_as_can_be():
    """A ring is as long as the reach, so a loose one would waste memory."""
    assert (Causal() & Window(3) & Window(7)).reach == 3
    assert (Window(3) | Window(7)).reach == 7
    assert (Window(3) | Causal()).reach is None
    assert (Causal() & (Window(3) | All())).reach is None
    assert Causal().causal
    assert (Window(3) & Causal()).causal
    assert ((Causal() & Window(3)) | (Causal() & Segments())).causal
    assert not (Causal() | Prefix()).causal
    assert not Window(3).causal


@settings(max_examples=100)
@given(any_positions())
def test_facts_hold_for_every_maker(recipe):
    facts_hold(recipe())


@pytest.mark.parametrize("lengths", [[3], [1, 1, 1], [4, 2, 3]])
def test_packed_positions(lengths):
    p = Positions.packed(lengths)
    facts_hold(p)
    assert p.pos.tolist() == [[i for n in lengths for i in range(n)]]
    assert p.segment.tolist() == [[d for d, n in enumerate(lengths) for _ in range(n)]]
    mask = Causal() & Segments()
    assert torch.equal(mask.allowed(p, p), brute(mask, p, p))
    assert mask.plain(p, p) is None


@settings(max_examples=150)
@given(
    without_data,
    st.integers(1, 5),
    st.sampled_from([None, 0, 1, 3]),
    st.lists(
        st.one_of(st.integers(1, 4), st.tuples(st.integers(0, 4), st.integers(0, 4))), max_size=6
    ),
    st.sampled_from(["left", "right"]),
)
def test_plain_is_never_wrong_behind_a_cache(mask, reach, slack, chunks, side):
    """Keys of full and ring caches, after even and ragged chunks: their facts hold as well."""
    size = 24 if slack is None else reach + slack
    slots = Slots(2, size, None if slack is None else reach, None)
    ends = (0, 0)
    for chunk in chunks:
        lengths = (chunk, chunk) if isinstance(chunk, int) else chunk
        if max(lengths) == 0:
            continue
        q = Positions.ragged(lengths, side, ends)
        ends = tuple(end + n for end, n in zip(ends, lengths, strict=True))
        k = slots.begin(q)
        facts_hold(k)
        if isinstance(slots.slot, tuple):  # no slot is written twice in one go
            row, _, slot = slots.slot
            assert len(set(zip(row.tolist(), slot.tolist(), strict=True))) == len(row)
        expected = brute(mask, q, k)
        match mask.plain(q, k):
            case "all":
                assert expected.all()
            case "causal":
                assert torch.equal(expected, torch.ones_like(expected).tril())
        assert torch.equal(mask.allowed(q, k).expand_as(expected), expected)
        # What a window of `reach` wants is there: every earlier position that it can see.
        for row in range(2):
            held = set(at(k.pos, row).tolist())
            for p in at(q.pos, row).tolist():
                if p >= 0:
                    first = 0 if slack is None else max(0, p - reach + 1)
                    assert held >= set(range(first, p + 1))


# --- fast paths ---


def test_plain_batches_need_no_tensor():
    span = Positions.span
    assert Causal().plain(span(0, 7), span(0, 7)) == "causal"
    assert Causal().plain(span(5, 7), span(5, 7)) == "causal"
    assert All().plain(span(0, 3), span(0, 9)) == "all"
    assert Causal().plain(span(8, 1), span(0, 9)) == "all"  # one token after a solid cache
    assert (Causal() & Window(9)).plain(span(0, 9), span(0, 9)) == "causal"  # it does not bind
    assert (Causal() & Window(9)).plain(span(8, 1), span(0, 9)) == "all"
    assert (Causal() | All()).plain(span(0, 4), span(0, 4)) == "all"
    # ... and these do need one.
    assert Causal().plain(span(6, 3), span(0, 9)) is None  # a chunk: the triangle is elsewhere
    assert (Causal() & Window(8)).plain(span(0, 9), span(0, 9)) is None
    assert (Causal() & Window(8)).plain(span(8, 1), span(0, 9)) is None
    assert Causal().plain(Positions.ragged([2, 3]), Positions.ragged([2, 3])) is None
    assert All().plain(span(0, 3), Positions.ragged([2, 3])) is None


@pytest.fixture
def kernel_calls(monkeypatch):
    """What PyTorch's fused attention is told in each call: "all", "causal" or "mask"."""
    told = []
    fused = F.scaled_dot_product_attention

    def watched(*args, attn_mask=None, is_causal=False, **more):
        assert not (is_causal and attn_mask is not None)
        told.append("causal" if is_causal else "all" if attn_mask is None else "mask")
        return fused(*args, attn_mask=attn_mask, is_causal=is_causal, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return told


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "llama-window"])
def test_decoders_reach_the_fast_paths(name, kernel_calls):
    net = tiny(name)
    ids = tokens(2, 4)
    cache = net.new_cache(2, 32)

    def told_by(*args, **more):
        kernel_calls.clear()
        net.decode(*args, **more)
        return set(kernel_calls)

    assert told_by(ids) == {"causal"}
    assert told_by(ids, cache=cache) == {"causal"}  # prefill, a window of 4 does not bind yet
    # A ring that has wrapped is out of order, but all of its 4 slots with the last 4 are seen.
    assert told_by(ids[:, :1], cache=cache) == {"all"}
    assert told_by(ids[:, :3], cache=cache) == {"mask"}  # a chunk after a prefix
    assert told_by(ids, Positions.ragged([2, 4])) == {"mask"}


def test_encoders_and_cross_attention_reach_the_fast_paths(kernel_calls):
    net = tiny("transformer")
    memory = net.encode(tokens(2, 5))
    assert set(kernel_calls) == {"all"}
    kernel_calls.clear()
    net.decode(tokens(2, 4), memory)
    assert kernel_calls == ["causal", "all"] * 2
    kernel_calls.clear()
    net.encode(tokens(2, 5), Positions.ragged([3, 5]))
    assert set(kernel_calls) == {"mask"}


def test_the_mask_is_made_once_a_call_for_each_kind_of_layer(monkeypatch):
    made = []
    rule = Window.rule

    def watched(self, q, k):
        made.append(self.width)
        return rule(self, q, k)

    monkeypatch.setattr(Window, "rule", watched)
    local, broad = attention(Causal() & Window(2)), attention(Causal() & Window(5))
    stacked(local, broad, n_layers=6)(tokens(2, 9))
    assert sorted(made) == [2, 5]


# --- data ---


@settings(max_examples=50)
@given(formulas)
def test_masks_go_through_json_and_are_keys_of_dicts(mask):
    spec = AttentionConfig(Geometry(16, 4), mask=mask)
    again = AttentionConfig.from_dict(json.loads(json.dumps(spec.to_dict()))).mask
    assert again == mask
    assert hash(again) == hash(mask)
    assert {mask: "found"}[again] == "found"
    assert json.loads(json.dumps(mask.to_dict()))["kind"] == mask.kind


def test_masks_of_different_meaning_differ():
    different = [
        All(),
        Causal(),
        Window(3),
        Window(4),
        Segments(),
        Prefix(),
        Adjacency(),
        Causal() & Window(3),
        Causal() | Window(3),
        Window(3) & Causal(),
    ]
    assert len(set(different)) == len(different)
    assert json.dumps(Window(3).to_dict()) == '{"kind": "window", "width": 3}'


def test_missing_data_is_named():
    span = Positions.span(0, 4)
    for mask, word in [(Segments(), "segment"), (Prefix(), "prefix"), (Adjacency(), "pairs")]:
        with pytest.raises(ClearheadError, match=word):
            mask.allowed(span, span)
    small = span.with_data(pairs=torch.ones(1, 3, 3, dtype=torch.bool))
    with pytest.raises(ClearheadError, match="outside the graph of 3 nodes"):
        Adjacency().allowed(small, small)
    with pytest.raises(ClearheadError, match="1 or more"):
        Window(0)
