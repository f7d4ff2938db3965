"""Three pages of docs/use are made from the code: the command's options, the server's protocols, vLLM's arguments.

After a change of a help text, a field, an endpoint, a metric or a rule: ``pytest tests/test_reference_pages.py
--update-golden``.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

from enginewright.optimizer.cli.app import app
from enginewright.runtime.requests.vllm_names import (
    OF_CHAT,
    OF_GENERATE,
    OF_LLM,
    OF_SAMPLING,
    Idle,
    Only,
    Renamed,
    Rule,
)
from enginewright.runtime.server.app import NOT_SERVED, make_app
from enginewright.runtime.server.http.errors import OPENAI, WORDS
from enginewright.runtime.server.http.fields import HINTS, Fields
from enginewright.runtime.server.http.front import Front
from enginewright.runtime.server.http.metrics import Metrics
from enginewright.runtime.server.http.options import DECLARED, ServerOptions
from enginewright.runtime.server.protocols.anthropic import MessagesBody
from enginewright.runtime.server.protocols.bodies import RENAMED, Body, ChatBody, CompletionBody
from enginewright.runtime.server.protocols.ollama import GenerateBody, OllamaChatBody
from enginewright.runtime.server.protocols.pooled_bodies import POOLED
from enginewright.runtime.server.protocols.response_items import ResponsesBody

MADE = "Made from the code by `tests/test_reference_pages.py`."
KINDS = {"str": "TEXT", "path": "PATH", "int": "INTEGER", "int range": "INTEGER", "float": "NUMBER"}
SHARED = 2
"""Commands that must have an option or argument with one text before the page describes it only once."""
EXTRA = re.compile(
    r" (?:Comparing with a source(?: model)? needs|Needs) the extra: pip install 'enginewright\[export\]'\."
)
"""A sentence of the help that the page has once."""
LONGEST = 28
"""Names in a sentence; more of them are in a block."""


def code(names: Iterable[str]) -> str:
    """Names in code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def choice(values: Iterable[object]) -> str:
    """Values in code: "`1`, `2` or `3`"."""
    *others, last = dict.fromkeys(f"`{value!r}`" for value in values)
    return f"{', '.join(others)} or {last}" if others else last


def block(names: Iterable[str]) -> list[str]:
    """Many names in a block of code."""
    return ["```text", *textwrap.wrap(", ".join(names), 110, break_on_hyphens=False), "```"]


def plain(text: str) -> str:
    """A docstring or help text as one line of Markdown."""
    return " ".join(text.replace("\\[", "[").replace("``", "`").split())


def advice(hint: str) -> str:
    """The hint of a refusal; the obvious one, to leave the field out, isn't repeated for each."""
    return "" if re.fullmatch("Leave (it|them) out.?", hint) else sentence(hint)


def sentence(text: str) -> str:
    """A text that ends with a full stop."""
    return text if text.endswith(".") else f"{text}."


# The command


def names_of(option: Any) -> str:
    """The names of an option, with its value; of an argument its name alone."""
    if option.param_type_name == "argument":
        return f"`{option.metavar or option.name.upper()}`"
    names = sorted((*option.opts, *option.secondary_opts), key=len)
    value = "" if option.is_flag else f"={option.metavar or KINDS[option.type.name]}"
    return f"`{', '.join(names)}{value}`"


def short_name(option: Any) -> str:
    """The longest name of an option, without its value; of an argument its name."""
    return names_of(option).strip("`") if option.param_type_name == "argument" else max(option.opts, key=len)


def option_lines(options: Iterable[Any]) -> Iterator[str]:
    """An item of a list for each option: its names and its help."""
    for option in options:
        yield f"- {names_of(option)}: {plain(option.help or '')}"


