"""Positions that enter with the embeddings: sinusoidal, learned, and both in 2-D.

They are added, or put beside the tokens' numbers.

PE(p, 2i) = sin(p / base^(2i/m)), PE(p, 2i+1) = cos(the same). Vaswani et al. 2017, section 3.5.
Bounded, unique, and PE(p + k) is a rotation of PE(p). In two dimensions rows take half the width
and columns the other half. Positions that enter inside attention (rotation, bias, relative) live in
attention/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.attention.positions import Positions
from clearhead.config import Spec
from clearhead.errors import require

Layout = Literal["interleaved", "halves"]


def sinusoid(
    pos: Int[Tensor, "*shape"], width: int, base: float = 10000.0, layout: Layout = "interleaved"
) -> Float[Tensor, "*shape width"]:
    """The table's rows for any positions.

    "halves" puts all sines before all cosines (Marian, Whisper).
    """
    angles = pos.float().unsqueeze(-1) / base ** (
        torch.arange(0, width, 2, device=pos.device).float() / width
    )
    pair = (angles.sin(), angles.cos())
    if layout == "halves":
        return torch.cat(pair, dim=-1)
    return torch.stack(pair, dim=-1).flatten(-2)


class Sinusoidal(nn.Module):
    """Sines and cosines of the position: no parameters, any length."""

    def __init__(self, width: int, base: float = 10000.0, layout: Layout = "interleaved") -> None:
        super().__init__()
        require(width % 2 == 0, f"Sinusoidal positions come in pairs: a width of {width} is odd.")
        self.width, self.base, self.layout = width, base, layout

    def forward(self, at: Positions) -> Float[Tensor, "b t w"]:
        return sinusoid(at.pos.clamp(min=0), self.width, self.base, self.layout)


class Learned(nn.Module):
    """One learned vector for each position up to a maximum."""

    def __init__(self, width: int, max_len: int, offset: int = 0) -> None:
        super().__init__()
        require(max_len >= 1, f"A learned table needs max_len of 1 or more, not {max_len}.")
        require(offset >= 0, f"The offset of a learned table must be 0 or more, not {offset}.")
        self.max_len, self.offset = max_len, offset
        self.table = nn.Embedding(max_len + offset, width)

    def forward(self, at: Positions) -> Float[Tensor, "b t w"]:
        require(
            at.hi < self.max_len,
            f"Position {at.hi} is beyond the learned table of {self.max_len} positions: shorten "
            f"the text to {self.max_len} tokens, or build the model with a larger max_len (or "
            "positions without a table).",
        )
        pos = at.pos.clamp(min=0) if at.holes else at.pos
        return self.table(pos + self.offset if self.offset else pos)


class Sinusoidal2D(nn.Module):
    """Half the width for the row of a grid, half for the column."""

    def __init__(self, width: int, columns: int, base: float = 10000.0, first: int = 0) -> None:
        super().__init__()
        require(columns >= 1, f"A grid has 1 column or more, not {columns}.")
        require(
            width % 4 == 0, f"2-D sinusoidal positions need a width that divides by 4, not {width}."
        )
        self.width, self.columns, self.base, self.first = width, columns, base, first

    def forward(self, at: Positions) -> Float[Tensor, "b t w"]:
        cell = (at.pos - self.first).clamp(min=0)
        rows = sinusoid(cell // self.columns, self.width // 2, self.base)
        both = torch.cat((rows, sinusoid(cell % self.columns, self.width // 2, self.base)), dim=-1)
        return both * (at.pos >= self.first).unsqueeze(2)


class Learned2D(nn.Module):
    """A learned vector for each row and each column, half the width each.

    `resize` fits another grid.
    """

    def __init__(self, width: int, rows: int, columns: int, first: int = 0) -> None:
        super().__init__()
        require(rows >= 1 and columns >= 1, f"A grid of {rows} x {columns} has no cells.")
        require(width % 2 == 0, f"2-D learned positions need an even width, not {width}.")
        self.columns, self.first = columns, first
        self.max_len = first + rows * columns
        self.row_table = nn.Embedding(rows, width // 2)
        self.column_table = nn.Embedding(columns, width - width // 2)

    def forward(self, at: Positions) -> Float[Tensor, "b t w"]:
        require(
            at.hi < self.max_len,
            f"Position {at.hi} is outside the grid of {self.max_len - self.first} cells: "
            "resize(rows, columns) first.",
        )
        cell = (at.pos - self.first).clamp(min=0)
        both = (self.row_table(cell // self.columns), self.column_table(cell % self.columns))
        return torch.cat(both, dim=-1) * (at.pos >= self.first).unsqueeze(2)

    @torch.no_grad()
    def resize(self, rows: int, columns: int) -> None:
        """Interpolate the tables to another grid, so that a model reads larger images.

        Cell centres keep their place.
        """
        self.row_table = _resized(self.row_table, rows)
        self.column_table = _resized(self.column_table, columns)
        self.columns, self.max_len = columns, self.first + rows * columns


def _resized(table: nn.Embedding, size: int) -> nn.Embedding:
    line = table.weight.T.unsqueeze(0)  # [1, width, n]
    new = F.interpolate(line, size=size, mode="linear", align_corners=False)[0].T
    return nn.Embedding.from_pretrained(new.contiguous(), freeze=False)


class AddedPosition(Spec):
    """A position that enters with the embeddings."""

    def build(self, width: int) -> nn.Module:
        """The module, as wide as the stream or as `beside` says."""
        return Sinusoidal(width)

    @property
    def beside(self) -> int:
        """How many numbers of the stream it takes for itself (0: it is added to all of them)."""
        return 0


@dataclass(frozen=True)
class SinusoidalConfig(AddedPosition, kind="sinusoidal"):
    """Sines and cosines."""

    base: float = 10000.0
    """Wave lengths run from 2 pi to base * 2 pi."""
    layout: Layout = "interleaved"
    """Sine and cosine side by side, or all sines before all cosines."""
    width: int = 0
    """0: added to the embedding. Otherwise concatenated to it, with this many numbers."""

    def build(self, width: int) -> nn.Module:
        return Sinusoidal(self.width or width, self.base, self.layout)

    @property
    def beside(self) -> int:
        return self.width


@dataclass(frozen=True)
class LearnedConfig(AddedPosition, kind="learned"):
    """A learned table."""

    max_len: int = 0
    """How many positions it has; 0: as many as the model's max_len."""
    offset: int = 0
    """Rows of the table before position 0 (BART 2, RoBERTa 2)."""

    def build(self, width: int) -> nn.Module:
        return Learned(width, self.max_len, self.offset)


@dataclass(frozen=True)
class Sinusoidal2DConfig(AddedPosition, kind="sinusoidal_2d"):
    """Sines and cosines of row and column."""

    columns: int
    """Columns of the grid; position p stands in row p // columns."""
    base: float = 10000.0
    """As in one dimension."""
    first: int = 0
    """The position of the first cell; those before (a CLS token) get nothing."""

    def build(self, width: int) -> nn.Module:
        return Sinusoidal2D(width, self.columns, self.base, self.first)


@dataclass(frozen=True)
class Learned2DConfig(AddedPosition, kind="learned_2d"):
    """Learned tables of rows and of columns."""

    rows: int
    """Rows of the grid."""
    columns: int
    """Columns of the grid."""
    first: int = 0
    """The position of the first cell; those before (a CLS token) get nothing."""

    def build(self, width: int) -> nn.Module:
        return Learned2D(width, self.rows, self.columns, self.first)
