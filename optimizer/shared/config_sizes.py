"""Refuses configurations with impossible sizes before a model is built from them, which would take time and memory."""

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
    **dict.fromkeys(("conv_kernel", "conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv"), 1 << 10),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "num_heads"), 1 << 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_groups", "n_groups", "time_step_rank", "mamba_dt_rank"), 1 << 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 1 << 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 1 << 16),
}

_ABOVE_ZERO = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta")
_NOT_BELOW_ZERO = ("max_position_embeddings", "sliding_window")


def check_sizes(config: PretrainedConfig, source: str) -> None:
    """Raises SourceError naming the first number of ``config`` that is larger than in any model.

    ``source``: its file.
    """
    for field, most in _MOST.items():
        try:
            value = getattr(config, field, None)
        except RuntimeError:  # what transformers raises where layers differ in a size: which one is asked for?
            continue
        if isinstance(value, int) and not 0 <= value <= most:
            raise SourceError(
                f"{source}: {field} is {value}, which is not in [0, {most}]", hint="Download or convert the file again."
            )
    for fields, least in ((_ABOVE_ZERO, "above 0"), (_NOT_BELOW_ZERO, "at least 0")):
        for field in fields:
            try:
                value = getattr(config, field, None)
            except RuntimeError:  # as above
                continue
            if isinstance(getattr(type(config), field, None), property):  # not a number of the file: XLNet's is -1
                continue
            if not isinstance(value, int | float) or value > 0 or (value == 0 and fields is _NOT_BELOW_ZERO):
                continue
            if field == "sliding_window" and value == -1:  # none, in older files
                continue
            raise SourceError(f"{source}: {field} is {value}, not {least}", hint="Download or convert the file again.")
