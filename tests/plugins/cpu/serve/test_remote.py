"""Ranks that share no memory: what one process gives, over messages of threads, and of processes."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.plugins.cpu.extension import cpu_extension
from enginewright.plugins.native.executable import CpuProgram
from enginewright.plugins.ranks.rank import GO, join
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import target_groups
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.ranks.rank_programs import partition
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, MissingDependencyError, RequestError
from tests.acceptance.test_ranks import BLOCKS, PARTITIONS, exported, logits_of, steps
from tests.waiting import HANG, wait_until

from .test_ranked import LONG, PARAMS, PROMPTS, answers

__all__ = ["exported"]  # a fixture

Array = NDArray[np.uint8]
OTHERS = [pytest.param(name, marks=pytest.mark.matrix) for name in PARTITIONS if name != "tensor=2,pipeline=2"]


class Letters:
    """Moves messages among threads."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], queue.Queue[Array]] = defaultdict(queue.Queue)
        self.bytes = 0

    def of(self, rank: int) -> Callable[[list[int], Array, list[int], list[Array]], None]:
        def move(to: list[int], own: Array, sources: list[int], theirs: list[Array]) -> None:
            for other in to:
                self._boxes[rank, other].put(own.copy())
                self.bytes += own.size
            for source, array in zip(sources, theirs, strict=True):
                array[:] = self._boxes[source, rank].get(timeout=HANG)

        return move


def logits_over_messages(bundle: Bundle, how: Partition) -> tuple[list[FloatArray], Letters]:
    """Computes what ``logits_of`` does on ranks that share no memory."""
    whole, letters = bundle.program("cpu"), Letters()
    groups = [group.name for group in whole.cache_groups]
    vocab = whole.outputs["logits"].shape[1].constant
    by_step: list[FloatArray] = []
    problems: list[BaseException] = []
    for rank in range(how.ranks):
        for other in range(how.ranks):
            letters._boxes[rank, other]  # made before there are threads

    def run(rank: int) -> None:
        try:
            program = partition(whole, how)[rank]
            weights = {use.name: bundle.part(use) for use in program.weights}
            exchange = cpu_extension.MessageExchange(rank, letters.of(rank))
            blocks = dict.fromkeys(groups, 1 + 3 * BLOCKS)
            one = CpuProgram(program, weights, blocks=blocks, threads=1, exchange=exchange)
            for step in steps(groups, vocab):
                if rank:
                    one.run_packed(one.packed(step))
                else:
                    logits = one.run(step).logits
                    assert logits is not None
                    by_step.append(logits.copy())
        except BaseException as e:  # noqa: BLE001
            problems.append(e)

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(how.ranks)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if problems:
        raise problems[0]
    return by_step, letters


@pytest.mark.parametrize("name", ["tensor=2,pipeline=2", *OTHERS])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(one, marks=pytest.mark.matrix) for one in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
    ],
)
def test_bits_over_messages_are_those_of_one_rank(name: str, family: str, exported: Callable[..., Path]) -> None:
    bundle = Bundle.open(exported(family, "f32", "f32"))
    alone = logits_of(bundle, [bundle.program("cpu")])
    ranks, letters = logits_over_messages(bundle, Partition.parse(name))
    assert [a.tobytes() for a in alone] == [b.tobytes() for b in ranks]
    assert letters.bytes > 0


