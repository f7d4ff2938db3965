"""The choices for a machine change no bit of any result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import enginewright
from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.plugins.native.executable import TUNABLES
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.step_costs import StepSizes

SIZES = (StepSizes((70,), (70,)), StepSizes((1, 33, 1), (400, 40, 1)), StepSizes((1,), (512,)))

TUNINGS: tuple[dict[str, int], ...] = (
    {"small_work": 1, "task_bytes": 1, "task_rows": 1, "thread_tasks": 64},
    {"small_work": 1, "task_bytes": 1 << 30, "task_rows": 5, "thread_tasks": 1, "split_tiles": 64},
    {"small_work": 1, "task_rows": 1 << 20, "thread_tasks": 3, "split_tiles": 1, "spin_microseconds": 1},
    {"small_work": 1 << 40, "spin_microseconds": 300},
)


@pytest.fixture(scope="module", params=["f32", "bf16", "int8", "int4"])
def bundle(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("tuned") / f"{request.param}.bundle"
    enginewright.export(tiny_folder, path, recipe=request.param, targets=["cpu"])
    return Bundle.open(path)


def logits(bundle: Bundle, tuning: dict[str, int] | None, threads: int) -> list[FloatArray]:
    """Computes those of every token of each step, over caches that were filled alike."""
    runner = StepRunner(bundle, SIZES, threads=threads, tuning=tuning)
    rows = []
    for sizes in SIZES:
        runner.fill_caches()
        step = runner.step(sizes)
        step = step.changed(rows=np.arange(len(step.ids), dtype=np.int32), outputs=("logits",))
        output = runner.program.run(step).logits
        assert output is not None and np.ptp(output) > 0
        rows.append(output)
    return rows


def test_no_choice_changes_a_bit(bundle: Bundle) -> None:
    untuned = logits(bundle, None, 1)
    for tuning in TUNINGS:
        for threads in (1, 3):
            for one, other in zip(untuned, logits(bundle, tuning, threads), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{tuning}, {threads} threads")


def test_every_tunable_is_tried_above() -> None:
    assert {name for tuning in TUNINGS for name in tuning} == set(TUNABLES)


@pytest.mark.parametrize("name", TUNABLES)
def test_its_range(name: str, tiny_bundle: Path) -> None:
    opened = Bundle.open(tiny_bundle)
    for fits in (0, 1, TUNABLES[name]):
        StepRunner(opened, SIZES, threads=1, tuning={name: fits})
    for wrong in (-1, TUNABLES[name] + 1):
        with pytest.raises(EnginewrightError, match=f"{name} = {wrong} is not in"):
            StepRunner(opened, SIZES, threads=1, tuning={name: wrong})


def test_an_unknown_name(tiny_bundle: Path) -> None:
    with pytest.raises(EnginewrightError, match="there is no panels"):
        StepRunner(Bundle.open(tiny_bundle), SIZES, threads=1, tuning={"panels": 1})
