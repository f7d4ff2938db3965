from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.plugins.cpu.serve.tuning import TuningFile, load_tuning
from enginewright.plugins.native import executable
from enginewright.plugins.native.executable import isas
from enginewright.runtime.bundle.reader import Bundle, tuning_path
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.errors import BundleError

ISA = isas()[0]


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    """One of its own, beside which a file can be kept."""
    return Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "own.bundle"))


def file_for(bundle: Bundle, **changed: Any) -> TuningFile:
    return TuningFile.for_here(
        bundle, ISA, threads=3, choices={"task_rows": 7}, gains={"x": 1.5}, row_seconds={64: (0.1, 0.2)}
    ).model_copy(update=changed)


def executor_of(bundle: Bundle, threads: int = 0, **options: Any) -> tuple[CpuExecutor, dict[str, int]]:
    """The executor, and the choices that its program was made with."""
    sizes: list[dict[str, int]] = []
    make = executable._executor

    def watched(*arguments: Any) -> Any:
        sizes.append(dict(arguments[4]))
        return make(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executable, "_executor", watched)
        blocks = {g.name: 2 for g in bundle.program("cpu").cache_groups}
        executor = CpuExecutor(bundle, blocks, Placement(threads=threads), **options)
    return executor, sizes[0]


def test_without_a_file_nothing_is_said(bundle: Bundle) -> None:
    executor, choices = executor_of(bundle, threads=1)
    assert choices == {} and "tuning" not in executor.describe()
    assert load_tuning(bundle, ISA) == (None, "")


def test_what_was_written_is_used(bundle: Bundle) -> None:
    file_for(bundle).write(tuning_path(bundle))
    assert tuning_path(bundle) == bundle.path.parent / "own.bundle.tune.json"
    executor, choices = executor_of(bundle)
    assert (choices, executor.program.threads) == ({"task_rows": 7}, 3)
    assert executor.caps.row_seconds == {64: (0.1, 0.2)}
    assert executor.describe()["tuning"] == "own.bundle.tune.json is used"
    executor, choices = executor_of(bundle, threads=2)
    assert (choices, executor.program.threads) == ({"task_rows": 7}, 2)
    executor, choices = executor_of(bundle, threads=1, tuning={"task_rows": 9})
    assert choices == {"task_rows": 9} and "tuning" not in executor.describe()
    bundle.verify_hashes()  # the bundle itself is as it was


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_who_may_read_it_is_for_the_umask_to_say(umask: int, mode: int, bundle: Bundle) -> None:
    before = os.umask(umask)
    try:
        file_for(bundle).write(tuning_path(bundle))
    finally:
        os.umask(before)
    assert stat.S_IMODE(tuning_path(bundle).stat().st_mode) == mode
    assert [p.name for p in bundle.path.parent.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"program_sha256": "0" * 64}, "another program"),
        ({"enginewright": "0.0.1"}, "another version of Enginewright: 0.0.1"),
        ({"processor": "Z80"}, "another processor: Z80"),
        ({"cores": 999}, "another number of cores: 999"),
        ({"isa": "mmx"}, "another instruction set: mmx"),
        ({"choices": {"colour": 1}}, "there is no colour of 1"),
        ({"choices": {"task_rows": -1}}, "there is no task_rows of -1"),
    ],
)
def test_what_is_for_another_machine_is_ignored(changed: dict[str, Any], named: str, bundle: Bundle) -> None:
    file_for(bundle, **changed).write(tuning_path(bundle))
    executor, choices = executor_of(bundle, threads=1)
    assert choices == {}
    assert str(executor.describe()["tuning"]).startswith("own.bundle.tune.json is ignored: ")
    assert named in str(executor.describe()["tuning"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "truncated"),
        ("[]", "is ignored"),
        ("{}", "missing required field `enginewright`"),
        (" " * (2 << 20), "more than the 1,048,576"),
        ('{"format_version": 2}', "format_version"),
        ('{"isa": "\udcff"}', "is ignored"),
        ('{"threads": 1025}', "threads"),
        ('{"row_seconds": {"64": [0.0]}}', "row_seconds"),
    ],
)
def test_a_damaged_file_is_ignored(text: str, named: str, bundle: Bundle) -> None:
    tuning_path(bundle).write_bytes(text.encode(errors="surrogateescape"))
    tuning, note = load_tuning(bundle, ISA)
    assert tuning is None and named in note
    assert executor_of(bundle, threads=1)[1] == {}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("pipe", "it is a pipe"),
        ("device", "it is a device"),
        ("folder", "it is a folder"),
        ("sparse", "more than the 1,048,576"),
    ],
)
def test_what_is_not_a_small_regular_file_is_ignored(kind: str, named: str, bundle: Bundle) -> None:
    """And nobody waits for it: a pipe has no end."""
    path = tuning_path(bundle)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 3 << 30)

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(10)
    try:
        tuning, note = load_tuning(bundle, ISA)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert tuning is None and note.startswith("own.bundle.tune.json is ignored: ") and named in note


def test_a_file_that_cannot_be_written_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "taken.json"
    (folder / "full").mkdir(parents=True)
    with pytest.raises(BundleError, match="cannot be written"):
        file_for(bundle).write(folder)
    with pytest.raises(BundleError, match="cannot be written"):
        file_for(bundle).write(tmp_path / "absent" / "a.json")
    assert {p.name for p in tmp_path.iterdir()} == {"own.bundle", "taken.json"}


def test_the_file_is_plain_json(bundle: Bundle) -> None:
    file_for(bundle).write(tuning_path(bundle))
    assert json.loads(tuning_path(bundle).read_text())["choices"] == {"task_rows": 7}
