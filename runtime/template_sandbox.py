"""The Jinja environment of chat templates: what transformers gives them, in its sandbox, and within limits.

A template comes with a model and is not trusted. The sandbox keeps it from Python's objects; the limits keep it from
taking all the time or memory that there is. Every pass of a loop costs a step, every call some, and every text or
list that is put together costs steps by its length.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEPS = 1_000_000
_STEPS_OF_A_CALL = 3
_LENGTH_OF_A_STEP = 64  # characters or items
_LONGEST = STEPS * _LENGTH_OF_A_STEP
_LARGEST_NUMBER = 10_000  # of an argument: widths, counts
_MOST_BITS = 100_000  # of an integer
# A width or precision beyond _LARGEST_NUMBER: of the operator %, and of the method format.
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*\d{5}")
_WIDE_BRACES = re.compile(r"\{[^}]*:[^}]*(\d{5}|\{)")  # or one that is an argument
# What makes as much as a number says.
_WIDENING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDENING_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson")

_steps_left: ContextVar[list[int]] = ContextVar("_steps_left")


@contextmanager
def limited() -> Iterator[None]:
    """Gives the template that is rendered within it its steps; beyond them it raises SecurityError."""
    token = _steps_left.set([STEPS])
    try:
        yield
    finally:
        _steps_left.reset(token)


def chat_environment() -> TemplateEnvironment:
    """A new environment with the filters, globals and tags that transformers has."""
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _limited_filter(name, function) for name, function in environment.filters.items()}
    del environment.globals["lipsum"]  # any number of random paragraphs
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"dict": _Dict(), "namespace": _Namespace}
    return environment


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """An immutable sandbox that counts what a template does. Rendering is for within ``limited()``."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _CountSteps().visit(super()._parse(source, name, filename))
        return template

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if getattr(__obj, "__self__", None) is __self:  # counted and concatenated, which spend for themselves
            return super().call(__context, __obj, *args, **kwargs)
        _spend(_STEPS_OF_A_CALL)
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in _WIDENING_METHODS:
            _check_numbers(args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _spend_for(result)
        return result

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        _spend_for(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(str(value.__self__)):
            raise jinja2.exceptions.SecurityError("a width in a format is too large")
        return wrapped

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items of ``iterable``, each for a step."""
        for item in iterable:
            _spend(1)
            yield item

    def concatenated(self, *parts: object) -> str:
        """What the operator ``~`` makes of ``parts``."""
        texts = [str(part) for part in parts]
        _spend(1 + sum(map(len, texts)) // _LENGTH_OF_A_STEP)
        return "".join(texts)


class _CountSteps(NodeTransformer):
    """Has loops and ``~``, which the sandbox has no hooks for, go through the environment."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802  jinja2's name
        self.generic_visit(node)
        node.iter = self._call("counted", [cast("jinja2.nodes.Expr", node.iter)])
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return self._call("concatenated", node.nodes)

    @staticmethod
    def _call(method: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
        callee = jinja2.nodes.EnvironmentAttribute(method)
        return jinja2.nodes.Call(
            callee, arguments, [], None, None, lineno=arguments[0].lineno, environment=arguments[0].environment
        )


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; for rendering it is what stands in it.

    As in transformers it is the body of a call, so that names that are set in it are not seen after it.
    """

    tags = {"generation"}  # noqa: RUF012  the name that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body)
        return block.set_lineno(line)  # type: ignore[return-value]

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global ``dict``: makes dicts, and has no other attributes than ``fromkeys``."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """The global ``namespace``; names that begin with an underscore can't be set."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that namespace(self=...) works
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have {name!r}: it begins with an underscore")


def _spend(steps: int) -> None:
    left = _steps_left.get()
    left[0] -= steps
    if left[0] < 0:
        raise jinja2.exceptions.SecurityError("the template takes too many steps, or too much memory")


def _spend_for(result: object) -> None:
    if isinstance(result, (str, bytes, list, tuple, dict)):
        _spend(len(result) // _LENGTH_OF_A_STEP)


def _check_numbers(args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER and not isinstance(value, bool):
            raise jinja2.exceptions.SecurityError(f"an argument is {value}; the largest is {_LARGEST_NUMBER}")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError where the result would be too large to make."""
    too_large = False
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            too_large = left.bit_length() * abs(right) > _MOST_BITS
        elif operator == "*":
            too_large = left.bit_length() + right.bit_length() > _MOST_BITS
    elif operator == "*":
        sized, times = (left, right) if isinstance(left, Sized) else (right, left)
        too_large = isinstance(sized, Sized) and isinstance(times, int) and len(sized) * times > _LONGEST
    elif operator == "%" and isinstance(left, str):
        too_large = bool(_WIDE_PERCENT.search(left)) or ("*" in left and _has_large(right))
    if too_large:
        raise jinja2.exceptions.SecurityError(f"the result of {operator} is too large")


def _has_large(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return any(isinstance(v, int) and abs(v) > _LARGEST_NUMBER for v in values)


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with the marks by which jinja2 passes context or environment
    def limited_filter(*args: Any, **kwargs: Any) -> Any:
        passed = 2 if hasattr(function, "jinja_pass_arg") else 1  # then comes the value itself
        _spend(1)
        if name in _WIDENING_FILTERS:
            _check_numbers(args[passed:], kwargs)
        elif name == "format":
            _check_operands("%", str(args[0]), args[1:] or kwargs)
        result = function(*args, **kwargs)
        _spend_for(result)
        return result

    return limited_filter


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
