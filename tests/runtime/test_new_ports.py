"""Two ports that nothing needs yet: a package adds the rows below and an op that reads them, and steps have them.

Nothing else names them: scheduler, executor, interpreter, messages between ranks and padding read the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.native.executable import CpuProgram
from enginewright.plugins.ranks.messages import packed_step, unpacked_step
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.static_shapes import StaticShapes, padding_blocks
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import FloatArray, StepInput
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram, Operand
from enginewright.runtime.shared.step_schema import PORTS, Array, Port
from enginewright.runtime.tasks.logits import Logits
from tests.plugins.native.lowered_builder import LoweredBuilder, R, T, dense_strides, step_input, view
from tests.runtime.conftest import VOCAB

ADAPTERS, HIDDEN = 2, 8
_random = np.random.default_rng(7)
TABLE = (_random.standard_normal((VOCAB, HIDDEN)) / 2).astype(np.float32)
HEAD = _random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
LOW = (_random.standard_normal((ADAPTERS, HIDDEN, HIDDEN)) / 3).astype(np.float32)


def second_adapter(chunks: Sequence[Any]) -> Array:
    """Every token of the step is the second adapter's."""
    return np.array([0, 0, sum(chunk.count for chunk in chunks)], np.int32)


def by_place(chunks: Sequence[Any]) -> Array:
    """Returns rows that depend on the tokens' places, [T, H]."""
    places = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
    return places_as_rows(places)


def places_as_rows(places: np.ndarray) -> FloatArray:
    return np.sin(places[:, None] * np.arange(1, HIDDEN + 1)).astype(np.float32)


NEW = (
    Port("adapter_start", (ADAPTERS + 1,), check="segments", provider=second_adapter),
    Port("embeddings", ("T", HIDDEN), dtype="f32", provider=by_place),
)


@pytest.fixture(autouse=True)
def new_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for port in NEW:
        monkeypatch.setitem(PORTS, port.name, port)


def program() -> tuple[LoweredProgram, dict[str, Any]]:
    """x = table[ids] + embeddings; y = x + x W[adapter]^T, to the cache, attended to, and logits of its rows."""
    b = LoweredBuilder()
    b.group("full", [0], 2, 4, 4)
    x, y, low, mixed, last = (b.buffer(size, HIDDEN) for size in (T, T, T, T, R))
    starts = Operand(kind="input", name="adapter_start", dtype="i32", shape=(Affine(3),), strides=(Affine(1),))
    shape = (T, Affine(HIDDEN))
    rows = Operand(kind="input", name="embeddings", dtype="f32", shape=shape, strides=dense_strides(shape))
    b.step("embedding", [b.input("ids"), b.weight(TABLE)], [x])
    b.step("elementwise", [x, rows], [y], fn="add")
    b.step("grouped_linear", [y, starts, b.weight(LOW, "panel32")], [low])
    b.step("elementwise", [y, low], [x], fn="add")
    heads = view(x, (T, 2, 4))
    b.step("kv_write", [heads, heads, b.input("slots:full"), b.cache("full/0")], [])
    tables = [b.input(name) for name in ("block_table:full", "q_start", "kv_len")]
    attributes = {"scale": 0.5, "window": 0, "softcap": 0.0, "has_sinks": False}
    b.step("paged_attention", [heads, b.cache("full/0"), *tables], [view(mixed, (T, 2, 4))], **attributes)  # type: ignore[arg-type]
    b.step("take_rows", [mixed, b.input("rows")], [last])
    b.logits = b.buffer(R, VOCAB)
    b.step("linear", [last, b.weight(HEAD, "panel32")], [b.logits])
    return b.program().model_copy(update={"ports": tuple(port.name for port in NEW)}), b.weights


def expected(ids: Sequence[int], adapter: int = 1) -> FloatArray:
    """Logits [S, V] in float64."""
    y = TABLE[list(ids)].astype(np.float64) + places_as_rows(np.arange(len(ids)))
    x = (y + y @ LOW[adapter].T.astype(np.float64)).reshape(len(ids), 2, 4)
    scores = np.where(np.tri(len(ids), dtype=bool), 0.5 * np.einsum("qhd,khd->hqk", x, x), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), x).reshape(len(ids), HIDDEN)
    return mixed @ HEAD.T.astype(np.float64)  # type: ignore[no-any-return]


@pytest.fixture
def bundle(tmp_path: Path, manifest: Manifest) -> Bundle:
    lowered, weights = program()
    with BundleWriter(tmp_path / "ports.bundle") as writer:
        for use in lowered.weights:
            writer.weights().add(use.name, weights[use.name], use.layout, shape=use.shape)
        writer.write_text("targets/cpu/programs/decode.json", lowered.to_json())
        writer.commit(manifest, {"cpu": TargetManifest()})
    return Bundle.open(tmp_path / "ports.bundle")


