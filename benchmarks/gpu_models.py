"""Whole models on a GPU, for gpu_truth.py: steps timed and profiled, tokens and logits compared.

Programs come from what was packed; weights are random, and made where they are used.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_kernels import BLOCK_SIZE, GIB
from gpu_machine import EXACT, Figure, Machine, NotMeasuredError, Record
from gpu_places import placed

from enginewright.plugins.cuda.serve.program import TORCH_DTYPES, CudaProgram, Place
from enginewright.plugins.cuda.serve.steps import CudaSteps
from enginewright.plugins.gpu.specs import SAMPLING_KERNELS
from enginewright.plugins.steps.packed_steps import StepLimits
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import STATE, SamplingBatch, StepInput
from enginewright.runtime.shared.lowered_program import LoweredProgram

NEAR_TIE = 0.1
"""The distance of the logits of two tokens, below which bfloat16 may take the other one: logits of these models are of
up to 3."""

Requests = Sequence[tuple[int, int]]
"""New tokens of each request, and tokens before them."""


class Steps:
    """Steps of a packed program, with random weights.

    ``name``: of a folder with the program, its kernels, ``config.json`` and ``weights.json``. A rehearsal takes the
    tiny model where that isn't packed, or where the interpreter runs it; one that looks kernels up has the real sizes,
    and no memory.
    """

    def __init__(self, machine: Machine, name: str) -> None:
        if machine.mode == "interpreted" or not (machine.gpu or (machine.packed / name).is_dir()):
            name = "tiny"
        self.folder = machine.packed / name
        self._machine, self._name = machine, name
        self._program = LoweredProgram.from_json((self.folder / "program.json").read_bytes())
        self._groups = self._program.cache_groups
        self.place = machine.place("meta" if machine.mode == "looked-up" else "cpu")
        self._launchers: dict[bool, Any] = {}

    def _launcher(self, *, exact: bool) -> Any:
        """The launcher of the program's kernels, or of those of exact steps."""
        if exact not in self._launchers:
            self._launchers[exact] = self._machine.launcher(self.folder.name + EXACT * exact, self.place)
        return self._launchers[exact]

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Random ones, on the device. Raises NotMeasuredError where it hasn't the memory."""
        needed = sum(_bytes_of(use) for use in self._program.weights)
        if needed > (free := self._machine.free_bytes()):
            raise NotMeasuredError(f"weights of {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        tensors = {}
        for use in self._program.weights:
            dtype = TORCH_DTYPES[use.dtype]
            shape = (*use.shape[:-1], use.shape[-1] // 2) if use.dtype in ("i4", "u4") else use.shape
            weight = torch.empty(shape, dtype=dtype, device=self.place.device)
            if not dtype.is_floating_point:  # all that there are
                tensors[use.name] = weight.random_(
                    0 if dtype == torch.uint8 else -127, 256 if dtype == torch.uint8 else 128
                )
            elif dtype.itemsize == 1:  # floats of 8 bits, which are drawn in no other way
                tensors[use.name] = (
                    torch.empty(shape, dtype=torch.bfloat16, device=weight.device).normal_(0, 50).to(dtype)
                )
            elif dtype == torch.float16:  # scales
                tensors[use.name] = weight.uniform_(1e-4, 1e-3)
            else:
                tensors[use.name] = weight.normal_(0, 0.02)
        return tensors

    def opened(self, requests: int, blocks: int, *, graphs: bool, exact: bool = False) -> CudaSteps:
        """Opens the steps for so many requests of so many blocks, with caches of random values. Raises
        NotMeasuredError."""
        section, launcher = self._machine.section, self._launcher(exact=exact)
        limits = StepLimits(tokens=section.chunk, requests=section.requests, rows=section.requests, blocks=blocks)
        weights = self.weights
        pools = {group.name: requests * (1 if group.kind == STATE else blocks) for group in self._groups}
        needed = sum(cache_block_bytes(group) * pools[group.name] for group in self._groups) + 2 * GIB
        needed += self._program.arena_bytes.evaluate(limits.tokens, limits.requests, limits.rows)
        if not self._machine.gpu:  # nothing of it is really taken
            needed += sum(weight.nbytes for weight in weights.values())
        if needed > (free := self._machine.free_bytes()):
            raise NotMeasuredError(f"needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        bound = CudaProgram(
            self._program,
            weights,
            Place(self.place.device, self.place.gpu, launcher, self.place.processors),
            blocks=pools,
            limits=limits,
            exact=exact,
        )
        for pools in bound.pools.values():
            for memory in pools[:2]:  # without scales
                memory.normal_()
        vocab = self._program.outputs["logits"].shape[1].constant
        return CudaSteps(bound, vocab, launcher, self.place.capture if graphs else None)

    def input(self, requests: Requests, blocks: int, *, sampled: bool = True, rows: int = 1) -> StepInput:
        """A step of these requests, whose blocks lie scattered. The last ``rows`` tokens of each have logits."""
        new, past = np.array(requests, np.int32).T
        kv_len, ends = new + past, np.cumsum(new)
        positions = np.concatenate([np.arange(p, p + n, dtype=np.int32) for n, p in requests])
        scattered = np.random.default_rng(0).permutation(len(new) * blocks).astype(np.int32).reshape(len(new), blocks)
        table = scattered[:, : -(-int(kv_len.max()) // BLOCK_SIZE)]
        state_table = np.arange(len(new), dtype=np.int32)[:, None]
        ids = (7 + 31 * positions) % self._program.outputs["logits"].shape[1].constant
        sampled_rows = np.concatenate([np.arange(e - min(rows, n), e) for n, e in zip(new, ends, strict=True)])
        return StepInput.packed(
            ids=ids.astype(np.int32),
            counts=new,
            kv_len=kv_len,
            tables={group.name: state_table if group.kind == STATE else table for group in self._groups},
            groups=self._groups,
            rows=sampled_rows,
            sampling=_greedy(len(sampled_rows)) if sampled else None,
            outputs=() if sampled else ("logits",),
        )

    # ---- figures

    def figures(self) -> Iterator[Figure]:
        """Decode steps, first tokens, steps of both, profiles; the largest last."""
        small = self._machine.mode == "interpreted"
        batches, contexts = ((1, 2), (40, 600)) if small else ((1, 16, 64, 256), (128, 2048))
        decodes = sorted(itertools.product(batches, contexts), key=lambda size: (size[0] == 256, size[0] * size[1]))
        label = {"model": self._name}

        def decode(sizes: Sequence[tuple[int, int]]) -> Iterator[Figure]:
            for (batch, context), graphs in itertools.product(sizes, (False, True) if self._machine.gpu else (False,)):
                names = {"figure": "decode", **label, "batch": batch, "context": context, "graphs": graphs}
                yield names, partial(self._decode, batch, context, graphs=graphs)

        yield from decode([size for size in decodes if size[0] < 256])
        for length in (40,) if small else (128, 512, 2048, 8192):
            yield {"figure": "first token", **label, "prompt": length}, partial(self._first_token, length)
        mixed = [(1, 300), (40, 0)] if small else [(1, 2048)] * 16 + [(512, 1024)]
        yield {"figure": "decodes beside a prompt", **label}, partial(self._mixed, mixed)
        profiled = {"decode 1": [(1, 600)], "prompt": [(40, 0)]} if small else _PROFILED
        for name, requests in profiled.items():
            yield {"figure": "profile", **label, "of": name}, partial(self._profile, requests)
        yield from decode([size for size in decodes if size[0] == 256])

    def few(self) -> Iterator[Figure]:
        """Decode steps with graphs, first tokens and a profile."""
        small, label = self._machine.mode == "interpreted", {"model": self._name}
        for batch, context in ((1, 40),) if small else ((1, 128), (1, 2048), (16, 2048), (64, 2048), (256, 128)):
            names = {"figure": "decode", **label, "batch": batch, "context": context, "graphs": self._machine.gpu}
            yield names, partial(self._decode, batch, context, graphs=self._machine.gpu)
        for length in (40,) if small else (128, 2048):
            yield {"figure": "first token", **label, "prompt": length}, partial(self._first_token, length)
        of = {"decode 1": [(1, 40)]} if small else {"decode 16 x 2048": [(1, 2047)] * 16}
        for name, requests in of.items():
            yield {"figure": "profile", **label, "of": name}, partial(self._profile, requests)

    def drawn(self) -> Iterator[Figure]:
        """Yields the cost of sampling next to a step, by settings, for a full batch."""
        batch, context = (2, 40) if self._machine.mode == "interpreted" else (256, 128)
        for way in WAYS:
            names = {"figure": "drawing", "model": self._name, "batch": batch, "way": way}
            yield names, partial(self._drawn, batch, context, way)

    def _drawn(self, batch: int, context: int, way: str) -> Record:
        if self._machine.mode == "looked-up" and "logprobs" in WAYS[way](batch):
            raise NotMeasuredError("nothing is computed where kernels are looked up alone")
        gpu, blocks = self._machine.gpu, -(-(context + 1) // BLOCK_SIZE)
        steps = self.opened(batch, blocks, graphs=gpu)
        step = self.input([(1, context)] * batch, blocks)
        step.sampling = replace(_greedy(batch), **WAYS[way](batch))
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, times = torch.cuda.memory_allocated() if gpu else 0, []
        for _ in range(12 if gpu else 1):
            begin = time.perf_counter()
            steps.start(step).result()
            times.append(time.perf_counter() - begin)
        record: Record = {"ms": statistics.median(times[len(times) // 3 :]) * 1e3}
        if gpu:
            record["most MiB beyond"] = (torch.cuda.max_memory_allocated() - before) >> 20
            bound = next(iter(steps._bound.values()))
            works = [work for of in bound.draws.values() for work in of]
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            for _ in range(10):
                for work in works:
                    work()
            ended.record()
            ended.synchronize()
            record["drawing ms"] = begun.elapsed_time(ended) / 10
        steps.close()
        return record

    def exact(self) -> Iterator[Figure]:
        """One request's bits alone and in company, in exact steps and in others; then the price of exact steps."""
        small, label = self._machine.mode == "interpreted", {"model": self._name}
        decode, prompt = ((1, 40), (5, 0)) if small else ((1, 300), (32, 0))
        kinds = {"decodes": (decode, decode), "prompts": (prompt, prompt), "a decode beside prompts": (decode, prompt)}
        for exact, (kind, requests) in itertools.product((True, False), kinds.items()):
            names = {"figure": "bits", **label, "exact": exact, "of": kind}
            yield names, partial(self._bits, (1, 2, 4) if small else (1, 7, 64), *requests, exact=exact)
        for batch, context in ((1, 40),) if small else ((1, 128), (16, 2048), (64, 2048), (256, 128)):
            names = {"figure": "price", **label, "batch": batch, "context": context}
            yield names, partial(self._price, partial(self._decode, batch, context, graphs=self._machine.gpu))
        length = 40 if small else 2048
        yield {"figure": "price", **label, "prompt": length}, partial(self._price, partial(self._first_token, length))

    def _price(self, measure: Callable[..., Record]) -> Record:
        """Milliseconds of a step that isn't exact and of one that is. ``price``: the share that the latter takes more;
        the aim is 0.03."""
        plain, exact = (measure(exact=exact)["ms"] for exact in (False, True))
        return {"ms": plain, "exact ms": exact, "price": exact / plain - 1}

    def _bits(self, counts: Sequence[int], mine: tuple[int, int], others: tuple[int, int], *, exact: bool) -> Record:
        """Compares the logits of a request alone with its logits in steps of several requests."""
        if self._machine.mode == "looked-up":
            raise NotMeasuredError("nothing is computed where kernels are looked up alone")
        blocks = -(-max(map(sum, (mine, others))) // BLOCK_SIZE)
        steps = self.opened(max(counts), blocks, graphs=False, exact=exact)
        alone, by_count = None, {}
        for count in counts:
            requests = [mine] + [others] * (count - 1)
            step = self.input(requests, blocks, sampled=False)
            table = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
            positions, of = step.positions, np.repeat(np.arange(count), [new for new, _ in requests])
            slots = (table[of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32)
            groups = [group.name for group in self._groups]
            ids = step.ids + 5 * of.astype(np.int32)  # others say something else
            step = step.changed(ids=ids, block_table=dict.fromkeys(groups, table), slots=dict.fromkeys(groups, slots))
            logits = steps.start(step).result().logits
            assert logits is not None
            row = logits[0]
            alone = row if alone is None else alone
            by_count[str(count)] = {
                "of": len(row),
                "other bits": int((row.view(np.int32) != alone.view(np.int32)).sum()),
                "largest difference": float(np.abs(row - alone).max()),
                "largest": float(np.abs(alone).max()),
                "same token": bool(row.argmax() == alone.argmax()),
            }
        steps.close()
        right = {"right": not any(of["other bits"] for of in by_count.values())} if exact else {}
        return {**by_count, **right}

    def _decode(self, batch: int, context: int, *, graphs: bool, exact: bool = False) -> Record:
        count = 40 if self._machine.gpu else 2
        blocks = -(-(context + count) // BLOCK_SIZE)
        steps = self.opened(batch, blocks, graphs=graphs, exact=exact)
        started, waited = [], []
        for n in range(count):
            step = self.input([(1, context + n)] * batch, blocks)
            begin = time.perf_counter()
            running = steps.start(step)
            middle = time.perf_counter()
            running.result()
            started.append(middle - begin)
            waited.append(time.perf_counter() - middle)
        counted = slice(count // 4, None)
        whole = [a + b for a, b in zip(started, waited, strict=True)][counted]
        cached = sum(
            cache_block_bytes(group) * batch * (2 if group.kind == STATE else context / BLOCK_SIZE)
            for group in self._groups
        )
        read = sum(weight.nbytes for weight in self.weights.values()) + cached
        record = {
            "ms": statistics.median(whole) * 1e3,
            "host ms": statistics.median(started[counted]) * 1e3,
            "GB/s": read / statistics.median(whole) / 1e9,
            "graph launches": steps.graphs.launches,
        }
        steps.close()
        return record

    def _first_token(self, length: int, *, exact: bool = False) -> Record:
        chunk, blocks = self._machine.section.chunk, -(-length // BLOCK_SIZE)
        steps, times = self.opened(1, blocks, graphs=False, exact=exact), []
        for _ in range(4 if self._machine.gpu else 1):
            begin = time.perf_counter()
            for at in range(0, length, chunk):
                running = steps.start(self.input([(min(chunk, length - at), at)], blocks))
            running.result()
            times.append(time.perf_counter() - begin)
        steps.close()
        return {"ms": statistics.median(times[len(times) > 1 :]) * 1e3}

    def _mixed(self, requests: Requests) -> Record:
        blocks = -(-max(sum(one) for one in requests) // BLOCK_SIZE)
        steps, times = self.opened(len(requests), blocks, graphs=False), []
        for _ in range(8 if self._machine.gpu else 1):
            begin = time.perf_counter()
            steps.start(self.input(requests, blocks)).result()
            times.append(time.perf_counter() - begin)
        steps.close()
        return {"requests": len(requests), "ms": statistics.median(times[len(times) // 4 :]) * 1e3}

    def _profile(self, requests: Requests) -> Record:
        """Profiles a step: the GPU's time by kind of kernel, and the kernels that take most."""
        blocks = -(-max(sum(one) for one in requests) // BLOCK_SIZE)
        steps, step = self.opened(len(requests), blocks, graphs=False), self.input(requests, blocks)
        for _ in range(3 if self._machine.gpu else 1):
            steps.start(step).result()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._machine.gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        begin = time.perf_counter()
        with torch.profiler.profile(activities=activities) as profile:
            steps.start(step).result()
        wall = time.perf_counter() - begin
        steps.close()
        kinds: dict[str, float] = {}
        events = [e for e in profile.key_averages() if e.device_type != torch.autograd.DeviceType.CPU]
        rows = [(e.key, e.count, float(e.self_device_time_total)) for e in events]
        rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])
        for name, _, took in rows:
            kinds[_kind_of(name)] = kinds.get(_kind_of(name), 0.0) + took
        return {"us": {name: round(us, 1) for name, us in kinds.items()}, "wall ms": wall * 1e3, "top": rows[:12]}

    def logits(self, ids: Sequence[int], decoded: int) -> np.ndarray[Any, Any]:
        """Gives those of the last tokens of ``ids``, [R, V]: as many as a step has rows; ``decoded`` in steps of one
        token."""
        blocks, rows = -(-len(ids) // BLOCK_SIZE), []
        steps = self.opened(1, blocks, graphs=False)
        first = len(ids) - decoded
        for new, past in ((first, 0), *((1, at) for at in range(first, len(ids)))):
            step = self.input([(new, past)], blocks, sampled=False, rows=self._machine.section.requests)
            step.arrays["ids"] = np.array(ids[past : past + new], np.int32)
            rows.append(steps.start(step).result().logits)
        steps.close()
        return np.concatenate(rows)


_PROFILED: Mapping[str, Requests] = {
    "decode 1 x 2048": [(1, 2047)],
    "decode 64 x 2048": [(1, 2047)] * 64,
    "prompt 2048": [(2048, 0)],
}


def _all(value: float, dtype: type = np.float32) -> Callable[[int], Any]:
    return lambda rows: np.full(rows, value, dtype)


WAYS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "greedy": lambda rows: {},
    "temperature": lambda rows: {"temperature": _all(0.8)(rows)},
    "top_k 50": lambda rows: {"temperature": _all(0.8)(rows), "top_k": _all(50, np.int32)(rows)},
    "top_p 0.9": lambda rows: {"temperature": _all(0.8)(rows), "top_p": _all(0.9)(rows)},
    "top_p 0.9, top_k 50": lambda rows: {
        "temperature": _all(0.8)(rows),
        "top_k": _all(50, np.int32)(rows),
        "top_p": _all(0.9)(rows),
    },
    "min_p 0.05": lambda rows: {"temperature": _all(0.8)(rows), "min_p": _all(0.05)(rows)},
    "greedy, 5 logprobs": lambda rows: {"logprobs": 5},
}
"""Ways of drawing: what they give all rows of a step."""


def _bytes_of(use: Any) -> int:
    return int(np.prod(use.shape)) * TORCH_DTYPES[use.dtype].itemsize


def _greedy(rows: int) -> SamplingBatch:
    off, none = np.zeros(rows, np.float32), np.zeros(rows, np.uint64)
    return SamplingBatch(off, off.astype(np.int32), off + 1, off, none, none)


def _kind_of(kernel: str) -> str:
    """The purpose of a kernel in a profile."""
    if "HtoD" in kernel:
        return "upload"
    if "DtoH" in kernel:
        return "download"
    if kernel in {f"{name}_kernel" for name in SAMPLING_KERNELS}:
        return "sampling"
    if kernel.startswith("stored_"):
        return "recurrences"
    if any(part in kernel for part in ("attention", "combine_splits", "decode_work", "kv_write")):
        return "attention"
    if any(part in kernel for part in ("gemm", "cutlass", "nvjet", "splitK", "product")):
        return "products"
    return "other kernels"


# ---- tokens


def generate(bundle: Path, target: str, prompts: Sequence[Sequence[int]], **options: Any) -> Record:
    """Greedy tokens of each prompt, by how much each one's logit was above the next, and what the executor says."""
    from enginewright import LLM, SamplingParams

    begin = time.perf_counter()
    longest = max(map(len, prompts))
    with LLM(
        bundle, target=target, trust="code", context=longest + 32, max_requests=4, memory="1GiB", **options
    ) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
        results = llm.generate([list(prompt) for prompt in prompts], params)
        about = llm.info()["executor"]
    margins = []
    for result in results:
        margins.append([round(of.top[0][1] - of.top[1][1], 4) for of in result.logprobs or ()])
    tokens = [list(result.token_ids) for result in results]
    return {"tokens": tokens, "margins": margins, "executor": about, "seconds": time.perf_counter() - begin}


def compare_tokens(machine: Machine, name: str, wanted: Record, place: Any, *, graphs: bool) -> Record:
    """The cuda target's tokens beside those that were packed. They may differ behind a near tie alone."""
    prompts, tokens, margins = wanted["prompts"], wanted["tokens"], wanted["margins"]
    if not machine.gpu and not wanted["rehearse all"]:
        prompts, tokens, margins = prompts[:-1], tokens[:-1], margins[:-1]  # the long one takes minutes
    with placed(place, graphs=graphs):
        generated = generate(machine.packed / name, "cuda", prompts, speculate=None)
    if machine.mode == "looked-up":
        return {"executor": generated["executor"]}
    apart = [first_difference(a, b) for a, b in zip(generated["tokens"], tokens, strict=True)]
    at = [None if n is None else of[n] for n, of in zip(apart, margins, strict=True)]
    right = all(margin is None or margin < NEAR_TIE for margin in at)
    return {
        "equal": generated["tokens"] == tokens,
        "first difference": apart,
        "margin there": at,
        "right": right,
        **generated,
    }


SAMPLED: tuple[Record, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 3},
    {"temperature": 0.9, "typical_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 17: -100.0}, "top_p": 0.95, "top_k": 50},
    {"temperature": 1.0, "allowed_token_ids": list(range(20, 90)), "min_tokens": 3},
)
"""The sampling parameters of ``serve``'s requests, used in rotation."""


def serve(bundle: Path, target: str, count: int, **options: Any) -> Record:
    """Tokens of many requests at once, and of the same again: prompts of 1 to 1,400 tokens, three of four with one of
    three beginnings in common, drawn in every way. ``cached``: tokens that each round found in the prefix cache."""
    from enginewright import LLM, SamplingParams

    rng = np.random.default_rng(5)
    beginnings = [rng.integers(1, 256, length).tolist() for length in (40, 300, 1000, 0)]
    prompts = [beginnings[n % 4] + rng.integers(1, 256, rng.integers(1, 400)).tolist() for n in range(count)]
    ways = [
        SamplingParams(max_tokens=4 + n % 29, ignore_eos=True, seed=n, **SAMPLED[n % len(SAMPLED)])
        for n in range(count)
    ]
    begin, rounds, cached = time.perf_counter(), [], []
    with LLM(bundle, target=target, trust="code", context=1500, max_requests=24, memory="1GiB", **options) as llm:
        for _ in range(2):
            results = llm.generate(prompts, ways)
            rounds.append([list(result.token_ids) for result in results])
            cached.append(sum(result.num_cached_tokens or 0 for result in results))
        about = llm.info()["executor"]
    return {"rounds": rounds, "cached": cached, "executor": about, "seconds": round(time.perf_counter() - begin, 1)}


def compare_served(machine: Machine, name: str, wanted: Record) -> Record:
    """The cuda target's tokens of ``serve`` beside those that were packed."""
    if not machine.gpu:
        raise NotMeasuredError("takes minutes without a GPU")
    answers = serve(machine.packed / name, "cuda", len(wanted["rounds"][0]), speculate=None)
    rounds = answers.pop("rounds")
    apart = [
        [n, first_difference(a, b), SAMPLED[n % len(SAMPLED)]]
        for of, want in zip(rounds, wanted["rounds"], strict=True)
        for n, (a, b) in enumerate(zip(of, want, strict=True))
        if a != b
    ]
    tokens = sum(len(one) for of in rounds for one in of)
    return {"requests": 2 * len(rounds[0]), "tokens": tokens, "apart": len(apart), "first": apart[:10], **answers}


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> int | None:
    """The position of the first difference of two lists of tokens; None if they are equal."""
    return next((n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)


def compare_engines(machine: Machine, bundle: Path) -> Record:
    """Engines of TensorRT-RTX: their tokens beside the cpu target's. NotMeasuredError where they can't run here."""
    from enginewright.runtime.shared.errors import MissingDependencyError, TargetError

    if importlib.util.find_spec("tensorrt_rtx") is None:
        raise NotMeasuredError("tensorrt_rtx isn't installed here")
    expected = json.loads((machine.packed / "engines.json").read_text())[bundle.name]
    try:
        generated = generate(bundle, "tensorrt-rtx", expected["prompts"], speculate=None)
    except (MissingDependencyError, TargetError) as e:
        raise NotMeasuredError(e.message) from e
    return {"equal": generated["tokens"] == expected["tokens"], **generated}


# ---- beside transformers


def _transformers_model(machine: Machine, folder: Path) -> Any:
    """Makes one of random weights, in bfloat16, on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device(machine.device):
        return AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()


@torch.inference_mode()
def compare_logits(machine: Machine, name: str) -> Record:
    """Compares, of the same weights: ours and transformers', both in bfloat16, beside transformers' in float32."""
    steps = Steps(machine, name)
    model = _transformers_model(machine, steps.folder)
    if machine.mode != "looked-up":
        state, sources = model.state_dict(), json.loads((steps.folder / "weights.json").read_text())
        for use in steps._program.weights:
            entry = sources[use.name]
            value = (
                torch.tensor(entry["values"]) if "values" in entry else torch.cat([state[n] for n in entry["sources"]])
            )
            weight = value.reshape(use.shape).to(steps.place.device, TORCH_DTYPES[use.dtype])
            steps.__dict__.setdefault("weights", {})[use.name] = weight
    length, decoded = (600, 8) if machine.gpu else (60, 2)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, length).tolist()
    ours = torch.from_numpy(steps.logits(ids, decoded) if machine.mode != "looked-up" else np.zeros((1, 1)))
    if machine.mode == "looked-up":
        return {"weights": len(steps.weights)}
    batch = torch.tensor([ids], device=machine.device)
    theirs = model(batch).logits[0, -len(ours) :].float().cpu()
    exact = model.float()(batch).logits[0, -len(ours) :].cpu()
    far = {"ours": _apart(ours, exact), "transformers": _apart(theirs, exact)}
    top = float((ours.argmax(-1) == exact.argmax(-1)).float().mean())
    top_theirs = float((theirs.argmax(-1) == exact.argmax(-1)).float().mean())
    record = {"rows": len(ours), "from float32": far, "same first": {"ours": top, "transformers": top_theirs}}
    return {**record, "right": far["ours"] < 2 * far["transformers"]}


def _apart(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


def transformers_figures(machine: Machine, names: Sequence[str]) -> Iterator[Figure]:
    """Continuous batching of the same sizes, each after a round that isn't counted."""
    loaded: dict[str, Any] = {}

    def model(name: str) -> Any:
        if name not in loaded:
            loaded.clear()
            loaded[name] = _transformers_model(machine, machine.packed / name)
        return loaded[name]

    def measure(name: str, batch: int) -> Record:
        from transformers import GenerationConfig

        new = 64
        options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            model(name).generate_batch(inputs=[[1] * 16] * batch, generation_config=options)
            seconds.append(time.perf_counter() - begin)
        return {"first s": seconds[0], "seconds": seconds[1], "tokens/s": batch * new / seconds[1]}

    for name in names:
        for batch in (1, 16, 64, 256):
            yield {"figure": "transformers", "model": name, "batch": batch}, partial(measure, name, batch)
