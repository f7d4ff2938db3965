"""Kernels that were compiled ahead, launched as TensorRT's plugins say, give what the launchers give.

Not run yet: no GPU was at hand.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from enginewright.plugins.gpu.choose_tiles import compile_attention
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, compile_kernel
from enginewright.plugins.gpu.plugin_kernels import attention_launch, combine_launch, plugin_attention, write_launch
from enginewright.plugins.gpu.specs import AttentionShape, combine_spec, splits_of, write_spec
from tests.gpu import driver
from tests.plugins.gpu import cases
from tests.plugins.gpu.cases import Case, step_of

TOLERANCE = 2e-2  # of bfloat16, when tiles differ


def code_of(kernel: CompiledKernel, form: str) -> bytes:
    return kernel.cubin if form == "cubin" else kernel.ptx.encode() + b"\0"


@pytest.mark.parametrize("form", ["cubin", "ptx"])
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_attention(form, cache, capability):
    for new, past, split_keys in (((5, 1, 300), (0, 30, 70), 0), ((1, 1, 1), (0, 3000, 600), 512)):
        case = Case(new, past, size=64, dtype="bf16", cache=cache)
        step = step_of(case, "cuda")
        shape = AttentionShape(9, 3, 64, 64, 32, "bf16", cache, 64**-0.5)  # type: ignore[arg-type]
        requests, blocks = step.table.shape
        tokens = step.q.shape[0]
        q = step.q.contiguous()
        splits = splits_of(blocks, 32, split_keys) if split_keys else 1
        out = torch.full((tokens, 9, splits, 64), float("nan"), device="cuda")
        lse = torch.full((tokens, 9, splits), float("nan"), device="cuda")
        result = torch.empty_like(q)
        names = ("k_cache", "v_cache", "k_scales", "v_scales")
        tensors = {
            **dict(zip(names, step.caches, strict=False)),
            **{"q": q, "block_table": step.table, "q_start": step.q_start, "kv_len": step.kv_len},
            **{"sinks": lse, "slopes": lse, "out": out if split_keys else result, "lse": lse},
        }
        for kernel in (
            *plugin_attention(shape, capability, split_keys),
            *compile_attention(shape, capability, split_keys=split_keys),  # up to all of the shared memory
        ):
            run = attention_launch(kernel, shape, tokens, requests, blocks, len(step.caches[0]))
            driver.launch(kernel, code_of(kernel, form), run, tensors)
            if split_keys:
                combine = compile_kernel(combine_spec(shape, capability))
                parts = {"parts": out, "lse": lse, "out": result}
                driver.launch(combine, code_of(combine, form), combine_launch(combine, 9, tokens, splits), parts)
            assert (result.float() - step.reference().float()).abs().max() < TOLERANCE


@pytest.mark.parametrize("cache", ["bf16", "int8"])
def test_write(cache, capability):
    stored = torch.int8 if cache == "int8" else torch.bfloat16
    k, v = torch.randn(40, 3, 64, device="cuda").bfloat16(), torch.randn(40, 3, 64, device="cuda").bfloat16()
    slots = torch.randperm(96, device="cuda")[:40].int()
    caches, again = ([torch.zeros(3, 32, 3, 64, dtype=stored, device="cuda") for _ in range(2)] for _ in range(2))
    scales, scales_again = ([torch.zeros(3, 32, 3, device="cuda") for _ in range(2)] for _ in range(2))
    cases.write_heads(*caches, k, v, slots, *(scales if cache == "int8" else ()))
    shape = AttentionShape(3, 3, 64, 64, 32, "bf16", cache, 1.0)  # type: ignore[arg-type]
    kernel = compile_kernel(write_spec(shape, capability))
    tensors = {"k": k, "v": v, "slots": slots}
    for suffix in ("", "_before"):
        tensors |= {f"k_cache{suffix}": again[0], f"v_cache{suffix}": again[1]}
        tensors |= {f"k_scales{suffix}": scales_again[0], f"v_scales{suffix}": scales_again[1]}
    driver.launch(kernel, kernel.cubin, write_launch(kernel, shape, 40, 3), tensors)
    for a, b in zip((*caches, *scales), (*again, *scales_again), strict=True):
        assert torch.equal(a, b)
