"""A model's supervisor: when it gives up, how long it waits, and what clients are told meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from enginewright.runtime.server.engines import engine_client
from enginewright.runtime.server.engines.engine_client import Limits, Model, Pauses, UnavailableError
from enginewright.runtime.server.engines.records import Engine, Failed, Opened, Problem
from enginewright.runtime.server.http.errors import api_error
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may move away."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "model.bundle"))


def opened(model: Model, bundle_hash: str | None = None) -> Opened:
    return Opened(bundle_hash or model.hash, "cpu", asdict(model.model), {}, 1)


def refused(bundle: Path) -> Failed:
    return Failed(Problem.from_error(BundleError(f"{bundle}: it isn't there")))


def test_pauses_double_up_to_a_limit() -> None:
    pauses = Pauses(0.5, 3.0)
    assert [pauses.take() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    pauses.reset()
    assert pauses.take() == 0.5


def test_a_bundle_that_never_could_be_opened_fails(bundle: Path) -> None:
    model = Model("m", str(bundle), {})
    model._take(refused(bundle))
    assert model.state == "failed" and str(bundle) in str(model.error)
    with pytest.raises(UnavailableError) as failure:
        model.check()
    assert str(bundle) not in str(failure.value) and failure.value.retry_after >= 1


def test_a_bundle_that_was_opened_before_may_be_opened_again(bundle: Path) -> None:
    model = Model("m", str(bundle), {})
    model._take(opened(model))
    model.state = "restarting"
    model._take(refused(bundle))
    assert model.state == "restarting" and model.error is None
    model._take(opened(model))
    assert model.state == "ready"


def test_a_bundle_that_is_away_once_its_engine_has_opened_it(bundle: Path) -> None:
    model = Model("m", str(bundle), {})
    bundle.rename(bundle.with_name("away.bundle"))
    model._take(opened(model, "another"))  # the front end reads the new bundle too, and it is gone already
    assert model.state != "ready"
    bundle.with_name("away.bundle").rename(bundle)
    model._take(opened(model, "another"))  # replaced meanwhile: the engine's bundle isn't the front end's
    assert model.state != "ready"
    model._take(opened(model))
    assert model.state == "ready"


def test_the_supervisor_goes_on_where_no_process_can_be_started(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts fail for want of processes, then the engine ends each time; the pauses are told, and none is waited."""
    model = Model("m", str(bundle), {}, Limits(pause=2.0, longest_pause=8.0))
    starts, pauses = 0, list[float]()

    class Ending(Engine):
        program = ("-c", "")

        def __init__(self, path: str, options: dict[str, object]) -> None:
            nonlocal starts
            starts += 1
            if starts < 4:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(path, options)

    async def sleep(seconds: float) -> None:
        if seconds <= 1.0:  # the watchdog does
            return await real_sleep(0)
        pauses.append(seconds)
        with pytest.raises(UnavailableError) as failure:
            model.check()
        assert failure.value.retry_after > seconds
        if len(pauses) == 6:
            raise asyncio.CancelledError
        return await real_sleep(0)

    async def supervised() -> None:
        model.start()
        assert model._task is not None
        await asyncio.wait([model._task])

    real_sleep = asyncio.sleep
    monkeypatch.setattr(engine_client, "Engine", Ending)
    monkeypatch.setattr(engine_client.asyncio, "sleep", sleep)
    asyncio.run(supervised())
    assert pauses == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    assert starts == 6 and model.starts == 3 and model.deaths == 3


@pytest.mark.parametrize(
    "error", [BundleError("/srv/models/a.bundle/weights: it changed"), EnginewrightError("/usr/lib/x.so: it failed")]
)
def test_clients_see_no_paths_and_when_to_ask_again(error: EnginewrightError) -> None:
    problem = api_error(error)
    assert problem.status == 503 and int(problem.headers["retry-after"]) >= 1
    assert "/" not in str(problem)
    assert api_error(RequestError("prompt: it is empty")).status == 400
