"""Kept tensors come back bit for bit, from memory and from a file; a digest is of the bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.passes.ir.kept import keep
from enginewright.runtime.shared.errors import CapacityError


@pytest.mark.parametrize("in_a_file", [False, True])
def test_what_is_kept_comes_back(in_a_file: bool, tmp_path: Path) -> None:
    tensors = [torch.tensor([[0.0, -0.0], [torch.nan, 3.0]]), torch.arange(5, dtype=torch.int8)[::2]]
    file = tmp_path / "kept" if in_a_file else None
    digest, read = keep(tensors, file)
    for _ in range(2):
        for tensor, read_back in zip(tensors, read(), strict=True):
            assert read_back.dtype == tensor.dtype
            assert read_back.numpy().tobytes() == tensor.contiguous().numpy().tobytes()
    assert keep(tensors, None)[0] == digest
    assert keep([tensors[0].abs(), tensors[1]], None)[0] != digest  # -0.0 is other bits than 0.0
    if file is not None:
        file.unlink()
        with pytest.raises(FileNotFoundError):
            read()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=f"{tmp_path}/none/here can't be written"):
        keep([torch.ones(2)], tmp_path / "none" / "here")
