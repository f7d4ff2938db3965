from __future__ import annotations

import subprocess
from typing import Any

import pytest

from enginewright.plugins.cpu.compile import meeting
from enginewright.plugins.cpu.compile.meeting import meeting_seconds
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ROUNDS", 20)
    peer = meeting._PEER.replace(
        "import meet;", "import meet; from enginewright.plugins.cpu.compile import meeting as m;"
    )
    monkeypatch.setattr(meeting, "_PEER", peer.replace("meet(*map", "m._ROUNDS = 20; meet(*map"))


def test_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "available_threads", lambda: 2)
    assert 0 < meeting_seconds(2) < 60
    assert meeting_seconds(1) == 0  # nobody is waited for
    monkeypatch.setattr(meeting, "available_threads", lambda: 1)
    assert meeting_seconds(2) == 0


def test_a_process_that_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "available_threads", lambda: 2)
    monkeypatch.setattr(meeting, "_PEER", "import sys; sys.exit(3)")
    with pytest.raises(EnginewrightError, match="a rank's process ended"):
        meeting_seconds(2)


def test_no_process_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(meeting, "available_threads", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EnginewrightError, match="can't be measured: no more processes"):
        meeting_seconds(2)

    class Full:
        def RankLink(self, *args: Any) -> None:
            raise MemoryError("no shared memory is left")

    monkeypatch.setattr(meeting, "cpu_extension", Full())
    with pytest.raises(CapacityError, match="no shared memory is left"):
        meeting_seconds(2)
