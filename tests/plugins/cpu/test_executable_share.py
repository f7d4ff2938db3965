"""Programs that share caches, arena and threads: one of any size, and others specialised to steps of one size each."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from enginewright.passes.memory.specialize_program import specialize_program
from enginewright.plugins.cpu.executable import CpuProgram, isas
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError
from tests.plugins.cpu.test_executable_decoder import GROUPS, Decoder, V, logits, step_input


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def specialized(decoder: Decoder, share: CpuProgram, *sizes: int) -> CpuProgram:
    return CpuProgram(specialize_program(decoder.builder.program(), *sizes), decoder.builder.weights, share=share)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_what_one_writes_the_others_read(decoder: Decoder, threads: int, isa: str) -> None:
    """A prompt in chunks and decodes, each in another program: the bits of one program alone."""
    any_size = decoder.program(threads, isa)
    chunk, last, two, one = (specialized(decoder, any_size, *s) for s in ((40, 2, 1), (7, 1, 1), (2, 2, 2), (1, 1, 1)))
    alone = decoder.program(1, isa)
    first, second = [(5 * i) % V for i in range(60)], [(3 * i + 1) % V for i in range(40)]
    tables = [[4, 2], [0, 9]]
    for program, ids, past, own in (
        (chunk, [first[:30], second[:10]], [0, 0], tables),
        (last, [second[10:17]], [10], tables[1:]),
        (two, [first[30:31], second[17:18]], [30, 17], tables),
        (any_size, [first[31:50], second[18:19]], [31, 18], tables),
        (two, [first[50:51], second[19:20]], [50, 19], tables),
        (one, [first[51:52]], [51], tables[:1]),
        (any_size, [first[52:53]], [52], tables[:1]),
    ):
        rows = [len(ids[0]) - 1] if program is chunk else None
        step = step_input(ids, past, groups=GROUPS, tables=own, rows=rows, return_logits=True)
        np.testing.assert_array_equal(logits(program.run(step)), logits(alone.run(step)))
    assert one.threads == any_size.threads == threads and one.isa == isa
    ours, theirs = any_size.cache_arrays("full", 1), one.cache_arrays("full", 1)
    assert all(np.shares_memory(a, b) for a, b in zip(ours, theirs, strict=True))
    assert one.cache_bytes == any_size.cache_bytes == alone.cache_bytes


def test_the_largest_arena_is_everybodys(decoder: Decoder) -> None:
    any_size = decoder.program()
    assert any_size.arena_bytes == 0
    large, small = (specialized(decoder, any_size, n, 1, 1) for n in (200, 3))
    bytes_of = [program.lowered.arena_bytes.constant for program in (large, small)]
    assert bytes_of[1] < bytes_of[0] == large.arena_bytes == small.arena_bytes == any_size.arena_bytes
    ids = [i % V for i in range(200)]
    first = logits(large.run(step_input([ids], groups=GROUPS, return_logits=True)))
    small.run(step_input([ids[:3]], groups=GROUPS))
    any_size.run(step_input([ids[:40]], groups=GROUPS))
    assert any_size.arena_bytes == bytes_of[0]
    any_size.run(step_input([ids], groups=GROUPS, rows=list(range(200))))  # all rows: more than was planned for
    assert any_size.arena_bytes > bytes_of[0]
    np.testing.assert_array_equal(logits(large.run(step_input([ids], groups=GROUPS, return_logits=True))), first)


def test_what_is_shared_lives_as_long_as_either(decoder: Decoder) -> None:
    any_size = decoder.program()
    one = specialized(decoder, any_size, 1, 1, 1)
    any_size.run(step_input([[1, 2, 3]], groups=GROUPS))
    step = step_input([[4]], [3], groups=GROUPS, return_logits=True)
    expected = logits(any_size.run(step))
    del any_size
    gc.collect()
    np.testing.assert_array_equal(logits(one.run(step)), expected)


def test_another_size_is_refused_and_changes_nothing(decoder: Decoder) -> None:
    any_size = decoder.program()
    two = specialized(decoder, any_size, 2, 2, 2)
    step = step_input([[1], [2]], groups=GROUPS, return_logits=True)
    expected = logits(two.run(step))
    for ids in ([[1, 2], [3]], [[1], [2], [3]]):
        with pytest.raises(RequestError, match="ends at element"):
            two.run(step_input(ids, groups=GROUPS))
    np.testing.assert_array_equal(logits(two.run(step)), expected)


def test_other_caches_and_own_options_are_refused(decoder: Decoder) -> None:
    lowered, weights = decoder.builder.program(), decoder.builder.weights
    any_size = decoder.program()
    (group,) = lowered.cache_groups
    grouped = lowered.model_copy(update={"cache_groups": (group, group.model_copy(update={"name": "more"}))})
    with pytest.raises(BundleError, match="has 2 cache groups, and the one that it shares caches with 1"):
        CpuProgram(grouped, weights, share=any_size)
    layers = group.model_copy(update={"layers": (*group.layers, 7)})
    with pytest.raises(BundleError, match="cache group full isn't as in the program"):
        CpuProgram(lowered.model_copy(update={"cache_groups": (layers,)}), weights, share=any_size)
    for options in ({"blocks": {"full": 4}}, {"threads": 1}, {"isa": "portable"}):
        with pytest.raises(EnginewrightError, match="blocks, threads, isa and tuning are those"):
            CpuProgram(lowered, weights, share=any_size, **options)  # type: ignore[arg-type]
    with pytest.raises(EnginewrightError, match="blocks must name the cache groups"):
        CpuProgram(lowered, weights)
