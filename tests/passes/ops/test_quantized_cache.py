"""A cache of 8 bits against definitions, and against attention over a float cache."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from torch.library import opcheck

from enginewright.passes.ops.attention import paged_attention
from enginewright.passes.ops.quantized_cache import (
    LARGEST_CODE,
    dequantize_heads,
    quantize_heads,
    quantized_kv_write,
    quantized_paged_attention,
    rotate,
    round_to_few_bits,
)

DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "size"), [(5, 2, 8), (40, 3, 80)])
def test_codes_are_the_nearest(dtype, tokens, heads, size):
    torch.manual_seed(size)
    x = torch.randn(tokens, heads, size)
    codes, scales = quantize_heads(x, dtype)
    assert codes.dtype == dtype and scales.dtype == torch.float32
    top = LARGEST_CODE[dtype]
    assert torch.equal(codes.float().abs().amax(-1), torch.full((tokens, heads), top))
    representable = torch.arange(-127, 128).float()
    if dtype is torch.float8_e4m3fn:
        representable = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        representable = representable[~representable.isnan()]
    exact = x.double() / scales[..., None].double()
    nearest = (exact[..., None] - representable).abs().amin(-1)
    # The reference's own three roundings of float32 stand between it and the nearest code.
    assert ((codes.double() - exact).abs() <= nearest + 2e-7 * top).all()
    step = 0.5 if dtype is torch.int8 else 16.0  # half a step at the largest magnitude
    assert ((dequantize_heads(codes, scales) - x).abs() <= 1.001 * step * scales[..., None]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_have_no_scale(dtype):
    x = torch.ones(4, 1, 3)
    x[0], x[1], x[2, 0, 1], x[3, 0, 2] = 0.0, 1e-40, float("nan"), float("-inf")
    codes, scales = quantize_heads(x, dtype)
    assert not codes.float().any()
    assert scales.flatten()[:2].tolist() == [0, 0] and scales.flatten()[2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("blocks", "slots", "tokens"), [(3, 4, 5), (7, 32, 40)])
def test_attention_over_what_was_written(dtype, blocks, slots, tokens):
    torch.manual_seed(0)
    k, v = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 6)
    caches = (torch.zeros(blocks, slots, 2, 8).to(dtype), torch.zeros(blocks, slots, 2, 6).to(dtype))
    nothing = torch.full((blocks, slots, 2), float("nan"))  # what no token wrote is not looked at
    table = torch.randperm(blocks)[None, : -(-tokens // slots)].int()
    index = torch.arange(tokens)
    places = table[0, index // slots] * slots + index % slots
    write = (*caches, nothing, nothing.clone(), k, v, places)
    after = quantized_kv_write(*write)
    # opcheck's other checks compare results in arithmetic that torch lacks for 8-bit floats.
    checks = ("test_schema", "test_faketensor") if dtype is torch.int8 else ("test_faketensor",)
    opcheck(torch.ops.ew.quantized_kv_write.default, write, test_utils=checks)
    assert not caches[0].float().any() and after[2].isnan().sum() == 2 * (blocks * slots - tokens)

    q, bounds = torch.randn(tokens, 4, 8), torch.tensor([0, tokens], dtype=torch.int32)
    rest = (table, bounds, torch.tensor([tokens]), 0.4, 0, 0.0, None)
    got = quantized_paged_attention(q, *after, *rest)
    pairs = ((after[0], after[2]), (after[1], after[3]))
    want = paged_attention(q, *(dequantize_heads(c, s) for c, s in pairs), *rest)
    assert torch.equal(got, want)
    floats = (
        x.index_copy(0, places.long(), new)
        for x, new in ((torch.zeros(blocks * slots, 2, 8), k), (torch.zeros(blocks * slots, 2, 6), v))
    )
    exact = paged_attention(q, *(x.unflatten(0, (blocks, slots)) for x in floats), *rest)
    # Half a step of a code is 0.4 % of a head's largest value (int8) or 6 % of the value itself (e4m3).
    assert 0 < (got - exact).abs().max() < (0.05 if dtype is torch.int8 else 0.3)
    opcheck(torch.ops.ew.quantized_paged_attention.default, (q, *after, *rest), test_utils=checks)


def test_another_type_is_refused():
    with pytest.raises(KeyError):
        quantize_heads(torch.ones(1, 1, 2), torch.float8_e5m2)


@pytest.mark.parametrize("size", [8, 24, 64, 192])
def test_a_rotation_is_a_hadamard_matrix(size):
    run = size & -size
    matrix = torch.from_numpy(scipy.linalg.hadamard(run)).double()
    x = torch.randn(3, 2, size, dtype=torch.float64)
    want = (x.unflatten(-1, (-1, run)) @ matrix).flatten(-2)
    torch.testing.assert_close(rotate(x), want)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("size", [24, 64, 256])
def test_few_bits_are_as_near_as_their_step_allows(bits, size):
    torch.manual_seed(size)
    x = torch.randn(50, 2, size)
    x[0], x[1, 0], x[2, 0, 1] = 0.0, 1e-42, float("nan")
    got = round_to_few_bits(x, bits)
    assert not got[0].any() and not got[1, 0].any() and got[2, 0].isnan().all()
    rows, rounded = x[3:].double(), got[3:].double()
    run = size & -size
    matrix = torch.from_numpy(scipy.linalg.hadamard(run)).double() / run**0.5
    turned = (rows.unflatten(-1, (-1, run)) @ matrix).flatten(-2)
    # A code is off by half a step at most, and a rotation keeps the sum of squares; the scale's own rounding is 2^-11.
    # With 4 bits the widest step is a quarter of the largest, and errors are those of a normal distribution.
    step = turned.abs().amax(-1) * {4: 31 / 127, 5: 2 / 31, 6: 2 / 63, 8: 1 / 127}[bits]
    worst = size**0.5 * step / 2 + 2**-11 * rows.norm(dim=-1)
    assert ((rounded - rows).norm(dim=-1) <= worst).all()
    if bits == 4:
        assert (rounded - rows).square().mean() < 0.0102 * rows.square().mean()
        return
    # Errors within a step are nearly uniform, whose mean square is step^2 / 12.
    share = (rounded - rows).square().mean() / (step.square().mean() / 12)
    assert 0.9 < share < 1.1
