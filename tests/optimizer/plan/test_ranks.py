"""Plans for ranks: what is counted, against counts by hand and steps of the programs themselves."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.optimizer.plan import ranks as module
from enginewright.optimizer.plan.links import Link
from enginewright.optimizer.plan.options import PlanOptions
from enginewright.optimizer.plan.planner import CHUNK, Memory
from enginewright.optimizer.plan.ranks import (
    PartitionModel,
    PartitionPlan,
    RankPlans,
    Received,
    Stage,
    Wires,
    alone,
    plan_ranks,
    received,
    stages_of,
)
from enginewright.optimizer.plan.ranks_text import best_line, link_line, notes
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import CapacityError, RequestError, TargetError
from enginewright.runtime.shared.lowered_program import Affine, LoweredProgram
from enginewright.runtime.shared.step_costs import StepSizes

NEAR = Link("near", 100e9, 5e-6, 1e-6, "a test")
FAR = Link("far", 1e9, 20e-6, 10e-6, "a test", between=True)
ONE = StepSizes((1,), (1,))
CONTEXT, PROMPT = 300, 200


def wires(per_machine: int = 64, float_bytes: int = 4) -> Wires:
    return Wires(NEAR, FAR, per_machine, 0.5, float_bytes)


def on(tiny_bundle: Path, **options: object) -> RankPlans:
    settings = {"devices": ("h100",), "links": ("nvlink",), "context": CONTEXT, "prompt": PROMPT, "batches": (1, 4)}
    return plan_ranks(tiny_bundle, PlanOptions(**settings | options))  # type: ignore[arg-type]


def gathered_bytes(program: LoweredProgram, rank: int) -> int:
    """Counts what a step of one token brings, by the views of the rank's own columns."""
    total = 0
    for step in program.steps:
        if step.op == "all_gather" and step.attrs["to"] in (-1, rank):
            for part, whole in zip(step.inputs, step.outputs, strict=True):
                total += (ONE.at(whole.shape[1]) - ONE.at(part.shape[1])) * DTYPES[whole.dtype].bits // 8
        if step.op == "receive":
            total += sum(ONE.at(o.shape[1]) * DTYPES[o.dtype].bits // 8 for o in step.outputs)
    return total


@pytest.mark.parametrize("how", [Partition(tensor=2), Partition(tensor=4), Partition(tensor=2, pipeline=2)], ids=str)
def test_bytes_are_those_that_a_rank_lacks(how: Partition, tiny_program: LoweredProgram) -> None:
    parts = partition(tiny_program, how)
    for rank, part in enumerate(parts):
        collectives = received(part, rank, wires())
        assert sum(n * r.inside for r, n in collectives.items()) == gathered_bytes(part, rank) > 0
        assert not any(r.between for r in collectives)
        halved = received(part, rank, wires(float_bytes=2))  # all of the tiny model's numbers are floats
        assert sum(n * r.inside for r, n in halved.items()) == gathered_bytes(part, rank) / 2
    if how.stages == 1:  # logits are gathered where they are sampled alone
        rows = [sum(n for r, n in received(part, rank, wires()).items() if r.rows.r) for rank, part in enumerate(parts)]
        assert rows == [rows[0], *(rows[0] - 1 for _ in parts[1:])]


def test_machines_split_what_comes(tiny_program: LoweredProgram) -> None:
    parts = partition(tiny_program, Partition(tensor=4))
    near, apart = (received(parts[3], 3, wires(n)) for n in (4, 2))
    whole = sum(n * r.inside for r, n in near.items())
    assert sum(n * (r.inside + r.between) for r, n in apart.items()) == whole
    assert sum(n * r.between for r, n in apart.items()) == pytest.approx(whole * 2 / 3)  # two of three others


def test_one_rank_waits_for_nobody(tiny_program: LoweredProgram) -> None:
    assert received(tiny_program, 0, wires()) == Counter()
    (stage,) = stages_of((tiny_program,), Partition(), wires())
    assert stage.waits == (Counter(),) and len(stage.programs) == 1


@pytest.mark.parametrize(
    ("ranks", "per_machine", "seconds"),
    [
        ((0, 1, 2, 3), 4, 5e-6 + 3e-6),
        ((0, 1, 2, 3), 2, 20e-6 + 1e-6 + 10e-6),
        ((0, 1, 2, 3), 1, 20e-6 + 30e-6),
        ((2,), 4, 0.0),
    ],
)
def test_waiting_without_bytes(ranks: tuple[int, ...], per_machine: int, seconds: float) -> None:
    assert wires(per_machine).waited(ranks, ranks[0]) == pytest.approx(seconds)


def test_bytes_take_their_time() -> None:
    assert wires().seconds(1e6, 0) == pytest.approx(1e6 / 50e9)
    assert wires().seconds(1e6, 1e6) == pytest.approx(1e6 / 0.5e9)  # at the same time
    assert Wires(replace(NEAR, bandwidth=0.0), None, 64, 0.5).seconds(1e6, 0) == 0  # memory: nothing is copied
    one = Received("all_gather", "mlp", Affine(t=1), 1e6, 0.0, 7e-6)
    assert one.seconds(StepSizes((3,), (3,)), wires()) == pytest.approx(7e-6 + 3e6 / 50e9)


@pytest.mark.parametrize("how", [Partition(tensor=2), Partition(tensor=2, pipeline=2)], ids=str)
def test_a_rank_alone_computes_the_same(how: Partition, tiny_program: LoweredProgram) -> None:
    messages = {"all_gather", "send", "receive"}
    for part in partition(tiny_program, how):
        local = alone(part)
        assert [s for s in part.steps if s.op not in messages] == list(local.steps)
        assert not any(b.region for b in local.buffers)
        assert local.memory_problem(5, 2, 2) is None
        assert Memory(local, "cpu").weights == Memory(part, "cpu").weights


class Flat:
    """A stage's times: of its kernels a second for each request and token, around them half a second."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def seconds(self, sizes: StepSizes) -> float:
        return self.factor * sum(sizes.lengths) + 0.5

    def around(self, sizes: StepSizes) -> float:
        return 0.5

    def bound(self, sizes: StepSizes) -> str:
        return "memory"


def staged(*factors: float, waited: float = 0.0) -> PartitionModel:
    waits = Counter({Received("all_gather", "mlp", Affine(t=1), 0.0, 0.0, waited): 2})
    stages = [Stage(i, 1, (), (waits,)) for i in range(len(factors))]
    return PartitionModel(stages, [[Flat(factor)] for factor in factors], wires())


def test_tokens_of_stages() -> None:
    assert staged(1.0).tpot(4, 9) == 4.5
    assert staged(1.0, waited=0.25).tpot(4, 9) == 5.0
    assert staged(1.0, 1.0).tpot(1, 9) == 2.5  # a single request goes through both, one behind the other
    assert staged(1.0, 1.0).tpot(4, 9) == 4.5  # two requests in each stage: each waits for 2 + 2, and the engine
    assert staged(1.0, 3.0).tpot(4, 9) == 12.0  # the slower stage is always busy
    assert staged(1.0, 3.0).waited(ONE) == 0


def test_the_first_token_of_stages() -> None:
    assert staged(1.0).ttft(100, 0, 9) == 100.5
    assert staged(1.0).ttft(2 * CHUNK, 3, 9) == 2 * (CHUNK + 3 + 0.5)
    assert staged(1.0, 2.0).ttft(100, 0, 9) == 300.5
    assert staged(1.0, 2.0).ttft(2 * CHUNK, 4, 9) == 3 * (CHUNK + 2) + 0.5 + 2 * (CHUNK + 2)


def test_what_ranks_wait_for() -> None:
    assert staged(1.0).bound(4, 9) == "memory"
    assert staged(1.0, waited=30.0).bound(4, 9) == "links"


def of(result: RankPlans, name: str) -> PartitionPlan:
    (one_plan,) = (p for p in result.plans if p.partition == name)
    return one_plan


def test_all_partitions_of_some_ranks(tiny_bundle: Path, tiny_program: LoweredProgram) -> None:
    result = on(tiny_bundle, ranks=(4, 1, 2))
    assert [p.partition for p in result.plans] == [
        *("tensor=1", "tensor=2", "pipeline=2"),
        *("tensor=4", "tensor=2,pipeline=2", "pipeline=4"),
    ]
    whole, halves = of(result, "tensor=1"), of(result, "tensor=2")
    assert whole.weights == whole.weights_total == Memory(tiny_program, "cpu").weights
    assert (whole.received, whole.meetings, whole.waited) == (0, 0, 0)
    assert whole.kv_per_token == halves.kv_total == 2 * halves.kv_per_token
    assert halves.weights < whole.weights < halves.weights_total  # a table is on both
    assert of(result, "tensor=4").kv_total == 2 * whole.kv_total  # two heads of keys and values for four ranks
    for plan in result.plans[1:]:
        assert plan.fits and plan.received > 0 and plan.waited > plan.meetings * 6e-6
        assert sum(c.count * (c.inside + c.between) for c in plan.collectives) >= plan.received
        assert [s.batch for s in plan.speeds] == [1, 4]
    assert [(b.ranks, b.latency is not None, b.throughput is not None) for b in result.best] == [
        (n, True, True) for n in (1, 2, 4)
    ]
    for best in result.best:
        fastest = min((p for p in result.plans if p.ranks == best.ranks), key=lambda p: p.speeds[0].tpot or 0)
        assert best.latency == fastest.partition


@pytest.mark.parametrize("requests", [1, 6])
def test_memory_of_each_rank(requests: int, tiny_bundle: Path, tiny_program: LoweredProgram) -> None:
    held = [Memory(alone(p), "cpu") for p in partition(tiny_program, Partition(tensor=2))]
    room = max(one.needed(requests, CONTEXT, PROMPT) for one in held)
    for memory, most in ((room, requests), (room - 1, requests - 1)):
        options = {"partition": "tensor=2", "memory": memory}
        if most == 0:
            with pytest.raises(CapacityError, match=r"tensor=2 a rank's weights of .* may be used on each H100"):
                on(tiny_bundle, **options)
            continue
        plan = of(on(tiny_bundle, **options), "tensor=2")
        assert plan.most_requests == most and plan.largest_limit == "memory"


def test_goals(tiny_bundle: Path) -> None:
    free = of(on(tiny_bundle, partition="tensor=2"), "tensor=2")
    assert free.speeds[1].tpot is not None and free.largest is not None and free.largest.batch > 4
    bound = of(on(tiny_bundle, partition="tensor=2", tpot=free.speeds[1].tpot), "tensor=2")
    assert bound.largest is not None and 4 <= bound.largest.batch < free.largest.batch and bound.largest_limit == "tpot"
    none = on(tiny_bundle, partition="tensor=2", ttft=1e-9)
    assert of(none, "tensor=2").largest is None and none.best[0].throughput is None


def test_a_slower_link_makes_steps_slower(tiny_bundle: Path) -> None:
    times = [
        of(on(tiny_bundle, partition="tensor=2", links=(name,)), "tensor=2").speeds[0].tpot or 0
        for name in ("nvlink", "pcie4", "ndr", "ethernet100", "ethernet1")
    ]
    assert times == sorted(times) and times[0] < times[-1]


def test_this_machine_s_ranks(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and its cores are shared out."""
    calls = []

    def make(options: PlanOptions, *rest: object) -> object:
        calls.append(options.threads)
        return lambda *args: Flat()

    monkeypatch.setattr(module, "model_maker", make)
    monkeypatch.setattr(module, "available_threads", lambda: 8)
    monkeypatch.setattr(module, "room_of", lambda *args: 1 << 30)
    result = on(tiny_bundle, devices=("cpu",), links=(), ranks=(1, 2))
    assert calls == [8, 4, 4]
    assert [p.room for p in result.plans] == [1 << 30, 1 << 29, 1 << 29]
    (inside,) = (w["inside"] for w in result.links.values())
    assert inside["name"] == "memory" and inside["bandwidth"] == 0 and inside["base"] >= 0


def test_texts(tiny_bundle: Path) -> None:
    result = on(tiny_bundle, ranks=(4,), links=("pcie5,ethernet10",), per_machine=2)
    line = link_line(result.links["H100"])
    assert "PCIe 5 within a machine: 63 GB/s, 80%" in line and "Ethernet 10 between machines" in line
    assert line.endswith("2 ranks a machine")
    assert best_line(result.best[0]).startswith("4 ranks: the shortest time per token ")
    assert "none fits" in best_line(replace(result.best[0], latency=None, throughput=None))
    assert any("As many steps are in flight" in note for note in notes(result))
    assert json.loads(json.dumps(result.to_json()))["plans"][0]["collectives"]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"ranks": (65,)}, RequestError, "ranks: 65 is out of range"),
        ({"partition": "tensor=8"}, RequestError, "ranks: 8 are more than the 4 query heads"),
        ({"partition": "pipeline=60"}, RequestError, "60 stages are more than there are places"),
        ({"partition": "ring=2"}, RequestError, "ring=2 isn't planned"),
        ({"partition": "rows=2"}, RequestError, "'rows=2' isn't understood"),
        ({"partition": "tensor=2", "ranks": (4,)}, RequestError, "tensor=2 has 2 ranks"),
        ({"ranks": (2,), "links": ()}, RequestError, "what joins H100s isn't given"),
        ({"ranks": (2,), "links": ("memory",)}, TargetError, "not H100s"),
        ({"ranks": (2,), "links": ("nvlonk",)}, TargetError, "isn't a known link"),
        ({"ranks": (2,), "links": ("ndr,nvlink",)}, RequestError, "aren't a link within machines and one between"),
        ({"ranks": (2,), "links": ("nvlink,pcie4",)}, RequestError, "aren't a link within machines and one between"),
        ({"ranks": (2,), "link_share": 0.0}, RequestError, "link_share: 0 is out of range"),
        ({"ranks": (2,), "links": ("nvlink,ndr",), "per_machine": 0}, RequestError, "per_machine: 0 is out of range"),
        ({"ranks": (2,), "memory": 1 << 10}, CapacityError, "Take more ranks"),
    ],
)
def test_what_is_refused(tiny_bundle: Path, options: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        on(tiny_bundle, **options)
    assert said in str(caught.value)
