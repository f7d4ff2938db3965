from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.optimizer.plan import planner
from enginewright.optimizer.plan.devices import default_shares, find_devices
from enginewright.optimizer.plan.options import PlanOptions
from enginewright.optimizer.plan.planner import Memory, first_token_seconds, plan
from enginewright.optimizer.plan.programs import PlannedModel, PlannedProgram
from enginewright.optimizer.plan.result import DevicePlan, Omitted, PlanResult
from enginewright.optimizer.plan.text import notes
from enginewright.plugins.cuda.compile.plan import GpuModel
from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.scheduler.step_times import planned_steps
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import BundleError, CapacityError, RequestError, TargetError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from tests.acceptance.test_families import saved
from tests.acceptance.tiny_configs import tiny_family

CONTEXT, PROMPT = 300, 200


def one(result: PlanResult) -> DevicePlan:
    (one_plan,) = result.plans
    return one_plan


def on(tiny_bundle: Path, **options: object) -> PlanResult:
    settings = {"devices": ("h100",), "context": CONTEXT, "prompt": PROMPT} | options
    return plan(tiny_bundle, PlanOptions(**settings))  # type: ignore[arg-type]


def test_what_memory_holds(tiny_bundle: Path, tiny_program: LoweredProgram) -> None:
    memory = Memory(tiny_program, "cpu")
    assert memory.weights == sum(stored_bytes(use) for use in tiny_program.weights)
    assert memory.cache(1) == memory.cache(32) and memory.cache(33) == 2 * memory.cache(32)  # blocks of 32 tokens
    room = memory.needed(7, CONTEXT, PROMPT)
    assert room == memory.weights + memory.workspace(7, PROMPT, CONTEXT) + 7 * memory.cache(CONTEXT)
    for most, bytes_free in ((7, room), (6, room - 1)):
        plan_of_gpu = one(on(tiny_bundle, memory=bytes_free, batches=(1, 6, 7, 8)))
        assert plan_of_gpu.fits and plan_of_gpu.most_requests == most
        assert [s.batch for s in plan_of_gpu.speeds if s.tpot is not None] == [b for b in (1, 6, 7) if b <= most]
        assert plan_of_gpu.largest is not None and (plan_of_gpu.largest.batch, plan_of_gpu.largest_limit) == (
            most,
            "memory",
        )
        assert memory.needed(1, plan_of_gpu.most_tokens, plan_of_gpu.most_tokens) <= bytes_free
        assert memory.needed(1, plan_of_gpu.most_tokens + 32, plan_of_gpu.most_tokens + 32) > bytes_free


def test_no_more_requests_than_there_can_be_states(tmp_path: Path) -> None:
    """The memory of the GPU would hold more of a tiny hybrid."""
    saved(tiny_family("lfm2"), tmp_path / "saved")
    options = PlanOptions(devices=("h100",), recipes=("f32",), context=CONTEXT, prompt=PROMPT, batches=(2047, 2048))
    hybrid = one(plan(tmp_path / "saved", options))
    assert hybrid.target == "cuda" and hybrid.states_per_request > 0
    assert hybrid.largest is not None
    assert (hybrid.most_requests, hybrid.largest.batch, hybrid.largest_limit) == (2047, 2047, "requests")
    assert [speed.tpot is not None for speed in hybrid.speeds] == [True, False]


def test_speeds_are_the_model_s(tiny_bundle: Path, tiny_steps: CountedSteps) -> None:
    (gpu,) = find_devices(["h100"])
    assert gpu is not None
    model = GpuModel(tiny_steps, gpu, default_shares(), halved=True)
    plan_of_gpu = one(on(tiny_bundle, batches=(1, 5)))
    assert [s.batch for s in plan_of_gpu.speeds] == [1, 5]
    for speed in plan_of_gpu.speeds:
        step = model.seconds(StepSizes((1,) * speed.batch, (CONTEXT,) * speed.batch))
        assert speed.tpot == step and speed.tokens_per_second == speed.batch / step
        others = speed.batch - 1
        assert speed.ttft == model.seconds(StepSizes((*(1,) * others, PROMPT), (*(CONTEXT,) * others, PROMPT)))


