"""The effect of rounding keys and values to few bits on a model's next tokens, simulated in transformers' model.

Keys, after their rotary embedding, and values are rounded in the attention over a whole text. A query sees the rounded
keys of earlier tokens and of its own, as it does in a runtime that reads a token's keys back from the cache.

A rotation by a Hadamard matrix spreads a head's largest numbers over all of it (QuaRot, Ashkboos et al. 2024). Queries
and keys are multiplied by the same orthogonal matrix, so their products stay. Values are rotated too, and the result of
attention is rotated back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

IMPLEMENTATION = "rounded_kv"
BLOCK = 32
"""Tokens of a block of the cache."""
STEP = 128
"""Queries of a block of attention. The bounds of the kept parts of a ``Cache`` are multiples of it."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of 4-bit floats."""

NORMAL = (6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0)
"""The magnitudes of integers near the best 16 values for a normal distribution (Max, 1960)."""

Elements = Literal["integers", "odd", "e2m1", "normal"]


@dataclass(frozen=True)
class Rounding:
    """The rounding of keys, or of values.

    Attributes:
        bits: of an element; 16 is bf16, without scales.
        group: the numbers of a head that share a scale; 0 for the whole head. With ``by_channel``, the tokens.
        offset: True to store a group's least value besides its scale, with unsigned elements.
        rotated: True to multiply by a Hadamard matrix first.
        elements: "integers"; "odd" integers, so that no code is spent on a second sign of the largest; 4-bit floats; or
            the best 16 values for a normal distribution.
        scale: the type of the scales: 32- or 16-bit floats, e4m3 (below one scale of 32 bits of the tensor: NVFP4), or
            powers of 2 (MXFP4).
        searched: True to choose the scale with the least squared error, of some.
        by_channel: True to let the tokens of a block share a channel's scale; tokens of an incomplete block have 8
            bits.
        centered: True to subtract each channel's mean over a calibration text. The softmax over keys doesn't change.
        weighted: True to divide a channel by the square root of its largest magnitude in a calibration text. Queries
            are multiplied by it.
        base: "first" to store a block's first token with 8 bits, and of the others the difference from it; "before" to
            store all tokens' differences from the mean of the block before, which is itself stored with 8 bits.
    """

    bits: int = 16
    group: int = 0
    offset: bool = False
    rotated: bool = False
    elements: Elements = "integers"
    scale: Literal["f32", "f16", "e4m3", "e8m0"] = "f16"
    searched: bool = False
    by_channel: bool = False
    centered: bool = False
    weighted: bool = False
    base: Literal["none", "first", "before"] = "none"

    def bits_a_number(self, head: int) -> float:
        """Returns the bits of an element and its share of scales and offsets, for heads of ``head`` numbers."""
        if self.bits == 16:
            return 16.0
        size = {"f32": 32, "f16": 16, "e4m3": 8, "e8m0": 8}[self.scale] * (2 if self.offset else 1)
        based = {"none": 0.0, "first": (8 - self.bits) / BLOCK, "before": (8 + 32 / head) / BLOCK}[self.base]
        return self.bits + size / (self.group or head) + based

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [1, Nkv, S, D], rounded."""
        if self.bits == 16:
            return x.bfloat16().float()
        if self.by_channel:
            whole = x.shape[2] // self.group * self.group
            turned = x[:, :, :whole].transpose(2, 3).contiguous()
            rounded = self._of_rows(turned.reshape(-1, self.group)).reshape(turned.shape).transpose(2, 3)
            return torch.cat([rounded, EIGHT.of(x[:, :, whole:])], 2)
        if self.base != "none":
            return self._of_differences(x)
        return self._of_rows(x.reshape(-1, self.group or x.shape[-1])).reshape(x.shape)

    def _of_differences(self, x: torch.Tensor) -> torch.Tensor:
        parts, plain = [], replace(self, base="none")
        base = torch.zeros_like(x[:, :, :1])
        for block in x.split(BLOCK, 2):
            if self.base == "first":
                base = EIGHT.of(block[:, :, :1])
                parts += [base, base + plain.of(block[:, :, 1:] - base)]
            else:
                parts.append(base + plain.of(block - base))
                base = EIGHT.of(parts[-1].mean(2, keepdim=True))
        return torch.cat(parts, 2)

    def _of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if self.offset:
            least, largest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
            scale = ((largest - least) / (2**self.bits - 1)).clamp_min(1e-7).half().float()
            least = least.half().float()
            return ((rows - least) / scale).round().clamp(0, 2**self.bits - 1) * scale + least
        largest = rows.abs().amax(1, keepdim=True)
        best, error = rows, torch.full_like(largest, torch.inf)
        for share in torch.linspace(0.6, 1.15, 12).tolist() if self.searched else [1.0]:
            scale = self._stored(largest * share / self._top)
            rounded = self._nearest(rows / scale) * scale
            missed = (rounded - rows).square().sum(1, keepdim=True)
            best, error = torch.where(missed < error, rounded, best), torch.minimum(missed, error)
        return best

    @property
    def _top(self) -> float:
        whole = 2.0**self.bits - 1
        return {"integers": (whole - 1) / 2, "odd": whole, "e2m1": E2M1[-1], "normal": NORMAL[-1]}[self.elements]

    def _nearest(self, x: torch.Tensor) -> torch.Tensor:
        if self.elements == "integers":
            return x.round().clamp(-self._top, self._top)
        if self.elements == "odd":
            return (2 * (x / 2).floor() + 1).clamp(-self._top, self._top)
        magnitudes = torch.tensor(E2M1 if self.elements == "e2m1" else NORMAL)
        nearest = torch.bucketize(x.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2)
        return magnitudes[nearest] * x.sign()

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clamp_min(1e-7)
        if self.scale == "f32":
            return scale
        if self.scale == "f16":
            return scale.half().float()
        if self.scale == "e8m0":
            return torch.exp2(scale.log2().ceil())
        whole = scale.max() / 448
        return (scale / whole).to(torch.float8_e4m3fn).float().clamp_min(2**-9) * whole


EIGHT = Rounding(8, scale="f32")
"""The int8 cache."""


@dataclass(frozen=True)
class Cache:
    """The format of a layer's cache.

    Attributes:
        first: this many first tokens keep 8 bits.
        recent: a query sees 8 bits of its own ``STEP`` of tokens at absolute positions, and of this many tokens before
            that step. They are rounded further when later steps see them.
    """

    keys: Rounding = field(default_factory=Rounding)
    values: Rounding = field(default_factory=Rounding)
    first: int = 0
    recent: int | None = None

    def bits_a_number(self, head: int) -> float:
        """Returns the mean of keys and values in a long context."""
        return (self.keys.bits_a_number(head) + self.values.bits_a_number(head)) / 2


def hadamard(size: int) -> torch.Tensor:
    """Returns the orthogonal symmetric matrix [size, size] of equal magnitudes; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


