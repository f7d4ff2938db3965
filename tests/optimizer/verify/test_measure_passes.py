"""The times of measurements, and that the faulty pass is named, whatever was judged together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch.fx.node import Node

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.verify import measure_passes
from enginewright.optimizer.verify.measure import SourceLogits, evaluate
from enginewright.optimizer.verify.measure_passes import Advice, PassMeasurements
from enginewright.optimizer.verify.measuring_tokens import MeasuringTokens
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import Pass, PassContext, PassResult
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Apply
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.passes.captured import captured

aten, ew = torch.ops.aten, torch.ops.ew
INT8 = WeightFormats(default=WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32))
Change = Callable[[Program], int]


class Changing(Pass):
    """Claims to be exact, and does what it is given."""

    name = "changing"

    def __init__(self, change: Change) -> None:
        self._change = change

    def call(self, program: Program, context: PassContext) -> PassResult:
        return PassResult(self._change(program))


def scale_weight(program: Program) -> int:
    """A weight of 1.01 times the size; of a quantized one its scales."""
    names = [n for n in program.weights if ".1.mlp.down_proj" in n]
    name = next(n for n in names if program.weights[n].dtype.is_floating_point)
    old = program.weights[name]
    program.weights._by_name[name] = Apply(aten.mul.Tensor, (old, 1.01), (), old.shape, old.dtype)
    return 1


def almost_the_same(program: Program) -> int:
    """One of two terms is off by 1e-4: more than a rounding, less than a mistake, and enough for other integers."""
    node = program.nodes_of(ew.add_rms_norm.default)[0]
    x = node.args[0]
    assert isinstance(x, Node)
    with program.inserting_before(node):
        other = program.call(aten.mul.Tensor, x, 1.0001, where=("test",))
    node.update_arg(0, other)
    return 1


@cache
def source(hidden: int) -> SourceLogits:
    """The captured program stands for the source: 188 tokens of four sequences."""
    generator = torch.Generator().manual_seed(1)
    drawn = tuple(torch.randint(0, 250, (n,), generator=generator) for n in (64, 64, 40, 20))
    program = captured("Llama", hidden_size=hidden)
    return SourceLogits(MeasuringTokens(drawn, "some tokens"), tuple(evaluate(program, drawn, WeightCache())))


def measured(
    passes: list[Pass],
    *,
    hidden: int = 64,
    max_kl: float | None = None,
    few: bool = False,
    started: float = 0.0,
    advice: Advice = Advice(),
) -> PassMeasurements:
    program = captured("Llama", hidden_size=hidden)
    measurements = PassMeasurements(
        source(hidden), program, max_kl=max_kl, cache=WeightCache(), few=few, started=started, advice=advice
    )
    measurements.begin(passes)
    formats = WeightFormats() if max_kl is None else INT8
    PassManager(passes, PassContext(recipe=PassOptions(weights=formats)), measurements.after).run(program)
    return measurements


def with_bug(change: Change, behind: str) -> list[Pass]:
    passes = default_pipeline()
    at = max(i for i, p in enumerate(passes) if p.name == behind) + 1
    return [*passes[:at], Changing(change), *passes[at:]]


def test_every_pass_has_figures_if_there_is_time() -> None:
    passes = default_pipeline()
    result = measured(passes, max_kl=0.05).found
    names = [p.name for p in passes]
    assert None not in result
    before, after = result[names.index("choose_formats")], result[names.index("quantize_linears")]
    assert before is not None and after is not None
    assert (before.tokens, after.tokens) == (64, 188)
    assert before.kl_mean < 1e-9 < after.kl_mean < 0.01
    assert after.perplexity is not None and after.perplexity != after.source_perplexity
    assert next(f.unchanged for f in result if f is not None)  # normalize_slice_writes matches nothing


@pytest.mark.parametrize("few", [True, False])
def test_without_time_what_decides_is_measured(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_passes, "SHARE", 0.0)
    passes = [
        p for p in default_pipeline() if p.wanted(PassContext(recipe=PassOptions(weights=INT8)))
    ]  # as an export runs them
    measurements = measured(passes, max_kl=0.05, few=few)
    done = [p.name for p, f in zip(passes, measurements.found, strict=True) if f is not None and not f.unchanged]
    expected = ["choose_formats", "quantize_linears", "quantize_embeddings"]
    assert done == ([expected[0], expected[2]] if few else expected)
    assert measurements.finish().measured == len(done) + 1  # and what was captured


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize(("hidden", "behind"), [(64, "normalize_linear"), (96, "fuse_gate_up")])
def test_the_pass_is_named_in_the_middle(
    share: float, hidden: int, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_passes, "SHARE", share)
    expected = (
        r"^after the pass changing the program differs from its source: on some tokens a logit is off by .* changed "
        r"most: model\.layers\.1\.mlp\.down_proj \(ew\.linear, tensor model\.layers\.1\.mlp\.down_proj\.weight\) by 1 %"
    )
    with pytest.raises(VerificationError, match=expected):
        measured(with_bug(scale_weight, behind), hidden=hidden)


@pytest.mark.parametrize("behind", ["quantize_linears", "quantize_embeddings"])
def test_a_pass_behind_one_that_loses_precision_is_held_to_rounding(behind: str) -> None:
    """KL alone would not show it: one weight of many is off by as much as rounding all of them."""
    expected = (
        r"^after the pass changing .* from what it was before the pass, .*\.1\.mlp\.down_proj \(ew\.quantized_linear"
    )
    with pytest.raises(VerificationError, match=expected):
        measured(with_bug(scale_weight, behind), max_kl=0.05)


def test_rounding_behind_a_pass_that_loses_precision_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it makes other integers of some activations, and other logits by much more than float rounding."""
    passes = with_bug(almost_the_same, "quantize_embeddings")
    assert None not in measured(passes, max_kl=0.05).found
    monkeypatch.setattr(measure_passes, "LOCAL_TOLERANCE", 0.0)
    with pytest.raises(VerificationError, match="from what it was before the pass"):
        measured(passes, max_kl=0.05)


