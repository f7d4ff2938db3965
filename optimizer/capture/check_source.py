"""Quick checks of a source: of a folder's configuration, or of a file's first bytes.

They need neither torch nor transformers, whose import takes longer than the checks.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginewright.runtime.bundle import MANIFEST_PATH
from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, open_regular, read_regular
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from enginewright.runtime.shared.json_document import parse_json

from .quantized.config import CONFIGS_BESIDE, QuantizedFolder, parse_quantization

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"
MAGIC = b"GGUF"
TEXT = "text"
"""The value of ``part`` for the text decoder, the only part of a model that can be taken alone."""


def check_source(path: Path) -> None:
    """Checks a model's folder or file without its weights.

    Raises:
        SourceError: it isn't a model.
        UnsupportedModelError: its configuration can't be compiled.
    """
    if path.is_dir():
        check_folder(path)
    else:
        check_file(path)


def check_folder(directory: Path) -> dict[str, Any]:
    """Returns the configuration of a model's folder, as parsed JSON.

    Raises:
        SourceError: config.json is missing, isn't JSON, or doesn't name its model type.
        UnsupportedModelError: the model has code of its own, or a quantization that can't be read.
    """
    path = directory / CONFIG
    _check_kind(directory)
    if not path.is_file():
        raise _no_config(directory)
    raw = read_json(path)
    _check_numbers(raw, str(path))
    model_type = raw.get("model_type")
    if raw.get("auto_map"):
        raise UnsupportedModelError(
            f"{path}: auto_map: the model comes with code of its own, which is never run",
            hint="Models that transformers itself implements can be compiled.",
        )
    quantization_of(directory, raw)
    named = raw.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise SourceError(f"{path}: architectures is {named!r:.80}, and no list of names", hint="Download it again.")
    if not isinstance(model_type, str):
        raise SourceError(f"{path}: model_type is missing", hint="Pass the configuration of a transformers model.")
    return raw


def quantization_of(directory: Path, config: Mapping[str, Any]) -> QuantizedFolder | None:
    """Reads how the weights of a model's folder are quantized; None if they aren't.

    The section is in ``config``, or else in one of the files that are listed in ``CONFIGS_BESIDE``.

    Raises:
        UnsupportedModelError: the method, or its variant, can't be read.
        SourceError: a field of the section is missing or wrong.
    """
    for key in ("quantization_config", "compression_config"):  # the latter: compressed-tensors, once
        if (section := config.get(key)) not in (None, {}):
            return parse_quantization(section, f"{directory / CONFIG}: {key}")
    for name, method in CONFIGS_BESIDE.items():
        if (beside := directory / name).is_file():
            return parse_quantization({"quant_method": method, **read_json(beside)}, str(beside))
    return None


def check_file(path: Path) -> None:
    """Raises SourceError if a file's first bytes aren't those of a GGUF file."""
    try:
        with open_regular(path) as handle:
            magic = handle.read(len(MAGIC))
    except OSError as e:
        raise SourceError(f"{path} can't be read: {e}", hint="Check the file's permissions.") from e
    if magic != MAGIC:
        begins = f"it begins with {magic!r}" if magic else "it is empty"
        folder = path.parent if (path.parent / CONFIG).is_file() else "the folder of a Hugging Face model"
        raise SourceError(f"{path} isn't a GGUF file: {begins}", hint=f"Pass a GGUF file, or {folder}.")


def read_json(path: Path, *, repeats: bool = False) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises SourceError naming the file.

    ``repeats``: True uses the last of several equal keys, as other readers do; False raises an error for them.
    """
    try:
        value = parse_json(read_regular(path, most=MOST_TEXT_BYTES), repeats=repeats)
    except (OSError, ValueError) as e:
        raise SourceError(f"{path}: can't be read as JSON: {e}", hint="Download the file again.") from e
    if not isinstance(value, dict):
        raise SourceError(f"{path}: must be a JSON object", hint="Download the file again.")
    return value


def _check_numbers(value: object, where: str) -> None:
    """Raises SourceError naming a field that is NaN or infinite. Limits of steps in time may be infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SourceError(f"{where} is {value}, which isn't a number that a model has", hint="Correct the field.")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if not (isinstance(key, str) and key.endswith("_limit")):
            _check_numbers(item, f"{where}: {key}" if isinstance(key, str) else f"{where}[{key}]")


def _no_config(directory: Path) -> SourceError:
    """Returns the error of a folder without config.json, with the folder's GGUF files in the hint."""
    names = sorted(entry.name for entry in directory.iterdir())
    if not names:
        hint = "Pass a directory with config.json and model.safetensors, or a GGUF file."
        return SourceError(f"{directory} is empty", hint=hint)
    files = [shlex.quote(str(directory / name)) for name in names if name.lower().endswith(".gguf")]
    if files:
        more = f", or another of the {len(files)} there" if len(files) > 1 else ""
        message = f"{directory} is a folder of GGUF files, and a model is one of them"
        return SourceError(message, hint=f"Pass the file: {files[0]}{more}.")
    what = "is a folder, and no GGUF file is in it" if directory.suffix.lower() == ".gguf" else f"has no {CONFIG}"
    return SourceError(f"{directory} {what}", hint="Pass a Hugging Face model directory or a GGUF file.")


def _check_kind(directory: Path) -> None:
    """Raises SourceError for a folder that isn't a whole model."""
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
            f"{directory} is a LoRA adapter{of} ({ADAPTER}), not a whole model",
            hint=f"Export its base model with it: optimize export MODEL --lora {shlex.quote(str(directory))}",
        )