@pytest.mark.parametrize("goals", [{"tpot": 40}, {"ttft": 60}, {"tpot": 40, "ttft": 60}, {"tpot": 60, "ttft": 40}])
def test_the_largest_batch_meets_the_goals_and_the_next_does_not(
    goals: dict[str, int], tiny_bundle: Path, tiny_steps: CountedSteps
) -> None:
    (gpu,) = find_devices(["l4"])
    assert gpu is not None
    model = GpuModel(tiny_steps, gpu, default_shares(), halved=True)
    of = {
        "tpot": lambda n: model.seconds(StepSizes((1,) * n, (CONTEXT,) * n)),
        "ttft": lambda n: first_token_seconds(model, PROMPT, n - 1, CONTEXT),
    }
    seconds = {name: of[name](n) for name, n in goals.items()}  # a goal that just so many requests meet
    plan_of_gpu = one(on(tiny_bundle, devices=("l4",), **seconds))
    tight = min(goals.values())
    assert plan_of_gpu.largest is not None
    assert (
        plan_of_gpu.largest.batch
        == max(n for n in range(1, 200) if all(of[k](n) <= s for k, s in seconds.items()))
        >= tight
    )
    assert plan_of_gpu.largest_limit in goals
    assert of[plan_of_gpu.largest_limit](plan_of_gpu.largest.batch + 1) > seconds[plan_of_gpu.largest_limit]


def test_goals_that_nothing_meets(tiny_bundle: Path) -> None:
    plan_of_gpu = one(on(tiny_bundle, tpot=1e-9))
    assert plan_of_gpu.fits and plan_of_gpu.largest is None and plan_of_gpu.largest_limit == "tpot"


def test_a_prompt_comes_in_chunks() -> None:
    steps: list[StepSizes] = []

    class Model:
        def seconds(self, sizes: StepSizes) -> float:
            steps.append(sizes)
            return 1.5

        def bound(self, sizes: StepSizes) -> str:
            return ""

    assert first_token_seconds(Model(), 1100, 2, 70) == 4.5
    assert [s.lengths for s in steps] == [(1, 1, 512), (1, 1, 512), (1, 1, 76)]
    assert [s.contexts for s in steps] == [(70, 70, 512), (70, 70, 1024), (70, 70, 1100)]


def two_recipes(program: LoweredProgram, formats: frozenset[str] = frozenset()) -> PlannedModel:
    """A small one, and one of which a weight is a TB large."""
    huge = program.weights[0].model_copy(update={"shape": (1 << 19, 1 << 19)})
    large = program.model_copy(update={"weights": (huge, *program.weights[1:])})
    programs = PlannedProgram(("small",), program, "cpu", formats), PlannedProgram(("large",), large, "cpu")
    return PlannedModel(ModelInfo("m", "M", 256, 512), programs)


def test_what_fits_where_one_recipe_does_not(tiny_program: LoweredProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "planned_model", lambda *args: two_recipes(tiny_program))
    small, large = plan("m", PlanOptions(devices=("l4",))).plans
    assert small.fits and not small.advice
    assert not large.fits and large.speeds == () and large.most_requests == 0
    assert large.advice == "What would fit: recipe small."


