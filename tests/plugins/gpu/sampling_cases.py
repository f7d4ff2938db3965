"""Sampling's kernels on the driver in memory, interpreted: for processes in which Triton interprets."""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginewright.plugins.engines import library as tensorrt_library
from enginewright.plugins.gpu.call import DeviceArray
from enginewright.plugins.gpu.carried_sampling import GpuSampler
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, files_of
from enginewright.plugins.gpu.cuda_driver import Argument
from enginewright.plugins.gpu.sampling import each_sampling_call
from enginewright.plugins.gpu.specs import SAMPLING_KERNELS, KernelSpec, kernel_function
from enginewright.plugins.native.sampling import RowSampler
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import SamplingBatch
from enginewright.runtime.shared.errors import EnginewrightError, RequestError
from tests.plugins.engines import packed_bundles, test_slots, tiny_paged
from tests.plugins.engines.fake_tensorrt import fake_tensorrt
from tests.plugins.steps import tiny_onnx as tiny

from .fake_driver import ADA, KERNELS, FakeCuda, FakeDevice
from .step_cases import FewMasks

_TYPES = {"*fp32": "float32", "*i32": "int32", "*i64": "int64", "*fp64": "float64"}
NO_KERNELS = "on the CPU: the bundle has no kernels for it on 8.9"


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """In the place of Triton's: code is what to interpret."""
    code = json.dumps({"arguments": spec.arguments, "constants": dict(spec.constants)})
    return CompiledKernel(spec, spec.kernel, "", code.encode(), 0, "none")


def kernel_files(vocab: int, capability: int, without: Sequence[str] = ()) -> dict[str, bytes]:
    """The files that an export writes; ``without`` some kernels, as an older one."""
    calls = each_sampling_call(DeviceArray(0, np.dtype(np.float32), (4, vocab)))
    files = {}
    for spec in {call.spec(capability) for call in calls if call.kernel not in without}:
        files |= files_of(compile_kernel(spec))
    return files


def interpret(entry: str) -> Any:
    def run(device: FakeDevice, code: bytes, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        fields, by_request = json.loads(code), {}
        for (name, of), value in zip(fields["arguments"], arguments, strict=True):
            if of in _TYPES:
                by_request[name] = torch.from_numpy(device.view(int(value), np.dtype(_TYPES[of]), (1,)))
            else:
                by_request[name] = int(value)
        kernel_function(entry)[grid](**by_request, **fields["constants"])  # type: ignore[arg-type]

    return run


def know_kernels() -> None:
    """Launches of sampling's kernels are interpreted, whoever made others known before."""
    tiny_paged.know_kernels()
    KERNELS.update({name: interpret(name) for name in SAMPLING_KERNELS})


class RefusingDevice(FakeDevice):
    """Whose driver loads no kernel of sampling."""

    def load_kernel(self, code: bytes, entry: str, shared_memory: int) -> int:
        if entry in SAMPLING_KERNELS:
            raise EnginewrightError("CUDA: cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU", hint="none")
        return super().load_kernel(code, entry, shared_memory)


@dataclass
class Ran:
    """The results of one bundle: tokens of each request, logprobs of some, the place of sampling, and the largest
    download of requests without logprobs.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    top: list[list[int]]
    where: str
    downloaded: int


def install(form: str, refuses: bool) -> FakeCuda:
    know_kernels()
    cuda = FakeCuda((ADA,))
    if form == "paged":
        profiles: Any = {0: (packed_bundles.DECODE,), 1: (packed_bundles.PREFILL,)}
        module = fake_tensorrt(cuda, profiles, name="tensorrt", version="11.4.0.106")
    else:
        slots = form == "slots"
        module = fake_tensorrt(cuda, test_slots.PROFILES if slots else packed_bundles.SIZES, graphs=not slots)
    module.__spec__ = ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
    tensorrt_library.load_cuda = lambda: cuda  # type: ignore[assignment]
    if refuses:
        cuda.open = lambda gpu: cuda.devices.append(RefusingDevice(gpu)) or cuda.devices[-1]  # type: ignore
    return cuda


def write(form: str, folder: Path, kernels: dict[str, bytes]) -> Path:
    if form == "paged":
        return packed_bundles.write_paged(folder / "b", kernels=kernels)
    if form == "segments":
        return packed_bundles.write_segments(folder / "b", kernels)
    return test_slots.write_bundle(folder / "b", tiny.make_model().SerializeToString(), kernels=kernels)


def run(form: str, capability: int | None, params: list[dict[str, Any]], *, refuses: bool = False) -> dict[str, Any]:
    """A bundle of ``form`` with sampling's kernels for a capability, or none."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, tiny.V, n).tolist() for n in (3, 11, 5, 2, 7)]
    with tempfile.TemporaryDirectory() as folder:
        kernels = {} if capability is None else kernel_files(tiny.V, capability)
        path = write(form, Path(folder), kernels)
        cuda = install(form, refuses)
        requests = [SamplingParams(max_tokens=4, ignore_eos=True, **p) for p in params]
        with LLM(path, trust="code") as llm:
            device = cuda.devices[-1]
            device.downloaded.clear()
            tokens = [list(r.token_ids) for r in llm.generate(prompts[: len(params)], requests)]
            downloaded = max(device.downloaded)
            params_of_logprobs = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.9, seed=5, logprobs=3)
            (result,) = llm.generate(prompts[0], params_of_logprobs)
            where = str(llm.info()["executor"]["sampling"])
        token_logprobs = result.logprobs or []
        logprobs = [[p.logprob, *(logprob for _, logprob in p.top)] for p in token_logprobs]
        top = [[p.token_id, *(token for token, _ in p.top)] for p in token_logprobs]
    return asdict(Ran(tokens, logprobs, top, where, downloaded))


