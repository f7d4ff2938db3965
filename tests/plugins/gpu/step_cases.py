"""The step's kernels beside the references of the ew ops; run where Triton interprets them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginewright.passes.ops import REFERENCES
from enginewright.plugins.cuda.serve.steps import option_views
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.gpu.placing import place_call
from enginewright.plugins.gpu.sampling import (
    drawing_of,
    option_words,
    packed_lists,
    places_of,
    write_masks,
    write_options,
)
from enginewright.plugins.gpu.sampling_calls import SamplingMemory, sampling_calls
from enginewright.plugins.gpu.step_calls import (
    Stored,
    activation_call,
    embedding_call,
    gated_activation_call,
    laid_by_group,
    norm_call,
    product_call,
    rope_call,
    split_product_calls,
    split_scratch,
    unpack_call,
)
from enginewright.plugins.gpu.tiles import GPUS
from enginewright.plugins.native.sampling import RowSampler
from enginewright.runtime.shared.contracts import SAMPLING_LISTS, FloatArray, Int32Array, SamplingBatch

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
GPU = GPUS[80]


def run(call: Call) -> None:
    JitLauncher().bind(call)()


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest, as a share of the largest value."""
    return float((actual.float() - expected).abs().max() / expected.abs().max())


def norms(dtype: str) -> list[float]:
    torch.manual_seed(0)
    checks = []
    for rows, size in ((5, 96), (3, 1000)):
        x, residual = (torch.randn(rows, 2 * size).to(DTYPES[dtype])[:, :size] for _ in range(2))
        weight, bias = 1 + torch.randn(size) * 0.2, torch.randn(size)
        out, total = torch.empty(rows, size, dtype=x.dtype), torch.empty(rows, size, dtype=x.dtype)
        run(norm_call(x, residual, weight, None, out, total, 1e-5, layer=False))
        assert torch.equal(total, x + residual)
        checks.append(difference(out, REFERENCES["rms_norm"](total.float(), weight, 1e-5)))
        run(norm_call(x, None, weight, bias, out, None, 1e-5, layer=True))
        checks.append(difference(out, REFERENCES["layer_norm"](x.float(), weight, bias, 1e-5)))
        heads = torch.randn(rows, 7, size).to(x.dtype)[:, 2:5]  # of a wider product
        out = torch.empty(rows, 3, size, dtype=x.dtype)
        run(norm_call(heads, None, None, None, out, None, 1e-6, layer=False))
        checks.append(difference(out, REFERENCES["rms_norm"](heads.float(), None, 1e-6)))
    return checks


def rotations(dtype: str) -> list[float]:
    torch.manual_seed(1)
    checks = []
    for heads, size, frequencies in ((3, 24, 8), (5, 64, 32)):
        x = torch.randn(4, heads + 3, size).to(DTYPES[dtype])[:, 1 : 1 + heads]
        table = REFERENCES["rope_table"](torch.arange(4) * 7, torch.rand(frequencies), 1.0)
        for interleaved in (False, True):
            out = torch.empty(4, heads, size, dtype=x.dtype)
            run(rope_call(x, table, out, interleaved=interleaved))
            checks.append(difference(out, REFERENCES["rope"](x.float(), table, interleaved)))
    return checks


