from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.report.perfetto import trace
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.progress import ProgressEvent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "C": {"name": str, "pid": int, "ts": (int, float), "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""The Trace Event Format: the fields of complete events, counters and metadata."""


def check_schema(document: dict[str, Any]) -> None:
    """The document is what the format's description asks for, and slices of a thread lie in one another."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        fields = REQUIRED[event["ph"]]
        assert set(event) == {"ph", *fields}
        for name, kind in fields.items():
            assert isinstance(event[name], kind), (name, event)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
    stack: list[float] = []
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        assert event["dur"] >= 0
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        if event["dur"] > 0:
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + 1e-3
            stack.append(round(event["ts"] + event["dur"], 3))


@pytest.mark.parametrize(("prompt", "decode", "batch"), [(1, 0, 1), (33, 3, 2)])
def test_a_trace(prompt: int, decode: int, batch: int, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle, events = Bundle.open(tiny_bundle), list[ProgressEvent]()
    traced = trace(bundle, prompt=prompt, decode=decode, batch=batch, threads=1, progress=events.append)
    traced.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    check_schema(document)
    program = bundle.program("cpu")
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    names = Counter(e["name"] for e in slices)
    assert traced.steps == 1 + decode
    assert traced.slices == len(program.steps) * (1 + decode)
    assert names[f"prompt of {prompt}"] == 1
    assert all(names[f"decode {i + 1}"] == 1 for i in range(decode))
    assert names["paged_attention"] == 2 * (1 + decode)
    assert names["layer 0"] >= 1 + decode
    whole = next(e for e in slices if e["name"].startswith("prompt"))
    cost = sum(step_costs(program, StepSizes((prompt,) * batch, (prompt,) * batch)), StepCost())
    assert whole["args"]["bytes of weights"] == cost.weights
    assert whole["args"]["f32 multiply-adds"] == cost.multiply_adds
    assert (whole["args"]["tokens"], whole["args"]["requests"]) == (prompt * batch, batch)
    linear = next(e for e in slices if e["name"] == "linear")
    assert linear["args"]["module"].startswith("model.layers.0.self_attn.q_proj")
    assert linear["args"]["inputs"].startswith(f"f32 {prompt * batch}x64, model.layers.0.self_attn.q_proj+k_proj")
    counters = {e["name"] for e in document["traceEvents"] if e["ph"] == "C"}
    assert counters == {"memory, GB/s", "products, G multiply-adds/s"}
    meta = {e["name"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert set(meta) == {"process_name", "thread_name"}
    assert bundle.model.name in meta["process_name"]
    assert events[-1].done == events[-1].total == 1 + decode


@pytest.mark.filterwarnings("ignore:ranks. :RuntimeWarning")
@pytest.mark.parametrize("cut", ["tensor=2", "pipeline=2"])
def test_a_trace_of_rank_0(cut: str, tiny_bundle: Path) -> None:
    traced = trace(Bundle.open(tiny_bundle), prompt=40, decode=2, batch=2, threads=1, partition=Partition.parse(cut))
    check_schema(traced.document)
    names = Counter(e["name"] for e in traced.document["traceEvents"] if e["ph"] == "X")
    assert bool(names["all_gather"]) == (cut == "tensor=2")
    assert names["receive"] == (3 if cut == "pipeline=2" else 0)  # of the stage before
    assert traced.document["otherData"]["partition"] == cut


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"prompt": 0}, "prompt_tokens: 0"),
        ({"batch": 0}, "batch: 0"),
        ({"decode": -1}, "decode: -1"),
        ({"prompt": 500, "decode": 20}, "longer than the bundle's 512"),
        ({"prompt": 500, "batch": 20}, "8,192 tokens of a step"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], named: str, tiny_bundle: Path) -> None:
    with pytest.raises(RequestError, match=named):
        trace(Bundle.open(tiny_bundle), **sizes)


def test_a_file_that_cannot_be_written(tiny_bundle: Path, tmp_path: Path) -> None:
    traced = trace(Bundle.open(tiny_bundle), prompt=1, decode=0, threads=1)
    with pytest.raises(BundleError, match="cannot be written"):
        traced.write(tmp_path / "absent" / "trace.json")
