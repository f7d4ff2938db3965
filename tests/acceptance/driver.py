"""Drives the CPU program of a bundle step by step, with block tables made here: no scheduler, no pool."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import FloatArray, StepInput
from enginewright.runtime.shared.kv_formats import CacheDtype


class Driver:
    """Requests 0 .. ``requests - 1`` with ``blocks`` KV blocks each, scattered over the pool in a fixed order.

    ``cache``: what keys and values are stored in, instead of what the bundle says.
    """

    def __init__(
        self,
        bundle: Path,
        requests: int,
        blocks: int,
        *,
        threads: int = 1,
        isa: str | None = None,
        seed: int = 0,
        cache: CacheDtype | None = None,
    ) -> None:
        opened = Bundle.open(bundle)
        lowered = opened.program("cpu")
        if cache is not None:
            groups = tuple(g.model_copy(update={"dtype": cache}) for g in lowered.cache_groups)
            lowered = lowered.model_copy(update={"cache_groups": groups})
        self.groups = {g.name: g.block_size for g in lowered.cache_groups}
        weights = {use.name: opened.weight(use.name) for use in lowered.weights}
        pool = dict.fromkeys(self.groups, requests * blocks)
        self.program = CpuProgram(lowered, weights, blocks=pool, threads=threads, isa=isa)
        order = np.random.default_rng(seed).permutation(requests * blocks).astype(np.int32)
        self.tables = order.reshape(requests, blocks)
        self.lengths = [0] * requests

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.program

    def step(self, work: dict[int, list[int]]) -> dict[int, FloatArray]:
        """Appends tokens to requests in one step. Returns each request's logits [tokens, V]."""
        ids = np.concatenate([np.asarray(t, np.int32) for t in work.values()])
        sizes = [len(t) for t in work.values()]
        positions = np.concatenate([np.arange(self.lengths[r], self.lengths[r] + len(t)) for r, t in work.items()])
        owner = np.repeat(np.asarray(list(work)), sizes)
        for request, tokens in work.items():
            self.lengths[request] += len(tokens)
        tables = self.tables[np.asarray(list(work))]
        slots = {
            g: (self.tables[owner, positions // size] * size + positions % size).astype(np.int32)
            for g, size in self.groups.items()
        }
        out = self.program.run(
            StepInput(
                ids=ids,
                positions=positions.astype(np.int32),
                q_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
                kv_len=np.asarray([self.lengths[r] for r in work], np.int32),
                block_table={g: np.ascontiguousarray(tables) for g in self.groups},
                slots=slots,
                rows=np.arange(len(ids), dtype=np.int32),
                outputs=("logits",),
            )
        )
        assert out.logits is not None
        return dict(zip(work, np.split(out.logits, np.cumsum(sizes)[:-1]), strict=True))
