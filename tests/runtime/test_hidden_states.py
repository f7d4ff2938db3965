"""Hidden states are transformers', the same bits in any chunks and company, and refused where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.plugins.tvm.section import KernelsName
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.hidden_taps import hidden_taps
from enginewright.runtime.tasks.hidden_states import HiddenStates
from enginewright.runtime.tasks.logits import Logits
from tests.conftest import make_tiny_model
from tests.triton_interpreter import interpreter as interpreter

PROMPT = np.random.default_rng(3).integers(3, 256, 75).tolist()


def wanted(model: PreTrainedModel, layers: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    return np.stack([states[layer][0].float().numpy() for layer in layers])


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2"])
def test_they_are_those_of_transformers(
    family: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """They are within 2e-5 of the largest: sums of floats in another order."""
    model = tiny_model(family).eval()
    export(model, tmp_path / "bundle", recipe="f32", targets=["cpu"])
    layers = [0, 1, 2, -1]
    with LLM(tmp_path / "bundle", max_requests=4) as llm:
        states = llm.hidden_states(PROMPT, layers)
        np.testing.assert_array_equal(states[2], states[3])
        assert states.dtype == np.float32 and states.shape == (4, 75, 64)
        expected = wanted(model, layers)
        np.testing.assert_allclose(states, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
        np.testing.assert_array_equal(llm.hidden_states(PROMPT), states[3:])
        np.testing.assert_array_equal(llm.hidden_states(PROMPT, [1, 0]), states[[1, 0]])
        # In company: others decode, are found in the cache, and want logits or other layers.
        llm.generate([PROMPT], SamplingParams(max_tokens=1))
        tasks = (HiddenStates(PROMPT, (1,)), HiddenStates(PROMPT[:40], (2, 0)), Logits(PROMPT))
        prepared = [llm.prepare(task) for task in tasks]
        answer = Generation(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1))
        for request in (*(one.requests[0] for one in prepared), answer):
            llm.engine.add_request(request)
        while llm.engine.has_work():
            llm.engine.step()
        values = [one.result() for one in prepared]
        np.testing.assert_array_equal(values[0], states[1:2])
        np.testing.assert_array_equal(values[1], states[[2, 0], :40])
        np.testing.assert_array_equal(values[2], llm.logits(PROMPT))
        plain = llm.generate([PROMPT], SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1))[0]
        assert plain.token_ids == answer.to_output().token_ids
    for chunk, threads in ((1, 1), (7, 2), (32, 1)):
        with LLM(tmp_path / "bundle", prefill_chunk=chunk, threads=threads) as llm:
            np.testing.assert_array_equal(llm.hidden_states(PROMPT, layers), states)


@pytest.mark.parametrize("kernels", [pytest.param(None, marks=pytest.mark.matrix), "enginewright"])
def test_those_of_the_tvm_target(kernels: KernelsName | None, tmp_path: Path) -> None:
    """They are within 2e-5 of the largest, as the cpu target's are; each row's bits are the same in any batch."""
    model = make_tiny_model("Llama").eval()
    recipe = load_recipe("f32").model_copy(update={"tvm": TvmOptions(levels=("v3",), kernels=kernels)})
    export(model, tmp_path / "bundle", recipe=recipe, targets=["tvm"])
    layers = [0, 1, 2]
    with LLM(tmp_path / "bundle", target="tvm", trust="code", threads=2) as llm:
        states = llm.hidden_states(PROMPT, layers)
        expected = wanted(model, layers)
        np.testing.assert_allclose(states, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
        np.testing.assert_array_equal(llm.hidden_states(PROMPT), states[2:])
        logits = llm.logits(PROMPT)
        prepared = llm.prepare(HiddenStates(PROMPT[:40], (2, 0)))
        answer = Generation(PROMPT, SamplingParams(max_tokens=9, logprobs=1))
        for request in (prepared.requests[0], answer):
            llm.engine.add_request(request)
        while llm.engine.has_work():
            llm.engine.step()
        np.testing.assert_array_equal(prepared.result(), states[[2, 0], :40])
        np.testing.assert_array_equal(llm.logits(PROMPT), logits)
    with LLM(tmp_path / "bundle", target="tvm", trust="code", threads=1, prefill_chunk=7) as llm:
        np.testing.assert_array_equal(llm.hidden_states(PROMPT, layers), states)


def cuda_states(bundle: Path) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of a prompt, and of its beginning while another request is answered."""
    with LLM(bundle, target="cuda", trust="code", context=64, max_requests=2, memory="1MiB") as llm:
        states, short = llm.hidden_states(PROMPT[:7], [0, 1, 2]), llm.prepare(HiddenStates(PROMPT[:3], (2, 0)))
        for request in (Generation(PROMPT[:2], SamplingParams(max_tokens=2, logprobs=1)), short.requests[0]):
            llm.engine.add_request(request)
        while llm.engine.has_work():
            llm.engine.step()
        return states, short.result()


@pytest.mark.matrix
def test_those_of_the_cuda_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: ProcessPoolExecutor
) -> None:
    """Triton's interpreter runs its kernels. All are within 2e-5 of the largest: products are torch's, whose sums have
    another order for each number of rows. A step has room for four rows, so that it is cut."""
    model = make_tiny_model("Llama").eval()
    engines = EnginesSection(dtype="f32", requests=4, chunk=32)
    monkeypatch.setattr(CudaEmitter, "_kernels", lambda *_: {})  # interpreted ones aren't compiled
    export(model, tmp_path / "b", recipe=load_recipe("f32").model_copy(update={"engines": engines}), targets=["cuda"])
    states, short = interpreter.submit(cuda_states, tmp_path / "b").result()
    expected = wanted(model, [0, 1, 2])[:, :7]
    tolerance = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(states, expected, atol=tolerance, rtol=0)
    np.testing.assert_allclose(short, expected[[2, 0], :3], atol=tolerance, rtol=0)


def test_what_a_program_does_not_have_is_refused(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model("Llama").eval()
    export(model, tmp_path / "int8", recipe="int8", targets=["cpu", "onnx"])
    with LLM(tmp_path / "int8") as llm:
        states = llm.hidden_states(PROMPT, [0, 1])
        expected = wanted(model, [0, 1])
        assert np.abs(states - expected).max() < 0.1 * np.abs(expected).max()  # 8 bits
        with pytest.raises(RequestError, match="layers: hidden state -1 isn't a value of this program"):
            llm.hidden_states(PROMPT)
        for wrong in (3, -4):
            with pytest.raises(RequestError, match=f"layers: {wrong} is out of range"):
                llm.hidden_states(PROMPT, [wrong])
        with pytest.raises(RequestError, match="isn't a list of numbers"):
            llm.hidden_states(PROMPT, [])
        with pytest.raises(RequestError, match="prompt: it is empty"):
            llm.hidden_states([], [0])
    with (
        LLM(tmp_path / "int8", target="onnx") as llm,
        pytest.raises(RequestError, match="hidden_states: target 'onnx' gives none"),
    ):
        llm.hidden_states(PROMPT)


def test_a_program_that_never_writes_its_logits_is_refused(tiny_bundle: Path) -> None:
    program = Bundle.open(tiny_bundle).program("cpu")
    elsewhere = {"logits": program.outputs["logits"].model_copy(update={"name": "nothing"})}
    with pytest.raises(BundleError, match="no step writes 'nothing', its logits"):
        hidden_taps(program.model_copy(update={"outputs": elsewhere}))
