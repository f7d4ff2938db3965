"""The part of the adaptive context's benchmark that says how much attention chosen blocks have."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """It as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import adaptive_context

    module: ModuleType = adaptive_context
    return module


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2)])
def test_attention_on_chosen_blocks_is_counted(benchmark: ModuleType, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    q, k = torch.randn(heads, 6, 16, generator=generator), torch.randn(kv_heads, 640, 16, generator=generator)
    places = torch.tensor([400, 500, 600, 601, 602, 639])
    fact = range(100, 120)  # in block 3, of which one key is what the last three are after
    k[:, 110] = 6 * q[:: heads // kv_heads, -1]

    def on(way: str, best: int) -> tuple[torch.Tensor, tuple[float, float]]:
        result: tuple[torch.Tensor, tuple[float, float]]
        result = benchmark.on_chosen(q, k, places, best, benchmark.WAYS[way], fact, 1)
        return result

    for way in benchmark.WAYS:
        every, (seen, all_of_it) = on(way, 20)
        torch.testing.assert_close(every, torch.ones(heads, 6))
        assert seen == pytest.approx(all_of_it) and all_of_it > 0.9 * kv_heads
        some, _ = on(way, 2)
        assert bool((some < 1).any()) and bool((some <= every + 1e-6).all())
    each = heads // kv_heads  # each head that shares a choice has a best block
    best, (seen, all_of_it) = on("the largest score itself", each)
    assert seen == pytest.approx(all_of_it)
    assert best.mean() > on("the mean", each)[0].mean()
