from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "convert_gguf.py"
WORDS = ["a", "b", "c"]


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A GGUF with a Q8_0 matrix, an F32 vector, and metadata of several types."""
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_array("tokenizer.ggml.tokens", WORDS)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    values = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("matrix", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("vector", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_the_weights_are_the_dequantized_ones(kind: str, quantized: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    subprocess.run([sys.executable, str(SCRIPT), str(quantized), str(out), kind], check=True)
    before = {t.name: t for t in gguf.GGUFReader(quantized).tensors}
    after = gguf.GGUFReader(out)
    assert after.fields["llama.block_count"].contents() == 2
    assert after.fields["tokenizer.ggml.tokens"].contents() == WORDS
    assert after.fields["general.architecture"].contents() == "llama"
    assert {t.name: t.tensor_type.name for t in after.tensors} == {"matrix": kind, "vector": "F32"}
    for tensor in after.tensors:
        expected = gguf.quants.dequantize(before[tensor.name].data, before[tensor.name].tensor_type)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # F32 holds what was dequantized exactly; bfloat16 has 8 bits, so half a unit in the last place is 2**-9. Blocks
        # of Q8_0 have one of 127 steps up to their largest value, and a scale that is rounded to 11 bits.
        atol = float(np.abs(expected).max()) / 127 if tensor.tensor_type.name == "Q8_0" else 0
        np.testing.assert_allclose(values, expected, rtol=2**-8 if kind == "BF16" else 0, atol=atol)
