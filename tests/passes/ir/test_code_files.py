"""Files of rounded weights: what is read is what was added, and a disk without room has none."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from enginewright.passes.formats.rounding import RoundedRows
from enginewright.passes.ir import code_files
from enginewright.passes.ir.code_files import CodeFiles
from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.ir.quantized import QuantizationCounts, quantized, round_matrix
from enginewright.passes.ir.weights import Source

FORMATS = (
    CodeFormat(4, 32),
    CodeFormat(4, 32, offsets=True),
    CodeFormat(4, 32, offsets=True, scale_block=8),
    CodeFormat(2, 16),
    CodeFormat(3, 16, offsets=True),
    CodeFormat(5, 32, offsets=True),
    CodeFormat(6, 32),
    CodeFormat(8, 32),
    CodeFormat(8, 0, kind="fp8"),
    CodeFormat(4, 64, kind="nf4"),
    CodeFormat(4, 32, kind="iq4"),
    CodeFormat(4, 32, kind="fp4"),
)


def source(weight: torch.Tensor, reads: list[str] | None = None, name: str = "w") -> Source:
    def read() -> torch.Tensor:
        if reads is not None:
            reads.append(name)
        return weight

    return Source(name, tuple(weight.shape), weight.dtype, read)


def same(got: RoundedRows, want: RoundedRows) -> None:
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert isinstance(a, torch.Tensor)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("code_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 256), (17, 512)])
def test_rows_are_read_as_they_were_added(
    code_format: CodeFormat, shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "_PIECE", 100)
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[0, :32] = 1e-9
    expr, files = source(weight), CodeFiles(tmp_path)
    rounded = round_matrix(weight, code_format)
    files.add(expr, code_format, rounded)
    got = files.get(expr, code_format)
    assert got is not None
    same(got, rounded)
    assert files.get(source(weight, name="other"), code_format) is None
    bits = 4 if code_format.kind == "int" and code_format.bits <= 4 else 8
    (file,) = tmp_path.iterdir()
    factors = sum(t.numel() * t.element_size() for t in (rounded.scales, rounded.offsets) if t is not None)
    assert file.stat().st_size == weight.numel() * bits // 8 + factors
    files.clear()
    assert files.get(expr, code_format) is None and not list(tmp_path.iterdir())


def test_an_odd_number_of_values(tmp_path: Path) -> None:
    values = torch.tensor([[-8, 7, -1], [0, 1, -5], [3, -3, 2]], dtype=torch.int8)
    rounded = RoundedRows(values, torch.ones(3, 1).half(), None, 0, 2)
    expr, files = source(torch.zeros(3, 3)), CodeFiles(tmp_path)
    files.add(expr, CodeFormat(4, 3), rounded)
    got = files.get(expr, CodeFormat(4, 3))
    assert got is not None
    same(got, rounded)


@pytest.mark.parametrize("offsets", [False, True])
def test_a_weight_is_read_once(offsets: bool, tmp_path: Path) -> None:
    reads: list[str] = []
    weight, code_format, files = torch.randn(6, 64), CodeFormat(4, 32, offsets), CodeFiles(tmp_path)
    first = [e.evaluate() for e in quantized(source(weight), code_format) if e is not None]
    for _ in range(3):  # also of expressions that are only equal
        exprs = quantized(source(weight, reads), code_format, files)
        assert all(map(torch.equal, [e.evaluate() for e in exprs if e is not None], first))
        assert exprs[0].counts == QuantizationCounts(weight.numel())
    assert reads == ["w"]
    quantized(source(weight, reads), CodeFormat(4, 64, offsets), files)[0].evaluate()
    assert reads == ["w", "w"], "another format is another weight"


def test_a_disk_without_room_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    files = CodeFiles(tmp_path)
    values, _, _ = quantized(source(torch.randn(6, 64), reads), CodeFormat(8, 32), files)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=700))
    first = values.evaluate()
    assert torch.equal(values.evaluate(), first)
    assert reads == ["w", "w"] and not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    values.evaluate(), values.evaluate()
    assert reads == ["w", "w", "w"] and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_written_or_is_gone(tmp_path: Path) -> None:
    reads: list[str] = []
    folder = tmp_path / "scratch"
    values, _, _ = quantized(source(torch.randn(6, 64), reads), CodeFormat(4, 32), CodeFiles(folder))
    first = values.evaluate()
    folder.mkdir()
    assert torch.equal(values.evaluate(), first) and torch.equal(values.evaluate(), first)
    assert reads == ["w", "w"]
    shutil.rmtree(folder)
    assert torch.equal(values.evaluate(), first)
    assert reads == ["w", "w", "w"]
