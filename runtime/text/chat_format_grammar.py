"""Writes the grammar that an answer with tool calls, or behind reasoning, is held to: Lark, in llguidance's dialect.

Calls are written as the model's chat template writes them. A marker that is a token of the vocabulary is that token,
``<[151657]>``; the rest is text. Parameters come in the order of their schema, as in JSON that llguidance writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..shared.errors import RequestError, shown
from ..shared.json_document import JSON_GUIDANCE
from ..shared.json_schema import hold_schema
from ..shared.json_schema_keywords import KEYWORDS
from .chat_format_parser import Vocabulary, parameter_types
from .chat_format_table import (
    Calls,
    GemmaCall,
    HarmonyCall,
    JsonCall,
    NamedCall,
    PythonCall,
    Reasoning,
    Spelling,
    TaggedCall,
)

MOST_TOOLS = 1024
_LONGEST_NAME = 256
_META = frozenset(r"\.+*?()|[]{}^$#&-~/" + '"')
_NAMED = re.compile(r"[^\s\"'<>={}()\[\]|｜:,\\\x00-\x1f]+")
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_GAP = r"/[ \t\r\n]{0,4}/"
_ANY = "/(?s:.*)/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
_INTEGER = "/-?(0|[1-9][0-9]*)/"
_DEPTH = 16
_HELD = frozenset(("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf")) | frozenset(
    ("$ref", "$defs", "definitions", "additionalProperties", "nullable")
)
"""Keywords that are held in notations other than JSON."""

_Offered = tuple[str, dict[str, Any], bool]
"""A tool: its name, the schema of its arguments, and ``strict``."""


def offered_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[_Offered]:
    """Name, schema of the arguments and ``strict`` of each tool.

    Raises RequestError for a tool without a name, two of one name, and more than 1,024.
    """
    found: dict[str, _Offered] = {}
    tools = tools or ()
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"tools: {len(tools):,} are offered", hint=f"Offer {MOST_TOOLS:,} at most.")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(f"tools[{i}]: it has no name", hint='Tools look like {"type": "function", ...}.')
        if name in found:
            raise RequestError(f"tools[{i}]: there are two tools {shown(name)}", hint="Give each a name of its own.")
        schema = function.get("parameters", function.get("input_schema"))
        if schema is None:
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(schema, Mapping):
            raise RequestError(f"tools: {name}: parameters isn't a JSON schema", hint="Pass an object.")
        found[name] = name, dict(schema), function.get("strict") is True
    return list(found.values())


def begins_with_token(text: str, tokenizer: Vocabulary) -> bool:
    """Returns True if a text begins with a token that isn't a part of text to llguidance."""
    return any(text.startswith(token) and is_token(token, tokenizer) for token in tokenizer.added_tokens)


def is_token(text: str, tokenizer: Vocabulary) -> bool:
    """Returns True if a text is a token that isn't a part of text to llguidance.

    It takes special tokens so, and of the others those in angle brackets.
    """
    index = tokenizer.added_tokens.get(text)
    return (
        bool(text)
        and index is not None
        and (index in tokenizer.special_ids or re.fullmatch(r"<[^<>\s]+>", text) is not None)
    )


def _no_budget(why: str) -> RequestError:
    hint = "Leave it out, and limit the whole answer."
    return RequestError(f"thinking_token_budget: this model's reasoning can't be limited: {why}", hint=hint)


