"""Mixtures of experts: a request's logits are bit-for-bit the same whatever the batch, though it fills experts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export

from .test_families_experts import make
from .test_invariance import WAYS, run


@pytest.mark.parametrize(("chunk", "together", "threads"), WAYS)
@pytest.mark.parametrize("recipe", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "DeepseekV3"])
def test_tiny_models(
    family: str,
    recipe: str,
    chunk: int,
    together: bool,
    threads: int,
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bundle = tmp_path_factory.getbasetemp() / f"{family}-{recipe}.bundle"
    if not bundle.exists():
        export(make(tiny_model, family), bundle, recipe=recipe)
    rng = np.random.default_rng(3)
    # Lengths around the tile of 32 keys, where attention's order could slip; experts get other rows in each batch.
    texts = [rng.integers(3, 256, n).tolist() for n in (1, 2, 31, 33, 100, 257)]
    if chunk == 1:
        texts = [t[:40] for t in texts]
    alone = run(bundle, texts, chunk=4096, together=False, threads=1)
    other = run(bundle, texts, chunk=chunk, together=together, threads=threads)
    for a, b in zip(alone, other, strict=True):
        assert a.tobytes() == b.tobytes()
