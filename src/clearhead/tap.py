"""Taps: named points inside a model where one may look (`capture`) or change a value (`patch`).

    with capture(net, "blocks.*.self_attn.pattern") as acts:
        net(ids)
    acts["stack.blocks.0.self_attn.pattern"]        # [b, h, q, k]

    with patch(net, {"blocks.3.ffn.hidden": torch.zeros_like}):      # or a tensor in its place
        net(ids)

A name is the path of the module that owns the tap and the tap's attribute. In a glob `*` stands for
one step of the path (or a part of it), `**` for any number of steps, and a glob may leave out the
leading steps. A tap that nobody listens to returns its argument: it is a plain object and not an
nn.Module, because the module call and look-up alone would cost more than one per cent of a decoding
step.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from clearhead.errors import ClearheadError, did_you_mean

Listener = Callable[[Any], Any]


class Tap:
    """One named point: it hands a value to each listener in turn and returns what they leave."""

    __slots__ = ("listeners",)

    changes = 0  # how often somebody came to any of them or left: for who remembers that nobody was
    listeners: tuple[Listener, ...]

    def __init__(self) -> None:
        self.listeners = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        Tap.changes += 1

    def __call__(self, x: Any) -> Any:
        if self.listeners:
            for listener in self.listeners:
                x = listener(x)
        return x


def taps(net: Any) -> dict[str, Tap]:
    """Every tap of a network, or of a Model's, by its name, in the order of the modules."""
    return {
        f"{path}.{attribute}" if path else attribute: tap
        for path, module in _network(net).named_modules()
        for attribute, tap in vars(module).items()
        if isinstance(tap, Tap)
    }


class Activations(dict[str, Any]):
    """What a `capture` saw: name -> the latest value; `history[name]` has those of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[Any]] = {}

    def __missing__(self, name: str) -> Any:
        raise ClearheadError(
            f'Nothing was captured at "{name}".{did_you_mean(name, self)} '
            f"Captured: {', '.join(self) or 'nothing (was the model run inside the with block?)'}."
        )


@contextlib.contextmanager
def capture(net: Any, *globs: str, every: bool = False) -> Iterator[Activations]:
    """Collect the values at all taps that match a glob; the outputs stay the same bit for bit.

    `net` is a network or a Model.
    With `every`, all calls are kept in `.history` (a decoding loop, say), not the latest alone.
    """
    acts = Activations()

    def listener(name: str) -> Listener:
        def listen(x: Any) -> Any:
            acts[name] = x
            if every:
                acts.history.setdefault(name, []).append(x)
            return x

        return listen

    with _listening([(tap, listener(name)) for name, tap in _matching(net, globs)]):
        yield acts


@contextlib.contextmanager
def patch(net: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Replace the value at every tap that matches a glob.

    The new value is what a function makes of the old one, or a tensor of the same shape. `net` is a
    network or a Model.
    """
    _check_changes(changes)

    def listener(name: str, change: Any) -> Listener:
        def listen(x: Any) -> Any:
            given = x.clone()
            new = change(given) if callable(change) else change
            _check_value(name, x, new)
            # Unchanged, it is the same object for those who ask; changed in place, it is not.
            return x if new is given and given.equal(x) else new

        return listen

    pairs = [
        (tap, listener(name, change))
        for glob, change in changes.items()
        for name, tap in _matching(net, (glob,))
    ]
    with _listening(pairs):
        yield


def _check_changes(changes: Any) -> None:
    """Refuse what is no table of functions and tensors, before anything runs."""
    if not isinstance(changes, Mapping):
        raise ClearheadError(
            "patch takes a table of taps and what to do there, "
            f'{{"blocks.3.ffn.hidden": torch.zeros_like}}, not {type(changes).__name__}.'
        )
    for name, change in changes.items():
        if not callable(change) and not _is_tensor(change):
            raise ClearheadError(
                f'The patch at "{name}" must be a function of the value there, for example '
                f"torch.zeros_like, or a tensor in its place, not {type(change).__name__}."
            )


def _check_value(name: str, old: Any, new: Any) -> None:
    """Refuse a value that cannot stand where the old one stood."""
    if not _is_tensor(new) or new.shape != old.shape:
        raise ClearheadError(
            f'The patch at "{name}" must give a tensor of shape {tuple(old.shape)}, not '
            f"{tuple(new.shape) if _is_tensor(new) else repr(new)}."
        )
    if new.dtype != old.dtype or new.device != old.device:
        raise ClearheadError(
            f'The patch at "{name}" must give {old.dtype} on {old.device}, not {new.dtype} on '
            f"{new.device}: use value.to(x)."
        )


def _is_tensor(value: Any) -> bool:
    """Whether it has what a tensor has; torch itself is not imported for this."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "device", "clone"))


def _network(net: Any) -> Any:
    """The module itself, or that of a Model."""
    module = net if hasattr(net, "named_modules") else getattr(net, "net", None)
    if not hasattr(module, "named_modules"):
        raise ClearheadError(
            f"Taps are points inside a network: give a model or its net, not {type(net).__name__}."
        )
    return module


@contextlib.contextmanager
def _listening(pairs: list[tuple[Tap, Listener]]) -> Iterator[None]:
    """Add the listeners, and take away just these at the end, whatever happened in between."""
    added: list[tuple[Tap, Listener]] = []
    try:
        for tap, listener in pairs:
            tap.listeners = (*tap.listeners, listener)
            added.append((tap, listener))
        yield
    finally:
        for tap, listener in added:
            tap.listeners = tuple(other for other in tap.listeners if other is not listener)


def hooked(module: Any) -> bool:
    """Whether somebody waits for a module to be called, by torch's own hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _matching(net: Any, globs: tuple[str, ...]) -> list[tuple[str, Tap]]:
    """The taps that match any of the globs; a glob that matches none is an error."""
    if not globs:
        raise ClearheadError('Name at least one tap, for example "blocks.*.self_attn.pattern".')
    named = taps(net)
    found: dict[str, Tap] = {}
    for glob in globs:
        if not isinstance(glob, str):
            raise ClearheadError(f"A tap is named by a text, not by {type(glob).__name__}.")
        matches = {
            name: tap for name, tap in named.items() if _compiled(glob).fullmatch(f"{name}.")
        }
        if not matches:
            short = {re.sub(r"\d+", "*", name) for name in named}
            raise ClearheadError(
                f'No tap matches "{glob}".{did_you_mean(glob, [*named, *short])} '
                f"There are: {', '.join(sorted(short)) or 'none in this module'}."
            )
        found |= matches
    return list(found.items())


def _compiled(glob: str) -> re.Pattern[str]:
    """What matches a name with a dot behind each of its steps."""
    regex = r"(?:.*\.)?"  # the leading steps may be left out
    for step in glob.split("."):
        any_step = re.escape(step).replace(r"\*", "[^.]*")
        regex += r"(?:[^.]+\.)*" if step == "**" else any_step + r"\."
    return re.compile(regex)
