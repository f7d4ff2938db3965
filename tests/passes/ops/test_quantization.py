"""The quantized ops against loops written from docs/inside/numerics.md, and against the float ops they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.embedding import embedding
from enginewright.passes.ops.experts import grouped_linear
from enginewright.passes.ops.linear import linear
from enginewright.passes.ops.quantization import (
    groups_of,
    quantize_activation,
    quantized_embedding,
    quantized_grouped_linear,
    quantized_linear,
)

ew = torch.ops.ew
GROUPS = [(0, 0), (32, 32), (32, 0), (0, 32)]
KINDS = {"8 bits": (8, False), "4 bits": (4, False), "4 bits with offsets": (4, True)}
Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def quantized_weight(*shape: int, group: int, bits: int = 8, shifted: bool = False) -> Weight:
    """Values of all integers that there may be, scales, and offsets if there are any."""
    least = 0 if shifted else -(1 << bits - 1)
    values = torch.randint(least, least + (1 << bits), shape, dtype=torch.int8)
    factors = (*shape[:-1], groups_of(shape[-1], group))
    return values, (torch.rand(factors) * 0.01).half(), torch.randn(factors).half() * 0.1 if shifted else None


def spread(scales: torch.Tensor, group: int, size: int) -> torch.Tensor:
    return scales.float().repeat_interleave(group or size, -1)[..., :size]


@pytest.mark.parametrize(("shape", "group"), [((3, 64), 32), ((2, 3, 40), 32), ((5, 7), 0), ((4, 100), 64)])
def test_activations_are_quantized_group_by_group(shape: tuple[int, ...], group: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape) * torch.logspace(-6, 3, shape[-1])
    values, scales, sums = quantize_activation(x, group)
    width = group or shape[-1]
    for row, v, s, t in zip(*(a.flatten(0, -2).numpy() for a in (x, values, scales, sums)), strict=True):
        for g, start in enumerate(range(0, shape[-1], width)):
            part = row[start : start + width]
            most = np.abs(part).max()
            assert s[g] == most / np.float32(127)
            want = np.rint(part * (np.float32(127) / most))
            np.testing.assert_array_equal(v[start : start + width], want)
            assert t[g] == want.sum()
            assert np.abs(want).max() == 127
    opcheck(ew.quantize_activation.default, (x, group))


def test_groups_without_a_scale() -> None:
    tiny = 1e-38  # 127 / tiny is infinite in float32
    x = torch.tensor([[0.0, 0.0, tiny, -tiny, math.nan, 1.0, math.inf, 1.0, 1.0, -2.0]])
    values, scales, sums = quantize_activation(x, 2)
    assert values.tolist() == [[0] * 8 + [64, -127]]  # 63.5 to even
    assert scales[0, :2].tolist() == [0.0, 0.0]
    assert scales[0, 2:4].isnan().all()
    assert sums.tolist() == [[0, 0, 0, 0, -63]]


@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 64), (1, 33, 72), (4, 2, 1200)])
@pytest.mark.parametrize(("weight_group", "activation_group"), GROUPS)
def test_a_product_is_the_sum_over_groups(m: int, n: int, k: int, weight_group: int, activation_group: int) -> None:
    torch.manual_seed(2)
    weight, weight_scales, _ = quantized_weight(n, k, group=weight_group)
    inputs = quantize_activation(torch.randn(m, k), activation_group)
    bias = torch.randn(n)
    arguments = (*inputs, weight, weight_scales, None, bias, 8, weight_group, activation_group)
    got = quantized_linear(*arguments)
    x = inputs[0].double() * spread(inputs[1], activation_group, k)
    want = x @ (weight.double() * spread(weight_scales, weight_group, k)).t() + bias
    # float32 rounds once a group and value: at most 39 groups of sums below 100.
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-4)
    opcheck(ew.quantized_linear.default, arguments)


@pytest.mark.parametrize(("m", "n", "k", "group"), [(3, 5, 64, 32), (4, 33, 192, 64), (3, 6, 256, 128), (4, 5, 72, 72)])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_product_with_4_bits(m: int, n: int, k: int, group: int, shifted: bool) -> None:
    torch.manual_seed(2)
    weight, weight_scales, offsets = quantized_weight(n, k, group=group, bits=4, shifted=shifted)
    inputs = quantize_activation(torch.randn(m, k), group)
    arguments = (*inputs, weight, weight_scales, offsets, torch.randn(n), 4, group, group)
    got = quantized_linear(*arguments)
    exact = weight.double() * spread(weight_scales, group, k)
    if offsets is not None:
        exact = exact + spread(offsets, group, k)
    want = (inputs[0].double() * spread(inputs[1], group, k)) @ exact.t() + arguments[6]
    # float32 rounds twice a group: at most 6 groups of sums of about 10.
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-4)
    opcheck(ew.quantized_linear.default, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_a_sum_is_the_groups(kind: str) -> None:
    """Bits, in exact arithmetic rounded where docs/inside/numerics.md rounds."""
    torch.manual_seed(3)
    bits, shifted = KINDS[kind]
    weight, weight_scales, offsets = quantized_weight(4, 96, group=32, bits=bits, shifted=shifted)
    values, scales, sums = quantize_activation(torch.randn(2, 96), 32)
    got = quantized_linear(values, scales, sums, weight, weight_scales, offsets, None, bits, 32, 32)
    for m in range(2):
        for n in range(4):
            total = np.float32(0)
            for g in range(3):
                part = slice(32 * g, 32 * g + 32)
                isum = int((values[m, part].int() * weight[n, part].int()).sum())
                factor = weight_scales[n, g].float().numpy() * scales[m, g].numpy()
                total = np.float32(float(np.float32(isum)) * float(factor) + float(total))
                if offsets is not None:
                    shift = np.float32(int(sums[m, g])) * scales[m, g].numpy()
                    total = np.float32(float(shift) * offsets[n, g].item() + float(total))
            assert got[m, n].item() == total


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_the_same_in_any_company(kind: str) -> None:
    torch.manual_seed(4)
    bits, shifted = KINDS[kind]
    weight = quantized_weight(9, 64, group=32, bits=bits, shifted=shifted)
    x = torch.randn(6, 64)
    whole = quantized_linear(*quantize_activation(x, 32), *weight, None, bits, 32, 32)
    for m in range(6):
        alone = quantized_linear(*quantize_activation(x[m : m + 1], 32), *weight, None, bits, 32, 32)
        assert torch.equal(alone[0], whole[m])


def test_a_nan_is_seen() -> None:
    weight = quantized_weight(3, 8, group=0)
    x = torch.ones(2, 8)
    x[1, 5] = math.nan
    y = quantized_linear(*quantize_activation(x, 0), *weight, None, 8, 0, 0)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


@pytest.mark.parametrize(("vocabulary", "hidden", "group"), [(5, 64, 32), (40, 72, 32), (7, 6, 0)])
def test_rows_of_a_quantized_table(vocabulary: int, hidden: int, group: int) -> None:
    table, scales, _ = quantized_weight(vocabulary, hidden, group=group)
    ids = torch.tensor([3, 0, vocabulary - 1], dtype=torch.int32)
    want = embedding(ids, table.float() * spread(scales, group, hidden))
    assert torch.equal(quantized_embedding(ids, table, scales, None, 8, group), want)
    opcheck(ew.quantized_embedding.default, (ids, table, scales, None, 8, group))


@pytest.mark.parametrize(("vocabulary", "hidden", "group"), [(5, 64, 32), (40, 192, 64), (6, 256, 128), (7, 72, 72)])
@pytest.mark.parametrize("shifted", [False, True])
def test_rows_of_a_table_of_4_bits(vocabulary: int, hidden: int, group: int, shifted: bool) -> None:
    table, scales, offsets = quantized_weight(vocabulary, hidden, group=group, bits=4, shifted=shifted)
    ids = torch.tensor([[3, 0], [vocabulary - 1, 1]])
    rows = table.double() * spread(scales, group, hidden)  # exact, and the sum is rounded once
    rows = rows if offsets is None else rows + spread(offsets, group, hidden)
    assert torch.equal(quantized_embedding(ids, table, scales, offsets, 4, group), rows.float()[ids])
    opcheck(ew.quantized_embedding.default, (ids, table, scales, offsets, 4, group))


@pytest.mark.parametrize("starts", [[0, 2, 2, 5], [0, 0, 0, 4]])
@pytest.mark.parametrize(("kind", "group"), [("8 bits", 0), *((kind, 32) for kind in KINDS)])
def test_experts_take_their_rows(starts: list[int], kind: str, group: int) -> None:
    torch.manual_seed(5)
    bits, shifted = KINDS[kind]
    weight, weight_scales, offsets = quantized_weight(3, 6, 64, group=group, bits=bits, shifted=shifted)
    bias, x = torch.randn(3, 6), torch.randn(starts[-1], 64)
    values, scales, sums = quantize_activation(x, group)
    integers = (weight, weight_scales, offsets, bias, bits, group, group)
    arguments = (values, scales, sums, torch.tensor(starts), *integers)
    got = quantized_grouped_linear(*arguments)
    exact = weight.float() * spread(weight_scales, group, 64)
    if offsets is not None:
        exact = exact + spread(offsets, group, 64)
    exact = grouped_linear(values.float() * spread(scales, group, 64), torch.tensor(starts), exact, bias)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-4)
    opcheck(ew.quantized_grouped_linear.default, arguments)


def test_quantizing_costs_less_than_a_percent() -> None:
    torch.manual_seed(6)
    x, weight = torch.randn(16, 576), torch.randn(48, 576)
    largest = weight.abs().unflatten(1, (-1, 32)).amax(-1)
    weight_scales = (largest / 127).half()
    values = (weight / spread(weight_scales, 32, 576)).round().clamp(-127, 127).to(torch.int8)
    got = quantized_linear(*quantize_activation(x, 32), values, weight_scales, None, None, 8, 32, 32)
    error = got - linear(x, weight, None)
    # Rounding to 127 steps of a group's largest: an error of 1/127/sqrt(12) of about 2.2 deviations, on both sides.
    assert error.norm() / linear(x, weight, None).norm() < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_group": 64}, "in groups of 64"),
        ({"activation_group": 16, "weight_group": 0}, "scales"),
        ({"weight": torch.zeros(3, 60, dtype=torch.int8)}, "differ in K"),
        ({"weight": torch.zeros(3, 64)}, "weight torch.float32"),
        ({"weight_scales": torch.zeros(3, 4).half()}, "weight_scales"),
        ({"weight_bits": 7}, "weights of 7 bits"),
        ({"weight_bits": 4, "activation_group": 0}, "activations in 0"),
        ({"weight_bits": 4, "weight_group": 0, "weight_scales": torch.zeros(3, 1).half()}, "in groups of 0"),
        ({"weight_bits": 4, "weight_group": 16, "weight_scales": torch.zeros(3, 4).half()}, "in groups of 16"),
        ({"weight_bits": 4, "weight": torch.zeros(3, 40, dtype=torch.int8)}, r"of 4 bits, torch.Size\(\[3, 40"),
        ({"weight_offsets": torch.zeros(3, 2).half()}, "weight_offsets .* of 8 bits"),
        ({"weight_bits": 4, "weight_offsets": torch.zeros(3, 2)}, "weight_offsets torch.float32"),
        ({"weight_bits": 4, "weight_offsets": torch.zeros(3, 1).half()}, "weight_offsets"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    values, scales, sums = quantize_activation(torch.randn(2, 64), 32)
    weight, weight_scales, _ = quantized_weight(3, 64, group=32)
    arguments: dict[str, object] = {"values": values, "scales": scales, "sums": sums, "weight": weight}
    arguments |= {"weight_scales": weight_scales, "weight_offsets": None, "bias": None}
    arguments |= {"weight_bits": 8, "weight_group": 32, "activation_group": 32} | change
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        ew.quantized_linear(**meta)
