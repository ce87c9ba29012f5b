"""Recurrent layers, what came before attention: a state that is carried from token to token.

rnn     h = tanh(W x + U h)                                  Elman 1990
lstm    c = f c + i g,  h = o tanh(c);  f, i, o are gates    Hochreiter and Schmidhuber 1997
gru     h = (1 - z) n + z h;  z and r, inside n, are gates   Cho et al. 2014

The cells are PyTorch's own. A stack of them stands where a Transformer's stack would: it takes the
same stream, positions, cache and memory. Its cache is one state a layer however long the text, a
summary that cannot go back. An empty slot of a ragged batch leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from clearhead.attention.additive import AdditiveAttention
from clearhead.attention.cache import Cache, CrossKV, State
from clearhead.attention.dropout import Dropout
from clearhead.attention.positions import Positions
from clearhead.attention.view import View
from clearhead.errors import require
from clearhead.layers.stack import Memory
from clearhead.tap import Tap

CellName = Literal["rnn", "lstm", "gru"]
Carried = Float[Tensor, "b parts m"]  # h, and for an LSTM c behind it

CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
# One step alone: a whole layer's call would lay out its weights anew for a single token.
STEPS: dict[type[nn.RNNBase], Callable[..., Any]] = {
    nn.RNN: torch.rnn_tanh_cell,
    nn.LSTM: torch.lstm_cell,
    nn.GRU: torch.gru_cell,
}


class Recurrent(State):
    """What one recurrent layer remembers."""

    trims = False

    def __init__(self, now: Carried) -> None:
        self.now = now


@dataclass(frozen=True, eq=False)
class Ragged:
    """Where the filled slots of a batch with empty ones are."""

    order: Int[Tensor, "b t"]
    """Each row's slots, the filled ones first."""
    back: Int[Tensor, "b t"]
    """Where each slot went."""
    lengths: Int[Tensor, " b"]
    """How many slots of each row are filled."""

    @staticmethod
    def of(at: Positions, rows: int) -> Ragged | None:
        """None where no slot is empty."""
        if not at.holes:
            return None
        filled = at.filled().expand(rows, -1)
        order = (~filled).int().argsort(dim=1, stable=True)
        return Ragged(order, order.argsort(dim=1), filled.sum(dim=1))


class RecurrentBlock(nn.Module):
    """One layer: a cell, and attention to the source behind it, if there is any.

    With attention it returns tanh(W [context; h]), where the state h asks and the context is the
    sum of what it looked at (Bahdanau et al. 2015; asked behind the step, as Luong et al. 2015 do,
    so that a whole text goes through the cell in one call).
    """

    def __init__(self, cell: nn.RNNBase, attends: bool, dropout: float) -> None:
        super().__init__()
        width = cell.hidden_size * (2 if cell.bidirectional else 1)
        self.cell = cell
        self.cross_attn = AdditiveAttention(width, width, width) if attends else None
        self.mix = nn.Linear(2 * width, width, bias=False) if attends else None
        self.dropout = Dropout(dropout)
        self.enter, self.leave = Tap(), Tap()

    @property
    def parts(self) -> int:
        """How many vectors its state has."""
        return 2 if isinstance(self.cell, nn.LSTM) else 1

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        state: Recurrent,
        ragged: Ragged | None = None,
        memory: Memory | None = None,
        kept: CrossKV | None = None,
    ) -> Float[Tensor, "b t m"]:
        """What it says of every token; the state goes on."""
        x, state.now = self._carry(self.enter(x), ragged, state.now)
        if self.cross_attn is not None and self.mix is not None:
            require(
                memory is not None,
                "This decoder looks at a source: give it what encode returned, "
                "decode(target, memory).",
            )
            assert memory is not None
            rows = (memory.rows, -1, x.shape[2])  # a source's beams ask together
            view = View.across(memory.at)
            context = self.cross_attn(x.reshape(rows), memory.x, view, kept=kept).reshape(x.shape)
            x = torch.tanh(self.mix(torch.cat((context, x), dim=2)))
        return self.leave(self.dropout(x))

    def _carry(self, x: Tensor, ragged: Ragged | None, state: Carried) -> tuple[Tensor, Carried]:
        """The cell's states at every slot, and the last of each row."""
        if ragged is None and x.shape[1] == 1 and not self.cell.bidirectional:
            return self._step(x[:, 0], state)
        if ragged is None:
            out, last = self.cell(x, self._split(state))
            return out, self._join(last)
        width = x.shape[1]
        first = x.gather(1, ragged.order.unsqueeze(2).expand_as(x))
        lengths = ragged.lengths.clamp(min=1).cpu()
        packed = pack_padded_sequence(first, lengths, batch_first=True, enforce_sorted=False)
        out, last = self.cell(packed, self._split(state))
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=width)
        out = out.gather(1, ragged.back.unsqueeze(2).expand_as(out))
        read = (ragged.lengths > 0).view(-1, 1, 1)
        return out, torch.where(read, self._join(last), state)

    def _step(self, x: Float[Tensor, "b m"], state: Carried) -> tuple[Tensor, Carried]:
        """What `cell` does with a single token."""
        parts = state.unbind(dim=1)
        carried = parts if self.parts == 2 else parts[0]
        new = STEPS[type(self.cell)](x, carried, *self.cell.parameters())
        parts = new if self.parts == 2 else (new,)
        return parts[0].unsqueeze(1), torch.stack(parts, dim=1)

    def _split(self, state: Carried) -> Any:
        """The state as the cell wants it: [directions, b, m / directions]; for an LSTM two."""
        n = 2 if self.cell.bidirectional else 1
        parts = [p.unflatten(1, (n, -1)).transpose(0, 1).contiguous() for p in state.unbind(dim=1)]
        return tuple(parts) if self.parts == 2 else parts[0]

    def _join(self, last: Any) -> Carried:
        parts = last if self.parts == 2 else (last,)
        return torch.stack([p.transpose(0, 1).flatten(1) for p in parts], dim=1)


