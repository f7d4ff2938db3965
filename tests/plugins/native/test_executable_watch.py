"""Watching a program: every step's inputs and outputs are seen, and what is written to them is continued with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from enginewright.plugins.native.executable import isas
from tests.plugins.native.test_executable_decoder import GROUPS, Decoder, step_input

Arrays = list[npt.NDArray[Any] | None]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


@pytest.mark.parametrize("ids", [[[1, 2]], [[5], [7, 8, 9, 10, 11, 12]]])
def test_every_step_is_seen_before_and_after(decoder: Decoder, ids: list[list[int]]) -> None:
    program = decoder.builder.build()
    step = step_input(ids, groups=GROUPS, return_logits=True)
    seen: list[tuple[int, bool]] = []
    outputs: dict[int, list[npt.NDArray[Any]]] = {}

    def watch(index: int, before: bool, arrays: Arrays) -> None:
        seen.append((index, before))
        operands = decoder.builder.steps[index].inputs if before else decoder.builder.steps[index].outputs
        assert [a is not None for a in arrays] == [o.kind == "buffer" for o in operands]
        if not before:
            outputs[index] = [np.array(a) for a in arrays if a is not None]

    watched = program.watch(step, watch)
    count = len(decoder.builder.steps)
    assert seen == [(i, before) for i in range(count) for before in (True, False)]
    for index, arrays in outputs.items():
        for array, expected in zip(arrays, program.trace(step, index), strict=True):
            np.testing.assert_array_equal(array, expected)
    plain = program.run(step)
    assert watched.logits is not None and plain.logits is not None
    np.testing.assert_array_equal(watched.logits, plain.logits)


@pytest.mark.parametrize("isa", isas())
def test_what_is_written_to_a_result_is_gone_on_with(decoder: Decoder, isa: str) -> None:
    """The first step's embeddings are exchanged for those of other tokens: the logits are the other tokens'."""
    program = decoder.builder.build(isa=isa)

    def exchange(index: int, before: bool, arrays: Arrays) -> None:
        if index == 0 and not before:
            assert arrays[0] is not None
            arrays[0][:] = decoder.table[[4, 9, 30]]

    exact = program.run(step_input([[4, 9, 30]], groups=GROUPS, return_logits=True)).logits
    other = step_input([[1, 2, 3]], groups=GROUPS, return_logits=True)
    exchanged = program.watch(other, exchange).logits
    assert exchanged is not None and exact is not None
    np.testing.assert_array_equal(exchanged, exact)
    assert not np.array_equal(program.run(other).logits, exact)  # type: ignore[arg-type]


def test_what_is_written_to_a_slice_stays_in_it(decoder: Decoder) -> None:
    """A rope's input is a strided part of q, k and v: writing there changes that part alone."""
    program = decoder.builder.build()
    ropes = [i for i, s in enumerate(decoder.builder.steps) if s.op == "rope"]
    product = max(i for i in range(ropes[0]) if decoder.builder.steps[i].op == "linear")
    results: dict[int, npt.NDArray[Any]] = {}

    def zero_key(index: int, before: bool, arrays: Arrays) -> None:
        if index == ropes[1] and before:
            assert arrays[0] is not None
            arrays[0][:] = 0
        if index == ropes[1] and not before:
            results[index] = np.array(arrays[0])
        if index == product and not before:
            results[index] = np.array(arrays[0])

    program.watch(step_input([[1, 2]], groups=GROUPS), zero_key)
    assert not results[ropes[1]].any()
    assert results[product].all()


def test_an_error_of_the_watcher_ends_the_run(decoder: Decoder) -> None:
    program = decoder.builder.build()
    seen: list[int] = []

    def fail(index: int, before: bool, arrays: Arrays) -> None:
        seen.append(index)
        if index == 2:
            raise KeyError("the watcher's own")

    step = step_input([[1]], groups=GROUPS, return_logits=True)
    with pytest.raises(KeyError, match="the watcher's own"):
        program.watch(step, fail)
    assert seen == [0, 0, 1, 1, 2]
    assert program.run(step).logits is not None  # and the next run is as ever
