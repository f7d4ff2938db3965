"""Ranks as processes: what one process gives, and every way in which a rank can be lost."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.cpu.serve import ranked as module
from enginewright.plugins.cpu.serve.ranked import RANKS_A_CORE, RankedExecutor
from enginewright.plugins.native.step_profile import StepProfile
from enginewright.plugins.ranks.records import check_same
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors import open as opening
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, RequestError
from tests.waiting import HANG, wait_until

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], list(range(3, 90)), [200, 3]]
PARAMS = [
    SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1, seed=4, logprobs=0, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=6, num_beams=3, n=2, ignore_eos=True),
]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(autouse=True)
def _few_cores() -> Iterator[None]:
    """Machines that test this may have fewer cores than ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks: ", RuntimeWarning)
        yield


def opened(bundle: Path, ranks: int = 2, **given: object) -> LLM:
    return LLM(bundle, ranks=ranks, memory="4MiB", threads=1, verify=False, **given)  # type: ignore[arg-type]


def ranked(llm: LLM) -> RankedExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, RankedExecutor)
    return executor


def nothing_is_left(pids: list[int], files: int) -> bool:
    """Returns True if no process of a rank is left, not even a zombie, and no file of shared memory was added."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids) and shared_files() <= files


def shared_files() -> int:
    """The number of ranks' files that this process has open or mapped."""
    gc.collect()
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "enginewright-rank" in os.readlink(f"/proc/self/fd/{descriptor}")
    return count + Path("/proc/self/maps").read_text().count("enginewright-rank")


def answers(llm: LLM) -> list[object]:
    return [(o.prompt_logprobs, o.outputs) for o in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> list[object]:
    with LLM(tiny_bundle, threads=1, memory="4MiB", verify=False) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.matrix), pytest.param(4, marks=pytest.mark.matrix)]
)
def test_answers_are_those_of_one_process(tiny_bundle: Path, ranks: int, expected: list[object]) -> None:
    files = shared_files()
    with opened(tiny_bundle, ranks) as llm:
        assert answers(llm) == expected
        about, pids = llm.info()["executor"], ranked(llm).processes.pids
        assert (about["ranks"], about["partition"], about["threads"]) == (ranks, f"tensor={ranks}", 1)
        assert len(pids) == ranks - 1
    del llm
    assert nothing_is_left(pids, files)


def test_hidden_states_profile_and_blocks_are_those_of_one_process(tiny_bundle: Path) -> None:
    with opened(tiny_bundle) as llm, LLM(tiny_bundle, threads=1, memory="4MiB", verify=False) as one:
        executor = ranked(llm)
        executor.profile = StepProfile()
        for layers in ((-1,), (0, 1)):
            np.testing.assert_array_equal(llm.hidden_states(PROMPTS[1], layers), one.hidden_states(PROMPTS[1], layers))
        assert llm.generate([PROMPTS[0]], PARAMS[0])[0].outputs == one.generate([PROMPTS[0]], PARAMS[0])[0].outputs
        waited = [total for total in executor.profile.by_op() if total.key == "all_gather"]
        assert len(waited) == 1 and waited[0].calls > 0 and waited[0].seconds > 0
        assert executor.cache_identity != one.engine.executor.cache_identity  # type: ignore[attr-defined]
        # A block of all ranks goes elsewhere and comes back.
        group = executor.cache_groups[0].name
        block = executor.read_block(group, 0)
        assert block.size == cache_block_bytes(executor.cache_groups[0])
        assert block.any()
        executor.write_block(group, 1, block)
        np.testing.assert_array_equal(executor.read_block(group, 1), block)


def test_a_block_is_read_and_written_when_no_rank_is_in_a_step(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may have a step's result while another rank still writes to its own part of a block."""
    with opened(tiny_bundle) as llm:
        executor = ranked(llm)
        submit, seen = executor.submit, list[StepInput]()
        monkeypatch.setattr(executor, "submit", lambda step: (seen.append(step), submit(step))[1])
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1))
        monkeypatch.undo()
        group = executor.cache_groups[0].name
        block = int(seen[0].block_tables[group][0, 0])
        submit(seen[0]).result()
        stored = executor.read_block(group, block)
        executor.write_block(group, block, np.zeros_like(stored))
        pending = submit(seen[0])
        np.testing.assert_array_equal(executor.read_block(group, block), stored)
        pending.result()
        pending = submit(seen[0])
        executor.write_block(group, block, np.zeros_like(stored))
        pending.result()
        assert not executor.read_block(group, block).any()


