"""Reads adapter_config.json of a PEFT adapter: every key is used, has no effect on merged weights, or is refused.

Keys are those of PEFT 0.21's ``LoraConfig``: https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from enginewright.runtime.bundle.regular_file import open_regular
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .check_source import ADAPTER, read_json

WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("lora_dropout", "runtime_config", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    }
)
"""Keys that don't change the merged weights: they describe the training, or follow from a module's class
(fan_in_fan_out).
"""

_REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "an activated LoRA changes weights for some tokens only, so that it can't be merged",
    "arrow_config": "a router chooses among adapters for each token, so that they can't be merged",
    "kasa_config": "KaSA truncates the base weights by a decomposition of its own",
    "layer_replication": "the adapter is of a model with repeated layers",
    "megatron_config": "the adapter is of Megatron's parallel layers",
    "monteclora_config": "the adapter draws samples",
    "use_bdlora": "block-diagonal adapters aren't merged",
    "use_qalora": "QA-LoRA changes the groups of a quantized model",
}
"""Keys that are refused if they are set -> the reason."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


class _Keys(msgspec.Struct, frozen=True):
    """The keys that are used, with PEFT's defaults."""

    peft_type: str | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str | None = True


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter's configuration. Module names are those of the model that it was trained on.

    Attributes:
        path: the path of adapter_config.json, for messages.
        keys: the keys that are used.
    """

    path: Path
    keys: _Keys

    def scaling(self, module: str) -> tuple[int, float]:
        """Returns (rank, factor) of a module: the rank of its two low-rank matrices, and the factor of their product.

        Raises SourceError for a rank below 1.
        """
        rank = _of_pattern(self.keys.rank_pattern, module, self.keys.r)
        alpha = _of_pattern(self.keys.alpha_pattern, module, self.keys.lora_alpha)
        if rank < 1:
            raise SourceError(f"{self.path}: the rank of {module} is {rank}", hint="Correct r or rank_pattern.")
        return int(rank), alpha / (math.sqrt(rank) if self.keys.use_rslora else rank)

    def targets(self, module: str, *, linear: bool) -> bool:
        """Returns True if the configuration adapts the module named ``module``.

        ``linear``: True if the module is a linear other than the head.
        """
        keys = self.keys
        saved = (re.match(rf"(^|.*\.){one}($|\..*)", module) for one in keys.modules_to_save or ())
        if _named(keys.exclude_modules, module) or any(saved):
            return False
        if keys.target_modules is None:
            return not keys.target_parameters
        if isinstance(keys.target_modules, str) and keys.target_modules.lower() == ALL_LINEAR:
            return linear
        if not _named(keys.target_modules, module):
            return False
        if isinstance(keys.target_modules, str) or self._layers is None:
            return True
        return self._layer_of(module) in self._layers

    def targets_parameter(self, name: str) -> bool:
        """Returns True if the field target_parameters of the configuration includes the parameter ``name``."""
        return _named(self.keys.target_parameters, name)

    def saves(self, parameter: str) -> bool:
        """Returns True if the adapter stores a whole new value of ``parameter``, because modules_to_save includes
        its module.
        """
        parts = parameter.split(".")
        modules = [".".join(parts[:count]) for count in range(1, len(parts))]
        return any(module.endswith(one) for one in self.keys.modules_to_save or () for module in modules)

    @cached_property
    def _layers(self) -> frozenset[int] | None:
        layers = self.keys.layers_to_transform
        numbers = [layers] if isinstance(layers, int) else layers
        return frozenset(numbers) if numbers else None

    def _layer_of(self, module: str) -> int | None:
        patterns = self.keys.layers_pattern or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            lead = r".*?\." if not self.keys.layers_pattern else r"(?:^|.*?\.)"
            if (match := re.match(rf"{lead}{pattern}\.(?P<idx>\d+)\.", module)) is not None:
                return int(match["idx"])
        return None


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the configuration of an adapter's folder.

    Raises:
        SourceError: a key is unknown, or has an invalid value.
        UnsupportedModelError: the adapter is of a kind that can't be merged.
    """
    path = folder / ADAPTER
    raw = read_json(path)
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModelError(
            f"{path}: peft_type is {raw.get('peft_type')!r}, and only LORA can be merged",
            hint="Merge it with peft (merge_and_unload, save_pretrained), and export that folder.",
        )
    for key, value in raw.items():
        _check_key(path, key, value)
    try:
        keys = msgspec.convert({k: v for k, v in raw.items() if v is not None}, _Keys)
    except msgspec.ValidationError as e:
        raise SourceError(f"{path}: {e}", hint="Correct the key, or save the adapter again.") from e
    config = AdapterConfig(path, keys)
    _check_patterns(config)
    return config


def _check_key(path: Path, key: str, value: object) -> None:
    """Raises UnsupportedModelError for a key whose value isn't supported, SourceError for an unknown key that
    is set.
    """
    merge = "Merge it with peft (merge_and_unload, save_pretrained), and export that folder."
    off = value is None or value is False or value in ("", [], {})
    if key == "init_lora_weights":
        name = str(value)
        if isinstance(value, str) and name.lower().startswith(_CHANGES_BASE):
            raise UnsupportedModelError(
                f"{path}: init_lora_weights is {name!r}: its training began by changing the base model's weights",
                hint="Save the adapter with path_initial_model_for_weight_conversion (see PEFT's guide to LoRA), or "
                "merge it with peft.",
            )
        if value not in _KEEPS_BASE:
            raise UnsupportedModelError(f"{path}: init_lora_weights is {name!r}, which isn't known", hint=merge)
    elif key in _REFUSED and not off:
        raise UnsupportedModelError(f"{path}: {key}: {_REFUSED[key]}", hint=merge)
    elif key not in _REFUSED and key not in _WITHOUT_EFFECT and key not in _Keys.__struct_fields__ and not off:
        raise UnsupportedModelError(
            f"{path}: {key} isn't known, and may change what the adapter means",
            hint="Save the adapter with PEFT 0.21, or merge it with the version of peft that made it.",
        )


def _check_patterns(config: AdapterConfig) -> None:
    """Raises SourceError naming the key of an invalid regular expression."""
    keys = config.keys
    texts: Mapping[str, Sequence[str]] = {
        "rank_pattern": list(keys.rank_pattern or ()),
        "alpha_pattern": list(keys.alpha_pattern or ()),
        "target_modules": [keys.target_modules] if isinstance(keys.target_modules, str) else [],
        "exclude_modules": [keys.exclude_modules] if isinstance(keys.exclude_modules, str) else [],
        "modules_to_save": keys.modules_to_save or [],
        "layers_pattern": [keys.layers_pattern] if isinstance(keys.layers_pattern, str) else keys.layers_pattern or [],
    }
    for key, patterns in texts.items():
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as e:
                raise SourceError(f"{config.path}: {key}: {pattern!r} isn't a regular expression: {e}") from e


def _of_pattern(pattern: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a module's name; ``otherwise`` if none does.

    ``pattern``: regular expression -> value.
    """
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


def _named(names: str | Sequence[str] | None, name: str) -> bool:
    """Returns True if ``names`` includes a module.

    A list includes names that end with one of its entries; a text is a regular expression for the whole name.
    """
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in names or ())


def weights_digest(folder: Path) -> str:
    """Returns the SHA-256 of an adapter's weights, in hex. Raises SourceError if the file can't be read."""
    path = folder / WEIGHTS
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise SourceError(f"{path} can't be read: {e}", hint="Check the file's permissions.") from e