def activations(dtype: str) -> list[float]:
    torch.manual_seed(2)
    checks = []
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid"):
        for rows, size in ((5, 70), (2, 1300)):
            x = (torch.randn(rows, 2 * size) * 3).to(DTYPES[dtype])
            out = torch.empty(rows, size, dtype=x.dtype)
            run(gated_activation_call(x, out, kind))
            checks.append(difference(out, REFERENCES["gated_activation"](x.float(), kind)))
            ones = torch.cat([x[:, :size].float(), torch.ones(rows, size)], 1)
            strided = torch.empty(rows, size // 5, 6, 5, dtype=x.dtype)[:, :, :5].permute(0, 3, 1, 2)
            run(activation_call(x[:, :size].unflatten(1, (5, -1, 1)).expand(strided.shape), strided, kind))
            meant = REFERENCES["gated_activation"](ones, kind).unflatten(1, (5, -1, 1))
            checks.append(difference(strided, meant.expand(strided.shape)))
    return checks


def stored(form: str, lead: tuple[int, ...], size: int, group: int, dtype: torch.dtype) -> tuple[Stored, Tensor]:
    """A random weight [.., size] as it is stored, and the floats that it stands for."""
    if form == "float":
        floats = torch.randn(*lead, size).to(dtype)
        return Stored(floats), floats.float()
    groups = -(-size // group) if group else 1
    scales = (torch.rand(*lead, groups) * 0.02 + 0.001).half()
    offsets = (torch.randn(*lead, groups) * 0.05).half() if form == "uint4" else None
    bits = 8
    if form == "fp8":
        values = values_stored = torch.randn(*lead, size).to(torch.float8_e4m3fn)
    else:
        bits = 8 if form == "int8" else 4
        low, high = {"int8": (-128, 128), "int4": (-8, 8), "uint4": (0, 16)}[form]
        values = values_stored = torch.randint(low, high, (*lead, size), dtype=torch.int8)
    if bits == 4:
        half = (values & 15).view(torch.uint8)
        values_stored = half[..., 0::2] | (half[..., 1::2] << 4)
    floats = REFERENCES["dequantize"](values, scales, group, offsets, bits)
    return Stored(values_stored, form, scales, offsets, group), floats


def amid_nan(weight: Stored) -> Stored:
    """A copy of the weight with NaN in memory after its scales and offsets: a read beyond them gives NaN."""

    def behind(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        memory = torch.full((values.numel() + 4096,), float("nan"), dtype=values.dtype)
        memory[: values.numel()] = values.reshape(-1)
        return memory[: values.numel()].view(values.shape)

    return replace(weight, scales=behind(weight.scales), offsets=behind(weight.offsets))


SHAPES = ((3, 40, 96, 32), (20, 70, 128, 64), (5, 33, 96, 0), (70, 20, 72, 24), (40, 70, 320, 64), (17, 40, 160, 32))
"""M, N, K and the weight's group: tiles that are cut off on every side, groups that no step along K divides."""


def products(form: str, dtype: str) -> list[float]:
    torch.manual_seed(3)
    checks = []
    for m, n, k, group in SHAPES:
        if group == 24 and form in ("int4", "uint4"):
            continue  # of 4 bits groups are 32, 64, 128, or all
        weight, floats = stored(form, (n,), k, group, DTYPES[dtype])
        x = torch.randn(m, k + 8).to(DTYPES[dtype])[:, :k]
        bias, out = torch.randn(n), torch.empty(m, n, dtype=x.dtype)
        expected = torch.nn.functional.gelu(x.float() @ floats.t() + bias, approximate="tanh")
        for one in (weight, laid_by_group(weight)):
            run(product_call(x, amid_nan(one), bias, out.fill_(float("nan")), GPU, activation="gelu_tanh"))
            checks.append(difference(out, expected))
        ids, rows = torch.tensor([0, n - 1, 3, n + 5, -1], dtype=torch.int32), torch.empty(5, k, dtype=x.dtype)
        run(embedding_call(ids, laid_by_group(weight), k, rows, GPU))
        checks.append(difference(rows, torch.cat([floats[[0, n - 1, 3]], torch.zeros(2, k)])))
    return checks


def split_products(form: str, dtype: str) -> list[float]:
    """Differences of products in parts along K, from the reference; the first part is a whole number of groups."""
    torch.manual_seed(6)
    checks = []
    for m, n, k, group, parts in (
        (1, 40, 2304, 128, 4),
        (3, 33, 1184, 32, 2),
        (16, 70, 2048, 0, 4),
        (5, 48, 1536, 0, 3),
        (40, 48, 1536, 128, 3),
    ):
        weight, floats = stored(form, (n,), k, group, DTYPES[dtype])
        x, bias = torch.randn(m, k + 8).to(DTYPES[dtype])[:, :k], torch.randn(n)
        out = torch.empty(m, n + 5, dtype=x.dtype)[:, :n]
        scratch = torch.full((split_scratch(k, n, form, group, dtype),), float("nan"))
        calls = split_product_calls(x, weight, bias, out, GPU, scratch, activation="gelu_tanh")
        assert [call.kernel for call in calls] == ["product", "sum_parts"]
        assert calls[0].grid[2] == parts
        expected = torch.nn.functional.gelu(x.float() @ floats.t() + bias, approximate="tanh")
        for one in (weight, laid_by_group(weight)):
            out.fill_(float("nan"))
            for call in split_product_calls(x, amid_nan(one), bias, out, GPU, scratch, activation="gelu_tanh"):
                run(call)
            checks.append(difference(out, expected))
    return checks


def unpacked_weights(form: str, dtype: str) -> list[float]:
    """Differences of weights that were made floats, and of some of their rows."""
    torch.manual_seed(7)
    checks = []
    for n, k, group in ((40, 64, 32), (33, 320, 64), (7, 96, 0), (20, 48, 24)):
        if group == 24 and form in ("int4", "uint4"):
            continue
        weight, floats = stored(form, (n,), k, group, DTYPES[dtype])
        for first, count in ((0, n), (3, n - 5)):
            out = torch.full((count, k), float("nan"), dtype=DTYPES[dtype])
            for one in (weight, laid_by_group(weight)):
                run(unpack_call(one.rows(first, count), out.fill_(float("nan")), GPU))
                checks.append(difference(out, floats[first : first + count]))
    return checks


def grouped_products(form: str, dtype: str) -> list[float]:
    torch.manual_seed(4)
    checks = []
    for counts, n, k in (((3, 0, 20, 1), 40, 64), ((0, 0, 33), 24, 96), ((1, 1, 1, 1, 1, 0), 16, 32)):
        weight, floats = stored(form, (len(counts), n), k, 32, DTYPES[dtype])
        x, bias = torch.randn(sum(counts), k).to(DTYPES[dtype]), torch.randn(len(counts), n)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        out = torch.empty(len(x), n, dtype=x.dtype)
        for one in (weight, laid_by_group(weight)):
            run(product_call(x, one, bias, out.fill_(float("nan")), GPU, starts=starts))
            checks.append(difference(out, REFERENCES["grouped_linear"](x.float(), starts, floats, bias)))
    return checks


def drawn(vocab: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of random rows with random options, by the kernels and by the cpu target's sampler."""
    rng = np.random.default_rng(seed)
    drawings, rows = [], 6 if vocab < 1000 else 4
    for case in range(2 * (seed % 2), 2 * (seed % 2) + 2):
        logits = (rng.standard_normal((rows, vocab)) * rng.choice([1, 4])).astype(np.float32)
        if case % 2:
            logits = np.round(logits * 2) / 2  # many are equal
        if case == 1:
            logits[1, 7], logits[2], logits[3, 5] = np.nan, -np.inf, np.inf
        batch = some_options(rng, rows)
        if case % 2 == 0:
            batch.repetition_penalty = rng.choice([1, 1.3, 0.5], rows).astype(np.float32)
            batch.seen = rng.integers(0, vocab, 5 * rows).astype(np.int32)
            batch.seen_start = (np.arange(rows + 1) * 5).astype(np.int32)
        drawings.append(tokens_of(logits, batch))
    return drawings


def drawn_with_lists(vocab: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Sampled tokens of rows with lists of tokens, some longer than a piece, and with typical_p; some rows have none.

    For each: the options' tokens; logits in float32, and in bfloat16 with many equal ones.
    """
    rng = np.random.default_rng(100 + seed)
    drawings, rows = [], 6
    for floats in (torch.float32, torch.bfloat16):
        logits = torch.from_numpy((rng.standard_normal((rows, vocab)) * 3).astype(np.float32)).to(floats)
        logits[1, 7], logits[2, 9] = float("nan"), float("inf")  # what is banned counts as well
        logits[3, : vocab // 2] = -float("inf")
        batch = some_options(rng, rows)
        batch.typical_p = rng.choice([1, 0.9, 0.5, 0.05], rows).astype(np.float32)
        for name in ("repetition", "frequency", "presence"):
            chosen = [1, 1.3, 0.5] if name == "repetition" else [0, 0.7, -2, 3e38]
            setattr(batch, f"{name}_penalty", rng.choice(chosen, rows).astype(np.float32))
        most = {"seen": 2 * vocab, "counted": vocab, "biased": vocab, "dry": vocab, "allowed": vocab}
        for start, (tokens, *_) in SAMPLING_LISTS.items():
            counts = np.where(rng.random(rows) < 0.3, 0, rng.integers(0, most[tokens], rows))
            lists = [rng.permutation(np.arange(2 * vocab) % vocab if tokens == "seen" else vocab)[:n] for n in counts]
            setattr(batch, start, np.cumsum([0, *counts]).astype(np.int32))
            setattr(batch, tokens, np.concatenate(lists).astype(np.int32))
        assert batch.counted is not None
        assert batch.biased is not None
        batch.counts = rng.integers(1, 9, len(batch.counted)).astype(np.int32)
        batch.bias = rng.choice([-np.inf, -3, 0.5, 2, 3e38], len(batch.biased), p=[0.2, 0.3, 0.3, 0.19, 0.01])
        batch.bias = batch.bias.astype(np.float32)
        assert batch.dry is not None
        batch.dry_bias = -rng.choice([0.5, 2, 30, 3e38], len(batch.dry), p=[0.4, 0.4, 0.19, 0.01]).astype(np.float32)
        drawings.append(tokens_of(logits, batch))
    return drawings


@dataclass
class FewMasks:
    """Masks of allowed tokens that are computed when they are waited for."""

    rows: Int32Array
    bits: np.ndarray[Any, np.dtype[np.uint32]]
    computed: np.ndarray[Any, np.dtype[np.uint32]]

    def wait(self) -> None:
        self.bits[:] = self.computed

    def chosen(self, rows: np.ndarray[Any, Any]) -> FewMasks:
        return replace(self, rows=self.rows[rows])


def with_masks(rng: np.random.Generator, batch: SamplingBatch, vocab: int) -> None:
    """Gives four of six rows a mask, in any order; of the last row no token is allowed."""
    words = -(-vocab // 32)
    bits = rng.integers(0, 2**32, (4, words), dtype=np.uint32) & rng.integers(0, 2**32, (4, words), dtype=np.uint32)
    bits[1] = 0
    masks = FewMasks(np.array([2, -1, 3, 0, -1, 1], np.int32), np.zeros((4, words), np.uint32), bits)
    batch.masks = masks  # type: ignore[assignment]


def drawn_with_masks(vocab: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Sampled tokens of rows with masks, alone and together with lists of tokens and typical_p."""
    rng, drawings, rows = np.random.default_rng(300 + seed), [], 6
    for lists in (False, True):
        logits = np.round(rng.standard_normal((rows, vocab)) * 6).astype(np.float32) / 2
        logits[2, 9] = float("nan")
        batch = some_options(rng, rows)
        with_masks(rng, batch, vocab)
        if lists:
            batch.typical_p = rng.choice([1, 0.9, 0.5], rows).astype(np.float32)
            batch.repetition_penalty = np.full(rows, 1.3, np.float32)
            batch.seen_start = np.arange(0, 5 * rows + 1, 5, dtype=np.int32)
            batch.seen = rng.integers(0, vocab, 5 * rows).astype(np.int32)
            batch.biased_start = np.arange(rows + 1, dtype=np.int32)
            batch.biased = rng.integers(0, vocab, rows).astype(np.int32)
            batch.bias = np.full(rows, 20, np.float32)
            batch.allowed_start = np.array([0, *[vocab // 2] * rows], np.int32)
            batch.allowed = np.arange(vocab // 2, dtype=np.int32)
        drawings.append(tokens_of(logits, batch))
    return drawings


def typical(vocab: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Sampled tokens of rows with typical_p alone or with another cut, at low temperatures and high ones."""
    rng, drawings, rows = np.random.default_rng(200 + seed), [], 6
    for name in (("typical_p", "top_p"), ("top_k", "min_p"))[seed % 2]:
        logits = (rng.standard_normal((rows, vocab)) * rng.choice([0.3, 2, 8])).astype(np.float32)
        if name == "top_p":
            logits = np.round(logits)  # many are equally far
        batch = some_options(rng, rows)
        batch.temperature[1:] = rng.choice([1e-30, 0.5, 1, 40], rows - 1)
        for other, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            if other != name:
                getattr(batch, other)[:] = off
        batch.typical_p = rng.choice([1, 0.95, 0.5, 0.2, 1e-6], rows).astype(np.float32)
        drawings.append(tokens_of(logits, batch))
    return drawings


def some_options(rng: np.random.Generator, rows: int) -> SamplingBatch:
    kinds = {"top_k": np.int32, "seed": np.uint64, "counter": np.uint64}
    values = {
        "temperature": rng.choice([0, 0.7, 1.3], rows),
        "top_k": rng.choice([0, 1, 5, 40], rows),
        "top_p": rng.choice([1, 0.9, 0.5, 0.05], rows),
        "min_p": rng.choice([0, 0.1], rows),
        "seed": rng.integers(0, 2**63, rows),
        "counter": rng.integers(0, 100, rows),
    }
    return SamplingBatch(**{name: value.astype(kinds.get(name, np.float32)) for name, value in values.items()})


def tokens_of(logits: Tensor | FloatArray, batch: SamplingBatch) -> tuple[list[int], list[int]]:
    """Samples by the kernels, and by the cpu target's sampler."""
    tensor = logits if isinstance(logits, Tensor) else torch.from_numpy(logits)
    rows, vocab = tensor.shape
    places, words = places_of(option_words(rows))
    uploaded = torch.zeros(words, dtype=torch.int32)
    write_options(uploaded.numpy(), places, batch, rows)
    lists, size = packed_lists(batch)
    options = option_views(uploaded, places, rows) | {"lists": torch.zeros(size, dtype=torch.int32)}
    options["lists"][: len(lists)] = torch.from_numpy(lists)
    memory = SamplingMemory(rows, vocab, lambda shape, of: torch.zeros(shape, dtype=getattr(torch, of)))
    if batch.masks is not None:
        write_masks(memory.masks.numpy(), batch.masks)
    before = tensor.clone()
    for call in sampling_calls(tensor, options, memory, drawing_of(batch)):
        run(call)
    assert torch.equal(tensor.nan_to_num(), before.nan_to_num())  # what is drawn from is as it was
    expected = RowSampler(1).sample(tensor.float().numpy(), batch).tokens
    assert expected is not None
    return memory.tokens.tolist(), expected.tolist()


def placed(tokens: int, count: int) -> bool:
    """True if the kernel in front of a step places drawn tokens and changes tables, and writes nothing else."""
    rng = np.random.default_rng([tokens, count])
    ids, drawn = rng.integers(0, 90, tokens).astype(np.int32), rng.integers(-1, 100, 64).astype(np.int32)
    sources = np.where(rng.random(tokens) < 0.5, -1, rng.integers(0, 64, tokens)).astype(np.int32)
    tables, entries = rng.integers(0, 99, 9000).astype(np.int32), rng.permutation(9000)[:count]
    changes = np.full((9000, 2), 7, np.int32)
    changes[:count] = np.stack([entries, rng.integers(-1, 99, count)], 1)
    wanted_ids, wanted_tables = np.where(sources < 0, ids, drawn[sources].clip(0, 89)), tables.copy()
    wanted_tables[entries] = changes[:count, 1]
    more = np.full(300, 5, np.int32)  # of the same memory, behind the tokens
    arrays = {"ids": np.concatenate([ids, more]), "sources": np.concatenate([sources, more]), "drawn": drawn}
    arrays |= {"tables": tables, "changes": changes, "count": np.array([count], np.int32)}
    memory = {name: torch.from_numpy(array) for name, array in arrays.items()}
    run(place_call(memory, tokens, 90))
    same = (memory["ids"].numpy() == np.concatenate([wanted_ids, more])).all()
    return bool(same and (memory["tables"].numpy() == wanted_tables).all())