class RoundedModel:
    """A model of transformers in 32-bit floats whose layers have caches of given formats."""

    def __init__(self, model: Path) -> None:
        """Loads a GGUF file or a Hugging Face folder."""
        files = {"gguf_file": model.name} if model.is_file() else {}
        folder = model.parent if model.is_file() else model
        AttentionInterface.register(IMPLEMENTATION, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(folder, **files, dtype=torch.float32).eval()
        self._model.set_attn_implementation(IMPLEMENTATION)
        config = self._model.config
        self.layers = int(config.num_hidden_layers)
        self.head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        # The numbers of a token's keys and values, over all layers, and the tokens that the model was trained for.
        self.numbers, self.context = 2 * self.layers * kv_heads * self.head, int(config.max_position_embeddings)
        # The tokens that each layer's window has; 0 for a layer with all of the context.
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.layers
        self.windows = [config.sliding_window if kind == "sliding_attention" else 0 for kind in kinds]
        self._caches: Sequence[Cache] = ()
        self._means: dict[int, torch.Tensor] = {}
        self._largest: dict[int, torch.Tensor] = {}
        self._calibrates = False

    def calibrate(self, ids: Sequence[int]) -> None:
        """Keeps each channel's mean and largest magnitude of keys over a text of tokens ``ids``."""
        self._calibrates = True
        self.hidden(ids, Cache())
        self._calibrates = False

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], caches: Cache | Sequence[Cache]) -> torch.Tensor:
        """Returns the last hidden states [S, H] of the tokens ``ids``, with a cache of all layers or one of each."""
        self._caches = [caches] * self.layers if isinstance(caches, Cache) else caches
        return self._model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> npt.NDArray[np.float32]:
        """Returns the logits [T, V] of hidden states [T, H]."""
        logits: npt.NDArray[np.float32] = self._model.lm_head(hidden).numpy()
        return logits

    @torch.inference_mode()
    def compare(self, exact: torch.Tensor, found: torch.Tensor, ids: Sequence[int], every: int = 1) -> dict[str, float]:
        """Compares hidden states [S, H] by their next tokens, at every ``every``-th place.

        Returns the mean KL divergence from ``exact`` in nats, its 99th percentile, the share of equal best tokens, and
        the perplexity of the text ``ids`` with ``found``.
        """
        places = torch.arange(every - 1, len(ids) - 1, every)
        following = torch.tensor(list(ids)).roll(-1)
        kls, same, losses = [], [], []
        for some in places.split(256):
            p = self._model.lm_head(exact[some]).log_softmax(-1)
            q = self._model.lm_head(found[some]).log_softmax(-1)
            kls.append((p.exp() * (p - q)).sum(-1).double())
            same.append((p.argmax(-1) == q.argmax(-1)).double())
            losses.append(-q.gather(1, following[some][:, None]).double())
        kl = torch.cat(kls)
        return {
            "kl": float(kl.mean()),
            "kl_99": float(kl.quantile(0.99)),
            "top_1": float(torch.cat(same).mean()),
            "perplexity": float(torch.cat(losses).mean().exp()),
        }

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx
        cache = self._caches[layer]
        if self._calibrates:
            self._means[layer], self._largest[layer] = k.mean(2, keepdim=True), k.abs().amax(2, keepdim=True)
        if cache.keys.centered:
            k = k - self._means[layer]
        if cache.keys.weighted:
            # Both channels of a rotary pair have one weight, so that the weights can be part of the projections.
            half = self._largest[layer].unflatten(-1, (2, -1)).amax(-2).clamp_min(1e-3).sqrt()
            weight = torch.cat([half, half], -1)
            k, q = k / weight, q * weight.repeat_interleave(q.shape[1] // k.shape[1], 1)
        if cache.keys.rotated:
            turned = hadamard(q.shape[-1])
            q, k = q @ turned, k @ turned
        if cache.values.rotated:
            v = v @ hadamard(v.shape[-1])
        few = cache.keys.of(k), cache.values.of(v)
        wide = (k, v) if cache.keys.bits == 16 else (EIGHT.of(k), EIGHT.of(v))
        y = attention_in_steps(q, few, wide, cache, scaling, getattr(module, "sliding_window", None))
        if cache.values.rotated:
            y = y @ hadamard(v.shape[-1])
        return y.transpose(1, 2).contiguous(), None


def attention_in_steps(
    q: torch.Tensor,
    few: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor],
    cache: Cache,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Computes causal attention a step of queries at a time.

    Args:
        q: [1, Nq, S, D].
        few: keys [1, Nkv, S, D] and values in the cache's format.
        kept: the same with 8 bits.
        cache: says which tokens a query sees with 8 bits.
        scaling: of the scores.
        window: the latest keys that a query sees; None for all.
    """
    length, parts = q.shape[2], []
    step = cache.keys.group if cache.keys.by_channel else STEP
    for begin in range(0, length, STEP):
        end = min(begin + STEP, length)
        low = max(0, begin + 1 - window) if window else 0
        recent = end if cache.recent is None else max(0, begin - cache.recent)
        at = torch.arange(low, end)
        near = (at < cache.first) | (at >= recent)
        mask = at[None] <= torch.arange(begin, end)[:, None]
        if window:
            mask &= at[None] > torch.arange(begin, end)[:, None] - window
        if cache.keys.by_channel:
            # A query's own block isn't complete, so its keys have 8 bits: both kinds of scores, and one of each.
            of_block = at[None] // step == torch.arange(begin, end)[:, None] // step
            parts.append(_attention_by_block(q[:, :, begin:end], few, kept, slice(low, end), of_block, mask, scaling))
            continue
        k, v = (torch.where(near[:, None], b[:, :, low:end], a[:, :, low:end]) for a, b in zip(few, kept, strict=True))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, begin:end], k, v, attn_mask=mask, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
            )
        )
    return torch.cat(parts, 2)


def _attention_by_block(
    q: torch.Tensor,
    few: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor],
    seen: slice,
    own: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    shared = q.shape[1] // few[0].shape[1]
    k, k8, v = (x[:, :, seen].repeat_interleave(shared, 1) for x in (few[0], kept[0], few[1]))
    scores = torch.where(own, q @ k8.transpose(2, 3), q @ k.transpose(2, 3)) * scaling
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


CLAIMS: Mapping[str, Cache] = {
    name: Cache(rounding, rounding)
    for name, rounding in {
        "8 bits": EIGHT,
        "8 bits, rotated": Rounding(8, rotated=True, scale="f32"),
        "4 bits": Rounding(4, scale="f32"),
        "4 bits, rotated": Rounding(4, rotated=True, scale="f32"),
        "4 bits, groups of 32 with an offset": Rounding(4, 32, offset=True),
        "4 bits, groups of 32 with an offset, rotated": Rounding(4, 32, offset=True, rotated=True),
        "4 bits, groups of 16 with an offset, rotated": Rounding(4, 16, offset=True, rotated=True),
    }.items()
}
"""The formats on the page of claims."""


def rounded(folder: Path, ids: Sequence[int], threads: int) -> dict[str, dict[str, float]]:
    """KL from the model with its keys and values as they are, share of equal best tokens, and bits a number."""
    torch.set_num_threads(threads)
    model = RoundedModel(folder)
    exact = model.hidden(ids, Cache())
    return {
        name: model.compare(exact, model.hidden(ids, cache), ids) | {"bits": cache.bits_a_number(model.head)}
        for name, cache in CLAIMS.items()
    }