def test_a_budget_names_the_pass_and_layers() -> None:
    expected = (
        r"^after the pass quantize_linears the program is too far from its source: KL .* on some tokens, and the "
        r"recipe's max_kl is 1e-06 .* What it changed most: model\..* %; .* %; .* %\n"
    )
    with pytest.raises(VerificationError, match=expected) as error:
        measured(default_pipeline(), max_kl=1e-6)
    assert "max_kl" in str(error.value.hint)


def test_a_pass_of_another_package_is_named_with_it() -> None:
    """Whoever exports isn't told to report to us what isn't ours, and gets the command that finds the place."""
    advice = Advice(bisect="optimize bisect model.gguf --recipe mine.toml")
    with pytest.raises(VerificationError, match="after the pass changing the program differs") as error:
        measured(with_bug(scale_weight, "fuse_gate_up"), advice=advice)
    assert error.value.hint == (
        f"The pass comes with the package {__name__.partition('.')[0]}, not with Enginewright: report it there, or "
        "turn it off (changing = false in [passes] of the recipe). To see where it first differs: optimize bisect "
        "model.gguf --recipe mine.toml."
    )
    with pytest.raises(VerificationError, match="after the pass quantize_linears") as error:
        measured(default_pipeline(), max_kl=1e-6, advice=advice)
    assert error.value.hint == f"{advice.lossy} To see where it first differs: {advice.bisect}."


def test_a_target_goes_on_from_the_common_program() -> None:
    passes: list[Pass] = default_pipeline()
    measurements = measured(passes)
    program = captured("Llama")
    PassManager(passes).run(program)
    for target in ("one", "other"):
        target_passes: list[Pass] = [Changing(lambda _: 0), Changing(lambda _: 1)]
        measurements.begin(target_passes, target)
        PassManager(target_passes, after_pass=measurements.after).run(program.copy())
    first, second = measurements.found[-2:]
    assert first is not None and first.unchanged
    assert second is not None and not second.unchanged
    target_passes = [Changing(scale_weight)]
    measurements.begin(target_passes, "third")
    with pytest.raises(VerificationError, match=r"^after the pass changing of target third the program differs"):
        PassManager(target_passes, after_pass=measurements.after).run(program.copy())


def test_a_captured_program_that_is_another() -> None:
    program = captured("Llama", hidden_size=64)
    scale_weight(program)
    with pytest.raises(VerificationError, match=r"^as captured, the program differs from its source: on some tokens"):
        PassMeasurements(source(64), program, max_kl=None, cache=WeightCache(), few=False, started=0.0)


def test_progress_counts_a_program_s_calls_and_names_the_pass() -> None:
    program = captured("Llama", hidden_size=64)
    events: list[ProgressEvent] = []
    measurements = PassMeasurements(
        source(64), program, max_kl=None, cache=WeightCache(), few=False, started=0.0, progress=events.append
    )
    passes = default_pipeline()
    measurements.begin(passes)
    PassManager(passes, PassContext(recipe=PassOptions()), measurements.after).run(program)
    assert {event.stage for event in events} == {"measure"}
    begins = [i for i, event in enumerate(events) if event.done == 1]
    runs = [events[i:j] for i, j in pairwise([*begins, len(events)])]
    for run in runs:
        assert [event.done for event in run] == list(range(1, run[0].total + 1))
        assert len({event.detail for event in run}) == 1
    assert runs[0][0].detail == "the captured program"
    assert len(runs) > 1 and all(run[0].detail.startswith("after ") for run in runs[1:])