@pytest.mark.matrix
def test_prefixes_go_to_a_folder_and_come_back(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    prompt = list(range(3, 200))
    with LLM(tiny_bundle, threads=1, memory="4MiB", verify=False) as one:
        plain_outputs = one.generate([prompt], PARAMS[0])[0].outputs
        one.save_prefix(prompt, tmp_path / "one")
    for cached in (0, 192):
        with opened(tiny_bundle) as llm:
            assert llm.load_prefix(prompt, tmp_path / "one") == 0  # it lies otherwise in the memory of one process
            assert llm.load_prefix(prompt, tmp_path / "two") == cached
            output = llm.generate([prompt], PARAMS[0])[0]
            assert output.outputs == plain_outputs and output.num_cached_tokens == cached
            llm.save_prefix(prompt, tmp_path / "two")


def test_a_wrong_step_is_refused_and_the_ranks_stay(
    tiny_bundle: Path, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_bundle) as llm:
        executor = ranked(llm)
        submit, seen = executor.submit, list[StepInput]()
        monkeypatch.setattr(executor, "submit", lambda step: (seen.append(step), submit(step))[1])
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1))
        monkeypatch.undo()
        step = seen[0]
        for _ in range(3):
            wrong = submit(step.changed(ids=step.ids + 10_000))
            with pytest.raises(RequestError, match="ids"):
                wrong.result()
        never_asked = submit(step)
        assert answers(llm) == expected
        assert never_asked.result().tokens is not None


def lose(llm: LLM, how: Callable[[int], None], match: str) -> None:
    """Loses rank 1 while requests run: all end with an error, and so do later ones."""
    executor = ranked(llm)
    pids = executor.processes.pids
    streams = [llm.stream([5, 6, 7 + i], LONG) for i in range(3)]
    for stream in streams:
        next(stream)
    how(pids[0])
    for stream in streams:
        with pytest.raises(EnginewrightError, match=match):
            for _ in stream:
                pass
            for _ in llm.stream([5, 6, 7], LONG):  # a busy machine may have let the first one end before
                pass
    with pytest.raises(EnginewrightError, match=match):
        llm.generate([[5]], SamplingParams(max_tokens=1))
    llm.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert os.fstat(executor._link.fd).st_blocks * 512 < 1 << 20  # its memory is the system's again


def test_a_rank_that_is_killed_ends_all_requests(tiny_bundle: Path, expected: list[object]) -> None:
    files = shared_files()
    lose(
        opened(tiny_bundle, 3),
        lambda pid: os.kill(pid, signal.SIGKILL),
        r"rank 1 \(process \d+\) was killed by SIGKILL",
    )
    assert shared_files() == files
    with opened(tiny_bundle) as llm:  # a new one works
        assert answers(llm) == expected


@pytest.mark.matrix
def test_a_rank_that_dies_says_why(tiny_bundle: Path) -> None:
    lose(
        opened(tiny_bundle),
        lambda pid: os.kill(pid, signal.SIGSEGV),
        r"rank 1 \(process \d+\) was killed by SIGSEGV",
    )


@pytest.mark.matrix
def test_a_stopped_rank_that_goes_on_changes_nothing(tiny_bundle: Path, expected: list[object]) -> None:
    with opened(tiny_bundle, rank_timeout=HANG) as llm:
        (pid,) = ranked(llm).processes.pids
        done = threading.Event()

        def stop_and_go() -> None:
            while not done.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.01)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        try:
            assert answers(llm) == expected
        finally:
            done.set()
            thread.join()


def test_a_stopped_rank_is_given_up_after_a_while(tiny_bundle: Path) -> None:
    match = r"rank 1 \(process \d+\) has made no progress for 5 s: it is stopped"
    lose(opened(tiny_bundle, rank_timeout=5), lambda pid: os.kill(pid, signal.SIGSTOP), match)


PARENT = """
import sys
from enginewright import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], ranks=3, memory="4MiB", threads=1)
    print(*llm.engine.executor.processes.pids, flush=True)
    {then}
"""


