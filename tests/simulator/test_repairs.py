"""Each repair undone, by a change of the product's source that is here: the simulator finds the defect again."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from enginewright.runtime.engine import prefixes
from enginewright.runtime.kv_cache.block_pool import BlockPool, DividedPool
from enginewright.runtime.kv_cache.cache_manager import CacheManager
from enginewright.runtime.kv_cache.candidate import Candidate
from enginewright.runtime.kv_cache.disk_tier import DiskTier
from enginewright.runtime.kv_cache.held_blocks import HeldBlocks
from enginewright.runtime.requests.request import Request
from enginewright.runtime.requests.structured import Grammars
from enginewright.runtime.scheduler import step_times
from enginewright.runtime.scheduler.prefill_phase import PrefillPhase
from enginewright.runtime.scheduler.step_inputs import DecodeStep
from enginewright.runtime.scheduler.step_times import StepTimes
from tests.simulator import world
from tests.simulator.scenario import Scenario, scenario
from tests.simulator.seeds import recorded
from tests.simulator.world import run

MOST_SEEDS = 10_000
FIRST_SEEDS = {"table_of_before": 1731, "steps_that_do_not_overlap": 2711, "snapshots_that_keep_a_search_waiting": 1994}
"""Defect -> the seed at which its search begins, if not at 0: the first seed that found it. The ones before take most
of a minute. If the seed doesn't find it any more, the next ones are tried."""
Undo = Callable[[pytest.MonkeyPatch], None]


def changed(patch: pytest.MonkeyPatch, owner: type, name: str, *edits: tuple[str, str]) -> None:
    """Replaces a method by one whose source has other text. Raises AssertionError where the text isn't there."""
    method = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(method))
    for now, before in edits:
        assert source.count(now) == 1, f"{owner.__name__}.{name} has no {now!r}"
        source = source.replace(now, before)
    scope: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, vars(sys.modules[owner.__module__]), scope)
    patch.setattr(owner, name, scope[name])


def estimates_of_zero(patch: pytest.MonkeyPatch) -> None:
    """A step that was never measured is estimated to take no time, and a measured time is cut to a multiple of that."""
    patch.setattr(step_times, "LEAST_SECONDS", 0.0)
    changed(
        patch,
        StepTimes,
        "observe",
        ("if self.known and mean is not None:", "if self.known:"),
        ("max(self.seconds(size), mean[6])", "self.seconds(size)"),
        (" or (self.known and _kind(size.rows, size.prompt) not in self._kinds)", ""),
    )


def tables_of_before(patch: pytest.MonkeyPatch) -> None:
    """Rows of block tables are read again only where a request comes to another block, or leaves one behind."""
    changed(
        patch,
        DecodeStep,
        "_changed_tables",
        (
            "[b for b, version in enumerate(versions) if version != self._versions[b]]",
            "[b for b, start in enumerate(self._starts) if any(not (start - edge) % g.block_size "
            "for g, *_ in self._groups for edge in (0, g.window - 1))]",
        ),
    )


def drafts_on_the_answer_s_own_matcher(patch: pytest.MonkeyPatch) -> None:
    """An error that a draft brings up stays."""
    changed(
        patch,
        Grammars,
        "fill",
        ("(grammar._matcher.deep_copy(), at, draft)", "(grammar._matcher, at, draft)"),
    )


def one_step_takes_all_that_decode(patch: pytest.MonkeyPatch) -> None:
    """Requests that were left to other steps in flight are taken as prompts of one token."""
    changed(patch, PrefillPhase, "_running_chunks", (" or request.decodes:", ":"))


def copies_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A pending copy doesn't keep its source or its destination."""
    for pool in (BlockPool, DividedPool):
        patch.setattr(pool, "pin", lambda self, block: None)
        patch.setattr(pool, "unpin", lambda self, block: None)


def folder_of_a_call_as_the_engine_s(patch: pytest.MonkeyPatch) -> None:
    """The folder of ``load_prefix`` is the engine's tier while blocks are evicted."""

    def load_prefix(cache: CacheManager, request: Request, disk: DiskTier) -> int:
        before, cache.tier = cache.tier, disk
        try:
            if not cache.begin(Candidate(request)):
                return 0
            return request.computed
        finally:
            cache.tier = before
            cache.release(request)

    assert world.load_prefix is prefixes.load_prefix
    patch.setattr(world, "load_prefix", load_prefix)


def only_searches_give_way(patch: pytest.MonkeyPatch) -> None:
    """Only the searches give way where nobody can go on: others keep the room that one of them needs."""
    now = "list(queues.running)"
    before = "[request for request in queues.running if request.search is not None]"
    changed(patch, PrefillPhase, "chunks_of_first_search", (now, before))


def snapshots_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    """A pending snapshot keeps a block that a sequence of a beam search waits for."""
    patch.setattr(CacheManager, "cancel_snapshots", lambda self: False)


def states_are_promised_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """A search begins with one state for all of its sequences, and pending snapshots keep their blocks."""
    snapshots_keep_their_blocks(patch)
    patch.setattr(HeldBlocks, "fixed_blocks", lambda self, sequences: dict.fromkeys(self.kinds, 0))


UNDONE: dict[str, Undo] = {
    "estimate_of_zero": estimates_of_zero,
    "table_of_before": tables_of_before,
    "wrong_draft": drafts_on_the_answer_s_own_matcher,
    "steps_that_do_not_overlap": one_step_takes_all_that_decode,
    "source_of_a_copy": copies_hold_nothing,
    "folder_of_one_call": folder_of_a_call_as_the_engine_s,
    "search_whose_room_others_keep": only_searches_give_way,
    "snapshots_that_keep_a_search_waiting": snapshots_keep_their_blocks,
    "as_many_states_as_beams": states_are_promised_to_nobody,
}
"""A recorded scenario -> what undoes the repair that it is of."""
RARE = frozenset({"search_whose_room_others_keep", "as_many_states_as_beams"})
"""Defects that fewer than one in 10,000 seeds find."""


def fails(one: Scenario) -> bool:
    return bool(run(one).failures)


@pytest.mark.parametrize("name", UNDONE)
def test_without_its_repair_a_recorded_scenario_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recorded()[name]
    assert not fails(one)
    UNDONE[name](monkeypatch)
    assert fails(one)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in UNDONE if name not in RARE])
def test_without_its_repair_new_seeds_find_the_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    UNDONE[name](monkeypatch)
    seeds = range(FIRST_SEEDS.get(name, 0), MOST_SEEDS)
    failing = next(filter(lambda seed: fails(scenario(seed)), seeds))
    monkeypatch.undo()
    assert not fails(scenario(failing)), "it is the repair that makes the difference"
