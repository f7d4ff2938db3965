"""A GGUF file's blocks come through bit for bit: as a weight's integers, and into a bundle."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture.gguf.blocks import (
    BLOCK,
    FORMATS,
    Q2_0,
    SIZES,
    GgufTensor,
    dequantize,
    format_of,
    read_codes,
    rows_of,
)
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.gguf.header import has_kept_blocks
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.ir.prequantized import CodeFormat, Codes, SourceCodes, decode
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.report import quantization_report
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.errors import RecipeError, SourceError
from enginewright.runtime.shared.weight_formats import FORMATS as WEIGHT_FORMATS
from tests.plugins.cpu.compile.test_emitter import emit

from .test_model import Q, permuted, write

KINDS = {
    Q.Q4_0: CodeFormat(4, 32),
    Q.Q4_1: CodeFormat(4, 32, offsets=True),
    Q.Q8_0: CodeFormat(8, 32),
}
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda q: q.name)


def scrambled(path: Path) -> Path:
    """The file with every integer replaced by a random one, -128 among them; scales and mins stay."""
    rng = np.random.default_rng(3)
    reader = gguf.GGUFReader(str(path), "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type in KINDS:
            size = 32 if tensor.tensor_type == Q.Q8_0 else 16
            blocks = tensor.data.reshape(-1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1])
            blocks[:, -size:] = rng.integers(0, 256, (len(blocks), size))
            blocks[0, -size] = 0x80
    return path


def file_blocks(path: Path) -> dict[str, tuple[npt.NDArray[Any], ...]]:
    """Gives by name: values [N, K], scales and mins [N, K/32] of each tensor, read block by block."""
    blocks_of = {}
    for tensor in gguf.GGUFReader(str(path)).tensors:
        if tensor.tensor_type not in KINDS:
            continue
        columns, rows = (int(n) for n in tensor.shape)
        values = np.zeros((rows, columns), np.int8)
        scales, mins = (np.zeros((rows, columns // 32), np.float16) for _ in range(2))
        data = tensor.data.tobytes()
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        for i in range(rows * columns // 32):
            block, n, g = data[i * size : (i + 1) * size], i // (columns // 32), i % (columns // 32)
            scales[n, g] = np.frombuffer(block[:2], "<f2")[0]
            if tensor.tensor_type == Q.Q8_0:
                row = list(np.frombuffer(block[2:], np.int8))
            else:
                row = [b & 15 for b in block[-16:]] + [b >> 4 for b in block[-16:]]
            if tensor.tensor_type == Q.Q4_0:
                row = [v - 8 for v in row]
            if tensor.tensor_type == Q.Q4_1:
                mins[n, g] = np.frombuffer(block[2:4], "<f2")[0]
            values[n, 32 * g : 32 * g + 32] = row
        blocks_of[tensor.name] = (values, scales, mins) if tensor.tensor_type == Q.Q4_1 else (values, scales)
    return blocks_of


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("Llama", intermediate_size=96)


def passed(path: Path) -> tuple[Program, list[PassRecord]]:
    """The program of a file after all passes of recipe gguf, and what these did."""
    program, records = capture(path).program, []
    context = PassContext(recipe=PassOptions(weights=load_recipe("gguf").weights))
    PassManager(default_pipeline(), context, lambda _, record: records.append(record)).run(program)
    return program, records


def arrays(codes: Codes) -> list[npt.NDArray[Any]]:
    return [t.numpy() for t in (codes.values, codes.scales, codes.offsets) if t is not None]


@kinds
def test_integers_are_the_files(kind: Q, llama: PreTrainedModel, tmp_path: Path) -> None:
    path = scrambled(write(llama, tmp_path / "tiny.gguf", kind))
    weights = capture(path).program.weights
    blocks = file_blocks(path)
    expected = {
        "model.layers.1.mlp.down_proj.weight": blocks["blk.1.ffn_down.weight"],
        "model.embed_tokens.weight": blocks["token_embd.weight"],
        "lm_head.weight": blocks["output.weight"],
    }
    for name, want in expected.items():
        expr = weights[name]
        assert isinstance(expr, SourceCodes)
        assert expr.code_format == KINDS[kind]
        for got, one in zip(arrays(expr.codes()), want, strict=True):
            assert got.dtype == one.dtype
            np.testing.assert_array_equal(got, one)
    if kind == Q.Q8_0:
        assert blocks["output.weight"][0].min() == -128


@kinds
def test_q_and_k_are_rows_in_another_order(kind: Q, llama: PreTrainedModel, tmp_path: Path) -> None:
    path = scrambled(write(llama, tmp_path / "tiny.gguf", kind))
    weights = capture(path).program.weights
    blocks = file_blocks(path)
    for name, heads in (("q", 4), ("k", 2)):
        expr = weights[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert isinstance(expr, SourceCodes)
        for got, one in zip(arrays(expr.codes()), blocks[f"blk.0.attn_{name}.weight"], strict=True):
            np.testing.assert_array_equal(permuted(got, heads), one)
            assert (got != one).any()


LARGEST_HALVES = {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q6_K: (208,)}
"""The offsets of a block's float16 factors, if they aren't at its start."""


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(3, 256), (45, 1024)])
def test_codes_stand_for_what_the_package_dequantizes(kind: Q, rows: int, columns: int) -> None:
    """Bit for bit, whatever the bytes of a block are."""
    if kind in GGML:
        pytest.skip("not dequantized by the package: see the next test")
    size, of_block = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    data = rng.integers(0, 256, (rows, columns // size, of_block), dtype=np.uint8)
    if kind == Q.MXFP4:
        data[..., 0] = rng.integers(104, 143, data.shape[:2])  # float16 has the scale
    elif kind != Q.NVFP4:
        starts = (0, 2) if FORMATS[kind].offsets else (0,)
        for at in LARGEST_HALVES.get(kind, starts):
            halves = rng.normal(size=data.shape[:2], scale=0.01).astype("<f2")
            data[..., at : at + 2] = halves[..., None].view(np.uint8)
    stored = data.reshape(rows, -1)
    tensor = GgufTensor("w", kind, (columns, rows), stored, 0, "")
    codes = read_codes([tensor], np.arange(rows))
    stored_format = WEIGHT_FORMATS[FORMATS[kind].storage]
    if stored_format.levels:
        assert set(codes.values.unique().tolist()) <= set(stored_format.levels)
    else:
        assert int(codes.values.min()) >= -(1 << (FORMATS[kind].bits - 1))
        assert int(codes.values.max()) < 1 << (FORMATS[kind].bits - (0 if FORMATS[kind].offsets else 1))
    want = gguf.dequantize(stored, kind).view(np.uint32)
    got = decode(codes, FORMATS[kind]).numpy().view(np.uint32)
    assert ((got == want) | ((got | want) == 1 << 31)).all()  # a zero may have another sign


GGML = {
    Q.Q1_0: "512dd25a59548a7a53c1d900e50f54b57a5294b3952f95ac7b3976283a76b805",
    Q2_0: "f6640e9f983b661d866daf88eb316e095fd6631a5743238940ed383bdb680228",
}
"""SHA-256 of the floats that ggml's ``dequantize_row_q1_0`` and ``dequantize_row_q2_0`` (of llama-cpp-python 0.3.36)
make of ``newer_blocks``: the package has neither."""


def newer_blocks(kind: IntEnum, rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """[rows, bytes], every one told by its place."""
    data = (np.arange(rows * blocks * 18, dtype=np.uint64) * 2654435761 >> 7 & 255).astype(np.uint8)
    data = data.reshape(rows, blocks, 18)
    halves = (np.arange(rows * blocks) % 200 - 99).astype("<f2") / np.float16(64)
    data[..., :2] = halves.astype("<f2").view(np.uint8).reshape(rows, blocks, 2)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", GGML, ids=lambda kind: kind.name)
def test_newer_types_are_what_ggml_makes_of_them(kind: IntEnum) -> None:
    stored = newer_blocks(kind, 5, 4)
    size = SIZES[kind][0]
    tensor = GgufTensor("w", kind, (4 * size, 5), stored, 0, "")
    values = dequantize(tensor)
    assert hashlib.sha256((values + 0.0).tobytes()).hexdigest() == GGML[kind]  # -0 is 0
    codes = read_codes([tensor], np.arange(5))
    np.testing.assert_array_equal(decode(codes, FORMATS[kind]).numpy(), values)
    assert set(codes.values.unique().tolist()) == ({-1, 1} if kind == Q.Q1_0 else {-2, -1, 0, 1})


DOWN = "blk.1.ffn_down.weight"


def write_newer(model: PreTrainedModel, path: Path, kind: IntEnum) -> tuple[Path, int]:
    """A file in F16 whose matrix DOWN has such blocks, in the room of its floats; and where its dimensions stand."""
    write(model, path, Q.F16)
    tensor = next(t for t in gguf.GGUFReader(str(path)).tensors if t.name == DOWN)
    columns, rows = (int(n) for n in tensor.shape)
    data = bytearray(path.read_bytes())
    at = data.index(DOWN.encode()) + len(DOWN) + 4
    data[at + 16 : at + 20] = struct.pack("<I", kind)
    blocks = newer_blocks(kind, rows, columns // SIZES[kind][0]).tobytes()
    data[tensor.data_offset : tensor.data_offset + len(blocks)] = blocks
    path.write_bytes(data)
    return path, at


@pytest.mark.matrix
@pytest.mark.parametrize("kind", GGML, ids=lambda kind: kind.name)
def test_a_file_of_newer_types_is_kept(
    kind: IntEnum, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    path, _ = write_newer(tiny_model("Llama", intermediate_size=256), tmp_path / "tiny.gguf", kind)
    assert has_kept_blocks(path)
    expr = capture(path).program.weights["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(expr, SourceCodes) and expr.code_format == FORMATS[kind]
    program, _ = passed(path)
    bundle, _ = emit(program, tmp_path / "tiny.bundle", vocab_size=256)
    use = next(use for use in bundle.program("cpu").weights if use.name.endswith("layers.1.mlp.down_proj.weight.int2"))
    stored = unpack(np.array(bundle.weight(use.name)), use.shape, use.layout, use.dtype)
    np.testing.assert_array_equal(stored, expr.codes().values.numpy())


def test_rows_of_q2_0_that_do_not_fit_are_refused(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    path, at = write_newer(tiny_model("Llama", intermediate_size=256), tmp_path / "tiny.gguf", Q2_0)
    data = bytearray(path.read_bytes())
    for columns, words in ((4096, "has .* bytes at most, blocks of Q2_0 would be"), (100, "isn.t a multiple of 64")):
        data[at : at + 8] = struct.pack("<Q", columns)
        path.write_bytes(data)
        with pytest.raises(SourceError, match=f"tensor {DOWN} .*{words}"):
            open_gguf(path)


@pytest.mark.parametrize("names", [("w",), ("w", "x")], ids=["the last tensor", "one before another"])
@pytest.mark.parametrize("rows", [8, 33])
def test_q2_0_in_blocks_of_128_is_refused(names: tuple[str, ...], rows: int, tmp_path: Path) -> None:
    path = tmp_path / "older.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name in names:
        writer.add_tensor(name, np.zeros((rows, 256 // 128 * 34), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", 1) + b"w") + 9 + 4
    data[at : at + 8] = struct.pack("<Q", 256)
    data[at + 16 : at + 20] = struct.pack("<I", Q2_0)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"tensor w has .* blocks of Q2_0 would be .* blocks of 128"):
        open_gguf(path)


def test_scales_that_float16_lacks_are_named() -> None:
    stored = np.zeros((1, 17), np.uint8)  # 2^-128
    tensor = GgufTensor("blk.0.w", Q.MXFP4, (32, 1), stored, 0, "")
    with pytest.raises(SourceError, match=r"tensor blk.0.w: a scale of MXFP4 is below") as e:
        read_codes([tensor], np.arange(1))
    assert "int8" in str(e.value.hint)


EVERY_KIND = [kind for kind, (size, _) in gguf.GGML_QUANT_SIZES.items() if size > 1 or kind == Q.BF16]


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "columns"), [(3, 256), (77, 1024)])
def test_blocks_of_every_type_are_dequantized_as_by_the_package(kind: Q, rows: int, columns: int) -> None:
    """Also where they are more than one piece, and no whole number of them."""
    size, bytes_of_block = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(kind).integers(0, 256, (rows, columns // size * bytes_of_block), dtype=np.uint8)
    tensor = GgufTensor("w", kind, (columns, rows), data, 0, "")
    try:
        with np.errstate(all="ignore"):
            theirs = gguf.dequantize(data, kind)
    except NotImplementedError:
        pytest.skip("not dequantized by the package")
    with np.errstate(all="ignore"):
        ours = dequantize(tensor)
    assert ours.shape == (rows, columns)
    assert ours.dtype == np.float32
    assert ours.tobytes() == theirs.tobytes()


@kinds
def test_floats_are_what_gguf_makes_of_them(kind: Q, llama: PreTrainedModel, tmp_path: Path) -> None:
    path = scrambled(write(llama, tmp_path / "tiny.gguf", kind))
    weights = capture(path).program.weights
    (tensor,) = (t for t in gguf.GGUFReader(str(path)).tensors if t.name == "blk.0.ffn_up.weight")
    expr = weights["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(expr, SourceCodes)
    theirs = gguf.dequantize(tensor.data, kind).reshape(96, 64)
    assert expr.evaluate().numpy().tobytes() == theirs.tobytes()
    assert decode(expr.codes(), expr.code_format).numpy().tobytes() == theirs.tobytes()


@kinds
def test_a_bundle_has_them_bit_for_bit(kind: Q, llama: PreTrainedModel, tmp_path: Path) -> None:
    path = scrambled(write(llama, tmp_path / "tiny.gguf", kind))
    program, _ = passed(path)
    bundle, _ = emit(program, tmp_path / "tiny.bundle", vocab_size=256)
    report = quantization_report((name, program.weights[name]) for name in program.weights)
    assert report is not None
    assert report.kept == report.values > 0
    blocks = file_blocks(path)
    uses = {use.name: use for use in bundle.program("cpu").weights}
    compared = 0
    for use in uses.values():
        if use.dtype not in ("i4", "u4", "i8"):
            continue
        assert use.dtype == {Q.Q4_0: "i4", Q.Q4_1: "u4", Q.Q8_0: "i8"}[kind]
        base = use.name.rpartition(".")[0]
        names = [f"{base}.{part}" for part in ("scales", "offsets") if f"{base}.{part}" in uses]
        stored = [
            unpack(np.array(bundle.weight(n)), uses[n].shape, uses[n].layout, uses[n].dtype) for n in (use.name, *names)
        ]
        start = 0
        for part in bundle.tensor(use.name).parts:
            rows = slice(start, start + part.rows[1] - part.rows[0])
            for got, want in zip(stored, blocks[part.source], strict=True):
                one = got[rows]
                if part.source.split(".")[-2] in ("attn_q", "attn_k"):
                    one = permuted(one, 4 if "attn_q" in part.source else 2)
                assert one.tobytes() == want.tobytes()
            compared += got[rows].shape[0]
            start = rows.stop
    # Layers have q, k, v, o of 64, 32, 32 and 64 rows, gate and up of 96, down of 64; then the table and the head.
    assert compared == 2 * (64 + 32 + 32 + 64 + 2 * 96 + 64) + 2 * 256


def test_parts_of_different_blocks_keep_theirs(llama: PreTrainedModel, tmp_path: Path) -> None:
    def kind(name: str) -> Q:
        return Q.Q8_0 if ".attn_v." in name else Q.F16 if "ffn_down" in name else Q.Q4_0

    program, records = passed(write(llama, tmp_path / "tiny.gguf", kind))
    (fused,) = (r for r in records if r.name == "fuse_qkv")
    assert fused.matched == 2  # q and k
    reason = "the weights are stored in different formats, and each keeps its own"
    assert [r.reason for r in fused.rejected] == [reason] * 2
    assert all(f"model.layers.{i}.self_attn" in r.where for i, r in enumerate(fused.rejected))
    names = [name for name in program.weights if name.endswith((".int8", ".int4"))]
    parts = {"q_proj+k_proj": "int4", "v_proj": "int8", "down_proj": "int8", "o_proj": "int4", "gate_proj": "int4"}
    for part, storage in parts.items():
        assert [n.rpartition(".")[2] for n in names if part in n] == [storage] * 2, part


def test_a_model_without_blocks_says_so(llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="keep_blocks is true, but no weight of this model is stored in blocks") as e:
        passed(write(llama, tmp_path / "tiny.gguf", Q.F16))
    assert "leave keep_blocks out of the recipe" in str(e.value.hint)


class Experts:
    """Three tensors of experts, written to a file and read again."""

    def __init__(self, folder: Path) -> None:
        writer = gguf.GGUFWriter(str(folder / "experts.gguf"), "llama")
        rng = np.random.default_rng(4)
        for name in ("gate", "up", "wide"):
            data = rng.standard_normal((3, 8, 64 if name != "wide" else 96)).astype(np.float32)
            writer.add_tensor(name, gguf.quantize(data, Q.Q4_1), raw_dtype=Q.Q4_1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.tensors = {
            t.name: GgufTensor(t.name, t.tensor_type, tuple(int(n) for n in t.shape), t.data, 0, "")
            for t in gguf.GGUFReader(str(folder / "experts.gguf")).tensors
        }


def _same(weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return weight


def _one(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0]


def test_experts_that_are_put_together(tmp_path: Path) -> None:
    """gate and up [E, N, K] as one weight [E, 2N, K], as transformers has them."""
    tensors = [Experts(tmp_path).tensors[name] for name in ("gate", "up")]
    rows = rows_of(tensors, [_same] * len(tensors), lambda parts: np.concatenate(parts, axis=1))
    assert rows is not None
    assert rows.shape == (3, 16)
    code_format = format_of(tensors)
    assert code_format == CodeFormat(4, BLOCK, offsets=True)
    got = decode(read_codes(tensors, rows), code_format)
    want = np.concatenate([gguf.dequantize(t.data, t.tensor_type).reshape(3, 8, 64) for t in tensors], axis=1)
    np.testing.assert_array_equal(got.numpy(), want)


CHANGES: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "other values": lambda w: w - 1,
    "columns reversed": lambda w: w[..., ::-1],
    "columns in another order": lambda w: w.reshape(3, 8, 2, -1).swapaxes(2, 3).reshape(w.shape),
    "axes exchanged": lambda w: w.swapaxes(1, 2),
    "rows left out": lambda w: w[:, 1:],
    "a row twice": lambda w: w[:, [0, 0, 2, 3, 4, 5, 6, 7]],
    "other columns in some rows": lambda w: np.concatenate((w[:, :4], np.roll(w[:, 4:], 1, -1)), 1),
    "columns joined": lambda w: w.reshape(3, 4, -1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["gate", "wide"])
def test_more_than_another_order_of_rows_gives_no_blocks(change: str, name: str, tmp_path: Path) -> None:
    tensors = [Experts(tmp_path).tensors[name]]
    assert rows_of(tensors, [_same], _one) is not None
    assert rows_of(tensors, [lambda w: w[::-1, ::-1]], _one) is not None
    assert rows_of(tensors, [CHANGES[change]], _one) is None


@pytest.mark.parametrize("others", [(Q.Q8_0,), (Q.Q6_K,), (Q.F32,)])
def test_tensors_of_one_weight_need_one_type(others: tuple[Q, ...], tmp_path: Path) -> None:
    (gate, up, _) = Experts(tmp_path).tensors.values()
    assert format_of([gate, up]) is not None
    assert format_of([gate, up._replace(tensor_type=others[0])]) is None
    assert format_of([up._replace(tensor_type=Q.IQ1_S)]) is None


def test_torch_sees_what_was_read(tmp_path: Path) -> None:
    (gate, _, _) = Experts(tmp_path).tensors.values()
    codes = read_codes([gate], np.arange(24)[::-1].reshape(24))
    assert codes.values.shape == (24, 64)
    assert codes.values.dtype == torch.int8
    assert (int(codes.values.min()), int(codes.values.max())) == (0, 15)