@pytest.mark.parametrize("stopped", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_ranks_end_with_the_process_of_rank_0(tiny_bundle: Path, stopped: bool) -> None:
    program = PARENT.format(then="llm.generate([[5]] * 8, SamplingParams(max_tokens=100000, ignore_eos=True))")
    parent = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, str(tiny_bundle)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if stopped:
        os.kill(pids[0], signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    """Returns True if the process runs and isn't a zombie: the process that adopts orphans may be slow to reap them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.matrix
def test_an_interpreter_that_ends_leaves_no_rank(tiny_bundle: Path) -> None:
    program = PARENT.format(then="llm.generate([[5]], SamplingParams(max_tokens=3))")
    command = [sys.executable, "-W", "ignore", "-c", program, str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and not done.stderr, done.stderr
    wait_until(lambda: not any(_runs(int(pid)) for pid in done.stdout.split()))


@pytest.mark.matrix
def test_a_ctrl_c_is_for_rank_0_alone(tiny_bundle: Path) -> None:
    """The whole group of the terminal's foreground gets it."""
    program = PARENT.format(
        then="\n    try:\n        print('waits', flush=True); sys.stdin.read()\n    except KeyboardInterrupt:\n"
        "        print(len(llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tiny_bundle)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert parent.stdout.readline() == "waits\n"
        os.killpg(parent.pid, signal.SIGINT)
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        assert parent.stdout.readline() == "3\n"


@pytest.mark.matrix
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_a_rank_may_be_killed_at_any_moment(tiny_bundle: Path, expected: list[object], count: int) -> None:
    """While it starts, in the middle of a step, between two: requests end, nothing is left, and the next LLM works."""
    rng, files = random.Random(count), shared_files()
    for _ in range(count):
        ranks = rng.choice([2, 3])
        llm = opened(tiny_bundle, ranks)
        pids = ranked(llm).processes.pids
        killer = threading.Timer(rng.random() * 0.05, os.kill, (rng.choice(pids), signal.SIGKILL))
        killer.start()
        with pytest.raises(EnginewrightError, match="was killed by SIGKILL"):
            while True:
                assert answers(llm) == expected
        killer.join()
        llm.close()
        del llm
        assert nothing_is_left(pids, files)
    with opened(tiny_bundle) as llm:
        assert answers(llm) == expected


@pytest.mark.matrix
def test_a_rank_that_disagrees_is_an_error_that_names_it(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shared_files()
    same = {"version of Enginewright": "1", "bundle": "sha256:1"}
    check_same(same, same)
    with pytest.raises(BundleError, match="its bundle is sha256:1, and that of rank 0 is sha256:2"):
        check_same(same, same | {"bundle": "sha256:2"})
    real = module.cpu_facts
    monkeypatch.setattr(module, "cpu_facts", lambda *given: real(*given) | {"order of sums": "0"})
    with pytest.raises(BundleError, match="rank 1: its order of sums is"):
        opened(tiny_bundle)
    assert shared_files() == files


@pytest.mark.matrix
def test_a_rank_that_dies_while_it_starts_is_an_error(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = shared_files()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EnginewrightError, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        opened(tiny_bundle)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(CapacityError, match="can't be started"):
        opened(tiny_bundle)
    assert shared_files() == files


@pytest.mark.matrix
def test_no_shared_memory_is_an_error_that_names_it(tiny_bundle: Path) -> None:
    files = shared_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, hard))
    try:
        with pytest.raises(CapacityError, match="no shared memory"):
            opened(tiny_bundle)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shared_files() == files


def test_numbers_of_ranks_that_cannot_be(tiny_bundle: Path) -> None:
    with pytest.raises(RequestError, match="query heads"):
        opened(tiny_bundle, 64)
    with pytest.raises(RequestError, match="ranks"):
        LLM(tiny_bundle, ranks=0)
    with pytest.raises(RequestError, match="isn't the 2 of partition"):
        LLM(tiny_bundle, ranks=3, partition="tensor=2")
    with pytest.raises(RequestError, match="partition: 'rows=2' isn't understood"):
        LLM(tiny_bundle, partition="rows=2")
    with pytest.raises(RequestError, match="rank_timeout"):
        LLM(tiny_bundle, ranks=2, rank_timeout=0)


def test_more_ranks_than_cores_are_warned_about(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_threads", lambda: 1)
    warnings.simplefilter("always")
    with pytest.warns(RuntimeWarning, match="2 of 1 threads each share 1 cores"):
        module._placed(2, 0)
    with pytest.raises(RequestError, match="too many for 1 cores"):
        module._placed(RANKS_A_CORE + 1, 0)
    monkeypatch.setattr(module, "available_threads", lambda: 8)
    assert module._placed(2, 0)[0] == 4 and module._placed(2, 3)[0] == 3 and module._placed(3, 0)[0] == 2


def test_other_targets_refuse_ranks_by_name(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = opening._opening
    monkeypatch.setattr(opening, "_opening", lambda name: real("onnx" if name == "cpu" else name))
    bundle = Bundle.open(tiny_bundle)
    with pytest.raises(RequestError, match="partition: tensor=2 is for target"):
        opening.make_executor(bundle, "cpu", {}, 64, Placement(partition=Partition(tensor=2)))
