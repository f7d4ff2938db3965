"""A GGUF file's header tells if a bundle can keep its blocks, without torch and without the package gguf."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from enginewright.optimizer.capture.gguf.blocks import FORMATS
from enginewright.optimizer.capture.gguf.header import KEPT_BLOCKS, has_kept_blocks, read_header
from enginewright.runtime.shared.errors import SourceError

Q = gguf.GGMLQuantizationType
KINDS = [kind for kind in Q if kind.value < 40 or kind.name == "NVFP4"]


def quantized_file(
    path: Path, kind: str = "Q8_0", *, endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE, rank: int = 2
) -> Path:
    """A file with values of every sort, a norm, and a tensor of this type behind it."""
    writer = gguf.GGUFWriter(str(path), "llama", endianess=endianess)
    writer.add_bool("a.bool", True)
    writer.add_uint8("a.byte", 1)
    writer.add_int16("a.short", -1)
    writer.add_uint64("a.long", 1 << 40)
    writer.add_float64("a.double", 0.5)
    writer.add_array("tokenizer.ggml.tokens", ["", "a", "token of several words", "\N{SNOWMAN}"])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0, 3.0])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3, 4])
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    of = Q[kind]
    size, bytes_of_block = gguf.GGML_QUANT_SIZES[of]
    data = np.zeros((*([2] * (rank - 1)), 256 // size * bytes_of_block), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_blocks_are_those_that_a_weight_can_keep() -> None:
    assert {kind.value: kind.name for kind in FORMATS} == KEPT_BLOCKS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_matrix_decides_by_its_type(kind: Q, tmp_path: Path) -> None:
    assert has_kept_blocks(quantized_file(tmp_path / "a.gguf", kind.name)) == (kind in FORMATS)


@pytest.mark.parametrize(("rank", "kept"), [(1, False), (2, True), (3, True)])
def test_vectors_do_not_count_and_experts_do(rank: int, kept: bool, tmp_path: Path) -> None:
    assert has_kept_blocks(str(quantized_file(tmp_path / "a.gguf", rank=rank))) is kept


def test_big_endian_files_are_named(tmp_path: Path) -> None:
    path = quantized_file(tmp_path / "a.gguf", "Q4_0", endianess=gguf.GGUFEndian.BIG)
    assert not has_kept_blocks(path)
    with pytest.raises(SourceError, match=r"a\.gguf: .*big-endian") as caught:
        read_header(path)
    assert "gguf_convert_endian" in str(caught.value.hint)


def test_a_header_that_ends_early_or_lies_says_nothing(tmp_path: Path) -> None:
    whole = quantized_file(tmp_path / "a.gguf").read_bytes()
    end = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8 + 4 + 8
    path = tmp_path / "b.gguf"

    def kept(data: bytes) -> bool:
        path.write_bytes(data)
        return has_kept_blocks(path)

    for length in range(end):
        assert not kept(whole[:length]), length
    assert kept(whole[:end])
    assert not kept(b"GGML" + whole[4:])
    for version in (0, 1, 4, 1 << 31):
        assert not kept(whole[:4] + struct.pack("<I", version) + whole[8:]), version
    for number in (0, 1 << 20, 1 << 62, (1 << 64) - 1):  # of tensors, of keys, and of the bytes of the first key
        for at in (8, 16, 24):
            assert not kept(whole[:at] + struct.pack("<Q", number) + whole[at + 8 :]), (at, number)
    array = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4
    for kind in (9, 13, 1 << 31):  # of an array's elements: arrays, and nothing at all
        assert not kept(whole[:array] + struct.pack("<I", kind) + whole[array + 4 :])


def test_what_is_no_file_is_not_quantized(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")  # nobody writes to it: opening it must not wait
    (tmp_path / "empty.gguf").touch()
    for name in ("", "pipe.gguf", "empty.gguf", "missing.gguf"):
        assert not has_kept_blocks(tmp_path / name)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    path = quantized_file(tmp_path / "a.gguf")
    code = (
        "import sys; from enginewright.optimizer.capture.gguf.header import has_kept_blocks; "
        "print(has_kept_blocks(sys.argv[1]), sorted({'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout == "True []\n"