def test_a_move_that_fails_ends_the_step(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    program = partition(bundle.program("cpu"), Partition(tensor=2))[0]
    groups = [group.name for group in program.cache_groups]

    def move(*_: object) -> None:
        raise KeyError("no way")

    weights = {use.name: bundle.part(use) for use in program.weights}
    exchange = cpu_extension.MessageExchange(0, move)
    one = CpuProgram(program, weights, blocks=dict.fromkeys(groups, 1 + 3 * BLOCKS), threads=1, exchange=exchange)
    with pytest.raises(KeyError, match="no way"):
        one.run(next(steps(groups, 100)))


def test_a_step_that_is_cut_off_is_refused(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    program = bundle.program("cpu")
    groups = [group.name for group in program.cache_groups]
    weights = {use.name: bundle.part(use) for use in program.weights}
    one = CpuProgram(program, weights, blocks=dict.fromkeys(groups, 1 + 3 * BLOCKS), threads=1)
    packed = one.packed(next(steps(groups, 100)))
    one.run_packed(packed)
    for end in (0, 8, 40, packed.size - 4):
        with pytest.raises(RuntimeError, match="is cut off"):
            one.run_packed(packed[:end].copy())


class Processes:
    """Ranks as processes of this machine, which join as they would from others. See ``plugins.ranks.others.Places``."""

    def __init__(self, ranks: int) -> None:
        self.machines = tuple(f"127.0.0.{1 + rank}" for rank in range(ranks))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, address: str) -> None:
        command = [sys.executable, "-m", "enginewright.plugins.cpu.serve.remote_rank", address]
        self.processes = [subprocess.Popen([*command, str(rank)]) for rank in range(1, len(self.machines))]

    def ended(self, rank: int) -> str:
        code = self.processes[rank - 1].poll()
        return "" if code is None else f"has ended: {code}"

    def close(self) -> None:
        for one in self.processes:
            one.kill()
        for one in self.processes:
            one.wait()


def opened(path: Path, how: str, places: Processes, patience: float = HANG) -> LLM:
    """An LLM on these ranks; its executor is ``llm.engine.executor``."""
    from enginewright.plugins.cpu.serve.remote import RemoteExecutor

    bundle, cut = Bundle.open(path), Partition.parse(how)
    blocks = {group.name: 40 for group in target_groups(bundle, "cpu", 1024)}
    executor = RemoteExecutor(bundle, blocks, Placement(partition=cut, rank_timeout=patience), places)
    return LLM.from_executor(executor, bundle.model)


@pytest.fixture
def places() -> Iterator[Callable[[int], Processes]]:
    started: list[Processes] = []

    def make(ranks: int) -> Processes:
        started.append(Processes(ranks))
        return started[-1]

    yield make
    for one in started:
        one.close()


Make = Callable[[int], Processes]


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["tensor=2", "pipeline=2", "tensor=2,pipeline=2"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_answers_over_connections_are_those_of_one_process(
    how: str, family: str, places: Make, exported: Callable[..., Path]
) -> None:
    path = exported(family, "f32", "f32")
    with LLM(path, threads=1, memory="4MiB", verify=False) as one:
        expected = answers(one)
    with opened(path, how, places(Partition.parse(how).ranks)) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # prefixes are there now
        about = llm.info()
        assert about["prefix_cache"]["reused"] > 0
        assert about["executor"]["machines"].startswith("127.0.0.1, 127.0.0.2")
        with pytest.raises(RequestError, match="several machines"):
            llm.save_prefix(PROMPTS[1], path / "prefixes")


class Killed(BaseException):
    """A simulated rank is killed: it does nothing more, and says nothing."""


class Wire:
    """The messages and the time of simulated ranks: the ranks are threads, and no machine makes them late.

    A limit of seconds passes only when nobody can go on: no rank computes, and each waits for a message that isn't
    there, is stopped, or has ended. Then the one that has waited longest gives up.

    Args:
        ranks: how many there are.
        fault: what happens to the rank ``at``: "killed", "stopped", "paused" (it goes on when nobody else can),
            "raises", "slow", or "" for nothing.
        at: the rank.
        moment: which of its calls of send and receive that is; 0 is while it opens its part.
    """

    def __init__(self, ranks: int, fault: str = "", at: int = 1, moment: int = 0) -> None:
        self.fault, self.at, self.moment = fault, at, moment
        self.calls = [0] * ranks
        self._changed = threading.Condition()
        self._boxes: dict[tuple[int, int, int], deque[Array]] = defaultdict(deque)
        self._now, self._asleep = 0.0, 0
        self._waiting: dict[int, tuple[float, tuple[int, int, int]]] = {}
        self._stopped: set[int] = set()
        self.ended: dict[int, str] = {}
        self.ready: set[int] = set()
        """Ranks that wait until all are there."""
        self.closed = False

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            self._asleep += 1
            self._changed.wait(0.0005)
            if self._nobody_goes_on():
                first = min(self._limits().values(), default=math.inf)
                self._now = max(self._now, min(self._now + 50 * seconds, first))
                self._changed.notify_all()
            self._asleep -= 1

    def end(self, rank: int, how: str) -> None:
        with self._changed:
            self.ended.setdefault(rank, how)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def call(self, rank: int) -> None:
        """One more send or receive of a rank; here its fault happens."""
        with self._changed:
            self._raise_if_closed(rank)
            here = (rank, self.calls[rank]) == (self.at, self.moment) and self.fault
            self.calls[rank] += 1
            if here == "killed":
                self.ended.setdefault(rank, "was killed")
                self._changed.notify_all()
                raise Killed
            if here == "raises":
                raise ValueError("no memory of a kind")
            if here in ("stopped", "paused"):
                self._stopped.add(rank)
                self._changed.notify_all()
                while here == "stopped" or not self._all_are_stuck():
                    self._changed.wait(0.01)
                    self._raise_if_closed(rank)
                self._stopped.discard(rank)
            slow = self.fault == "slow" and rank == self.at
        if slow:
            time.sleep(0.0003)

    def send(self, source: int, to: int, tag: int, array: Array) -> None:
        with self._changed:
            if to in self.ended:
                raise RuntimeError("connection reset")
            self._boxes[source, to, tag].append(array.copy())
            self._changed.notify_all()

    def receive(self, source: int, to: int, tag: int, array: Array, patience: float) -> None:
        key = source, to, tag
        with self._changed:
            self._waiting[to] = self._now + patience, key
            self._changed.notify_all()
            try:
                while not self._boxes[key]:
                    self._raise_if_closed(to)
                    if source in self.ended:
                        raise RuntimeError("connection closed")
                    if self._nobody_goes_on() and self._first_to_give_up() == to:
                        self._now = max(self._now, self._waiting[to][0])
                        self._changed.notify_all()
                        raise RuntimeError("timed out")
                    self._changed.wait(0.01)
                array[:] = self._boxes[key].popleft()
            finally:
                del self._waiting[to]

    def _raise_if_closed(self, rank: int) -> None:
        if self.closed and rank:
            raise Killed

    def _nobody_goes_on(self) -> bool:
        return (self.fault != "paused" or self.at not in self._stopped) and self._all_are_stuck()

    def _all_are_stuck(self) -> bool:
        stuck = self._stopped | self.ready | set(self.ended)
        stuck |= {r for r, (_, key) in self._waiting.items() if not self._boxes[key] and key[0] not in self.ended}
        if self._asleep and 0 not in self._waiting:
            stuck.add(0)
        return stuck >= set(range(len(self.calls)))

    def _limits(self) -> dict[int, float]:
        """When ranks give up that wait for a message, and not for the next step."""
        return {rank: limit for rank, (limit, key) in self._waiting.items() if limit < 1e6 and not self._boxes[key]}

    def _first_to_give_up(self) -> int | None:
        return min(((limit, rank) for rank, limit in self._limits().items()), default=(0.0, None))[1]


class Group:
    """Does what ``messages.Connections`` does, on a wire."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    def send(self, message: Array, to: int, tag: int) -> Group.Work:
        self._wire.call(self._rank)
        self._wire.send(self._rank, to, tag, message)
        return Group.Work(lambda patience: None)

    def recv(self, array: Array, source: int, tag: int) -> Group.Work:
        self._wire.call(self._rank)
        return Group.Work(lambda p: self._wire.receive(source, self._rank, tag, array, p))

    def close(self) -> None:
        """The wire is closed by the places."""

    @dataclass
    class Work:
        done: Callable[[float], None]

        def wait(self, limit: timedelta) -> None:
            self.done(limit.total_seconds())


class Simulated:
    """Ranks as threads on a wire. See ``plugins.ranks.others.Places``."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.machines = tuple(f"10.0.0.{1 + rank}" for rank in range(len(wire.calls)))
        self.threads: list[threading.Thread] = []
        self._address = ""

    def start(self, address: str) -> None:
        self._address = f"127.0.0.1:{address.rpartition(':')[2]}"
        ranks = range(1, len(self.machines))
        self.threads = [threading.Thread(target=self._serve, args=(rank,), daemon=True) for rank in ranks]
        for thread in self.threads:
            thread.start()

    def _serve(self, rank: int) -> None:
        from enginewright.plugins.cpu.serve.remote_rank import serve

        with contextlib.suppress(Killed, ValueError, RuntimeError):  # rank 0 may be gone
            serve(self._address, rank)
        self.wire.end(rank, "has ended")

    def ended(self, rank: int) -> str:
        return self.wire.ended.get(rank, "")

    def close(self) -> None:
        self.wire.close()
        if self._address and any(thread.is_alive() for thread in self.threads):
            join(self._address).set(GO, "")  # ranks that wait for it are threads, which nobody can kill


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> Callable[[str, Wire], LLM]:
    """Opens the tiny bundle on simulated ranks."""
    from enginewright.plugins.cpu.serve import remote
    from enginewright.plugins.ranks import messages, others
    from enginewright.plugins.ranks import rank as ranks

    bundle = Bundle.open(tiny_bundle)
    blocks = {group.name: 40 for group in target_groups(bundle, "cpu", 1024)}
    wires: list[Wire] = []

    def open_group(mail: Any, store: object) -> None:
        if mail._rank == 0:
            wires[-1].ready.clear()  # they may go on, whenever they do
        mail._group = Group(wires[-1], mail._rank)

    original = messages.Mail.__init__

    def make(mail: Any, rank: int, *rest: Any) -> None:
        original(mail, rank, *rest)
        if rank:
            wires[-1].call(rank)

    def say(store: TCPStore, key: str, what: Any) -> None:
        kind, rank = key.split("/")
        if kind == "reply":
            wires[-1].ready.add(int(rank))
        original_say(store, key, what)

    original_say = ranks.say
    monkeypatch.setattr(ranks, "say", say)
    monkeypatch.setattr(messages.Mail, "__init__", make)
    monkeypatch.setattr(messages.Mail, "open", open_group)
    monkeypatch.setattr(ranks, "_end_with_rank_0", lambda address: None)
    loopback = TCPStore

    def on_loopback(host: str, *rest: Any, **more: Any) -> TCPStore:
        return loopback("127.0.0.1", *rest, **more)

    monkeypatch.setattr(others, "TCPStore", on_loopback)

    def open_on(how: str, wire: Wire) -> LLM:
        wires.append(wire)
        for module in (others, messages, ranks):
            monkeypatch.setattr(module, "time", wire)
        executor = remote.RemoteExecutor(bundle, blocks, Placement(partition=Partition.parse(how)), Simulated(wire))
        return LLM.from_executor(executor, bundle.model)

    return open_on


FAULTS = ("killed", "stopped", "paused", "raises", "slow")
SIMULATED = {"tensor=2": 2, "pipeline=2": 2, "tensor=3": 3, "pipeline=3": 3, "tensor=2,pipeline=2": 4}


def numbers(llm: LLM) -> list[object]:
    """The numbers of ``answers``, without texts: an LLM of an executor has no tokenizer."""
    results = llm.generate(PROMPTS, PARAMS)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob, len(o.outputs)) for o in results]


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.soak)])
def test_faults_at_any_moment(simulated: Callable[[str, Wire], LLM], tiny_bundle: Path, count: int) -> None:
    """All requests end: with the tokens of one process, or with an error that names the rank that is at fault."""
    with LLM(tiny_bundle, threads=1, memory="4MiB", verify=False) as one:
        expected = numbers(one)
    calls = {}
    for how, ranks in SIMULATED.items():
        wire = Wire(ranks)
        with simulated(how, wire) as llm:
            assert numbers(llm) == expected
            calls[how] = list(wire.calls)
    outcomes = defaultdict[str, int](int)
    for seed in range(count):
        chosen = random.Random(seed)
        how = chosen.choice(list(SIMULATED))
        at = chosen.randrange(1, SIMULATED[how])
        wire = Wire(SIMULATED[how], chosen.choice(FAULTS), at, chosen.randrange(calls[how][at]))
        about = f"seed {seed}: {how}, rank {at} {wire.fault} at {wire.moment} of {calls[how][at]}"
        places, problem = None, ""
        try:
            with simulated(how, wire) as llm:
                places = llm.engine.executor._others._places  # type: ignore[attr-defined]
                assert numbers(llm) == expected, about
                outcomes["answered"] += 1
                assert wire.fault in ("paused", "slow") or wire.calls[at] <= wire.moment + 1, about
        except EnginewrightError as e:
            problem = e.message
        if problem:
            assert wire.fault in ("killed", "stopped", "raises"), f"{about}: {problem}"
            assert f"rank {at} (machine 10.0.0.{1 + at})" in problem, f"{about}: {problem}"
            outcomes[wire.fault] += 1
        if places is not None:
            for thread in places.threads:
                thread.join(HANG)
                assert not thread.is_alive(), about
    assert outcomes["answered"] and all(outcomes[fault] for fault in ("killed", "stopped", "raises")), dict(outcomes)


