from __future__ import annotations

import pytest

from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.recipes.targets import check_storages
from enginewright.plugins.engines.gpus import KERNELS_FOR, check_kernels
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.shared.errors import TargetError


def test_gpus_with_kernels() -> None:
    assert KERNELS_FOR == ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
    check_kernels(KERNELS_FOR)
    with pytest.raises(TargetError, match=r"no kernels are compiled for compute capability 7\.5, 12\.1"):
        check_kernels(("7.5", "8.9", "12.1"))


def test_they_are_checked_before_any_work() -> None:
    f32 = load_recipe("f32").model_copy(update={"engines": EnginesSection(gpus=("7.5",))})
    with pytest.raises(TargetError, match=r"no kernels .* 7\.5"):
        check_storages(f32, ("cpu", "tensorrt"))
    with pytest.raises(TargetError, match=r"8\.0, 8\.6 has no fp8"):
        check_storages(load_recipe("fp8"), ("tensorrt",))
