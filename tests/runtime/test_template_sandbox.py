"""A template that comes with a model gets no further than plain data, and takes no more than its share."""

from __future__ import annotations

import threading
import time

import pytest

from enginewright.plugins.errors import BundleError, RequestError
from enginewright.runtime.chat_template import ChatTemplate

SECONDS = 30  # of this thread, and generous: each of these would run for hours, or for ever


def render(source: str) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


DOUBLED = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = "
ENDLESS = {
    "a huge range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over one list": "{% set l = range(99999) | list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "calls that double": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "a recursive loop": "{% for a in [[[]]] recursive %}{{ loop([a]) }}{% endfor %}",
    "text that doubles (~)": DOUBLED + "n.s ~ n.s %}{% endfor %}",
    "text that doubles (+)": DOUBLED + "n.s + n.s %}{% endfor %}",
    "text that doubles (join)": DOUBLED + "[n.s, n.s] | join %}{% endfor %}",
    "text that doubles (replace)": DOUBLED + "n.s | replace('x', 'xx') %}{% endfor %}",
    "text that doubles (format)": DOUBLED + "'%s%s' % (n.s, n.s) %}{% endfor %}",
    "text that doubles (format method)": DOUBLED + "'{0}{0}'.format(n.s) %}{% endfor %}",
    "a list that doubles": DOUBLED.replace("'x'", "[1]") + "n.s + n.s %}{% endfor %}",
    "repeated text": "{{ 'x' * 10 ** 12 }}",
    "a repeated list": "{{ 10 ** 12 * [1] }}",
    "a large power": "{{ 9 ** 99999999 }}",
    "large products": "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "a wide column": "{{ 'x' | center(10 ** 12) }}",
    "a wide format": "{{ '%999999999999d' % 1 }}",
    "a wide format with a name": "{{ '%(a)-999999999999d' % {'a': 1} }}",
    "a wide precision": "{{ '%.999999999999f' % 1.5 }}",
    "a wide format by argument": "{{ '%*d' % (10 ** 12, 1) }}",
    "a wide format method": "{{ '{:>999999999999}'.format('x') }}",
    "a wide format method by argument": "{{ '{:{}}'.format('x', 10 ** 12) }}",
    "a wide filter": "{{ '%999999999999d' | format(1) }}",
    "a wide filter by argument": "{{ '%*d' | format(10 ** 12, 1) }}",
    "many digits": "{{ 1.5 | round(10 ** 12, 'floor') }}",
    "a wide method": "{{ 'x'.ljust(10 ** 12) }}",
    "many slices": "{{ 'x' | slice(10 ** 12) | list }}",
    "deep indentation": "{{ [1] | tojson(indent=10 ** 12) }}",
    "many paragraphs": "{{ lipsum(10 ** 12) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=list(ENDLESS))
def test_what_would_not_end_is_refused(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(RequestError, match=r"refuses these messages \(tokenizer/chat_template\.jinja, line 1\): ."):
        render(source)
    assert time.thread_time() - start < SECONDS


def test_what_a_long_conversation_needs_is_there() -> None:
    source = "{% for m in messages %}{% for w in m.content.split() %}{{ w ~ ' ' + w | upper }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 50}] * 1000
    text = ChatTemplate(source, {}).render(messages)
    assert text == "word WORD" * 50_000
    assert render("{{ 'in 123456 %s' % 'x' }}{{ '{} 12345'.format(1) }}{{ '%-3d|' % 7 }}") == "in 123456 x1 123457  |"
    assert render("{{ 'a' ~ 123456 ~ 10 ** 9 }}{% for i in [123456] %}{{ i }}{% endfor %}") == "a1234561000000000123456"
    large = "{{ missing | default(86400) }}{{ namespace(n=32768).n }}{{ 'abc' | truncate(20000) }}"
    assert render(large + "{{ '{}'.format(10 ** 6) }}{{ '%s' | format(10 ** 6) }}") == "8640032768abc10000001000000"
    assert render("{{ range(100000) | list | length }}{{ 2 ** 64 }}{{ '=' * 5000 }}{{ [0] * 3 }}").startswith("100000")


def test_conversations_have_their_limits_each() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(5) %}{% endfor %}{% endfor %}ok", {})
    texts: list[str] = []
    work = [threading.Thread(target=lambda: texts.append(template.render([{"role": "a"}]))) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert texts == ["ok"] * 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ ''.format.__globals__.json }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__x = 1 %}{{ n }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context.environment.filters.x() }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{% include 'other' %}",
        "{% import '/etc/passwd' as p %}",
        "{% extends 'x' %}",
    ],
)
def test_the_sandbox_keeps_a_template_in(source: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        render(source)


def test_attributes_of_pythons_objects_look_undefined() -> None:
    assert render("{{ messages.__class__ is defined }}{{ dict.mro is defined }}{{ dict(a=1).a }}") == "FalseFalse1"
    assert render("{{ dict.fromkeys('ab', 0) }}{{ namespace(self=2).self }}") == "{'a': 0, 'b': 0}2"


def test_loops_have_all_that_loops_have() -> None:
    assert render("{% for i in 'abc' %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }}{% endfor %}") == (
        "33False32False31True"
    )
    assert render("{% for i in 'abcd' if i != 'b' %}{{ loop.previtem }}{{ i }}{{ loop.nextitem }};{% endfor %}") == (
        "ac;acd;cd;"
    )
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}") == "a1"
    assert render("{% for i in missing %}{{ i }}{% else %}none{% endfor %}") == "none"
    tree = "{% for n in [[1, [2, [3]]]] recursive %}{% if n is iterable %}({{ loop(n) }}){% else %}{{ n }}{% endif %}"
    assert render(tree + "{% endfor %}") == "(1(2(3)))"


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        ("a\n\n{{ raise_exception('no system turns') }}", 3, "no system turns"),
        ("a\n{{ messages[7].content }}", 2, "has no element 7"),
        ("\n\n\n{{ missing.content }}", 4, "'missing' is undefined"),
        ("{% macro m() %}\n{{ 1 // 0 }}\n{% endmacro %}\n{{ m() }}", 2, "division"),
        ("{% for a in [1] %}\n{{ 'a' ~ missing.b }}\n{% endfor %}", 2, "'missing' is undefined"),
        ("x\n{% for a in 5 %}{% endfor %}", 2, "not iterable"),
    ],
)
def test_the_line_is_named(source: str, line: int, problem: str) -> None:
    with pytest.raises(RequestError, match=rf"chat_template\.jinja, line {line}\): .*{problem}"):
        render(source)


@pytest.mark.parametrize("source", ["{{ x | nothing }}", "{% nothing %}", "{{ 'x }}", "{% if a %}", "{{ " + "(" * 5000])
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(BundleError, match=r"tokenizer/chat_template\.jinja: "):
        render(source)
