from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.plan.devices import default_shares, find_devices, known_gpus, read_devices
from enginewright.plugins.gpu.formats import KNOWN
from enginewright.runtime.shared.errors import TargetError


def test_the_table_is_whole() -> None:
    gpus = known_gpus()
    assert len({gpu.name for gpu in gpus}) == len(gpus) > 20
    for gpu in gpus:
        assert gpu.capability in KNOWN
        assert set(gpu.peaks) == {"bf16", "f32"} and gpu.peaks["bf16"] > gpu.peaks["f32"] > 1e12
        assert 8e9 < gpu.memory < 200e9 and 2e11 < gpu.bandwidth < 1e13 and 30 < gpu.multiprocessors < 200
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
        (["rtx3090,t4", "a100-pcie"], ["RTX 3090", "T4", "A100 PCIe"]),
    ],
)
def test_names(given: list[str], names: list[str | None]) -> None:
    assert [gpu.name if gpu is not None else None for gpu in find_devices(given)] == names


@pytest.mark.parametrize(
    ("name", "hint"),
    [("h1000", "Did you mean h100?"), ("a1000", "Did you mean a100?"), ("xyz", "Known are H200, H100, A100")],
)
def test_unknown_devices(name: str, hint: str) -> None:
    with pytest.raises(TargetError, match="isn't a known device") as error:
        find_devices([name])
    assert hint in str(error.value) and "cpu (this machine)" in str(error.value)


OWN = """
[[gpu]]
name = "My card"
capability = "8.9"
memory = 32e9
bandwidth = 500e9
peaks = { bf16 = 100e12, f32 = 50e12 }
multiprocessors = 60
"""


def test_devices_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN + OWN.replace("My card", "H100"))
    gpus = read_devices(path)
    mine, h100, l4 = find_devices(["my-card", "h100", "l4"], gpus)
    assert mine is not None and h100 is not None and l4 is not None
    assert (mine.bandwidth, mine.multiprocessors, mine.source) == (500e9, 60, str(path))
    assert h100.bandwidth == 500e9 and l4.bandwidth == 300e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no"),
        ("[gpu", "can't be read"),
        ("gpu = 3", "can't be read"),
        ("gpu = [3]", "can't be read"),
        (OWN.replace("32e9", "-1"), "memory of 'My card' is -1"),
        (OWN.replace("500e9", "nan"), "bandwidth of 'My card' is nan"),
        (OWN.replace("bf16", "fp4"), "bf16"),
        (OWN.replace("8.9", "new"), "capability 'new'"),
        (OWN.replace("My card", "cpu"), "such a GPU"),
        (OWN + "colour = 3\n", "colour"),
    ],
)
def test_files_that_are_not_devices(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(TargetError) as error:
        read_devices(path)
    assert said in str(error.value) and "mine.toml" in str(error.value) and "[[gpu]]" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"none\.toml can.t be read: No such file"):
        read_devices(tmp_path / "none.toml")
