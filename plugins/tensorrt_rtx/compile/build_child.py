"""The process that builds one engine: reads an ``EngineRequest`` as JSON, and answers in lines of JSON.

It is run by ``python -m``. Only answers go to standard output; the library's output goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorrt as trt  # the interface of TensorRT-RTX is TensorRT's, which there are types of

_PR_SET_PDEATHSIG = 1
_ADDR_NO_RANDOMIZE = 0x0040000
_PERSONALITY_NOW = 0xFFFFFFFF


class RefusedError(Exception):
    """An error of a graph that the library rejects."""


def main() -> int:
    """Answers one request. Returns the exit code."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no one waits for an engine without an export
    _settle()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    request = json.loads(sys.stdin.readline())
    try:
        answer: dict[str, Any] = {"built": _build(request, answers)}
    except ImportError as e:
        answer = {"kind": "missing", "error": str(e)}
    except RefusedError as e:
        answer = {"kind": "refused", "error": str(e)}
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        answer = {"kind": "space", "error": f"{request['plan']}: {e.strerror}"}
    print(json.dumps(answer), file=answers)
    return 0


def _settle() -> None:
    """Disables randomized addresses, because the library sorts by addresses, so that its plans depend on them.

    If the system doesn't allow that (in some containers), it limits the process to one core, which usually gives the
    same order.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    now = libc.personality(_PERSONALITY_NOW)
    if now & _ADDR_NO_RANDOMIZE:
        return
    if libc.personality(now | _ADDR_NO_RANDOMIZE) == -1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return
    os.execv(sys.executable, [sys.executable, "-P", "-m", __spec__.name])


def _build(request: Mapping[str, Any], answers: IO[str]) -> dict[str, Any]:
    start = time.perf_counter()
    trt = importlib.import_module("tensorrt_rtx")
    logger, monitor = _logger(trt), _monitor(trt, answers)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["graph"]):
        raise RefusedError(_parser_errors(parser) or logger.last())
    inputs = {tensor.name: tensor for tensor in (network.get_input(i) for i in range(network.num_inputs))}
    _check_names(network, inputs, request)
    attentions = _attentions(trt, network)
    if request["lengths"] and attentions:
        lengths = _lengths(trt, network, inputs)
        for attention in attentions:
            attention.key_value_lengths = lengths
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    _set_gpus(trt, config, request["compute_capabilities"])
    for sizes in request["profiles"]:
        _add_profile(builder, config, inputs, sizes)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RefusedError(logger.last() or "it gives no reason")
    with open(request["plan"], "wb") as file:
        file.write(plan)
        file.flush()
        os.fsync(file.fileno())
    return {
        "version": trt.__version__,
        "bytes": int(plan.nbytes),
        "seconds": round(time.perf_counter() - start, 3),
        "peak_rss_bytes": _peak_rss_bytes(),
        "layers": network.num_layers,
        "attentions": len(attentions),
    }


def _logger(trt: Any) -> Any:
    class Errors(trt.ILogger):  # type: ignore[misc]
        """Stores the library's errors; prints nothing."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message.strip())

        def last(self) -> str:
            return "; ".join(self.errors[-2:])

    return Errors()


def _monitor(trt: Any, answers: IO[str]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Reports the steps of phases that aren't parts of other phases."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            if not parent:
                self.steps[name] = steps

        def step_complete(self, name: str, step: int) -> bool:
            if name in self.steps:
                event = {"phase": name, "step": step + 1, "steps": self.steps[name]}
                with contextlib.suppress(BrokenPipeError):  # whoever asked is gone, and so is this process soon
                    print(json.dumps(event), file=answers)
            return True

        def phase_finish(self, name: str) -> None:
            self.steps.pop(name, None)

    return Monitor()


def _parser_errors(parser: trt.OnnxParser) -> str:
    """Returns the parser's first error: its operator, its module, and its description; "" if there is none."""
    if not parser.num_errors:
        return ""
    error = parser.get_error(0)
    where = error.node_name().rpartition("/")[0]
    description = re.sub(r"\s+", " ", error.desc())[:400]
    return f"{error.node_operator() or 'the graph'}{' at ' + where if where else ''}: {description}"


def _check_names(network: trt.INetworkDefinition, inputs: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Raises RefusedError if the network lacks an input or output that the request names: the library silently drops
    unused ones.
    """
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    for kind, required, present in (
        ("input", request["inputs"], inputs.keys()),
        ("output", request["outputs"], outputs),
    ):
        lost = [name for name in required if name not in present]
        if lost:
            raise RefusedError(f"{kind} {', '.join(lost)}: the library dropped it")


def _attentions(trt: Any, network: trt.INetworkDefinition) -> list[trt.IAttention]:
    """Returns the attentions that are fused. Raises RefusedError if one has lost its mask, as the library drops
    unsupported masks.
    """
    attentions = []
    for i in range(network.num_layers):
        layer: Any = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            if layer.attention.mask is None:
                raise RefusedError(f"{layer.name}: its mask was dropped")
            layer.attention.decomposable = True  # where no kernel has its head size, op by op instead of not at all
            attentions.append(layer.attention)
    return attentions


def _lengths(trt: Any, network: trt.INetworkDefinition, inputs: Mapping[str, trt.ITensor]) -> trt.ITensor:
    """Adds the number of tokens in each slot after the step, i32 [B]: ``write_index`` plus the tokens of the step."""
    shape = network.add_shape(inputs["input_ids"]).get_output(0)  # i64 [2]
    tokens = network.add_slice(shape, *[trt.Dims([1])] * 3).get_output(0)  # i64 [1]
    total = network.add_elementwise(inputs["write_index"], tokens, trt.ElementWiseOperation.SUM).get_output(0)
    return network.add_cast(total, trt.int32).get_output(0)


def _set_gpus(trt: Any, config: Any, capabilities: list[str]) -> None:
    config.num_compute_capabilities = len(capabilities)
    for i, name in enumerate(capabilities):
        member = trt.ComputeCapability.__members__.get("SM" + name.replace(".", ""))
        if member is None or config.set_compute_capability(member, i) is False:
            raise RefusedError(f"compute capability {name} is unknown to this version, {trt.__version__}")


def _add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    inputs: Mapping[str, Any],
    sizes: Mapping[str, list[int]],
) -> None:
    profile: Any = builder.create_optimization_profile()
    for name, tensor in inputs.items():
        shape = tuple(tensor.shape)
        if -1 not in shape:
            continue
        letters = [tensor.get_dimension_name(i) if size == -1 else "" for i, size in enumerate(shape)]
        unknown = [letter for letter in letters if letter and letter not in sizes]
        if unknown:
            raise RefusedError(f"input {name}: nothing says the size of {', '.join(unknown)}")
        ranges = [sizes[letter] if letter else [size] * 3 for letter, size in zip(letters, shape, strict=True)]
        profile.set_shape(name, *(tuple(of[i] for of in ranges) for i in range(3)))
    if config.add_optimization_profile(profile) < 0:
        raise RefusedError(f"the sizes {dict(sizes)} aren't a profile of it")


def _peak_rss_bytes() -> int:
    """Returns the process's peak resident memory (VmHWM). getrusage's value would include the parent's memory before
    exec.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