PROMPTS = [[5, 90, 17, 200, 3], [44] * 40, [7, 9]]


def test_a_served_model_reads_them(bundle: Bundle) -> None:
    model = replace(bundle.model, generation_defaults={})
    with LLM.from_executor(CpuExecutor(bundle, {"full": 32}, Placement(threads=1)), model, prefill_chunk=16) as llm:
        for ids in PROMPTS:
            np.testing.assert_allclose(llm.logits(ids), expected(ids), atol=1e-4)  # float32 of 8 columns
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        alone = [llm.generate([ids], params)[0].token_ids for ids in PROMPTS]
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == alone
        for ids, tokens in zip(PROMPTS, alone, strict=True):
            known = list(ids)
            for token in tokens:
                assert int(expected(known)[-1].argmax()) == token
                known.append(token)


def tenants_adapter(chunks: Sequence[Any]) -> Array:
    """The adapter of the step's tenant: the first one for "first", otherwise the second."""
    (tenant,) = {chunk.request.options.tenant for chunk in chunks}
    tokens = sum(chunk.count for chunk in chunks)
    return np.array([0, tokens if tenant == "first" else 0, tokens], np.int32)


def test_a_provider_reads_the_options_of_requests(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PORTS, "adapter_start", replace(PORTS["adapter_start"], provider=tenants_adapter))
    model = replace(bundle.model, generation_defaults={})
    with LLM.from_executor(CpuExecutor(bundle, {"full": 32}, Placement(threads=1)), model) as llm:
        for tenant, adapter in (("first", 0), ("other", 1), ("", 1)):
            for ids in PROMPTS:
                np.testing.assert_allclose(llm.run(Logits(ids), tenant=tenant), expected(ids, adapter), atol=1e-4)


def test_padding_knows_them(bundle: Bundle) -> None:
    plan = BucketPlan.from_sizes((8, 48), (2, 4), 64)
    model = replace(bundle.model, generation_defaults={})
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    names = []
    for padded in (False, True):
        blocks = 32 + padding_blocks(plan, bundle.program("cpu").cache_groups)["full"]
        inner = CpuExecutor(bundle, {"full": blocks}, Placement(threads=1))
        with LLM.from_executor(StaticShapes(inner, plan) if padded else inner, model, prefill_chunk=40) as llm:
            names.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert names[0] == names[1]


def step_with(tokens: int) -> StepInput:
    step = step_input([list(range(tokens))], groups=["full"], return_logits=True)
    step.arrays["adapter_start"] = np.array([0, 0, tokens], np.int32)
    step.arrays["embeddings"] = places_as_rows(np.arange(tokens))
    return step


def test_ranks_get_them() -> None:
    lowered, weights = program()
    one, other = (CpuProgram(lowered, weights, blocks={"full": 4}) for _ in range(2))
    step = step_with(9)
    logits = one.run(step).logits
    other.run_packed(other.packed(step))
    np.testing.assert_array_equal(one.cache_arrays("full", 0)[0], other.cache_arrays("full", 0)[0])
    came = unpacked_step(["full"], packed_step(["full"], step, lowered.ports), lowered.ports)
    for name, array in step.arrays.items():
        np.testing.assert_array_equal(came.arrays[name], array)
        assert came.arrays[name].dtype == array.dtype
    came.outputs = ("logits",)
    np.testing.assert_array_equal(one.run(came).logits, logits)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("adapter_start", np.array([0, 3, 2], np.int32), r"adapter_start\[2\] is less than the one before"),
        ("adapter_start", np.array([0, 1, 10], np.int32), r"adapter_start\[2\] = 10 is not in \[0, 10\)"),
        ("adapter_start", np.array([0, 9], np.int32), "adapter_start has 2 entries, not 3 = 3"),
        ("embeddings", np.zeros((9, HIDDEN), np.int32), "embeddings must be a float32 array of rank 2, not int32 of 2"),
        ("embeddings", np.zeros((8, HIDDEN), np.float32), "embeddings has 64 entries, not T"),
        ("embeddings", None, "embeddings is missing"),
        ("rank", np.zeros(9, np.int32), "the program takes no rank"),
    ],
)
def test_the_interpreter_checks_them(name: str, array: Array | None, message: str) -> None:
    lowered, weights = program()
    step = step_with(9)
    if array is None:
        del step.arrays[name]
    else:
        step.arrays[name] = array
    with pytest.raises(RequestError, match=message):
        CpuProgram(lowered, weights, blocks={"full": 4}).run(step)


def test_a_port_that_nobody_declares(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PORTS, "embeddings")
    with pytest.raises(BundleError, match="'embeddings' isn't an array of a step"):
        CpuExecutor(bundle, {"full": 32}, Placement(threads=1))
