"""A template that comes with a model gets no further than plain data, and takes no more than its share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError
from enginewright.runtime.text import chat_template
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.template_process import TemplateProcess
from tests.runtime.hostile_templates import HOSTILE

SAMPLE = {
    "a macro that calls itself",
    "calls that double",
    "text that doubles (format method)",
    "a wide precision",
    "sum of lists",
    "replace to gigabytes",
    "join, the method",
    "percent of many",
    "shared nesting, printed",
    "compile: 10,000 parentheses",
    "output of 40 MB",
}


def render(source: str) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates have a quarter of a second each."""
    monkeypatch.setattr(chat_template, "template_process", TemplateProcess(cpu_seconds=0.25))


HURRIED = [pytest.param(HOSTILE[k], id=k, marks=() if k in SAMPLE else (pytest.mark.soak,)) for k in HOSTILE]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("source", HURRIED)
def test_what_takes_too_much_is_stopped(source: str) -> None:
    with pytest.raises(EnginewrightError, match=r"tokenizer/chat_template\.jinja"):
        render(source)


def processor_seconds() -> float:
    """Counts this process and of those that it has waited for; what others do on the machine doesn't count."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.mark.soak
@pytest.mark.parametrize("source", HOSTILE.values(), ids=list(HOSTILE))
def test_it_is_stopped_in_time(source: str) -> None:
    start = processor_seconds()
    with pytest.raises(EnginewrightError, match=r"tokenizer/chat_template\.jinja"):
        render(source)
    assert processor_seconds() - start < 6  # two of the template's, and what starts its process


PEAK = """
import re, resource, sys
from enginewright.runtime.shared.errors import EnginewrightError
from MODULE import ChatTemplate
try:
    ChatTemplate(sys.stdin.read(), {}).render([{"role": "user", "content": "x"}])
except EnginewrightError:
    pass
own = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""


@pytest.mark.parametrize("name", ["replace to gigabytes", "join, the method", "percent of many"])
def test_it_is_stopped_before_it_takes_gigabytes(name: str) -> None:
    """Not after: one operation reached 3.6 GB before it was refused."""
    code = PEAK.replace("MODULE", ChatTemplate.__module__)
    done = subprocess.run([sys.executable, "-c", code], input=HOSTILE[name], capture_output=True, text=True, check=True)
    assert 10 < int(done.stdout) < 700  # MB, of the process that serves or of the one that renders


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
