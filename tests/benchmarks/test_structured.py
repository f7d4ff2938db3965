"""What the benchmark of forms counts, and what coding agents are asked to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agents
import pytest
import structured

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.requests.structured import Grammars
from enginewright.runtime.text.chat_format import ChatFormat
from enginewright.runtime.text.chat_format_table import FORMATS
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.runtime.requests.byte_tokens import byte_tokens_json


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerFiles(tokenizer_json=byte_tokens_json([2]), special_tokens={}))


def test_schemas_and_instances_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    cases: list[tuple[str, Any, list[tuple[Any, bool]]]] = [
        ("a", {"type": "integer"}, [(3, True), (3.0, True), ("x", False)]),  # no form writes an integer as 3.0
        ("b", {"type": "array", "items": {"enum": [1]}}, [([1, 1], True), ([2], False), ("é", False)]),
        ("c", {"not": {}}, [(1, False)]),
        ("d", {"const": 4}, [(4, False)]),  # said wrongly: it is what the benchmark looks for
    ]
    for name, schema, instances in cases:
        tests = [{"data": data, "valid": valid} for data, valid in instances]
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": schema, "tests": tests}), encoding="utf-8")
    assert [name for name, _, _ in structured.maskbench(tmp_path, 2)] == ["a", "c"]
    grammars = Grammars(tokenizer.to_json(), 256, [2])
    found = structured.try_schemas(structured.maskbench(tmp_path, 0), tokenizer, grammars)
    grammars.close()
    assert (found.compiled, found.refused, found.instances) == (3, 1, 7)
    assert found.accepted == ["d"] and found.rejected == 1
    assert found.reasons == {'Unimplemented keys: ["not"]': 1}
    row = found.to_json()
    assert row["invalid_accepted"] == ["d"] and row["mask_us"]["worst"] >= row["mask_us"]["p50"] > 0


@pytest.mark.parametrize("name", list(agents.RUN))
def test_the_script_has_calls_that_a_format_reads(tokenizer: Tokenizer, name: str) -> None:
    said = agents.answers(agents.RUN[name])
    assert len(said) == 2 * len(agents.STEPS)
    parser = ChatFormat(next(one for one in FORMATS if one.name == "hermes")).parser(tokenizer, tools=())
    parser.push(tokenizer.encode(said[0], add_special_tokens=False))
    parser.finish()
    (call,) = parser.message.calls
    assert call.name == agents.RUN[name].tool
    assert json.loads(call.arguments)[agents.RUN[name].argument] == agents.STEPS[0][1]


def test_a_task_is_done_when_each_turn_was() -> None:
    def turn(file: str, *requests: tuple[int, int, int], code: int = 0) -> dict[str, Any]:
        names = ("prompt", "cached", "answer")
        rows = [dict(zip(names, one, strict=True)) for one in requests]
        return {"exit_code": code, "said": True, "file": file, "requests": rows}

    turns = [turn("hello", (100, 0, 9), (120, 108, 4)), turn("hello world", (30, 0, 2), (140, 123, 5))]
    turns.append(turn("hello world", (160, 72, 5)))
    assert agents.judged(turns) == {"done": True, "cached_of_the_turn_before": [1.0, 0.5]}
    assert not agents.judged([*turns[:2], turn("hello world", (160, 72, 5), code=1)])["done"]
    assert not agents.judged([turn("other", (100, 0, 9)), *turns[1:]])["done"]