def refused(form: str, params: list[dict[str, Any]], without: Sequence[str]) -> list[str]:
    """The answers or errors of requests to a bundle with older kernels; then the place of sampling."""
    with tempfile.TemporaryDirectory() as folder:
        path, messages = write(form, Path(folder), kernel_files(tiny.V, 80, without)), []
        install(form, False)
        with LLM(path, trust="code") as llm:
            for one in params:
                try:
                    (result,) = llm.generate([[3, 1]], SamplingParams(max_tokens=2, ignore_eos=True, **one))
                    messages.append(f"{len(result.token_ids)} tokens")
                except RequestError as e:
                    messages.append(e.message)
            messages.append(str(llm.info()["executor"]["sampling"]))
    return messages


def drawn(vocab: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Rows of a sampler that takes four at once, whose lists of seen tokens grow, most of them with masks: its tokens,
    and the host's.
    """
    know_kernels()
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in kernel_files(vocab, 80).items():
            Path(folder, name).write_bytes(data)
        device, results = FakeDevice(ADA), []
        sampler = GpuSampler(device, Path(folder), 80, 3, vocab)
        for rows, seen in ((1, 3), (9, 40), (4, 400)):
            logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
            if rows == 9:
                logits[4], logits[7, 3] = -np.inf, np.nan
            options = SamplingBatch(
                temperature=rng.choice([0, 0.8], rows).astype(np.float32),
                top_k=rng.choice([0, 5], rows).astype(np.int32),
                top_p=rng.choice([1, 0.8], rows).astype(np.float32),
                min_p=rng.choice([0, 0.1], rows).astype(np.float32),
                seed=rng.integers(0, 2**63, rows).astype(np.uint64),
                counter=rng.integers(0, 100, rows).astype(np.uint64),
                repetition_penalty=rng.choice([1, 1.4], rows).astype(np.float32),
                seen_start=np.linspace(0, seen, rows + 1).astype(np.int32),
                seen=rng.integers(0, vocab, seen).astype(np.int32),
                typical_p=rng.choice([1, 0.6], rows).astype(np.float32),
                presence_penalty=rng.choice([0, 1.5], rows).astype(np.float32),
                counted_start=np.arange(0, 2 * rows + 1, 2).astype(np.int32),
                counted=np.tile([5, 2], rows).astype(np.int32),
                counts=np.ones(2 * rows, np.int32),
                allowed_start=np.array([0] * rows + [200], np.int32),  # of the last row
                allowed=np.arange(200).astype(np.int32),
            )
            bits = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32)
            mask_rows = np.where(np.arange(rows) % 3 == 1, -1, rng.permutation(rows)).astype(np.int32)
            options.masks = FewMasks(mask_rows, np.zeros_like(bits), bits)  # type: ignore[assignment]
            address = device.allocate(logits.nbytes)
            device.upload(address, logits)
            expected = RowSampler(1).sample(logits, options).tokens
            assert expected is not None
            results.append((sampler.draw(address, options).tolist(), expected.tolist()))
            assert ctypes.string_at(address, logits.nbytes) == logits.tobytes()  # what it drew from is as it was
    return results
