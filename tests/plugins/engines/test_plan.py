"""Headers of plans, made by hand: what a field says, and what is said of one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from enginewright.plugins.engines.plan import HEADER_BYTES, PlanHeader, check_plan
from enginewright.runtime.shared.errors import BundleError
from tests.runtime.tensorrt_bundles import plan


@pytest.mark.parametrize(
    ("mask", "capabilities"),
    [
        (1, ("7.5",)),
        (2, ("8.0",)),
        (0b11110, ("8.0", "8.6", "8.9", "12.0")),
        (0x3F, ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")),
    ],
)
def test_fields(mask: int, capabilities: tuple[str, ...]) -> None:
    header = PlanHeader.parse(plan(5000, mask=mask)[:HEADER_BYTES], "e.plan")
    assert header == PlanHeader(5000, "1.7.1.116", capabilities)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "e.plan: 0 bytes, .* has 64: it was cut off"),
        (plan()[:63], "e.plan: 63 bytes"),
        (plan(magic=b"XXXX"), "e.plan: magic: it begins with b'XXXX' instead of b'vtrt'"),
        (plan(mask=0), "e.plan: compute capabilities: the mask 0x0 has none"),
        (plan(mask=0x84), "e.plan: compute capabilities: the mask 0x84 has 0x80, which this"),
    ],
)
def test_what_is_no_header(data: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        PlanHeader.parse(data, "e.plan")


def test_against_a_manifest() -> None:
    fields: dict[str, Any] = {
        "size": 4096,
        "version": "1.7.1.116",
        "compute_capabilities": ("8.0", "8.6", "8.9"),
    }
    header = PlanHeader.parse(plan(), "e.plan")
    check_plan(header, "e.plan", **fields)
    for changed, message in (
        ({"size": 4097}, "e.plan: bytes: the plan's header has 4096, .*manifest.json 4097"),
        ({"version": "1.7.1.117"}, "e.plan: version: the plan's header has 1.7.1.116, .*manifest.json 1.7.1.117"),
        ({"compute_capabilities": ("8.9",)}, "e.plan: compute capabilities: .* 8.0, 8.6, 8.9, manifest.json 8.9"),
    ):
        with pytest.raises(BundleError, match=message):
            check_plan(header, "e.plan", **(fields | changed))
