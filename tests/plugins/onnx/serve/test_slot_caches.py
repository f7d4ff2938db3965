"""Slots grow and shrink with the requests, and keep their tokens; what is bound is the caches' own memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginewright.plugins.onnx.serve import slot_caches
from enginewright.plugins.onnx.serve.executor import OnnxExecutor
from enginewright.plugins.onnx.serve.session import PROVIDERS, load_onnxruntime, open_session
from enginewright.plugins.onnx.serve.slot_caches import SlotCaches
from enginewright.plugins.steps.linear_io import linear_io
from enginewright.plugins.steps.slots import SlotRun
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import BundleError, CapacityError
from tests.plugins.steps import tiny_onnx as tiny


def open_caches(bundle: Path, slots: int = 3, capacity: int = tiny.CONTEXT + 1) -> SlotCaches:
    module, io = load_onnxruntime(), linear_io(Bundle.open(bundle), "onnx")
    path = bundle / "model.onnx"
    return SlotCaches(
        open_session(path, PROVIDERS["cpu"], 1, module),
        io,
        path,
        slots=slots,
        capacity=capacity,
        vocab=tiny.V,
        device="cpu",
        module=module,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_bundle(tmp_path_factory.mktemp("caches") / "tiny.bundle")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots begin with 8 places, and grow by 8."""
    monkeypatch.setattr(slot_caches, "LENGTH_STEP", 8)


def prompt_run(first: int, tokens: list[int], start: int = 0) -> SlotRun:
    """One request's next tokens, with the logits of the last."""
    count = len(tokens)
    return SlotRun(
        first,
        np.array([tokens], np.int64),
        np.arange(start, start + count)[None].astype(np.int64),
        np.array([count - 1], np.int64),
        np.array([0], np.int64),
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_slots_that_are_forgotten_are_zero_and_no_others(device: str) -> None:
    """A device's memory is in onnxruntime; its memory on the CPU stands in for that here."""

    class Module:
        class OrtValue:
            @staticmethod
            def ortvalue_from_numpy(array: np.ndarray, name: str, index: int) -> object:
                assert (name, index) == ("cuda", 0)
                return load_onnxruntime().OrtValue.ortvalue_from_numpy(array, "cpu", 0)

    memory = slot_caches._Memory("past", "present", (4, 2, 3, 5), "f32", device, Module)  # type: ignore[arg-type]
    address = memory.address(0)

    def held() -> np.ndarray:
        memory_held = memory._kept if device == "cpu" else memory._kept.numpy()
        return np.asarray(memory_held).view(np.float32)

    if device == "cpu":
        memory._kept.view(np.float32)[:] = np.nan
    else:
        memory._kept.update_inplace(np.full((4, 2, 3, 5), np.nan, np.float32).view(np.uint8))
    memory.forget(np.array([1, 3], np.int32))
    assert np.isnan(held()).all(axis=(1, 2, 3)).tolist() == [True, False, True, False]
    assert (held()[[1, 3]] == 0).all()
    assert memory.address(0) == address


@pytest.mark.usefixtures("short")
def test_slots_grow_and_shrink(bundle: Path) -> None:
    caches = open_caches(bundle)
    text = [int(i) for i in np.random.default_rng(0).integers(0, tiny.V, 39)]
    slot = np.array([1], np.int32)

    def feed(tokens: list[int], start: int) -> None:
        caches.fit(slot, np.array([start + len(tokens)], np.int32))
        logits = caches.run(prompt_run(1, tokens, start))
        expected = tiny.reference(text[: start + len(tokens)] if start else tokens)[-1]
        np.testing.assert_allclose(logits[0], expected, atol=1e-4)  # rounding of logits up to 35

    lengths = []
    for start, end in ((0, 7), (7, 8), (8, 15), (15, 16), (16, 39)):
        feed(text[start:end], start)
        lengths.append(caches.length)
    assert lengths == [8, 16, 16, 24, 40]  # one place is nobody's
    feed(text[:20], 0)
    assert caches.length == 40  # 24 would do: no reason to copy
    feed(text[:5], 0)
    assert caches.length == 8


def test_lengths(bundle: Path) -> None:
    """Never more than a quarter too long, from some length on, and never longer than slots are."""
    caches = open_caches(bundle, capacity=5000)
    lengths = [caches._length_for(needed) for needed in range(1, 5001)]
    assert lengths[0] == slot_caches.LENGTH_STEP
    assert all(needed <= length <= 5000 for needed, length in enumerate(lengths, 1))
    assert all(length <= 1.25 * needed for needed, length in enumerate(lengths, 1) if needed >= 256)
    assert len(set(lengths)) < 25


@pytest.mark.usefixtures("short")
def test_others_keep_their_tokens(bundle: Path) -> None:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, tiny.V, n).tolist() for n in (3, 30, 2, 6, 14, 1, 33, 4)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 2, 5, 9, 20, 4, 3, 12)]
    expected = [tuple(tiny.greedy(p, s.max_tokens)) for p, s in zip(prompts, params, strict=True)]
    with LLM(bundle, threads=1, max_requests=3, prefill_chunk=5) as llm:
        assert [r.token_ids for r in llm.generate(prompts, params)] == expected
        assert [r.token_ids for r in llm.generate(prompts[::-1], params[::-1])] == expected[::-1]


