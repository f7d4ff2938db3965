"""Refuses configurations whose sizes no model has, before time and memory go into building one."""

from __future__ import annotations

from transformers import PretrainedConfig

from enginewright.runtime.shared.errors import SourceError

_MOST = {
    "num_hidden_layers": 2_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 26,
}


def check_sizes(config: PretrainedConfig, source: str) -> None:
    """Raises SourceError naming the first size of ``config`` that no model has; ``source`` is its file."""
    for field, most in _MOST.items():
        try:
            value = getattr(config, field, None)
        except RuntimeError:  # what transformers raises where layers differ in a size: which one is asked for?
            continue
        if isinstance(value, int) and not 0 <= value <= most:
            raise SourceError(
                f"{source}: {field} is {value}, which is not in [0, {most}]", hint="Download or convert the file again."
            )
