"""Frozen specs: what a part is made from, as plain data that goes to JSON and back.

A `Spec` is a frozen dataclass with a `kind`. Where a field may hold one of several specs (a sum
type, `LayerNormConfig | RMSNormConfig`), JSON carries the kind: `{"kind": "rms_norm", "eps":
1e-6}`, or just `"rms_norm"` where every field has a default. An unknown key, an unknown kind or a
value of the wrong type is an error that names the place and the nearest right name; nothing is ever
dropped in silence.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, ClassVar, Literal, Self, Union

from clearhead.errors import ClearheadError, did_you_mean


class Spec:
    """Base of all specs: a subclass is a frozen dataclass, `class A(Spec, kind="a")`."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if kind:
            cls.kind = kind

    def to_dict(self) -> dict[str, Any]:
        """Plain data: dicts, lists, numbers, strings, booleans, None."""
        return {"kind": self.kind} | {f.name: _plain(getattr(self, f.name)) for f in _fields(self)}

    @classmethod
    def from_dict(cls, data: Any, where: str = "config") -> Self:
        """The spec that `to_dict` described; every key must be a field of it."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise ClearheadError(f"{where} must be a table of settings, not {data!r}.")
        data = dict(data)
        kind = data.pop("kind", cls.kind)
        if kind != cls.kind:
            raise ClearheadError(f'{where} is of kind "{kind}", but "{cls.kind}" belongs here.')
        hints = _hints(cls)
        _refuse_unknown(cls, data, where)
        missing = [f.name for f in _fields(cls) if _needed(f) and f.name not in data]
        if missing:
            raise ClearheadError(f"{where} lacks {_listed(missing)}: set it.")
        values = {key: _read(value, hints[key], f"{where}.{key}") for key, value in data.items()}
        return cls(**values)

    def changed(self, **changes: Any) -> Self:
        """A copy with some fields replaced.

        Values may be plain data, keys may be dotted (`rope.theta`).
        """
        data = {f.name: getattr(self, f.name) for f in _fields(self)}
        _refuse_unknown(
            type(self), [key.partition(".")[0] for key in changes], self.kind or "config"
        )
        hints = _hints(type(self))
        for key, value in sorted(
            changes.items(), key=lambda item: "." in item[0]
        ):  # whole ones first
            name, _, rest = key.partition(".")
            if rest:
                inner = data[name]
                if not isinstance(inner, Spec):
                    raise ClearheadError(
                        f'"{key}": {name} is {inner!r}, which has no setting "{rest}".'
                    )
                data[name] = inner.changed(**{rest: value})
            else:
                data[name] = _read(value, hints[name], f"{self.kind or 'config'}.{name}")
        return type(self).from_dict(data, self.kind or "config")


def _fields(spec: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(spec)


def _hints(cls: Any) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _listed(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _refuse_unknown(cls: Any, keys: Any, where: str) -> None:
    names = [f.name for f in _fields(cls)]
    for key in keys:
        if key not in names:
            raise ClearheadError(
                f'{where} has no setting "{key}".{did_you_mean(key, names)} '
                f"It has: {_listed(names)}."
            )


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _read(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint` says, or an error that names the place."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _read_union(value, typing.get_args(hint), where)
    if origin is Literal:
        return _read_literal(value, typing.get_args(hint), where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ClearheadError(f"{where} must be a list, not {value!r}.")
        item = typing.get_args(hint)[0]
        return tuple(_read(v, item, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(hint, type) and issubclass(hint, Spec):
        return _read_spec(value, _kinds((hint,)), where)
    return _read_scalar(value, hint, where)


def _read_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    optional = type(None) in members
    members = tuple(m for m in members if m is not type(None))
    specs = _kinds(m for m in members if isinstance(m, type) and issubclass(m, Spec))
    said = "none" if value is None else value.lower() if specs and isinstance(value, str) else ""
    if optional and said == "none":
        return None
    if specs and not isinstance(value, (int, float)):
        return _read_spec(value, specs, where)
    for member in members:
        try:
            return _read(value, member, where)
        except ClearheadError as error:
            last = error
    raise last


def _kinds(classes: Any) -> dict[str, type[Spec]]:
    """Kind -> class, where a class without a kind stands for all its subclasses."""
    found: dict[str, type[Spec]] = {}
    for cls in classes:
        if "kind" in vars(cls):
            found[cls.kind] = cls
        found |= _kinds(cls.__subclasses__())
    return found


def _read_spec(value: Any, kinds: dict[str, type[Spec]], where: str) -> Any:
    if isinstance(value, tuple(kinds.values())):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict):
        raise ClearheadError(
            f'{where} must be one of {_listed(kinds)} (a name, or a table with "kind"), '
            f"not {value!r}."
        )
    if "kind" not in value and len(kinds) == 1:
        value = value | {"kind": next(iter(kinds))}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        said = "names no kind" if kind is None else f'is of unknown kind "{kind}"'
        raise ClearheadError(f"{where} {said}.{did_you_mean(kind, kinds)} Known: {_listed(kinds)}.")
    return kinds[kind].from_dict(value, where)


def _read_literal(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value in options and type(value) in {type(option) for option in options}:
        return value
    raise ClearheadError(
        f"{where} is {value!r}.{did_you_mean(value, options)} It may be {_listed(options)}."
    )


def _read_scalar(value: Any, hint: Any, where: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ClearheadError(f"{where} must be a finite number, not {value!r}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ClearheadError(f"{where} must be {_WORDS.get(hint, hint)}, not {value!r}.")


_HINTS: dict[Any, dict[str, Any]] = {}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
