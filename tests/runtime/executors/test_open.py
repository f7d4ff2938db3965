"""Which target runs, with what context, and what can't be asked of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import choose_target, context_of, make_executor, open_executor, target_groups
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.errors import BundleError, CapacityError, RequestError
from tests.plugins.steps import tiny_onnx as tiny


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(tiny.write_bundle(tmp_path_factory.mktemp("open") / "tiny.bundle"))


def test_the_first_target_that_is_ready(bundle: Bundle) -> None:
    onnx, ready, unbuilt = bundle.targets["onnx"], TargetManifest(), TargetManifest(state="needs-build", needs="a GPU")
    for targets, expected in (
        ({"onnx": onnx}, "onnx"),
        ({"onnx": onnx, "cpu": ready}, "cpu"),
        ({"onnx": onnx, "cpu": unbuilt}, "onnx"),
    ):
        assert choose_target(Bundle(bundle.path, bundle.manifest, targets), None) == expected
    assert choose_target(Bundle(bundle.path, bundle.manifest, {"cpu": ready, "onnx": onnx}), "onnx") == "onnx"


def test_targets_that_do_not_run(bundle: Bundle) -> None:
    unbuilt = TargetManifest(state="needs-build", needs="a GPU")
    with pytest.raises(BundleError, match="no target 'cpu'; it has onnx"):
        choose_target(bundle, "cpu")
    with pytest.raises(BundleError, match="'cpu' is not built; it needs a GPU"):
        choose_target(Bundle(bundle.path, bundle.manifest, {"cpu": unbuilt}), None)
    other = Bundle(bundle.path, bundle.manifest, {"other": TargetManifest()})
    for name in ("other", None):
        with pytest.raises(BundleError, match=r"can't run target 'other'\n.*cpu or onnx"):
            choose_target(other, name)
    with pytest.raises(BundleError, match="no target 'cpu'; it has none"):
        choose_target(Bundle(bundle.path, bundle.manifest, {}), None)


def test_context(bundle: Bundle) -> None:
    assert context_of(bundle, None) == tiny.CONTEXT
    assert context_of(bundle, 2) == 2
    assert [g.block_size for g in target_groups(bundle, "onnx", 16)] == [17, 17]
    with pytest.raises(CapacityError, match="41 tokens are more than the 40"):
        context_of(bundle, 41)
    for wrong in (1, 0, -3):
        with pytest.raises(RequestError, match=f"context: {wrong} is out of range\n.*from 2 to 40"):
            context_of(bundle, wrong)


def test_slots_from_memory(bundle: Bundle) -> None:
    one = sum(cache_block_bytes(g) for g in target_groups(bundle, "onnx", 16))
    for memory, most, slots in ((3 * one, 8, 3), (3 * one - 1, 8, 2), (100 * one, 8, 8)):
        config = SchedulerConfig(most)
        executor = open_executor(bundle, "onnx", 16, Placement(threads=1), config, memory=memory, buckets=True)
        assert executor.blocks == {"full": slots, "window": slots}
        executor.close()


def test_what_is_for_another_target(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="isa: 'avx2' is for target 'cpu', not 'onnx'"):
        make_executor(bundle, "onnx", {}, 16, Placement(isa="avx2"))
    with pytest.raises(RequestError, match="provider: 'cuda' is for target 'onnx' or 'stablehlo', not 'cpu'"):
        make_executor(bundle, "cpu", {}, 16, Placement(provider="cuda"))


def test_a_provider_that_is_not_there(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="provider: there is no 'rocket'"):
        make_executor(bundle, "onnx", {"full": 1, "window": 1}, 16, Placement(provider="rocket"))