def lose(llm: LLM, how: Callable[[], None], match: str) -> None:
    """Loses a rank while requests run: all end with an error that says which, and so do later ones."""
    streams = [llm.stream([5, 6, 7 + i], LONG) for i in range(3)]
    for stream in streams:
        next(stream)
    how()
    for stream in streams:
        with pytest.raises(EnginewrightError, match=match):
            for _ in stream:
                pass
            for _ in llm.stream([5, 6, 7], LONG):  # a busy machine may have let the first one end before
                pass
    with pytest.raises(EnginewrightError, match=match):
        llm.generate([[5]], SamplingParams(max_tokens=1))
    assert llm.lost


@pytest.mark.matrix
def test_a_rank_that_is_killed_is_named_with_its_machine(tiny_bundle: Path, places: Make) -> None:
    there = places(3)
    with opened(tiny_bundle, "tensor=3", there) as llm:
        lose(llm, there.processes[1].kill, r"rank 2 \(machine 127.0.0.3\) has ended: -9")
        wait_until(lambda: all(one.poll() is not None for one in there.processes))
    there = places(2)
    with opened(tiny_bundle, "tensor=2", there) as llm:  # others work
        assert len(llm.generate([PROMPTS[0]], PARAMS[0])[0].outputs[0].token_ids) == 12


