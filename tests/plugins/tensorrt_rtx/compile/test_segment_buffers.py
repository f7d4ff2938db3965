"""Values share buffers as soon as nothing reads them any more, and never with what their own step reads."""

from __future__ import annotations

import pytest

from enginewright.plugins.engines.segments import AttentionStep, SegmentStep, SegmentTensor
from enginewright.plugins.tensorrt_rtx.compile.segment_buffers import share_buffers

WIDE = SegmentTensor(dtype="f16", shape=("T", 2, 4))
LOGITS = SegmentTensor(dtype="f32", shape=("R", 5))


def chain(length: int) -> tuple[list[SegmentStep | AttentionStep], dict[str, SegmentTensor]]:
    """Segments, each of which reads what the attention before it gave, and one result that nothing reads."""
    steps: list[SegmentStep | AttentionStep] = []
    values = {"logits": LOGITS}
    before = {"ids": "ids"}
    for i in range(length):
        names_of = {letter: f"{letter}{i}" for letter in ("q", "k", "v", "unread")}
        steps.append(SegmentStep(segment="s", inputs=before, weights={"weight_0": f"w{i}"}, outputs=names_of))
        steps.append(AttentionStep(layer=i, group="g", q=f"q{i}", k=f"k{i}", v=f"v{i}", out=f"out{i}", scale=1.0))
        values.update(dict.fromkeys((*names_of.values(), f"out{i}"), WIDE))
        before = {"attention": f"out{i}", "ids": "ids"}
    steps.append(SegmentStep(segment="t", inputs=before, weights={}, outputs={"logits": "logits"}))
    return steps, values


@pytest.mark.parametrize("length", [2, 7])
def test_as_many_as_live_at_once(length: int) -> None:
    steps, values = chain(length)
    shared, buffers = share_buffers(steps, values, "logits")
    # q, k and v and where attention puts its result; what nothing reads has q's turn or the like.
    assert len(buffers) == 6 and buffers["logits"] == LOGITS
    holds: dict[str, str] = {}
    for before, after in zip(steps, shared, strict=True):
        if isinstance(before, AttentionStep):
            assert isinstance(after, AttentionStep)
            assert [holds[b] for b in (after.q, after.k, after.v)] == [before.q, before.k, before.v]
            assert after.out not in (after.q, after.k, after.v)
            holds[after.out] = before.out
            continue
        assert isinstance(after, SegmentStep) and after.weights == before.weights
        assert [holds.get(b, b) for b in after.inputs.values()] == list(before.inputs.values())
        results = list(after.outputs.values())
        assert len(set(results)) == len(results) and not set(results) & set(after.inputs.values())
        holds.update(zip(results, before.outputs.values(), strict=True))


def test_other_shapes_do_not_share() -> None:
    steps, values = chain(2)
    values["q1"] = SegmentTensor(dtype="f16", shape=("T", 3, 4))
    _, buffers = share_buffers(steps, values, "logits")
    assert list(buffers.values()).count(values["q1"]) == 1