def write_grammar(
    spelling: Spelling,
    tokenizer: Vocabulary,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    choice: str = "auto",
    strict: bool | None = None,
    parallel: bool = True,
    schema: Mapping[str, Any] | None = None,
    reasoning_open: bool = False,
    reasoning_budget: int | None = None,
    ignored: set[str] | None = None,
) -> str | None:
    """See ``ChatFormat.grammar``."""
    offered = offered_tools(tools)
    if choice not in ("auto", "required", "none"):
        parallel = False  # it is called once
        offered = [one for one in offered if one[0] == choice]
        if not offered:
            raise RequestError(f"tool_choice: there is no tool {shown(choice)}", hint="Name one that is offered.")
    if choice == "none":
        offered = []
    elif choice != "auto" and not offered:
        raise RequestError(f"tool_choice: {choice}: no tools are offered", hint="Pass tools.")
    held = choice != "auto" or strict is True or not parallel or (strict is None and any(one[2] for one in offered))
    budget = None if spelling.reasoning is None else reasoning_budget
    free = schema is None and not (offered and held)
    if free and budget is None:
        return None
    if offered and spelling.calls is None:
        raise RequestError(
            "tool_choice: this model's chat template has no form of tool calls that is known",
            hint="Leave tool_choice and strict out, or use a model that calls tools.",
        )
    if strict is False:
        offered = [(name, {"type": "object"}, False) for name, _, _ in offered]
    ignored = set() if ignored is None else ignored
    writer = _Writer(spelling, tokenizer, exact=strict is True, ignored=ignored)
    offered = [
        (name, _held(_object(one), f"tools: {name}", "tools", f"tool_{i}_", ignored), is_strict)
        for i, (name, one, is_strict) in enumerate(offered)
    ]
    if schema is not None:
        schema = _held(schema, "response_format", "schema", "answer_", ignored)
    return writer.written(
        offered,
        schema,
        required=choice not in ("auto", "none"),
        parallel=parallel,
        opened=reasoning_open,
        budget=budget,
    )


