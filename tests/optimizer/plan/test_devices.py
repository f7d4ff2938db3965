from __future__ import annotations

import pytest

from enginewright.optimizer.plan.devices import default_shares, find_devices, known_gpus
from enginewright.optimizer.recipes.gpus import KNOWN
from enginewright.plugins.shared.errors import TargetError


def test_the_table_is_whole() -> None:
    gpus = known_gpus()
    assert [gpu.name for gpu in gpus] == ["H200", "H100", "A100", "L40S", "L4", "RTX 4090", "RTX 5090"]
    for gpu in gpus:
        assert gpu.capability in KNOWN
        assert set(gpu.peaks) == {"bf16", "f32"} and gpu.peaks["bf16"] > gpu.peaks["f32"] > 1e12
        assert 20e9 < gpu.memory < 200e9 and 2e11 < gpu.bandwidth < 1e13
        assert "https://" in gpu.source
    shares = default_shares()
    assert 0 < shares.bandwidth <= 1 and 0 < shares.compute <= 1 and 0 < shares.memory <= 1


def test_figures_that_everybody_knows() -> None:
    h100, h200 = (next(g for g in known_gpus() if g.name == name) for name in ("H100", "H200"))
    assert (h100.memory, h100.bandwidth, h100.peaks["bf16"]) == (80e9, 3.35e12, 989e12)
    assert h200.peaks == h100.peaks and (h200.memory, h200.bandwidth) == (141e9, 4.8e12)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["h100"], ["H100"]),
        (["RTX 4090", "nvidia-l4"], ["RTX 4090", "L4"]),
        (["NVIDIA GeForce RTX 5090, h200", "H200"], ["RTX 5090", "H200"]),
        (["cpu", "l40s"], [None, "L40S"]),
    ],
)
def test_names(given: list[str], names: list[str | None]) -> None:
    assert [gpu.name if gpu is not None else None for gpu in find_devices(given)] == names


@pytest.mark.parametrize(
    ("name", "hint"),
    [("h1000", "Did you mean h100?"), ("a100-pcie", "Did you mean a100?"), ("xyz", "Known are H200, H100, A100")],
)
def test_unknown_devices(name: str, hint: str) -> None:
    with pytest.raises(TargetError, match="isn't a known device") as error:
        find_devices([name])
    assert hint in str(error.value) and "cpu (this machine)" in str(error.value)
