"""The likeliest token of a greedy step, exactly, without most of the head.

The head is often a third of a model, and a greedy step reads all of it for the sake of one logit.
Here it is read in one byte a weight, which gives every logit but for an error that has a bound:

    |w x - q y| <= |w - q| |x| + |q| |x - y|        q, y: w and x as the product of int8 reads them

A token whose upper bound is below the largest lower bound cannot be the best. The others, some
dozens of tens of thousands, are multiplied with the weights themselves, by the same product in the
same order: what comes out is the very logit.

The codes are made once a model has written some tokens greedily (to make them costs what they save
on as many), and take a byte for each weight of the head. They are made anew when the weights
are no longer what they were: a change that torch counts is noticed at once, one it does not count
(through `.data`, or by compiled training) in the second step of the next text, by a product with
numbers that stay the same. The slow twin is the whole product.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.fast import compile as compiled
from clearhead.fast.compile import TOKENS
from clearhead.fast.formats import BESIDE, READ, TINY, pack, stored_as, unpack
from clearhead.fast.linear import SMALL, FastLinear
from clearhead.fast.pages import LargePages
from clearhead.memory import trim
from clearhead.tap import hooked

WORTH = 2**22  # weights of a head: a smaller one is read in no time
AFTER = 128  # tokens that a head has written greedily, from which on it has codes
SETTLED = 2  # steps of a text, from which on it uses them
ROWS = 256  # texts at a time
PIECE = 2**19  # weights of which codes are made at a time
PART = 8  # where more than an eighth of all tokens may be the best one, all are multiplied
MISSES = 8  # so often that may be, beyond once in two steps
SPARE = 1.002  # for what is lost in computing the bounds themselves
UNIT = 2.0**-24  # what rounding to fp32 changes, as a part
LEAST = 2.0**-120  # beside it what rounding to the smallest numbers changes does not count


@dataclass(frozen=True)
class _Codes:
    """A head in int8, and how wrong its logits may be; whole chunks of tokens, filled with some
    that never come.
    """

    product: FastLinear
    """The head."""
    bounds: Float[Tensor, "3 filled"]
    """Of each token |w - q|, |q|, and what adding its bias may lose."""
    numbers: Float[Tensor, "1 k"]
    """Some numbers."""
    outputs: Float[Tensor, "1 n"]
    """What the weights made of them."""


class Likeliest:
    """Logits of which only the largest of a row counts."""

    def __init__(self, linear: FastLinear) -> None:
        self.linear = linear
        self._codes: _Codes | None = None
        self._making = threading.Lock()
        self._steps: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # of each text
        self._count = self._hits = self._misses = 0
        self._mark: tuple[Any, ...] | None = None  # of which weights these counts are

    def __call__(
        self, x: Float[Tensor, "m k"], text: object
    ) -> tuple[Float[Tensor, "m few"], Int[Tensor, " few"]] | None:
        """Logits of some tokens, among which is the best one of each row, and which tokens these
        are, in their order. None: the whole product is to be taken. A text is known by what goes
        with it: its cache.
        """
        linear, rows = self.linear, len(x)
        if (
            not linear.here
            or not 0 < rows <= ROWS
            or x.dtype != torch.float32
            or x.shape[1] != linear.in_features
            or not x.is_cpu
            or (x.requires_grad and torch.is_grad_enabled())
            or hooked(linear)
        ):
            return None
        codes = self._known(text, rows)
        if codes is None:
            return None
        x = x.contiguous()
        found = _candidates(x, codes)
        if found is None or len(found) > linear.out_features // PART:
            self._misses += 1
            if self._misses > self._hits // 2 + MISSES:
                self._codes = None
            return None
        self._hits += 1
        return linear.some(x, found), found

    @property
    def left_out(self) -> int:
        """How many bytes less a step reads than the whole head; 0 while there are no codes."""
        if self._codes is None:
            return 0
        codes, weight = self._codes, self.linear.weight
        return weight.nbytes - codes.product.weight.nbytes - codes.bounds.nbytes

    def _known(self, text: object, rows: int) -> _Codes | None:
        """The codes, if it is time to use them."""
        self._count += rows
        step = self._steps[text] = self._steps.get(text, 0) + 1
        mark, before = _mark(self.linear), self._mark
        if mark != before:
            self._mark = mark
            if before is not None:  # whoever trains between texts has no codes made
                self._codes, self._count, self._hits, self._misses = None, 0, 0, 0
        if self._count < AFTER or step < SETTLED or self._misses > self._hits // 2 + MISSES:
            return None
        with self._making:  # one thread makes them for all
            codes = self._codes
            if codes is None or (step == SETTLED and _is_other(self.linear, codes)):
                codes = self._codes = _make(self.linear)
                self._hits = self._misses = 0
        return codes

    def __getstate__(self) -> dict[str, Any]:
        return {"linear": self.linear}  # a copy makes codes of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        Likeliest.__init__(self, state["linear"])


def likeliest(linear: Any) -> Likeliest | None:
    """That of a head whose weights have more than a byte; None where it would not be quicker."""
    if not isinstance(linear, FastLinear) or linear.form not in ("fp32", "bf16"):
        return None
    worth = linear.compilable and linear.in_features * linear.out_features >= WORTH
    return Likeliest(linear) if worth and not linear.weight.is_inference() else None


# --- codes ---


def _mark(linear: FastLinear) -> tuple[Any, ...]:
    """Which tensors a head has, and how often each was changed, as far as torch counts that."""
    counts = (0 if tensor.is_inference() else tensor._version for tensor in linear.tensors)
    return linear.addresses, *counts


def _make(linear: FastLinear) -> _Codes:
    with torch.inference_mode(False), torch.no_grad():
        codes = _make_outside(linear)
    trim()  # what was in between
    return codes


def _make_outside(linear: FastLinear) -> _Codes:
    weight, _, bias = linear.tensors
    k, n = linear.in_features, linear.out_features
    more = -n % TOKENS
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    bounds = torch.zeros(3, n + more, **kind)
    bounds[2, :n] = torch.where(bias.isfinite(), 4 * UNIT * bias.abs(), 0.0)
    shapes = stored_as("int8", n + more, k)
    stored = LargePages().room(*shapes["weight"])
    scales = torch.empty(shapes["scales"][1], **kind)
    height = max(PIECE // k // BESIDE, 1) * BESIDE
    for first in range(0, n, height):
        part = weight[first : first + height].float()
        rows = slice(first, first + len(part))
        if rows.stop == n:
            part, rows = F.pad(part, (0, 0, 0, more)), slice(first, n + more)
        lie = slice(rows.start // BESIDE, -(-rows.stop // BESIDE))
        stored[lie], scales[rows] = pack(part, "int8")
        q = unpack(stored[lie], scales[rows], "int8", k)
        bounds[1, rows] = _lengths(q)
        bounds[0, rows] = _lengths(q.sub_(part))
    never = F.pad(bias, (0, more), value=-torch.inf)
    numbers = torch.randn(1, k, generator=torch.Generator().manual_seed(0), **kind)
    product = FastLinear("int8", k, stored, scales, never)
    return _Codes(product, bounds, numbers, linear(numbers))


def _lengths(rows: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Never shorter than they are: squares of fp32 numbers may be 0."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).float() + LEAST


def _is_other(linear: FastLinear, codes: _Codes) -> bool:
    """Whether the weights are not those that the codes were made of."""
    return not torch.equal(linear(codes.numbers), codes.outputs)


# --- bounds ---


def _candidates(x: Float[Tensor, "m k"], codes: _Codes) -> Int[Tensor, " n"] | None:
    """The tokens that may be the best one of some row, in their order; None: there is no bound."""
    logits, reaches = codes.product(x), _reaches(x)
    rows, width = logits.shape
    count = width // TOKENS
    lows = logits.new_empty((rows, count))
    marks = torch.empty(width, dtype=torch.bool, device="cpu")
    given = logits.data_ptr(), codes.bounds.data_ptr(), reaches.data_ptr()
    ends = width, count, rows, compiled.threads() if logits.numel() >= SMALL else 1, 0
    compiled.steps()["lows"](*given, 0, lows.data_ptr(), *ends)
    least = lows.amax(dim=1)
    if not bool(least.isfinite().all()):
        return None
    compiled.steps()["above"](*given, least.data_ptr(), marks.data_ptr(), *ends)
    return marks.nonzero().flatten()


def plain_candidates(x: Float[Tensor, "m k"], codes: _Codes) -> Int[Tensor, " n"] | None:
    """The slow twin."""
    logits = codes.product(x)
    own, length, spare = codes.bounds
    reach, lost = _reaches(x).unsqueeze(2).unbind(dim=1)
    bound = reach * own + (lost * length + spare)
    low = logits - bound
    least = low.nan_to_num(-torch.inf, posinf=torch.inf).amax(dim=1, keepdim=True)
    if not bool(least.isfinite().all()):
        return None
    return (~(logits + bound < least)).any(dim=0).nonzero().flatten()


def _reaches(x: Float[Tensor, "m k"]) -> Float[Tensor, "m 2"]:
    """Of each row |x|, and |x - y| with what is lost by rounding, of both products."""
    rows, k, size = len(x), x.shape[1], READ["int8"]
    whole = F.pad(x, (0, -k % size)) if k % size else x
    groups = whole.numpy().reshape(rows, -1, size)
    with np.errstate(all="ignore"):
        step = np.abs(groups).max(axis=2, keepdims=True)
        np.maximum(step, TINY, out=step)
        step /= 127
        lost = groups / step
        lost -= np.rint(lost)
        lost *= step
        reach = _length(groups)
        more = _length(lost) + 2 * k * UNIT * reach + k * TINY
    return SPARE * torch.from_numpy(np.stack((reach, more), axis=1))


def _length(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    squares = np.square(groups, dtype=np.float64)  # those of fp32 numbers may be 0
    return np.sqrt(squares.sum(axis=(1, 2))).astype(np.float32)
