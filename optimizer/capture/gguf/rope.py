"""The rotary frequencies of a GGUF file, as llama.cpp computes them from its keys, put into a model of transformers.

Linear scaling divides all frequencies; YaRN (https://arxiv.org/abs/2309.00071) divides the low ones and multiplies
cosines and sines by a factor. The tensor rope_freqs.weight, as in Llama 3.1, has a divisor for each frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .keys import Keys

_TYPES = ("none", "linear", "yarn")
_UNREAD = {"yarn_ext_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_log_multiplier": 0.0}
"""The values of YaRN's parameters that llama.cpp uses for architectures for which it doesn't read them."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of layers of one kind.

    Attributes:
        theta: the base of the frequencies.
        factor: the context length divided by the original one; 1 for no scaling.
        yarn: True divides frequencies by YaRN's ramp; False divides all of them by ``factor``.
        original: the original context in tokens, for YaRN.
        attention_factor: the factor of cosines and sines.
        beta_fast, beta_slow: rotations in the original context between which YaRN's ramp is.
    """

    theta: float
    factor: float = 1.0
    yarn: bool = False
    original: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def is_plain(self) -> bool:
        """True if the frequencies aren't scaled, so that the model's own ones for ``theta`` are right."""
        return self.factor == 1 and self.attention_factor == 1

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Returns the frequencies [width / 2] of ``theta`` alone, scaled."""
        divided = frequencies / self.factor
        if not self.yarn:
            return divided
        width = 2 * len(frequencies)
        low = max(0, math.floor(self._place(self.beta_fast, width)))
        high = min(width - 1, math.ceil(self._place(self.beta_slow, width)))
        ramp = (torch.arange(len(frequencies), dtype=torch.float32) - low) / max(0.001, high - low)
        share = 1 - ramp.clamp(0, 1)
        return divided * (1 - share) + frequencies * share

    def _place(self, rotations: float, width: int) -> float:
        """Returns the dimension whose frequency makes ``rotations`` rotations within the original context."""
        return width * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))


def read_rope(keys: Keys, context: int, *, reads_yarn: bool = False, types: Sequence[str] = _TYPES) -> Rope:
    """Reads the keys of the rotary embedding.

    Args:
        keys: the file's keys.
        context: its context length.
        reads_yarn: True if the architecture reads YaRN's betas and the multiplier of its logarithm; others use
            defaults.
        types: the architecture's allowed values of rope.scaling.type.
    """
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in types:
        raise keys.refusal("rope.scaling.type", f"is {kind!r:.80}")
    older = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", older) or 1.0
    original = keys.integer("rope.scaling.original_context_length", context) or context
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if not 1 < theta < 1e30:
        raise keys.refusal("rope.freq_base", f"is {theta}")
    if not 1e-6 < factor < 1e6:
        raise keys.refusal("rope.scaling.factor", f"is {factor}")
    if kind != "yarn":
        _refuse_others(keys, {})
        return Rope(theta, 1.0 if kind == "none" else factor, attention_factor=attention)
    betas = {"beta_fast": 32.0, "beta_slow": 1.0}
    logarithm = 0.0
    if reads_yarn:
        logarithm = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        betas = {name: keys.number(f"rope.scaling.yarn_{name}", default) for name, default in betas.items()}
    for name, value in betas.items():
        if value <= 0:
            raise keys.refusal(f"rope.scaling.yarn_{name}", f"is {value}")
    scale = _mscale(factor, 1.0) / (_mscale(factor, logarithm) if logarithm else 1.0)
    read = {"yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow"} if reads_yarn else set[str]()
    unread = {name: value for name, value in _UNREAD.items() if name not in read}
    _refuse_others(keys, {**unread, "yarn_attn_factor": scale})
    return Rope(theta, factor, True, original, attention * scale, **betas)


def _mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _refuse_others(keys: Keys, computed: Mapping[str, float]) -> None:
    """Raises UnsupportedModelError for parameters of YaRN that llama.cpp doesn't read, if they differ from its own."""
    for name in (*_UNREAD, "yarn_attn_factor"):
        full = f"rope.scaling.{name}"
        if full in keys:
            value = keys.number(full)
            if name in computed and not math.isclose(value, computed[name], rel_tol=1e-4, abs_tol=1e-6):
                raise keys.refusal(full, f"is {value}")


def set_frequencies(
    model: PreTrainedModel, ropes: Mapping[str | None, Rope], divisors: torch.Tensor | None, source: str
) -> None:
    """Writes frequencies and the factor of cosines and sines into the rotary modules of ``model``.

    Args:
        model: built with the ropes' ``theta``.
        ropes: by kind of layer, such as "full_attention"; None for all layers.
        divisors: of the tensor rope_freqs.weight, for layers with full attention.
        source: the file, for messages.

    Raises:
        SourceError: the divisors fit no frequencies.
        UnsupportedModelError: the model's frequencies are computed in another way.
    """
    divided = False
    for kind, rope in ropes.items():
        factors = None if kind == "sliding_attention" else divisors
        if rope.is_plain and factors is None:
            continue
        prefix = "" if kind is None else f"{kind}_"
        modules = [m for m in model.modules() if isinstance(getattr(m, f"{prefix}inv_freq", None), torch.Tensor)]
        if not modules:
            raise UnsupportedModelError(
                f"{source}: its rotary frequencies are scaled, which {type(model).__name__} can't do",
                hint="Export from the model's Hugging Face directory.",
            )
        for module in modules:
            frequencies: torch.Tensor = getattr(module, f"{prefix}inv_freq")
            scaled = rope.scaled(frequencies)
            if factors is not None and factors.shape == scaled.shape:
                scaled = scaled / factors
                divided = True
            for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
                buffer: Any = getattr(module, name, None)
                if isinstance(buffer, torch.Tensor):
                    buffer.copy_(scaled)
            _set_factor(module, f"{prefix}attention_scaling", rope.attention_factor, source)
    if divisors is not None and not divided:
        shape = tuple(divisors.shape)
        raise SourceError(f"{source}: tensor rope_freqs.weight of shape {shape} fits no rotary frequencies")


def _set_factor(module: torch.nn.Module, name: str, factor: float, source: str) -> None:
    if hasattr(module, name):
        setattr(module, name, factor)
    elif factor != 1:
        raise UnsupportedModelError(
            f"{source}: its rotary embedding is multiplied by {factor:.4g}, which {type(module).__name__} can't do",
            hint="Export from the model's Hugging Face directory.",
        )
