"""A kind of cache is a class and a row: a state beside keys and values gives the tokens that its model says."""

from __future__ import annotations

import itertools
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.prefixes import open_tier
from enginewright.runtime.kv_cache.kinds.paged import PagedCache
from enginewright.runtime.kv_cache.kinds.slot import SlotCache
from enginewright.runtime.kv_cache.kinds.state import StateCache
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes, kind_of
from enginewright.runtime.kv_cache.kinds.window import WindowCache
from enginewright.runtime.kv_cache.pool_plan import enough_for_windows, plan_pools
from enginewright.runtime.requests.lookup import OwnText, PastAnswers
from enginewright.runtime.requests.request import BeamSearch, Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.scheduler.step_times import DecodeTimes
from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps, StepInput, StepOutput
from enginewright.runtime.shared.errors import BundleError

from ..conftest import VOCAB, ToyExecutor

SIZE, LONGEST, WINDOW = 8, 96, 20
FULL = CacheGroup("full", (0,), 2, 4, 6, block_size=SIZE)
SEEN = CacheGroup("window", (1,), 2, 4, 6, block_size=SIZE, window=WINDOW)
ENDS = CacheGroup("ends", (0,), 2, 4, 6, block_size=SIZE, window=WINDOW, first=2 * SIZE)
STATE = CacheGroup("state", (2,), 1, 1, 1, block_size=LONGEST, kind="state", state_size=16)
GROUPS = {"state": (STATE,), "hybrid": (FULL, STATE), "three": (STATE, FULL, SEEN), "ends": (STATE, FULL, ENDS)}


def following(state: int, token: int) -> int:
    """The state after one token more."""
    return zlib.crc32(int(token).to_bytes(4, "little"), state)


def drawn(state: int, seen: Sequence[NDArray[np.int32]]) -> int:
    """The model: one of two tokens, by the state and by what each layer sees, so that drafts are often right."""
    for tokens in seen:
        state = zlib.crc32(tokens.tobytes(), state)
    return state >> 7 & 1


def seen_by(group: CacheGroup, position: int) -> NDArray[np.int64]:
    """The positions of the keys that a query sees."""
    keys = np.arange(position + 1)
    return keys[(keys > position - group.window) | (keys < group.first)] if group.window else keys


def answer(groups: Sequence[CacheGroup], prompt: Sequence[int], new: int) -> list[int]:
    """The answer by the model's definition, without an engine."""
    tokens = list(prompt)
    for _ in range(new):
        state = 0
        for token in tokens:
            state = following(state, token)
        seen = [np.array(tokens, np.int32)[seen_by(g, len(tokens) - 1)] for g in groups if not g.kind]
        tokens.append(drawn(state, seen))
    return tokens[len(prompt) :]


