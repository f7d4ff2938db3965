"""Renders chat templates in a separate program: ``template_process`` starts it and exchanges messages through pipes.

A template comes with a model and is not trusted. Jinja's immutable sandbox keeps it from Python's objects, and limits
of this process bound its time and memory. Checks within Jinja couldn't: filters, methods, printing, comparing and
sorting can all use too much.

The program imports nothing else of Enginewright, so that it starts quickly. Its messages:

    request    8 bytes length | marshal of (source, variables); variables None: only compile, and reply what it reads
    reply      8 bytes length | kind | UTF-8; a kind in lower case: the process ends, and another must be started
"""

from __future__ import annotations

import codecs
import html  # noqa: F401  what filters import when they run, and no file can be opened any more
import json
import marshal
import os
import pprint  # noqa: F401
import resource
import signal
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.debug
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_LONGEST_WORD = 64
_KEPT_PAGES = 16 << 10  # resident, beyond which the process ends after its reply and another is started

READY = TEXT = b"T"
SYNTAX = b"S"  # "LINE message"
UNUSABLE = b"U"  # a template that can't be compiled: "message"
REFUSED = b"R"  # "LINE message"; line 0 where it isn't known

# All that plain data in a sandbox can raise: the filters and methods that a template calls are Python's.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RuntimeError,
    MemoryError,
    StopIteration,
    OSError,  # no file can be opened, not even one of Python's
    ImportError,
)


def serve(cpu_seconds: float, memory: float) -> None:
    """Answers requests on stdin until the parent closes it or ends.

    Args:
        cpu_seconds: processor time limit of a request; SIGPROF ends the process of a longer one.
        memory: limit of address space in bytes, besides that in use at the start.
    """
    environment = chat_environment()
    templates: dict[str, jinja2.Template] = {}
    for codec in ("ascii", "latin-1", "utf-8", "utf-16", "utf-32", "unicode-escape"):
        codecs.lookup(codec)  # which imports it
    time.localtime()  # reads the time zone's file
    memory_use = os.open("/proc/self/statm", os.O_RDONLY)
    used = int(os.pread(memory_use, 100, 0).split()[0]) * resource.getpagesize()
    for which, most in (
        (resource.RLIMIT_AS, used + int(memory)),
        (resource.RLIMIT_NOFILE, memory_use + 1),  # those that are open
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (most, most))
    _write(READY, b"")
    last = False
    while not last and (request := _read()):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        kind, text = answer(environment, templates, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        last = int(os.pread(memory_use, 100, 0).split()[1]) > _KEPT_PAGES
        _write(kind.lower() if last else kind, text)


def answer(
    environment: jinja2.Environment, templates: dict[str, jinja2.Template], request: bytearray
) -> tuple[bytes, bytes]:
    """Returns the reply to a request. ``templates`` caches compiled templates by their source."""
    try:
        source, variables = marshal.loads(request)  # noqa: S302  the parent made it, of plain data
    except MemoryError:
        return REFUSED, b"0 the messages take too much memory"
    try:
        if source not in templates:
            if len(templates) >= 16:
                templates.clear()
            templates[source] = environment.from_string(source)
    except jinja2.TemplateSyntaxError as e:
        return SYNTAX, _utf8(f"{e.lineno} {e.message}")
    except (*_TEMPLATE_ERRORS, SyntaxError) as e:
        return UNUSABLE, _utf8(_message(e))
    try:
        return TEXT, _utf8(reads(environment, source) if variables is None else templates[source].render(variables))
    except _TEMPLATE_ERRORS as e:
        # jinja2 puts the template's own lines into the traceback.
        frames = traceback.walk_tb(e.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
        return REFUSED, _utf8(f"{lines[-1] if lines else 0} {_message(e)}")


def reads(environment: jinja2.Environment, source: str) -> str:
    """Returns the names that a template reads, as JSON.

    These are its ``variables``, all its short ``words`` and names of fields, and the ``roles`` that it compares with a
    message's role.
    """
    tree = environment.parse(source)
    roles: set[str] = set()
    for one in tree.find_all(jinja2.nodes.Compare):
        if any(_of_role(node) for node in one.find_all((jinja2.nodes.Name, jinja2.nodes.Getattr, jinja2.nodes.Const))):
            roles |= _words(one)
    words = _words(tree) | {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    variables = jinja2.meta.find_undeclared_variables(tree)
    read = {"variables": variables, "words": words, "roles": roles - {"role"}}
    return json.dumps({name: sorted(values) for name, values in read.items()})


def _words(node: jinja2.nodes.Node) -> set[str]:
    values = (one.value for one in node.find_all(jinja2.nodes.Const))
    return {value for value in values if isinstance(value, str) and 0 < len(value) <= _LONGEST_WORD}


def _of_role(node: jinja2.nodes.Expr) -> bool:
    name = getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "value", None)
    return isinstance(name, str) and "role" in name and len(name) < 12


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    return str(error) or type(error).__name__


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _read() -> bytearray:
    """Reads and returns the next request; empty at the end."""
    header = _read_all(8)
    return _read_all(int.from_bytes(header, "little")) if len(header) == 8 else header[:0]


def _read_all(size: int) -> bytearray:
    data = bytearray()
    while len(data) < size and (piece := os.read(0, min(size - len(data), 1 << 20))):
        data += piece
    return data


def _write(kind: bytes, text: bytes) -> None:
    for part in ((len(text) + 1).to_bytes(8, "little") + kind, text):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(1, rest) :]


def chat_environment() -> jinja2.Environment:
    """Returns a new environment with transformers' filters, globals and tags."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]  # any number of random paragraphs
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"dict": _Dict(), "namespace": _Namespace}
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's words for training. Rendering writes its body only.

    The body is that of a call, as in transformers, so names that it sets are unknown after it.
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


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats a value as JSON. Jinja's own filter would escape HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
