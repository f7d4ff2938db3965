from __future__ import annotations

import pytest

from enginewright.plugins.stablehlo.section import SECTIONS, ModuleSection, StableHloSection
from enginewright.plugins.steps.linear_io import LinearCacheGroup
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import BundleError

GROUP = LinearCacheGroup(name="full", layers=(0,), kv_heads=1, key_head_size=8, value_head_size=8, mask="mask")
ONE = ModuleSection(requests=1, tokens=1, places=16, rows=1)


def section(*modules: ModuleSection) -> StableHloSection:
    return StableHloSection(
        version="1.9.0",
        jaxlib="0.10.2",
        modules=modules,
        caches=("past_key_0", "past_value_0"),
        weights=(),
        cache_groups=(GROUP,),
        summed_products=1,
    )


def test_it_comes_back_as_it_was_written() -> None:
    longer = (ONE, ModuleSection(requests=1, tokens=1, places=32, rows=1))
    saved = section(*longer, ModuleSection(requests=1, tokens=8, places=32, rows=8))
    manifest = TargetManifest(sections={"stablehlo": saved})
    assert (
        TargetManifest.from_json(manifest.to_json(), source="x", sections=SECTIONS).section(StableHloSection) == saved
    )
    assert saved.lengths == (16, 32) and saved.requests == 1
    assert [module.name for module in saved.modules] == ["decode-1x16", "decode-1x32", "score-8x32"]
    assert '"stablehlo"' not in TargetManifest().to_json()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ((ONE, ONE), "one is there twice"),
        ((ONE, ModuleSection(requests=2, tokens=1, places=32, rows=2)), "none of one request of one token in .* 32"),
    ],
)
def test_what_does_not_go_together(modules: tuple[ModuleSection, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(*modules)
    text = TargetManifest(sections={"stablehlo": section(ONE)}).to_json()
    with pytest.raises(BundleError, match=r"stablehlo.modules"):
        TargetManifest.from_json(text.replace('"places": 16', '"places": 1'), source="x", sections=SECTIONS)
