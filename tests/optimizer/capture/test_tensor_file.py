from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from enginewright.optimizer.capture.tensor_file import read_tensor, tensor_places
from enginewright.runtime.shared.errors import SourceError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2)])
def test_tensors_as_the_library_wrote_them(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: (torch.rand(shape, generator=generator) * 100).to(dtype) for name in ("b", "a")}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    places = tensor_places(path)
    assert set(places) == {"a", "b"}
    for name, value in tensors.items():
        assert torch.equal(read_tensor(path, places[name], shape, dtype), value)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    place = tensor_places(path)["a"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match="ends 100 bytes too early"):
        read_tensor(path, place, (100,), torch.float32)
    path.unlink()
    with pytest.raises(SourceError, match="can't be read"):
        read_tensor(path, place, (100,), torch.float32)
