"""Step inputs that don't hold together are refused before anything is written, and the message names the culprit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import RequestError
from tests.plugins.native.lowered_builder import LoweredBuilder, T, sampling_batch, sound_program, step_input

ONES = np.ones((6, 8), np.float32)


def set_entry(name: str, index: int, value: int) -> Callable[[StepInput], None]:
    def change(step: StepInput) -> None:
        step.arrays[name].reshape(-1)[index] = value

    return change


def cut(name: str) -> Callable[[StepInput], None]:
    def change(step: StepInput) -> None:
        step.arrays[name] = step.arrays[name][..., :-1]

    return change


def as_int64(step: StepInput) -> None:
    step.arrays["ids"] = step.ids.astype(np.int64)  # type: ignore[assignment]


def other_group(step: StepInput) -> None:
    step.arrays["slots:sliding"] = step.arrays["slots:full"]


# The step: two requests, 3 tokens behind 31, and 1 token behind nothing; blocks 0 and 1, and 2.
BAD_STEPS: list[tuple[Callable[[StepInput], None], str]] = [
    (set_entry("ids", 2, 6), r"ids\[2\] = 6 is not in \[0, 6\)"),
    (set_entry("ids", 0, -1), r"ids\[0\] = -1"),
    (set_entry("positions", 1, -4), r"positions\[1\] = -4"),
    (set_entry("rows", 0, 4), r"rows\[0\] = 4 is not in \[0, 4\)"),
    (set_entry("slots:full", 0, 8 * 32), r"slots:full\[0\] = 256 is not in \[0, 256\)"),
    (set_entry("slots:full", 0, -1), r"slots:full\[0\] = -1"),
    (set_entry("slots:full", 1, 3), r"slots:full\[1\] = 3 is not where block_table:full has it, 32"),
    (set_entry("block_table:full", 0, 8), r"block_table:full\[0, 0\] = 8 is not in \[0, 8\)"),
    (set_entry("block_table:full", 0, -1), r"block_table:full\[0, 0\] = -1"),
    (set_entry("q_start", 0, 1), r"q_start\[0\] is not 0"),
    (set_entry("q_start", 1, 5), r"q_start\[2\] is less than the one before"),
    (set_entry("q_start", 2, 3), "q_start ends with 3, not T = 4"),
    (set_entry("kv_len", 0, 2), r"kv_len\[0\] = 2 is less than the request's 3 tokens"),
    (set_entry("kv_len", 0, 65), r"block_table:full has 2 blocks a request, too few for kv_len\[0\] = 65"),
    (cut("positions"), "positions has 3 entries, not T = 4"),
    (cut("kv_len"), "block table must have B = 1 rows|q_start has 3 entries"),
    (cut("slots:full"), "slots:full has 3 entries, not T = 4"),
    (cut("block_table:full"), "too few for kv_len"),
    (as_int64, "ids must be an int32 array"),
    (other_group, "the program takes no slots:sliding"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_STEPS)
def test_bad_step_input(spoil: Callable[[StepInput], None], message: str) -> None:
    program = sound_program().build()
    good = step_input([[1, 2, 3], [4]], [31, 0], groups=["full"], return_logits=True)
    program.run(good)
    bad = step_input([[1, 2, 3], [4]], [31, 0], groups=["full"])
    spoil(bad)
    before = program.cache_arrays("full", 0)[0].copy()
    with pytest.raises(RequestError, match=message):
        program.run(bad)
    np.testing.assert_array_equal(program.cache_arrays("full", 0)[0], before)
    assert program.run(good).logits is not None  # and the program still works


def test_empty_step() -> None:
    with pytest.raises(RequestError, match="ids has 0 entries"):
        sound_program().build().run(step_input([[]], [1], groups=["full"], rows=[]))


def test_ids_that_a_step_computes_are_checked_when_they_are_known() -> None:
    b = LoweredBuilder()
    ids = b.buffer(T, dtype="i32")
    b.step("elementwise", [b.input("positions")], [ids], fn="add", scalar=2)
    step = b.step("embedding", [ids, b.weight(ONES)], [b.buffer(T, 8)], "wpe")
    assert b.run(step, 4)[0].shape == (4, 8)
    with pytest.raises(RequestError, match=r"step 1 embedding \(wpe\): ids\[4\] = 6 is not in \[0, 6\)"):
        b.run(step, 5)


def test_bad_sampling_parameters() -> None:
    program = sound_program().build()
    step = step_input([[1, 2]], groups=["full"])
    for name, value, message in (
        ("temperature", -1.0, "temperature"),
        ("temperature", np.nan, "temperature"),
        ("top_k", -1, "top_k"),
        ("top_p", 1.5, "top_p"),
        ("min_p", -0.5, "min_p"),
    ):
        sampling = sampling_batch(1)
        sampling = replace(sampling, **{name: np.array([value], getattr(sampling, name).dtype)})
        with pytest.raises(RequestError, match=f"sampled row 0 has a .*{message}"):
            program.run(step.changed(sampling=sampling))
    with pytest.raises(RequestError, match="logprobs = 9"):
        program.run(step.changed(sampling=sampling_batch(1, logprobs=9)))
    with pytest.raises(RequestError, match="temperature must have 1 entries, not 2"):
        program.run(step.changed(sampling=sampling_batch(2)))


def test_trace_of_no_step() -> None:
    with pytest.raises(RequestError, match=r"step 4 is not in \[0, 4\)"):
        sound_program().build().trace(step_input([[1]], groups=["full"]), 4)
