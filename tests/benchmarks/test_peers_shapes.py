"""Files of random weights in the shapes of real models: what exporters and engines read."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from peers import make_models
from peers.convert_gguf import convert_gguf
from peers.shapes import DeltaShape, LlamaShape, ScanShape, Shape, parameters

from enginewright.optimizer.capture.capture_model import build_from_gguf
from enginewright.optimizer.capture.gguf.file import open_gguf
from tests.optimizer.capture.gguf.test_architectures import logits_of

SHAPES = [
    LlamaShape(hidden=64, layers=2, heads=4, kv_heads=2, feed_forward=96, vocabulary=128),
    DeltaShape(
        hidden=64,
        layers=4,
        every=4,
        heads=2,
        kv_heads=1,
        head=64,
        states=2,
        state=32,
        feed_forward=96,
        vocabulary=128,
    ),
    ScanShape(hidden=64, layers=2, states=4, head=32, state=32, vocabulary=128),
]


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.architecture)
def shape(request: pytest.FixtureRequest) -> Shape:
    shape: Shape = request.param
    return shape


@pytest.fixture
def random_file(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the shape, beside a tokenizer's keys."""
    real = tmp_path / "real.gguf"
    writer = gguf.GGUFWriter(real, "llama")
    writer.add_uint32("llama.a.key.of.the.real.model", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(make_models, "fetched_gguf", lambda model: real)
    return make_models.random_gguf(shape, tmp_path / "random.gguf")


def test_the_file_has_the_shapes_weights_and_the_tokenizer(shape: Shape, random_file: Path) -> None:
    reader = gguf.GGUFReader(random_file)
    assert sum(tensor.n_elements for tensor in reader.tensors) == parameters(shape)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert not any("real.model" in name for name in reader.fields)


def test_our_reader_runs_it_in_bits_too(shape: Shape, random_file: Path, tmp_path: Path) -> None:
    ids = torch.arange(3, 40)
    exact = logits_of(random_file, ids)
    assert exact.isfinite().all() and exact.std() > 0
    eight = convert_gguf(random_file, tmp_path / "eight.gguf", "Q8_0")
    assert (logits_of(eight, ids) - exact).abs().max() < 0.1 * exact.abs().max()
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(eight).tensors}
    assert kinds["token_embd.weight"] == "Q8_0"
    floats = {name for name in kinds if "ssm_conv1d" in name or "norm" in name or name.endswith(("ssm_a", "ssm_d"))}
    assert {kinds[name] for name in floats} == {"F32"}
    state = build_from_gguf(open_gguf(eight))[1]
    assert all(weight.evaluate().isfinite().all() for name, weight in state.items() if name.endswith("A_log"))
