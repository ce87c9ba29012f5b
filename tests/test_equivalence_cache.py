"""Cached decoding is decoding.

Every step, every chunk, every way of going back gives what the uncached network gives for the same
tokens.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.attention.cache import KV
from clearhead.attention.mask import Causal, Window
from clearhead.attention.positions import Positions
from clearhead.errors import ClearheadError
from decoding import CASES, ROWS, TIME, WINDOW, WINDOWED, Decoding, chunked
from tiny import SEQ2SEQ, attention, close, padded, stacked, tokens

SOME = [
    ("family", "gpt2"),
    ("family", "llama-window"),
    ("family", "gpt_neox"),
    ("family", "t5"),
    ("family", "transformer"),
    ("position", "shaw"),
    ("position", "transformer_xl"),
    ("window", "transformer_xl"),
    ("stack", "local and global"),
]
named = {"ids": lambda case: "-".join(case)}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("chunk", [1, 3, TIME])
@pytest.mark.parametrize("case", CASES, **named)
def test_cached_is_uncached_at_every_step(case, chunk):
    d, ids = Decoding(case), tokens(ROWS, TIME)
    expected = d.full(ids)
    close(d.steps(ids, chunked(chunk), d.cache(max_len=TIME)), expected, 2e-5)
    assert expected.std() > 0.05  # there is something to compare


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES, **named)
def test_ragged_prompts_are_each_row_alone(case, side):
    d = Decoding(case)
    prompts = [[3, 1], [4, 1, 5, 9, 2], [6, 5, 3]]
    more = tokens(ROWS, 5, seed=3)
    ids, at = padded(prompts, side)
    cache = d.cache()
    first = d.step(ids, cache, at)
    assert cache.ends == (2, 5, 3)
    later = d.steps(more, [1, 1, 2, 1], cache)
    assert cache.ends == (7, 10, 8)
    for row, prompt in enumerate(prompts):
        expected = d.alone(row, prompt + more[row].tolist())
        close(first[row][at.pos[row] >= 0], expected[: len(prompt)], 2e-5)
        close(later[row], expected[len(prompt) :], 2e-5)


def test_rows_that_get_nothing_in_a_call_stay_where_they_are():
    d = Decoding(("family", "llama"))
    cache = d.cache()
    a, b = tokens(ROWS, 3), tokens(ROWS, 2, seed=5)
    d.step(a, cache)
    d.step(b, cache, Positions.ragged([2, 0, 1], start=cache.ends))
    assert cache.ends == (5, 3, 4)
    last = tokens(ROWS, 1, seed=6)
    out = d.step(last, cache)
    for row, n in enumerate([2, 0, 1]):
        text = a[row].tolist() + b[row, :n].tolist() + last[row].tolist()
        close(out[row, 0], d.alone(row, text)[-1], 2e-5)


# --- rings ---


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize(
    "chunks",
    [[1] * 14, [2] * 7, [3, 3, 3, 3, 2], [5, 1, 1, 4, 3], [1, 7, 6], [14]],
    ids=lambda chunks: "-".join(map(str, chunks)),
)
@pytest.mark.parametrize("position", WINDOWED)
def test_rings_are_the_whole_past(position, chunks, slack):
    d, ids = Decoding(("window", position)), tokens(ROWS, 14)
    cache = d.cache(slack=slack)
    assert [slots.size for slots in cache.kinds] == [WINDOW + slack]
    close(d.steps(ids, chunks, cache), d.full(ids), 2e-5)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(*[st.integers(0, 5)] * 2), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
    st.integers(0, 3),
    st.sampled_from([("window", "transformer_xl"), ("stack", "local and global")]),
)
def test_any_ragged_chunks_through_rings(chunks, side, slack, case):
    with torch.no_grad():
        d = Decoding(case, rows=2)
        cache, texts = d.cache(32, slack=slack), [[], []]
        for i, lengths in enumerate(chunks):
            if max(lengths) == 0:
                continue
            new = [tokens(1, 6, seed=10 * i + row)[0, :n].tolist() for row, n in enumerate(lengths)]
            ids, _ = padded(new, side)
            at = Positions.ragged(lengths, side, cache.ends)
            out = d.step(ids, cache, at)
            for row in range(2):
                texts[row] += new[row]
                if new[row]:
                    expected = d.alone(row, texts[row])[-len(new[row]) :]
                    close(out[row][at.pos.expand(2, -1)[row] >= 0], expected, 5e-5)


# --- going back ---


@pytest.mark.parametrize("case", SOME, **named)
def test_trim_is_never_having_gone_there(case):
    d, ids = Decoding(case), tokens(ROWS, TIME)
    other = tokens(ROWS, 4, seed=2)
    cache = d.cache(slack=4)
    d.steps(ids, chunked(3), cache)
    cache.trim(6)
    assert (cache.length, cache.ends) == (6, (6,) * ROWS)
    again = d.steps(other, [1, 3], cache)
    close(again, d.full(torch.cat((ids[:, :6], other), 1))[:, 6:], 2e-5)


@pytest.mark.parametrize("case", SOME, **named)
def test_trim_each_row_by_itself(case):
    d, ids = Decoding(case), tokens(ROWS, TIME)
    other = tokens(ROWS, 3, seed=2)
    cache = d.cache(slack=4)
    d.steps(ids, chunked(3), cache)
    ends = [6, 9, 5]
    cache.trim(ends)
    assert cache.ends == tuple(ends)
    again = d.steps(other, [1, 2], cache)
    for row, end in enumerate(ends):
        text = ids[row, :end].tolist() + other[row].tolist()
        close(again[row], d.alone(row, text)[end:], 2e-5)


def test_what_a_row_forgot_stays_forgotten_behind_a_gap():
    """Rows go back by different lengths, and all go on from the same position."""
    d, ids = Decoding(("family", "llama")), tokens(ROWS, TIME)
    cache, ends, last = d.cache(), [6, 9, 5], tokens(ROWS, 1, seed=2)
    d.step(ids, cache)
    cache.trim(ends)
    out = d.step(last, cache, Positions.span(9, 1))
    for row, end in enumerate(ends):
        text = torch.tensor([[*ids[row, :end].tolist(), last[row].item()]])
        where = Positions.of(torch.tensor([[*range(end), 9]]))
        close(out[row, 0], d.full(text, where)[0, -1], 2e-5)


@pytest.mark.parametrize("case", SOME, **named)
def test_trim_to_the_start_and_beyond_the_end(case):
    d, ids = Decoding(case), tokens(ROWS, 2)
    cache = d.cache(slack=4)
    d.step(ids, cache)
    cache.trim(50)  # nothing is there to forget
    assert cache.length == 2
    cache.trim(0)
    assert cache.length == 0
    other = tokens(ROWS, TIME, seed=4)
    close(d.steps(other, chunked(3), cache), d.full(other), 2e-5)


@pytest.mark.parametrize("slack", [0, 2, 5])
def test_a_ring_goes_back_as_far_as_its_slack(slack):
    """And one further, for the next query is written where the oldest stood that it cannot see."""
    d, ids = Decoding(("window", "rope")), tokens(ROWS, 14)
    for back in range(slack + 2):
        cache = d.cache(slack=slack)
        d.steps(ids, chunked(3, 14), cache)
        with pytest.raises(ClearheadError, match=f"make the cache with slack={slack + 2} or more"):
            cache.trim([14, 12 - slack, 14])
        assert cache.ends == (14,) * ROWS  # nothing was forgotten
        cache.trim(14 - back)
        close(d.step(ids[:, -1:], cache)[:, 0], again(d, ids, back), 2e-5)


def again(d, ids, back):
    """The answer to the last token after going back so far."""
    text = torch.cat((ids[:, : ids.shape[1] - back], ids[:, -1:]), dim=1)
    return d.full(text)[:, -1]


def test_a_ring_does_not_go_back_twice_as_far_in_two_steps():
    """What the ring overwrote before the first trim is still missing at the second."""
    d, ids = Decoding(("window", "rope")), tokens(ROWS, 12)
    cache = d.cache(slack=2)
    d.steps(ids, chunked(3, 12), cache)
    cache.trim(11)
    cache.trim(10)
    with pytest.raises(ClearheadError, match="slack=4"):
        cache.trim(8)
    close(d.step(ids[:, -1:], cache)[:, 0], again(d, ids, 2), 2e-5)
    with pytest.raises(ClearheadError, match="slack=4"):
        cache.trim(8)
    # Going on gives the ring new ground to go back over.
    d.steps(ids[:, :4], [1, 3], cache)
    cache.trim(13)
    text = torch.cat((ids[:, :10], ids[:, -1:], ids[:, :2], ids[:, :1]), 1)
    close(d.step(ids[:, :1], cache)[:, 0], d.full(text)[:, -1], 2e-5)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_ring_that_went_back_is_whole_again_where_it_was(chunk):
    """Then its facts are known once more, and a mask takes no look at positions."""
    d, ids = Decoding(("window", "rope")), tokens(ROWS, 20)
    cache = d.cache(slack=4)
    (slots,) = cache.kinds
    d.steps(ids[:, :12], chunked(2, 12), cache)
    assert slots.solid
    for end in (11, 9):  # twice: the gap is as wide as both
        cache.trim(end)
        assert not slots.solid
    expected = d.full(ids)[:, 9:]
    outs = []
    for start in range(9, 20, chunk):
        outs.append(d.step(ids[:, start : start + chunk], cache))
        assert slots.solid == (cache.length >= 12)
        seen = slots._seen()
        if slots.solid:
            assert sorted(slots.where[0].tolist()) == list(range(seen.lo, seen.hi + 1))
        assert seen.holes == bool((seen.pos < 0).any())
    close(torch.cat(outs, 1), expected, 2e-5)
    cache.trim([19, 18, 19])  # rows of different lengths stay uneven
    d.step(ids[:, :2], cache)
    assert not slots.solid


def test_two_trims_remember_rows_through_a_reorder():
    d, ids = Decoding(("window", "rope")), tokens(ROWS, 12)
    cache = d.cache(slack=2)
    d.step(ids, cache, Positions.ragged([12, 4, 12]))
    cache.trim([10, 4, 12])
    cache.reorder(torch.tensor([1, 0, 2]))
    assert cache.ends == (4, 10, 12)
    with pytest.raises(ClearheadError, match="slack=4"):
        cache.trim([4, 8, 12])
    cache.trim([3, 10, 10])
    out = d.step(ids[:, :1], cache)
    for row, (old, end) in enumerate([(1, 3), (0, 10), (2, 10)]):
        text = ids[old, :end].tolist() + ids[row, :1].tolist()
        close(out[row, 0], d.alone(old, text)[-1], 2e-5)


def test_wrong_trims_are_refused():
    d = Decoding(("family", "gpt2"))
    cache = d.cache()
    d.step(tokens(ROWS, 4), cache)
    with pytest.raises(ClearheadError, match="2 lengths for 3 rows"):
        cache.trim([1, 2])
    with pytest.raises(ClearheadError, match="before the start: -1"):
        cache.trim(-1)
    assert cache.length == 4


# --- rows ---


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("case", SOME, **named)
def test_reorder_moves_rows(case, ragged):
    d, ids = Decoding(case), tokens(ROWS, 7)
    cache, lengths = d.cache(), [5, 7, 4] if ragged else [7] * ROWS
    d.step(ids, cache, Positions.ragged(lengths))
    order = [2, 0, 0, 1]
    cache.reorder(torch.tensor(order))
    assert cache.rows == 4
    assert cache.ends == tuple(lengths[row] for row in order)
    more = tokens(4, 2, seed=6)
    out = d.steps(more, [1, 1], cache)
    for new, old in enumerate(order):
        text = ids[old, : lengths[old]].tolist() + more[new].tolist()
        close(out[new], d.alone(old, text)[-2:], 2e-5)


@pytest.mark.parametrize("case", SOME, **named)
def test_what_a_reorder_leaves_in_unused_slots_is_not_seen(case):
    d, ids = Decoding(case), tokens(ROWS, 7)
    cache = d.cache()
    d.step(ids, cache)
    cache.reorder(torch.tensor([2, 0, 1]))
    for state in cache.states:
        if isinstance(state, KV):
            for buffer in (state.k, state.v):
                buffer[:, :, state.slots.used :] = torch.nan
    more, lengths = tokens(ROWS, 3, seed=6), [3, 1, 2]
    out = d.step(more, cache, Positions.ragged(lengths, start=7))
    for new, old in enumerate([2, 0, 1]):
        text = ids[old].tolist() + more[new, : lengths[new]].tolist()
        close(out[new, : lengths[new]], d.alone(old, text)[-lengths[new] :], 2e-5)


@pytest.mark.parametrize("case", SOME, **named)
def test_keep_drops_the_rest(case):
    d, ids = Decoding(case), tokens(ROWS, 7)
    cache = d.cache()
    d.step(ids, cache)
    before = cache.nbytes
    cache.keep(torch.tensor([2, 0]))
    assert cache.nbytes * 3 == before * 2
    more = tokens(2, 2, seed=6)
    out = d.steps(more, [1, 1], cache)
    for new, old in enumerate([2, 0]):
        close(out[new], d.alone(old, ids[old].tolist() + more[new].tolist())[-2:], 2e-5)


@pytest.mark.parametrize("case", SOME, **named)
def test_snapshots_are_independent_and_can_be_restored_twice(case):
    d, ids = Decoding(case), tokens(ROWS, 7)
    cache = d.cache()
    d.step(ids, cache)
    saved = cache.snapshot()
    assert saved.nbytes == cache.nbytes
    other = tokens(ROWS, 4, seed=9)
    here = d.steps(other, [1, 3], cache)
    for _ in range(2):
        cache.restore(saved)
        assert cache.ends == (7,) * ROWS
        assert torch.equal(d.steps(other, [1, 3], cache), here)
    # The snapshot is a cache of its own.
    assert torch.equal(d.steps(other, [1, 3], saved), here)
    close(here, d.full(torch.cat((ids, other), 1))[:, 7:], 2e-5)


@pytest.mark.parametrize("name", ["gpt2", "transformer"])
def test_snapshot_with_gradients_on(name):
    d, ids = Decoding(("family", name)), tokens(ROWS, 4)
    with torch.enable_grad():
        if d.memory is not None:
            d.memory = d.net.encode(tokens(ROWS, 5, seed=8))
        cache = d.cache()
        d.step(ids, cache)
        saved = cache.snapshot()
        here = d.step(ids[:, :1], cache)
        cache.restore(saved)
        assert torch.equal(d.step(ids[:, :1], cache), here)


# --- sources and beams ---


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_beams_share_the_keys_of_their_source(name):
    d = Decoding(("family", name), rows=2)
    net, memory = d.net, d.memory
    ids = tokens(6, 5)
    shared = net.new_cache(memory, 12, beams=3)
    repeated = memory.select(torch.tensor([0, 0, 0, 1, 1, 1]))
    apart = net.new_cache(repeated, 12)
    for part in ids.split([2, 1, 1, 1], dim=1):
        close(net.decode(part, cache=shared), net.decode(part, cache=apart))
    close(net.decode(ids, memory), net.decode(ids, repeated))

    def cross(cache):
        return sum(state.nbytes for state in cache.cross)

    numbers = {"rnn_seq2seq": 16, "rnn_seq2seq-lstm": 0}.get(name)  # a projected key, or nothing
    if numbers is None:
        numbers = 2 * 2 * 4 * net.decoder.stack.blocks[0].cross_attn.head_dim
    assert cross(shared) == 2 * memory.at.length * numbers * 4
    assert cross(apart) == 3 * cross(shared)
    assert shared.nbytes - cross(shared) == apart.nbytes - cross(apart)

    # Beams change places within their source, and a source leaves with all of its beams.
    order = torch.tensor([2, 2, 0, 4, 5, 3])
    shared.reorder(order)
    apart.reorder(order)
    shared.keep(torch.tensor([1]))
    apart.keep(torch.tensor([3, 4, 5]))
    assert (shared.rows, shared.memory.rows) == (3, 1)
    assert cross(apart) == 3 * cross(shared)
    last = tokens(3, 1, seed=5)
    answer = net.decode(last, cache=shared)
    close(answer, net.decode(last, cache=apart))
    texts = torch.cat((ids[order][3:], last), dim=1)
    close(net.decode(texts, memory.select(torch.tensor([1])))[:, -1:], answer)


@pytest.mark.parametrize("name", ["t5", "transformer"])
def test_the_source_is_projected_once(name, monkeypatch):
    d = Decoding(("family", name))
    calls = []
    for block in d.net.decoder.stack.blocks:
        block.cross_attn.k_proj.register_forward_hook(lambda *_: calls.append("k"))
    d.steps(tokens(ROWS, 4), [1, 1, 1, 1], d.cache())
    assert calls == ["k", "k"]


def test_memory_select():
    d = Decoding(("family", "t5"))
    memory, order = d.memory, [2, 0, 2]
    picked = memory.select(torch.tensor(order))
    assert picked.rows == 3
    assert torch.equal(picked.x, memory.x[order])
    assert torch.equal(picked.at.pos, memory.at.pos[order])
    assert picked.at.ends == tuple(memory.at.ends[row] for row in order)
    # Positions that are the same for all rows stay one row.
    even = d.net.encode(tokens(ROWS, 4))
    assert even.select(torch.tensor([1])).at.pos.shape == (1, 4)
    ids = tokens(3, 4)
    close(d.net.decode(ids, picked)[1:2], d.net.decode(ids[1:2], memory.select(torch.tensor([0]))))


def test_another_memory_is_refused():
    d = Decoding(("family", "t5"))
    cache = d.cache()
    with pytest.raises(ClearheadError, match="another memory"):
        d.net.decode(tokens(ROWS, 1), d.memory.select(torch.tensor([0, 1, 2])), cache=cache)
    with pytest.raises(ClearheadError, match="needs what encode returned"):
        d.net.decode(tokens(ROWS, 1))
    # Without a source cross-attention would be self-attention that sees the future.
    with pytest.raises(ClearheadError, match="looks at a source in every block"):
        d.net.decoder(tokens(ROWS, 3))
    d.net.decode(tokens(ROWS, 1), d.memory, cache=cache)
    assert cache.length == 1


# --- sizes ---


@pytest.mark.parametrize(
    ("name", "kv", "head_dim", "size"),
    [("gpt2", 2, 4, 24), ("llama-window", 1, 4, 4 + 2), ("llama-qwen", 4, 6, 24)],
)
def test_nbytes_is_exact(name, kv, head_dim, size):
    d = Decoding(("family", name))
    layers, key_and_value, number = 2, 2, 4
    expected = layers * key_and_value * ROWS * kv * size * head_dim * number
    assert d.cache(24, slack=2).nbytes == expected
    assert d.cache(24, slack=2, dtype=torch.float64).nbytes == 2 * expected


def test_a_ring_is_no_larger_than_the_text():
    d = Decoding(("window", "rope"))
    assert [slots.size for slots in d.cache(WINDOW).kinds] == [WINDOW]
    assert [slots.size for slots in d.cache(WINDOW + 2, slack=9).kinds] == [WINDOW + 2]


@pytest.mark.parametrize("case", SOME, **named)
def test_a_full_cache_says_so_and_stays_as_it_was(case):
    d, ids = Decoding(case), tokens(ROWS, 8)
    cache = d.cache(max_len=8)
    d.step(ids[:, :6], cache)
    if all(slots.reach is not None for slots in cache.kinds):
        return  # rings have no end
    with pytest.raises(ClearheadError, match=r"holds 8 positions, and position 8 .* max_len"):
        d.step(tokens(ROWS, 3), cache)
    assert cache.length == 6
    close(d.step(ids[:, 6:], cache), d.full(ids)[:, 6:], 2e-5)


def test_a_refused_trim_changes_nothing():
    d, ids = Decoding(("stack", "local and global")), tokens(ROWS, 12)
    cache = d.cache(slack=1)
    d.step(ids[:, :10], cache)
    with pytest.raises(ClearheadError, match="cannot go back"):
        cache.trim(4)
    close(d.step(ids[:, 10:], cache), d.full(ids)[:, 10:], 2e-5)
    # ... in whatever order the kinds of layers stand.
    turned = stacked(attention(), attention(Causal() & Window(WINDOW)), n_layers=4)
    cache = turned.new_cache(ROWS, 24, slack=1)
    turned.decode(ids[:, :10], cache=cache)
    with pytest.raises(ClearheadError, match="cannot go back"):
        cache.trim(4)
    close(turned.decode(ids[:, 10:], cache=cache), turned.decode(ids)[:, 10:], 2e-5)


def test_a_cache_of_other_rows_is_refused():
    d, ids = Decoding(("family", "gpt2")), tokens(ROWS, 4)
    cache = d.cache()
    d.step(ids[:, :3], cache)
    for rows in (1, 2, 4):
        with pytest.raises(ClearheadError, match=f"made for 3 rows, and the call has {rows}"):
            d.step(tokens(rows, 1), cache)
    with pytest.raises(ClearheadError, match="made for 3 rows, and the call has 2"):
        d.step(ids[:2, :1], cache, Positions.ragged([1, 1], start=[0, 1]))
    close(d.step(ids[:, 3:], cache), d.full(ids)[:, 3:], 2e-5)  # nothing was written


def test_positions_follow_the_cache():
    d = Decoding(("family", "gpt2"))
    cache = d.cache()
    assert cache.next(2).pos.tolist() == [[0, 1]]
    d.step(tokens(ROWS, 4), cache, Positions.ragged([4, 2, 0]))
    assert cache.next(2).pos.tolist() == [[4, 5], [2, 3], [0, 1]]