def command_page() -> str:
    """docs/use/command-reference.md."""
    commands = dict(sorted(typer.main.get_command(app).commands.items()))  # type: ignore[attr-defined]
    options = {name: [p for p in one.params if p.name != "help"] for name, one in commands.items()}
    texts = {(names_of(p), p.help): p for params in options.values() for p in params}
    counts = Counter((names_of(p), p.help) for params in options.values() for p in params)
    usual = {name: max((key for key in texts if key[0] == name), key=counts.__getitem__) for name, _ in texts}
    shared = {key: texts[key] for key in usual.values() if counts[key] >= SHARED}
    everywhere = set.intersection(*({short_name(p) for p in params} for params in options.values()))
    lines = [
        "# Command reference",
        "",
        "This page lists every argument and option of `optimize`, as `optimize COMMAND --help` prints them."
        " Commands that read a source model need the [extra](install.md#extras) `export`."
        " `tests/test_reference_pages.py` generates the page from the code.",
        "",
        "## Arguments and options of several commands",
        "",
        *option_lines(shared.values()),
        "",
        f"Every command has {code(sorted(everywhere))}, which the lists below leave out.",
    ]
    listed: dict[frozenset[str], str] = {}  # the shared options -> the first command with them
    for name, command in commands.items():
        others = [p for p in options[name] if (names_of(p), p.help) not in shared]
        theirs = [short_name(p) for p in options[name] if (names_of(p), p.help) in shared]
        same = [option for option in theirs if option not in everywhere]
        about = EXTRA.sub("", plain(command.help or ""))
        lines += ["", f"## optimize {name}", "", about, "", *option_lines(others)]
        if len(same) > SHARED and (twin := listed.setdefault(frozenset(same), name)) != name:
            lines += ["", f"Shared options: those of [{twin}](#optimize-{twin})."]
        elif len(same) > LONGEST:
            lines += ["", "Shared options:", "", *block(same)]
        elif same:
            lines += ["", f"Shared options: {code(same)}."]
    return "\n".join(lines) + "\n"


# The server


def rule_lines(rules: Mapping[str, Only]) -> Iterator[str]:
    """The refused fields: an item of a list for each hint, and an item for the fields without one."""
    by_hint: dict[str, list[str]] = {}
    for name, rule in rules.items():
        by_hint.setdefault(advice(rule.hint), []).append(name)
    without = by_hint.pop("", [])
    for hint, names in by_hint.items():
        yield f"- {code(names)}: {hint}"
    if without:
        yield f"- {code(without)}: There is no replacement."


def fields_of(kinds: Iterable[type[Fields]]) -> list[str]:
    """The names of the fields that bodies have, in the order of the code."""
    return list(dict.fromkeys(name for kind in kinds for name in kind.__struct_fields__))


def protocol_lines(title: str, kinds: tuple[type[Fields], ...]) -> Iterator[str]:
    """The fields of a protocol: those accepted, refused and ignored."""
    refused = {name: rule for kind in kinds for name, rule in kind.refused.items()}
    ignored = sorted(set().union(*(kind.harmless for kind in kinds)) - HINTS)
    yield from ("", f"### {title}", "", "Accepted:", "", *block(fields_of(kinds)), "")
    yield from ("Refused:", "", *rule_lines(refused))
    if ignored:
        yield from ("", "Ignored:", "", *block(ignored))


def endpoint_lines() -> Iterator[str]:
    """An item of a list for the endpoints of each text."""
    front = Front(ServerOptions(models={"m": "m.bundle"}), models={})
    texts: dict[str, list[str]] = {}
    for route in make_app(front)._app.routes:
        if route.path not in NOT_SERVED:
            methods = ", ".join(sorted((route.methods or set()) - {"HEAD"}))
            text = sentence(plain((route.endpoint.__doc__ or "").split("\n\n")[0]))
            texts.setdefault(text, []).append(f"{methods} {route.path.replace(':path', '')}")
    for text, names in texts.items():
        yield f"- {code(names)}: {text}"


def metric_lines() -> Iterator[str]:
    """An item of a list for each metric, with both of its names."""
    texts: dict[str, list[str]] = {}
    page = Metrics({}, ServerOptions(models={}, tenant_metrics=1)).text().decode()
    for name, text in re.findall(r"^# HELP (\S+) (.*)$", page, re.M):
        if not name.startswith("process_"):
            texts.setdefault(text, []).append(name)
    yield "- `process_...`: Memory, CPU time and open files of the server's process."
    for text, names in texts.items():
        yield f"- {code(names)}: {sentence(text)}"


