"""Captures steps as CUDA graphs, for the cuda target and the TensorRT targets. It doesn't need torch."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from enginewright.runtime.shared.errors import CapacityError, EnginewrightError

from .cuda_driver import Graph

MOST_GRAPHS = 32
"""The most graphs that are kept, with the memory of their contexts."""


class GraphedWork(Protocol):
    """The work of a step, which is queued on the stream."""

    @property
    def capturable(self) -> bool:
        """True if the work can be captured now."""

    def __call__(self) -> None:
        """Puts the work on the stream."""

    def close(self) -> None:
        """Frees the memory and contexts of the work. No graph of it may be launched afterwards."""


@dataclass(frozen=True)
class Works:
    """Functions that are the work of a step, in order. It is a ``GraphedWork``.

    ``held``: those of them that aren't always capturable, and that are closed with the step.
    """

    works: Sequence[Callable[[], object]]
    held: Sequence[GraphedWork] = ()

    @property
    def capturable(self) -> bool:
        return all(work.capturable for work in self.held)

    def __call__(self) -> None:
        for work in self.works:
            work()

    def close(self) -> None:
        for work in self.held:
            work.close()


Capture = Callable[[Callable[[], None]], Graph]
"""A function that makes a graph of work, without running it."""

Key = TypeVar("Key", bound=Hashable)


class GraphedSteps(Generic[Key]):
    """Runs the work of steps, and captures it as a graph after its first run if it may come again. Later steps replay
    the graph.

    Work that can't be captured runs call by call. After a failed capture no further one is tried, since the cause is
    likely to stay.

    Args:
        target: the target's name, for the warning about a failed capture.
        capture: makes graphs; None makes none.
        synchronize: waits for all work on the stream.
        most: the most graphs; beyond it, the graph that was launched least recently is closed.

    Attributes:
        launches: the number of steps that were replayed.
        captures: the number of graphs that were made.
        not_captured: the reason why some steps run without a graph; "" if all can have one.
    """

    def __init__(
        self, target: str, capture: Capture | None, synchronize: Callable[[], None], most: int = MOST_GRAPHS
    ) -> None:
        self.launches = self.captures = 0
        self.not_captured = ""
        self._target, self._capture, self._synchronize, self._most = target, capture, synchronize, most
        self._seen: OrderedDict[Key, bool] = OrderedDict()  # False where a capture was refused
        self._graphs: OrderedDict[Key, tuple[Graph, GraphedWork]] = OrderedDict()

    def run(self, key: Key, bound: Callable[[bool], GraphedWork], *, comes_again: bool = True) -> None:
        """Runs a step.

        Args:
            key: equal for steps that have the same work.
            bound: returns the step's work. Its argument is True if the work must stay valid for a graph; such work is
                closed with its graph.
            comes_again: False if this work isn't captured.
        """
        if key in self._graphs:
            self._graphs.move_to_end(key)
            self._graphs[key][0].launch()
            self.launches += 1
            return
        keep = comes_again and self._capture is not None and self._seen.get(key, False)
        work = bound(keep)
        work()
        if keep:
            self.capture(key, work)
        else:
            self._seen.setdefault(key, True)
            if len(self._seen) > 4 * self._most:
                self._seen.popitem(last=False)

    def capture(self, key: Key, work: GraphedWork) -> bool:
        """Captures work that has run once. If that isn't possible, it closes the work and returns False."""
        if (graph := self._captured(work)) is None:
            self._seen[key] = False
            self._synchronize()
            work.close()
            return False
        self.captures += 1
        self._graphs[key] = graph, work
        if len(self._graphs) > self._most:
            self._synchronize()
            self._drop()
        return True

    def describe(self) -> dict[str, str | int]:
        """Returns facts about the graphs, by name."""
        notes: dict[str, str | int] = {"graph_launches": self.launches}
        return notes | ({"not_captured": self.not_captured} if self.not_captured else {})

    def clear(self) -> None:
        """Closes all graphs and their work. Nothing may be running."""
        while self._graphs:
            self._drop()

    def _captured(self, work: GraphedWork) -> Graph | None:
        if self._capture is None:
            return None
        if not work.capturable:
            self.not_captured = "the library says that a step can't be captured"
            return None
        try:
            return self._capture(work)
        except CapacityError as e:  # the step has run, and runs without a graph from now on
            self.not_captured = e.message
            return None
        except EnginewrightError as e:
            self._capture, self.not_captured = None, e.message
            warnings.warn(
                f"target {self._target}: a CUDA graph can't be made: {e.message}; steps are launched kernel by kernel, "
                "which is slower",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def _drop(self) -> None:
        """Closes the graph that was launched least recently, and its work."""
        graph, work = self._graphs.popitem(last=False)[1]
        graph.close()
        work.close()
