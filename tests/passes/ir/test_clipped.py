"""Clipped weights of 4 bits against a loop over their definition."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.clipped import SHARES, Choices, Clipped, round_groups
from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.quantized import QuantizationCounts, quantized
from enginewright.passes.ir.stacked_weights import Stack
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import PassError


def source(value: torch.Tensor, name: str = "w") -> Source:
    return Source(name, tuple(value.shape), value.dtype, lambda: value)


def choices(*shape: int) -> torch.Tensor:
    return torch.randint(0, len(SHARES), shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@pytest.mark.parametrize(("shape", "group"), [((3, 64), 32), ((5, 128), 64), ((2, 4, 64), 32)])
@pytest.mark.parametrize("offsets", [False, True])
def test_integers_scales_and_offsets_are_their_definition(
    shape: tuple[int, ...], group: int, offsets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginewright.passes.ir.clipped._CHUNK_ELEMENTS", 2 * shape[-1])
    torch.manual_seed(1)
    weight, chosen = torch.randn(shape), choices(*shape[:-1], shape[-1] // group)
    chosen[..., 0] = 0
    clipped = Clipped(source(weight), Choices.from_indices(chosen), CodeFormat(4, group, offsets))
    codes = clipped.codes()
    assert (codes.values.shape, codes.values.dtype, codes.scales.shape) == (shape, torch.int8, chosen.shape)
    assert (codes.offsets is not None) == offsets
    for index in torch.cartesian_prod(*(torch.arange(n) for n in chosen.shape)).tolist():
        *row, g = index
        part = weight[tuple(row)][g * group : (g + 1) * group]
        share = torch.tensor(SHARES)[int(chosen[tuple(index)])]
        values = codes.values[tuple(row)][g * group : (g + 1) * group].float()
        scale = codes.scales[tuple(index)].float()
        if codes.offsets is not None:
            offset = codes.offsets[tuple(index)].float()
            assert scale == (share * (part.max() - part.min()) / 15).half()
            assert offset == (share * part.min()).half()
            expected = ((part - offset) / scale).round().clamp(0, 15)
        else:
            assert scale == (share * part[part.abs().argmax()] / -8).half()
            expected = (part / scale).round().clamp(-8, 7)
        assert torch.equal(values, expected)
    assert clipped.shape == shape
    assert clipped.evaluate().shape == shape


def test_all_of_a_group_is_in_range_with_the_largest_share() -> None:
    weight = torch.linspace(-1, 1, 64).repeat(2, 1)
    codes = round_groups(weight, CodeFormat(4, 32), SHARES[0])
    # m is at seven steps, so that nothing is farther than half a step from its integer.
    step = codes.scales.float().abs().repeat_interleave(32, dim=-1)
    off = (codes.values * codes.scales.float().repeat_interleave(32, dim=-1) - weight).abs()
    assert (off <= step * 0.501).all()
    assert codes.values.abs().max() == 7


@pytest.mark.parametrize("offsets", [False, True])
def test_a_group_of_zeros_stays_zero(offsets: bool) -> None:
    weight = torch.cat((torch.zeros(1, 32), torch.ones(1, 32)), dim=1)
    chosen = torch.zeros(1, 2, dtype=torch.uint8)
    value = Clipped(source(weight), Choices.from_indices(chosen), CodeFormat(4, 32, offsets)).evaluate()
    assert torch.equal(value[:, :32], weight[:, :32])
    torch.testing.assert_close(value[:, 32:], weight[:, 32:], rtol=0.15, atol=0)  # 8/7 of the range, where 7 steps fit


def test_experts_keep_their_provenance_and_equal_choices_are_equal() -> None:
    experts = Stack(tuple(source(torch.randn(2, 32), f"e{i}") for i in range(3)))
    chosen = choices(3, 2, 1)
    one, same = (Clipped(experts, Choices.from_indices(chosen.clone()), CodeFormat(4, 32)) for _ in range(2))
    assert one == same
    assert not one.of_source
    values, _, _ = quantized(one, CodeFormat(4, 32))
    values.evaluate()
    assert values.counts == QuantizationCounts(3 * 2 * 32), "chosen here, not kept"
    assert one.parts(0)[2] == Part("e2", 0, 2)
    assert one != Clipped(experts, Choices.from_indices((chosen + 1) % len(SHARES)), CodeFormat(4, 32))
    assert one.describe().startswith("clipped(stack(")


def test_what_does_not_fit_is_refused() -> None:
    weight, chosen = source(torch.randn(2, 64)), torch.zeros(2, 2, dtype=torch.uint8)
    for code_format in (CodeFormat(8, 32), CodeFormat(4, 48), CodeFormat(4, 64)):
        with pytest.raises(PassError, match=r"for a weight|a weight of shape"):
            Clipped(weight, Choices.from_indices(chosen), code_format)
    with pytest.raises(PassError, match="too large for float16"):
        round_groups(torch.full((1, 32), 1e9), CodeFormat(4, 32), 1.0)
