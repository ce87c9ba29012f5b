"""In which order data is shown: shuffles of any size, and groups of similar length.

Both are functions of a seed alone. A shuffle needs no memory that grows with the number of items:
of many it is one of interleaved parts, each of which fits in memory. Groups hold some numbers for
every example, and making those of an epoch sorts all of them about log2(groups) times.
"""

from __future__ import annotations

import numpy as np

from clearhead.errors import require

PART = 1 << 20  # items that are permuted at once: 8 MB


class Shuffle:
    """The numbers 0 ... count - 1 in random order, epoch after epoch, each epoch another order.

    Item i belongs to part i modulo the number of parts, so each part is spread over everything. An
    epoch shows the parts in random order, and each part's items in random order; only one part is
    in memory. Up to PART items that is simply a permutation.
    """

    def __init__(self, count: int, seed: int, part: int = PART) -> None:
        require(count >= 1, "There is nothing to shuffle.")
        self.count, self._seed = count, seed
        self._parts = -(-count // part)
        self._kept: tuple[tuple[int, int], np.ndarray] | None = None

    def __call__(self, first: int, n: int) -> np.ndarray:
        """Items first ... first + n - 1 of the epochs one behind the other."""
        pieces = []
        while n > 0:
            epoch, place = divmod(first, self.count)
            piece = self._from(epoch, place)[:n]
            pieces.append(piece)
            first, n = first + len(piece), n - len(piece)
        return np.concatenate(pieces)

    def _from(self, epoch: int, place: int) -> np.ndarray:
        """The items of an epoch from a place to the end of its part."""
        if self._parts == 1:
            return self._part(epoch, 0)[place:]
        order = np.random.default_rng([self._seed, epoch]).permutation(self._parts)
        ends = np.cumsum((self.count - order - 1) // self._parts + 1)
        at = int(np.searchsorted(ends, place, side="right"))
        begin = int(ends[at - 1]) if at else 0
        return self._part(epoch, int(order[at]))[place - begin :]

    def _part(self, epoch: int, part: int) -> np.ndarray:
        kept = self._kept
        if kept is None or kept[0] != (epoch, part):
            items = np.arange(part, self.count, self._parts)
            dice = np.random.default_rng([self._seed, epoch, 2 + part])
            kept = self._kept = ((epoch, part), dice.permutation(items))
        return kept[1]


class Groups:
    """Examples in groups of similar length, each for a batch; anew at every call.

    The examples are halved again and again, each time along the side where that saves most padding,
    until a part is one batch: a k-d tree. Where a part is cut, and which of equal lengths go
    where, is random, so examples meet others in every epoch; how many groups there are is not.
    """

    def __init__(self, lengths: np.ndarray, batch: int | None, tokens: int | None) -> None:
        """`lengths`: [examples, sides]. A group has exactly `batch` examples (but for one), or
        about `tokens` slots on the side that has more.
        """
        self._lengths = lengths
        count = len(lengths)
        if batch is not None:
            self._weights = np.ones(count, dtype=np.int64)
            self._ends = np.minimum(np.arange(1, -(-count // batch) + 1) * batch, count)
            return
        assert tokens is not None
        self._weigh(lengths.max(axis=1).astype(np.int64), tokens)
        # Once more with the width that each example is padded to, or groups of the few long ones,
        # which are padded most, would be much too large.
        weights = self._weights.copy()
        for members in self(np.random.default_rng(0)):
            weights[members] = lengths[members].max()
        self._weigh(weights, tokens)

    def _weigh(self, weights: np.ndarray, tokens: int) -> None:
        total = int(weights.sum())
        count = min(len(weights), max(1, -(-total // tokens)))
        self._weights = weights
        self._ends = np.round(np.arange(1, count + 1) * (total / count)).astype(np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __call__(self, dice: np.random.Generator) -> list[np.ndarray]:
        """The numbers of the examples of each group, in random order."""
        groups: list[np.ndarray] = []
        self._split(dice.permutation(len(self._lengths)), self._ends, dice, groups)
        return [groups[i] for i in dice.permutation(len(groups))]

    def _split(
        self,
        members: np.ndarray,
        ends: np.ndarray,
        dice: np.random.Generator,
        groups: list[np.ndarray],
    ) -> None:
        """Cut `members`, which weigh ends[-1], where their weights reach each of `ends`."""
        if len(ends) == 1:
            groups.append(members)
            return
        most = len(ends) // 8  # how far from the middle the cut may be
        left = len(ends) // 2 + int(dice.integers(-most, most + 1))
        sides = range(self._lengths.shape[1])
        _, low, high = min(
            (self._halved(members, side, left, ends) for side in sides), key=lambda cut: cut[0]
        )
        done, rest = int(self._weights[low].sum()), int(self._weights[high].sum())
        begin = ends[left - 1]
        self._split(low, _scaled(ends[:left], done), dice, groups)
        self._split(high, _scaled(ends[left:] - begin, rest), dice, groups)

    def _halved(
        self, members: np.ndarray, side: int, left: int, ends: np.ndarray
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """How many slots two halves need that are cut along a side, and the halves."""
        ranked = members[np.argsort(self._lengths[members, side], kind="stable")]
        reached = np.searchsorted(np.cumsum(self._weights[ranked]), ends[left - 1])
        cut = min(max(int(reached) + 1, left), len(ranked) - (len(ends) - left))
        halves = ranked[:cut], ranked[cut:]
        slots = sum(len(half) * int(self._lengths[half].max(axis=0).sum()) for half in halves)
        return slots, *halves


def _scaled(ends: np.ndarray, total: int) -> np.ndarray:
    """The same proportions, with this total."""
    return np.round(ends * (total / ends[-1])).astype(np.int64)
