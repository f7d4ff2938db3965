"""TensorRT's plugins: that they register, and launch the right grid with the right arguments whatever the shapes.

No engine is built and nothing is launched here: TensorRT itself and a GPU are missing.
"""

from __future__ import annotations

import pytest

from enginewright.runtime.shared.errors import TargetError
from tests.plugins.tensorrt import symbolic

ATTENTION = {"scale": 0.125, "window": 0, "softcap": 0.0, "has_sinks": False, "has_slopes": False}
HALF_CACHES = [(["P", 32, 3, 64], "HALF"), (["P", 32, 3, 64], "HALF")]
SCALES = [(["P", 32, 3], "FLOAT"), (["P", 32, 3], "FLOAT")]
STEP = [(["B", "M"], "INT32"), (["B1"], "INT32"), (["B"], "INT32"), ([9], "FLOAT"), ([9], "FLOAT")]
SIZES = [
    {"T": tokens, "B": requests, "B1": requests + 1, "M": blocks, "P": 1000}
    for tokens, requests, blocks in ((1, 1, 1), (7, 7, 16), (100, 3, 17), (8192, 1, 256), (300, 256, 1024))
]


def test_the_plugins_register(bindings):
    step = "block_table, q_start, kv_len, sinks, slopes"
    attributes = "scale, window, softcap, has_sinks, has_slopes"
    caches, scales = "k_cache, v_cache", "k_scales, v_scales"
    assert bindings.submit(symbolic.names).result() == [
        f"ew::kv_write(k, v, slots, {caches}; ) -> 2",
        f"ew::quantized_kv_write(k, v, slots, {caches}, {scales}; ) -> 4",
        f"ew::ordered_kv_write(k, v, slots, {caches}; ) -> 2",
        f"ew::paged_attention(q, {caches}, {step}; {attributes}) -> 1, tactics",
        f"ew::paged_attention_parts(q, {caches}, {step}; {attributes}, split_keys) -> 2, tactics",
        f"ew::quantized_paged_attention(q, {caches}, {scales}, {step}; {attributes}) -> 1, tactics",
        f"ew::quantized_paged_attention_parts(q, {caches}, {scales}, {step}; {attributes}, split_keys) -> 2, tactics",
        "ew::combine_splits(parts, lse; dtype) -> 1",
    ]


@pytest.mark.parametrize("quantized", [False, True])
def test_a_write_is_in_place_and_has_a_program_for_each_token(bindings, quantized):
    inputs = [(["T", 3, 64], "HALF"), (["T", 3, 64], "HALF"), (["T"], "INT32")]
    inputs += [(shape, "FP8") for shape, _ in HALF_CACHES] + SCALES if quantized else HALF_CACHES
    plugin = "ew::quantized_kv_write" if quantized else "ew::kv_write"
    for sizes, got in zip(SIZES, bindings.submit(symbolic.launch, plugin, inputs, {}, SIZES).result(), strict=True):
        assert got.grid == (sizes["T"], 1, 1) and got.block == 128
        assert got.integers == (1000 * 32, 3 * 64, 3 * 64)
        assert [alias for *_, alias in got.outputs] == list(range(3, len(inputs)))
        assert [shape for shape, *_ in got.outputs[:2]] == [[1000, 32, 3, 64]] * 2
        assert got.parameters == len(inputs) + 3 + len(got.outputs)  # inputs, integers, outputs


@pytest.mark.parametrize("quantized", [False, True])
def test_attention_has_a_program_for_each_tile_and_head(bindings, quantized):
    q = (["T", 9, 64], "BF16" if quantized else "HALF")
    caches = [(shape, "INT8") for shape, _ in HALF_CACHES] + SCALES if quantized else HALF_CACHES
    plugin = "ew::quantized_paged_attention" if quantized else "ew::paged_attention"
    inputs = [q, *caches, *STEP]
    results = bindings.submit(symbolic.launch, plugin, inputs, ATTENTION, SIZES).result()
    for sizes, got in zip(SIZES, results, strict=True):
        assert got.constants["CLAMP"] is True
        queries = got.constants["QUERIES"]
        assert got.constants["SPLIT_KEYS"] == 0 and queries > 1
        assert got.grid == (sizes["T"] // queries + sizes["B"], 3, 1)
        assert got.integers == (sizes["B"], sizes["M"], 9 * 64, 1000, sizes["T"])
        assert got.outputs == [([sizes["T"], 9, 64], q[1], -1)]
        assert 0 < got.shared_memory <= 48 * 1024
        assert got.parameters == len(inputs) + 5 + 1
        assert got.tactics == [1]  # of several TensorRT would take the fastest on inputs that it makes up
        assert got.types == [[of for _, of in (*inputs, q)]]


def test_decoding_is_split_by_the_room_in_the_table(bindings):
    attributes = {**ATTENTION, "window": 100, "softcap": 30.0, "has_sinks": True, "split_keys": 512}
    inputs = [(["T", 9, 64], "HALF"), *HALF_CACHES, *STEP]
    results = bindings.submit(symbolic.launch, "ew::paged_attention_parts", inputs, attributes, SIZES).result()
    splits = [1, 1, 2, 16, 64]
    for sizes, got, n in zip(SIZES, results, splits, strict=True):
        assert got.grid == (sizes["T"] + sizes["B"], 3, n)
        assert got.outputs == [([sizes["T"], 9, n, 64], "FLOAT", -1), ([sizes["T"], 9, n], "FLOAT", -1)]
        assert got.parameters == len(inputs) + 5 + 2
    constants = results[0].constants
    chosen = [constants[name] for name in ("WINDOW", "SOFTCAP", "SINKS", "SLOPES", "SPLIT_KEYS")]
    assert chosen == [100, 30.0, True, False, 512]

    inputs = [(["T", 9, "S", 64], "FLOAT"), (["T", 9, "S"], "FLOAT")]
    sizes = [{"T": 7, "S": n} for n in splits]
    results = bindings.submit(symbolic.launch, "ew::combine_splits", inputs, {"dtype": "bf16"}, sizes).result()
    for got, n in zip(results, splits, strict=True):
        assert got.grid == (7 * 9, 1, 1) and got.integers == (n,)
        assert got.outputs == [([7, 9, 64], "BF16", -1)] and got.parameters == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: (["T", "N", 64], "HALF")}, "heads vary from run to run"),
        ({0: (["T", 9, 64], "INT64")}, "INT64 isn't a float type"),
        ({1: (["P", 32, 3, 64], "INT32")}, "no cache of DataType.INT32"),
        ({0: (["T", 8, 64], "HALF")}, "8 query heads aren't a multiple of 3"),
        ({0: (["T", 9, 64], "BF16")}, "queries of bf16 over a cache of f16"),
    ],
)
def test_what_no_kernel_has_is_refused(bindings, change, message):
    inputs = [(["T", 9, 64], "HALF"), *HALF_CACHES, *STEP]
    for i, of in change.items():
        inputs[i] = of
    with pytest.raises(TargetError, match=message):
        bindings.submit(symbolic.launch, "ew::paged_attention", inputs, ATTENTION, SIZES).result()


def test_an_unknown_gpu_is_refused(bindings):
    with pytest.raises(TargetError, match="known are 80, 86"):
        bindings.submit(symbolic.unknown_gpu).result()
