"""Paged attention in Triton's interpreter against the reference. A GPU's turn is tests/gpu."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from enginewright.runtime.shared.errors import TargetError
from tests.plugins.gpu import cases
from tests.plugins.gpu.cases import Case

# Sums of 512 products of float32 in another order; float16 rounds results of up to 4, and weights, to 11 bits, and
# bfloat16 to 8.
TOLERANCE = {"f32": 1e-5, "f16": 4e-3, "bf16": 3.2e-2}

DECODE = {"new": (1, 1, 1), "past": (0, 36, 127)}
PREFILL = {"new": (5, 1, 40), "past": (0, 36, 70)}

LATENT = {"kv_heads": 1, "size": 40, "value_size": 24, "values_in_keys": True}

SMALL = [
    Case(**DECODE, **LATENT, heads=40, split_keys=64),
    Case(**PREFILL, **LATENT, heads=20),
    Case(**PREFILL, **LATENT, heads=3, dtype="bf16", cache="fp8"),
    Case(**DECODE, **LATENT, heads=128, dtype="bf16", cache="int8"),
    Case(**DECODE, **(LATENT | {"size": 576, "value_size": 512}), heads=16, dtype="bf16"),
    Case(**PREFILL, **(LATENT | {"size": 24}), heads=17, window=20, dtype="f16"),
    Case(**DECODE),
    Case(**DECODE, heads=8, kv_heads=1, size=80, dtype="f16"),
    Case(**DECODE, split_keys=64, window=20, softcap=5.0, sinks=True, slopes=True),
    Case(**DECODE, split_keys=64, dtype="f16", cache="int8"),
    Case(new=(1, 1), past=(511, 300), heads=4, kv_heads=1, size=128, split_keys=256, cache="fp8"),
    Case(**PREFILL, dtype="f16"),
    Case(**PREFILL, dtype="bf16"),
    Case(**DECODE, split_keys=64, window=20, softcap=5.0, sinks=True, slopes=True, dtype="bf16"),
    Case(**DECODE, dtype="bf16", cache="fp8"),
    Case(**PREFILL, dtype="bf16", cache="int8"),
    Case(**PREFILL, heads=4, kv_heads=4, size=80, value_size=48, window=20),
    Case(**PREFILL, sinks=True, slopes=True, softcap=5.0, block_size=16),
    Case(**PREFILL, cache="fp8", dtype="f16"),
    Case(**PREFILL, cache="int8"),
    Case(**PREFILL, cache="bf16"),
    Case(new=(3, 0, 20), past=(0, 0, 70), heads=8, kv_heads=1, size=16, split_keys=64),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_attention_is_the_reference(interpreter, case):
    assert interpreter.submit(cases.difference, case).result() < TOLERANCE[case.dtype]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    "case",
    [
        Case(**DECODE, split_keys=64, dtype="bf16", cache="fp8"),
        Case(**PREFILL, dtype="bf16", cache="fp8", window=20),
        Case(**PREFILL, heads=4, kv_heads=1, size=128, dtype="f16", block_size=16),
    ],
    ids=str,
)
def test_attention_as_newer_gpus_have_it(interpreter, case, capability):
    """fp8 by its type rather than by bits; 9.0 has other tiles, and 10.0 looks blocks up in the loop."""
    assert interpreter.submit(cases.difference_as_on, case, capability).result() < TOLERANCE[case.dtype]


GROUPS = [(4, 4), (6, 2), (4, 1), (8, 1)]  # 1, 3, 4 and 8 query heads a key/value head
STEPS = [((1, 1, 1), (0, 255, 511), 128), ((1, 30, 65), (300, 0, 447), None)]


@pytest.mark.parametrize("cache", ["", "int8", "fp8"])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_attention_is_the_reference_everywhere(interpreter, dtype, group, size, cache):
    for (new, past, split_keys), window in itertools.product(STEPS, (0, 100)):
        case = Case(new, past, *group, size, dtype=dtype, cache=cache, window=window, split_keys=split_keys)
        assert interpreter.submit(cases.difference, case).result() < TOLERANCE[dtype], case


@pytest.mark.parametrize(
    "case",
    [Case(**DECODE, split_keys=64), Case(**PREFILL, dtype="f16"), Case(**PREFILL, **LATENT, heads=40, dtype="bf16")],
    ids=str,
)
def test_company_changes_no_bit(interpreter, case):
    assert interpreter.submit(cases.alone_and_together, case).result()


@pytest.mark.parametrize(("dtype", "cache"), [("f32", ""), ("f16", "int8")])
def test_memory_that_is_given_takes_result_and_parts(interpreter, dtype, cache):
    case = Case(**DECODE, dtype=dtype, cache=cache, split_keys=64)
    assert interpreter.submit(cases.preallocated, case).result()


LISTED = [
    (Case(**DECODE, split_keys=64), [(0, 0), (1, 0), (2, 0), (2, 1)]),
    (Case(**DECODE, **LATENT, heads=40, split_keys=64), [(0, 0), (1, 0), (2, 0), (2, 1)]),
    (
        Case(new=(1, 1), past=(511, 300), heads=4, kv_heads=1, size=32, split_keys=256, cache="fp8"),
        [(0, 0), (0, 1), (1, 0), (1, 1)],
    ),
    (Case(**DECODE, split_keys=64, window=20, sinks=True, dtype="f16"), [(0, 0), (1, 0), (2, 1)]),
    (
        Case(new=(1,), past=(1300,), heads=2, kv_heads=2, size=16, split_keys=64, window=100),
        [(0, 18), (0, 19), (0, 20)],
    ),
]


@pytest.mark.parametrize(("case", "parts"), LISTED, ids=str)
@pytest.mark.parametrize("workers", [1, 3, 100])
def test_a_work_list_gives_the_same_bits(interpreter, case, parts, workers):
    same, work, _ = interpreter.submit(cases.listed, case, workers).result()
    assert same
    assert work[0] == len(parts) and list(zip(work[1::2], work[2::2], strict=True)) == parts


def test_requests_without_keys_are_not_in_the_list(interpreter):
    """Padding has such requests: their results are 0."""
    assert interpreter.submit(cases.listed_padding).result() == [5, 0, 0, 1, 0, 1, 1, 1, 2, 3, 0]


@pytest.mark.parametrize("split_keys", [0, 64])
def test_what_lies_before_the_window_is_not_looked_at(interpreter, split_keys):
    case = Case(new=(1, 2), past=(150, 90), heads=4, kv_heads=2, size=16, window=20, split_keys=split_keys)
    assert interpreter.submit(cases.behind_the_window, case).result() < TOLERANCE["f32"]


@pytest.mark.parametrize("cache", ["int8", "fp8"])
@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_small_values_keep_their_digits_in_float16(interpreter, step, cache):
    """Their scales are below the least of float16's normal numbers; weights times these must not be."""
    case = Case(**step, dtype="f16", cache=cache)
    assert interpreter.submit(cases.of_small_values, case, 2.0**-9).result() < TOLERANCE["f16"]


def test_a_key_too_many_is_noticed(interpreter):
    """Must not match: the tolerance tells a window of 20 from one of 21."""
    assert interpreter.submit(cases.one_key_more, Case(**PREFILL, window=20)).result() > 100 * TOLERANCE["f32"]


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (Case(**DECODE, dtype="f16", cache="f32"), TargetError, "queries of f16 over a cache of f32"),
        (Case(**DECODE, heads=4, kv_heads=3), TargetError, "4 query heads aren't a multiple of 3"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(interpreter, case, error, message):
    with pytest.raises(error, match=message):
        interpreter.submit(cases.difference, case).result()


@pytest.mark.parametrize(
    "case",
    [
        cases.Case((5, 1, 19), (3, 40, 0), size=32),
        cases.Case((1, 1, 1), (30, 700, 5), size=32, split_keys=512),
        cases.Case((7, 2), (3, 40), size=32, block_size=24, window=20),  # each key's block is looked up
    ],
)
def test_a_kernel_that_clamps_stays_in_its_memory(case, interpreter):
    """TensorRT times plugins on integers that it makes up: whatever they are, no address outside is read."""
    for seed in (1, 2):
        assert interpreter.submit(cases.clamped, case, seed).result() == (True, True)
