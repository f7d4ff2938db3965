from __future__ import annotations

from pathlib import Path

import pytest
from peers.goals import GOALS, Goal, judge, read_reasons

BEST = {"engine": "openvino", "ratio": 1.6, "kl_no_worse": True}
RATIO = Goal("smollm2", "int8", "decode_1", "ratio", 1.5)


def test_a_ratio_is_met_if_our_kl_is_no_worse() -> None:
    table = {"best": {"decode_1": BEST}, "limits": {}}
    verdict = judge(RATIO, table, {})
    assert (verdict["measured"], verdict["peer"], verdict["met"]) == (1.6, "openvino", True)
    for change, met in (({"ratio": 1.4}, False), ({"kl_no_worse": False}, False), ({"kl_no_worse": None}, True)):
        assert judge(RATIO, {"best": {"decode_1": BEST | change}, "limits": {}}, {})["met"] is met


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    for goal in (RATIO, Goal("smollm2", "int8", "decode_1", "bandwidth", 0.75)):
        verdict = judge(goal, {"best": {}, "limits": {}}, {goal.key: "why"})
        assert (verdict["measured"], verdict["met"], verdict["reason"]) == (None, None, "why")


@pytest.mark.parametrize(
    ("kind", "name", "wanted", "good", "bad"),
    [
        ("bandwidth", "bandwidth_share", 0.75, 0.8, 0.7),
        ("peak", "peak_share", 0.6, 0.6, 0.5),
        ("memory", "memory", 1.1, 1.05, 1.2),
    ],
)
def test_shares_and_memory_have_their_own_direction(
    kind: str, name: str, wanted: float, good: float, bad: float
) -> None:
    goal = Goal("smollm2", "int8", "decode_1", kind, wanted)  # type: ignore[arg-type]
    assert judge(goal, {"best": {}, "limits": {name: good}}, {})["met"] is True
    assert judge(goal, {"best": {}, "limits": {name: bad}}, {})["met"] is False


def test_goals_are_named_once_and_reasons_are_of_goals(tmp_path: Path) -> None:
    assert len({goal.key for goal in GOALS}) == len(GOALS)
    assert set(read_reasons()) <= {goal.key for goal in GOALS}
    path = tmp_path / "reasons.toml"
    path.write_text('"smollm2.int8.decode_1" = "slow"\n')
    assert read_reasons(path) == {"smollm2.int8.decode_1": "slow"}
    path.write_text('"smollm2.int9.decode_1" = "slow"\n')
    with pytest.raises(ValueError, match=r"smollm2\.int9\.decode_1"):
        read_reasons(path)
