from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.loadtest.options import Burst, LoadOptions, RequestClass, parse_lengths
from enginewright.optimizer.loadtest.workload import WORDS, Workload, read_trace
from enginewright.runtime.shared.errors import RequestError


def options(**given: Any) -> LoadOptions:
    return LoadOptions("http://127.0.0.1", **given)


def one_class(**given: Any) -> RequestClass:
    lengths = {name: parse_lengths(value, name) for name, value in given.items() if name != "leave"}
    return RequestClass(**(given | lengths))


def test_the_same_seed_makes_the_same_requests_at_the_same_times() -> None:
    settings = options(rate=3.0, seed=5, classes=(one_class(prompt="5-50", answer="3-9", turns="1-3", leave=0.3),))
    first, second = list(Workload(settings)), list(Workload(settings))
    assert first == second and len(first) == 100
    assert first != list(Workload(replace(settings, seed=6)))
    more = list(Workload(replace(settings, requests=200)))
    assert more[:100] == first  # a longer test begins as the shorter one


def test_what_a_conversation_asks_is_the_same_in_any_loop() -> None:
    settings = options(seed=1, requests=20, classes=(one_class(prompt="5-50"),))
    closed = [one.turns for one in Workload(replace(settings, clients=7))]
    assert closed == [one.turns for one in Workload(replace(settings, rate=9.0, arrivals="bursts"))]


def test_lengths_are_those_that_were_drawn() -> None:
    conversations = list(Workload(options(clients=1, classes=(one_class(prompt="5-9", answer="3-4", turns="2"),))))
    turns = [turn for one in conversations for turn in one.turns]
    assert len(turns) == 200
    assert {len(str(turn.prompt).split()) for turn in turns} == {5, 6, 7, 8, 9}
    assert all(len(str(turn.prompt).split()) == turn.words for turn in turns)
    assert {turn.answer for turn in turns} == {3, 4}
    assert len({turn.prompt for turn in turns}) > 190
    assert len(set(WORDS)) > 200


def test_beginnings_are_shared() -> None:
    conversations = list(Workload(options(clients=1, shared_prefix=30, prefixes=3)))
    assert len({one.prefix for one in conversations}) == 3
    assert {len(one.prefix.split()) for one in conversations} == {30}


def test_a_share_of_clients_leaves_before_the_end() -> None:
    firsts = [one.turns[0] for one in Workload(options(clients=1, requests=2000, classes=(one_class(leave=0.1),)))]
    leaving = [turn.leave_after for turn in firsts if turn.leave_after is not None]
    assert len(leaving) / 2000 == pytest.approx(0.1, abs=0.03)
    assert min(leaving) >= 1 and max(leaving) < 64


def times(count: int, **given: Any) -> list[float]:
    return list(islice(Workload(options(requests=count, **given)).times(), count))


def test_arrivals_come_at_the_rate() -> None:
    assert times(5, rate=2.0, arrivals="constant") == [0, 0.5, 1, 1.5, 2]
    poisson = times(20_000, rate=4.0)
    gaps = [b - a for a, b in pairwise(poisson)]
    assert poisson[-1] == pytest.approx(5000, rel=0.03)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.1353, abs=0.01)  # e to the power of -2


@pytest.mark.parametrize("burst", [Burst(), Burst(2.0, 3.0, 10.0), Burst(1.0, 5.0, 5.0)])
def test_bursts_have_their_share_and_keep_the_rate(burst: Burst) -> None:
    due = times(20_000, rate=4.0, arrivals="bursts", burst=burst)
    assert due == sorted(due)
    assert due[-1] == pytest.approx(5000, rel=0.03)
    inside = sum(at % burst.every < burst.on for at in due) / len(due)
    assert inside == pytest.approx(burst.factor * burst.on / burst.every, abs=0.02)


def test_classes_have_their_shares() -> None:
    classes = (RequestClass("chat", 0.9), RequestClass("batch", 0.3))
    names = [one.of_class.name for one in Workload(options(clients=1, requests=4000, classes=classes))]
    assert names.count("chat") / 4000 == pytest.approx(0.75, abs=0.03)


