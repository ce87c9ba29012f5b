"""Chat templates: rendered as transformers renders them, and a hostile one is stopped in time."""

# ruff: noqa: E501 - templates are long lines
from __future__ import annotations

import time

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models

from clearhead.errors import ClearheadError
from clearhead.text import sandbox
from clearhead.text.chat import render_chat
from clearhead.text.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA2 = """{%- if messages[0]['role'] == 'system' -%}
    {%- set rest = messages[1:] -%}{%- set system = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' -%}
{%- else -%}
    {%- set rest = messages -%}{%- set system = '' -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {%- if loop.first -%}{%- set said = system + message.content -%}{%- else -%}{%- set said = message.content -%}{%- endif -%}
    {%- if message.role == 'user' -%}
        {{- bos_token + '[INST] ' + said.strip() + ' [/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}{{- ' ' ~ said | trim ~ ' ' ~ eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}"""

TOOLS = """{%- macro shown(value) -%}{{ value | tojson(indent=2) }}{%- endmacro -%}
{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages | length - 1) - loop.index0 %}
  {%- if message.role == 'user' and ns.last < 0 %}{% set ns.last = index %}{% continue %}{% endif %}
  {%- set ns.seen = ns.seen + [message.role] %}
{%- endfor %}
{%- if tools %}
Tools:
{%- for tool in tools %}
{{ shown(tool) }} {{ tool | tojson }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else (message.content | map(attribute='text') | join('|')) %}
<{{ message.role | upper }} {{ loop.index }}/{{ loop.length }}{{ ' last' if loop.last }}>{{ content | replace('<', '&lt;') | indent(2) }}
{%- for call in message.tool_calls or [] %}
[{{ call.function.name }}({{ call.function.arguments.items() | map('join', '=') | join(', ') }})]
{%- endfor %}
{%- endfor %}
{{ ns.last }} {{ ns.seen | join(',') }} {{ dict(a=1, b='ü') | tojson }} {{ '%s-%d' % ('x', 3) }} {{ '{:>5}'.format('y') }}
{{- ' think' if enable_thinking is defined and enable_thinking }}{{ 'ab' * 3 }}{{ range(4) | list }}
{% for c in 'xyz' %}{% if c == 'y' %}{% break %}{% endif %}{{ c }}{% endfor %}
{%- if add_generation_prompt %}
<ASSISTANT>{% endif %}"""

CONVERSATIONS = [
    [{"role": "user", "content": "Hello <b>you</b> & me"}],
    [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": " What is 2 + 2? "},
        {"role": "assistant", "content": " 4 "},
        {"role": "user", "content": "日本語 😀\n\n  indented"},
    ],
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "int <0>", "é": [1]}}}


def theirs(template: str, messages: list, **extra: object) -> str:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "u": 2}, unk_token="u"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **extra)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "four"])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, TOOLS], ids=["chatml", "llama2", "tools"])
def test_a_conversation_is_written_as_transformers_writes_it(template, messages, prompt):
    ours = render_chat(template, messages, "<s>", "</s>", add_generation_prompt=prompt)
    assert ours == theirs(template, messages, add_generation_prompt=prompt)


def test_tools_parts_and_own_switches_are_passed_on():
    call = {"function": {"name": "add", "arguments": {"a": "1", "b": "2"}}}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}],
        },
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    extra = {"tools": [TOOL], "enable_thinking": True}
    ours = render_chat(TOOLS, messages, "<s>", "</s>", **extra)
    assert ours == theirs(TOOLS, messages, add_generation_prompt=True, **extra)
    assert "[add(a=1, b=2)]" in ours
    assert "one|2" in ours


def test_the_time_is_there():
    year = render_chat("{{ strftime_now('%Y') }}", CONVERSATIONS[0])
    assert year == time.strftime("%Y")


def test_a_tokenizer_uses_its_own_template_and_tokens():
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "u": 2}, unk_token="u"))
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}"
    tokenizer = Tokenizer(
        backend, {"bos": "<s>", "eos": "</s>", "pad": "u"}, chat_template=template
    )
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<s>hi</s>u"
    with pytest.raises(ClearheadError, match="no chat template"):
        Tokenizer(backend).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ("hello", "list of messages"),
        (None, "list of messages"),
        (["hello"], "Message 0"),
        ([{"content": "hi"}], 'Message 0 has no "role"'),
        ([{"role": "user", "content": "a"}, {"role": "", "content": "b"}], "Message 1"),
        ([{"role": "user"}], 'Message 0 .user. has no "content"'),
        ([{"role": "user", "content": 5}], "not 5"),
        ([{"role": "user", "content": "a", "x": object()}], "texts, numbers, lists"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_messages_are_named(messages, words):
    with pytest.raises(ClearheadError, match=words):
        render_chat(CHATML, messages)


def test_what_a_template_refuses_is_said_in_its_words():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ClearheadError, match="Roles must alternate user/assistant"):
        render_chat(LLAMA2, messages, "<s>", "</s>")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "line 1"),
        ("a\n{{ unclosed", "line 2"),
        ("{% include 'x' %}", "fails|cannot"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("x" * 1_000_001, "no model's is that long"),
    ],
)
def test_a_broken_template_is_a_clear_error(template, words):
    with pytest.raises(ClearheadError, match=words):
        render_chat(template, CONVERSATIONS[0])


ESCAPES = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages | attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ dict.__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages.append({'role': 'user'}) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set ns = namespace(_x=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ (joiner | string).__class__ }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_python_is_out_of_reach(template):
    """Refused, or an undefined name that writes nothing; never what was reached for."""
    try:
        out = render_chat(template, CONVERSATIONS[0])
    except ClearheadError as error:
        assert "refused" in str(error) or "fails" in str(error)  # noqa: PT017
    else:
        assert out == ""


BOMBS = {
    "huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "long range": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "text loops": "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% endfor %}{% endfor %}",
    "repeat": "{{ 'x' * 10**10 }}",
    "repeat list": "{{ [0] * 10**10 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "laughs": "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "laughing tables": "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "nested": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "width": "{{ '%999999999d' % 1 }}",
    "given width": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "given format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "filter format": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "replace": "{% set x = 'x' * 999999 %}{{ x | replace('x', x) }}",
    "replace method": "{% set x = 'x' * 999999 %}{{ x.replace('x', x) }}",
    "join": "{% set x = 'x' * 999999 %}{{ range(99999) | map('string') | join(x) }}",
    "join method": "{% set x = 'x' * 999999 %}{{ x.join(x) }}",
    "indent": "{{ ('x\n' * 999999) | indent(99999) }}",
    "tabs": "{{ ('\t' * 999999).expandtabs(99999) }}",
    "slice": "{{ messages | slice(999999999) | list }}",
    "batch": "{{ messages | batch(999999999, 'x') | list }}",
    "json": "{{ range(99999) | list | tojson(indent=99999) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "recursive loop": "{% for x in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "time": "{{ strftime_now('%999999999Y') }}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_stopped_in_time(template, monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 1.5)
    begun = time.monotonic()
    with pytest.raises(ClearheadError, match="chat template"):
        render_chat(template, CONVERSATIONS[0])
    assert time.monotonic() - begun < 6


def test_a_long_conversation_is_no_bomb():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "some words " * 50} for i in range(801)
    ]
    for template in (CHATML, LLAMA2, TOOLS):
        ours = render_chat(template, messages, "<s>", "</s>")
        assert len(ours) > 400_000
