"""A request's logits are bit-for-bit the same alone, in a batch, chunked or whole, with one thread or two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.kv_formats import CacheDtype

from .driver import Driver


def run(
    bundle: Path,
    texts: list[list[int]],
    *,
    chunk: int,
    together: bool,
    threads: int,
    isa: str | None = None,
    cache: CacheDtype | None = None,
) -> list[FloatArray]:
    """Logits of every position of every text, each text given in chunks."""
    blocks = max(len(t) for t in texts) // 32 + 1
    got: list[list[FloatArray]] = [[] for _ in texts]
    with Driver(bundle, len(texts), blocks, threads=threads, seed=chunk, isa=isa, cache=cache) as driver:
        batches = [list(range(len(texts)))] if together else [[r] for r in range(len(texts))]
        for batch in batches:
            for at in range(0, max(len(texts[r]) for r in batch), chunk):
                work = {r: piece for r in batch if (piece := texts[r][at : at + chunk])}
                for r, logits in driver.step(work).items():
                    got[r].append(logits)
    return [np.concatenate(g) for g in got]


WAYS = [
    pytest.param(4096, True, 1, id="batch"),
    pytest.param(16, False, 1, id="chunked"),
    pytest.param(7, True, 2, id="odd chunks in a batch, 2 threads"),
    pytest.param(1, True, 1, id="decode in a batch"),
    pytest.param(4096, False, 2, id="2 threads"),
]


@pytest.mark.parametrize(("chunk", "together", "threads"), WAYS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPTNeoX"])
def test_tiny_models(
    family: str,
    chunk: int,
    together: bool,
    threads: int,
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bundle = tmp_path_factory.getbasetemp() / f"{family}-invariance.bundle"
    if not bundle.exists():
        export(tiny_model(family, max_position_embeddings=2048), bundle)
    rng = np.random.default_rng(3)
    # Lengths around the tile of 32 keys and the split of 512, which is where an order could slip.
    texts = [rng.integers(3, 256, n).tolist() for n in (1, 31, 32, 33, 100, 511, 513, 700)]
    if chunk == 1:
        texts = [t[:70] for t in texts]
    alone = run(bundle, texts, chunk=4096, together=False, threads=1)
    other = run(bundle, texts, chunk=chunk, together=together, threads=threads)
    for a, b in zip(alone, other, strict=True):
        assert a.tobytes() == b.tobytes()


def test_smollm2(smollm2_bundle: Path) -> None:
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 49152, n).tolist() for n in (1, 5, 17, 32, 33, 47, 64, 96)]
    alone = run(smollm2_bundle, texts, chunk=4096, together=False, threads=1)
    for chunk, together, threads in ((4096, True, 2), (16, False, 2), (16, True, 1)):
        other = run(smollm2_bundle, texts, chunk=chunk, together=together, threads=threads)
        for a, b in zip(alone, other, strict=True):
            assert a.tobytes() == b.tobytes()
