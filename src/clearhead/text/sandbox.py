"""Where a template that nobody vouches for is run: Jinja's sandbox, with a budget.

The sandbox keeps a template from Python's insides. It does not keep it from running for ever or
from filling the memory, so here every turn of a loop and every call is a step of a budget, and
whatever can make much of little (`*`, `~`, replace, lists of lists of lists) is asked for its size
before or right behind. The limits are many times what any model's template needs.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from clearhead.errors import ClearheadError

MOST_STEPS = 500_000
MOST_SECONDS = 5.0
LONGEST = 10_000_000
"""Characters in a text, and items in a list, with all that is inside it."""
LARGEST = 100_000
"""A number that is given to a function: a width, a count, the end of a range."""
DEEPEST = 100

# Functions whose result can be as long as their arguments' lengths multiplied.
EXPANDING = {"replace", "join", "indent", "expandtabs", "wordwrap", "format", "format_map"} | {
    *("center", "ljust", "rjust", "zfill", "tojson", "batch", "slice", "translate", "xmlattr"),
    *("urlize", "pprint"),
}
WIDE = re.compile(r"\d{5}")


class OverBudget(ClearheadError):
    """A template did more than any honest one does."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The chat template was stopped: {what}. No model needs that; do not trust its files."
        )


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self.steps, self.end = MOST_STEPS, time.monotonic() + MOST_SECONDS

    def step(self) -> None:
        """One turn of a loop, one call."""
        self.steps -= 1
        if self.steps < 0:
            raise OverBudget(f"it takes more than {MOST_STEPS:,} steps")
        if self.steps % 256 == 0 and time.monotonic() > self.end:
            raise OverBudget(f"it takes longer than {MOST_SECONDS:.0f} seconds")

    def turns(self, items: Any) -> Turns:
        """The same items, each a step."""
        return Turns(items, self)


class Turns:
    """An iterable that counts; it has a length if its items have one."""

    def __init__(self, items: Iterable[Any], budget: Budget) -> None:
        self._items, self._budget = items, budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def weigh(value: Any) -> Any:
    """The value, if it is not too large when written out."""
    if _weight(value, {}, 0) > LONGEST:
        raise OverBudget(f"it makes a text or list of more than {LONGEST:,} characters or items")
    return value


def _weight(value: Any, known: dict[int, int], depth: int) -> int:
    """Characters and items with all that is inside, each object weighed once but counted as often
    as it occurs.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if id(value) in known:
        return known[id(value)]
    if depth > DEEPEST:
        raise OverBudget(f"it makes lists nested more than {DEEPEST} deep")
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = (part for item in value.items() for part in item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, Namespace):
        inner = [getattr(value, "_Namespace__attrs", ())]
    total = 1
    for part in inner:  # texts first: most lists are of these
        total += len(part) if type(part) is str else _weight(part, known, depth + 1)
    known[id(value)] = total
    return total


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, on a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, budget: Budget) -> None:
        # Not optimised: constants would be worked out while compiling, before anything is counted.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        self.budget = budget
        self.filters = {name: self._guarded(name, filter) for name, filter in self.filters.items()}
        self.filters |= {"_turns": budget.turns, "_weigh": weigh}
        del self.globals["lipsum"]
        self.globals |= {"dict": Dictionaries(), "namespace": PublicNamespace}

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """One more filter, guarded like the others."""
        self.filters[name] = self._guarded(name, filter)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The program, with a count in every loop and a look at everything it puts together."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered("_turns", loop.iter)
        _Weighing().visit(tree)
        return tree

    def call(  # the names are Jinja's: a template may have an argument called "self"
        __self, __context: Any, __obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Every call that a template makes comes through here."""
        name = getattr(__obj, "__name__", "")
        value = getattr(__obj, "__self__", "")
        __self._charge(name, value if isinstance(value, (str, bytes)) else "", args, kwargs)
        return weigh(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """`"...".format`, with no absurd widths in the text itself."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE.search(str(getattr(value, "__self__", ""))):
            raise OverBudget("it formats a text to an absurd width")
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, which can make much of little."""
        if operator == "**":
            if not (abs(left) <= LARGEST and abs(right) <= 64):
                raise OverBudget("it raises a number to an absurd power")
        elif operator == "*" and not (isinstance(left, float) or isinstance(right, float)):
            size = [_weight(side, {}, 0) if _sized(side) else abs(side) for side in (left, right)]
            if _sized(left) or _sized(right):
                if size[0] * size[1] > LONGEST:
                    raise OverBudget("it repeats a text or list absurdly often")
            elif max(size).bit_length() > 4096:
                raise OverBudget("it makes an absurdly large number")
        elif operator == "%" and isinstance(left, str):
            given = right if isinstance(right, tuple) else (right,)
            self._charge("format", left, given, {})
        return weigh(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        # What comes first besides the value: the context or environment, where the filter asks.
        skip = 1 if hasattr(filter, "jinja_pass_arg") else 0

        @functools.wraps(filter)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            before, value, rest = args[:skip], args[skip], args[skip + 1 :]
            if isinstance(value, Iterator) or name == "join":
                value = list(self.budget.turns(value))
            self._charge(name, value, rest, kwargs)
            result = filter(*before, value, *rest, **kwargs)
            return self.budget.turns(result) if isinstance(result, Iterator) else weigh(result)

        return guarded

    def _charge(
        self, name: str, value: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """A step, and the size of what is given to a function."""
        self.budget.step()
        given = [*args, *kwargs.values()]
        for number in given:
            if isinstance(number, (int, float)) and abs(number) > LARGEST:
                raise OverBudget(f"it gives {name or 'a function'} a number over {LARGEST:,}")
        if name in EXPANDING:
            if name == "format" and isinstance(value, str) and WIDE.search(value):
                raise OverBudget("it formats a text to an absurd width")
            sizes = [
                abs(int(a)) if isinstance(a, (int, float)) else _weight(a, {}, 0) for a in given
            ]
            if _weight(value, {}, 0) * max([1, *sizes]) > 10 * LONGEST:
                raise OverBudget(f"its {name} would make an absurdly long text")


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only passed."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Any) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Dictionaries:
    """`dict(...)` without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class PublicNamespace(Namespace):
    """`namespace(...)` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, weigh(value))


class _Weighing(jinja2.visitor.NodeTransformer):
    """Puts a look at its size around everything that is put together of parts."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _filtered("_weigh", self.generic_visit(node))

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filtered("_weigh", node) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Dict = visit_Tuple = _literal


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
