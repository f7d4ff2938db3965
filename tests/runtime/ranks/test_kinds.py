"""A kind of partition that nobody knows is a class and a row: it is parsed, cut, run and planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import pytest

from enginewright.optimizer.plan.options import PlanOptions
from enginewright.optimizer.plan.ranks import plan_ranks
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.ranks.kinds.base import LayerKind, Rule
from enginewright.runtime.ranks.kinds.table import KINDS
from enginewright.runtime.ranks.kinds.tensor import RULES
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition, whole_groups
from enginewright.runtime.shared.errors import RequestError
from tests.acceptance.test_ranks import logits_of


class Replicas(LayerKind):
    """Divides nothing: every rank computes all of each layer, and has all of the caches."""

    name = "replica"


class Products(LayerKind):
    """Divides products alone; heads, caches and experts are whole on every rank."""

    name = "products"
    collectives = ("all_gather",)
    unplanned = "it is a test"
    rules: ClassVar[dict[str, Rule]] = {op: rule for op, rule in RULES.items() if op in ("linear", "quantized_linear")}


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Replicas(), Products()):
        monkeypatch.setitem(KINDS, kind.name, kind)


@pytest.mark.parametrize("text", ["replica=2", "products=2", "pipeline=2,replica=2", "pipeline=2,products=2"])
def test_bits_are_those_of_one_rank(text: str, tiny_bundle: Path) -> None:
    bundle, how = Bundle.open(tiny_bundle), Partition.parse(text)
    program = bundle.program("cpu")
    parts = partition(program, how)
    assert str(how) == text and len(parts) == how.ranks and how.owners == 1
    for expected, logits in zip(logits_of(bundle, [program]), logits_of(bundle, parts), strict=True):
        assert logits.tobytes() == expected.tobytes()


def test_what_is_not_divided_is_whole_on_every_rank(tiny_bundle: Path) -> None:
    program = Bundle.open(tiny_bundle).program("cpu")
    how = Partition(replica=3)
    for part in partition(program, how):
        assert part.cache_groups == program.cache_groups
        assert {use.name for use in part.weights} == {use.name for use in program.weights}
        assert [step.op for step in part.steps] == [step.op for step in program.steps]
    (group,) = whole_groups(partition(program, how), how)
    assert group.planes[0].heads == 3 * program.cache_groups[0].planes[0].heads  # memory of three caches
    halves = partition(program, Partition(products=2))
    assert all(part.cache_groups == program.cache_groups for part in halves)
    assert {step.op for step in halves[0].steps} - {step.op for step in program.steps} == {"all_gather"}


def test_the_plan_lists_it(tiny_bundle: Path) -> None:
    result = plan_ranks(tiny_bundle, PlanOptions(ranks=(2,), devices=("H100",), links=("nvlink",)))
    assert [plan.partition for plan in result.plans] == ["tensor=2", "pipeline=2", "replica=2"]
    one = result.plans[-1]
    assert one.kv_total == 2 * one.kv_once and one.weights == one.weights_once and not one.meetings
    with pytest.raises(RequestError, match="products=2 isn't planned: it is a test"):
        plan_ranks(tiny_bundle, PlanOptions(partition="products=2", devices=("H100",), links=("nvlink",)))


def test_the_page_has_a_row_for_each_of_ours() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "use" / "ranks.md").read_text(encoding="utf-8")
    ours = [name for name, kind in KINDS.items() if type(kind).__module__ != __name__]
    assert ours == re.findall(r"^\| `(\w+)=N`(?:, or `ranks=N`)? \|", page, re.M)


def test_two_that_divide_layers_do_not_go_together(tiny_bundle: Path) -> None:
    program = Bundle.open(tiny_bundle).program("cpu")
    with pytest.raises(RequestError, match="tensor=2,replica=2: tensor doesn't go together with replica"):
        partition(program, Partition.parse("tensor=2,replica=2"))
    with pytest.raises(RequestError, match="isn't understood") as caught:
        Partition.parse("rows=2")
    assert caught.value.hint == "Write tensor=N, pipeline=N, ring=N, replica=N, products=N."
    with pytest.raises(TypeError, match="no kind of partition 'rows'"):
        Partition(rows=2)
