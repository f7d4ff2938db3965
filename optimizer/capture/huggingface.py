"""Reads a Hugging Face model directory: config.json and safetensors, one file or several with an index."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from enginewright.optimizer.shared.config_sizes import check_sizes
from enginewright.passes.formats.rounding import TORCH_DTYPES
from enginewright.passes.ir.weights import Source, WeightExpr
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .check_source import CONFIG, GENERATION_CONFIG, INDEX, SINGLE, check_folder, quantization_of, read_json
from .quantized.config import QuantizedFolder
from .tensor_file import read_tensor, tensor_places

_DTYPES = {of.safetensors: TORCH_DTYPES[name] for name, of in DTYPES.items() if of.safetensors}


# What transformers and its configurations raise for a field that is none of theirs.
_WRONG_CONFIG: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, ArithmeticError, OSError)
_WRONG_CONFIG += (AttributeError, RecursionError, StrictDataclassError)


def read_config(directory: Path) -> PretrainedConfig:
    """Returns the configuration of a model directory.

    Raises:
        SourceError: config.json is missing, no JSON, or has a field that is missing or wrong.
        UnsupportedModelError: transformers has no code for the model, or its quantization can't be read.
    """
    model_type = check_folder(directory)["model_type"]
    path = directory / CONFIG
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except _WRONG_CONFIG as e:
        if "model type" in str(e):
            raise UnsupportedModelError(f"{path}: model_type {model_type!r}: transformers has no such model") from e
        raise SourceError(f"{path}: {e}", hint="Check the fields of the configuration.") from e
    assert isinstance(config, PretrainedConfig)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file, and not of the model that is built
    check_sizes(config, str(path))
    return config


def read_quantization(directory: Path) -> QuantizedFolder | None:
    """Returns the quantization of a folder's weights; None if they aren't quantized. Raises the errors of
    ``check_folder``.
    """
    return quantization_of(directory, check_folder(directory))


def read_generation_settings(directory: Path) -> dict[str, Any]:
    """Reads generation_config.json; empty if there is none. Raises SourceError if it isn't a JSON object."""
    path = directory / GENERATION_CONFIG
    return read_json(path) if os.path.lexists(path) else {}


def read_tensors(directory: Path) -> dict[str, WeightExpr]:
    """Returns every tensor of the directory's safetensors files, read when it is evaluated.

    Raises SourceError naming the file if weights are missing, truncated or otherwise damaged.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return read_file(single)
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


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files that ``read_tensors`` reads: one, or the shards that the index names."""
    if (single := directory / SINGLE).is_file():
        return [single]
    return [directory / name for name in sorted(set(read_json(directory / INDEX)["weight_map"].values()))]


def _read_shards(directory: Path, index: Path, weight_map: Mapping[str, Any]) -> dict[str, WeightExpr]:
    shards: dict[str, dict[str, WeightExpr]] = {}
    tensors: dict[str, WeightExpr] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise SourceError(f"{index}: {name} is in {shard!r}, which isn't a file name", hint="Download it again.")
        if shard not in shards:
            if not os.path.isfile(directory / shard):  # Path's own raises where a name is too long
                raise SourceError(f"{directory / shard} is missing ({INDEX} names it)", hint="Download it too.")
            shards[shard] = read_file(directory / shard)
        if name not in shards[shard]:
            raise SourceError(f"{directory / shard}: tensor {name} is missing ({INDEX} says that it is there)")
        tensors[name] = shards[shard][name]
    return tensors


def read_file(path: Path) -> dict[str, WeightExpr]:
    """Returns every tensor of a safetensors file, read when it is evaluated. Raises SourceError naming file and
    tensor.
    """
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