class _Writer:
    """Writes one grammar.

    Args:
        exact: a keyword that can't be held is an error.
        ignored: gets the names of those that can't be held.
    """

    def __init__(self, spelling: Spelling, tokenizer: Vocabulary, *, exact: bool, ignored: set[str]) -> None:
        self._spelling = spelling
        self._tokens = {text: index for text, index in tokenizer.added_tokens.items() if is_token(text, tokenizer)}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: dict[str, str] = {}
        self._exact, self.ignored = exact, ignored

    def written(
        self,
        tools: Sequence[_Offered],
        schema: Mapping[str, Any] | None,
        *,
        required: bool,
        parallel: bool,
        opened: bool,
        budget: int | None = None,
    ) -> str:
        calls = self._spelling.calls
        if calls is not None and isinstance(calls.call, HarmonyCall):
            if budget is not None:
                raise _no_budget("it has channels")
            self._rules["start"] = self._harmony(calls.call, tools, schema, required=required)
        else:
            if schema is not None:
                body = f"%json {_text(schema)}"
                if tools:
                    assert calls is not None
                    body = self._answer_or_calls(calls, tools, schema, parallel=parallel, required=required)
            elif not tools:
                body = self._rule("answer", _ANY)
            elif required:
                assert calls is not None
                body = self._called(calls, tools, parallel=parallel)
            else:
                assert calls is not None
                body = self._maybe_called(calls, tools, parallel=parallel)
            held = required or schema is not None
            ahead = self._reasoning(
                self._spelling.reasoning, opened=opened, held=held, calls=schema is None, budget=budget
            )
            self._rules["start"] = f"{ahead}{body}"
        return "%llguidance {}\n" + "\n".join(f"{name}: {rule}" for name, rule in self._rules.items()) + "\n"

    def _rule(self, name: str, text: str) -> str:
        self._rules[name] = text
        return name

    # Texts and tokens

    def _split(self, text: str) -> list[str | int]:
        """A text's parts: texts, and ids of tokens."""
        found: list[str | int] = []
        at = 0
        for one in self._pattern.finditer(text):
            found += [text[at : one.start()], self._tokens[one[0]]]
            at = one.end()
        return [part for part in (*found, text[at:]) if part != ""]

    def _as_written(self, text: str) -> str:
        """A text that stands there, as part of a rule."""
        return " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in self._split(text))

    def _free_until(self, name: str, end: str, inner: str = "(?s:.*)") -> str:
        """Any text, and its end."""
        first, *rest = self._split(end)
        if isinstance(first, int):
            return f"{self._rule(name, f'/{inner}/')} {self._as_written(end)}"
        after = " ".join(f"<[{part}]>" if isinstance(part, int) else _quoted(part) for part in rest)
        lazy = "[lazy]" if not rest else ""  # a token ends it, where one follows
        self._rules[f"{name}{lazy}"] = f"/{inner}{_escaped(first)}/"
        return f"{name} {after}".strip()

    def _reasoning(
        self, reasoning: Reasoning | None, *, opened: bool, held: bool, calls: bool, budget: int | None
    ) -> str:
        """The reasoning that may come first; space behind it isn't part of what is ``held``."""
        if reasoning is None:
            return ""
        thought = self._thought(reasoning.end.strip(), budget)
        behind = f"{_GAP} " if held else ""
        if opened:
            return f"{thought} {behind}"
        begin = self._as_written(reasoning.begin.strip())
        if budget is not None and not begin.startswith("<["):
            raise _no_budget("its beginning isn't a token")  # text behind the reasoning may have it
        return f"( {_GAP} {begin} {thought} {behind if not calls else ''})? {behind if calls else ''}"

    def _thought(self, end: str, budget: int | None) -> str:
        """Any text and the end of the reasoning, which follows after ``budget`` tokens at the latest."""
        if budget is None:
            return self._free_until("thought", end)
        if not isinstance(self._split(end)[0], int):
            raise _no_budget("its end isn't a token")
        self._rules[f"thought[max_tokens={budget}]"] = _ANY
        return f"thought {self._as_written(end)}"

    # Calls

    def _called(self, calls: Calls, tools: Sequence[_Offered], *, parallel: bool, opening: str | None = None) -> str:
        """A rule of one call or more. ``opening``: what stands before the first tool's name, where that isn't usual.

        What divides two texts of the grammar never begins like what else may stand there: llguidance doesn't go back.
        """
        lead = calls.begin + _lead(calls.call)
        if opening is None:
            opening = self._as_written((calls.section + lead).lstrip())
        rules = [self._tool(calls, i, name, one) for i, (name, one, _) in enumerate(tools)]
        tool = self._rule("tool", self._one_of(rules))
        end = self._as_written(calls.end)
        many = f"{opening} tool {end}"
        if parallel:
            many = f"{many} ( {self._as_written(calls.separator + lead)} {tool} {end} )*"
        return self._rule("calls", f"{many} {self._as_written(calls.section_end)}".strip())

    def _answer_or_calls(
        self,
        calls: Calls,
        tools: Sequence[_Offered],
        schema: Mapping[str, Any],
        *,
        parallel: bool,
        required: bool,
    ) -> str:
        """An answer by its schema, or calls."""
        if required:
            return self._called(calls, tools, parallel=parallel)
        if not calls.bare or not isinstance(calls.call, JsonCall):
            return f"( %json {_text(schema)} | {_GAP} {self._called(calls, tools, parallel=parallel)} )"
        # Nothing but its schema tells a call from an answer.
        definitions = dict(schema.get("$defs", {}))
        either: list[Mapping[str, Any]] = [{k: v for k, v in schema.items() if k not in ("$defs", "$schema")}]
        for name, one, _ in tools:
            definitions |= one.get("$defs", {})
            one = {k: v for k, v in one.items() if k not in ("$defs", "$schema")}
            properties = {calls.call.name: {"const": name}, calls.call.arguments[0]: one}
            either.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": [*properties],
                    "additionalProperties": False,
                }
            )
        return f"%json {_text({'anyOf': either, '$defs': definitions})}"

    def _one_of(self, rules: Sequence[str]) -> str:
        """Any of these rules, each of which begins with a text.

        What they begin with in common is written once: llguidance looks at each alternative, at 2,000 at most.
        """
        parts = []
        for rule in rules:
            text, end = json.JSONDecoder().raw_decode(rule)
            parts.append((text, rule[end:].strip()))
        return self._tree(parts)

    def _tree(self, parts: Sequence[tuple[str, str]]) -> str:
        groups: dict[str, list[tuple[str, str]]] = {}
        for text, rest in parts:
            groups.setdefault(text[:1], []).append((text, rest))
        found = []
        for first, group in groups.items():
            if not first:
                found += [rest for _, rest in group]
                continue
            least, most = min(group)[0], max(group)[0]
            differ = (i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
            common = least[: next(differ, len(least))]
            below = self._tree([(text[len(common) :], rest) for text, rest in group])
            found.append(f"{_quoted(common)} {below}".strip())
        return found[0] if len(found) == 1 else f"( {' | '.join(found)} )"

    def _maybe_called(self, calls: Calls, tools: Sequence[_Offered], *, parallel: bool) -> str:
        """Free text, in which a call may begin."""
        behind = f" {self._rule('behind', _ANY)}" if calls.text_after else ""
        opening = (calls.section + calls.begin + _lead(calls.call)).lstrip()
        first, *rest = self._split(opening)
        if behind and not parallel and isinstance(first, str):
            behind = f" {self._rule('BEHIND', _without(first))}"
        if calls.bare:
            called = self._called(calls, tools, parallel=parallel)
            markers = [self._tokens[one] for one in calls.marker[:1] if one in self._tokens]
            marked = "".join(f" | <[{index}]> {called}" for index in markers)
            return f"( {called} | /([^\\[{{](?s:.*))?/{marked} )"
        if isinstance(first, int):
            return f"{self._rule('text', _ANY)} ( {self._called(calls, tools, parallel=parallel)}{behind} )?"
        marker = first if rest else first.split()[0]
        after = self._as_written(opening[len(marker) :])
        called = self._called(calls, tools, parallel=parallel, opening=after)
        self._rules["text" if rest else "text[lazy]"] = f"/(?s:.*){_escaped(marker)}/"
        answer = self._rule("ANSWER", _ANY if rest else _without(marker))
        return f"( text {called}{behind} | {answer} )"

    def _tool(self, calls: Calls, i: int, name: str, schema: dict[str, Any]) -> str:
        call = calls.call
        pattern = _PYTHON_NAME if isinstance(call, PythonCall) else _NAMED
        if len(name) > _LONGEST_NAME or (not isinstance(call, JsonCall) and not pattern.fullmatch(name)):
            raise RequestError(
                f"tools: {shown(name)}: such a name can't be written in this model's calls ({self._spelling.name})",
                hint="Use letters, digits, _ and - alone.",
            )
        if isinstance(call, JsonCall):
            before = f'{json.dumps(name, ensure_ascii=False)[1:]}, "{call.arguments[0]}": '
            return f'{_quoted(before)} %json {_text(schema)} "}}"'
        if isinstance(call, NamedCall):
            number = f"{_quoted(call.index)} /[0-9]{{1,4}}/ " if call.index else ""
            before = f"{self._as_written(name)} {number}{self._as_written(call.middle)}"
            return f"{before} %json {_text(schema)} {self._as_written(call.after)}".strip()
        if isinstance(call, TaggedCall):
            return self._tagged(call, i, name, schema)
        if isinstance(call, GemmaCall):
            style = _Gemma(self._as_written(call.quote), self._free_until(f"gemma_{i}", call.quote))
            return f"{_quoted(name)} {_Values(self, i, name, style).rule(schema)}"
        assert isinstance(call, PythonCall)
        values = _Values(self, i, name, _Python())
        return f'{_quoted(name + "(")} {values.arguments(schema)} ")"'

    def _tagged(self, call: TaggedCall, i: int, name: str, schema: dict[str, Any]) -> str:
        parts = [self._as_written(name + call.name_end)]
        merged = _merged_object(schema, schema)
        properties, required = merged.get("properties") or {}, merged.get("required") or ()
        for k, (key, one) in enumerate(properties.items()):
            if one is False and key not in required:
                continue
            if _tag_like(key):
                raise RequestError(
                    f"tools: {name}: the parameter {shown(key)} can't be written in this model's calls",
                    hint="Use letters, digits, _ and - alone.",
                )
            rule = self._rule(f"parameter_{i}_{k}", self._parameter(call, f"value_{i}_{k}", key, one, schema))
            parts.append(rule if key in required else f"{rule}?")
        if "properties" not in merged and merged.get("additionalProperties") is not False:
            any_key = f"{self._as_written(call.key_begin)} /[\\w.\\-]{{1,64}}/ {self._key_end(call, None)}"
            value = self._free_until(f"value_{i}", call.value_end)
            parts.append(f"( {self._rule(f'parameter_{i}', f'{any_key} {value}')} )*")
        elif not properties and call.typed:
            parts.append('"\\n"?')  # as DeepSeek's template has it
        parts.append(self._as_written(call.end))
        return " ".join(part for part in parts if part)

    def _key_end(self, call: TaggedCall, is_text: bool | None) -> str:
        if not call.typed:
            return self._as_written(call.key_end)
        word = "true" if is_text is not False else "false"
        return self._as_written(f"{call.typed}{word}{call.key_end}")

    def _parameter(self, call: TaggedCall, name: str, key: str, schema: Any, document: Mapping[str, Any]) -> str:
        types = parameter_types(schema, document)
        before = self._as_written(call.key_begin + key)
        end = self._as_written(call.value_end)
        values = _listed_values(schema, document)
        if values is not None:
            each = []
            for value in values:
                is_text = isinstance(value, str)
                text = value if is_text else json.dumps(value, ensure_ascii=False)
                each.append(f"{self._key_end(call, is_text)} {_quoted(text) if text else ''}")
            if not each:
                raise _unmet(f"the parameter {shown(key)}")
            return f"{before} ( {' | '.join(each)} ) {end}"
        if types == {"boolean"}:
            words = " | ".join(_quoted(word) for word in ("true", "false", "True", "False"))
            return f"{before} {self._key_end(call, False)} ( {words} ) {end}"
        if types and "string" not in types:
            inner = {k: v for k, v in document.items() if k == "$defs"}
            return f"{before} {self._key_end(call, False)} %json {_text({**inner, **schema})} {end}"
        if schema is False:
            raise _unmet(f"the parameter {shown(key)}")
        return f"{before} {self._key_end(call, True)} {self._free_until(name, call.value_end, _pattern_of(schema))}"

    # Harmony

    def _harmony(
        self,
        call: HarmonyCall,
        tools: Sequence[_Offered],
        schema: Mapping[str, Any] | None,
        *,
        required: bool,
    ) -> str:
        token = {
            part: self._as_written(getattr(call, part)) for part in ("start", "channel", "constrain", "message", "end")
        }
        self._rules["free"] = _ANY
        ahead = f'{token["end"]} {token["start"]} "assistant"'
        analysis = f'{token["channel"]} "analysis" {token["message"]} free {ahead}'
        preamble = f'{token["channel"]} "commentary" {token["message"]} free {ahead}'
        ends = []
        kind = f'( " "? {token["constrain"]} "json" | " json" )?'
        behind, before_channel = [], []
        for i, (name, parameters, _) in enumerate(tools):
            if not _NAMED.fullmatch(name):
                raise RequestError(
                    f"tools: {shown(name)}: such a name can't be written in this model's calls ({self._spelling.name})",
                    hint="Use letters, digits, _ and - alone.",
                )
            arguments = self._rule(f"tool_{i}", f"{kind} {token['message']} %json {_text(parameters)}")
            behind.append(f"{_quoted(name)} {arguments}")
            before_channel.append(f'{_quoted(name)} {token["channel"]} "commentary" {arguments}')
        if tools:
            to = f" to={call.prefix}"
            ends.append(f"{token['channel']} {_quoted('commentary' + to)} {self._one_of(behind)}")
            ends.append(f"{_quoted(to)} {self._one_of(before_channel)}")
        if not required:
            answer = "free" if schema is None else f"%json {_text(schema)}"
            ends.append(f'{token["channel"]} "final" ( " "? {token["constrain"]} "json" )? {token["message"]} {answer}')
        before = f"( {analysis} )*" if schema is not None and not tools else f"( {analysis} | {preamble} )*"
        return f"{before} ( {' | '.join(ends)} )"


class _Gemma:
    """How Gemma writes values."""

    def __init__(self, quote: str, text: str) -> None:
        self.true, self.false, self.null = '"true"', '"false"', '"null"'
        self.separator, self.colon = '","', '":"'
        self.text = f"{quote} {text}"
        self._quote = quote

    def literal(self, text: str) -> str:
        return f"{self._quote} {_quoted(text) if text else ''} {self._quote}"

    def key(self, text: str) -> str:
        return _quoted(text)


class _Python:
    """How Python writes values."""

    def __init__(self) -> None:
        self.true, self.false, self.null = '"True"', '"False"', '"None"'
        self.separator, self.colon = "/, ?/", "/: ?/"
        escape = r"""\\(['"\\abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"""
        self.text = rf"""/'([^'\\\n\r]|{escape})*'|"([^"\\\n\r]|{escape})*"/"""

    def literal(self, text: str) -> str:
        return f"( {_quoted(json.dumps(text, ensure_ascii=False))} | {_quoted(repr(text))} )"

    def key(self, text: str) -> str:
        return self.literal(text)


class _Values:
    """Writes the values that a JSON schema allows, in a notation other than JSON."""

    def __init__(self, writer: _Writer, index: int, tool: str, style: _Gemma | _Python) -> None:
        self._writer, self._index, self._tool, self._style = writer, index, tool, style
        self._references: dict[str, str] = {}
        self._count = 0
        self._document: Mapping[str, Any] = {}

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Python's keyword arguments."""
        self._document = schema
        return self._members(_merged_object(schema, schema), lambda key: _quoted(key + "="))

    def rule(self, schema: Mapping[str, Any]) -> str:
        """The arguments as one value."""
        self._document = schema
        return self._value(_merged_object(schema, schema), 0)

    def _named(self, text: str) -> str:
        self._count += 1
        return self._writer._rule(f"value_{self._index}_{self._count}", text)

    def _refuse(self, keyword: str) -> RequestError:
        return RequestError(
            f"tools: {self._tool}: {keyword} can't be held in this model's calls", hint="Leave it out, or strict."
        )

    def _value(self, schema: Any, depth: int) -> str:
        style = self._style
        if schema is True or schema == {}:
            return self._any()
        if schema is False:
            raise _unmet(f"a value of {self._tool}")
        if not isinstance(schema, Mapping) or depth > _DEPTH:
            raise self._refuse("such a schema")
        if "allOf" in schema or ("properties" in schema and schema.keys() & {"anyOf", "oneOf"}):
            schema = _merged_object(schema, self._document)
        if unheld := sorted(schema.keys() & KEYWORDS - _HELD - {"format"}):
            if self._writer._exact:
                raise self._refuse(unheld[0])
            self._writer.ignored |= {f"tools.{keyword}" for keyword in unheld}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._references:
                self._count += 1
                name = self._references[reference] = f"value_{self._index}_{self._count}"
                self._writer._rules[name] = self._value(_resolved(reference, self._document), depth + 1)
            return self._references[reference]
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not values:
                raise _unmet(f"a value of {self._tool}")
            return f"( {' | '.join(self._literal(value) for value in values)} )"
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                each = [self._value(one, depth + 1) for one in schema[keyword] if one is not False]
                if not each:
                    raise _unmet(f"a value of {self._tool}")
                return f"( {' | '.join(each)} )"
        types = parameter_types(schema, self._document)
        each = []
        for kind in sorted(types):
            if kind == "string":
                each.append(style.text)
            elif kind in ("integer", "number"):
                each.append(_INTEGER if kind == "integer" else _NUMBER)
            elif kind == "boolean":
                each.append(f"( {style.true} | {style.false} )")
            elif kind == "null":
                each.append(style.null)
            elif kind == "array":
                item = self._value(schema.get("items", {}), depth + 1)
                each.append(f'"[" ( {item} ( {style.separator} {item} )* )? "]"')
            else:
                each.append(f'"{{" {self._members(schema, lambda key: f"{style.key(key)} {style.colon}", depth)} "}}"')
        if not each:
            return self._any()
        return each[0] if len(each) == 1 else f"( {' | '.join(each)} )"

    def _members(self, schema: Mapping[str, Any], begin: Any, depth: int = 0) -> str:
        """Members in the schema's order: those that are required, and any of the others."""
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not properties:
            if schema.get("additionalProperties") is False:
                return ""
            key = "/[A-Za-z_][\\w\\-]{0,63}/" if isinstance(self._style, _Gemma) else self._style.text
            one = f"{key} {self._style.colon} {self._any()}"
            if isinstance(self._style, _Python) and depth == 0:
                one = f'/[A-Za-z_]\\w{{0,63}}/ "=" {self._any()}'
            return f"( {one} ( {self._style.separator} {one} )* )?"
        if isinstance(self._style, _Gemma):  # its template sorts keys
            properties = dict(sorted(properties.items(), key=lambda one: one[0].lower()))
        members = [
            (self._named(f"{begin(key)} {self._value(one, depth + 1)}"), key in required)
            for key, one in properties.items()
            if one is not False or key in required
        ]
        # rest_k: what may follow a member before k; first_k: what may come where none was before.
        rest, first = "", ""
        for name, needed in reversed(members):
            follow = self._named(f"{self._style.separator} {name} {rest}")
            alone = f"{name} {rest}".strip()
            first = self._named(alone) if needed else self._named(f"{alone} | {first}" if first else f'{alone} | ""')
            rest = follow if needed else self._named(f"{follow} | {rest or chr(34) * 2}")
        return first

    def _any(self) -> str:
        """Any value."""
        name = f"any_{self._index}"
        if name not in self._writer._rules:
            style = self._style
            self._writer._rules[name] = (
                f"{style.text} | {_NUMBER} | {style.true} | {style.false} | {style.null} "
                f'| "[" ( {name} ( {style.separator} {name} )* )? "]"'
            )
        return name

    def _literal(self, value: Any) -> str:
        style = self._style
        if isinstance(value, str):
            return style.literal(value)
        if value is None or isinstance(value, bool):
            return style.null if value is None else style.true if value else style.false
        if isinstance(value, (int, float)):
            return _quoted(json.dumps(value))
        if isinstance(value, list):
            return f'"[" {f" {style.separator} ".join(map(self._literal, value))} "]"'
        raise self._refuse("an object in enum or const")


def _lead(call: Any) -> str:
    """What stands before a tool's name, and is the same for all."""
    if isinstance(call, JsonCall):
        return f'{{"{call.name}": "'
    if isinstance(call, TaggedCall):
        return call.name_begin
    return call.prefix if isinstance(call, (NamedCall, GemmaCall)) else ""


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, of an object."""
    return dict(schema) if "type" in schema or "$ref" in schema or "anyOf" in schema else {"type": "object", **schema}


def _held(schema: Mapping[str, Any], place: str, field: str, prefix: str, ignored: set[str]) -> dict[str, Any]:
    """Returns the schema that answers are held to. ``ignored`` gets what of it can't be enforced."""
    try:
        document = json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(f"{place}: its schema isn't JSON: {shown(e)}", hint="Pass a JSON schema.") from e
    held = hold_schema(document, place, prefix=prefix)
    ignored |= {f"{field}.{keyword}" for keyword in held.ignored}
    return held.schema if isinstance(held.schema, dict) else {}


def _merged_object(schema: Mapping[str, Any], document: Any, depth: int = 0) -> dict[str, Any]:
    """Returns an object with the properties of what it is merged of: ``allOf``, ``anyOf``, ``oneOf`` and ``$ref``.

    Notations other than JSON have no alternatives of objects: each property is that of one of the alternatives.
    """
    if isinstance(schema.get("$ref"), str) and depth <= _DEPTH:
        target = _resolved(schema["$ref"], document)
        return _merged_object(target, document, depth + 1) if isinstance(target, Mapping) else dict(schema)
    groups = [schema[keyword] for keyword in ("anyOf", "oneOf") if keyword in schema]
    parts = schema.get("allOf", ())
    if depth > _DEPTH or not (groups or parts):
        return dict(schema)
    result = {k: v for k, v in schema.items() if k not in ("allOf", "anyOf", "oneOf")}
    for part in parts:
        if isinstance(part, Mapping):
            merged = _merged_object(part, document, depth + 1)
            result = {**merged, **result, **_joined_properties([result, merged], "allOf", result, merged)}
    for group in groups:
        each = [_merged_object(one, document, depth + 1) for one in group if isinstance(one, Mapping)]
        objects = [one for one in each if "object" in parameter_types(one, document) or "properties" in one]
        if not objects:
            result.setdefault("anyOf", group)
            continue
        common = set.intersection(*(set(one.get("required", ())) for one in objects))
        result |= _joined_properties([result, *objects], "anyOf", result, {"required": [*common]})
        result.setdefault("type", "object")
        if all(one.get("additionalProperties") is False for one in objects):
            result["additionalProperties"] = False
    return result


def _joined_properties(schemas: Sequence[Mapping[str, Any]], how: str, *requiring: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``properties`` and ``required`` of several objects together."""
    properties: dict[str, list[Any]] = {}
    for schema in schemas:
        for name, one in schema.get("properties", {}).items():
            known = properties.setdefault(name, [])
            if one is not True and one != {} and one not in known:
                known.append(one)
    result: dict[str, Any] = {}
    if properties:
        result["properties"] = {
            name: True if not each else each[0] if len(each) == 1 else {how: each} for name, each in properties.items()
        }
    required = dict.fromkeys(name for schema in requiring for name in schema.get("required", ()))
    return result | ({"required": [*required]} if required else {})


def _unmet(subject: str) -> RequestError:
    return RequestError(f"tools: nothing can meet the schema of {subject}", hint="Pass another schema.")


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_GUIDANCE}, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A text in a regular expression."""
    spelled = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(spelled.get(char) or ("\\" + char if char in _META else char) for char in text)


def _without(text: str) -> str:
    """Any text that doesn't contain this one."""
    return f"{_ANY} & ~/(?s:.*){_escaped(text)}(?s:.*)/"


def _tag_like(key: str) -> bool:
    return not isinstance(key, str) or re.search('[<>"\\s\x00-\x1f]', key) is not None or not key


def _resolved(reference: str, document: Any) -> Any:
    target: Any = document
    for part in reference.removeprefix("#/").split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _listed_values(schema: Any, document: Any) -> list[Any] | None:
    """The values that a schema lists, where it does."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = _resolved(schema["$ref"], document)
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, (list, tuple)) else None


def _pattern_of(schema: Any) -> str:
    """A text parameter's pattern: what its schema says of pattern and length."""
    if not isinstance(schema, Mapping):
        return "(?s:.*)"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner.removesuffix("$") if not end else inner
        return f"{begin}(?:{_slashes(inner)}){end}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if isinstance(least, int) and (least or isinstance(most, int)):
        return f"(?s:.{{{least},{most if isinstance(most, int) else ''}}})"
    return "(?s:.*)"


def _slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
