from __future__ import annotations

from dataclasses import replace

import pytest

from enginewright.optimizer.emit.cpu import CpuEmitter
from enginewright.optimizer.report.fusion_effects import FusionEffects, fusion_effects
from enginewright.passes.ir.program import Program
from enginewright.passes.manager import PassManager
from enginewright.runtime.bundle.reader import Bundle
from tests.optimizer.emit.test_cpu import emit, paged
from tests.passes.lowering.test_lower_quantized import FORMATS, with_formats
from tests.passes.small_programs import Shape


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, dict[str, int], Bundle]:
    """A program as the target's passes get it, what they matched, and the bundle of what they made."""
    program = with_formats(paged(Shape()), FORMATS["grouped"])
    fused = program.copy()
    records = PassManager(CpuEmitter().passes()).run(fused)
    bundle, _ = emit(fused, tmp_path_factory.mktemp("effects") / "b")
    return program, {r.name: r.matched for r in records if r.name.startswith("fuse_")}, bundle


def _effects(exported: tuple[Program, dict[str, int], Bundle], seconds: float = 1.0) -> FusionEffects:
    program, matched, bundle = exported
    return fusion_effects(program, CpuEmitter().passes(), matched, bundle, seconds=seconds, threads=1)


def test_each_fusion_that_matched_is_measured(exported: tuple[Program, dict[str, int], Bundle]) -> None:
    before = len(list(exported[0].graph.nodes))
    found = _effects(exported)
    assert len(list(exported[0].graph.nodes)) == before
    assert not found.skipped and found.prefill_tokens in (32, 64, 128, 256)  # a tiny model: some milliseconds each
    assert [(e.fusion, e.matched) for e in found.effects] == list(exported[1].items())
    for effect in found.effects:
        times = (effect.decode_without, effect.decode_with, effect.prefill_without, effect.prefill_with)
        assert all(t is not None and t > 0 for t in times) if effect.matched else times == (None,) * 4
    assert {e.decode_with for e in found.effects if e.matched} == {found.effects[1].decode_with}


def test_what_can_not_be_measured_says_why(exported: tuple[Program, dict[str, int], Bundle]) -> None:
    program, matched, bundle = exported
    passes = CpuEmitter().passes()
    assert fusion_effects(program, passes, matched, bundle, room=1).skipped == "there is no memory for it"
    assert fusion_effects(program, passes, {}, bundle).skipped == "no fusion changed anything"
    short = fusion_effects(program, passes, matched, bundle, shortest=60.0)
    assert short.skipped.startswith("a step takes ") and "lost in noise" in short.skipped
    slow = fusion_effects(program, passes, matched, bundle, seconds=0)
    assert slow.skipped == "a few steps take more than 0 seconds"
    assert [(e.fusion, e.matched, e.decode_with) for e in slow.effects] == [(n, m, None) for n, m in matched.items()]


def test_other_weights_are_told(exported: tuple[Program, dict[str, int], Bundle]) -> None:
    other = with_formats(paged(Shape(hidden=48)), FORMATS["grouped"])
    found = fusion_effects(other, CpuEmitter().passes(), exported[1], exported[2])
    assert found.skipped == "without fuse_linear_residual the program has other weights"


def test_no_step_is_longer_than_the_context(
    exported: tuple[Program, dict[str, int], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, matched, short = exported
    model = replace(short.model, context_length=40)
    monkeypatch.setattr(Bundle, "model", property(lambda self: model))
    found = fusion_effects(program, CpuEmitter().passes(), matched, short, seconds=0.5, threads=1)
    assert (found.context, found.prefill_tokens, found.skipped) == (40, 32, "")
