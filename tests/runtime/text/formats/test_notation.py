"""A notation is a class of its own: parser and grammar take one that they don't know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from enginewright.runtime.text.chat_format import ChatFormat, Spelling
from enginewright.runtime.text.formats.grammar import AnswerRules
from enginewright.runtime.text.formats.notation import Calls, Notation, Reasoning
from enginewright.runtime.text.formats.reader import AnswerReader, Steps, Stops
from enginewright.runtime.text.formats.rules import RuleWriter, json_rule, quoted
from tests.runtime.text.chat_streams import TOOLS, byte_tokenizer


@dataclass(frozen=True)
class ArrowCall(Notation):
    """A call is a name, an arrow and JSON: ``f -> {"a": 1}``."""

    arrow: str = "->"

    def rule(self, writer: RuleWriter, index: int, name: str, schema: dict[str, Any]) -> str:
        return f"{quoted(f'{name} {self.arrow} ')} %json {json_rule(schema)}"

    def read(self, reader: AnswerReader, calls: Calls, opener: str, *, named: bool = False) -> Steps:
        match = yield from reader.read_word(Stops([self.arrow]))
        if match is None:
            reader.reject_call(opener)
            return None
        reader.begin_call(match[0].strip())
        return (yield from reader.read_json(reader.add_arguments))


ARROWS = ChatFormat(Spelling("arrows", Calls(ArrowCall(), begin="<call>", end="</call>"), Reasoning("<r>", "</r>")))
TOKENIZER = byte_tokenizer(["<call>", "</call>"])
CALL = '<call>get_weather -> {"city": "Oslo"}</call>'


def test_an_unknown_notation_is_parsed_in_pieces_of_any_size() -> None:
    ids = TOKENIZER.encode(f"<r>Think.</r>Look: {CALL}", add_special_tokens=False)
    for size in (1, 3, len(ids)):
        parser = ARROWS.parser(TOKENIZER, tools=TOOLS)
        for at in range(0, len(ids), size):
            parser.push(ids[at : at + size])
        parser.finish()
        message = parser.message
        assert (message.content, message.reasoning, message.complete) == ("Look:", "Think.", True)
        assert [(one.name, one.arguments) for one in message.calls] == [("get_weather", '{"city": "Oslo"}')]
    assert ARROWS.parse(TOKENIZER, TOKENIZER.encode("a -> {}", add_special_tokens=False)).content == "a -> {}"


@pytest.mark.parametrize(
    ("text", "accepted"),
    [(CALL, True), (CALL.replace("city", "town"), False), (CALL.replace("->", "="), False), ("get_weather", False)],
)
def test_its_grammar_holds_calls_to_their_form_and_schemas(text: str, accepted: bool) -> None:
    grammar = ARROWS.grammar(TOKENIZER, TOOLS, AnswerRules(choice="required"))
    tokens = LLTokenizer(TOKENIZER.to_json(), eos_token=[TOKENIZER.added_tokens["<end>"]])
    matcher = LLMatcher(tokens, grammar)
    assert not matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == accepted
