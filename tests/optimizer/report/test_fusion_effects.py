from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from enginewright.optimizer.report.fusion_effects import _TWIN, _Times, fusion_effects, median_interval
from enginewright.optimizer.shared.export_records import FusionEffects
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.plugins.cpu.compile.emitter import CpuEmitter
from enginewright.runtime.bundle.reader import Bundle
from tests.passes.lowering.test_lower_quantized import FORMATS, with_formats
from tests.passes.small_programs import Shape
from tests.plugins.cpu.compile.test_emitter import emit, paged


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
    effects = _effects(exported)
    assert len(list(exported[0].graph.nodes)) == before
    assert not effects.skipped and effects.prefill_tokens in (32, 64, 128, 256)  # a tiny model: some milliseconds each
    assert [(e.fusion, e.matched) for e in effects.effects] == list(exported[1].items())
    for effect in effects.effects:
        times = (effect.decode_without, effect.decode_with, effect.prefill_without, effect.prefill_with)
        assert all(t is not None and t > 0 for t in times) if effect.matched else times == (None,) * 4
    assert {e.decode_with for e in effects.effects if e.matched} == {effects.effects[1].decode_with}
    assert effects.decode_noise is not None and effects.prefill_noise is not None
    for effect in effects.effects:
        for saves, noise in (
            (effect.decode_saves, effects.decode_noise),
            (effect.prefill_saves, effects.prefill_noise),
        ):
            assert saves is None or saves[0] > noise or saves[1] < -noise


def test_an_interval_of_the_median() -> None:
    """Conover's table of the sign test: of 10 values the 2nd and the 9th, of 20 the 6th and the 15th."""
    assert median_interval(range(5)) is None
    assert median_interval(range(6)) == (0, 5)
    assert median_interval(range(10)) == (1, 8)
    assert median_interval([float(n) for n in reversed(range(20))]) == (5, 14)


def test_what_is_within_noise_is_not_a_regression() -> None:
    """Rounds of times as a busy machine gives them: some of them slow, all programs interleaved."""
    rng = np.random.default_rng(5)
    busy = 1 + (rng.random(60) < 0.3) * 0.5

    def times(microseconds: float) -> list[float]:
        return [float(t) for t in microseconds * 1e-6 * busy * (1 + rng.normal(0, 0.02, 60))]

    times_of = _Times(
        {"": times(100), "same": times(100), "worth it": times(112), "a cost": times(90), _TWIN: times(100)}
    )
    assert times_of.saves("same") is None
    saved, cost = times_of.saves("worth it"), times_of.saves("a cost")
    assert saved is not None and 0.05 < saved[0] < 12 / 112 < saved[1] < 0.2
    assert cost is not None and -0.2 < cost[0] < cost[1] < -0.05
    noise = times_of.noise()
    assert noise is not None and noise < 0.02


def test_a_place_in_memory_that_is_slow_is_no_saving() -> None:
    """A program that differs from itself by 4 % makes nothing of a fusion that seems to cost 3 %."""
    times_of = _Times({"": [1.0] * 20, "fusion": [0.97] * 20, "large": [0.9] * 20, _TWIN: [0.96] * 20})
    assert times_of.saves("fusion") is None
    assert times_of.saves("large") is not None


def test_too_few_rounds_say_nothing() -> None:
    times_of = _Times({"": [1.0] * 5, "fusion": [2.0] * 5, _TWIN: [1.0] * 5})
    assert (times_of.noise(), times_of.saves("fusion")) == (None, None)


def test_what_can_not_be_measured_says_why(exported: tuple[Program, dict[str, int], Bundle]) -> None:
    program, matched, bundle = exported
    passes = CpuEmitter().passes()
    assert fusion_effects(program, passes, matched, bundle, memory_budget=1).skipped == "there is no memory for it"
    assert fusion_effects(program, passes, {}, bundle).skipped == "no fusion changed anything"
    short = fusion_effects(program, passes, matched, bundle, shortest=60.0)
    assert short.skipped.startswith("a step takes ") and "lost in noise" in short.skipped
    slow = fusion_effects(program, passes, matched, bundle, seconds=0)
    assert slow.skipped == "a few steps take more than 0 seconds"
    assert [(e.fusion, e.matched, e.decode_with) for e in slow.effects] == [(n, m, None) for n, m in matched.items()]


def test_other_weights_are_told(exported: tuple[Program, dict[str, int], Bundle]) -> None:
    other = with_formats(paged(Shape(hidden=48)), FORMATS["grouped"])
    effects = fusion_effects(other, CpuEmitter().passes(), exported[1], exported[2])
    assert effects.skipped == "without fuse_linear_residual the program has other weights"


def test_no_step_is_longer_than_the_context(
    exported: tuple[Program, dict[str, int], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, matched, short = exported
    model = replace(short.model, context_length=40)
    monkeypatch.setattr(Bundle, "model", property(lambda self: model))
    effects = fusion_effects(program, CpuEmitter().passes(), matched, short, seconds=0.5, threads=1)
    assert (effects.context, effects.prefill_tokens, effects.skipped) == (40, 32, "")
