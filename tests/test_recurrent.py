"""Recurrent layers and models beside PyTorch's own and beside the formulas, written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.attention.positions import Positions
from clearhead.errors import ClearheadError
from clearhead.layers.recurrent import RecurrentStack
from tiny import VOCAB, WIDTH, close, noisy, padded, tiny, tokens

DECODERS = ["rnn", "rnn-lstm", "rnn-gru"]
PAIRS = ["rnn_seq2seq", "rnn_seq2seq-lstm"]
TORCH = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


def twin(stack: RecurrentStack, kind: str, both: bool) -> nn.RNNBase:
    """PyTorch's own stack of layers, with the same weights."""
    width = WIDTH // 2 if both else WIDTH
    own = TORCH[kind](WIDTH, width, len(stack.blocks), batch_first=True, bidirectional=both)
    with torch.no_grad():
        for i, block in enumerate(stack.blocks):
            for name, weight in block.cell.named_parameters():
                getattr(own, name.replace("_l0", f"_l{i}")).copy_(weight)
    return own


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", TORCH)
def test_a_stack_is_pytorchs(kind, both):
    stack = noisy(RecurrentStack(kind, 2, WIDTH, bidirectional=both))
    x = torch.randn(3, 7, WIDTH)
    out, last = twin(stack, kind, both)(x)
    ours, final = stack.run(x, Positions.span(0, 7))
    close(ours, out)
    parts = last if kind == "lstm" else (last,)
    h = parts[0].unflatten(0, (2, -1)).permute(2, 0, 1, 3).flatten(2)  # [b, layers, m]
    close(final[:, :: len(parts)], h)


@pytest.mark.parametrize("kind", TORCH)
def test_both_directions_of_ragged_rows_are_each_row_alone(kind):
    stack = noisy(RecurrentStack(kind, 2, WIDTH, bidirectional=True))
    x, lengths = torch.randn(3, 6, WIDTH), [2, 6, 3]
    out, final = stack.run(x, Positions.ragged(lengths))
    for row, length in enumerate(lengths):
        alone, last = stack.run(x[row : row + 1, :length], Positions.span(0, length))
        close(out[row, :length], alone[0])
        close(final[row], last[0])


@pytest.mark.parametrize("name", DECODERS)
def test_an_empty_row_leaves_its_state_alone(name):
    net = tiny(name)
    cache, ids = net.new_cache(2, 20), tokens(2, 4)
    net.decode(ids, cache=cache)
    before = [state.now.clone() for state in cache.states]
    net.decode(tokens(2, 2, seed=5), at=Positions.ragged([0, 2], start=[4, 4]), cache=cache)
    for state, old in zip(cache.states, before, strict=True):
        assert state.now[0].equal(old[0])
        assert not state.now[1].equal(old[1])
    assert cache.ends == (4, 6)


def test_attention_by_its_formula():
    """score = w . tanh(W1 s + W2 h_j), softmax over j, sum of h_j, tanh(W [context; s])."""
    net = tiny("rnn_seq2seq")
    source, source_at = padded([[1, 2, 3, 4], [5, 6]], "right")
    target = tokens(2, 3)
    memory = net.encode(source, source_at)
    logits = net.decode(target, memory)

    stack, embed = net.decoder.stack, net.decoder.embed
    attn, mix = stack.blocks[-1].cross_attn, stack.blocks[-1].mix
    for row, length in enumerate([4, 2]):
        keys = memory.x[row, :length]
        states, x = memory.final[row].unbind(0), embed.tokens.weight[target[row]]
        for block, state in zip(stack.blocks, states, strict=True):
            x = block.cell(x, state[None])[0]
        for step, s in enumerate(x):
            scores = [attn.score(torch.tanh(attn.q_proj(s) + attn.k_proj(h))) for h in keys]
            weights = torch.cat(scores).softmax(0)
            context = (weights[:, None] * keys).sum(0)
            out = torch.tanh(mix(torch.cat((context, s))))
            close(logits[row, step], net.head.proj(out))


@pytest.mark.parametrize("name", PAIRS)
def test_without_attention_the_last_state_is_all_that_a_decoder_has(name):
    net, source, target = tiny(name), tokens(2, 5), tokens(2, 4)
    memory = net.encode(source)
    other = type(memory)(torch.randn_like(memory.x), memory.at, memory.final)
    same = net.decode(target, memory).equal(net.decode(target, other))
    assert same == (name == "rnn_seq2seq-lstm")
    zero = type(memory)(memory.x, memory.at, torch.zeros_like(memory.final))
    assert not net.decode(target, memory).equal(net.decode(target, zero))


@pytest.mark.parametrize("name", DECODERS)
def test_the_future_cannot_move_the_past(name):
    net, ids = tiny(name), tokens(1, 6)
    x = net.embed(ids, Positions.span(0, 6)).detach().requires_grad_()
    net.stack(x, Positions.span(0, 6))[:, 2].sum().backward()
    assert (x.grad[:, 3:] == 0).all()
    assert (x.grad[:, :3] != 0).any()


@pytest.mark.parametrize("name", DECODERS)
def test_a_state_cannot_go_back_but_by_a_snapshot(name):
    net, ids = tiny(name), tokens(2, 6)
    cache = net.new_cache(2, 20)
    net.decode(ids[:, :4], cache=cache)
    saved, size = cache.snapshot(), cache.nbytes
    first = net.decode(ids[:, 4:], cache=cache)
    with pytest.raises(ClearheadError, match="a summary of the past and cannot go back"):
        cache.trim(2)
    cache.restore(saved)
    assert net.decode(ids[:, 4:], cache=cache).equal(first)
    assert cache.nbytes == size  # however long the text


def test_how_cells_begin():
    net = ch.build("rnn", vocab_size=VOCAB, d_model=WIDTH, n_layers=1, seed=3).net
    cell = net.stack.blocks[0].cell
    forget = slice(WIDTH, 2 * WIDTH)
    assert (cell.bias_ih_l0[forget] == 1).all()
    assert cell.bias_ih_l0.sum() == WIDTH
    assert (cell.bias_hh_l0 == 0).all()
    gate = cell.weight_hh_l0[forget]
    close(gate @ gate.T, torch.eye(WIDTH))
    again = ch.build("rnn", vocab_size=VOCAB, d_model=WIDTH, n_layers=1, seed=3).net
    assert all(a.equal(b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_what_is_refused(tmp_path):
    with pytest.raises(ClearheadError, match="halves its width, and 15 is odd"):
        ch.build("rnn_seq2seq", vocab_size=VOCAB, d_model=15)
    with pytest.raises(ClearheadError, match=r"""may be "rnn", "lstm", "gru"."""):
        ch.build("rnn", cell="elman")
    net = tiny("rnn")
    with pytest.raises(ClearheadError, match="has no mask"):
        net(tokens(1, 4), Positions.packed([2, 2]))
    with pytest.raises(ClearheadError, match="looks at a source"):
        tiny("rnn_seq2seq").decoder.states(tokens(1, 3))
    with pytest.raises(ClearheadError, match="made for 2 rows"):
        net.decode(tokens(3, 1), cache=net.new_cache(2, 5))
    with pytest.raises(ClearheadError, match="no form in ONNX"):
        ch.export(ch.build("rnn", vocab_size=VOCAB, d_model=WIDTH), tmp_path / "x", to="onnx")
