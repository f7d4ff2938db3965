"""Makes the calls of the kernels of recurrent layers, as `step_calls` does for a step's other kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from enginewright.runtime.shared.contracts import STATE_TOKENS

from .call import Argument, Call
from .specs import Constant
from .step_calls import strides_of
from .tiles import power_of_2

NORM_EPSILON = 1e-6
"""The number that a delta rule adds to the sum of squares when it normalizes queries and keys, as in
`passes.ops.recurrence`.
"""

_VALUES = 1024
"""The values of a state that one program holds: 32 registers of each thread of a warp."""
_TOKENS, _CHANNELS = 8, 128
"""The numbers of tokens and of channels that a program of a convolution computes at a time."""


@dataclass(frozen=True)
class StoredStates:
    """A layer's states, and the requests of a step that read and write them.

    Attributes:
        states: float32 [P, F].
        table: [B, M]; the first column has the block of each request.
        q_start: [B + 1], the first token of each request, then the number of tokens.
        kv_len: [B], the number of tokens of each request after the step.
        slots: [T]; the state after token t is stored in block ``slots[t] // STATE_TOKENS`` too, unless ``slots[t]`` is
            negative.
        first: the position of the op's state in a block.
    """

    states: torch.Tensor
    table: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor
    slots: torch.Tensor
    first: int

    @property
    def arguments(self) -> Mapping[str, Argument]:
        """The arguments that the kernels of all recurrences have in common."""
        return {
            "state": self.states,
            "block_table": self.table,
            "q_start": self.q_start,
            "kv_len": self.kv_len,
            "slots": self.slots,
            "blocks": self.table.stride(0),
        }

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants that the kernels of all recurrences have in common."""
        return {"STATE_SIZE": self.states.shape[1], "STATE_TOKENS": STATE_TOKENS, "FIRST": self.first}


def convolution_call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stored: StoredStates,
    out: torch.Tensor,
    activation: str,
) -> Call:
    """Returns the call of ``ew.stored_convolution``: x [T, C] by the weight [C, W] -> out [T, C]."""
    channels, taps = weight.shape
    tile = min(power_of_2(channels), _CHANNELS)
    constants: dict[str, Constant] = {"CHANNELS": channels, "TAPS": taps, "X_STRIDE": x.stride(0)}
    constants |= {"WEIGHT_STRIDE": weight.stride(0), "OUT_STRIDE": out.stride(0), "BIAS": bias is not None}
    constants |= {"ACTIVATION": activation, **stored.constants}
    constants |= {"TOKENS": _TOKENS, "TILE": tile, "ROWS": power_of_2(taps - 1)}
    arguments = {"x": x, "weight": weight, "bias": bias, **stored.arguments, "out": out}
    return Call("stored_convolution", arguments, constants, (len(stored.kv_len), -(-channels // tile), 1))


def scan_call(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    stored: StoredStates,
    out: torch.Tensor,
) -> Call:
    """Returns the call of ``ew.stored_scan``: x [T, N, P], dt [T, N], a [N] or [N, S], b and c [T, G, S] -> out
    [T, N, P].
    """
    _, heads, of_head = x.shape
    groups, size = b.shape[1:]
    channels, width = heads * of_head, power_of_2(size)
    tile = _tile(channels, width)
    constants: dict[str, Constant] = {"CHANNELS": channels, "OF_HEAD": of_head, "OF_GROUP": channels // groups}
    constants |= {"SIZE": size, **strides_of("X", x), "DT_STRIDE": dt.stride(0)}
    constants |= {"A_STRIDE": a.stride(0) if a.dim() == 2 else 0, **strides_of("B", b), **strides_of("C", c)}
    constants |= {**strides_of("OUT", out), **stored.constants, "TILE": tile, "WIDTH": width}
    arguments = {"x": x, "dt": dt, "a": a, "b": b, "c": c, **stored.arguments, "out": out}
    return Call("stored_scan", arguments, constants, (len(stored.kv_len), -(-channels // tile), 1), warps=1)


def delta_rule_call(
    inputs: Sequence[torch.Tensor],
    stored: StoredStates,
    out: torch.Tensor,
    scale: float,
    *,
    normalize: bool,
) -> Call:
    """Returns the call of ``ew.stored_delta_rule`` of q, k [T, Nk, D], v [T, N, Dv], decay [T, N] or [T, N, D], and
    beta [T, N] -> out [T, N, Dv].

    ``inputs`` are these five, in this order.
    """
    q, k, v, decay, beta = inputs
    _, heads, value_size = v.shape
    key_heads, size = k.shape[1:]
    width = power_of_2(size)
    tile = _tile(value_size, width)
    constants: dict[str, Constant] = {"OF_KEY": heads // key_heads, "SIZE": size, "VALUE_SIZE": value_size}
    for name, tensor in (("Q", q), ("K", k), ("V", v), ("DECAY", decay), ("OUT", out)):
        constants |= strides_of(name, tensor)
    constants |= {"BETA_STRIDE": beta.stride(0), "SCALE": scale, "NORMALIZE": normalize, "EPS": NORM_EPSILON}
    constants |= {**stored.constants, "TILE": tile, "WIDTH": width}
    arguments = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, **stored.arguments, "out": out}
    return Call("stored_delta_rule", arguments, constants, (len(stored.kv_len), heads, -(-value_size // tile)), warps=1)


def _tile(channels: int, width: int) -> int:
    """Returns the number of rows of ``width`` values that a program holds, of ``channels`` rows in total."""
    return min(power_of_2(channels), max(1, _VALUES // width))
