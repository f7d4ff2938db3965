"""How compute capabilities are written, and what GPUs lack."""

from __future__ import annotations

import pytest

from enginewright.optimizer.emit.gpus import check_formats, parse_capabilities, parse_capability
from enginewright.plugins.errors import TargetError


@pytest.mark.parametrize("text", ["8.9", "89", "sm89", "SM89", "sm_89", " 8.9 "])
def test_one_capability_in_many_ways(text: str) -> None:
    assert parse_capability(text) == "8.9"


def test_lists_are_in_rising_order_and_without_doubles() -> None:
    assert parse_capabilities(["SM120,8.0", "8.9", "89"]) == ("8.0", "8.9", "12.0")


@pytest.mark.parametrize("text", ["", "9.9", "8", "sm", "8.9a", "1200", "hopper", "8.0,"])
def test_what_is_unknown_is_named(text: str) -> None:
    with pytest.raises(TargetError, match=r"gpu: .* is no compute capability .*\n.*7\.5, 8\.0"):
        parse_capabilities([text])


def test_formats_that_a_gpu_lacks() -> None:
    check_formats(("8.9", "12.0"), ("fp8", "int4", "f16"))
    with pytest.raises(TargetError, match=r"8\.0, 8\.6 has no fp8, which begins with 8\.9\n.*--gpu 8\.9,12\.0"):
        check_formats(("8.0", "8.6", "8.9", "12.0"), ("fp8",))
    with pytest.raises(TargetError, match=r"7\.5 has no bf16"):
        check_formats(("7.5", "8.0"), ("bf16",))