def test_no_more_are_sent_than_there_is_time_for() -> None:
    conversations = list(Workload(options(rate=8.0, arrivals="constant", seconds=2.0)))
    assert len(conversations) == 17
    assert Workload(options(clients=2, seconds=2.0)).total is None


OURS = [
    {"at": 3.0, "prompt": "Say it", "max_tokens": 9},
    {"at": 1.0, "prompt": 12, "class": "chat"},
    {"at": 1.5, "messages": [{"role": "user", "content": "Hi"}]},
]
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1500, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 30, "hash_ids": [1, 2, 9]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def trace(folder: Path, rows: Any) -> Path:
    file = folder / "trace"
    file.write_text(rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows)))
    return file


def test_a_trace_of_ours(tmp_path: Path) -> None:
    work = Workload(options(trace=trace(tmp_path, OURS), speed=2.0))
    conversations = list(work)
    assert work.is_open and [one.at for one in conversations] == [0, 0.25, 1]
    assert len(str(conversations[0].turns[0].prompt).split()) == 12
    assert conversations[1].turns[0].prompt == ({"role": "user", "content": "Hi"},)
    assert (conversations[2].turns[0].prompt, conversations[2].turns[0].answer) == ("Say it", 9)


def test_a_trace_s_requests_can_come_otherwise(tmp_path: Path) -> None:
    closed = Workload(options(trace=trace(tmp_path, OURS), clients=2, requests=7))
    assert not closed.is_open and len(list(closed)) == 7
    rated = Workload(options(trace=trace(tmp_path, OURS), rate=2.0, arrivals="constant"))
    assert [one.at for one in rated] == [0, 0.5, 1]
    untimed = Workload(options(trace=trace(tmp_path, [{"prompt": "Hi"}])))
    assert not untimed.is_open and untimed.clients == 4


def test_mooncake_s_traces_share_beginnings(tmp_path: Path) -> None:
    first, second = Workload(options(trace=trace(tmp_path, MOONCAKE)))
    a, b = (str(one.turns[0].prompt).split() for one in (first, second))
    assert (len(a), len(b), second.at) == (1500, 1100, 2)
    assert a[:1024] == b[:1024] and a[1024:1100] != b[1024:]
    assert (first.turns[0].answer, second.turns[0].answer) == (20, 30)


def test_azure_s_traces(tmp_path: Path) -> None:
    first, second = Workload(options(trace=trace(tmp_path, AZURE)))
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert (first.turns[0].words, first.turns[0].answer, second.turns[0].answer) == (374, 44, 109)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "empty"),
        ("{", "request 1"),
        ('{"at": 1}\n[]', "request 2"),
        ('{"at": "x"}', "at"),
        ('{"at": -1}', "at"),
        ('{"when": 1}', "when"),
        ('{"prompt": 1.5}', "tokens"),
        ('{"messages": []}', "messages"),
        ('{"class": 3}', "class"),
        ('{"hash_ids": ["x"]}', "request 1"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6,5\n", "GeneratedTokens"),
    ],
)
def test_a_trace_that_is_wrong_says_where(rows: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="trace: ") as raised:
        read_trace(trace(tmp_path, rows))
    assert said in str(raised.value)


def test_a_trace_s_classes_must_be_there(tmp_path: Path) -> None:
    classes = (RequestClass("chat"), RequestClass("batch"))
    conversations = list(Workload(options(trace=trace(tmp_path, OURS), classes=classes)))
    assert conversations[0].of_class.name == "chat"
    with pytest.raises(RequestError, match="no class 'other'"):
        Workload(options(trace=trace(tmp_path, [{"class": "other"}]), classes=classes))


def test_what_is_sent_is_described(tmp_path: Path) -> None:
    description = Workload(options(rate=2.0, arrivals="bursts", seed=3)).describe()
    assert json.loads(json.dumps(description)) == description
    assert (description["loop"], description["seed"], description["rate"], description["burst"]["factor"]) == (
        "open",
        3,
        2.0,
        5.0,
    )
    assert Workload(options(clients=3)).describe()["clients"] == 3
