"""A process that lost its GPU: seen by a probe behind an error, said from then on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginewright.plugins.gpu.health import GpuHealth, WatchedStep
from enginewright.runtime.shared.contracts import StepOutput
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, RequestError

ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")


def raising(error: Exception) -> Callable[[], StepOutput]:
    def result() -> StepOutput:
        raise error

    return result


class Step:
    def __init__(self, result: Callable[[], StepOutput]) -> None:
        self.result = result


def test_an_error_behind_which_the_gpu_does_not_answer_loses_it() -> None:
    health = GpuHealth(raising(ILLEGAL))
    step = WatchedStep(health.watched, Step(raising(ILLEGAL)))
    with pytest.raises(EnginewrightError, match=r"the GPU is lost to this process.*illegal memory access"):
        step.result()
    assert "illegal memory access" in health.lost
    with pytest.raises(EnginewrightError, match="is lost") as caught, health.watched():
        pytest.fail("nothing runs any more")
    assert "another process" in caught.value.hint


@pytest.mark.parametrize("error", [ILLEGAL, CapacityError("the GPU's memory is full"), EnginewrightError("refused")])
def test_an_error_behind_which_it_answers_does_not(error: Exception) -> None:
    probes: list[None] = []
    health = GpuHealth(lambda: probes.append(None))
    with pytest.raises(type(error)) as caught:
        WatchedStep(health.watched, Step(raising(error))).result()
    assert caught.value is error
    assert health.lost == "" and probes == [None]
    output = StepOutput(tokens=None)
    assert WatchedStep(health.watched, Step(lambda: output)).result() is output


def test_a_wrong_request_costs_no_probe() -> None:
    health = GpuHealth(raising(ILLEGAL))
    with pytest.raises(RequestError), health.watched():
        raise RequestError("step: it has no tokens", hint="Give it one at least.")
    assert health.lost == ""
