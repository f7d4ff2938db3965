"""The operator Linear in onnxruntime has the cpu target's numbers, bit for bit, in any batch; what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import ModelProto
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from enginewright.passes.ops.epilogue import LINEAR_ACTIVATIONS
from enginewright.plugins.native.executable import isas
from tests.plugins.onnx.kernels.linear_operator import (
    FORMATS,
    Float,
    by_cpu_target,
    by_onnxruntime,
    open_model,
    open_product,
    operator_model,
    random_product,
)

REFUSED = (Fail, InvalidArgument, RuntimeException)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "n", "k", "bias"), [(1, 5, 32, True), (9, 70, 96, False), (35, 129, 160, True)])
def test_a_product_has_the_bits_of_the_cpu_target(
    isa: str, name: str, tokens: int, n: int, k: int, bias: bool, rng: np.random.Generator
) -> None:
    product = random_product(name, n, k, rng, bias=bias)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    output = by_onnxruntime(open_product(product, threads=2, isa=isa), x)
    assert np.abs(output).max() > 1
    np.testing.assert_array_equal(output, by_cpu_target(product, x, isa))


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.storage != "int4"])
def test_sizes_that_fill_no_panel_and_no_group(name: str, rng: np.random.Generator) -> None:
    k = 36 if FORMATS[name].layout == "sparse32" else 37
    product = random_product(name, 33, k, rng)
    x = rng.standard_normal((3, k)).astype(np.float32)
    np.testing.assert_array_equal(by_onnxruntime(open_product(product), x), by_cpu_target(product, x))


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4 with offsets"])
@pytest.mark.parametrize("activation", LINEAR_ACTIVATIONS)
def test_activations(name: str, activation: str, rng: np.random.Generator) -> None:
    product = random_product(name, 40, 64, rng, bias=True, activation=activation)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_array_equal(by_onnxruntime(open_product(product), x), by_cpu_target(product, x))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_alone_is_a_row_in_a_batch(name: str, rng: np.random.Generator) -> None:
    """With one thread and with two; memory that a larger call has used says nothing of a smaller one's numbers."""
    product = random_product(name, 130, 96, rng)
    x = rng.standard_normal((67, 96)).astype(np.float32)
    one, two = open_product(product), open_product(product, threads=2)
    whole = by_onnxruntime(two, x)
    np.testing.assert_array_equal(by_onnxruntime(one, x), whole)
    for start, stop in ((0, 1), (5, 9), (31, 64), (66, 67)):
        for session in (one, two):
            np.testing.assert_array_equal(by_onnxruntime(session, x[start:stop]), whole[start:stop])


