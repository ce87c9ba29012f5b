"""Prompts by example: a task, a few solved cases, and the one to solve.

Brown et al. 2020, figure 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.errors import require


def few_shot(
    examples: Sequence[tuple[str, str]],
    query: str,
    task: str = "",
    between: str = " => ",
    after: str = "\n",
) -> str:
    """The prompt whose continuation answers the query; generate it with stop=after.

        few_shot([("sea", "mer"), ("sky", "ciel")], "sun", "English to French:")

        English to French:
        sea => mer
        sky => ciel
        sun =>

    A blank behind the last `between` is left off: the model writes it, as tokens begin with one.
    """
    require(len(after) > 0, "Examples must stand apart: give `after` at least one character.")
    for pair in examples:
        require(
            isinstance(pair, tuple) and len(pair) == 2,
            f"An example is a question and its answer, ('sea', 'mer'), not {pair!r}.",
        )
    solved = [f"{question}{between}{answer}" for question, answer in examples]
    return after.join([*([task] if task else []), *solved, query + between.rstrip(" ")])
