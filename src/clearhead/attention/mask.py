"""Masks: who may look at whom, as a small formula over positions (True = may attend).

    Causal() & Window(256)            a decoder that sees the last 256 positions
    Causal() & Segments()             documents packed into one row
    Causal() | Prefix()               a prefix that sees itself whole, then causal

A mask is a frozen spec: hashable, JSON, combined with `&` and `|`. It stays symbolic until a call
asks for `allowed`, and `plain` tells from facts alone that a call needs no tensor at all (so that
the fused kernels' fast paths are reached). Empty slots are never attended to, whatever the formula.

    window(3), causal            keys ->  0 1 2 3 4
                             query 0      x
                                   1      x x
                                   2      x x x
                                   3        x x x
                                   4          x x x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool
from torch import Tensor

from clearhead.attention.positions import Positions
from clearhead.config import Spec
from clearhead.errors import ClearheadError, require

Plain = Literal["all", "causal"] | None


class Mask(Spec):
    """Base of the formulas.

    A subclass gives `rule`, and `plain` and `reach` where it can know them.
    """

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        """The formula, for every pair, empty slots not yet considered."""
        raise ClearheadError(f"{type(self).__name__} gives no rule(q, k): every mask must.")

    def plain(self, q: Positions, k: Positions) -> Plain:
        """What is known without a tensor.

        "all": no pair is forbidden; "causal": lower triangle of equal spans; None: it takes
        a tensor.
        """
        return None

    @property
    def reach(self) -> int | None:
        """How many positions back a query can see, itself included; None: no limit."""
        return None

    @property
    def causal(self) -> bool:
        """Whether no query can ever see a later position."""
        return False

    def allowed(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        """The formula without empty slots: what they hold cannot matter, and they see nothing."""
        allowed = self.rule(q, k)
        if k.holes:
            allowed = allowed & k.filled().unsqueeze(1)
        if q.holes:
            allowed = allowed & q.filled().unsqueeze(2)
        return allowed

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)


@dataclass(frozen=True)
class All(Mask, kind="all"):
    """Everybody sees everybody."""

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        return q.distance(k) == q.distance(k)

    def plain(self, q: Positions, k: Positions) -> Plain:
        return None if q.holes or k.holes else "all"


@dataclass(frozen=True)
class Causal(Mask, kind="causal"):
    """Nobody sees a later position."""

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        return q.distance(k) >= 0

    def plain(self, q: Positions, k: Positions) -> Plain:
        if q.holes or k.holes:
            return None
        if k.hi <= q.lo:
            return "all"
        # Only equal spans: the fused kernels' causal flag is a triangle from the top left corner.
        same = q.dense and k.dense and q.lo == k.lo and q.hi == k.hi
        return "causal" if same else None

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Window(Mask, kind="window"):
    """Only positions closer than `width`, to both sides."""

    width: int
    """How many positions to a side can be seen, the query's own included."""

    def __post_init__(self) -> None:
        require(
            self.width >= 1,
            f"A window of {self.width} positions sees nothing: width must be 1 or more.",
        )

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        return q.distance(k).abs() < self.width

    def plain(self, q: Positions, k: Positions) -> Plain:
        if q.holes or k.holes:
            return None
        far = max(q.hi - k.lo, k.hi - q.lo)
        return "all" if far < self.width else None

    @property
    def reach(self) -> int | None:
        return self.width


@dataclass(frozen=True)
class Segments(Mask, kind="segments"):
    """Only slots of the same document; the call's positions carry `segment`."""

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        require(
            q.segment is not None and k.segment is not None,
            "The Segments mask needs to know the documents: Positions.packed(lengths), or "
            "positions.with_data(segment=...). It has no form with a cache.",
        )
        return q.segment.unsqueeze(2) == k.segment.unsqueeze(1)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Prefix(Mask, kind="prefix"):
    """Keys inside the first `positions.prefix` positions are seen by all.

    Combine it with `Causal() |`.
    """

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        require(
            q.prefix is not None,
            "The Prefix mask needs to know the prefix lengths: positions.with_data(prefix=...).",
        )
        inside = k.pos.unsqueeze(1) < q.prefix.view(-1, 1, 1)  # type: ignore[union-attr]
        return inside & (q.pos.unsqueeze(2) >= 0)


@dataclass(frozen=True)
class Adjacency(Mask, kind="adjacency"):
    """Only along the edges of a graph; the call's positions carry `pairs[b, from, to]`."""

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        require(
            q.pairs is not None,
            "The Adjacency mask needs the graph: positions.with_data(pairs=...), booleans [batch, "
            "n, n].",
        )
        pairs: Tensor = q.pairs  # type: ignore[assignment]
        nodes = pairs.shape[-1]
        require(
            max(q.hi, k.hi) < nodes,
            f"Position {max(q.hi, k.hi)} is outside the graph of {nodes} nodes: pairs must cover "
            "it.",
        )
        batch = max(pairs.shape[0], q.pos.shape[0], k.pos.shape[0])
        rows = q.pos.clamp(min=0).unsqueeze(2).expand(batch, -1, nodes)
        edges = pairs.expand(batch, -1, -1).gather(1, rows)
        columns = k.pos.clamp(min=0).unsqueeze(1).expand(batch, q.length, -1)
        return edges.gather(2, columns)


@dataclass(frozen=True)
class Both(Mask, kind="both"):
    """Allowed by the one and by the other."""

    left: Mask
    """One formula."""
    right: Mask
    """The other formula."""

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        return self.left.rule(q, k) & self.right.rule(q, k)

    def plain(self, q: Positions, k: Positions) -> Plain:
        kinds = {self.left.plain(q, k), self.right.plain(q, k)}
        if None in kinds:
            return None
        return "causal" if "causal" in kinds else "all"

    @property
    def reach(self) -> int | None:
        reaches = [mask.reach for mask in (self.left, self.right) if mask.reach is not None]
        return min(reaches, default=None)

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal


@dataclass(frozen=True)
class Either(Mask, kind="either"):
    """Allowed by the one or by the other."""

    left: Mask
    """One formula."""
    right: Mask
    """The other formula."""

    def rule(self, q: Positions, k: Positions) -> Bool[Tensor, "b q k"]:
        return self.left.rule(q, k) | self.right.rule(q, k)

    def plain(self, q: Positions, k: Positions) -> Plain:
        kinds = {self.left.plain(q, k), self.right.plain(q, k)}
        return "all" if "all" in kinds else None

    @property
    def reach(self) -> int | None:
        if self.left.reach is None or self.right.reach is None:
            return None
        return max(self.left.reach, self.right.reach)

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal
