"""Options for the answers of a conversation (tools, ``tool_choice``, ``response_format``): grammars and parsing for
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..requests.sampling import SamplingParams
from ..requests.structured import StructuredOutputsParams
from ..shared.errors import RequestError, shown
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..text.chat_format import Message

_CHOICES = ("auto", "required", "none")


class ChatAnswers(msgspec.Struct, frozen=True):
    """A caller's options for the answers of a conversation.

    Attributes:
        tools: JSON schemas of the offered tools; None if the caller passes no tools.
        choice: "auto", "required", "none" or a tool's name.
        parallel: True if an answer may have several calls.
        schema: JSON schema of the answer; None for any text.
        template: the chat template that the caller names or passes; None for the model's default.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    choice: str = "auto"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    template: str | None = None

    @classmethod
    def taken_from(cls, variables: dict[str, Any]) -> ChatAnswers:
        """Removes ``tool_choice``, ``parallel_tool_calls`` and ``response_format`` from ``variables`` and returns the
        options.

        Raises RequestError naming the variable that is invalid.
        """
        choice = variables.pop("tool_choice", None)
        parallel = variables.pop("parallel_tool_calls", None)
        schema = _schema(variables.pop("response_format", None))
        tools = variables.get("tools")
        if isinstance(choice, Mapping):
            function = choice.get("function", choice)
            choice = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(choice, str) or choice in _CHOICES:
                raise RequestError("tool_choice: it names no tool", hint='Pass a name, "auto", "required" or "none".')
        if choice is not None and (not isinstance(choice, str) or not choice):
            raise RequestError(
                f"tool_choice: {shown(choice)} isn't taken", hint='Pass a name, "auto", "required" or "none".'
            )
        if parallel is not None and not isinstance(parallel, bool):
            raise RequestError(f"parallel_tool_calls: {shown(parallel)} isn't True or False")
        schemas: list[Mapping[str, Any]] | None = None
        if isinstance(tools, Sequence) and not isinstance(tools, str):
            from ..text.tool_schema import tool_schema  # inspect and ast, which no other request needs

            schemas = [tool_schema(tool) for tool in tools]
        if choice not in (None, "auto", "none") and not schemas:
            raise RequestError(f"tool_choice: {shown(choice)}, and no tools are offered", hint="Pass tools.")
        return cls(schemas, choice or "auto", parallel is not False, schema, variables.get("chat_template"))

    @property
    def free(self) -> bool:
        """True if no option restricts the answers, so that no grammar is needed."""
        strict = any(_function(tool).get("strict") is True for tool in self.tools or ())
        limited = strict or (not self.parallel and bool(self.tools))
        return self.schema is None and self.choice in ("auto", "none") and not (limited and self.choice == "auto")

    def held(self, params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]) -> SamplingParams:
        """Returns ``params`` with the grammar that the options require; unchanged if they restrict nothing.

        Raises RequestError.
        """
        if self.free:
            return params
        if params.structured_outputs is not None:
            raise RequestError(
                "structured_outputs: the answer's form is said twice, by this and by tool_choice, strict tools or "
                "response_format",
                hint="Leave one of them out.",
            )
        from ..text.formats.grammar import AnswerRules  # loaded with the format alone

        rules = AnswerRules(self.choice, parallel=self.parallel, schema=self.schema)
        grammar = tokenizer.chat_format_of(self.template).grammar(tokenizer, self.tools, rules, prompt_ids=prompt)
        if grammar is None:
            return params
        return params.updated(structured_outputs=StructuredOutputsParams(grammar=grammar))

    def reader(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Callable[[Sequence[int]], Message]:
        """Returns the function that parses an answer's token ids into a message."""
        return partial(self._read, tokenizer, prompt)

    def _read(self, tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> Message:
        return tokenizer.chat_format_of(self.template).parse(tokenizer, ids, tools=self.tools, prompt_ids=prompt)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def _schema(form: Any) -> Mapping[str, Any] | None:
    """Returns the JSON schema of OpenAI's ``response_format`` or of a pydantic model; None for any text. Raises
    RequestError.
    """
    hint = (
        'Pass {"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "json_object"} or a pydantic model.'
    )
    if form is None:
        return None
    make = getattr(form, "model_json_schema", None)
    if callable(make):
        schema: Any = make()
    elif not isinstance(form, Mapping) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise RequestError(f"response_format: {shown(form)} isn't taken", hint=hint)
    elif form["type"] == "text":
        return None
    elif form["type"] == "json_object":
        return {"type": "object"}
    else:
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("response_format: it has no JSON schema", hint=hint)
    return schema
