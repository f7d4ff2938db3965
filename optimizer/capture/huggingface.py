"""Reads a Hugging Face model directory: config.json and safetensors, one file or several with an index."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.plugins.shared.errors import SourceError, UnsupportedModelError
from enginewright.plugins.shared.json_document import parse_json
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular

from .config_sizes import check_sizes
from .tensor_file import read_tensor, tensor_places

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER = "adapter_config.json"
_METHODS = {"awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes", "compressed-tensors": "llm-compressor"}
"""What transformers calls methods of quantization, and what people do."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


# What transformers and its configurations raise for a field that is none of theirs.
_WRONG_CONFIG: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, ArithmeticError, OSError)
_WRONG_CONFIG += (AttributeError, RecursionError, StrictDataclassError)


def read_config(directory: Path) -> PretrainedConfig:
    """The configuration of a model directory.

    Raises:
        SourceError: config.json is missing, no JSON, or has a field that is missing or wrong.
        UnsupportedModelError: a model that transformers has no code for, or is quantized already.
    """
    path = directory / CONFIG
    _check_kind(directory)
    if not any(directory.iterdir()):
        raise SourceError(f"{directory} is empty", hint="Pass a directory with config.json and model.safetensors.")
    if not path.is_file():
        raise SourceError(f"{directory} has no {CONFIG}", hint="Pass a Hugging Face model directory or a GGUF file.")
    raw = read_json(path)
    model_type = raw.get("model_type")
    if raw.get("auto_map"):
        raise UnsupportedModelError(
            f"{path}: auto_map: the model comes with code of its own, which is never run",
            hint="Models that transformers itself implements can be compiled.",
        )
    if raw.get("quantization_config"):
        raise _quantized_already(path, raw["quantization_config"])
    named = raw.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise SourceError(f"{path}: architectures is {named!r:.80}, and no list of names", hint="Download it again.")
    if not isinstance(model_type, str):
        raise SourceError(f"{path}: model_type is missing", hint="Pass the configuration of a transformers model.")
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except _WRONG_CONFIG as e:
        if "model type" in str(e):
            raise UnsupportedModelError(f"{path}: model_type {model_type!r}: transformers has no such model") from e
        raise SourceError(f"{path}: {e}", hint="Check the fields of the configuration.") from e
    assert isinstance(config, PretrainedConfig)
    check_sizes(config, str(path))
    return config


def _check_kind(directory: Path) -> None:
    """Raises SourceError for a folder that is something else than a whole model."""
    if (directory / MANIFEST_PATH).is_file() and not (directory / CONFIG).is_file():
        raise SourceError(
            f"{directory} is a bundle already, not a model",
            hint=f"Run it: optimize generate {shlex.quote(str(directory))} PROMPT. "
            "To export with other settings, pass the model that it was made from.",
        )
    if (directory / ADAPTER).is_file() and not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        base = read_json(directory / ADAPTER).get("base_model_name_or_path")
        of = f" of {base}" if isinstance(base, str) and base else ""
        raise SourceError(
            f"{directory} is a LoRA adapter{of} ({ADAPTER}), not a whole model; adapters aren't supported yet",
            hint="Merge it into its base model with peft (merge_and_unload, save_pretrained), and pass that folder.",
        )


def _quantized_already(path: Path, section: Any) -> UnsupportedModelError:
    """Says by which method, if the checkpoint does."""
    method = section.get("quant_method") if isinstance(section, dict) else None
    name = _METHODS.get(method, method) if isinstance(method, str) else None
    by = f" by {name}" if name else ""
    recipe = {"AWQ": "int4-awq", "GPTQ": "int4-gptq"}.get(name or "")
    instead = f"--recipe {recipe}" if recipe else "a recipe"
    return UnsupportedModelError(
        f"{path}: quantization_config: the checkpoint is quantized already{by}; its packed weights can't be read yet",
        hint=f"Export from the original checkpoint in f32, f16 or bf16, and let {instead} quantize it.",
    )


def read_generation_settings(directory: Path) -> dict[str, Any]:
    """What generation_config.json says; empty if there is none. Raises SourceError if it isn't a JSON object."""
    path = directory / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_tensors(directory: Path) -> dict[str, WeightExpr]:
    """Every tensor of the directory's safetensors files, read when it is evaluated.

    Raises SourceError naming the file if weights are missing, truncated or otherwise damaged.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return _read_file(single)
    if not index.is_file():
        unsafe = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pt*"))
        if unsafe:
            raise SourceError(
                f"{directory} has its weights in {unsafe[0]} only, a pickle, which is never loaded",
                hint="Load the model with transformers where you trust it, and save_pretrained() it as safetensors.",
            )
        raise SourceError(
            f"{directory} has {CONFIG} but no weights: neither {SINGLE} nor {INDEX}",
            hint="Download the model's safetensors files too.",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: weight_map is missing", hint="Download the index again.")
    return _read_shards(directory, index, weight_map)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises SourceError naming the file."""
    try:
        value = parse_json(read_regular(path, most=MOST_TEXT_BYTES))
    except (OSError, ValueError) as e:
        raise SourceError(f"{path}: can't be read as JSON: {e}", hint="Download the file again.") from e
    if not isinstance(value, dict):
        raise SourceError(f"{path}: must be a JSON object", hint="Download the file again.")
    return value


def _read_shards(directory: Path, index: Path, weight_map: Mapping[str, Any]) -> dict[str, WeightExpr]:
    shards: dict[str, dict[str, WeightExpr]] = {}
    tensors: dict[str, WeightExpr] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SourceError(f"{index}: {name} is in {shard!r}, which isn't a file name", hint="Download it again.")
        if shard not in shards:
            if not os.path.isfile(directory / shard):  # Path's own raises where a name is too long
                raise SourceError(f"{directory / shard} is missing ({INDEX} names it)", hint="Download it too.")
            shards[shard] = _read_file(directory / shard)
        if name not in shards[shard]:
            raise SourceError(f"{directory / shard}: tensor {name} is missing ({INDEX} says that it is there)")
        tensors[name] = shards[shard][name]
    return tensors


def _read_file(path: Path) -> dict[str, WeightExpr]:
    try:
        # The library checks the header: offsets in order, without holes or overlap, and ending with the file.
        handle: Any = safe_open(str(path), framework="pt")
        places = tensor_places(path)
        tensors: dict[str, WeightExpr] = {}
        for name in handle.keys():  # noqa: SIM118  not a mapping
            part = handle.get_slice(name)
            shape, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise SourceError(
                    f"{path}: tensor {name} has the dtype {part.get_dtype()}, which can't be read",
                    hint="Export from a checkpoint in float32, float16 or bfloat16.",
                )
            if math.prod(shape) == 0:
                raise SourceError(f"{path}: tensor {name} is empty (shape {shape})")
            tensors[name] = Source(
                name, shape, dtype, partial(read_tensor, path, places[name], shape, dtype), str(path)
            )
    except (SafetensorError, OSError, ValueError) as e:
        raise SourceError(f"{path}: damaged or truncated: {e}", hint="Download the file again.") from e
    return tensors
