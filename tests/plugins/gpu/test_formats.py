"""The spelling of compute capabilities, and features that GPUs lack."""

from __future__ import annotations

import pytest

from enginewright.plugins.gpu import formats as gpus
from enginewright.plugins.gpu.formats import check_formats, parse_capabilities, parse_capability
from enginewright.runtime.shared.errors import TargetError


@pytest.mark.parametrize("text", ["8.9", "89", "sm89", "SM89", "sm_89", " 8.9 "])
def test_one_capability_in_many_ways(text: str) -> None:
    assert parse_capability(text) == "8.9"


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("h100", "9.0"),
        ("H100", "9.0"),
        ("A100-SXM-80GB", "8.0"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("rtx4070 super", "8.9"),
        ("RTX PRO 6000 Blackwell", "12.0"),
        ("l40s", "8.9"),
        ("t4", "7.5"),
        ("b300", "10.3"),
        ("dgx-spark", "12.1"),
    ],
)
def test_gpus_are_known_by_name(text: str, capability: str) -> None:
    assert parse_capability(text) == capability


def test_every_product_has_a_capability_that_is_known_and_one_spelling() -> None:
    names = [name for products in gpus._PRODUCTS.values() for name in products.split(", ")]
    assert set(gpus._PRODUCTS) == set(gpus.KNOWN)
    assert len({gpus._key(name) for name in names}) == len(names)
    for capability, products in gpus._PRODUCTS.items():
        assert {parse_capability(name) for name in products.split(", ")} == {capability}


def test_a_name_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(TargetError, match=r"Did you mean RTX 4090 \(8\.9\)\? Pass a name, such as h100"):
        parse_capability("rtx4091x")


def test_lists_are_in_rising_order_and_without_doubles() -> None:
    assert parse_capabilities(["SM120,8.0", "8.9", "89"]) == ("8.0", "8.9", "12.0")


@pytest.mark.parametrize("text", ["", "9.9", "8", "sm", "8.9a", "1200", "hopper", "8.0,"])
def test_what_is_unknown_is_named(text: str) -> None:
    with pytest.raises(TargetError, match=r"gpu: .* is not a GPU or a compute capability .*\n.*7\.5, 8\.0"):
        parse_capabilities([text])


def test_formats_that_a_gpu_lacks() -> None:
    check_formats(("8.9", "12.0"), ("fp8", "int4", "f16"))
    with pytest.raises(TargetError, match=r"8\.0, 8\.6 has no fp8, which begins with 8\.9\n.*--gpu 8\.9,12\.0"):
        check_formats(("8.0", "8.6", "8.9", "12.0"), ("fp8",))
    with pytest.raises(TargetError, match=r"7\.5 has no bf16"):
        check_formats(("7.5", "8.0"), ("bf16",))
