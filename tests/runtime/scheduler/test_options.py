"""The options of ``LLM(scheduling=...)``, and those that are refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.requests.request_class import NO_TARGETS, RequestClass
from enginewright.runtime.scheduler.options import Scheduling, parse_seconds, scheduling_of
from enginewright.runtime.shared.errors import RequestError


def test_names_and_options() -> None:
    assert scheduling_of(None) is scheduling_of("fcfs") is None
    assert scheduling_of("priority") == Scheduling()
    assert scheduling_of("fair") == Scheduling(fair=True)
    assert scheduling_of("offline") == Scheduling(offline=True)
    scheduling = Scheduling(classes={"chat": {"ttft": "500ms", "tpot": 0.03}, "batch": RequestClass("x", priority=2)})
    assert scheduling_of(scheduling) is scheduling
    assert scheduling.class_named("chat") == RequestClass("chat", 0.5, 0.03)
    assert scheduling.class_named("batch") == RequestClass("batch", None, None, 2)
    assert scheduling.class_named(None) == NO_TARGETS
    assert scheduling_of({"classes": {"default": {"ttft": 2}}}).class_named(None).ttft == 2  # type: ignore[union-attr]


def test_a_class_that_does_not_exist() -> None:
    with pytest.raises(RequestError, match=r"^request_class: there is no class 'caht'\n.*chat, batch\."):
        Scheduling(classes={"chat": {}, "batch": {}}).class_named("caht")
    with pytest.raises(RequestError, match=r"of this LLM: none\."):
        Scheduling().class_named("chat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (7, "scheduling: 7"),
        ("lifo", "scheduling: 'lifo'\n.*'fcfs', 'priority', 'fair', 'offline'"),
        ({"clases": {}}, "scheduling: there is no option 'clases'"),
        ({"classes": ["chat"]}, r"scheduling: classes: \['chat'\] isn't a dictionary"),
        ({"classes": {"": {}}}, "scheduling: classes: '' isn't a name"),
        ({"classes": {"chat": 0.5}}, "scheduling: classes: chat: 0.5 isn't a dictionary"),
        ({"classes": {"chat": {"tftt": 1}}}, "scheduling: classes: chat: there is no target 'tftt'"),
        ({"classes": {"chat": {"ttft": 0}}}, "scheduling: classes: chat: ttft: 0 isn't a time"),
        ({"classes": {"chat": {"ttft": "0ms"}}}, "scheduling: classes: chat: ttft: '0ms' isn't a time"),
        ({"classes": {"chat": {"tpot": math.nan}}}, "scheduling: classes: chat: tpot: nan isn't a time"),
        ({"classes": {"chat": {"tpot": math.inf}}}, "scheduling: classes: chat: tpot: inf isn't a time"),
        ({"classes": {"chat": {"tpot": -1}}}, "scheduling: classes: chat: tpot: -1 isn't a time"),
        ({"classes": {"chat": {"tpot": "fast"}}}, "scheduling: classes: chat: tpot: 'fast' isn't a time"),
        ({"classes": {"chat": {"tpot": True}}}, "scheduling: classes: chat: tpot: True isn't a time"),
        ({"classes": {"chat": {"priority": 1.5}}}, "scheduling: classes: chat: priority: 1.5 isn't an integer"),
        ({"shares": {"a": 0}}, "scheduling: shares: 'a': 0"),
        ({"shares": {"a": math.nan}}, "scheduling: shares: 'a': nan"),
        ({"shares": {3: 1}}, "scheduling: shares: 3: 1"),
        ({"shares": 2}, "scheduling: shares: 2 isn't a dictionary"),
        ({"fair": 1}, "scheduling: fair: 1 isn't True or False"),
        ({"max_waiting": -1}, "scheduling: max_waiting: -1"),
        ({"max_waiting": True}, "scheduling: max_waiting: True"),
        ({"patience": 0}, "scheduling: patience: 0 isn't a time"),
        ({"plan": 3}, "scheduling: plan: 3 isn't the path"),
        ({"plan": "a\0b"}, r"scheduling: plan: 'a\\x00b' isn't the path"),
        ({"patience": 10**5000}, "scheduling: patience: <int> isn't a time"),
        ({"patience": 1e-320}, "scheduling: patience: 1e-320 isn't a time"),
        ({"patience": "9" * 400 + "s"}, "scheduling: patience: '999"),
        ({"shares": {"a": 10**400}}, "scheduling: shares: 'a': 1000"),
        ({"shares": {"a": 1e-320}}, "scheduling: shares: 'a': 1e-320"),
        ({"max_waiting": 10**5000}, "scheduling: max_waiting: <int>"),
        ({"classes": {"\ud800": {}}}, r"scheduling: classes: '\\ud800' isn't a name"),
        (np.array(["fcfs", "fair"]), r"scheduling: array\(\['fcfs', 'fair'\]"),
        ({"offline": True, "classes": {"chat": {"ttft": 1}}}, "scheduling: offline: .* class 'chat' has targets"),
    ],
)
def test_what_is_wrong_is_named(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        scheduling_of(options)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("0.5 s", 0.5), ("800us", 8e-4), (2, 2.0), (0.25, 0.25), (" 3S ", 3.0)]
)
def test_times(text: object, seconds: float) -> None:
    assert parse_seconds(text, "x") == pytest.approx(seconds)