class RecurrentStack(nn.Module):
    """Recurrent layers one above the other."""

    blocks: Any  # nn.ModuleList of RecurrentBlock

    def __init__(
        self,
        cell: CellName,
        n_layers: int,
        width: int,
        bidirectional: bool = False,
        attends: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(n_layers >= 1, f"n_layers must be 1 or more, not {n_layers}.")
        require(
            not bidirectional or width % 2 == 0,
            f"A layer that reads in both directions halves its width, and {width} is odd.",
        )
        own = width // 2 if bidirectional else width
        self.width = width
        self.blocks = nn.ModuleList(
            RecurrentBlock(
                CELLS[cell](width, own, batch_first=True, bidirectional=bidirectional),
                attends and i == n_layers - 1,
                dropout,
            )
            for i in range(n_layers)
        )

    def forward(
        self,
        x: Float[Tensor, "b t m"],
        at: Positions,
        cache: Cache | None = None,
        memory: Memory | None = None,
    ) -> Float[Tensor, "b t m"]:
        return self.run(x, at, cache, memory)[0]

    def run(
        self,
        x: Float[Tensor, "b t m"],
        at: Positions,
        cache: Cache | None = None,
        memory: Memory | None = None,
    ) -> tuple[Float[Tensor, "b t m"], Float[Tensor, "b states m"]]:
        """The last layer's states at every slot, and what every layer would carry on."""
        require(
            at.segment is None and at.prefix is None and at.pairs is None,
            "A recurrent network reads from left to right and has no mask: segments, prefixes and "
            "graphs are for attention.",
        )
        rows, ragged = x.shape[0], Ragged.of(at, x.shape[0])
        kept: CrossKV | None = None
        if cache is None:
            states: Any = self._start(rows, x, memory)
        else:
            require(
                rows == cache.rows,
                f"The cache was made for {cache.rows} rows, and the call has {rows}.",
            )
            cache.begin(at)
            states, kept = cache.states, cache.cross[0] if cache.cross else None
        for block, state in zip(self.blocks, states, strict=True):
            x = block(x, state, ragged, memory, kept)
        return x, torch.cat([state.now for state in states], dim=1)

    def _start(self, rows: int, like: Tensor, memory: Memory | None) -> list[Recurrent]:
        """The states before the first token: zeros, or where the source ended."""
        parts = [block.parts for block in self.blocks]
        if memory is None or memory.final is None:
            return [Recurrent(like.new_zeros((rows, n, self.width))) for n in parts]
        final = memory.final.repeat_interleave(rows // memory.rows, dim=0)
        return [Recurrent(now) for now in final.to(like.dtype).split(parts, dim=1)]

    def new_cache(
        self, rows: int, max_len: int, memory: Memory | None = None, slack: int = 0, **place: Any
    ) -> Cache:
        """A cache for so many rows, which has read nothing (or the source)."""
        require(rows >= 1, f"A cache is for 1 row or more, not {rows}.")
        require(max_len >= 1, f"A cache is for 1 position or more: max_len is {max_len}.")
        states = self._start(rows, torch.empty(0, **place), memory)
        cross = [CrossKV()] if memory is not None and self.blocks[-1].cross_attn is not None else []
        return Cache(rows, [], states, cross, memory)
