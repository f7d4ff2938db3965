"""Weights that are quantized already: every layout against a packer written from its specification, and golden bytes of
the public libraries; whole folders against the model that they stand for; and what is damaged, named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from enginewright.optimizer.capture import build_from_directory, capture
from enginewright.optimizer.capture.quantized.checkpoint import unpacked
from enginewright.optimizer.capture.quantized.config import parse_quantization
from enginewright.optimizer.capture.quantized.integers import unpack_words
from enginewright.optimizer.export import export
from enginewright.passes.ir.prequantized import CodeFormat, SourceCodes, decode
from enginewright.passes.ir.quantized import formats_of_rows, quantized
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.shared.weight_formats import NF4
from tests.optimizer.capture.test_huggingface import same_logits

Tensors = dict[str, torch.Tensor]
Section = dict[str, Any]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = [(32, 64), (48, 192)]  # outputs N and inputs K; all widths pack them into whole words


@dataclass
class Packed:
    """A weight as a method packs it: the end of each tensor's name behind the module's, what configurations say, and
    the floats that it stands for."""

    tensors: Tensors
    section: Section
    floats: torch.Tensor
    kept: tuple[int, ...] | None = None  # bits and groups of the format of ours that holds it, () any; None: none does


def words_of(codes: list[int], bits: int, padded: bool = False) -> list[int]:
    """Codes as words of 32 bits with signs: code i at bit i * bits; with padding, as many in each word as fit whole."""
    if padded:
        each = 32 // bits
        return [w for i in range(0, len(codes), each) for w in words_of(codes[i : i + each], bits)]
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [w - (1 << 32) if w >> 31 else w for w in words]


def pack_rows(codes: torch.Tensor, bits: int, padded: bool = False) -> torch.Tensor:
    return torch.tensor([words_of(row, bits, padded) for row in codes.tolist()], dtype=torch.int32)


def random_codes(n: int, k: int, bits: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(seed + n + k + bits))


def half_scales(n: int, groups: int, seed: int = 1) -> torch.Tensor:
    """Some of float16 with all bits of its mantissa in use."""
    return (torch.rand(n, groups, generator=torch.Generator().manual_seed(seed + n + groups)) * 0.05 + 0.01).half()


def floats_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: list[int]) -> torch.Tensor:
    """(code - zero) * scale, one weight after the other."""
    rows = []
    for n in range(len(codes)):
        row = [(int(codes[n, k]) - int(zeros[n, g])) * float(scales[n, g]) for k, g in enumerate(group)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64).float()


def gptq(
    n: int, k: int, *, bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False, v2: bool = False
) -> Packed:
    size = group if group > 0 else k
    groups, middle = k // size, 1 << (bits - 1)
    codes, scales = random_codes(n, k, bits), half_scales(n, groups)
    zeros = (
        torch.full((n, groups), middle) if symmetric else 1 + random_codes(n, groups, bits, seed=5) % ((1 << bits) - 1)
    )
    index = [i // size for i in range(k)]
    if order:
        index = [index[i] for i in torch.randperm(k, generator=torch.Generator().manual_seed(2)).tolist()]
    tensors = {
        ".qweight": pack_rows(codes, bits).t().contiguous(),
        ".qzeros": pack_rows(zeros.t() - (0 if v2 else 1), bits),
        ".scales": scales.t().contiguous(),
        ".g_idx": torch.tensor(index, dtype=torch.int32),
    }
    section = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": symmetric}
    if v2:
        section["checkpoint_format"] = "gptq_v2"
    columns: tuple[int, ...] | None
    if order:
        columns = None
    elif symmetric or bits < 4:
        width = bits if symmetric else bits + 1  # differences of codes take a bit more
        columns = (width, size if size < k else 64) if width <= 4 else (8, size if size < k else 0)
    else:
        columns = ()  # in whatever holds differences of 5 bits
    return Packed(tensors, section, floats_of(codes, zeros, scales, index), columns)


def gptq_unset(n: int, k: int) -> Packed:
    """GPTQ whose ``g_idx`` was never set: exllama and vLLM take the columns in order."""
    packed = gptq(n, k)
    packed.tensors[".g_idx"] = torch.zeros(k, dtype=torch.int32)
    return packed


def auto_round(packed: Packed, packing: str, **others: Any) -> Packed:
    """Rewrites packed weights as auto-round stores them."""
    section = {"quant_method": "auto-round", "packing_format": packing, "data_type": "int"} | others
    for key in ("bits", "group_size", "sym"):
        section.setdefault(key, packed.section.get(key, True))
    packed.tensors.pop(".g_idx", None)
    return Packed(packed.tensors, section, packed.floats, packed.kept)


def awq(n: int, k: int, *, symmetric: bool = False) -> Packed:
    codes, scales = random_codes(n, k, 4), half_scales(n, k // 32)
    zeros = torch.full((n, k // 32), 8) if symmetric else random_codes(n, k // 32, 4, seed=3)

    def pack(rows: torch.Tensor) -> torch.Tensor:
        """[R, N]: the eight columns of a word take the nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
        result = torch.zeros(len(rows), n // 8, dtype=torch.int64)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            result |= rows[:, column::8] << (4 * nibble)
        return torch.where(result >= 1 << 31, result - (1 << 32), result).int()

    tensors = {".qweight": pack(codes.t()), ".qzeros": pack(zeros.t()), ".scales": scales.t().contiguous()}
    section = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    floats = floats_of(codes, zeros, scales, [i // 32 for i in range(k)])
    return Packed(tensors, section, floats, (4, 32) if symmetric else ())


def compressed(kind: str, weights: Section) -> Section:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def pack_quantized(
    n: int, k: int, *, bits: int = 4, group: int = 32, symmetric: bool = True, padded: bool = False
) -> Packed:
    codes, scales = random_codes(n, k, bits), half_scales(n, k // group)
    middle = 1 << (bits - 1)
    zeros = torch.full((n, k // group), middle) if symmetric else random_codes(n, k // group, bits, seed=4)
    tensors = {
        ".weight_packed": pack_rows(codes, bits, padded),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = pack_rows(zeros.t(), bits, padded).t().contiguous()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    floats = floats_of(codes, zeros, scales, [i // group for i in range(k)])
    columns: tuple[int, ...] | None = (
        (bits, group) if symmetric and bits <= 4 else None if bits == 8 and not symmetric else ()
    )
    return Packed(tensors, compressed("pack-quantized", weights), floats, columns)


def int_quantized(n: int, k: int) -> Packed:
    values, scales = random_codes(n, k, 8) - 128, half_scales(n, 1)
    tensors = {".weight": values.to(torch.int8), ".weight_scale": scales}
    floats = floats_of(values, torch.zeros(n, 1), scales, [0] * k)
    return Packed(tensors, compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), floats, (8, 0))


def e4m3(n: int, k: int, seed: int = 6) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed + n + k)) * 50).to(torch.float8_e4m3fn)


def fp8_blocks(n: int, k: int, *, powers: bool = False) -> Packed:
    """Blocks of 32 x 128, so that the last ones of both axes aren't whole."""
    values, rows, columns = e4m3(n, k), -(-n // 32), -(-k // 128)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(n)) * 0.01 + 0.001
    if powers:
        scales = 2.0 ** scales.log2().floor()
    table = values.float()
    floats = torch.tensor([[float(table[i, j] * scales[i // 32, j // 128]) for j in range(k)] for i in range(n)])
    section = {"quant_method": "fp8", "weight_block_size": [32, 128], "activation_scheme": "dynamic"}
    order = (8, 0 if k < 128 else 64) if powers else None
    return Packed({".weight": values, ".weight_scale_inv": scales}, section, floats, order)


def fp8_channels(n: int, k: int, *, whole: bool = False) -> Packed:
    values = e4m3(n, k)
    scales = half_scales(n, 1).float() if not whole else torch.tensor(0.0123)
    section = {"quant_method": "fp8", "activation_scheme": "static"} if whole else {"quant_method": "fbgemm_fp8"}
    tensors = {".weight": values, ".weight_scale": scales}
    if whole:
        tensors[".input_scale"] = torch.tensor(0.5)
    return Packed(tensors, section, values.float() * scales, None if whole else (8, 0))


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] -> uint8 [N, K / 2], the first of two low."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def of_e2m1(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[E2M1[c & 7] * (-1 if c & 8 else 1) for c in row] for row in codes.tolist()])


def nvfp4(n: int, k: int, *, modelopt: bool = False) -> Packed:
    codes = random_codes(n, k, 4)
    fine = (torch.rand(n, k // 16, generator=torch.Generator().manual_seed(k)) * 400 + 8).to(torch.float8_e4m3fn)
    whole = torch.tensor([2048.0 / 1.7])
    factor = fine.float() * (1 / whole) if modelopt else fine.float() / whole
    floats = of_e2m1(codes) * factor.repeat_interleave(16, dim=1)
    if modelopt:
        tensors = {".weight": nibbles(codes), ".weight_scale": fine, ".weight_scale_2": (1 / whole)[0]}
        return Packed(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, floats)
    tensors = {".weight_packed": nibbles(codes), ".weight_scale": fine, ".weight_global_scale": whole}
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Packed(tensors, compressed("nvfp4-pack-quantized", weights), floats)


def exponents_of(n: int, groups: int) -> torch.Tensor:
    """Scales in E8M0, and the least one, whose float is subnormal."""
    exponents = torch.randint(115, 124, (n, groups), generator=torch.Generator().manual_seed(n))
    return exponents.to(torch.uint8)


def mxfp4(n: int, k: int, *, modelopt: bool = False, typed: bool = False) -> Packed:
    codes, exponents = random_codes(n, k, 4), exponents_of(n, k // 32)
    floats = of_e2m1(codes) * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, dim=1)
    scale = exponents.view(torch.float8_e8m0fnu) if typed else exponents
    tensors = {".weight" if modelopt else ".weight_packed": nibbles(codes), ".weight_scale": scale}
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    section = {"quant_method": "modelopt", "quant_algo": "MXFP4", "group_size": 32}
    return Packed(tensors, section if modelopt else compressed("mxfp4-pack-quantized", weights), floats, ())


def mxfp8(n: int, k: int, *, modelopt: bool = False, typed: bool = False) -> Packed:
    values, exponents = e4m3(n, k), exponents_of(n, k // 32)
    floats = values.float() * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, dim=1)
    tensors = {".weight": values, ".weight_scale": exponents.view(torch.float8_e8m0fnu) if typed else exponents}
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    section = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    return Packed(tensors, section if modelopt else compressed("mxfp8-quantized", weights), floats, ())


def fp8_exponents(n: int, k: int) -> Packed:
    """FP8 in blocks with scales of type F8_E8M0, as DeepSeek's newer checkpoints have them."""
    packed = fp8_blocks(n, k, powers=True)
    packed.tensors[".weight_scale_inv"] = packed.tensors[".weight_scale_inv"].to(torch.float8_e8m0fnu)
    return packed


def nf4(n: int, k: int, *, nested: bool = False, exact: bool = False) -> Packed:
    codes, blocks = random_codes(n, k, 4), n * k // 64
    absmax = torch.rand(blocks, generator=torch.Generator().manual_seed(n)) + 0.1
    if exact:
        absmax = absmax.half().float()
    state: Section = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [n, k]}
    tensors: Tensors = {}
    if nested:
        places = torch.randint(0, 256, (blocks,), generator=torch.Generator().manual_seed(k))
        table, factors = torch.linspace(-1, 1, 256), torch.rand(-(-blocks // 16)) * 0.3
        absmax = torch.stack([table[p] * factors[i // 16] + 0.75 for i, p in enumerate(places.tolist())])
        state |= {"nested_blocksize": 16, "nested_offset": 0.75, "nested_dtype": "float32"}
        tensors |= {".weight.nested_quant_map": table, ".weight.nested_absmax": factors}
    tensors |= {".weight.absmax": places.to(torch.uint8) if nested else absmax, ".weight.quant_map": torch.tensor(NF4)}
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    flat = codes.reshape(-1)
    tensors[".weight"] = (flat[0::2] << 4 | flat[1::2]).to(torch.uint8)[:, None]
    floats = torch.tensor([NF4[c] for c in flat.tolist()]) * absmax.repeat_interleave(64)
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Packed(tensors, section, floats.reshape(n, k), (4, 64) if exact else None)


def bnb_int8(n: int, k: int) -> Packed:
    values, scb = (random_codes(n, k, 8) - 128).to(torch.int8), torch.rand(n) + 0.1
    tensors = {".weight": values, ".SCB": scb, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Packed(tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}, values * (scb / 127)[:, None])


CASES: dict[str, Callable[[int, int], Packed]] = {
    **{f"gptq-{bits}": partial(gptq, bits=bits) for bits in (2, 3, 4, 8)},
    **{f"gptq-{bits}-asym": partial(gptq, bits=bits, symmetric=False) for bits in (2, 3, 4)},
    "gptq-v2": partial(gptq, v2=True, symmetric=False),
    "gptq-order": partial(gptq, order=True),
    "gptq-3-order-asym": partial(gptq, bits=3, order=True, symmetric=False),
    "gptq-rows": partial(gptq, group=-1),
    "gptq-unset": gptq_unset,
    "auto-round-gptq": lambda n, k: auto_round(gptq(n, k), "auto_round:auto_gptq"),
    "auto-round-2": lambda n, k: auto_round(gptq(n, k, bits=2, symmetric=False), "auto_round:auto_gptq"),
    "auto-round-plain": lambda n, k: auto_round(gptq(n, k, v2=True, symmetric=False), "auto_round"),
    "auto-round-awq": lambda n, k: auto_round(awq(n, k), "auto_round:auto_awq", sym=False),
    "auto-round-mx": lambda n, k: auto_round(
        mxfp4(n, k), "auto_round:llm_compressor", bits=4, group_size=32, data_type="mx_fp4e2m1"
    ),
    "awq": awq,
    "awq-symmetric": partial(awq, symmetric=True),
    **{f"packed-{bits}": partial(pack_quantized, bits=bits) for bits in range(2, 9)},
    **{f"packed-{b}-asym": partial(pack_quantized, bits=b, symmetric=False) for b in range(2, 9)},
    **{f"padded-{bits}": partial(pack_quantized, bits=bits, padded=True) for bits in (3, 5, 6, 7)},
    "padded-5-asym": partial(pack_quantized, bits=5, symmetric=False, padded=True),
    "int-quantized": int_quantized,
    "fp8-blocks": fp8_blocks,
    "fp8-blocks-powers": partial(fp8_blocks, powers=True),
    "fp8-channels": fp8_channels,
    "fp8-tensor": partial(fp8_channels, whole=True),
    "nvfp4": nvfp4,
    "nvfp4-modelopt": partial(nvfp4, modelopt=True),
    "fp8-exponents": fp8_exponents,
    "mxfp4": mxfp4,
    "mxfp4-typed": partial(mxfp4, typed=True),
    "mxfp4-modelopt": partial(mxfp4, modelopt=True),
    "mxfp8": mxfp8,
    "mxfp8-typed": partial(mxfp8, typed=True),
    "mxfp8-modelopt": partial(mxfp8, modelopt=True, typed=True),
    "nf4": nf4,
    "nf4-nested": partial(nf4, nested=True),
    "nf4-exact": partial(nf4, exact=True),
    "bnb-int8": bnb_int8,
}


def sources(tensors: Tensors, module: str = "m") -> dict[str, WeightExpr]:
    def one(name: str, value: torch.Tensor) -> Source:
        return Source(name, tuple(value.shape), value.dtype, lambda: value, "some/model.safetensors")

    return {module + end: one(module + end, value) for end, value in tensors.items()}


def read(packed: Packed) -> WeightExpr:
    weights = unpacked(sources(packed.tensors), parse_quantization(packed.section, "config.json: quantization_config"))
    assert list(weights) == ["m.weight"], "nothing is left of what it is made of"
    return weights["m.weight"]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_specification_says(case: str, size: tuple[int, int]) -> None:
    packed = CASES[case](*size)
    expr = read(packed)
    # NVFP4's scales are a product or quotient that is rounded; all else is one product of float32.
    tolerance = 2e-7 if case == "nvfp4-modelopt" else 0.0
    torch.testing.assert_close(expr.evaluate(), packed.floats, rtol=tolerance, atol=0.0)
    assert isinstance(expr, Source) and expr.stored
    assert isinstance(expr, SourceCodes) == (packed.kept is not None)
    if not isinstance(expr, SourceCodes):
        return
    codes = expr.codes()
    assert torch.equal(decode(codes, expr.code_format), expr.evaluate()), "integers stand for the same, bit for bit"
    if packed.kept:
        assert (expr.code_format.bits, expr.code_format.group_size) == packed.kept
    values, _, _ = quantized(expr, expr.code_format)
    assert torch.equal(values.evaluate().float(), codes.values.float())
    assert values.counts is not None and values.counts.kept == values.counts.values == packed.floats.numel()


def test_differences_of_zero_points_need_more_than_4_bits() -> None:
    """AWQ's codes less their zero points are kept in more bits; as 4 bits with offsets where float16 has these."""
    packed = awq(*SIZES[0])
    expr = read(packed)
    assert isinstance(expr, SourceCodes) and expr.code_format.bits > 4 and not expr.code_format.offsets
    packed.tensors[".scales"] = torch.full_like(packed.tensors[".scales"], 0.125)
    expr = read(packed)
    assert isinstance(expr, SourceCodes) and expr.code_format == CodeFormat(4, 32, offsets=True)
    assert torch.equal(decode(expr.codes(), expr.code_format), expr.evaluate())


@pytest.mark.parametrize("case", ["gptq-4", "packed-4", "int-quantized", "fp8-blocks-powers", "nf4-exact"])
def test_scales_that_float16_has_not_make_floats(case: str) -> None:
    packed = CASES[case](*SIZES[0])
    end = next(e for e in packed.tensors if e in (".scales", ".weight_scale", ".weight_scale_inv", ".weight.absmax"))
    packed.tensors[end] = packed.tensors[end].float() * 1.001
    assert not isinstance(read(packed), SourceCodes)


def test_codes_cross_words() -> None:
    """3 bits: 32 codes in three words, as compressed-tensors 0.20.0 packs them (pack_to_int32)."""
    values = [7, 4, 1, 6, 3, 3, 7, 7, 4, 1, 6, 7, 0, 1, 6, 2, 2, 0, 7, 6]
    values += [4, 0, 7, 7, 4, 0, 3, 7, 2, 6, 3, 4, 4, 7, 5, 0, 0, 7, 5, 0]
    words = torch.tensor(list(bytes.fromhex("67bcfd8c8f58c24dfcc42e8f7c811700")), dtype=torch.uint8).view(torch.int32)
    assert unpack_words(words[None], 3, 40).tolist() == [values]


def test_fp4_as_compressed_tensors_packs_it() -> None:
    """0 to 6, then -0.5 to -6 and 0, by pack_fp4_to_uint8 of compressed-tensors 0.20.0."""
    row = torch.tensor([list(bytes.fromhex("10325476a9cbed0f"))], dtype=torch.uint8)
    tensors = {".weight_packed": row, ".weight_scale": torch.ones(1, 1).to(torch.float8_e4m3fn)}
    tensors[".weight_global_scale"] = torch.ones(1)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    got = read(Packed(tensors, compressed("nvfp4-pack-quantized", weights), torch.zeros(1))).evaluate()
    assert got.tolist() == [[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]]


def test_nested_nf4_as_bitsandbytes_writes_it() -> None:
    """torch.randn(2, 128) by quantize_4bit of bitsandbytes 0.50.2, with compressed statistics."""

    def tensor(text: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8).view(dtype)

    text = (
        "a963ec9ebc38aed1c2875a342ea6a247b845ba562a5a9d23a36303bc5a813d8dd2f4b76157b2488578e584d14836c8e8b8b49ecce3023768"
        "2cd3161fbbba7640445093295b65c73cc675953374586cce555ea75b67a4764159afa6286a84a8b384a4dea59797b82e69935d55c466c2af"
        "99b9c76447a6285c77aa44b42688a4b8"
    )
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 128]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2.4933156967163086}
    table = torch.zeros(256)
    for place, value in ((22, "-0x1.5ep-1"), (24, "-0x1.4f999ap-1"), (255, "0x1p+0"), (207, "0x1.54p-2")):
        table[place] = float.fromhex(value)
    tensors = {
        ".weight": tensor(text)[:, None],
        ".weight.absmax": tensor("1618ffcf"),
        ".weight.quant_map": torch.tensor(NF4),
        ".weight.nested_absmax": tensor("d4fb063f", torch.float32),
        ".weight.nested_quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    got = read(Packed(tensors, {"quant_method": "bitsandbytes"}, torch.zeros(1))).evaluate()
    first = "8661063f94bdaf3ed1db46be7ba157bf605fc53f53a2703f94bdaf3e605fc53f"
    assert torch.equal(got[0, :8], tensor(first, torch.float32))


def test_blocks_of_nf4_may_cross_rows() -> None:
    packed = nf4(32, 64)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 32]}
    end = ".weight.quant_state.bitsandbytes__nf4"
    packed.tensors[end] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    assert torch.equal(read(packed).evaluate(), packed.floats.reshape(64, 32))


def flipped(end: str, place: tuple[int, ...], value: Any) -> Callable[[Packed], None]:
    def change(packed: Packed) -> None:
        packed.tensors[end] = packed.tensors[end].clone()
        packed.tensors[end][place] = value

    return change


def without(end: str) -> Callable[[Packed], None]:
    def change(packed: Packed) -> None:
        del packed.tensors[end]

    return change


def cut(end: str) -> Callable[[Packed], None]:
    return lambda packed: packed.tensors.update({end: packed.tensors[end][:-1].clone()})


def said(**fields: Any) -> Callable[[Packed], None]:
    return lambda packed: packed.section.update(fields)


def weights_said(**fields: Any) -> Callable[[Packed], None]:
    return lambda packed: packed.section["config_groups"]["group_0"]["weights"].update(fields)


def another(end: str, value: torch.Tensor) -> Callable[[Packed], None]:
    return lambda packed: packed.tensors.update({end: value})


NAN = float("nan")

DAMAGED: list[tuple[str, Callable[[Packed], None], str]] = [
    ("gptq-4", without(".qzeros"), r"tensor m\.qzeros is missing"),
    ("gptq-4", without(".scales"), r"tensor m\.scales is missing"),
    ("gptq-order", without(".g_idx"), r"tensor m\.g_idx is missing"),
    ("int-quantized", another(".weight", torch.zeros(64, dtype=torch.int8)), r"m\.weight has shape \(64,\), not two"),
    ("gptq-4", said(bits=8), r"m\.(scales|qzeros) has"),
    ("gptq-4", said(group_size=64), r"m\.scales has 2 groups of 64 columns, and group_size is 64"),
    ("gptq-4", said(checkpoint_format="gptq_v2"), r"m\.qzeros has a zero point of 7, and .* symmetric around 8"),
    ("gptq-4-asym", flipped(".qzeros", (0, 0), -1), r"m\.qzeros has a zero point of 16, out of range of 4 bits"),
    ("gptq-4", flipped(".g_idx", (3,), 2), r"m\.g_idx names group 2, and there are groups 0 to 1"),
    ("gptq-4", flipped(".g_idx", (3,), -1), r"m\.g_idx names group -1"),
    ("gptq-4", cut(".g_idx"), r"m\.g_idx has 63 columns, and the weight has 64"),
    ("gptq-4", flipped(".scales", (0, 5), NAN), r"m\.scales has 1 values that are NaN"),
    ("gptq-4", cut(".qweight"), r"m\.(scales|g_idx) has"),
    ("gptq-3", cut(".qweight"), r"m\.qweight has 5 words .* no whole 3-bit codes"),
    ("awq", without(".qzeros"), r"tensor m\.qzeros is missing"),
    ("awq", flipped(".scales", (0, 5), float("inf")), r"m\.scales has 0 values that are NaN and 1 that are infinite"),
    ("awq", said(group_size=128), r"m\.scales has 2 groups of 64 columns, and group_size is 128"),
    ("awq", cut(".qzeros"), r"m\.qzeros has shape \(1, 4\), not \(2, 4\)"),
    ("packed-4", without(".weight_shape"), r"m\.weight_shape is missing"),
    ("packed-4", without(".weight_scale"), r"m\.weight_scale is missing"),
    ("packed-4-asym", without(".weight_zero_point"), r"m\.weight_zero_point is missing"),
    ("packed-4", another(".weight_shape", torch.tensor([64, 64])), r"m\.weight_packed has shape .* \(64, 64\)"),
    ("packed-4", weights_said(num_bits=8), r"m\.weight_packed has 8 words a row, and 64 codes of 8 bits are 16"),
    ("packed-4", weights_said(group_size=64), r"m\.weight_scale has shape \(32, 2\), which isn't .* groups of 64"),
    ("packed-4", weights_said(symmetric=False), r"m\.weight_zero_point is missing"),
    ("packed-4-asym", weights_said(symmetric=True), r"m\.weight_zero_point has a zero point of .* symmetric around 8"),
    ("packed-4", another(".weight_g_idx", torch.full((64,), 2)), r"m\.weight_g_idx names group 2"),
    ("int-quantized", another(".weight_zero_point", torch.ones(32, 1).to(torch.int8)), r"zero_point isn't zero"),
    ("int-quantized", weights_said(num_bits=4, symmetric=True), r"m\.weight has values beyond -8 to 7"),
    ("fp8-blocks", without(".weight_scale_inv"), r"m\.weight_scale_inv is missing"),
    ("fp8-blocks", said(weight_block_size=[128, 16]), r"m\.weight_scale_inv has shape .* blocks of 128 x 16"),
    ("fp8-blocks", flipped(".weight_scale_inv", (0, 0), NAN), r"m\.weight_scale_inv has 1 values that are NaN"),
    ("fp8-blocks", flipped(".weight", (0, 0), NAN), r"m\.weight has 1 values that are NaN"),
    ("fp8-channels", cut(".weight_scale"), r"m\.weight_scale has shape \(31, 1\)"),
    ("nvfp4", without(".weight_global_scale"), r"m\.weight_global_scale is missing"),
    ("nvfp4", cut(".weight_scale"), r"m\.weight_scale has shape \(31, 4\), not \(32, 4\)"),
    ("nvfp4", another(".weight_global_scale", torch.zeros(1)), r"m\.weight_global_scale is 0\.0, not above 0"),
    ("nvfp4-modelopt", without(".weight_scale_2"), r"m\.weight_scale_2 is missing"),
    ("mxfp4", flipped(".weight_scale", (1, 1), 255), r"m\.weight_scale has a scale of 255, which is NaN"),
    ("nf4", without(".weight.absmax"), r"m\.weight\.absmax is missing"),
    ("nf4", cut(".weight.absmax"), r"m\.weight\.absmax has shape \(31,\), not \(32,\)"),
    ("nf4", cut(".weight"), r"m\.weight has shape \(1023, 1\), and its state"),
    ("nf4", cut(".weight.quant_state.bitsandbytes__nf4"), r"bitsandbytes__nf4 can't be read"),
    ("nf4-nested", without(".weight.nested_absmax"), r"m\.weight\.nested_absmax is missing"),
    ("bnb-int8", without(".SCB"), r"m\.SCB is missing"),
    ("bnb-int8", another(".weight_format", torch.tensor(1, dtype=torch.uint8)), r"m\.weight_format isn't 0"),
    (
        "fp8-channels",
        another(".qweight", torch.zeros(8, 8, dtype=torch.int32)),
        r"m\.qweight is int32, as FP8 has none",
    ),
    ("gptq-4", another(".other.weight", e4m3(4, 4)), r"m\.other\.weight is float8_e4m3fn, as GPTQ has none"),
    ("mxfp4", another(".weight", torch.zeros(2, 2)), r"tensors m\.weight_packed and m\.weight are both m\.weight"),
]


@pytest.mark.parametrize(("case", "change", "message"), DAMAGED, ids=[f"{c}: {m:.40}" for c, _, m in DAMAGED])
def test_what_is_damaged_or_says_otherwise_is_named(case: str, change: Callable[[Packed], None], message: str) -> None:
    packed = CASES[case](*SIZES[0])
    change(packed)
    with pytest.raises(SourceError, match=message) as caught:
        for expr in unpacked(sources(packed.tensors), parse_quantization(packed.section, "config.json")).values():
            expr.evaluate()
    assert caught.value.message.startswith("some/model.safetensors: tensor")


def test_padding_that_cannot_be_told_is_refused() -> None:
    """20 codes of 3 bits are two words with padding and without; 10 are one word, the same in both."""
    packed = pack_quantized(4, 20, bits=3, group=20)
    with pytest.raises(SourceError, match="20 codes of 3 bits are so many with padding and without"):
        read(packed)
    assert torch.equal(read(one := pack_quantized(4, 10, bits=3, group=10)).evaluate(), one.floats)


def test_a_section_without_packed_weights() -> None:
    with pytest.raises(SourceError, match=r"weights are quantized \(GPTQ\), and none is"):
        unpacked(sources({".weight": torch.ones(2, 2)}), parse_quantization(gptq(32, 64).section, "config.json"))


def pack_folder(folder: Path, pack: Callable[[int, int], Packed], which: str = "_proj.weight") -> PreTrainedModel:
    """Packs weights of a model's folder, and gives the model that it stands for now."""
    path = folder / "model.safetensors"
    tensors, packed_tensors, section = load_file(path), {}, {}
    for name, value in tensors.items():
        if not name.endswith(which) or value.dim() != 2:
            packed_tensors[name] = value
            continue
        packed = pack(*value.shape)
        section = packed.section
        packed_tensors |= {name.removesuffix(".weight") + end: t.contiguous() for end, t in packed.tensors.items()}
        tensors[name] = packed.floats
    save_file(tensors, path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    save_file(packed_tensors, path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))
    return model


FOLDERS = [
    "fp8-blocks",
    "packed-4",
    "nvfp4",
    "nvfp4-modelopt",
    "mxfp4",
    "awq",
    "gptq-4",
    "gptq-3-order-asym",
    "nf4-nested",
]


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_is_the_model_that_it_stands_for(
    case: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    tiny_model("Llama").save_pretrained(tmp_path)
    model = pack_folder(tmp_path, CASES[case])
    _, weights = build_from_directory(tmp_path)
    for name, value in model.named_parameters():
        torch.testing.assert_close(weights[name].evaluate(), value.data, rtol=2e-7, atol=0.0)
    # Random codes make weights of any size: logits are compared relative to their own.
    same_logits(model, capture(tmp_path), {"rtol": 2e-4, "atol": 2e-4 * float(model.lm_head.weight.data.norm())})


def test_biases_of_zeros_are_left_out(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """AutoGPTQ writes a bias beside each linear. One that isn't zero has no place in the model, and is named."""
    tiny_model("Llama").save_pretrained(tmp_path)
    model = pack_folder(tmp_path, gptq)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    biases = {n.replace(".qweight", ".bias"): torch.zeros(t.shape[1]) for n, t in tensors.items() if "qweight" in n}
    save_file(tensors | biases, path)
    _, weights = build_from_directory(tmp_path)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    odd = sorted(biases)[3]
    biases[odd][5] = 0.25
    save_file(tensors | biases, path)
    with pytest.raises(SourceError, match=rf"tensor {odd} has no place in the model"):
        build_from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "pack", "section"),
    [
        ("quantize_config.json", gptq, {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("quant_config.json", awq, {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_a_file_beside_config_json_says_how_weights_are_packed(
    name: str,
    pack: Callable[[int, int], Packed],
    section: Section,
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
) -> None:
    tiny_model("Llama").save_pretrained(tmp_path)
    model = pack_folder(tmp_path, pack)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(section))
    _, weights = build_from_directory(tmp_path)
    for parameter, value in model.named_parameters():
        assert torch.equal(weights[parameter].evaluate(), value.data)
    (tmp_path / name).write_text(json.dumps(section | {"zero_point": False, "bits": 5, "w_bit": 5}))
    with pytest.raises(UnsupportedModelError, match=rf"{name}\.(w_bit|bits) is 5"):
        build_from_directory(tmp_path)


def test_integers_come_through_to_the_bundle(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """The recipe that keeps blocks keeps those of GPTQ, and the report says so."""
    folder = tmp_path / "model"
    tiny_model("Llama").save_pretrained(folder)
    pack_folder(folder, gptq)
    report = export(folder, tmp_path / "kept.bundle", recipe="gguf")
    integers = random_codes(64, 128, 4) - 8
    bundle = Bundle.open(tmp_path / "kept.bundle")
    uses = [use for use in bundle.program("cpu").weights if use.dtype == "i4" and "down_proj" in use.name]
    assert len(uses) == 2
    for use in uses:
        got = unpack(np.array(bundle.weight(use.name)), use.shape, use.layout, use.dtype)
        assert np.array_equal(got, integers.numpy())
    assert {w.stored for w in report.already_quantized} == {"GPTQ of 4 bits, groups of 32"}
    assert all(w.kept for w in report.already_quantized) and report.quantization is not None
    assert report.quantization.kept > 0


def pack_experts(folder: Path, section: Section, change: Callable[[str, torch.Tensor], Tensors | None]) -> None:
    path = folder / "model.safetensors"
    tensors: Tensors = {}
    for name, value in load_file(path).items():
        tensors |= change(name, value) or {name: value}
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))


EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.mark.parametrize("case", ["fp8-blocks", "gptq-4", "nvfp4"])
def test_experts_one_by_one(case: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    tiny_model("Mixtral", **EXPERTS).save_pretrained(tmp_path)
    floats: Tensors = {}

    def change(name: str, value: torch.Tensor) -> Tensors | None:
        if ".experts." not in name:
            return None
        packed = CASES[case](*value.shape)
        floats[name] = packed.floats
        return {name.removesuffix(".weight") + end: t.contiguous() for end, t in packed.tensors.items()}

    pack_experts(tmp_path, CASES[case](32, 64).section, change)
    _, weights = build_from_directory(tmp_path)
    down = weights["model.layers.1.mlp.experts.down_proj"].evaluate()
    gate_up = weights["model.layers.1.mlp.experts.gate_up_proj"].evaluate()
    expert = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    kinds = formats_of_rows(weights["model.layers.1.mlp.experts.gate_up_proj"])
    assert kinds == ({CodeFormat(4, 32)} if case == "gptq-4" else {None})
    for e in range(3):
        assert torch.equal(down[e], floats[expert.format(e, "w2")])
        assert torch.equal(gate_up[e], torch.cat([floats[expert.format(e, w)] for w in ("w1", "w3")]))


def test_experts_of_gpt_oss(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Blocks of 16 bytes, the low nibble first, of parameters [E, K, N]; logits are those of the floats they mean."""
    sizes = EXPERTS | {"head_dim": 16, "original_max_position_embeddings": 16}
    model = tiny_model("GptOss", **sizes)
    floats: Tensors = {}

    def change(name: str, value: torch.Tensor) -> Tensors | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, inputs, outputs = value.shape
        packed = mxfp4(experts * outputs, inputs)
        floats[name] = packed.floats.reshape(experts, outputs, inputs).transpose(1, 2)
        blocks = packed.tensors[".weight_packed"].reshape(experts, outputs, inputs // 32, 16)
        scales = packed.tensors[".weight_scale"].reshape(experts, outputs, inputs // 32)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    folder = tmp_path / "model"
    model.save_pretrained(folder)
    pack_experts(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}, change)
    assert len(floats) == 4
    _, weights = build_from_directory(folder)
    for name, value in floats.items():
        assert torch.equal(weights[name].evaluate(), value)
        model.get_parameter(name).data.copy_(value)
    same_logits(model, capture(folder), {"rtol": 2e-4, "atol": 1e-3})
    report = export(folder, tmp_path / "kept.bundle", recipe="gguf")
    kept_of = {w.name.partition(".experts.")[2].partition("_proj")[0]: w.kept for w in report.already_quantized}
    assert kept_of == {"gate_up": True, "down": True}, "gates and ups that alternate are laid apart as integers"


def test_stacks_of_experts_in_fp8() -> None:
    """One scale for each expert, for each channel of each, and for each of the last axis of [E, K, N]."""
    values = (torch.randn(3, 32, 48) * 20).to(torch.float8_e4m3fn)
    for shape in ((3,), (3, 1, 1), (3, 32, 1), (3, 1, 48)):
        scales = torch.rand(shape) + 0.5
        tensors = sources({".gate_up_proj": values, ".gate_up_proj_scale": scales})
        weights = unpacked(tensors, parse_quantization({"quant_method": "fbgemm_fp8"}, "config.json"))
        spread = scales[:, None, None] if len(shape) == 1 else scales
        assert list(weights) == ["m.gate_up_proj"]
        assert torch.equal(weights["m.gate_up_proj"].evaluate(), values.float() * spread)


@pytest.mark.parametrize("case", ["packed-4", "int-quantized", "fp8-channels", "gptq-4"])
def test_random_damage_is_an_error_of_ours(case: str) -> None:
    """A checkpoint that isn't refused has the shape that its tensors imply, and no NaN."""
    generator = random.Random(case)
    refused = 0
    for _ in range(60):
        packed = CASES[case](*SIZES[0])
        end = generator.choice(sorted(packed.tensors))
        value = packed.tensors[end]
        kind = generator.randrange(5)
        if kind == 0:
            del packed.tensors[end]
        elif kind == 1 and value.dim():
            packed.tensors[end] = value[: generator.randrange(1, len(value) + 1)].clone()
        elif kind == 2:
            packed.tensors[end] = value.to(generator.choice([torch.float32, torch.int8, torch.uint8, torch.int64]))
        elif kind == 3:
            raw = value.contiguous().reshape(-1).view(torch.uint8).clone()
            raw[generator.randrange(len(raw))] = generator.choice([0, 127, 255])
            packed.tensors[end] = raw.view(value.dtype).reshape(value.shape)
        else:
            key = generator.choice(["bits", "group_size", "sym", "format", "config_groups", "weight_block_size"])
            packed.section[key] = generator.choice([0, 2, 8, 64, -1, True, "x", None, [1, 2], {}])
        try:
            weights = unpacked(sources(packed.tensors), parse_quantization(packed.section, "config.json"))
            if "m.weight" in weights and len(weights) == 1:
                assert weights["m.weight"].evaluate().isfinite().all()
        except (SourceError, UnsupportedModelError):
            refused += 1
    assert 10 < refused < 60
