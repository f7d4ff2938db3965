from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.passes.ir.chosen_codes import ChosenCodes
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode
from enginewright.passes.ir.quantized import quantized
from enginewright.passes.ir.weights import Concat, Slice, Source
from enginewright.runtime.shared.errors import CapacityError


def codes(rows: int, size: int, offsets: bool, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if offsets else (-8, 8)
    values = torch.randint(low, high, (rows, size), generator=generator).to(torch.int8)
    factors = [torch.rand(rows, size // 32, generator=generator).half() for _ in range(1 + offsets)]
    return Codes(values, *factors)


def base(rows: int, size: int) -> Source:
    return Source("w", (rows, size), torch.float32, lambda: torch.zeros(rows, size))


@pytest.mark.parametrize(("rows", "size"), [(4, 32), (33, 96)])
@pytest.mark.parametrize("offsets", [False, True])
def test_files_and_memory_give_the_same(rows: int, size: int, offsets: bool, tmp_path: Path) -> None:
    codes_of, code_format = codes(rows, size, offsets), CodeFormat(4, 32, offsets)
    chosen = ChosenCodes.of(base(rows, size), code_format, codes_of)
    stored = ChosenCodes.of(base(rows, size), code_format, codes_of, tmp_path / "0.codes")
    assert chosen == stored
    assert hash(chosen) == hash(stored)
    assert chosen.describe() == stored.describe()
    for expr in (chosen, stored):
        assert expr.shape == (rows, size)
        assert torch.equal(expr.evaluate(), decode(codes_of, code_format))
        values, scales, shifts = quantized(Concat((Slice(expr, 0, 1, rows), expr)), code_format)
        assert torch.equal(values.evaluate(), torch.cat([codes_of.values[1:], codes_of.values]))
        assert torch.equal(scales.evaluate(), torch.cat([codes_of.scales[1:], codes_of.scales]))
        assert (shifts is not None) == offsets
    assert chosen.parts() == base(rows, size).parts()


def test_other_bits_are_another_weight() -> None:
    code_format = CodeFormat(4, 32)
    first, second = (ChosenCodes.of(base(4, 32), code_format, codes(4, 32, False, seed)) for seed in (0, 1))
    assert first != second


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "no such folder" / "0.codes"
    with pytest.raises(CapacityError, match="no such folder"):
        ChosenCodes.of(base(4, 32), CodeFormat(4, 32), codes(4, 32, False), place)
