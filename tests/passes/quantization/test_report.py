from __future__ import annotations

import torch

from enginewright.passes.framework.records import AffectedWeight, QuantizationReport, StoredWeight
from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes
from enginewright.passes.ir.quantized import quantized
from enginewright.passes.ir.weights import Cast, Concat, Source
from enginewright.passes.quantization.report import already_quantized, quantization_report


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
    exact, rounded = (quantized(known, CodeFormat(bits, 32))[0] for bits in (4, 8))
    for expr in (exact, rounded):
        expr.evaluate()
    assert quantization_report([("kept", exact), ("rounded", rounded)]) == QuantizationReport(128, 0, 0, (), kept=64)


def test_weights_that_the_source_had_quantized_are_listed() -> None:
    """By how it packed them; scales and offsets aren't listed by themselves, and parts may be of several kinds."""
    codes = Codes(torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 1).half())

    def known(stored: str) -> SourceCodes:
        def read() -> torch.Tensor:
            return torch.ones(2, 32)

        return SourceCodes(
            "w", (2, 32), torch.float32, read, "", stored, format=CodeFormat(4, 32), read_codes=lambda: codes
        )

    values, scales, _ = quantized(known("A of 4 bits"), CodeFormat(4, 32))
    anew, _, _ = quantized(known("A of 4 bits"), CodeFormat(8, 32))
    both = Concat((known("A of 4 bits"), Cast(known("B"), torch.float32), known("B")))
    weights = [("kept", values), ("kept.scales", scales), ("anew", anew), ("floats", both)]
    for expr in (values, anew):
        expr.evaluate()
    assert already_quantized([*weights, ("plain", source("plain", torch.ones(2, 4)))]) == [
        StoredWeight("kept", "A of 4 bits", kept=True),
        StoredWeight("anew", "A of 4 bits", kept=False),
        StoredWeight("floats", "A of 4 bits and B", kept=False),
    ]


def test_a_program_in_floats_has_none() -> None:
    assert quantization_report([("w", source("w", torch.ones(2, 4)))]) is None
