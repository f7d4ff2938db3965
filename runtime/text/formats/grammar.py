"""Writes the grammar of an answer with tool calls, or after reasoning: Lark, in llguidance's dialect.

Calls have the form of the model's chat template. Parameters are in the order of their schema, as in the JSON grammar of
llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...shared.errors import RequestError, shown
from ...shared.json_schema import hold_schema
from .markers import Vocabulary
from .notation import Calls, Reasoning, Spelling, Tool
from .reader import LONGEST_NAME
from .rules import ANY, RuleWriter, escaped, is_token, json_rule, without

MOST_TOOLS = 1024
_GAP = r"/[ \t\r\n]{0,4}/"


def offered_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Returns the name, the schema of the arguments and ``strict`` of each tool.

    Raises RequestError for a tool without a name, two of one name, and more than 1,024.
    """
    offered: dict[str, Tool] = {}
    tools = tools or ()
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"tools: {len(tools):,} are offered", hint=f"Offer {MOST_TOOLS:,} at most.")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(f"tools[{i}]: it has no name", hint='Tools look like {"type": "function", ...}.')
        if name in offered:
            raise RequestError(f"tools[{i}]: there are two tools {shown(name)}", hint="Give each a name of its own.")
        schema = function.get("parameters", function.get("input_schema"))
        if schema is None:
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(schema, Mapping):
            raise RequestError(f"tools: {name}: parameters isn't a JSON schema", hint="Pass an object.")
        offered[name] = name, dict(schema), function.get("strict") is True
    return list(offered.values())


def begins_with_token(text: str, tokenizer: Vocabulary) -> bool:
    """Returns True if a text begins with a token that llguidance doesn't match as text."""
    return any(text.startswith(token) and is_token(token, tokenizer) for token in tokenizer.added_tokens)


@dataclass(frozen=True)
class AnswerRules:
    """Limits of an answer.

    Attributes:
        choice: "auto": text, or calls. "required": at least one call. A tool's name: one call of that tool. "none": no
            calls are offered.
        strict: True if "auto" limits calls to the tools' schemas; None uses each tool's ``strict``. False limits only
            the calls' form.
        parallel: True allows several calls. False also limits calls to their schemas.
        schema: schema of an answer that isn't a call.
        reasoning_budget: maximum tokens of the reasoning, after which its end is forced; None for no limit. A budget
            also limits calls to their schemas.
    """

    choice: str = "auto"
    strict: bool | None = None
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    reasoning_budget: int | None = None

    @property
    def names_tool(self) -> bool:
        """True if ``choice`` is a tool's name, so that the answer is one call."""
        return self.choice not in ("auto", "required", "none")

    def enforces(self, offered: Sequence[Tool]) -> bool:
        """Returns True if calls of the offered tools must match the tools' schemas."""
        by_tool = self.strict is None and any(strict for _, _, strict in offered)
        return self.choice != "auto" or self.strict is True or not self.parallel or by_tool


def write_grammar(
    spelling: Spelling,
    tokenizer: Vocabulary,
    tools: Sequence[Mapping[str, Any]] | None,
    answer: AnswerRules,
    *,
    reasoning_open: bool = False,
    ignored: set[str] | None = None,
) -> str | None:
    """Returns the grammar of an answer for llguidance. The arguments are those of ``ChatFormat.grammar``."""
    offered = _chosen_tools(offered_tools(tools), answer.choice)
    budget = None if spelling.reasoning is None else answer.reasoning_budget
    if answer.schema is None and not (offered and answer.enforces(offered)) and budget is None:
        return None
    if offered and spelling.calls is None:
        raise RequestError(
            "tool_choice: this model's chat template has no form of tool calls that is known",
            hint="Leave tool_choice and strict out, or use a model that calls tools.",
        )
    if answer.strict is False:
        offered = [(name, {"type": "object"}, False) for name, _, _ in offered]
    ignored = set() if ignored is None else ignored
    offered = [
        (name, _held(_object(one), f"tools: {name}", "tools", f"tool_{i}_", ignored), is_strict)
        for i, (name, one, is_strict) in enumerate(offered)
    ]
    schema = answer.schema
    if schema is not None:
        schema = _held(schema, "response_format", "schema", "answer_", ignored)
    rules = RuleWriter(tokenizer, exact=answer.strict is True, ignored=ignored)
    writer = _AnswerWriter(spelling, rules, offered, schema, parallel=answer.parallel and not answer.names_tool)
    writer.write(required=answer.choice not in ("auto", "none"), opened=reasoning_open, budget=budget)
    return rules.grammar


