"""Replacements for the functions of recurrent layers that the hybrid models of transformers call.

transformers lets kernels replace eleven functions by name: convolutions over the last few tokens, selective scans and
delta rules. Each modeling file has them in its namespace. While a model is traced, they are replaced by the functions
of this module; each call becomes one ``ew`` op, with the computation around the recurrence as ordinary ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn.functional import softplus

from enginewright.passes.ops.activation import ACTIVATIONS
from enginewright.runtime.shared.errors import UnsupportedModelError

from .attention_interface import current_capture

_ACTIVATIONS = {name: name for name in ACTIVATIONS} | {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Arguments that choose a kernel or bound the requests of a packed batch; the capture has its own bounds.
_WITHOUT_MEANING = frozenset(
    {
        *("chunk_size", "use_mambapy", "use_associative_scan", "return_last_state", "return_final_states"),
        *("output_final_state", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "position_ids"),
        *("max_length_q", "max_length_k", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("output_router_logits", "position_embeddings", "transpose_state_layout", "safe_gate", "lower_bound"),
    }
)


def short_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Replaces ``causal_conv1d_fn``: hidden_states [1, C, T], weight [C, W], bias [C] -> [1, C, T].

    Raises UnsupportedModelError for an activation that no ``ew`` op has, or for other arguments that change the result.
    """
    at = _begin("causal_conv1d_fn", others)
    if activation is not None and activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{current_capture().where}: a convolution has the activation {activation!r}",
            hint=f"There are {', '.join(sorted(_ACTIVATIONS))}.",
        )
    known = "" if activation is None else _ACTIVATIONS[activation]
    x = hidden_states[0].transpose(0, 1)  # [T, C]
    result: torch.Tensor = torch.ops.ew.short_convolution(x, weight, bias, *at, known)
    return result.transpose(0, 1)[None]


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> Any:
    """Replaces ``selective_scan_fn``: hidden_states and dt [1, C, T], A [C, S], B and C [1, S, T] -> [1, C, T].

    ``return_last_state`` makes it return the pair (result, None), as the last state isn't computed. Raises
    UnsupportedModelError for other arguments that change the result.
    """
    both = others.get("return_last_state", False)
    at = _begin("selective_scan_fn", others)
    x, dt, b, c = (value[0].transpose(0, 1) for value in (hidden_states, dt, B, C))  # [T, C] and [T, S]
    dt = _time_steps(dt, delta_bias, delta_softplus)
    result = torch.ops.ew.selective_scan(x[:, :, None], dt, A, b[:, None], c[:, None], *at)[:, :, 0]
    if D is not None:
        result = result + x * D
    result = result.transpose(0, 1)[None]
    if z is not None:
        result = result * torch.nn.functional.silu(z)
    return (result, None) if both else result


def selective_scan_of_heads(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Any:
    """Replaces ``mamba_chunk_scan_combined``: hidden_states [1, T, N, P], dt [1, T, N], A [N], B and C [1, T, G, S]
    -> [1, T, N, P].

    ``return_final_states`` makes it return the pair (result, None), as the last state isn't computed. Raises
    UnsupportedModelError for other arguments that change the result.
    """
    both = others.get("return_final_states", False)
    at = _begin("mamba_chunk_scan_combined", others)
    dt = _time_steps(dt[0], dt_bias, dt_softplus)
    low, high = dt_limit
    if low > 0 or high != float("inf"):
        dt = torch.clamp(dt, low, high if high != float("inf") else None)
    x = hidden_states[0]  # [T, N, P]
    result = torch.ops.ew.selective_scan(x, dt, A, B[0], C[0], *at)
    if D is not None:
        result = result + x * (D[:, None] if D.dim() == 1 else D)
    if z is not None:
        result = result * torch.nn.functional.silu(z[0])
    return (result[None], None) if both else result[None]


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Replaces ``chunk_gated_delta_rule`` and ``chunk_kda``: value [1, T, N, Dv] -> ([1, T, N, Dv], None).

    query and key are [1, T, Nk, D], g is [1, T, N] or [1, T, N, D], beta [1, T, N]. The last state isn't computed,
    which None says. Raises UnsupportedModelError for other arguments that change the result.
    """
    scale = others.pop("scale", None) or float(query.shape[-1]) ** -0.5
    at = _begin("chunk_gated_delta_rule", others)
    result = torch.ops.ew.gated_delta_rule(
        query[0], key[0], value[0], g[0], beta[0], *at, scale, use_qk_l2norm_in_kernel
    )
    return result[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """Replaces ``create_recurrent_attention_mask`` and returns None, as packed tokens have no padding to mask."""


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, positive: bool) -> torch.Tensor:
    """Returns the time steps [T, N] plus their bias [N], and applies softplus if ``positive``."""
    if bias is not None:
        dt = dt + bias
    return softplus(dt) if positive else dt


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": short_convolution,
    "selective_scan_fn": selective_scan,
    "mamba_chunk_scan_combined": selective_scan_of_heads,
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": gated_delta_rule,
    "create_recurrent_attention_mask": no_mask,
}
"""Function of transformers -> its replacement. The keys are names of kernels, or of the functions themselves."""


def _begin(name: str, others: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Returns the arguments that each op of a recurrence has in common: the bounds of the requests [B+1], and the
    number of the layer that calls the function ``name``.

    Raises UnsupportedModelError if ``others`` has an argument that changes the result in a way that no ``ew`` op
    supports.
    """
    capture = current_capture()
    if strange := [k for k, v in others.items() if k not in _WITHOUT_MEANING and v is not None and v is not False]:
        raise UnsupportedModelError(
            f"{capture.where}: {name} is called with {', '.join(strange)}, which no ew op has a meaning for"
        )
    return capture.bounds, capture.recurrent_layer()


@contextmanager
def replaced_recurrences(model: torch.nn.Module) -> Iterator[None]:
    """Replaces the recurrent functions in the modeling files of a model until the context ends."""
    namespaces = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    originals = [(space, name, getattr(space, name)) for space in namespaces for name, _ in _replaced(space)]
    for space in namespaces:
        for name, replacement in _replaced(space):
            setattr(space, name, replacement)
    try:
        yield
    finally:
        for space, name, original in originals:
            setattr(space, name, original)


def _replaced(namespace: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the name and the replacement of each function in a module that has one."""
    for attribute, function in list(vars(namespace).items()):
        if isinstance(function, FunctionType) and (replacement := REPLACEMENTS.get(_kernel_name(function))):
            yield attribute, replacement


def _kernel_name(function: FunctionType) -> str:
    """Returns the name under which transformers looks for a kernel of a function, or the function's own name."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    name = cells["func_name"].cell_contents if {"func_name", "package"} & set(cells) == {"func_name", "package"} else ""
    return str(name) or function.__name__
