"""The Triton kernels on a GPU against the references in torch there: what the interpreter has shown, and bfloat16.

Not run yet: no GPU was at hand.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from tests.plugins.gpu import cases
from tests.plugins.gpu.cases import Case

# The reference sums in float32. Results of up to 4, and weights, are rounded to 8 or 11 bits; those of float32 aren't.
TOLERANCE = {"f32": 3e-5, "f16": 4e-3, "bf16": 3e-2}
GROUPS = [(4, 4), (9, 3), (8, 2), (8, 1)]  # 1, 3, 4 and 8 query heads a key/value head
DECODE = [((1, 1, 1), (0, 1000, 4000)), ((1, 1), (32767, 8191))]
PREFILL = [((5, 1, 1000), (0, 3000, 500)), ((2048,), (0,))]


@pytest.mark.parametrize("cache", ["", "int8", "fp8"])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_attention_is_the_reference(dtype, group, size, cache):
    for (new, past), window in itertools.product((*DECODE, *PREFILL), (0, 1000)):
        case = Case(new, past, *group, size, dtype=dtype, cache=cache, window=window)
        assert cases.difference(case, "cuda") < TOLERANCE[dtype], case


@pytest.mark.parametrize("cache", ["", "int8", "fp8"])
@pytest.mark.parametrize("workers", [None, 1])
def test_a_work_list_gives_the_same_bits(workers, cache):
    for (new, past), window in itertools.product(DECODE, (0, 1000)):
        same, _, _ = cases.listed(
            Case(new, past, *GROUPS[2], 128, dtype="bf16", cache=cache, window=window), workers, "cuda"
        )
        assert same


def test_a_graph_with_memory_that_is_given():
    """Captured once, replayed for contexts that have grown since: nothing in it was decided by their lengths."""
    case = Case((1, 1, 1), (700, 100, 3000), *GROUPS[2], 128, dtype="bf16")
    step = cases.step_of(case, "cuda")
    blocks = step.table.shape[1]
    out = torch.empty_like(step.q)
    scratch = torch.empty(1 << 23, dtype=torch.uint8, device="cuda")
    work = torch.empty(cases.work_size(3, cases.splits_of(blocks, 32)), dtype=torch.int32, device="cuda")
    lengths = step.kv_len.clone()

    def run() -> None:
        cases.decode_work(lengths, blocks, 32, out=work)
        step.attend(cases.AttentionParts(scratch, work=work), lengths, out)

    lengths.fill_(1)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    lengths.copy_(step.kv_len)
    graph.replay()
    assert (out.float() - step.reference().float()).abs().max() < TOLERANCE["bf16"]


@pytest.mark.parametrize("step", [*DECODE, *PREFILL], ids=str)
def test_softcap_sinks_and_slopes(step):
    case = Case(*step, size=128, dtype="bf16", softcap=30.0, sinks=True, slopes=True)
    assert cases.difference(case, "cuda") < TOLERANCE["bf16"]


@pytest.mark.parametrize("step", [*DECODE, *PREFILL], ids=str)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_company_changes_no_bit(dtype, step):
    assert cases.alone_and_together(Case(*step, dtype=dtype, split_keys=512), "cuda")


def test_the_interpreters_cases(capability):
    """The cases that tests/plugins/gpu runs in the interpreter."""
    from tests.plugins.gpu.test_attention_kernels import SMALL

    for case in SMALL:
        assert cases.difference(case, "cuda") < TOLERANCE[case.dtype], case


@pytest.mark.parametrize("cache", ["same", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(5, 3, 80), (1000, 8, 128)])
def test_the_cache_holds_what_the_reference_writes(cache, dtype, tokens, heads, size):
    results = cases.write(dtype, dtype if cache == "same" else cache, tokens, heads, size, "cuda")
    want, got = results[: len(results) // 2], results[len(results) // 2 :]
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        if cache == "same" or i >= 2:  # floats, and scales: one division, rounded correctly
            assert torch.equal(w, g)
        else:  # a product that falls between two codes may be rounded once less
            step = 1.0 if cache == "int8" else 32.0
            assert (w - g).abs().max() <= step and (w != g).float().mean() < 1e-3
