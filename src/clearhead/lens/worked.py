"""The lectures' four worked examples of attention, each computed, so that their numbers are right.

They are small enough for a pencil, and the library's own attention is tested against them.
"""

from __future__ import annotations

import numpy as np

from clearhead.errors import ClearheadError
from clearhead.lens.walk import Step, Walk, attend, dimensions, numbered, projections

_Example = tuple[str, list[Step], tuple[str, ...], tuple[str, ...]]


def walk_example(number: int = 1, *, causal: bool = False, temperature: float = 1.0) -> Walk:
    """One of the four worked examples of the lectures, with the right numbers."""
    examples = {
        1: _looking_for_an_animal,
        2: _with_projections,
        3: _without_projections,
        4: _softmax_alone,
    }
    if number not in examples:
        raise ClearheadError(f"There is no worked example {number}: choose one of 1, 2, 3 and 4.")
    if causal and number in (1, 4):
        raise ClearheadError(
            f"Example {number} has a single query, so there is no future to hide from it: "
            "leave out causal, or choose example 2 or 3."
        )
    title, inputs, queries, tokens = examples[number]()
    return Walk(title, attend(inputs, queries, tokens, causal=causal, temperature=temperature))


def _looking_for_an_animal() -> _Example:
    tokens = numbered(("the", "cat", "sat", "on", "the", "mat"))
    queries, columns = ("animal?",), dimensions(4)
    k = np.array(
        [[0, 0, 0, 1], [1, 0, 0.3, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    )
    v = np.array(
        [
            [0.1, 0, 0, 0.8],
            [0.9, 0, 0.1, 0.7],
            [0, 0.9, 0, 0.3],
            [0, 0, 0.5, 0],
            [0, 0, 0, 0.9],
            [0, 0, 0.9, 0.6],
        ]
    )
    inputs = [
        Step("q", "given", queries, columns, np.array([[0.9, 0.1, 0.2, 0.3]])),
        Step("k", "given", tokens, columns, k),
        Step("v", "given", tokens, columns, v),
    ]
    title = 'Example 1: "The cat sat on the mat", and a query that looks for an animal'
    return title, inputs, queries, tokens


def _with_projections() -> _Example:
    rows = tuple(f"x{i}" for i in range(1, 6))
    x = np.array(
        [[1, 0.5, 0.2], [0.3, 1.2, 0.8], [0.7, 0.4, 1.1], [1.5, 0.9, 0.3], [0.6, 1.3, 0.7]]
    )
    w_q = np.array([[1, 0, 0.5], [0.5, 1, 0], [0, 0.5, 1]])
    w_k = np.array([[0.8, 0.2, 0.3], [0.3, 0.9, 0.1], [0.2, 0.1, 0.8]])
    w_v = np.array([[1, 0.3, 0.2], [0.2, 1, 0.4], [0.1, 0.3, 1]])
    inputs = [Step("x", "given", rows, dimensions(3), x), *projections(rows, x, w_q, w_k, w_v)]
    return "Example 2: self-attention of five vectors, with projections", inputs, rows, rows


def _without_projections() -> _Example:
    rows = tuple(f"x{i}" for i in range(1, 6))
    x = np.array(
        [[1, 0.5, 0.2], [0.8, 1.2, 0.3], [0.6, 0.9, 1.1], [1.1, 0.4, 0.7], [0.9, 0.7, 0.8]]
    )
    inputs = [
        Step(name, formula, rows, dimensions(3), x.copy())
        for name, formula in (("x", "given"), ("q", "x"), ("k", "x"), ("v", "x"))
    ]
    return "Example 3: self-attention without projections, q = k = v = x", inputs, rows, rows


def _softmax_alone() -> _Example:
    tokens, queries = tuple(f"z{i}" for i in range(1, 5)), ("z",)
    scores = np.array([[2.1, 0.3, -0.5, 1.8]])
    inputs = [Step("scores", "given", queries, tokens, scores, "Any numbers, large or small.")]
    return "Example 4: a softmax alone", inputs, queries, tokens