def test_calls_at_the_same_time(rng: np.random.Generator) -> None:
    """Calls are of one session, whose threads they share, and of another with other sizes."""
    products = [random_product("int8 in groups", 96, 64, rng), random_product("int4 with offsets", 33, 160, rng)]
    sessions = [open_product(product, threads=2) for product in products]
    xs = [rng.standard_normal((rows, 64 + 96 * (rows % 2))).astype(np.float32) for rows in range(1, 41)]

    def run(x: Float) -> Float:
        return by_onnxruntime(sessions[len(x) % 2], x)

    alone = [run(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for output, expected in zip(pool.map(run, xs * 5), alone * 5, strict=True):
            np.testing.assert_array_equal(output, expected)


def test_no_rows_give_none(rng: np.random.Generator) -> None:
    for name in ("f32", "int4"):
        assert by_onnxruntime(open_product(random_product(name, 8, 32, rng)), np.zeros((0, 32), np.float32)).size == 0


def _refusal(model: ModelProto, **entries: str) -> str:
    with pytest.raises(REFUSED) as raised:
        open_model(model, entries=entries)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("f32", "weight", "enginewright: weight has 4096 bytes, and not 8192"),
        ("bf16, 2:4", "weight", "enginewright: weight has 1152 bytes, and not 2304"),
        ("int8", "scales", "enginewright: scales has 64 bytes, and not 128"),
        ("int4 with offsets", "offsets", "enginewright: offsets has 64 bytes, and not 128"),
    ],
)
def test_a_weight_of_another_size(name: str, part: str, message: str, rng: np.random.Generator) -> None:
    product = random_product(name, 40, 32, rng)
    stored = product.stored()
    assert len(stored[part]) == 2  # panels
    stored[part] = stored[part][:1]
    assert message in _refusal(operator_model(product.attributes(), stored))


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("f32", {"storage": "f8"}, "storage: there is no f8"),
        ("f32", {"activation": "softmax"}, "activation: there is no softmax"),
        ("f32", {"n": 0}, "n and k: 1 to 2^"),
        ("f32", {"k": 1 << 40}, "n and k: 1 to 2^"),
        ("fp8", {"weight_group": -1}, "groups"),
        ("fp8", {"sparse": 1}, "sparse: k is a multiple of 4, and fp8 has no such layout"),
        ("int4", {"activation_group": 64}, "int4: weight and x are in the same groups"),
        ("int8 in groups", {"activation_group": 64}, "int8: groups are multiples of 4, and the same"),
    ],
)
def test_attributes_that_make_no_product(
    name: str, changed: dict[str, int | str], message: str, rng: np.random.Generator
) -> None:
    product = random_product(name, 40, 64, rng)
    assert f"enginewright: {message}" in _refusal(operator_model(product.attributes() | changed, product.stored()))


def test_parts_that_are_missing_or_too_many(rng: np.random.Generator) -> None:
    plain, scaled = (random_product(name, 40, 64, rng) for name in ("f32", "int8 in groups"))
    scales = {"scales": scaled.stored()["scales"]}
    for product, stored in (
        (scaled, {"weight": scaled.stored()["weight"]}),
        (plain, plain.stored() | {"scales": np.zeros((2, 1, 32), np.float16)}),
    ):
        assert "scales: int8, int4 and fp8 have some" in _refusal(operator_model(product.attributes(), stored))
    with_offsets = scaled.stored() | {"offsets": scales["scales"]}
    assert "offsets: only int4" in _refusal(operator_model(scaled.attributes(), with_offsets))
    computed = operator_model(plain.attributes(), plain.stored(), computed=("weight",))
    assert "weight must be the file's, and not computed" in _refusal(computed)


def test_x_of_another_width_and_a_bias_of_another_size(rng: np.random.Generator) -> None:
    product = random_product("f32", 40, 64, rng, bias=True)
    model = operator_model(product.attributes(), product.stored(), computed=("bias",))
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "any"
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "some"
    session = open_model(model)
    x, bias = np.zeros((1, 2, 64), np.float32), np.zeros(40, np.float32)
    assert session.run(None, {"x": x, "bias": bias})[0].shape == (1, 2, 40)
    with pytest.raises(REFUSED, match="x: its last dimension is not 64"):
        session.run(None, {"x": x[..., :63], "bias": bias})
    with pytest.raises(REFUSED, match="bias: it has not 40 elements"):
        session.run(None, {"x": x, "bias": bias[:39]})


@pytest.mark.parametrize("threads", ["0", "-1", "1025", "two", "2 "])
def test_threads_that_are_no_number(threads: str, rng: np.random.Generator) -> None:
    product = random_product("f32", 8, 8, rng)
    model = operator_model(product.attributes(), product.stored())
    message = f"enginewright.threads: {threads} isn't a number from 1 to 1024"
    assert message in _refusal(model, threads=threads)


def test_an_instruction_set_that_there_is_none_of(rng: np.random.Generator) -> None:
    product = random_product("f32", 8, 8, rng)
    message = "enginewright.isa: avx9000 is not available: this processor or this build lacks it"
    assert message in _refusal(operator_model(product.attributes(), product.stored()), isa="avx9000")
