"""Tokens drawn on the GPU in TensorRT's executors are those that the host draws, and only ids come back.

Sampling's kernels are interpreted; engines, attention and the driver are in memory.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.gpu.carried_sampling import GpuSampler
from tests.plugins.gpu import sampling_cases as cases
from tests.plugins.gpu.fake_driver import ADA, FakeDevice
from tests.plugins.steps import tiny_onnx as tiny
from tests.triton_interpreter import interpreter as interpreter

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 0, "repetition_penalty": 2.0},
]
LISTS: list[dict[str, Any]] = [
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 4, "logit_bias": {3: 4.0, 5: -float("inf")}, "frequency_penalty": 2},
    {"temperature": 1.1, "seed": 5, "allowed_token_ids": [1, 2, 9, 11], "typical_p": 0.7},
    {"temperature": 1.0, "seed": 6, "typical_p": 0.3, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"temperature": 0, "bad_words": [[7], [4, 2]], "min_tokens": 2},
]
LOGPROBS = 2e-6
"""The difference of floats around 5, summed in another order."""


@pytest.mark.parametrize(
    ("form", "params"), [("paged", PARAMS), ("segments", LISTS), ("slots", PARAMS), ("paged", LISTS), ("slots", LISTS)]
)
def test_tokens_are_the_host_s(form: str, params: list[dict[str, Any]], interpreter: ProcessPoolExecutor) -> None:
    host = interpreter.submit(cases.run, form, None, params).result()
    there = interpreter.submit(cases.run, form, 80, params).result()  # code for 8.0, on 8.9
    assert there["tokens"] == host["tokens"]
    assert (host["where"], there["where"]) == (cases.NO_KERNELS, "on the GPU")
    assert there["downloaded"] <= 4 * len(params) < 4 * tiny.V <= host["downloaded"]  # only ids
    assert there["top"] == host["top"] and len(there["top"]) == 3
    np.testing.assert_allclose(there["logprobs"], host["logprobs"], atol=LOGPROBS)


@pytest.mark.parametrize("form", ["paged", "slots"])
def test_a_driver_that_refuses_the_kernels(form: str, interpreter: ProcessPoolExecutor) -> None:
    ran = interpreter.submit(cases.run, form, 80, PARAMS[:1], refuses=True).result()
    assert ran["where"].startswith("on the CPU: ") and "CUDA_ERROR_NO_BINARY_FOR_GPU" in ran["where"]
    assert ran["tokens"] == interpreter.submit(cases.run, form, None, PARAMS[:1]).result()["tokens"]


def test_kernels_of_another_architecture_are_not_taken(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(cases.run, "slots", 90, PARAMS[:1]).result()["where"] == cases.NO_KERNELS


@pytest.mark.parametrize("form", ["paged", "segments", "slots"])
def test_an_older_bundle_refuses_what_it_has_no_kernels_for(form: str, interpreter: ProcessPoolExecutor) -> None:
    requests = [*LISTS, {"temperature": 1.0, "seed": 1, "top_k": 5, "repetition_penalty": 1.2}]
    messages = interpreter.submit(cases.refused, form, requests, ("edit", "spread", "nearest")).result()
    names = ["frequency_penalty", "frequency_penalty", "allowed_token_ids", "typical_p", "bad_words"]
    reason = ": this target draws tokens on its own device, and the bundle has no kernel for it"
    assert messages == [*(f"{name}{reason}" for name in names), "2 tokens", "on the GPU"]
    messages = interpreter.submit(cases.refused, form, requests[:1] + requests[3:4], ("nearest",)).result()
    assert messages == ["2 tokens", f"typical_p{reason}", "on the GPU"]


def test_an_older_bundle_takes_lists_instead_of_masks(tmp_path: Path) -> None:
    for without, masks in (((), True), (("mask",), False)):
        folder = tmp_path / str(masks)
        folder.mkdir()
        for name, data in cases.kernel_files(300, 80, without).items():
            (folder / name).write_bytes(data)
        sampler = GpuSampler(FakeDevice(ADA), folder, 80, 3, 300)
        assert (sampler.masks, sampler.lacks) == (masks, ("top_n_sigma", "xtc_probability"))


@pytest.mark.parametrize(("vocab", "seed"), [(300, 0), (1100, 1)])  # of one piece, and of two
def test_more_rows_than_at_once(vocab: int, seed: int, interpreter: ProcessPoolExecutor) -> None:
    for ours, expected in interpreter.submit(cases.drawn, vocab, seed).result():
        assert ours == expected
