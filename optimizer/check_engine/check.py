"""Checks a GPU engine on this machine, and makes a report that doesn't name the machine.

The stages run in a process of their own, since a library that crashes ends its process; the report then says in which
stage.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginewright.plugins.doctor.examine import require
from enginewright.plugins.doctor.machine import look_at_machine
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import check_code
from enginewright.runtime.shared.errors import (
    BundleError,
    MissingDependencyError,
    RequestError,
)
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .engines import REFERENCE, TINY, Task, engines

FORMAT = 1
"""The version of a report."""

_CHILD = "enginewright.optimizer.check_engine.child"


@dataclass(frozen=True)
class EngineReport:
    """The result of a check, to be sent to the project. It has no paths, and no name of the machine or its user.

    Attributes:
        target: the checked target.
        passed: True if no stage failed.
        model: "tiny" for the model that the package makes, "own" for a bundle's.
        engine: the engine's name.
        versions: versions of enginewright, of Python and of the engine's packages.
        system: the operating system and architecture.
        gpus: name, compute capability and bytes of memory of each GPU.
        driver, cuda: versions of NVIDIA's driver, and of the newest CUDA that it supports; "" without one.
        stages: each stage's name, status ("passed", "failed" with "error", "skipped" with "reason"), seconds and facts.
    """

    target: str
    passed: bool
    model: str
    engine: str
    versions: dict[str, str]
    system: str
    gpus: list[dict[str, Any]]
    driver: str
    cuda: str
    stages: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``."""
        return {"format": FORMAT, **asdict(self)}


def check_engine(
    target: str | None = None,
    bundle: str | Path | None = None,
    *,
    trust: str | None = None,
    build: bool = False,
    progress: Progress = silent,
) -> EngineReport:
    """Runs a model on an engine of this machine, and compares its tokens with the cpu target's.

    Args:
        target: a target that declares an engine; None for the first of them that the bundle has.
        bundle: a bundle with this target and the cpu target; None for a tiny model that is exported first, which needs
            the packages of an export.
        trust: as for ``LLM``; the tiny model needs none.
        build: True to build the bundle's target first, if it isn't ready.
        progress: called with each stage.

    Raises:
        RequestError: the target declares no engine, or none is given.
        BundleError: the bundle is damaged, or lacks one of the two targets.
        TrustError: ``trust`` doesn't allow the bundle's code to run.
        MissingDependencyError, TargetError: the engine, the driver or a suitable GPU is missing; the hint says what to
            install.
    """
    opened = None if bundle is None else Bundle.open(bundle, trust)
    name = _chosen(target, opened)
    engine, machine = engines()[name], look_at_machine()
    require(machine, name, "checked", opened, unbuilt=build)
    if opened is not None:
        check_code(opened, name)
    else:
        with MissingDependencyError.of_export("check: exporting the tiny model"):
            importlib.import_module("enginewright.optimizer.export")
    with tempfile.TemporaryDirectory(prefix="enginewright-check-") as folder:
        task = Task(
            target=name,
            bundle="" if opened is None else str(opened.path.resolve()),
            folder=folder,
            gpus=tuple(engine.exported_for(gpu.capability) for gpu in machine.gpus[:1]),
            build=build,
        )
        stages = _run(task, progress)
    packages = {package: machine.packages[package] for package in engine.packages if package in machine.packages}
    report = EngineReport(
        target=name,
        passed=not any(stage["status"] == "failed" for stage in stages),
        model=TINY if opened is None else "own",
        engine=engine.name,
        versions={"enginewright": machine.packages.get("enginewright", ""), "python": machine.python, **packages},
        system=machine.system,
        gpus=[{"name": g.name, "capability": g.capability, "memory_bytes": g.memory_bytes} for g in machine.gpus],
        driver=machine.driver,
        cuda=machine.cuda,
        stages=stages,
    )
    return EngineReport(**without_places(asdict(report)))


def _chosen(target: str | None, bundle: Bundle | None) -> str:
    """Returns the target to check. Raises RequestError or BundleError."""
    known = engines()
    names = ", ".join(known)
    if target is not None and target not in known:
        raise RequestError(f"target: {target!r} has no engine to check", hint=f"Take one of {names}.")
    if bundle is None:
        if target is None:
            raise RequestError("target: it isn't known which engine to check", hint=f"Pass one of {names}.")
        return target
    name = target or next((name for name in known if name in bundle.targets), None)
    missing = [f"target {one!r}" for one in (name, REFERENCE) if one is not None and one not in bundle.targets]
    if name is None or missing:
        what = " and ".join(missing) or f"one of the targets {names}"
        raise BundleError(
            f"{bundle.path}: it has no {what}; a check compares a target with {REFERENCE!r}",
            hint=f"Export again with --target {REFERENCE} --target {name or next(iter(known))}, or leave the bundle "
            "out: a tiny model is checked then.",
        )
    return name


def _run(task: Task, progress: Progress) -> list[dict[str, Any]]:
    """Runs the stages of a check in a process, and returns their results.

    If the process dies, the current stage has failed.
    """
    from .stages import STAGES

    stages: dict[str, dict[str, Any]] = {}
    running = STAGES[0]
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(reader, encoding="utf-8") as events:
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", _CHILD, str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                text=True,
            )
        finally:
            os.close(writer)
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError), child.stdin as stdin:  # it has ended, and its exit status says how
                stdin.write(json.dumps(task.to_json()) + "\n")
            for line in events:
                if not line.endswith("\n"):
                    break  # it died within a line
                event = json.loads(line)
                if "begins" in event:
                    running = event["begins"]
                    progress(ProgressEvent("check", STAGES.index(running), len(STAGES), running))
                else:
                    stages[event["stage"]] = event
        except BaseException:
            child.kill()
            raise
        finally:
            status = child.wait()
        log.seek(0)
        last = log.read()[-2000:].decode(errors="replace").strip()
    if status:
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        stages[running] = {"stage": running, "status": "failed", "error": f"its process {how}: {last}"}
    skipped = {"status": "skipped", "reason": "an earlier stage failed"}
    return [stages.get(name, {"stage": name, **skipped}) for name in STAGES]


_PATH = re.compile(r"(?:file://|(?<![\w./]))~?/(?!/)(?:[^\s/:'\"(),;]+/)+")


def without_places(value: Any) -> Any:
    """Removes the folders of paths, the name of this machine and the home folder from the texts of a JSON value.

    They could identify the user.
    """
    if isinstance(value, dict):
        return {key: without_places(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_places(one) for one in value]
    if not isinstance(value, str):
        return value
    if len(home := os.path.expanduser("~")) > 1:
        value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value)
    text = _PATH.sub("", value)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text) if socket.gethostname() else text
