"""The functions that libraries compiled by TVM call, called as they do: steps by number, and loops on our threads."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from enginewright.plugins.native.executable import RUN_LOOP_FOR_TVM, RUN_STEP_FOR_TVM, CpuProgram
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import RequestError
from tests.plugins.native.test_executable_decoder import GROUPS, Decoder, step_input


class Value(ctypes.Structure):
    """TVM's, of which integers have the type 1."""

    _fields_ = (("type", ctypes.c_int32), ("zero", ctypes.c_uint32), ("value", ctypes.c_int64))


class Parts(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_void_p), ("tasks", ctypes.c_int32))


PACKED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Value), ctypes.c_int32, ctypes.POINTER(Value))
LOOP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(Parts), ctypes.c_void_p)
run_loop = ctypes.CFUNCTYPE(ctypes.c_int, LOOP, ctypes.c_void_p, ctypes.c_int)(RUN_LOOP_FOR_TVM)


def run_step(*numbers: int) -> None:
    arguments = (Value * max(1, len(numbers)))(*(Value(1, 0, number) for number in numbers))
    result = Value(5, 5, 5)
    assert PACKED(RUN_STEP_FOR_TVM)(None, arguments, len(numbers), ctypes.byref(result)) == 0
    assert (result.type, result.value) == (0, 0)  # TVM's None


def by_steps(decoder: Decoder, program: CpuProgram, step: StepInput) -> np.ndarray:
    arena = program.begin_for_tvm(step)
    for index in range(len(decoder.builder.steps)):
        run_step(index)
    program.end_for_tvm()
    logits, sizes = program.lowered.outputs["logits"], (len(step.ids), len(step.kv_len), len(step.rows))
    place = next(b.offset for b in program.lowered.buffers if b.name == logits.name)
    assert place is not None
    start, (rows, columns) = place.evaluate(*sizes) // 4, (size.evaluate(*sizes) for size in logits.shape)
    return arena.view(np.float32)[start : start + rows * columns].reshape(rows, columns).copy()


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def test_steps_called_one_by_one_are_a_run(decoder: Decoder) -> None:
    program, other = decoder.builder.build(threads=2), decoder.builder.build(threads=1)
    for ids in ([[1, 2]], [[5], [7, 8, 9, 10, 11, 12]], [[1, 2]]):
        step = step_input(ids, groups=GROUPS, return_logits=True)
        expected = other.run(step).logits
        assert expected is not None
        np.testing.assert_array_equal(by_steps(decoder, program, step), expected)


@pytest.mark.parametrize("tasks", [0, 1, 7])
def test_a_loop_s_parts_run_once_each(decoder: Decoder, tasks: int) -> None:
    program = decoder.builder.build(threads=3)
    program.begin_for_tvm(step_input([[1, 2]], groups=GROUPS))
    seen, lock = [], threading.Lock()

    def part(task: int, parts: ctypes._Pointer[Parts], context: int) -> int:
        with lock:
            seen.append((task, parts.contents.tasks, context))
        return 0

    assert run_loop(LOOP(part), 77, tasks) == 0
    count = tasks or 3
    assert sorted(seen) == [(i, count, 77) for i in range(count)]
    assert run_loop(LOOP(lambda task, parts, context: -1 if task == count - 1 else 0), None, tasks) == -1


def test_what_goes_wrong_is_said_at_the_end_and_no_step_runs_after_it(decoder: Decoder) -> None:
    program = decoder.builder.build()
    step = step_input([[1, 2]], groups=GROUPS, return_logits=True)
    before = by_steps(decoder, program, step)
    program.begin_for_tvm(step_input([[3, 4]], groups=GROUPS))
    run_step(0, 1)
    for index in range(len(decoder.builder.steps)):
        run_step(index)
    with pytest.raises(RequestError, match="a library called a step outside of a run"):
        program.end_for_tvm()
    program.end_for_tvm()  # it is said once
    np.testing.assert_array_equal(by_steps(decoder, program, step), before)


def test_a_thread_that_has_not_begun_runs_nothing(decoder: Decoder) -> None:
    decoder.builder.build().begin_for_tvm(step_input([[1, 2]], groups=GROUPS))
    calls: list[int] = []

    def elsewhere() -> None:
        calls.append(run_loop(LOOP(lambda task, parts, context: 0), None, 2))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert calls == [-1]


def test_a_step_is_checked_before_it_begins(decoder: Decoder) -> None:
    program, step = decoder.builder.build(), step_input([[1, 2]], groups=GROUPS)
    moved = step.changed(slots={name: slots + 1 for name, slots in step.slots.items()})
    with pytest.raises(RequestError, match=r"step: slots:.* is not where"):
        program.begin_for_tvm(moved)