class StateExecutor(ToyExecutor):
    """Keeps tokens in place of keys and values, and a state in the first place of a state's block."""

    def __init__(self, groups: Sequence[CacheGroup], blocks: int, states: int) -> None:
        rows = {1: tuple(1 + 0.001 * n for n in range(8))}  # a draft's row costs nearly nothing
        super().__init__(blocks, caps=ExecutorCaps(shared_blocks=True, verifies=True, row_seconds=rows))
        self.cache_groups = tuple(groups)
        self.blocks = {g.name: states if g.kind else blocks for g in groups}
        self.memory = {g.name: np.full(self.blocks[g.name] * g.block_size, -1, np.int32) for g in groups}

    def run(self, step: StepInput) -> StepOutput:
        for name, cleared in step.clears.items():
            self.memory[name].reshape(self.blocks[name], -1)[cleared] = -1
        for name, pairs in step.copies.items():
            blocks = self.memory[name].reshape(self.blocks[name], -1)
            for source, to in pairs:
                blocks[to] = blocks[source]
        for group in self.cache_groups:
            if not group.kind:
                self.memory[group.name][step.slots[group.name]] = step.ids
        tokens = {int(row): 0 for row in step.rows}
        for b, (first, end) in enumerate(itertools.pairwise(step.q_start.tolist())):
            place = step.block_tables["state"][b, 0] * LONGEST
            state = int(self.memory["state"][place].view(np.uint32)) if step.positions[first] else 0
            for row in range(first, end):
                state = following(state, step.ids[row])
                if (slot := int(step.slots["state"][row])) >= 0:
                    self.memory["state"][slot // LONGEST * LONGEST] = np.uint32(state).view(np.int32)
                if row in tokens:
                    tokens[row] = drawn(state, [self._seen(step, g, b, row) for g in self.cache_groups if not g.kind])
            self.memory["state"][place] = np.uint32(state).view(np.int32)
        out = StepOutput(np.array(list(tokens.values()), np.int32))
        if step.sampling is not None and (n := step.sampling.logprobs) is not None:  # of a beam search
            out.token_logprobs = np.zeros(len(tokens), np.float32)
            out.top_ids = (out.tokens[:, None] + np.arange(n, dtype=np.int32)) % VOCAB
            out.top_logprobs = -0.1 * np.arange(1, n + 1, dtype=np.float32)[None].repeat(len(tokens), 0)
        return out

    def _seen(self, step: StepInput, group: CacheGroup, b: int, row: int) -> NDArray[np.int32]:
        p = seen_by(group, int(step.positions[row]))
        return self.memory[group.name][step.block_tables[group.name][b][p // SIZE] * SIZE + p % SIZE]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    engines = []
    monkeypatch.setattr(DecodeTimes, "took", lambda *given: None)  # whether a draft pays is a matter of ``row_seconds``

    def make(groups: Sequence[CacheGroup], blocks: int = 64, states: int = 16, **config: Any) -> Engine:
        scheduling = SchedulerConfig(**({"prefix_cache": True} | config))
        engine = Engine(StateExecutor(groups, blocks, states), scheduling, (OwnText(), PastAnswers()))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.executor.close()


def ask(prompt: Sequence[int], new: int = 20, **more: Any) -> Generation:
    params = SamplingParams(max_tokens=new, ignore_eos=True, **more)
    return Generation(prompt, params)


def run(engine: Engine, *requests: Generation) -> list[list[int]]:
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
        if (disk := engine.scheduler.cache.tier) is not None:
            disk.flush()  # on a busy machine a later step would find nothing
    for name, pool in engine.pools.items():  # the next step makes copies that are pending
        pending = {block for pair in engine.scheduler.cache.copies.get(name, ()) for block in pair}
        assert pool.free_blocks + len(pending) == pool.total_blocks
    assert all(request.error is None for request in requests)
    return [request.tokens[request.prompt_length :] for request in requests]


def prompts(seed: int, count: int) -> list[list[int]]:
    """Some begin alike."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 2, 48).tolist()
    return [common[: rng.integers(20, 48)] + rng.integers(0, 2, rng.integers(1, 20)).tolist() for _ in range(count)]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
@pytest.mark.parametrize(
    "config",
    [
        {"speculate": False, "prefix_cache": False},
        {"speculate": False, "prefill_chunk": 8},
        {"speculate": True, "prefix_cache": False},
        {"speculate": True, "prefill_chunk": 16},
    ],
    ids=["plain", "prefixes", "drafts", "both"],
)
def test_answers_are_those_of_the_model(opened: Any, groups: tuple[CacheGroup, ...], config: dict[str, Any]) -> None:
    engine = opened(groups, **config)
    counts, begun_at = {"accepted": 0, "rejected": 0}, list[int]()
    for seed in range(4):
        requests = [ask(prompt) for prompt in prompts(seed, 6)]
        for at in range(0, 6, 2):
            pair = requests[at : at + 2]
            assert run(engine, *pair) == [answer(groups, r.tokens[: r.prompt_length], 20) for r in pair]
            begun_at += [r.cached_tokens or 0 for r in pair]
        counts["accepted"] += sum(r.accepted for r in requests)
        counts["rejected"] += sum(r.drafted - r.accepted for r in requests)
    use = engine.scheduler.cache.use
    if config.get("prefix_cache", True):
        assert use.reused > 0 and any(tokens % SIZE for tokens in begun_at), "snapshots are stored at any token"
    if config["speculate"]:
        assert counts["accepted"] > 20 and counts["rejected"] > 20


def test_requests_that_are_preempted_go_on_from_a_kept_state(opened: Any) -> None:
    engine = opened(GROUPS["three"], blocks=18, states=5, speculate=True)
    requests = [ask(prompt, 24) for prompt in prompts(7, 12)]
    assert run(engine, *requests) == [answer(GROUPS["three"], r.tokens[: r.prompt_length], 24) for r in requests]
    assert engine.preemptions > 0 and engine.pools["state"].evictions > 0


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_the_sequences_of_a_beam_search_have_states_of_their_own(opened: Any, groups: tuple[CacheGroup, ...]) -> None:
    seen_states = []
    for states in (4, 40):
        engine = opened(groups, states=states)
        request = ask(prompts(3, 1)[0], 12, num_beams=3)
        BeamSearch.begin(request, VOCAB)
        seen_states.append(run(engine, request))
        branch = seen_states[-1][0]
        assert len(branch) == 12 and set(branch) <= set(range(VOCAB))
    assert seen_states[0] == seen_states[1]
    # The best sequence has the most probable token at each place: that of the model.
    assert seen_states[0] == [answer(groups, request.tokens[: request.prompt_length], 12)]


def test_a_beam_search_begins_once_there_is_a_state_for_each_sequence(opened: Any) -> None:
    engine = opened(GROUPS["hybrid"], states=4)
    prompt = prompts(5, 1)[0]
    first, search, last = ask(prompt, 8), ask(prompt, 12, num_beams=4), ask(prompt, 8)
    BeamSearch.begin(search, VOCAB)
    assert run(engine, first, search, last) == [answer(GROUPS["hybrid"], prompt, new) for new in (8, 12, 8)]
    assert engine.preemptions == 0
    assert search.started is not None and last.started is not None
    assert first.token_times is not None and search.token_times is not None
    assert first.token_times[1] <= search.started and search.token_times[1] <= last.started


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_states_go_to_a_disk_and_come_back(
    opened: Any, groups: tuple[CacheGroup, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted states are found while their keys are still in memory, and all of them by a later engine."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    counts = {"from_disk": 0, "later": 0}
    for later in (False, True):
        engine = opened(groups, states=5, prefill_chunk=16)
        cache = engine.scheduler.cache
        cache.tier = open_tier(engine.executor, cache, tmp_path / "kept")
        for seed in range(3):
            requests = [ask(prompt, 8) for prompt in prompts(seed, 8)]
            assert run(engine, *requests) == [answer(groups, r.tokens[: r.prompt_length], 8) for r in requests]
        counts["later" if later else "from_disk"] = cache.use.from_disk
        cache.save_all(cache.tier)
        cache.tier.close()
        assert cache.tier.describe()["disk"]["problem"] is None
    assert counts["from_disk"] > 0 and counts["later"] > 100, counts


@pytest.mark.parametrize("what", ["damaged", "lost", "another record", "another version"])
def test_states_that_can_t_be_believed_are_computed_again(
    opened: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    prompt = prompts(11, 1)[0] + [0, 1] * 5
    for again in (False, True):
        engine = opened(GROUPS["hybrid"])
        if again and what == "another version":
            monkeypatch.setattr(engine.executor, "cache_identity", b"other numerics")
        cache = engine.scheduler.cache
        cache.tier = open_tier(engine.executor, cache, tmp_path / "kept")
        records = sorted((tmp_path / "kept").glob("*.kv"), key=lambda path: path.stat().st_size)
        states = [path for path in records if path.stat().st_size > 4 * LONGEST]
        assert not again or 0 < len(states) < len(records)
        for path in states if again else ():
            content = path.read_bytes()
            if what == "damaged":
                path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
            elif what == "another record":
                path.write_bytes(records[0].read_bytes())
            elif what == "lost":
                path.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert run(engine, ask(prompt, 8)) == [answer(GROUPS["hybrid"], prompt, 8)]
        assert cache.use.from_disk == 0
        assert (cache.tier.describe()["disk"]["refused"] > 0) == (again and what in ("damaged", "another record"))
        cache.save_all(cache.tier)
        cache.tier.close()


def test_memory_is_planned_by_kinds() -> None:
    assert cache_block_bytes(STATE) == 4 * 16
    assert cache_block_bytes(FULL) == 4 * 2 * (4 + 6) * SIZE
    assert enough_for_windows([FULL, STATE], 3, 100) == {"state": 6 * LONGEST}
    plan = plan_pools([FULL, STATE], 100_000, 30 * LONGEST, 0, {"state": 6 * LONGEST})
    assert plan.blocks == {"full": 155, "state": 6} and plan.tokens == 155 * SIZE
    assert plan.bytes == 155 * cache_block_bytes(FULL) + 6 * cache_block_bytes(STATE) <= 100_000


def test_each_group_is_of_the_first_kind_that_takes_it() -> None:
    shared, slots, plain = ExecutorCaps(shared_blocks=True), ExecutorCaps(kept_slots=True), ExecutorCaps()
    summaries = FULL.model_copy(update={"summaries": True})
    assert [kind_of(group, shared) for group in (FULL, SEEN, ENDS, summaries)] == [
        *(PagedCache, WindowCache, WindowCache, PagedCache)
    ]
    assert [kind_of(group, slots) for group in (FULL, SEEN)] == [SlotCache, SlotCache]
    assert kind_of(SEEN, plain) is PagedCache
    assert kind_of(STATE) is StateCache
    with pytest.raises(BundleError, match="'state': kind 'latent' isn't a kind of cache"):
        kind_of(STATE.model_copy(update={"kind": "latent"}))


def tokens_of(seed: int, count: int) -> list[int]:
    """Tokens that follow no other text of these tests."""
    return np.random.default_rng(seed).integers(0, 2, count).tolist()


@pytest.mark.parametrize("name", ["state", "hybrid"])
@pytest.mark.parametrize("chunk", [None, 8, 13])
def test_a_prompt_resumes_at_the_token_where_two_others_diverged(opened: Any, name: str, chunk: int | None) -> None:
    """Three prompts share 29 tokens. The second one stores its states there, and the third one begins there."""
    groups = GROUPS[name]
    engine = opened(groups, prefill_chunk=chunk, speculate=False)
    common = tokens_of(5, 29)
    begun_at = []
    for ending in (2, 3, 4):
        request = ask([*common, ending, *tokens_of(6, 29)], 3)
        assert run(engine, request) == [answer(groups, request.tokens[: request.prompt_length], 3)]
        begun_at.append(request.cached_tokens)
    assert begun_at[0] == 0 and begun_at[1] < 29 and begun_at[2] == 29, begun_at


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_a_turn_resumes_at_the_end_of_the_last_one(opened: Any, groups: tuple[CacheGroup, ...]) -> None:
    """The state after the answer's last computed token is kept where it is, without a copy or a block more."""
    engine, text = opened(groups, speculate=False), tokens_of(8, 21)
    for turn in range(4):
        request = ask(text, 6)
        assert run(engine, request) == [answer(groups, text, 6)]
        assert request.cached_tokens == (len(text) - 4 if turn else 0), "the last token of an answer isn't computed"
        text = [*request.tokens, *tokens_of(turn, 3)]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
def test_the_same_prompt_again_computes_its_last_token_alone(opened: Any, groups: tuple[CacheGroup, ...]) -> None:
    engine, text = opened(groups, speculate=False), tokens_of(9, 45)
    first, second = ask(text, 5), ask(text, 5)
    assert run(engine, first) == run(engine, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 44)


def test_a_request_waits_for_the_snapshot_of_one_that_computes_its_prefix(opened: Any) -> None:
    """Both share 43 tokens: the first one stores its states behind the last whole block of them, for the other one."""
    engine, common = opened(GROUPS["hybrid"], speculate=False, prefill_chunk=16), tokens_of(11, 43)
    one, other = ask([*common, 0, *tokens_of(1, 20)], 4), ask([*common, 1, *tokens_of(2, 20)], 4)
    assert run(engine, one, other) == [answer(GROUPS["hybrid"], r.tokens[:64], 4) for r in (one, other)]
    assert (one.cached_tokens, other.cached_tokens) == (0, 40)


def test_the_snapshots_used_last_are_kept(opened: Any) -> None:
    """A pool of six states, of which a running request has one, keeps the most recently used of many texts."""
    engine = opened(GROUPS["hybrid"], states=6, speculate=False)
    texts = [tokens_of(20 + n, 17) for n in range(9)]
    for text in texts:
        run(engine, ask(text, 2))
        run(engine, again := ask(texts[0], 2))
        assert again.cached_tokens in (0, 16)
    assert again.cached_tokens == 16, "it was used in each turn"
    pool = engine.pools["state"]
    assert pool.evictions > 0 and 0 < pool.kept_blocks <= 6
    oldest = ask(texts[1], 2)
    run(engine, oldest)
    assert oldest.cached_tokens == 0, "its snapshots were evicted"


def test_first_tokens_and_a_window_are_held_and_found_again(opened: Any) -> None:
    """Blocks between the two are released while a request runs. A prefix needs both of them."""
    groups = (STATE, FULL, ENDS)
    engine, text = opened(groups, speculate=False, prefill_chunk=8), tokens_of(13, 80)
    engine.add_request(request := ask(text, 6))
    for _ in range(11):
        engine.step()
    table = request.tables["ends"]
    assert [at for at, block in enumerate(table) if block == -1] == list(
        range(2, (len(request.tokens) - WINDOW) // SIZE)
    )
    assert len({*table} - {-1}) <= 2 + -(-WINDOW // SIZE) + 1
    while engine.has_work():
        engine.step()
    second = ask(text, 6)
    assert run(engine, second) == [request.tokens[80:]] == [answer(groups, text, 6)]
    assert second.cached_tokens == 79
    engine.scheduler.cache.lose("ends", [engine.scheduler.cache.index.nodes()[1].blocks[2]])
    again = ask(text, 6)
    assert run(engine, again) == [request.tokens[80:]]
    assert again.cached_tokens < 79, "one of the first blocks was lost"


@pytest.mark.parametrize("ends", ["fails", "aborted"])
def test_a_step_that_fails_leaves_no_snapshot(opened: Any, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    engine, text = opened(GROUPS["hybrid"], speculate=False, prefill_chunk=16), tokens_of(12, 40)
    engine.add_request(request := ask(text, 4))
    engine.step()
    before = len(engine.scheduler.cache.index.nodes())
    batch = engine.scheduler.schedule()
    assert (batch.step.slots["state"] >= 0).any(), "the step stores snapshots"
    if ends == "fails":
        engine.scheduler.abort_all()
    else:
        engine.scheduler.abort(request)
    nodes = engine.scheduler.cache.index.nodes()
    assert len(nodes) == before and not any(node.states for node in nodes[2:])
    assert engine.pools["state"].free_blocks == engine.pools["state"].total_blocks
