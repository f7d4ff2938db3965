"""Writes a GGUF file anew with its weights in another type, so that llama.cpp runs the very weights that we run.

python benchmarks/peers/convert_gguf.py MODEL.gguf OUT.gguf F32|F16|BF16|Q8_0|Q4_0 [TYPE of the table of tokens]
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
TABLE = "token_embd.weight"
"""The table of tokens, which in many models is the head too."""
BLOCK = 32
"""Values of the smallest block of a quantized type."""


def architecture_of(reader: gguf.GGUFReader) -> str:
    """The architecture that a file names."""
    return str(reader.fields["general.architecture"].contents())


def copy_metadata(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, other: Mapping[str, Any] | None = None, *, without: str = "GGUF."
) -> None:
    """All that a file says of its model but its types, with some values replaced by ``other``.

    Keys that begin with ``without`` are left out.
    """
    replaced = other or {}
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", without)) or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, replaced.get(name, field.contents()), field.types[0], sub_type=inner)


def keeps_floats(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for a tensor that llama.cpp's converter stores in F32: routers, norms, rows that no blocks fill."""
    return len(shape) < 2 or bool(shape[-1] % BLOCK) or "_norm.weight" in name or "ffn_gate_inp" in name


def write_tensors(
    writer: gguf.GGUFWriter,
    shapes: Mapping[str, tuple[int, ...]],
    values_of: Callable[[str], npt.NDArray[np.float32]],
    kind_of: Callable[[str], str],
) -> None:
    """Writes the whole file, with one tensor in memory at a time.

    Args:
        shapes: of each tensor by name, rows first.
        values_of: returns the values of a tensor.
        kind_of: returns the type of a matrix, such as "Q4_0". Tensors of ``keeps_floats`` are stored as F32.
    """
    stored = {
        name: gguf.GGMLQuantizationType["F32" if keeps_floats(name, shape) else kind_of(name)]
        for name, shape in shapes.items()
    }
    for name, shape in shapes.items():
        in_bytes = gguf.quant_shape_to_byte_shape(shape, stored[name])
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), math.prod(in_bytes), raw_dtype=stored[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind in stored.items():
        writer.write_tensor_data(gguf.quants.quantize(values_of(name), kind))


def convert_gguf(source: Path, target: Path, kind: str, *, table: str | None = None) -> Path:
    """Dequantizes every tensor of ``source`` and stores matrices as ``kind``, the rest as F32; metadata is copied.

    ``table`` is another type for the table of tokens.
    """
    reader = gguf.GGUFReader(source)
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, architecture_of(reader))
    copy_metadata(reader, writer)
    writer.add_file_type(FILE_TYPES[kind])
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    write_tensors(
        writer,
        {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in tensors.items()},
        lambda name: gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float32),
        lambda name: (table or kind) if name == TABLE else kind,
    )
    writer.close()
    os.replace(unfinished, target)
    return target


if __name__ == "__main__":
    print(convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], table=next(iter(sys.argv[4:]), None)))