def _chosen_tools(offered: list[Tool], choice: str) -> list[Tool]:
    """Returns the offered tools that may be called. Raises RequestError if the choice requires one that isn't there."""
    if choice == "none":
        return []
    if choice not in ("auto", "required"):
        offered = [one for one in offered if one[0] == choice]
        if not offered:
            raise RequestError(f"tool_choice: there is no tool {shown(choice)}", hint="Name one that is offered.")
    elif choice == "required" and not offered:
        raise RequestError(f"tool_choice: {choice}: no tools are offered", hint="Pass tools.")
    return offered


class _AnswerWriter:
    """Writes the grammar rules of one answer.

    Args:
        tools: the tools that may be called.
        schema: schema of an answer that isn't a call; None for any text.
        parallel: True if there may be several calls.
    """

    def __init__(
        self,
        spelling: Spelling,
        rules: RuleWriter,
        tools: Sequence[Tool],
        schema: Mapping[str, Any] | None,
        *,
        parallel: bool,
    ) -> None:
        self._spelling, self._rules = spelling, rules
        self._tools, self._schema, self._parallel = tools, schema, parallel
        if spelling.calls is not None:
            for name, _, _ in tools:
                self._check_name(name, spelling.calls)

    def _check_name(self, name: str, calls: Calls) -> None:
        pattern = calls.call.names
        if len(name) > LONGEST_NAME or (pattern is not None and not pattern.fullmatch(name)):
            raise RequestError(
                f"tools: {shown(name)}: such a name can't be written in this model's calls ({self._spelling.name})",
                hint="Use letters, digits, _ and - alone.",
            )

    def write(self, *, required: bool, opened: bool, budget: int | None) -> None:
        """Adds the rule "start" and the rules that it uses.

        Args:
            required: True if the answer must be a call.
            opened: True if the prompt ends within the reasoning.
            budget: maximum tokens of the reasoning; None for no limit.
        """
        calls = self._spelling.calls
        if calls is not None and calls.call.whole_answer:
            if budget is not None:
                raise _no_budget("it has channels")
            start = calls.call.answer_rule(self._rules, self._tools, self._schema, required=required)
            self._rules.add("start", start)
            return
        body = self._body(calls, required=required)
        enforced = required or self._schema is not None
        before = self._reasoning(self._spelling.reasoning, opened=opened, enforced=enforced, budget=budget)
        self._rules.add("start", f"{before}{body}")

    def _body(self, calls: Calls | None, *, required: bool) -> str:
        """Returns the rule of the answer after its reasoning."""
        if calls is None or not self._tools:
            return self._rules.add("answer", ANY) if self._schema is None else f"%json {json_rule(self._schema)}"
        if required:
            return self._called(calls)
        return self._maybe_called(calls) if self._schema is None else self._answer_or_calls(calls, self._schema)

    # ---- reasoning

    def _reasoning(self, reasoning: Reasoning | None, *, opened: bool, enforced: bool, budget: int | None) -> str:
        """Returns the rule of the reasoning, by which an answer may begin; "" if the format has none.

        Args:
            reasoning: the markers; None if the format has none.
            opened: True if the prompt ends within the reasoning.
            enforced: True if the rest of the answer is limited, so that no space may precede it.
            budget: maximum tokens of the reasoning; None for no limit.
        """
        if reasoning is None:
            return ""
        thought = self._thought(reasoning.end.strip(), budget)
        gap = f"{_GAP} " if enforced else ""
        if opened:
            return f"{thought} {gap}"
        begin = self._rules.as_written(reasoning.begin.strip())
        if budget is not None and not begin.startswith("<["):
            raise _no_budget("its beginning isn't a token")  # text after the reasoning may contain it
        calls = self._schema is None
        return f"( {_GAP} {begin} {thought} {gap if not calls else ''})? {gap if calls else ''}"

    def _thought(self, end: str, budget: int | None) -> str:
        """Returns the rule of any text up to the marker ``end`` of the reasoning, which must follow after ``budget``
        tokens.
        """
        if budget is None:
            return self._rules.free_until("thought", end)
        if not isinstance(self._rules.split(end)[0], int):
            raise _no_budget("its end isn't a token")
        self._rules.add(f"thought[max_tokens={budget}]", ANY)
        return f"thought {self._rules.as_written(end)}"

    # ---- calls

    def _called(self, calls: Calls, opening: str | None = None) -> str:
        """Adds the rule of one or more calls, and returns its name.

        Alternatives at one position never begin with the same text, because llguidance doesn't backtrack.

        Args:
            opening: the rule of the text before the first tool's name, if it isn't the usual one.
        """
        rules = self._rules
        lead = calls.begin + calls.call.lead
        if opening is None:
            opening = rules.as_written((calls.section + lead).lstrip())
        each = [calls.call.rule(rules, i, name, one) for i, (name, one, _) in enumerate(self._tools)]
        tool = rules.add("tool", rules.one_of(each))
        end = rules.as_written(calls.end)
        many = f"{opening} tool {end}"
        if self._parallel:
            many = f"{many} ( {rules.as_written(calls.separator + lead)} {tool} {end} )*"
        return rules.add("calls", f"{many} {rules.as_written(calls.section_end)}".strip())

    def _answer_or_calls(self, calls: Calls, schema: Mapping[str, Any]) -> str:
        """Returns the rule of an answer by its schema, or calls."""
        objects = [(one, calls.call.call_schema(name, _plain(one))) for name, one, _ in self._tools]
        if not calls.bare or any(whole is None for _, whole in objects):
            return f"( %json {json_rule(schema)} | {_GAP} {self._called(calls)} )"
        # Only its schema distinguishes a call from an answer.
        definitions = dict(schema.get("$defs", {}))
        for one, _ in objects:
            definitions |= one.get("$defs", {})
        either = [_plain(schema), *(whole for _, whole in objects)]
        return f"%json {json_rule({'anyOf': either, '$defs': definitions})}"

    def _maybe_called(self, calls: Calls) -> str:
        """Returns the rule of free text in which a call may begin."""
        rules = self._rules
        after = f" {rules.add('behind', ANY)}" if calls.text_after else ""
        opening = (calls.section + calls.begin + calls.call.lead).lstrip()
        first, *rest = rules.split(opening)
        if after and not self._parallel and isinstance(first, str):
            after = f" {rules.add('BEHIND', without(first))}"
        if calls.bare:
            called = self._called(calls)
            markers = [rules.tokens[one] for one in calls.marker[:1] if one in rules.tokens]
            marked = "".join(f" | <[{index}]> {called}" for index in markers)
            return f"( {called} | /([^\\[{{](?s:.*))?/{marked} )"
        if isinstance(first, int):
            return f"{rules.add('text', ANY)} ( {self._called(calls)}{after} )?"
        marker = first if rest else first.split()[0]
        called = self._called(calls, rules.as_written(opening[len(marker) :]))
        rules.add("text" if rest else "text[lazy]", f"/(?s:.*){escaped(marker)}/")
        answer = rules.add("ANSWER", ANY if rest else without(marker))
        return f"( text {called}{after} | {answer} )"