def server_page() -> str:
    """docs/use/server-reference.md."""
    both = fields_of([Body])
    chat, completions = ([n for n in kind.__struct_fields__ if n not in both] for kind in (ChatBody, CompletionBody))
    names_by_field: dict[str, list[str]] = {}
    for name, field in {**RENAMED, **ChatBody.renamed}.items():
        names_by_field.setdefault(field, []).append(name)
    defaults = ServerOptions(models={})
    lines = [
        "# Server reference",
        "",
        "Every endpoint, field, option, metric and error code of `optimize serve`."
        f" [The server's API](server-api.md) explains them. {MADE}",
        "",
        "## Endpoints",
        "",
        *endpoint_lines(),
        "",
        "## Fields of a body",
        "",
        "The server answers 400 to a request with a refused or unknown field, and the message has the reason. A refused"
        " field is accepted if its value is null, empty or has no effect.",
        "",
        "### Chat completions and completions",
        "",
        "Both accept these fields. Sampling parameters mean the same as in [SamplingParams](python-reference.md).",
        "",
        *block(both),
        "",
        "Further fields of chat completions:",
        "",
        *block(chat),
        "",
        "Further fields of completions:",
        "",
        *block(completions),
        "",
        "Other servers' names of these fields:",
        "",
        *(f"- `{field}`: {code(names)}" for field, names in names_by_field.items()),
        "",
        "Refused:",
        "",
        *rule_lines(Body.refused),
        "",
        "Ignored:",
        "",
        *block(sorted(Body.harmless - HINTS)),
        *protocol_lines("Responses", (ResponsesBody,)),
        *protocol_lines("Messages", (MessagesBody,)),
        *protocol_lines("Ollama", (OllamaChatBody, GenerateBody)),
        *protocol_lines("Embeddings, scores and classes", tuple(dict.fromkeys(POOLED.values()))),
        "",
        "### Ignored by every endpoint",
        "",
        *block(sorted(HINTS)),
        "",
        "## Keys of a configuration file",
        "",
        "A file for `optimize serve --config` has these keys:",
        "",
    ]
    for name, option in DECLARED.items():
        if not option.flags:
            value = getattr(defaults, name)
            shown = "" if value in ({}, [], None) else f" Default: `{value!r}`."
            lines.append(f"- `{name}`: {sentence(option.help)}{shown}")
    lines += ["", "It also has these options of [optimize serve](command-reference.md#optimize-serve):", ""]
    lines += block(name for name, option in DECLARED.items() if option.flags)
    lines += ["", "## Metrics", "", *metric_lines(), "", "## Error codes", ""]
    lines += [
        "Errors of OpenAI's protocols can have these values of `code`. The messages of errors are in"
        " [errors.py](../../runtime/server/http/errors.py).",
        "",
    ]
    with_code = [words for rows in WORDS.values() if (words := rows[OPENAI]).code]
    assert all(words.means for words in with_code)
    lines += [f"- `{words.code}`: {words.means}." for words in with_code]
    return "\n".join(lines) + "\n"


# vLLM


def vllm_lines(rules: Mapping[str, Rule]) -> Iterator[str]:
    """An item of a list for the arguments of each rule."""
    by_rule: dict[str, list[str]] = {}
    for name, rule in rules.items():
        match rule:
            case Renamed():
                text = f"another name of `{rule.ours}`."
            case Idle():
                text = ""
            case Only():
                text = f"must be {choice(rule.values)}. {advice(rule.hint)}".rstrip()
        by_rule.setdefault(text, []).append(name)
    for text, names in by_rule.items():
        if text:
            yield f"- {code(names)}: {text}"
    if "" in by_rule:
        yield from ("", "Accepted and ignored, because no result depends on these arguments:", "", *block(by_rule[""]))


def vllm_page() -> str:
    """docs/use/vllm-reference.md."""
    calls = {**OF_GENERATE, **OF_CHAT}
    lines = [
        "# vLLM's arguments",
        "",
        "Enginewright accepts these arguments of vLLM. [Coming from another library](migration.md) has examples."
        f" {MADE}",
        "",
        "Any other value or argument raises a `RequestError`, whose message has the reason.",
    ]
    for title, rules in (("LLM", OF_LLM), ("generate, chat, beam_search", calls), ("SamplingParams", OF_SAMPLING)):
        lines += ["", f"## {title}", "", *vllm_lines(rules)]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "command-reference.md": command_page,
    "server-reference.md": server_page,
    "vllm-reference.md": vllm_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str, repository: Path, pytestconfig: pytest.Config) -> None:
    page, text = repository / "docs" / "use" / name, PAGES[name]()
    if pytestconfig.getoption("--update-golden"):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, "make it anew: --update-golden"


def test_the_pages_have_every_name() -> None:
    commands, server, vllm = (make() for make in PAGES.values())
    assert "`-o, --output=PATH`" in commands and "## optimize serve\n" in commands
    for name in (*ServerOptions.__struct_fields__, *ChatBody.__struct_fields__, *Body.refused, *HINTS):
        assert re.search(rf"\b{name}\b", server), name
    for name in {**OF_LLM, **OF_GENERATE, **OF_CHAT, **OF_SAMPLING}:
        assert re.search(rf"\b{name}\b", vllm), name
