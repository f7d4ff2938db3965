"""Our kernels as handlers of XLA's: the cpu target's bits in any format, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.stablehlo import kernels as package
from enginewright.plugins.stablehlo.compile.module_text import KINDS, Array, ModuleText, Tensor
from enginewright.plugins.stablehlo.kernels.library import NAME, find_handlers, handlers_library
from enginewright.plugins.stablehlo.section import ATTENTION, KERNELS, LINEAR, ROTATE, WRITE_CACHE
from enginewright.plugins.stablehlo.serve.pjrt_library import Pjrt
from enginewright.plugins.steps.host_arrays import in_place
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError
from tests.plugins.onnx.kernels.linear_operator import FORMATS, Product, by_cpu_target, random_product

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

Said = Mapping[str, int | float | str]


@pytest.fixture(scope="module")
def pjrt() -> Pjrt:
    client = Pjrt("cpu", 2)
    client.register(KERNELS)
    return client


def call(pjrt: Pjrt, name: str, arrays: list[Array], shape: tuple[int, ...], said: Said) -> Array:
    """The result of a module with one call."""
    text = ModuleText()
    arrays = [a if a.dtype.isbuiltin == 1 else a.view(f"u{a.dtype.itemsize}") for a in arrays]
    operands: list[Tensor] = [text.argument(a.shape, KINDS[a.dtype]) for a in arrays]
    written = text.finish([text.custom_call(name, operands, shape, said)])
    (result,) = pjrt.run(pjrt.compile(written.encode(), name), [pjrt.view(in_place(a)) for a in arrays])
    return np.array(pjrt.array(result))


def multiply(pjrt: Pjrt, product: Product, x: Array, changes: Said = {}) -> Array:  # noqa: B006 (it is read only)
    stored = product.stored()
    attributes = (
        product.attributes() | {"offsets": int("offsets" in stored), "bias": int("bias" in stored)} | dict(changes)
    )
    return call(pjrt, LINEAR, [x, *stored.values()], (len(x), len(product.weight)), attributes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 5, 32), (35, 129, 160)])
def test_a_product_has_the_bits_of_the_cpu_target(pjrt: Pjrt, name: str, tokens: int, n: int, k: int) -> None:
    rng = np.random.default_rng(3)
    product = random_product(name, n, k, rng, bias=n == 5, activation="silu" if n == 5 else "")
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    output = multiply(pjrt, product, x)
    assert np.abs(output).max() > 0.1
    np.testing.assert_array_equal(output, by_cpu_target(product, x))


def test_what_a_product_refuses(pjrt: Pjrt) -> None:
    rng = np.random.default_rng(3)
    product, x = random_product("int8", 40, 64, rng), np.ones((2, 64), np.float32)
    wrong: dict[str, Said] = {
        "there is no int7": {"storage": "int7"},
        "there is no mish": {"activation": "mish"},
        "n and k": {"n": 0},
        "x: it isn't of rows of k": {"k": 60},
        "weight has 4096 bytes": {"n": 70},
        "offsets: this format has none": {"offsets": 1},
        "argument 3 is missing": {"bias": 1},
        "arguments too many": {"storage": "f32", "n": 8, "k": 32},
    }
    for words, changes in wrong.items():
        with pytest.raises(BundleError, match=f"enginewright: .*{words}"):
            multiply(pjrt, product, x, changes)


def rows_of(cache: Array, length: int, heads: int, size: int, keys: bool) -> Array:
    """[B*Nkv, C, D] in the kernels' blocks as [B, Nkv, C, D]."""
    blocks = cache.reshape(-1, length // 32, heads, *((size, 32) if keys else (32, size)))
    by_place = np.moveaxis(blocks, -1, -2) if keys else blocks
    return np.moveaxis(by_place, 2, 1).reshape(-1, heads, length, size)


@pytest.mark.parametrize(
    ("tokens", "window", "heads", "size", "width"), [(1, 0, 6, 16, 16), (5, 0, 2, 24, 8), (40, 7, 4, 8, 8)]
)
def test_attention_over_slots(pjrt: Pjrt, tokens: int, window: int, heads: int, size: int, width: int) -> None:
    """Against NumPy, with numbers in the slots that nobody may see; a row that rests is left alone."""
    rng, kv, length = np.random.default_rng(5), 2, 64
    index = np.asarray([9, 3, length - 1 if tokens == 1 else 0])
    sizes = {"requests": 3, "tokens": tokens, "places": length, "kv_heads": kv}
    caches, copies = [], []
    for keys, wide in ((1, size), (0, width)):
        before = rng.standard_normal((3 * kv, length, wide)).astype(np.float32)
        update = rng.standard_normal((3 * tokens, kv, wide)).astype(np.float32)
        after = call(pjrt, WRITE_CACHE, [before, update, index], before.shape, sizes | {"size": wide, "keys": keys})
        expected = rows_of(before, length, kv, wide, bool(keys)).copy()
        for b in range(3):
            new = np.moveaxis(update.reshape(3, tokens, kv, wide)[b], 0, 1)
            expected[b, :, index[b] : index[b] + tokens] = new
        np.testing.assert_array_equal(rows_of(after, length, kv, wide, bool(keys)), expected)
        caches.append(after)
        copies.append(expected)
    q = rng.standard_normal((3 * tokens, heads, size)).astype(np.float32)
    attributes = sizes | {"heads": heads, "size": size, "width": width, "window": window, "scale": 0.3}
    output = call(pjrt, ATTENTION, [q, *caches, index], (3 * tokens, heads, width), attributes)
    for b in range(3 if tokens > 1 else 2):
        for t in range(tokens):
            place = int(index[b]) + t
            first = max(0, place + 1 - window) if window else 0
            for h in range(heads):
                k, v = (cache[b, h // (heads // kv), first : place + 1] for cache in copies)
                scores = k @ q[b * tokens + t, h] * 0.3
                weights = np.exp(scores - scores.max())
                np.testing.assert_allclose(output[b * tokens + t, h], weights @ v / weights.sum(), atol=2e-6, rtol=1e-5)
    for words, changes in {
        "multiple of 32": {"places": 48},
        "beyond the slot": {"places": 32},
        "2\\^24": {"tokens": 0},
    }.items():
        if words == "beyond the slot" and tokens > 1:
            continue
        with pytest.raises(BundleError, match=f"enginewright: .*{words}"):
            call(pjrt, ATTENTION, [q, *caches, index], (3 * tokens, heads, width), {**attributes, **changes})


def test_rotations(pjrt: Pjrt) -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((7, 3, 10)).astype(np.float32)
    angles = rng.standard_normal((7, 4)).astype(np.float32)
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    cosines, sines = table[:, None, :4], table[:, None, 4:]
    for interleaved in (0, 1):
        output = call(pjrt, ROTATE, [x, table], x.shape, {"heads": 3, "size": 10, "interleaved": interleaved})
        first, second = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
        pair = first * cosines - second * sines, second * cosines + first * sines
        expected = np.stack(pair, -1).reshape(7, 3, 8) if interleaved else np.concatenate(pair, -1)
        np.testing.assert_allclose(output[..., :8], expected, atol=1e-6)
        np.testing.assert_array_equal(output[..., 8:], x[..., 8:])
    with pytest.raises(BundleError, match=r"enginewright: the table: \[T, 2F\]"):
        call(pjrt, ROTATE, [x, table[:3]], x.shape, {"heads": 3, "size": 10, "interleaved": 0})


def test_where_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handlers_library() == find_handlers()
    client = Pjrt("cpu", 1)
    with pytest.raises(TargetError, match="'enginewright_dance', which this version of enginewright doesn't have"):
        client.register(["enginewright_dance"])
    with pytest.raises(TargetError, match="'system', which"):
        client.register(["system"])
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    assert find_handlers() is None
    with pytest.raises(MissingDependencyError, match=rf"{NAME}, .* is missing beside .*\n.*pip"):
        client.register(KERNELS)
    client.provider = "rocket"
    with pytest.raises(TargetError, match="call our kernels, which run on a CPU, and not on 'rocket'"):
        client.register(KERNELS)
