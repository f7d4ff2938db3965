from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Concat, Source, Transpose
from enginewright.plugins.cpu.compile.emitter import CpuEmitter
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.emit.weights import _chunks, source_rows
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import WeightUse
from enginewright.runtime.shared.progress import ProgressEvent
from tests.acceptance.driver import Driver
from tests.passes.lowering.lowered import features
from tests.passes.lowering.test_lower_quantized import FORMATS, with_formats
from tests.passes.quantization.test_choose_formats import routed
from tests.passes.small_programs import (
    PagedEvaluation,
    Shape,
    captured_programs,
    decoder,
    program_from,
    random_sequences,
)

ew = torch.ops.ew


def paged(shape: Shape) -> Program:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    return program


def emit(program: Program, path: Path, vocab_size: int = 67) -> tuple[Bundle, list[ProgressEvent]]:
    events: list[ProgressEvent] = []
    with BundleWriter(path) as writer:
        target = CpuEmitter().emit(program, writer, events.append)
        model = ModelSection(name="m", architecture="a", vocab_size=vocab_size, context_length=64)
        source = SourceSection(kind="module", name="m")
        writer.commit(Manifest(model=model, source=source, targets=()), {"cpu": target})
    return Bundle.open(path), events


@pytest.mark.parametrize("name", list(captured_programs()))
def test_weights_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    program = paged(captured_programs()[name])
    before = set(program.weights)
    bundle, events = emit(program, tmp_path / "b")
    lowered = bundle.program("cpu")
    assert lowered.arena_bytes.t > 0
    for use in lowered.weights:
        stored = bundle.weight(use.name)
        value = unpack(stored, use.shape, use.layout)
        np.testing.assert_array_equal(value, program.weights[use.name].evaluate().numpy())
        assert bundle.tensor(use.name).parts[0].source == use.name
    assert set(program.weights) == before
    assert [(e.stage, e.done, e.total) for e in events] == [
        ("emit", i, len(lowered.weights)) for i in range(len(lowered.weights) + 1)
    ]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["bf16", "grouped", "per_channel"])
def test_narrow_weights_come_back_as_they_were(name: str, tied: bool, tmp_path: Path) -> None:
    # Widths that fill neither panels nor words.
    shape = Shape(hidden=45, heads=9, kv_heads=9, head_size=4, intermediate=50, tied=tied)
    program = with_formats(paged(shape), FORMATS[name])
    bundle, _ = emit(program, tmp_path / "b")
    layouts = set()
    for use in bundle.program("cpu").weights:
        value = unpack(bundle.weight(use.name), use.shape, use.layout)
        expected = program.weights[use.name].evaluate()
        assert value.dtype == bundle.tensor(use.name).stored_dtype or use.layout == "panel32x4"
        np.testing.assert_array_equal(value.astype(np.float64), expected.double().numpy())
        layouts.add((use.dtype, use.layout))
        source = use.name.removesuffix(".int8").removesuffix(".scales").removesuffix(".bf16")
        assert bundle.tensor(use.name).parts[0].source == source
    narrow = {("bf16", "panel32x2")} if name == "bf16" else {("i8", "panel32x4"), ("f16", "panel32")}
    assert layouts == narrow | {("f32", "rows")} | ({("bf16", "rows")} if name == "bf16" and not tied else set())
    tables = {n for n in bundle.index.tensors if n.startswith(("embed", "head"))}
    assert len(tables) == (1 if name == "bf16" else 2) * (1 if tied else 2), "a tied table is stored once"


def test_weights_of_experts_are_packed_one_by_one(tmp_path: Path) -> None:
    program = with_formats(routed(), FORMATS["grouped"])
    expected = program.weights["experts.int8"].evaluate().numpy()
    use = WeightUse(name="experts.int8", dtype="i8", shape=(64, 32, 32), layout="panel32x4")
    chunks = list(_chunks(use, torch.from_numpy(expected)))
    assert len(chunks) == 64
    np.testing.assert_array_equal(unpack(np.stack(chunks), (64, 32, 32), "panel32x4"), expected)


def test_values_that_bf16_lacks_are_refused(tmp_path: Path) -> None:
    inner = torch.nn.Module()
    inner.w = torch.nn.Parameter(torch.full((40, 6), torch.finfo(torch.float32).max))

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(ew.linear(features(i), m.w, None), i["rows"])

    with pytest.raises(UnsupportedModelError, match=r"weight w.bf16: it has values that are not finite in bf16"):
        emit(with_formats(program_from(call, inner), FORMATS["bf16"]), tmp_path / "b")


def test_two_emissions_are_byte_equal(tmp_path: Path) -> None:
    digests = []
    for name in ("one", "two"):
        emit(paged(Shape()), tmp_path / name)
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        digests.append({str(p.relative_to(tmp_path / name)): hashlib.sha256(p.read_bytes()).digest() for p in files})
    assert digests[0] == digests[1]
    assert {"targets/cpu/programs/decode.json", "weights/index.json", "manifest.json"} <= set(digests[0])


def test_a_table_larger_than_a_chunk_is_packed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginewright.plugins.emit.weights._CHUNK_BYTES", 1)
    program = paged(Shape(windows=(0,), vocabulary=101, tied=False))
    bundle, _ = emit(program, tmp_path / "b", vocab_size=101)
    head = unpack(bundle.weight("head"), (101, 32), "panel32")
    np.testing.assert_array_equal(head, program.weights["head"].evaluate().numpy())
    np.testing.assert_array_equal(bundle.weight("embed"), program.weights["embed"].evaluate().numpy())


def test_parts_say_where_rows_come_from() -> None:
    a, b = (Source(n, s, torch.float32, lambda: torch.zeros(0)) for n, s in (("a", (4, 6)), ("b", (6, 2))))
    parts = source_rows(Concat((a, Transpose(b))))
    assert [(p.source, p.rows, p.axis) for p in parts] == [("a", (0, 4), 0), ("b", (0, 2), 1)]


def test_integers_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows((i["ids"][:, None] * torch.tensor([1, 1 << 40])).float(), i["rows"])

    with pytest.raises(UnsupportedModelError, match="beyond 32 bits"):
        emit(program_from(call), tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("hidden", [32, 45])
def test_the_engine_gives_what_the_program_means(name: str, hidden: int, tmp_path: Path) -> None:
    shape = Shape(hidden=hidden, heads=9, kv_heads=9, head_size=4, intermediate=50, bias=(True, False, True))
    program = with_formats(paged(shape), FORMATS[name])
    emit(program, tmp_path / "b")
    reference = PagedEvaluation(program)
    texts = random_sequences((40, 3), 67)
    with Driver(tmp_path / "b", 2, 2) as driver:
        for work in ({0: texts[0][:33]}, {0: texts[0][33:], 1: texts[1]}):
            got = np.concatenate(list(driver.step(work).values()))
            tokens = sum(len(t) for t in work.values())
            want = reference.run({str(r): t for r, t in work.items()}, rows=range(tokens)).numpy()
            # Sums of floats round in another order; then a value may fall on the other side of a step of 1/127 or 2^-8.
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error < 5e-3


def test_the_extension_takes_the_program(tmp_path: Path) -> None:
    for name, shape in captured_programs().items():
        bundle, _ = emit(paged(shape), tmp_path / name)
        lowered = bundle.program("cpu")
        weights = {w.name: bundle.weight(w.name) for w in lowered.weights}
        program = CpuProgram(lowered, weights, blocks={g.name: 4 for g in lowered.cache_groups}, threads=1)
        assert program.threads == 1
