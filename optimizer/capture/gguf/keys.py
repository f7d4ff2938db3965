"""Reads the keys of a GGUF file by type, and refuses those that nothing has read.

Names and meanings: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and src/llama-arch.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .file import GgufFile
from .header import GgufArray, Value

_FOLDER = "Export from the model's Hugging Face directory."
_AGAIN = "Download or convert the file again."


RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
"""The keys of the epsilon of norms, without and with the mean subtracted."""


class _Required:
    """The type of ``REQUIRED``, the default of a key that must be there."""


REQUIRED: Final = _Required()

HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned"})
"""Keys, without the architecture, that change nothing. The vocabulary's size, for example, is that of the embedding."""

NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    **dict.fromkeys(
        ("logit_scale", "embedding_scale", "residual_scale", "attention.output_scale", "attention.value_scale"), (0, 1)
    ),
    **dict.fromkeys(("expert_weights_scale", "rope.scaling.attn_factor"), (0, 1)),
    **dict.fromkeys(
        (
            *("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"),
            *("expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length"),
            *("expert_shared_feed_forward_length", "expert_gating_func", "leading_dense_block_count"),
            *("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
            *("nextn_predict_layers", "n_deepstack_layers", "embedding_length_per_layer_input"),
            *("attention.shared_kv_layers", "swin_norm", "adapters.count", "hash_layer_count"),
            *("attention.temperature_scale", "attention.temperature_length", "moe_latent_size"),
        ),
        (0,),
    ),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step"), (0, 1)),
    "expert_weights_norm": (False,),
    "rope.scaling.type": ("none", "linear"),
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "tensor_data_layout": ("Meta AI original pth", "jploski"),
}
"""Key -> its values that change nothing, for architectures that don't read the key."""


class Keys:
    """The keys of one architecture. Names of keys are without the architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}{name}" in self.file.metadata

    def integer(self, name: str, default: int | _Required = REQUIRED) -> int:
        """Reads an integer of at least 0. A missing key has the value ``default``.

        Raises SourceError if it is of another type, or missing without a default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "no integer")
        if not 0 <= value < 1 << 31:
            raise self._wrong(name, value, "not in [0, 2^31)")
        return value

    def number(self, name: str, default: float | _Required = REQUIRED) -> float:
        """Reads a floating-point number. A missing key has the value ``default``.

        Raises SourceError if it is of another type, not finite, or missing without a default.
        """
        value = self._get(name, default)
        if not isinstance(value, float):
            raise self._wrong(name, value, "no floating-point number")
        if not abs(value) < float("inf"):
            raise self._wrong(name, value, "not finite")
        return value

    def flag(self, name: str, default: bool | _Required = REQUIRED) -> bool:
        """Reads a boolean. A missing key has the value ``default``.

        Raises SourceError if it is of another type, or missing without a default.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "no boolean")
        return value

    def text(self, name: str, default: str | _Required = REQUIRED) -> str:
        """Reads a text. A missing key has the value ``default``.

        Raises SourceError if it is of another type, or missing without a default.
        """
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "no text")
        return value

    def by_layer(self, name: str, layers: int, default: int | _Required = REQUIRED) -> list[int]:
        """Reads an integer for each layer: from an array with one for each, or from one integer for all.

        A missing key has the value ``default`` for all layers. Raises SourceError if it is of another type or length,
        or missing without a default.
        """
        value = self._get(name, default)
        if not isinstance(value, GgufArray):
            return [self.integer(name, default)] * layers
        if value.count != layers:
            raise self._wrong(name, value, f"not one value for each of {layers} layers")
        return [self._item(name, item) for item in value.read()]

    def flags_by_layer(self, name: str, layers: int) -> list[bool] | None:
        """Reads an array with a boolean for each layer; None if the key is missing or isn't an array."""
        value = self.file.metadata.get(f"{self._prefix}{name}")
        if not isinstance(value, GgufArray):
            return None
        self._read.add(name)
        if value.count < layers:
            raise self._wrong(name, value, f"not one value for each of {layers} layers")
        return [bool(self._item(name, item)) for item in value.read()[:layers]]

    def same_for_all(self, name: str, layers: int, default: int | _Required = REQUIRED) -> int:
        """Reads an integer that must be equal for all layers. Raises UnsupportedModelError if layers differ.

        The arguments and the other errors are those of ``by_layer``.
        """
        values = set(self.by_layer(name, layers, default))
        if len(values) != 1:
            raise self.refusal(name, f"is {sorted(values)}: layers that differ in it")
        return values.pop()

    def refusal(self, name: str, reason: str) -> UnsupportedModelError:
        """Returns an UnsupportedModelError for a key whose meaning isn't supported.

        Args:
            name: the key.
            reason: the unsupported meaning.
        """
        return UnsupportedModelError(
            f"{self.file.path}: {self._prefix}{name} {reason}, which can't be read from GGUF files", hint=_FOLDER
        )

    def name(self, name: str, *, path: bool = True) -> str:
        """Returns the full name of a key; with ``path``, after the path of the file, for messages."""
        full = f"{self._prefix}{name}"
        return f"{self.file.path}: {full}" if path else full

    def check_number(self, name: str, expected: int, what: str) -> None:
        """Raises SourceError if a key exists and isn't ``expected``.

        Args:
            name: the key without the architecture, or the whole name of a key of the tokenizer.
            expected: the number that the file's contents have.
            what: the counted things, for the message.
        """
        key = name if name.startswith("tokenizer.") else self.name(name, path=False)
        if (value := self.file.metadata.get(key, expected)) != expected:
            raise SourceError(
                f"{self.file.path}: key {key} is {value!r:.80}, and there are {expected} {what}", hint=_AGAIN
            )

    def mark_read(self, name: str) -> None:
        """Marks a key as read, so that ``refuse_unread`` accepts it."""
        self._read.add(name)

    def value(self, name: str) -> Value | None:
        """Returns the value of a key as it is stored, without marking the key as read."""
        return self.file.metadata.get(f"{self._prefix}{name}")

    def refuse_unread(self, harmless: Sequence[str] = ()) -> None:
        """Raises UnsupportedModelError for the first key that nothing has read and that may change the numbers.

        ``harmless``: further keys that don't change them.
        """
        for full, value in self.file.metadata.items():
            name = full.removeprefix(self._prefix)
            if name == full or name in self._read or name in HARMLESS or name in harmless:
                continue
            neutral = NEUTRAL.get(name, ())
            if not isinstance(value, GgufArray) and any(value == item for item in neutral):
                continue
            shown = f"an array of {value.count}" if isinstance(value, GgufArray) else value
            raise self.refusal(name, f"is {shown!s:.80}")

    def _get(self, name: str, default: Value | _Required) -> Value:
        self._read.add(name)
        value = self.file.metadata.get(f"{self._prefix}{name}", default)
        if isinstance(value, _Required):
            raise SourceError(f"{self.file.path}: key {self._prefix}{name} is missing", hint=_AGAIN)
        return value

    def _item(self, name: str, item: int | float | bool | str) -> int:
        if isinstance(item, str | float) or not 0 <= item < 1 << 31:
            raise self._wrong(name, item, "no integer of at least 0")
        return int(item)

    def _wrong(self, name: str, value: object, what: str) -> SourceError:
        shown = f"an array of {value.count}" if isinstance(value, GgufArray) else f"{value!r:.80}"
        return SourceError(
            f"{self.file.path}: key {self._prefix}{name} is {shown}, and {what}",
            hint=_AGAIN,
        )