def test_the_hint_names_what_is_nearest_to_the_source(
    tiny_program: LoweredProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is smallest: int8 where it fits, although int4 does too."""
    model = two_recipes(tiny_program)
    small, large = model.programs
    fewer = tiny_program.model_copy(update={"weights": tiny_program.weights[1:], "steps": ()})
    three = replace(small, recipes=("int8",)), replace(small, recipes=("int4",), program=fewer), large
    monkeypatch.setattr(planner, "planned_model", lambda *args: replace(model, programs=three))
    monkeypatch.setattr(planner, "model_maker", lambda *args: lambda *rest: Still("memory"))
    *_, last = plan("m", PlanOptions(devices=("l4",), batches=(1,))).plans
    assert last.advice == "What would fit: recipe int8."


def test_parts_of_long_contexts_are_in_the_memory(tiny_program: LoweredProgram) -> None:
    plain, cuda = Memory(tiny_program, "cpu"), Memory(tiny_program, "cuda")
    assert cuda.workspace(4, 64, 512) == plain.workspace(4, 64, 512) == plain.workspace(4, 64, 1 << 17)
    heads, size, parts = 4, 16, (1 << 17) // 512  # a part has a row of values and, in exact mode, two numbers more
    assert cuda.workspace(4, 64, 1 << 17) - plain.workspace(4, 64, 1 << 17) == 4 * 4 * heads * (size + 2) * parts


def test_a_busy_machine_is_said_and_memory_looked_at_once(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frees = iter([1 << 30])
    monkeypatch.setattr(planner, "free_memory", lambda: next(frees))
    monkeypatch.setattr(planner, "model_maker", lambda *args: lambda *rest: Still("memory"))
    for load, busy in ((0.1, False), (3.2, True)):
        monkeypatch.setattr(planner, "processes_waiting", lambda load=load: load)
        frees = iter([1 << 30])
        result = on(tiny_bundle, devices=("cpu",), batches=(1,))
        assert result.devices[0].room == one(result).room == 1 << 30
        lines = [line for line in notes(result) if line.startswith("busy")]
        assert bool(lines) == busy and all("3.2 processes wanted each core" in line for line in lines)


def test_steps_are_counted_once_for_all_devices(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[LoweredProgram] = []

    class Counting(CountedSteps):
        def __init__(self, program: LoweredProgram) -> None:
            programs.append(program)
            super().__init__(program)

    monkeypatch.setattr(planner, "CountedSteps", Counting)
    result = on(tiny_bundle, devices=("h100", "l4", "a100", "t4"), batches=(1, 4))
    assert len(result.plans) >= 3 and len(programs) == 1


def test_a_model_that_fits_nowhere(tiny_bundle: Path, tiny_program: LoweredProgram) -> None:
    with pytest.raises(CapacityError, match="doesn't fit on L4 or H100: with recipe f32") as error:
        on(tiny_bundle, devices=("l4", "h100"), memory=1000)
    hint = str(error.value.hint)
    assert "this on H200, H100, A100, L40S, L4, RTX 4090, RTX 5090, B200" in hint and "fewer bits" in hint
    memory = Memory(tiny_program, "cpu")
    with pytest.raises(CapacityError) as error:
        on(tiny_bundle, memory=memory.needed(1, 64, 64), context=500)
    assert "--context 64" in str(error.value.hint)


def test_a_model_for_no_device_of_the_table(tiny_program: LoweredProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_recipes(tiny_program)
    only_large = PlannedModel(model.info, model.programs[1:])
    monkeypatch.setattr(planner, "planned_model", lambda *args: only_large)
    with pytest.raises(CapacityError) as error:
        plan("m", PlanOptions(devices=("h200",)))
    assert "The model fits on none of the known devices." in str(error.value.hint)


def test_a_gpu_that_lacks_a_format(tiny_program: LoweredProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    model = two_recipes(tiny_program, frozenset({"fp8"}))
    both = PlannedModel(model.info, (model.programs[0], PlannedProgram(("plain",), tiny_program, "cpu")))
    monkeypatch.setattr(planner, "planned_model", lambda *args: both)
    result = plan("m", PlanOptions(devices=("a100", "l4")))
    assert [(p.device, p.recipes) for p in result.plans] == [
        ("A100", ("plain",)),
        ("L4", ("small",)),
        ("L4", ("plain",)),
    ]
    (omitted,) = result.omitted
    assert (omitted.recipes, omitted.device) == (("small",), "A100") and "8.0 has no fp8" in omitted.why
    alone = PlannedModel(model.info, model.programs[:1])
    monkeypatch.setattr(planner, "planned_model", lambda *args: alone)
    with pytest.raises(TargetError, match=r"8\.0 has no fp8"):
        plan("m", PlanOptions(devices=("a100",)))


def test_gpus_and_this_machine_have_programs_of_their_own(
    tiny_program: LoweredProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = two_recipes(tiny_program)
    (small, large), lost = both.programs, PlannedProgram(("lost",), None, "cpu", omitted="no kernel")
    of_gpus = replace(large, program=tiny_program, target="cuda")
    kinds: list[tuple[str, ...]] = []

    def planned(*args: object) -> PlannedModel:
        kinds.append(args[2])  # type: ignore[arg-type]
        return PlannedModel(both.info, (small, of_gpus, lost, replace(lost, target="cuda")))

    monkeypatch.setattr(planner, "planned_model", planned)
    monkeypatch.setattr(planner, "model_maker", lambda *args: lambda planned, *rest: Still(planned.target))
    result = plan("m", PlanOptions(devices=("l4", "cpu", "h100"), batches=(1,), memory=1 << 30))
    assert kinds == [("cuda", "cpu")]
    assert [(p.device, p.target, p.recipes) for p in result.plans] == [
        ("L4", "cuda", ("large",)),
        ("cpu", "cpu", ("small",)),
        ("H100", "cuda", ("large",)),
    ]
    assert [p.speeds[0].bound for p in result.plans] == ["cuda", "cpu", "cuda"]
    assert result.omitted == (Omitted(("lost",), None, "no kernel"),)  # everywhere, so once
    monkeypatch.setattr(planner, "planned_model", lambda *args: PlannedModel(both.info, (of_gpus,)))
    with pytest.raises(BundleError, match="no program for this machine"):
        plan("m", PlanOptions(devices=("cpu",)))


def test_another_target_s_program_is_said(tiny_bundle: Path) -> None:
    assert any("with the program of target cpu: the bundle has none of cuda" in line for line in notes(on(tiny_bundle)))


class Still:
    """A model that takes a second for anything."""

    def __init__(self, name: str) -> None:
        self.name = name

    def seconds(self, sizes: StepSizes) -> float:
        return 1.0

    def bound(self, sizes: StepSizes) -> str:
        return self.name


def test_recipes_that_nobody_can_plan(tiny_program: LoweredProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PlannedModel(ModelInfo("m", "M", 256, 512), (PlannedProgram(("auto",), None, "cpu", omitted="a search"),))
    monkeypatch.setattr(planner, "planned_model", lambda *args: model)
    with pytest.raises(CapacityError, match="nothing can be planned: auto: a search"):
        plan("m", PlanOptions(devices=("h100",)))


def test_this_machine_is_measured_once_a_recipe(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginewright.plugins.cpu.compile import plan as cpu_model

    class Model:
        def seconds(self, sizes: StepSizes) -> float:
            return 0.25

        def bound(self, sizes: StepSizes) -> str:
            return "memory"

    calls: list[tuple[int, int]] = []

    def measure(
        steps: CountedSteps, context_length: int, engine: Callable[[int], float], threads: int, progress: object
    ) -> Model:
        calls.append((context_length, threads))
        return Model()

    monkeypatch.setattr(cpu_model, "measure", measure)
    result = on(tiny_bundle, devices=("cpu",), batches=(2,), threads=3)
    assert calls == [(512, 3)]
    assert one(result).speeds[0].tokens_per_second == 8
    steps = one(result).steps
    assert len({(s.rows, s.prompt, s.context) for s in steps}) == len(steps) == 26 and steps[0].seconds == 0.25
    (path := tmp_path / "plan.json").write_text(json.dumps(result.to_json()))
    assert len(planned_steps(path)) == 26, "a scheduler can begin with them"
    assert result.devices[0].measured and result.devices[0].bandwidth is None


@pytest.mark.parametrize("batches", [(0,), (1, 5000), (-1,)])
def test_batches_out_of_range(batches: tuple[int, ...], tiny_bundle: Path) -> None:
    with pytest.raises(RequestError, match="batch: "):
        on(tiny_bundle, batches=batches)


def test_recipes_whose_formats_a_target_lacks_are_omitted(tiny_folder: Path) -> None:
    """The cuda target has no kernels for int3 and 4-bit floats; the others of the recipes are planned."""
    names = ("int3", "int8", "mxfp4", "nvfp4", "q4_k")
    result = plan(tiny_folder, PlanOptions(devices=("l4",), recipes=names, context=CONTEXT, prompt=PROMPT))
    assert [p.recipes for p in result.plans] == [("int8",)]
    assert [one.recipes for one in result.omitted] == [("int3",), ("mxfp4",), ("nvfp4",), ("q4_k",)]
    assert all("target cuda: it has no kernels for " in one.why for one in result.omitted)
    with pytest.raises(TargetError, match=r"target cuda: it has no kernels for .* which recipe int3 has in"):
        plan(tiny_folder, PlanOptions(devices=("l4",), recipes=("int3",), context=CONTEXT, prompt=PROMPT))
