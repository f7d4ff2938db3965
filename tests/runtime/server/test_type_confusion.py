"""No body ends in an error that nobody foresaw, whatever types its values have; see ``type_confusion``."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from enginewright.runtime.server.app import BODIES as ENDPOINTS

from .in_process import InProcess
from .type_confusion import BODIES, body, run


@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.matrix)])
def test_values_of_other_types(tools_bundle: Path, pooled_bundles: dict[str, Path], seed: int) -> None:
    statuses = asyncio.run(run(tools_bundle, pooled_bundles, 400 if seed == 7 else 5000, seed))
    assert statuses[200] and statuses[400] and not any(status > 500 for status in statuses)


@pytest.mark.soak
def test_a_hundred_thousand_values_of_other_types(tools_bundle: Path, pooled_bundles: dict[str, Path]) -> None:
    asyncio.run(run(tools_bundle, pooled_bundles, 100_000, 1))


def test_each_body_is_right_before_a_value_is_confused(tools_bundle: Path, pooled_bundles: dict[str, Path]) -> None:
    async def check() -> None:
        app = InProcess(tools_bundle, pooled_bundles)
        await app.front.loaded(app.front.model("m"))
        for path, valid in BODIES:
            reply = await app.ask(path, valid)
            expected = 404 if "previous_response_id" in valid else 400 if path == "/infill" else 200
            assert reply.status == expected, reply.body  # the model has no tokens for filling in
        await app.front.close()

    asyncio.run(check())


def test_every_endpoint_has_a_body_and_each_seed_its_own() -> None:
    assert {path for path, _ in BODIES} == {*ENDPOINTS}
    assert body(random.Random(3)) == body(random.Random(3))
    assert len({body(random.Random(seed)) for seed in range(100)}) > 80


def test_where_one_of_several_prompts_fails_nothing_waits_for_the_others(
    tiny_bundle: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """An answer that is cut off leaves no task behind."""

    async def check() -> None:
        app = InProcess(tiny_bundle)
        await app.front.loaded(app.front.model("m"))
        before = len(asyncio.all_tasks())
        long = {"prompt": ["a", [1] * 5000], "max_tokens": 400, "ignore_eos": True}
        for _ in range(3):
            assert (await app.ask("/v1/completions", long)).status == 400
        assert len(asyncio.all_tasks()) == before
        assert app.front.model("m").running == 0
        await app.front.close()

    asyncio.run(check())
