"""Rows of a cache that change places while keys and values stay where they are."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import clearhead as ch
from clearhead.attention.positions import Positions
from clearhead.fast.form import make_fast
from programs import PAIRS, close, ids, plain

pytest.importorskip("llvmlite", reason="the extra fast (llvmlite) is not installed")


@pytest.fixture(autouse=True)
def at_rest():
    with torch.inference_mode():
        yield


def _fewer(cache):
    cache.reorder(torch.tensor([4, 1, 1, 5, 0]))
    cache.reorder(torch.tensor([3, 2]))
    assert cache.lies is None  # little is left of it
    assert cache.states[0].k.shape[0] == 2


BETWEEN = {
    "nothing": lambda cache: None,
    "a snapshot": lambda cache: cache.restore(cache.snapshot()),
    "going back": lambda cache: cache.trim(5),
    "fewer rows": _fewer,
    "rows that differ": lambda cache: cache.trim([5, 7, 7, 6, 7, 7]),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_keys_stay_where_they_are_until_somebody_cannot_follow(between):
    net = make_fast(plain("llama"), "fp32")
    twin = copy.deepcopy(net)
    twin.stack.step = None
    cache, other = net.new_cache(6, 30), twin.new_cache(6, 30)
    place = cache.states[0].k.data_ptr()
    orders = torch.randint(6, (12, 6), generator=torch.Generator().manual_seed(1))
    for i, order in enumerate(orders):
        given = ids(cache.rows, 1, seed=i)
        waiting = cache.lies
        close("fp32", net.decode(given, cache=cache), twin.decode(given, cache=other))
        assert cache.lies is waiting  # compiled code follows it,
        assert other.lies is None  # the blocks do not
        for each in (cache, other):
            each.reorder(order[: each.rows] % each.rows)
        if i == 6:
            assert cache.lies is not None
            assert cache.states[0].k.data_ptr() == place
            BETWEEN[between](cache)
            BETWEEN[between](other)


def test_a_snapshot_without_a_table_brings_none_back():
    net = make_fast(plain("llama"), "fp32")
    cache = net.new_cache(2, 30)
    for i in range(3):
        net.decode(ids(2, 1, seed=i), cache=cache)
    saved = cache.snapshot()
    expected = net.decode(ids(2, 1, seed=9), cache=cache)
    cache.reorder(torch.tensor([1, 1]))
    cache.restore(saved)
    close("fp32", net.decode(ids(2, 1, seed=9), cache=cache), expected)


def test_whoever_begins_finds_keys_in_their_rows():
    cache = plain("llama").new_cache(2, 8)
    state, one = cache.states[0], torch.ones(2, 2, 1, 16)
    cache.begin(cache.next(1))
    state.update(one * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1), one)
    cache.reorder(torch.tensor([1, 1]))
    cache.begin(cache.next(1))
    keys, _ = state.update(one, one)
    assert keys[:, 0, :, 0].tolist() == [[2.0, 1.0], [2.0, 1.0]]


def test_threads_have_sources_of_their_own():
    net = make_fast(plain("pre", PAIRS), "fp32")

    def decoded(seed):
        torch.manual_seed(seed)
        lengths = [2 + (seed * 7) % 9, 5]
        with torch.inference_mode():
            source = ids(2, max(lengths), seed=seed)
            memory = net.encode(source, Positions.ragged(lengths))
            cache = net.new_cache(memory, 12)
            return [net.decode(ids(2, 1, seed=i), cache=cache) for i in range(6)]

    expected = [decoded(seed) for seed in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(decoded, list(range(8)) * 2))
    finally:
        sys.setswitchinterval(before)
    for i, steps in enumerate(found):
        for one, other in zip(steps, expected[i % 8], strict=True):
            close("fp32", one, other)


def test_a_listener_finds_keys_where_they_belong():
    net = make_fast(plain("llama"), "fp32")
    twin = copy.deepcopy(net)
    twin.stack.step = None
    cache, other = net.new_cache(4, 30), twin.new_cache(4, 30)
    for i in range(6):
        given = ids(4, 1, seed=i)
        with ch.capture(net, "blocks.0.leave") if i == 4 else nullcontext():
            close("fp32", net.decode(given, cache=cache), twin.decode(given, cache=other))
        for each in (cache, other):
            each.reorder(torch.tensor([2, 0, 0, 3]))


def test_a_row_fans_out():
    net = make_fast(plain("pre", PAIRS), "fp32")
    memory = net.encode(ids(2, 7), Positions.ragged([7, 4]))
    cache, other = net.new_cache(memory, 20), net.new_cache(memory, 20, 3)
    start = ids(2, 1)
    first = net.decode(start, cache=cache)
    cache.fan_out(3)
    begun = net.decode(start.repeat_interleave(3, 0), cache=other)
    close("fp32", first.repeat_interleave(3, 0), begun)
    for i in range(3):
        step = ids(6, 1, seed=i)
        close("fp32", net.decode(step, cache=cache), net.decode(step, cache=other))
    with pytest.raises(ch.ClearheadError, match="1 row or more"):
        cache.fan_out(0)
