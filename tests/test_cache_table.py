"""Rows of a cache that share their past, while keys and values stay where they are."""

from __future__ import annotations

import copy
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import clearhead as ch
from clearhead.attention.positions import Positions
from clearhead.attention.shared import Shared
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
    assert cache.states[0].k.shape[0] <= 3  # homes in which nobody is are given back


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
    orders = torch.randint(6, (12, 6), generator=torch.Generator().manual_seed(1))
    for i, order in enumerate(orders):
        given = ids(cache.rows, 1, seed=i)
        waiting = cache.shared
        close("fp32", net.decode(given, cache=cache), twin.decode(given, cache=other))
        assert cache.shared is waiting  # compiled code follows it,
        assert other.shared is None  # the blocks do not
        for each in (cache, other):
            each.reorder(order[: each.rows] % each.rows)
        if i == 6:
            assert cache.shared is not None
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


def test_slots_that_are_reserved_are_used_before_homes_grow():
    net = make_fast(plain("pre", PAIRS), "fp32")
    memory = net.encode(ids(2, 7), Positions.ragged([7, 4]))
    cache, other = net.new_cache(memory, 12), net.new_cache(memory, 12, 3)
    cache.reserve(24)
    start = ids(2, 1)
    net.decode(start, cache=cache)
    cache.fan_out(3)
    net.decode(start.repeat_interleave(3, 0), cache=other)
    place = cache.states[0].k.data_ptr()
    for i in range(11):  # nothing is dropped: 3 rows need 3 x 11 slots and one that they share
        step = ids(6, 1, seed=i)
        close("fp32", net.decode(step, cache=cache), net.decode(step, cache=other))
    assert cache.states[0].k.data_ptr() == place
    cache.gather()
    other.gather()
    for mine, its in zip(cache.states, other.states, strict=True):
        assert mine.k.shape == its.k.shape
        close("fp32", mine.k, its.k)


def test_slots_can_be_reserved_while_rows_share_their_past():
    net = make_fast(plain("llama"), "fp32")
    caches = net.new_cache(2, 20), net.new_cache(2, 20)
    for i in range(10):
        given = ids(caches[0].rows, 1, seed=i)
        close("fp32", *(net.decode(given, cache=own) for own in caches))
        if i == 1:
            for own in caches:
                own.fan_out(3)
        if i == 5:
            caches[0].reserve(1)
        if i == 7:
            for own in caches:
                own.trim([5, 6, 6, 5, 6, 6])


def test_homes_that_could_not_grow_grow_later(monkeypatch):
    net = make_fast(plain("llama"), "fp32")
    caches = net.new_cache(1, 12), net.new_cache(1, 12)
    for own in caches:
        net.decode(ids(1, 1), cache=own)
        own.fan_out(4)
    grow, calls = type(caches[0].states[1]).grow, []

    def full(self, *given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        grow(self, *given)

    for i in range(9):
        given = ids(4, 1, seed=i)
        expected = net.decode(given, cache=caches[1])
        if not calls:
            with monkeypatch.context() as patch:
                patch.setattr(type(caches[0].states[1]), "grow", full)
                try:
                    close("fp32", net.decode(given, cache=caches[0]), expected)
                    continue
                except MemoryError:
                    pass
        close("fp32", net.decode(given, cache=caches[0]), expected)
    assert len(calls) == 2


def test_slots_are_not_reserved_where_nothing_is_shared():
    config = {"n_layers": 1, "d_model": 32, "n_heads": 2, "vocab_size": 50, "max_len": 64}
    net = ch.build("llama", variant={"kind": "variant", "window": 4}, **config).net
    cache = net.new_cache(2, 30)
    before = cache.nbytes
    cache.reserve(20)
    assert cache.nbytes == before  # a ring


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_beams_drop_is_written_over(name):
    net = make_fast(plain(name), "fp32")
    twin = copy.deepcopy(net)
    twin.stack.step = None
    caches = net.new_cache(2, 28), twin.new_cache(2, 28)
    for each, own in zip((net, twin), caches, strict=True):
        each.decode(ids(2, 5), cache=own)
        own.fan_out(4)
    cache, other = caches
    place, dice = cache.states[0].k.data_ptr(), torch.Generator().manual_seed(0)
    for i in range(20):
        given = ids(8, 1, seed=i)
        close("fp32", net.decode(given, cache=cache), twin.decode(given, cache=other))
        # Of four beams one goes on: a home needs 24 slots and 4 more, and what is dropped is used.
        order = torch.randint(4, (2, 1), generator=dice) + torch.tensor([[0], [4]])
        for own in caches:
            own.reorder(order.expand(2, 4).flatten())
    assert cache.states[0].k.data_ptr() == place
    other.gather()
    assert cache.nbytes * 4 == other.nbytes
    cache.gather()
    for mine, its in zip(cache.states, other.states, strict=True):
        close("fp32", mine.k[:, :, :24], its.k[:, :, :24])


def test_homes_grow_where_nothing_is_dropped():
    net = make_fast(plain("llama"), "fp32")
    twin = copy.deepcopy(net)
    twin.stack.step = None
    caches = net.new_cache(2, 14), twin.new_cache(2, 14)
    for each, own in zip((net, twin), caches, strict=True):
        each.decode(ids(2, 4), at=Positions.ragged([4, 2]), cache=own)
        own.fan_out(3)
    cache, other = caches
    for i in range(10):  # the rows of the second text stand two positions behind the others
        given = ids(6, 1, seed=i)
        close("fp32", net.decode(given, cache=cache), twin.decode(given, cache=other))
        if i == 6:  # one row of a text ends
            for own in caches:
                own.reorder(torch.tensor([0, 2, 3, 4, 5, 5]))
    assert cache.shared is not None
    assert 3 * 10 + 4 <= cache.shared.size <= (3 * 10 + 4) * 5 / 4 + 3
    assert cache.states[0].k.shape[:1] == (2,)
    cache.gather()
    assert cache.nbytes == other.nbytes


def test_tables_tell_where_everything_is():
    """Beside lists of what every row has read: whatever rows become, slots are not mixed up."""
    dice = random.Random(0)
    for _ in range(40):
        rows, used = dice.randint(1, 5), dice.randint(0, 6)
        shared = Shared(torch.arange(rows), rows, 8, used)
        memory = {(home, slot): (home, slot) for home in range(rows) for slot in range(8)}
        texts = [[(row, slot) for slot in range(used)] for row in range(rows)]
        for step in range(12):
            order = [dice.randrange(len(texts)) for _ in range(dice.randint(1, 6))]
            shared.select(torch.tensor(order))
            texts = [list(texts[i]) for i in order]
            if dice.random() < 0.3:
                kept = shared.leave().tolist()
                moved = {old: new for new, old in enumerate(kept)}
                memory = {(moved[h], s): x for (h, s), x in memory.items() if h in moved}
            longest = max(map(len, texts))
            if longest == 8:
                break
            filled = [[i < len(text) for i in range(longest)] for text in texts]
            shared.make_room(torch.tensor(filled, dtype=torch.bool).view(len(texts), longest))
            ends = [len(text) for text in texts]
            shared.place(torch.tensor(ends))
            for row, text in enumerate(texts):
                if dice.random() < 0.2 and row > 0:
                    continue  # this row's token is not counted as filled: its slot is free again
                home = int(shared.homes[row])
                memory[home, int(shared.table[row, ends[row]])] = (row, step)
                text.append((row, step))
            found = [
                [memory[int(shared.homes[row]), int(slot)] for slot in shared.table[row, : len(t)]]
                for row, t in enumerate(texts)
            ]
            assert found == texts
