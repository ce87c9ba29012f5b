"""Chat templates: a conversation as the one text a model was trained on.

A template is a Jinja program that comes with a model, so it is not trusted: `sandbox` runs it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2

from clearhead.errors import ClearheadError, require
from clearhead.text.sandbox import LONGEST, Budget, Environment, OverBudget

LONGEST_TEMPLATE = 1_000_000


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """The text of a conversation: `[{"role": "user", "content": "Hello"}]`.

    What else a template knows (tools, documents, its own switches) is given by name.
    """
    values = {
        "messages": _checked(messages),
        "bos_token": bos_token or "",
        "eos_token": eos_token or "",
        "add_generation_prompt": add_generation_prompt,
    } | {name: _plain(value) for name, value in extra.items()}
    code = _compiled(template)
    environment = _environment()
    try:
        program = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        pieces, length = [], 0
        for piece in program.generate(values):
            length += len(piece)
            if length > LONGEST:
                raise OverBudget(f"it writes more than {LONGEST:,} characters")
            pieces.append(piece)
        return "".join(pieces)
    except ClearheadError:
        raise
    except Exception as error:
        raise _explained(error) from error


def _explained(error: Exception) -> ClearheadError:
    if isinstance(error, jinja2.exceptions.SecurityError):
        return ClearheadError(
            f"The chat template was refused: it reaches for what it must not ({error}). Do not "
            "trust this model's files."
        )
    if isinstance(error, Refusal):
        return ClearheadError(f"The chat template refuses these messages: {error}")
    if isinstance(error, RecursionError):
        return OverBudget("it calls itself without end")
    return ClearheadError(
        f"The chat template fails with these messages ({type(error).__name__}: {error}): check "
        "that each has what the template asks for."
    )


class Refusal(jinja2.TemplateError):
    """What a template raises itself."""


def _raise_exception(message: Any) -> str:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    require(
        len(format) <= 200 and not re.search(r"%[^A-Za-z%]*\d", format),
        f"The chat template asks for the time in an odd form: {format[:40]!r}.",
    )
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would write < and & for a web page."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> Environment:
    environment = Environment(Budget())
    environment.add_filter("tojson", _tojson)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> CodeType:
    require(
        len(template) <= LONGEST_TEMPLATE,
        f"The chat template has {len(template):,} characters: no model's is that long.",
    )
    try:
        return _environment().compile(template)
    except ClearheadError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ClearheadError(
            f"The chat template has an error in line {error.lineno}: {error.message}. The model's "
            "files are damaged, or the template is for another version."
        ) from error
    except (Exception, MemoryError) as error:
        raise ClearheadError(
            f"The chat template cannot be compiled ({type(error).__name__}: {error})."
        ) from error


def _checked(messages: Any) -> list[dict[str, Any]]:
    """The messages as plain data, or which of them is wrong and why."""
    shape = 'A conversation is a list of messages: [{"role": "user", "content": "Hello"}]'
    require(
        isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)),
        f"{shape}, not {type(messages).__name__}.",
    )
    require(len(messages) > 0, f"There are no messages. {shape}.")
    checked = []
    for place, message in enumerate(messages):
        require(isinstance(message, Mapping), f"Message {place} is {message!r}, no table. {shape}.")
        role = message.get("role")
        require(
            isinstance(role, str) and role != "",
            f'Message {place} has no "role": say who speaks, "system", "user" or "assistant".',
        )
        content = message.get("content")
        silent = content is None and ("tool_calls" in message or "content" in message)
        require(
            silent or isinstance(content, (str, list, tuple)),
            f'Message {place} ({role}) has no "content": it is the text that is said'
            + (f", not {content!r}." if content is not None else "."),
        )
        checked.append(_plain(message))
    return checked


def _plain(value: Any) -> Any:
    """Only JSON's own types: other objects have methods that the sandbox cannot judge."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise ClearheadError(
        f"A chat template is given texts, numbers, lists and tables, not {type(value).__name__}."
    )
