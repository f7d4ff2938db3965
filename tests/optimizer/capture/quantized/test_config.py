"""Configurations of quantized weights are read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.capture.check_source import quantization_of
from enginewright.optimizer.capture.quantized.config import Scheme, parse_quantization
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(kind: str = "pack-quantized", **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INT4 | others.pop("weights", {})}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}} | others


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Scheme("gptq", 4, 128, False, None, True)),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": -1, "sym": True, "checkpoint_format": "gptq_v2"},
            Scheme("gptq", 3, 0, True),
        ),
        ({"quant_method": "gptq", "bits": 8, "checkpoint_format": "gemm"}, Scheme("gptq", 8, 0, False, None, True)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, Scheme("awq", 4, 64, False)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Scheme("fp8", block=(128, 128))),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Scheme("fp8")),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}, Scheme("mxfp4-blocks", 4, 32)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, Scheme("nvfp4-modelopt", 4, 16)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, Scheme("fp8")),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Scheme("bnb")),
        (compressed(), Scheme("packed", 4, 128)),
        (compressed("int-quantized", weights={"num_bits": 8, "strategy": "channel"}), Scheme("int")),
        (compressed("float-quantized", weights=FP8), Scheme("fp8")),
        (
            compressed("float-quantized", weights=FP8 | {"strategy": "block", "block_structure": [64, 128]}),
            Scheme("fp8", block=(64, 128)),
        ),
        (compressed("nvfp4-pack-quantized", weights={"type": "float", "group_size": 16}), Scheme("nvfp4", 4, 16)),
        (compressed("mxfp4-pack-quantized", weights={"type": "float", "group_size": 32}), Scheme("mxfp4", 4, 32)),
    ],
    ids=lambda v: v["quant_method"] if isinstance(v, dict) else None,
)
def test_a_section_says_how_modules_are_packed(section: dict[str, Any], scheme: Scheme) -> None:
    assert parse_quantization(section, "here").scheme_of("model.layers.0.mlp.up_proj") == scheme


def test_the_most_specific_group_counts() -> None:
    """A module's name goes before a pattern, and a pattern before a class."""
    eight = {"targets": [r"re:.*down_proj$"], "format": "float-quantized", "weights": FP8}
    named = {"targets": ["m.1.down_proj"], "format": "int-quantized", "weights": INT4 | {"num_bits": 8}}
    section = compressed("mixed-precision")
    section["config_groups"] |= {"group_0": section["config_groups"]["group_0"] | {"format": "pack-quantized"}}
    section["config_groups"] |= {"group_1": eight, "group_2": named}
    folder = parse_quantization(section, "here")
    modules = ("m.0.up_proj", "m.0.down_proj", "m.1.down_proj")
    assert [folder.scheme_of(name).layout for name in modules] == ["packed", "fp8", "int"]


def test_gptq_has_other_bits_for_some_modules() -> None:
    """The first of GPTQModel's patterns that fits counts."""
    dynamic = {r"+:.*\.1\..*": {"bits": 8}, r".*down.*": {"bits": 2, "group_size": 32}, r"-:.*lm_head.*": {}}
    folder = parse_quantization({"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": dynamic}, "here")
    sizes = [(s.bits, s.group_size) for s in map(folder.scheme_of, ("m.0.up", "m.0.down", "m.1.down"))]
    assert sizes == [(4, 64), (2, 32), (8, 64)]


def test_auto_round_says_otherwise_of_some_modules() -> None:
    """A name goes before patterns, which are searched in names; 16 bits aren't quantized."""
    extra = {"m.0.up": {"bits": 8}, r".*\.up": {"bits": 2, "group_size": 32}, "down$": {"bits": 16}, "m.2": {"bits": 3}}
    section = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 64, "sym": False, "extra_config": extra}
    folder = parse_quantization(section, "here")
    sizes = [(s.bits, s.group_size) for s in map(folder.scheme_of, ("m.0.up", "m.1.up", "m.2.gate"))]
    assert sizes == [(8, 64), (2, 32), (4, 64)]
    with pytest.raises(SourceError, match=r"m\.1\.down is packed, and 'down\$' says that it isn't quantized"):
        folder.scheme_of("m.1.down")


ENDLESS = "(([a-z_.0-9])+)+!"
"""A pattern for which Python's engine tries every way to divide a name into parts."""


