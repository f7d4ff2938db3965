from __future__ import annotations

import torch

from enginewright.passes.framework.records import AffectedWeight, QuantizationReport
from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes
from enginewright.passes.ir.quantized import quantized
from enginewright.passes.ir.weights import Source
from enginewright.passes.quantization.report import quantization_report


def source(name: str, value: torch.Tensor) -> Source:
    return Source(name, tuple(value.shape), value.dtype, lambda: value)


def test_counts_are_those_of_evaluated_weights() -> None:
    plain = source("plain", torch.ones(2, 4))
    good, _, _ = quantized(source("good", torch.randn(3, 64)), CodeFormat(8, 32))
    small = torch.tensor([[1e-9, 0.0, 1.0, 2.0], [1e-9, 0.0, 0.0, 0.0]])
    bad, scales, _ = quantized(source("bad", small), CodeFormat(8, 2))
    weights = [("plain", plain), ("good", good), ("bad", bad), ("scales", scales)]
    assert quantization_report(weights) is None, "nothing was evaluated"
    good.evaluate()
    assert quantization_report(weights) == QuantizationReport(192, 0, 0, ())
    for _ in range(2):  # a second evaluation counts nothing twice
        bad.evaluate()
        assert quantization_report(weights) == QuantizationReport(200, 0, 2, (AffectedWeight("bad", 0, 2),))


def test_integers_of_the_source_are_counted_as_kept() -> None:
    codes = Codes(torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 1).half())
    known = SourceCodes(
        "w", (2, 32), torch.float32, lambda: torch.ones(2, 32), format=CodeFormat(4, 32), read_codes=lambda: codes
    )
    kept, rounded = (quantized(known, CodeFormat(bits, 32))[0] for bits in (4, 8))
    for expr in (kept, rounded):
        expr.evaluate()
    assert quantization_report([("kept", kept), ("rounded", rounded)]) == QuantizationReport(128, 0, 0, (), kept=64)


def test_a_program_in_floats_has_none() -> None:
    assert quantization_report([("w", source("w", torch.ones(2, 4)))]) is None
