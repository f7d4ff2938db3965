from __future__ import annotations

import pytest

from enginewright.optimizer.plan.devices import default_shares
from enginewright.optimizer.plan.options import PlanOptions, parse_seconds, shares_of, within
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import RequestError

SHORT = ModelInfo("m", "M", 256, 600)
LONG = ModelInfo("m", "M", 256, 100_000)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("0.5s", 0.5), (" 1.5 S", 1.5), ("800us", 8e-4), ("3µs", 3e-6)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text, "tpot") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["20", "fast", "-3ms", "0ms", "", "20 min", "nan s", "1e3ms"])
def test_what_is_not_a_time(text: str) -> None:
    with pytest.raises(RequestError, match=r"ttft: .* isn't a time") as error:
        parse_seconds(text, "ttft")
    assert "20ms" in str(error.value.hint)


def test_defaults_keep_to_the_model() -> None:
    fitted = within(PlanOptions(batches=(4, 1, 4)), SHORT)
    assert (fitted.context, fitted.prompt, fitted.batches) == (600, 512, (1, 4))
    fitted = within(PlanOptions(), LONG)
    assert (fitted.context, fitted.prompt) == (2048, 512)
    assert within(PlanOptions(context=100), LONG).prompt == 100


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (PlanOptions(context=601), "context: 601"),
        (PlanOptions(context=0), "context: 0"),
        (PlanOptions(context=64, prompt=65), "prompt: 65"),
        (PlanOptions(prompt=0), "prompt: 0"),
    ],
)
def test_sizes_beyond_the_model(options: PlanOptions, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        within(options, SHORT)


def test_shares() -> None:
    assert shares_of(PlanOptions()) == default_shares()
    shares = shares_of(PlanOptions(bandwidth_share=0.5, compute_share=1.0))
    assert (shares.bandwidth, shares.compute, shares.memory) == (0.5, 1.0, default_shares().memory)
    for wrong in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(RequestError, match=r"bandwidth_share: .* out of range"):
            shares_of(PlanOptions(bandwidth_share=wrong))