@pytest.mark.parametrize(
    "section",
    [
        compressed(ignore=[f"re:{ENDLESS}"]),
        compressed(config_groups={"a": {"targets": [f"re:{ENDLESS}", "Linear"], "weights": INT4}}),
        {"quant_method": "gptq", "bits": 4, "dynamic": {f"+:{ENDLESS}": {"bits": 8}}},
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {ENDLESS: {"bits": 8}}},
    ],
    ids=["ignore", "targets", "dynamic", "extra_config"],
)
def test_patterns_are_matched_without_backtracking(section: dict[str, Any]) -> None:
    folder = parse_quantization(section, "here")
    assert folder.scheme_of("model.layers.0.self_attn.q_proj" * 20).bits == 4


def test_patterns_that_need_backtracking_are_refused_by_name() -> None:
    with pytest.raises(SourceError, match=r"here\.ignore: 're:\(a\)\\\\1' isn't a regular expression that can be"):
        parse_quantization(compressed(ignore=[r"re:(a)\1"]), "here")


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    layers = {"m.0.up": {"quant_algo": "NVFP4", "group_size": 16}, "m.0.down": {"quant_algo": "FP8"}}
    document = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, "producer": {}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(document))
    folder = quantization_of(tmp_path, {})
    assert folder is not None
    assert [folder.scheme_of(name).layout for name in layers] == ["nvfp4-modelopt", "fp8"]
    assert quantization_of(tmp_path.parent / "nowhere", {}) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bits": 4}, "quantized already, and quant_method doesn't say by which method"),
        ({"quant_method": "aqlm"}, "quantized already by aqlm"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_p"}, r"checkpoint_format is 'gptq_p'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is true"),
        ({"quant_method": "gptq", "bits": 5}, r"\.bits is 5"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, r"pack_dtype is 'int16'"),
        ({"quant_method": "awq", "version": "gemv"}, r"version is 'gemv'"),
        ({"quant_method": "awq", "version": "GEMV_FAST"}, r"version is 'gemv_fast'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, r"version is 'llm-awq'"),
        ({"quant_method": "awq", "bits": 8}, r"\.bits is 8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt is 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, r"expert_dtype is 'fp4'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo is 'w4a8_awq'"),
        (compressed("marlin-24"), r"format 'marlin-24'"),
        (compressed("sparse-24-bitmask"), r"format 'sparse-24-bitmask'"),
        (compressed(sparsity_config={"format": "sparse-bitmask"}), r"sparsity_config.format is 'sparse-bitmask'"),
        (compressed(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config rotates"),
        (compressed("mixed-precision"), r"format 'mixed-precision'"),
        (compressed(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config"),
        (compressed(weights={"strategy": "attn_head"}), r"strategy 'attn_head'"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_what_cannot_be_read_is_refused_by_name(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        parse_quantization(section, "config.json: quantization_config")
    assert caught.value.message.startswith("config.json: quantization_config")
    assert "Export from the original checkpoint" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("gptq", "here isn't an object"),
        ({"quant_method": 4}, "here.quant_method is 4, not a text"),
        ({"quant_method": "gptq"}, "here.bits is None, not a whole number"),
        ({"quant_method": "gptq", "bits": True}, "here.bits is True, not a whole number"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -7}, "here.group_size is -7"),
        ({"quant_method": "gptq", "bits": 4, "sym": "no"}, "here.sym is 'no', not true or false"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "isn't a regular expression"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "here.weight_block_size is .* not a pair"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "here.weight_block_size is .* not a pair"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "here.group_size is 32"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, "here.config_groups is .* not an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups has no group"),
        (compressed(weights={"type": "float"}), "float of 4 bits can't be pack-quantized"),
        (compressed("nvfp4-pack-quantized", weights={"type": "float"}), "group_size is 128, and nvfp4"),
        (compressed(ignore=["re:["]), "here.ignore: 're:.' isn't a regular expression"),
        (compressed(ignore="lm_head"), "here.ignore is 'lm_head', not a list of names"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_fields_that_are_wrong_are_named(section: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        parse_quantization(section, "here")


def test_modules_without_a_scheme_or_with_two() -> None:
    section = compressed(ignore=["lm_head"])
    section["config_groups"]["group_0"]["targets"] = ["re:.*proj"]
    section["config_groups"]["group_1"] = {"targets": ["re:.*up.*"], "weights": INT4 | {"num_bits": 8}}
    folder = parse_quantization(section, "here")
    with pytest.raises(SourceError, match="lm_head is packed, and 'lm_head' says that it isn't"):
        folder.scheme_of("lm_head")
    with pytest.raises(SourceError, match=r"no group has m\.norm"):
        folder.scheme_of("m.norm")
    with pytest.raises(SourceError, match=r"m\.up_proj is in 2 groups"):
        folder.scheme_of("m.up_proj")
