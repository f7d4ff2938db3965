"""The effect of rounding keys and values to 8 and 4 bits on a model's next tokens, with and without Hadamard rotation.

Keys, after their rotary embedding, and values are rounded in transformers' model, in the attention over a whole text: a
cache of that format holds the same numbers. The rotation spreads a head's largest numbers over all of it (QuaRot,
Ashkboos et al. 2024): queries and keys are multiplied by the same orthogonal matrix, so products stay what they were,
and so are values and, by its transpose, what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers.workload import kl_divergence
from transformers import AttentionInterface, AutoModelForCausalLM

IMPLEMENTATION = "rounded_kv"


@dataclass(frozen=True)
class Rounding:
    """Rounds to integers of ``bits``, ``group`` numbers of a head with one scale; 0: the whole head. ``offset``: with a
    least value of their own too, both scale and least value in 16 bits; else symmetric, with a scale of 32."""

    bits: int
    group: int = 0
    offset: bool = False
    rotated: bool = False

    def bits_a_number(self, head: int) -> float:
        """Counts what scales take too."""
        return self.bits + 32 / (self.group or head)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        rows = x.reshape(-1, self.group or x.shape[-1])
        if not self.offset:
            most = 2 ** (self.bits - 1) - 1
            scale = (rows.abs().amax(1, keepdim=True) / most).clamp_min(1e-8)
            return ((rows / scale).round() * scale).reshape(x.shape)
        least, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = ((largest - least) / (2**self.bits - 1)).clamp_min(1e-6).half().float()
        least = least.half().float()
        return (((rows - least) / scale).round().clamp(0, 2**self.bits - 1) * scale + least).reshape(x.shape)


ROUNDINGS = {
    "8 bits": Rounding(8),
    "8 bits, rotated": Rounding(8, rotated=True),
    "4 bits": Rounding(4),
    "4 bits, rotated": Rounding(4, rotated=True),
    "4 bits, groups of 32 with an offset": Rounding(4, 32, offset=True),
    "4 bits, groups of 32 with an offset, rotated": Rounding(4, 32, offset=True, rotated=True),
    "4 bits, groups of 16 with an offset, rotated": Rounding(4, 16, offset=True, rotated=True),
}


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal symmetric matrix [size, size] of equal magnitudes; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rounded(folder: Path, ids: Sequence[int], threads: int) -> dict[str, dict[str, float]]:
    """KL from the model with its keys and values as they are, share of equal best tokens, and bits a number."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[Rounding | None] = [None]

    def attention(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        rounding, turned = chosen[0], hadamard(q.shape[-1])
        if rounding is not None and rounding.rotated:
            q, k, v = q @ turned, k @ turned, v @ turned
        if rounding is not None:
            k, v = rounding.of(k), rounding.of(v)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
        )
        if rounding is not None and rounding.rotated:
            y = y @ turned
        return y.transpose(1, 2).contiguous(), None

    AttentionInterface.register(IMPLEMENTATION, attention)
    model.set_attn_implementation(IMPLEMENTATION)

    def logits() -> Any:
        with torch.no_grad():
            return model(torch.tensor([list(ids)])).logits[0].numpy()

    exact, figures = logits(), {}
    for name, rounding in ROUNDINGS.items():
        chosen[0] = rounding
        got = logits()
        figures[name] = {
            "kl": kl_divergence(exact, got),
            "top_1": float((exact.argmax(1) == got.argmax(1)).mean()),
            "bits": rounding.bits_a_number(int(model.config.head_dim)),
        }
    return figures