def _no_budget(why: str) -> RequestError:
    hint = "Leave it out, and limit the whole answer."
    return RequestError(f"thinking_token_budget: this model's reasoning can't be limited: {why}", hint=hint)


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without its definitions."""
    return {k: v for k, v in schema.items() if k not in ("$defs", "$schema")}


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of arguments, with the type "object" unless it has a type, ``$ref`` or ``anyOf``."""
    return dict(schema) if "type" in schema or "$ref" in schema or "anyOf" in schema else {"type": "object", **schema}


def _held(schema: Mapping[str, Any], place: str, field: str, prefix: str, ignored: set[str]) -> dict[str, Any]:
    """Returns the schema that answers must follow, and adds the keywords that can't be enforced to ``ignored``.

    Args:
        schema: the caller's schema.
        place: the name of the schema's field in errors.
        field: the beginning of the names in ``ignored``.
        prefix: the prefix of the names in ``$defs``.
        ignored: gets names such as "schema.not".
    """
    try:
        document = json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(f"{place}: its schema isn't JSON: {shown(e)}", hint="Pass a JSON schema.") from e
    held = hold_schema(document, place, prefix=prefix)
    ignored |= {f"{field}.{keyword}" for keyword in held.ignored}
    return held.schema if isinstance(held.schema, dict) else {}
