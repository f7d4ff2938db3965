"""Builds an engine in a process of its own. So its memory is measured separately, and a crash of the library becomes an
error.

The child (``build_child.py``) knows nothing about models; it gets an ONNX file, sizes and GPUs, and writes a plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginewright.runtime.shared.errors import CapacityError, MissingDependencyError, TargetError

Sizes = Mapping[str, tuple[int, int, int]]
"""An optimization profile: the name of each variable dimension of the graph's inputs -> (least, best, most)."""

_KEPT = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "SYSTEMROOT")
"""The environment variables that the child gets. It gets no others, because the environment's size changes addresses,
on which plans depend (``build_child``).
"""

CHILD = "enginewright.plugins.tensorrt_rtx.compile.build_child"


@dataclass(frozen=True)
class EngineRequest:
    """The inputs of a build.

    Attributes:
        graph: the ONNX file, with its weights next to it.
        plan: the file to write.
        compute_capabilities: the compute capabilities of GPUs, such as "8.9"; at least one.
        profiles: the optimization profiles, at least one.
        inputs, outputs: names that the network must have after parsing, as the library may drop inputs.
        lengths: True if attention gets the used length of each slot (``write_index`` plus the tokens of the step), so
            that it needn't read the rest. The graph still has a mask.
        name: the engine's name in progress and errors.
    """

    graph: Path
    plan: Path
    compute_capabilities: tuple[str, ...]
    profiles: tuple[Sizes, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    lengths: bool = False
    name: str = "engine"


@dataclass(frozen=True)
class BuiltEngine:
    """The result of a build.

    Attributes:
        version: the version of the library.
        bytes: the size of the plan.
        seconds: the time of parsing and building, without starting the process.
        peak_rss_bytes: the child's peak resident memory.
        layers: the number of layers of the network as it was parsed.
        attentions: the number of attentions that were fused, and got lengths if requested.
    """

    version: str
    bytes: int
    seconds: float
    peak_rss_bytes: int
    layers: int
    attentions: int


def build_engine(
    request: EngineRequest, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> BuiltEngine:
    """Builds one engine. Ctrl-C also ends the child; the plan must not be used then.

    Args:
        request: the inputs of the build.
        progress: called with the number of steps done, the number of steps, and the library's phase.

    Raises:
        MissingDependencyError: tensorrt_rtx is not installed.
        TargetError: the library rejects the graph or a size, drops an input, or crashes; names the operator.
        CapacityError: there is no memory, or no space for the plan.
    """
    folder = request.graph.resolve().parent
    # Names and not paths: those aren't part of a plan, and yet their length would move what lies in memory.
    paths = {"graph": request.graph.name, "plan": os.path.relpath(request.plan.resolve(), folder)}
    message = json.dumps(asdict(request) | paths, default=str)
    with tempfile.TemporaryFile() as log:
        # A session of its own: the terminal's Ctrl-C comes here alone, and here the child is ended.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={"PYTHONHASHSEED": "0"} | {name: os.environ[name] for name in _KEPT if name in os.environ},
        )
        try:
            answer = _listen(child, message, progress)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what it was asked, and died before it read
                        pipe.close()
        log.seek(0)
        last = log.read()[-2000:].decode(errors="replace").strip()
    if "built" in answer:
        return BuiltEngine(**answer["built"])
    raise _error(request, answer, child.returncode, last)


def _listen(child: subprocess.Popen[bytes], message: str, progress: Callable[[int, int, str], None]) -> dict[str, Any]:
    """Reads the child's lines, which report progress. Returns the last one, which is the result.

    ``message`` is sent to the child first.
    """
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(message.encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended, and its exit status says how
    for line in child.stdout:
        if not line.endswith(b"\n"):
            break  # it died within an answer
        answer: dict[str, Any] = json.loads(line)
        if "step" not in answer:
            child.wait()
            return answer
        progress(answer["step"], answer["steps"], answer["phase"])
    child.wait()
    return {}


def _error(request: EngineRequest, answer: Mapping[str, Any], status: int, last: str) -> Exception:
    """Returns the error for a child that built no engine, from its answer, its exit status and its last line of
    stderr.
    """
    name = request.name
    reason = str(answer.get("error", ""))
    match answer.get("kind"):
        case "missing":
            return MissingDependencyError(
                f"{name}: building it needs tensorrt_rtx, which can't be loaded: {reason}",
                hint="Install it with: pip install 'enginewright[tensorrt-rtx]' (Linux on x86-64).",
            )
        case "space":
            return CapacityError(
                f"{name}: the engine can't be written: {reason}",
                hint="Free space on that disk, or write the bundle to another one.",
            )
        case "refused":
            return TargetError(
                f"{name}: TensorRT-RTX doesn't build it: {reason}",
                hint="Leave this target out, or take another recipe; the onnx and cpu targets may take the model.",
            )
    if status == -signal.SIGKILL:
        return CapacityError(
            f"{name}: the process that builds it was killed; most likely there was no memory",
            hint="Free memory, or build on a machine with more.",
        )
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    return TargetError(
        f"{name}: the process that builds it {how}{': ' + last if last else ''}",
        hint="A fault of TensorRT-RTX or of this Enginewright: please report it with the model's configuration.",
    )
