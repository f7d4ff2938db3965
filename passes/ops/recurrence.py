"""Ops of recurrent layers: the result at a token depends on those before it through a state of fixed size.

``ew.short_convolution``, ``ew.selective_scan`` and ``ew.gated_delta_rule`` are the captured forms: each request begins
with a state of zeros. Their lowered forms, ``ew.stored_*``, go on from a state in a cache and store the new one.

Every recurrence is computed one token after the other, for prompts and for single tokens alike, so that a result
doesn't depend on how a request is cut into steps. Sums are taken in float32, or in the type of the operands if that is
wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from enginewright.runtime.shared.contracts import STATE_TOKENS

from .activation import ACTIVATIONS
from .library import accumulate_dtype, register

NORM_EPSILON = 1e-6
"""Added to the sum of squares by ``ew.gated_delta_rule`` where it normalizes queries and keys."""

Step = Callable[[torch.Tensor, Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""A function that computes one token of B requests: from the states [B, ..] before it and the token's inputs to (states
after it, results).
"""


Keep = Callable[[int, torch.Tensor], None]
"""A function that is called with the index of a token and the state [..] after it."""


def _scan(
    step: Step, inputs: Sequence[torch.Tensor], states: torch.Tensor, q_start: torch.Tensor, keep: Keep | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a recurrence over packed requests, one token of every request at a time.

    Args:
        step: computes one token of some requests.
        inputs: [T, ..] each.
        states: [B, ..], the states before the requests' first tokens.
        q_start: [B+1], the bounds of the requests.
        keep: called after every token; None for no call.

    Returns:
        the results [T, ..], and the states [B, ..] after the last tokens.
    """
    starts = q_start.long()
    lengths = starts[1:] - starts[:-1]  # [B]
    results: torch.Tensor | None = None
    states = states.clone()
    for offset in range(int(lengths.max()) if len(lengths) else 0):
        active = torch.nonzero(lengths > offset).flatten()
        tokens = starts[active] + offset
        states[active], result = step(states[active], [x[tokens] for x in inputs])
        if keep is not None:
            for token, state in zip(tokens.tolist(), states[active], strict=True):
                keep(token, state)
        if results is None:
            results = result.new_zeros((inputs[0].shape[0], *result.shape[1:]))
        results[tokens] = result
    assert results is not None, "a step has tokens"
    return results, states


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    q_start: torch.Tensor,
    activation: str,
    keep: Keep | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `short_convolution` from given states: x [T, C] -> the result [T, C], and the states after the step.

    ``states`` [B, C, W-1] are each request's last inputs, and are returned in the same shape. ``keep`` is that of
    `_scan`.
    """
    wide = accumulate_dtype(x)
    taps = weight.to(wide)  # [C, W]

    def step(before: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.cat((before, inputs[0][:, :, None].to(before.dtype)), dim=2)  # [b, C, W]
        return window[:, :, 1:], (window.to(wide) * taps).sum(2)

    result, after = _scan(step, (x,), states, q_start, keep)
    if bias is not None:
        result = result + bias.to(wide)
    return (ACTIVATIONS[activation](result) if activation else result).to(x.dtype), after


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    q_start: torch.Tensor,
    layer: int,
    activation: str,
) -> torch.Tensor:
    """Convolves each channel over its last W inputs: x [T, C], weight [C, W], bias [C] or None -> [T, C].

    Args:
        weight: factors of the inputs; ``weight[:, W - 1]`` is the factor of the token's own input.
        q_start: [B+1], the bounds of the requests; inputs before a request's first token are 0.
        layer: number of the layer, from which the lowered op gets its state in the cache.
        activation: an activation of ``ew.gated_activation`` that is applied to the result; "" for none.
    """
    states = x.new_zeros((q_start.shape[0] - 1, x.shape[1], weight.shape[1] - 1))
    return _convolve(x, weight, bias, states, q_start, activation)[0]


def _scan_selectively(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    q_start: torch.Tensor,
    keep: Keep | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `selective_scan` from the states [B, N, P, S] -> the result [T, N, P], and the states after the step.

    ``keep`` is that of `_scan`.
    """
    wide = accumulate_dtype(x)
    per_group = x.shape[1] // b.shape[1]
    rates = (a if a.dim() == 2 else a[:, None]).to(wide)  # [N, S] or [N, 1]

    def step(before: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = (value.to(wide) for value in inputs)
        b, c = (value.repeat_interleave(per_group, 1) for value in (b, c))  # [b, N, S]
        decay = torch.exp(dt[:, :, None] * rates)[:, :, None]  # [b, N, 1, S] or [b, N, 1, 1]
        after = before * decay + (dt[:, :, None] * x)[..., None] * b[:, :, None]
        return after, (after * c[:, :, None]).sum(3)

    result, after = _scan(step, (x, dt, b, c), states.to(wide), q_start, keep)
    return result.to(x.dtype), after


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    q_start: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Computes the recurrence of Mamba and Mamba-2: x [T, N, P], dt [T, N], a [N] or [N, S], b and c [T, G, S] ->
    [T, N, P].

    Head n has a state S_n [P, S] and reads row n // (N / G) of b and c. For each token::

        S_n <- S_n * exp(dt_n * a_n) + dt_n * outer(x_n, b_n);  result_n = S_n c_n

    Mamba (Gu and Dao 2023, https://arxiv.org/abs/2312.00752) has heads of one channel, rates [N, S] and one group;
    Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060) has one rate a head. ``q_start`` and ``layer`` are those
    of `short_convolution`. Raises an error unless G divides N.
    """
    _check_groups(x.shape[1], b.shape[1], "heads", "groups of b and c")
    states = x.new_zeros((q_start.shape[0] - 1, *x.shape[1:], b.shape[2]))
    return _scan_selectively(x, dt, a, b, c, states, q_start)[0]


def _apply_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    q_start: torch.Tensor,
    scale: float,
    normalize: bool,
    keep: Keep | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `gated_delta_rule` from the states [B, N, D, Dv] -> the result [T, N, Dv], and the states after the
    step.

    ``keep`` is that of `_scan`.
    """
    wide = accumulate_dtype(q)
    per_key = v.shape[1] // k.shape[1]
    q, k = q.to(wide), k.to(wide)
    if normalize:
        q, k = (value * torch.rsqrt((value * value).sum(-1, keepdim=True) + NORM_EPSILON) for value in (q, k))
    q = q * scale

    def step(before: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, beta = (value.to(wide) for value in inputs)
        q, k = (value.repeat_interleave(per_key, 1)[..., None] for value in (q, k))  # [b, N, D, 1]
        factors = torch.exp(decay if decay.dim() == 3 else decay[:, :, None])[..., None]  # [b, N, D, 1] or [b, N, 1, 1]
        after = before * factors
        delta = (v - (after * k).sum(2)) * beta[:, :, None]  # [b, N, Dv]
        after = after + k * delta[:, :, None]
        return after, (after * q).sum(2)

    result, after = _scan(step, (q, k, v, decay, beta), states.to(wide), q_start, keep)
    return result.to(v.dtype), after


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    q_start: torch.Tensor,
    layer: int,
    scale: float,
    normalize: bool,
) -> torch.Tensor:
    """Computes the recurrence of gated delta networks and KDA: q, k [T, Nk, D], v [T, N, Dv], decay and beta of
    each token -> [T, N, Dv].

    Head n has a state S_n [D, Dv] and reads head n // (N / Nk) of q and k. For each token::

        S_n <- S_n * exp(decay_n);  S_n <- S_n + outer(k_n, beta_n * (v_n - S_n^T k_n));  result_n = S_n^T (scale * q_n)

    beta is [T, N]. A decay [T, N] applies to a whole state (Yang et al. 2024, https://arxiv.org/abs/2412.06464); a
    decay [T, N, D] has a value for each row of the state (Kimi delta attention, https://arxiv.org/abs/2510.26692).
    ``normalize`` divides q and k by the roots of their sums of squares plus 1e-6 first. ``q_start`` and ``layer`` are
    those of `short_convolution`.
    """
    _check_groups(v.shape[1], k.shape[1], "heads of v", "heads of k")
    states = v.new_zeros((q_start.shape[0] - 1, v.shape[1], k.shape[2], v.shape[2]))
    return _apply_delta_rule(q, k, v, decay, beta, states, q_start, scale, normalize)[0]


def _read_states(
    state: torch.Tensor, table: torch.Tensor, q_start: torch.Tensor, kv_len: torch.Tensor, first: int, shape: list[int]
) -> torch.Tensor:
    """Returns the requests' states [B, *shape], read from the cache ``state`` [P, F], where each request has one block.

    Args:
        state: the cache.
        table: [B, M]; the first column has the block of each request.
        q_start: [B+1], the bounds of the requests.
        kv_len: [B], the tokens of each request up to the end of this step. A request whose tokens are all in this step
            gets a state of zeros.
        first: the position of the state in a block.
        shape: the shape of one request's state.
    """
    size = math.prod(shape)
    states = state[table[:, 0].long()][:, first : first + size]  # [B, size]
    begins = kv_len - (q_start[1:] - q_start[:-1]) == 0
    return torch.where(begins[:, None], torch.zeros((), dtype=state.dtype), states).view(-1, *shape)


class _After:
    """The cache after a step: a copy of ``state`` [P, F] into which states are written.

    Args:
        state: the cache before the step.
        first: the position of a state in its block.
        slots: [T]; the state after token t is stored in block ``slots[t] // STATE_TOKENS`` too, unless ``slots[t]`` is
            negative.
        order: True if the cache stores a state [..] with its last two axes swapped.
    """

    def __init__(self, state: torch.Tensor, first: int, slots: torch.Tensor, *, order: bool) -> None:
        self.state, self._first, self._order = state.clone(), first, order
        self._blocks = torch.div(slots, STATE_TOKENS, rounding_mode="floor").tolist()

    @property
    def keep(self) -> Keep | None:
        """The function that stores the state after a token if its slot asks for it; None if no slot of the step
        does.
        """
        return self._keep if any(block >= 0 for block in self._blocks) else None

    def _keep(self, token: int, state: torch.Tensor) -> None:
        if self._blocks[token] >= 0:
            self._put(self._blocks[token], state)

    def write(self, table: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Stores the requests' states [B, ..] in the blocks of the first column of ``table``, and returns the cache."""
        for block, state in zip(table[:, 0].tolist(), states, strict=True):
            self._put(block, state)
        return self.state

    def _put(self, block: int, state: torch.Tensor) -> None:
        values = (state.transpose(-1, -2) if self._order else state).flatten()
        self.state[block, self._first : self._first + len(values)] = values.to(self.state.dtype)


def stored_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    block_table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `short_convolution` from states in a cache: x [T, C], state [blocks, F] -> ([T, C], the cache after the
    step).

    Args:
        state: the cache, with F float32 values in each of P blocks.
        block_table: [B, M]; its first column is the block of each request.
        q_start: [B+1], the bounds of the requests in x.
        kv_len: [B], tokens of each request up to the end of this step. A request whose tokens are all in this step
            starts from zeros.
        slots: [T]; the state after token t is stored in block ``slots[t] // STATE_TOKENS`` too, unless ``slots[t]`` is
            negative.
        first: the position in a block of the request's last inputs [W-1, C].
    """
    width = weight.shape[1] - 1
    before = _read_states(state, block_table, q_start, kv_len, first, [width, x.shape[1]]).transpose(1, 2)
    cache = _After(state, first, slots, order=True)
    result, after = _convolve(x, weight, bias, before, q_start, activation, cache.keep)
    return result, cache.write(block_table, after)


def stored_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    block_table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    slots: torch.Tensor,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `selective_scan` from states in a cache: x [T, N, P], state [blocks, F] -> ([T, N, P], the cache after
    the step).

    The cache's arguments are those of `stored_convolution`. A request's state is stored as [N, S, P], so that the
    channels of a head are adjacent.
    """
    shape = [x.shape[1], b.shape[2], x.shape[2]]
    before = _read_states(state, block_table, q_start, kv_len, first, shape).transpose(2, 3)
    cache = _After(state, first, slots, order=True)
    result, after = _scan_selectively(x, dt, a, b, c, before, q_start, cache.keep)
    return result, cache.write(block_table, after)


def stored_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    block_table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    scale: float,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `gated_delta_rule` from states in a cache: v [T, N, Dv], state [blocks, F] -> ([T, N, Dv], the cache
    after the step).

    ``q``, ``k``, ``v``, ``decay``, ``beta``, ``scale`` and ``normalize`` are those of `gated_delta_rule`, the other
    arguments those of `stored_convolution`. A request's state is stored as [N, D, Dv].
    """
    before = _read_states(state, block_table, q_start, kv_len, first, [v.shape[1], k.shape[2], v.shape[2]])
    cache = _After(state, first, slots, order=False)
    result, after = _apply_delta_rule(q, k, v, decay, beta, before, q_start, scale, normalize, cache.keep)
    return result, cache.write(block_table, after)


def _check_groups(heads: int, groups: int, of: str, by: str) -> None:
    torch._check(heads % groups == 0, lambda: f"{heads} {of} aren't a multiple of {groups} {by}")


register(short_convolution, fake=lambda x: x.new_empty(x.shape))
register(selective_scan, fake=lambda x: x.new_empty(x.shape))
register(gated_delta_rule, fake=lambda v: v.new_empty(v.shape))
register(stored_convolution, fake=lambda x, state: (x.new_empty(x.shape), state.new_empty(state.shape)))
register(stored_scan, fake=lambda x, state: (x.new_empty(x.shape), state.new_empty(state.shape)))
register(stored_delta_rule, fake=lambda v, state: (v.new_empty(v.shape), state.new_empty(state.shape)))
