"""Which steps are captured as graphs and replayed, and what happens if a capture fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest

from enginewright.plugins.gpu.graphed_steps import GraphedSteps
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError


class Work:
    """Work that writes to a log. ``capturable`` is the answer of a library."""

    def __init__(self, log: list[str], name: str, capturable: bool = True) -> None:
        self._log, self._name, self.capturable = log, name, capturable

    def __call__(self) -> None:
        self._log.append(f"run {self._name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


class Driver:
    """Captures work in memory. ``errors`` are raised by the next captures, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.errors: list[EnginewrightError] = []
        self.capturable = True

    def capture(self, work: Callable[[], None]) -> Driver:
        if self.errors:
            raise self.errors.pop()
        self.log.append("capture")
        return self

    def launch(self) -> None:
        self.log.append("launch")

    def close(self) -> None:
        self.log.append("close graph")

    def bound(self, name: str, keep: bool) -> Work:
        self.log.append(f"bind {name}{' to keep' if keep else ''}")
        return Work(self.log, name, self.capturable)

    def run(self, graphs: GraphedSteps[str], *names: str) -> list[str]:
        """Runs steps and returns what was logged meanwhile."""
        self.log.clear()
        for name in names:
            graphs.run(name, partial(self.bound, name))
        return list(self.log)


def graphs_of(driver: Driver, most: int = 2) -> GraphedSteps[str]:
    return GraphedSteps("cuda", driver.capture, lambda: driver.log.append("wait"), most)


def test_a_step_is_captured_after_its_second_run_and_replayed_from_the_third() -> None:
    driver = Driver()
    graphs = graphs_of(driver)
    assert driver.run(graphs, "a", "a") == ["bind a", "run a", "bind a to keep", "run a", "capture"]
    assert driver.run(graphs, "a", "a") == ["launch", "launch"]
    assert (graphs.captures, graphs.launches) == (1, 2)
    assert graphs.describe() == {"graph_launches": 2}


def test_each_variant_of_a_step_runs_before_it_is_captured() -> None:
    """Its own run settles a library's choice of kernels, which a capture must not see."""
    driver = Driver()
    graphs = graphs_of(driver)
    driver.run(graphs, "plain", "plain", "plain")
    assert driver.run(graphs, "with hidden states") == ["bind with hidden states", "run with hidden states"]


def test_the_graph_that_was_launched_longest_ago_is_closed_before_its_work() -> None:
    driver = Driver()
    graphs = graphs_of(driver)
    driver.run(graphs, "a", "a", "b", "b", "a")
    assert driver.run(graphs, "c", "c")[-4:] == ["capture", "wait", "close graph", "close b"]
    assert driver.run(graphs, "a") == ["launch"]
    assert "capture" in driver.run(graphs, "b")
    driver.log.clear()
    graphs.clear()
    assert driver.log.count("close graph") == 2


def test_a_step_that_the_library_can_t_capture_is_asked_about_once() -> None:
    driver = Driver()
    driver.capturable = False
    graphs = graphs_of(driver)
    assert driver.run(graphs, "a", "a")[-2:] == ["wait", "close a"]
    assert driver.run(graphs, "a", "a") == ["bind a", "run a"] * 2
    assert graphs.not_captured == "the library says that a step can't be captured"
    driver.capturable = True
    assert "capture" in driver.run(graphs, "b", "b")


def test_without_memory_for_a_graph_its_step_alone_has_none() -> None:
    driver = Driver()
    driver.errors = [CapacityError("the GPU's memory is full")]
    graphs = graphs_of(driver)
    driver.run(graphs, "a", "a")
    assert graphs.describe() == {"graph_launches": 0, "not_captured": "the GPU's memory is full"}
    assert driver.run(graphs, "a") == ["bind a", "run a"]
    assert "capture" in driver.run(graphs, "b", "b")


def test_after_a_capture_that_fails_no_other_is_tried_and_users_are_told_once() -> None:
    driver = Driver()
    driver.errors = [EnginewrightError("no"), EnginewrightError("cuStreamEndCapture failed")]
    graphs = graphs_of(driver)
    with pytest.warns(RuntimeWarning, match="target cuda: a CUDA graph can't be made: cuStreamEndCapture failed"):
        driver.run(graphs, "a", "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.run(graphs, "b", "b", "b", "a")
    assert len(driver.errors) == 1 and graphs.captures == 0
