"""Which engine of the paged form runs a step, and to what it is padded."""

from __future__ import annotations

import pytest

from enginewright.plugins.engines.blocks_plugins import PagedEngines, caps_of, limits_of, profile_of_each
from enginewright.plugins.engines.section import EngineSection, TensorRtSection
from enginewright.plugins.steps.packed_steps import StepLimits
from enginewright.plugins.steps.paged_section import PagedProfile, PagedSection
from enginewright.runtime.shared.errors import BundleError, RequestError

from .packed_bundles import DECODE, PREFILL


def section(*phases: str, profiles: tuple[PagedProfile, ...] = (DECODE, PREFILL)) -> TensorRtSection:
    engines = tuple(EngineSection(file=f"{p}.plan", bytes=1, sha256="0" * 64, phase=p) for p in phases)  # type: ignore[arg-type]
    paged = PagedSection(library="11.0", cache_groups=(), profiles=profiles, kernel_capabilities=("8.9",), split_keys=8)
    return TensorRtSection(flavour="tensorrt", compute_capabilities=("8.9",), engines=engines, paged=paged)


def test_each_engine_has_the_profile_of_its_phase() -> None:
    assert profile_of_each(section("prefill", "decode")) == (PREFILL, DECODE)
    with pytest.raises(BundleError, match="there is none for prompts"):
        profile_of_each(section("decode"))
    with pytest.raises(BundleError, match=r"there is none of the phase decode, which decode.plan has"):
        profile_of_each(section("prefill", "decode", profiles=(PREFILL,)))
    with pytest.raises(BundleError, match=r"there is none of the phase both"):
        profile_of_each(section("both"))


def test_limits() -> None:
    profiles = (DECODE, PREFILL)
    assert limits_of(profiles) == StepLimits(tokens=12, requests=8, rows=8, blocks=10)
    caps = caps_of(profiles)
    assert (caps.ragged, caps.max_tokens, caps.max_requests) == (True, 12, 8)


def program(*profiles: PagedProfile) -> PagedEngines:
    executor = PagedEngines.__new__(PagedEngines)
    executor._profiles = profiles
    return executor


def test_shapes() -> None:
    steps = program(PREFILL, DECODE)
    for (tokens, requests, rows, blocks, decodes), expected in (
        ((1, 1, 1, 1, True), (1, 1, 1, 1, 1, 1)),
        ((3, 3, 2, 5, True), (1, 4, 4, 4, 8, 1)),
        ((8, 8, 8, 9, True), (1, 8, 8, 8, 10, 1)),
        ((3, 1, 1, 3, False), (0, 12, 3, 4, 10, 0)),
        ((12, 3, 5, 10, False), (0, 12, 3, 5, 10, 0)),
    ):
        shape = steps.shape_of(tokens, requests, rows, blocks, decodes)
        sizes = (shape.profile, shape.tokens, shape.requests, shape.rows, shape.blocks, int(shape.decodes))
        assert sizes == expected
    assert steps.most(decodes=True) == (8, 8)
    assert steps.most(decodes=False) == (12, 3)
    for wrong in ((13, 1, 1, 1, False), (4, 4, 1, 1, False), (9, 9, 1, 1, True), (1, 1, 1, 11, True)):
        with pytest.raises(RequestError, match="no engine holds"):
            steps.shape_of(*wrong)