def test_slots_that_nobody_had_are_not_touched(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    resize = slot_caches._Memory.resize
    monkeypatch.setattr(slot_caches, "LENGTH_STEP", 8)
    monkeypatch.setattr(
        slot_caches._Memory, "resize", lambda self, *sizes: (copied.append(sizes), resize(self, *sizes))
    )
    caches = open_caches(bundle, slots=50)
    caches.fit(np.array([2, 4], np.int32), np.array([9, 3], np.int32))
    assert copied == [(16, [(2, 9), (4, 3)])] * 4


def test_what_is_bound_is_kept(bundle: Path) -> None:
    """A second run of the same sizes takes the same binding, but reads the new tokens."""
    caches = open_caches(bundle)
    texts = [[1, 2, 3], [4, 5, 6]]
    for text in texts:
        logits = caches.run(prompt_run(2, text))
        np.testing.assert_allclose(logits[0], tiny.reference(text)[-1], atol=1e-4)
    assert len(caches._bindings) == 1
    for length in range(1, 30):
        caches.run(prompt_run(0, [1] * length))
    assert len(caches._bindings) == slot_caches.MOST_BINDINGS


def test_a_run_that_wants_no_logits(bundle: Path) -> None:
    caches = open_caches(bundle)
    run = prompt_run(0, [7, 8, 9])
    nothing = np.zeros(0, np.int64)
    assert caches.run(SlotRun(0, run.ids, run.places, nothing, nothing)).shape == (0, tiny.V)
    np.testing.assert_allclose(caches.run(prompt_run(0, [10], 3))[0], tiny.reference([7, 8, 9, 10])[-1], atol=1e-4)


def test_a_file_for_slots_of_one_size(tmp_path: Path) -> None:
    model = tiny.make_model()
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present", "mask")):
            dims = value.type.tensor_type.shape.dim
            dims[3 if value.name.startswith("mask") else 2].dim_value = 20
    onnx.checker.check_model(model)
    path = tiny.write_bundle(tmp_path / "fixed.bundle", model=model.SerializeToString())
    caches = open_caches(path, capacity=20)
    assert caches.length == 20
    with pytest.raises(
        CapacityError, match=r"made for slots of 20 tokens, and 41 are asked for\n.*context of 19 tokens"
    ):
        open_caches(path)
    with LLM(path, context=19, threads=1) as llm:
        result = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    assert list(result.token_ids) == tiny.greedy([1, 2, 3], 8)


def test_a_file_without_a_cache(tmp_path: Path) -> None:
    model = tiny.make_model()
    del model.graph.output[1]
    path = tiny.write_bundle(tmp_path / "bad.bundle", model=model.SerializeToString())
    with pytest.raises(BundleError, match=r"model\.onnx: .*io section says: it lacks present_key_0"):
        OnnxExecutor(Bundle.open(path), {"full": 1, "window": 1}, 9, threads=1)


def test_no_memory(bundle: Path) -> None:
    with pytest.raises(CapacityError, match=r"memory: \d+ slots of 41 tokens don't fit into it"):
        open_caches(bundle, slots=1 << 45)


@pytest.mark.usefixtures("short")
def test_no_memory_to_grow(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half grown caches would be of two lengths: they go back, and serve who comes next."""
    caches = open_caches(bundle)
    resize, calls = slot_caches._Memory.resize, iter(range(100))

    def fail_once(self: slot_caches._Memory, length: int, held: Iterable[tuple[int, int]]) -> None:
        if next(calls) == 2:
            raise CapacityError("memory: no")
        resize(self, length, held)

    monkeypatch.setattr(slot_caches._Memory, "resize", fail_once)
    with pytest.raises(CapacityError, match="memory: no"):
        caches.fit(np.array([0], np.int32), np.array([9], np.int32))
    caches.fit(np.array([0], np.int32), np.array([3], np.int32))
    assert caches.length == 8
    np.testing.assert_allclose(caches.run(prompt_run(0, [7, 8, 9]))[0], tiny.reference([7, 8, 9])[-1], atol=1e-4)