@pytest.mark.matrix
def test_a_rank_that_is_killed_while_nothing_runs_is_noticed(tiny_bundle: Path, places: Make) -> None:
    there = places(2)
    with opened(tiny_bundle, "pipeline=2", there) as llm:
        there.processes[0].kill()
        wait_until(lambda: llm.lost)
        with pytest.raises(EnginewrightError, match="rank 1"):
            llm.generate([[5]], SamplingParams(max_tokens=1))


@pytest.mark.matrix
def test_a_rank_that_is_stopped_is_given_up_after_a_while(tiny_bundle: Path, places: Make) -> None:
    there = places(3)
    with opened(tiny_bundle, "tensor=3", there, patience=2) as llm:
        stop = lambda: os.kill(there.processes[1].pid, signal.SIGSTOP)  # noqa: E731
        lose(llm, stop, r"rank \d \(machine 127.0.0.\d\) (sent nothing for 2 s|can't be reached)")
        wait_until(lambda: all(one.poll() is not None for one in there.processes))


@pytest.mark.matrix
def test_a_bundle_that_is_elsewhere_is_an_error_that_names_the_machine(
    tiny_bundle: Path, places: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginewright.plugins.cpu.serve import remote

    bundle = Bundle.open(tiny_bundle)
    monkeypatch.setattr(remote, "RemoteSetting", lambda **given: _RemoteSetting(**{**given, "bundle": "/nowhere"}))
    from enginewright.plugins.cpu.serve.remote_rank import RemoteSetting as _RemoteSetting

    there = places(2)
    with pytest.raises(BundleError, match=r"rank 1 \(machine 127.0.0.2\): /nowhere") as raised:
        remote.RemoteExecutor(bundle, {"full": 4}, Placement(partition=Partition(tensor=2)), there)
    assert "at the same path on each machine" in str(raised.value.hint)
    wait_until(lambda: all(one.poll() is not None for one in there.processes))


@pytest.mark.matrix
def test_ranks_end_with_the_process_of_rank_0(tiny_bundle: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.plugins.cpu.serve.test_remote import Processes, opened\n"
        "there = Processes(2); llm = opened(Path(sys.argv[1]), 'tensor=2', there)\n"
        "print(there.processes[0].pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny_bundle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}") or b" Z " in Path(f"/proc/{pid}/stat").read_bytes())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "ray: it is where ranks are, and there is one"),
        ({"ranks": 2, "prefix_folder": "prefixes"}, "prefix_folder: ranks on several machines keep no prefixes"),
        ({"partition": "ring=2"}, "partition: ring=2: keys are divided among ranks of one machine alone"),
        ({"ranks": 2}, "ray: 127.0.0.1:1 can't be reached"),
        ({"ranks": 2, "ray": "nonsense"}, "ray: nonsense isn't an address"),
    ],
)
def test_what_isnt_possible_on_several_machines(tiny_bundle: Path, given: dict[str, object], problem: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(RequestError, match=problem):
        LLM(tiny_bundle, **{"ray": "127.0.0.1:1", **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["ray", "torch"])
def test_without_a_package_the_extra_is_named(tiny_bundle: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray_ranks", "remote", "remote_rank"):
        monkeypatch.delitem(sys.modules, f"enginewright.plugins.cpu.serve.{name}", raising=False)
    for name in ("messages", "others", "rank"):
        monkeypatch.delitem(sys.modules, f"enginewright.plugins.ranks.{name}", raising=False)
    if package == "torch":
        pytest.importorskip("ray")
        monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=f"need {package}, which is not installed") as raised:
        LLM(tiny_bundle, ranks=2, ray="127.0.0.1:1")
    assert "enginewright[ranks]" in str(raised.value.hint)


def test_ray_is_where_ranks_are_if_a_server_has_no_replicas(tiny_bundle: Path) -> None:
    serve = ["serve", str(tiny_bundle), "--ray", "10.0.0.1:6379"]
    result = CliRunner().invoke(app, [*serve, "--ranks", "2", "--print-config"])
    assert tomllib.loads(result.stdout)["llm"] == {"ranks": 2, "ray": "10.0.0.1:6379"}, result.output
    of_replicas = CliRunner().invoke(app, [*serve, "--ranks", "2", "--replicas", "2", "--print-config"])
    config = tomllib.loads(of_replicas.stdout)
    assert (config["ray"], config["llm"]) == ("10.0.0.1:6379", {"ranks": 2})
    refused = CliRunner().invoke(app, serve)
    assert refused.exit_code and "ray: it is of replicas or ranks, and there are none" in refused.output


PAGE = Path(__file__).parents[4] / "docs" / "use" / "replicas.md"


class Cluster:
    """Four machines of a Ray cluster, started by the commands of the page: 127.0.0.11 and so on, as Ray has another
    address for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        commands = re.findall(r"^(ray [^#\n]*[^#\s])", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        token, self._head, self._joins = commands
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.11:{free.getsockname()[1]}"
        self._folder = folder
        self._environment = os.environ | {"RAY_AUTH_MODE": "token", "HOME": str(folder), "RAY_TMPDIR": str(folder)}
        self._token = token

    def start_all(self) -> None:
        assert self._ran(self._token, []), self._said()
        for machine in (1, 2, 3, 4):
            self.start(machine)

    def start(self, machine: int) -> None:
        port = self.address.partition(":")[2]
        command = (
            self._head.replace("6379", port) if machine == 1 else self._joins.replace("10.0.0.1:6379", self.address)
        )
        flags = [f"--node-ip-address=127.0.0.1{machine}", "--num-cpus=1", "--disable-usage-stats"]
        flags += ["--include-dashboard=false"] if machine == 1 else []
        for _ in range(4):  # Ray waits 30 s for its own processes, which are too few on a busy machine
            if self._ran(command, flags):
                return
            self.kill(machine)
        raise AssertionError(self._said())

    def _said(self) -> str:
        return (self._folder / "ray.log").read_text()[-2000:]

    def _ran(self, command: str, own: list[str]) -> bool:
        words = [str(Path(sys.executable).with_name("ray")), *command.split()[1:], *own]
        with (self._folder / "ray.log").open("ab") as log:  # its processes keep what it writes to
            return not subprocess.run(words, check=False, env=self._environment, stdout=log, stderr=log).returncode

    def processes(self, machine: int) -> list[int]:
        """The processes of one machine: Ray's and those that it has started."""
        parents: dict[int, int] = {}
        named: set[int] = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                words = (folder / "cmdline").read_bytes()
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if self.address.encode() in words and re.search(rb"ip.address=127.0.0.1%d\0" % machine, words):
                    named.add(int(folder.name))
        return [pid for pid, parent in parents.items() if pid in named or parent in named]

    def kill(self, machine: int) -> None:
        kill(self.processes(machine))

    def close(self) -> None:
        for machine in (1, 2, 3, 4):
            self.kill(machine)
        kill(self.others())

    def others(self) -> list[int]:
        """Processes whose command lines name the folder, such as Ray's autoscaler, which isn't our child."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{self._folder}/".encode() in (folder / "cmdline").read_bytes():
                    pids.append(int(folder.name))
        return pids


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.soak
def test_four_machines_of_a_ray_cluster(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ew"))  # Ray's sockets have short paths
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # Ray looks when it is imported
    monkeypatch.setenv("HOME", str(folder))
    pytest.importorskip("ray")
    cluster = Cluster(folder)
    try:
        cluster.start_all()
        with LLM(tiny_bundle, threads=1) as one:
            expected = answers(one)
        how = {
            "partition": "tensor=2,pipeline=2",
            "threads": 1,
            "ray": cluster.address,
            "rank_timeout": 20.0,
            "speculate": None,
        }
        with LLM(tiny_bundle, **how) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
            machines = llm.info()["executor"]["machines"].split(", ")
            assert len(set(machines)) == 4
            lost = machines.index("127.0.0.13")
            pids = cluster.processes(3)  # looking for them takes a while, and answers may end in it
            assert pids
            lose(llm, lambda: kill(pids), rf"rank {lost} \(machine 127.0.0.13\)")
        cluster.start(3)
        with LLM(tiny_bundle, **how) as llm:  # type: ignore[arg-type]
            assert answers(llm) == expected
    finally:
        cluster.close()
        wait_until(lambda: not cluster.others())
        shutil.rmtree(folder, ignore_errors=True)
