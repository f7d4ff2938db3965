"""Counts of the benchmark of forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structured

from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.requests.structured import Grammars
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
    outcome = structured.try_schemas(structured.maskbench(tmp_path, 0), tokenizer, grammars)
    grammars.close()
    assert (outcome.compiled, outcome.refused, outcome.instances) == (3, 1, 7)
    assert outcome.accepted == ["d"] and outcome.rejected == 1
    assert outcome.reasons == {'Unimplemented keys: ["not"]': 1}
    row = outcome.to_json()
    assert row["invalid_accepted"] == ["d"] and row["mask_us"]["worst"] >= row["mask_us"]["p50"] > 0
