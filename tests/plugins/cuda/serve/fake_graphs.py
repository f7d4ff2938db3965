"""Graphs without a GPU: calls on fixed memory that are recorded once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from enginewright.plugins.cuda.serve.steps import CudaSteps
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher


class FakeGraph(TorchDispatchMode):
    """A stand-in for a CUDA graph: calls on fixed memory, recorded once. It runs the calls that it records."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []
        _thread.recording = self
        with self:
            work()
        _thread.recording = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        fresh = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]
        old = {x.untyped_storage().data_ptr() for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)}

        def again() -> None:
            now = func(*args, **kwargs)
            for tensor, new in zip(fresh, now if isinstance(now, (tuple, list)) else [now], strict=True):
                if tensor.untyped_storage().data_ptr() not in old:
                    tensor.copy_(new)

        self._calls.append(again)
        return result

    def add(self, launch: Callable[[], object]) -> None:
        self._calls.append(launch)

    def launch(self) -> None:
        for call in self._calls:
            call()

    def close(self) -> None:
        self._calls.clear()


_thread = threading.local()


def recorded(launch: Callable[[], object]) -> None:
    """Runs something, as one call of the graph that this thread is recording, if it is."""
    graph: FakeGraph | None = getattr(_thread, "recording", None)
    if graph is not None:
        graph.add(launch)
    with _disable_current_modes():
        launch()


class RecordingLauncher(JitLauncher):
    """Interpreted kernels, each one call of a graph that is being recorded."""

    def bind(self, call: Call) -> Callable[[], object]:
        launch = super().bind(call)
        return lambda: recorded(launch)


def captured(work: Callable[[], None], steps: CudaSteps) -> FakeGraph:
    """Records work as a graph does, which runs nothing of it: states, tokens and results are as before."""
    held = [*(pool for pools in steps._program.pools.values() for pool in pools), steps._program.arena]
    held += [steps._inputs.device, steps._memory.tokens]
    before = [one.clone() for one in held]
    graph = FakeGraph(work)
    for one, old in zip(held, before, strict=True):
        one.copy_(old)
    return graph
