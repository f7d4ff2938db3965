"""Quotas count what a body takes, from before it is decoded."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from functools import partial
from pathlib import Path

import pytest

from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.http.tenants import Charge, FairTurns, Key, QuotaError, Tenant, Tenants
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.server.in_process import InProcess


def key(**quota: int) -> Key:
    return Key("sha256:" + "0" * 64, "a", **quota)  # type: ignore[arg-type]


def test_a_charge_ends_with_its_block_unless_it_was_handed_on() -> None:
    tenant = Tenant("a", key(requests=2))
    with Charge(tenant, 0) as first:
        assert tenant.running == 1
        with Charge(tenant, 0), pytest.raises(QuotaError, match="2 at a time"):
            Charge(tenant, 0)
        first.widen(1)
        assert tenant.running == 2
    assert tenant.running == 0
    with pytest.raises(ValueError), Charge(tenant, 0):
        raise ValueError
    assert tenant.running == 0
    with Charge(tenant, 0) as last:
        last.handed_on = True
    assert tenant.running == 1
    last.end()
    assert tenant.running == 0


def test_a_body_that_is_refused_counts_by_its_bytes() -> None:
    tenant = Tenant("a", key(tokens_per_minute=1000))
    with Charge(tenant, 160_000) as charge:
        charge.tokens = 10
    with pytest.raises(QuotaError, match="1000 tokens a minute"):
        Charge(tenant, 0)


@pytest.mark.parametrize("line", ["tokens_per_minute = 0", "tokens_per_minute = -5", "requests = 0"])
def test_a_quota_of_nothing_is_refused_where_it_is_read(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nhash = "sha256:{"0" * 64}"\ntenant = "a"\n{line}\n')
    with pytest.raises(RequestError, match=f"api keys: .*{line.split()[0]}"):
        Tenants(ServerOptions(models={}, api_keys=str(file)))


def test_endpoints_that_only_count_tokens_are_counted(tiny_bundle: Path, tmp_path: Path) -> None:
    keys = [("one", "requests = 1"), ("two", "tokens_per_minute = 3")]
    rows = [
        f'[[keys]]\nhash = "sha256:{hashlib.sha256(name.encode()).hexdigest()}"\ntenant = "{name}"\n{quota}\n'
        for name, quota in keys
    ]
    (tmp_path / "keys.toml").write_text("".join(rows))
    messages = [{"role": "user", "content": "Hello there"}]
    bodies = {
        "/tokenize": {"prompt": "Hello there"},
        "/detokenize": {"tokens": [70] * 5},
        "/v1/messages/count_tokens": {"messages": messages},
        "/v1/responses/input_tokens": {"input": "Hello there"},
    }

    async def check() -> None:
        for path, body in bodies.items():
            app = InProcess(tiny_bundle, api_keys=str(tmp_path / "keys.toml"))
            for name in ("one", "two"):
                headers = {"authorization": f"Bearer {name}"}
                reply = await app.ask(path, body, headers=headers)
                assert reply.status == 200, reply.body
            reply = await app.ask(path, body, headers=headers)  # more tokens than it has for a minute
            assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1, reply.body
            headers = {"authorization": "Bearer one"}
            replies = await asyncio.gather(*(app.ask(path, body, headers=headers) for _ in range(3)))
            assert sorted(reply.status for reply in replies) == [200, 429, 429], "one at a time"
            assert (await app.ask(path, body, headers=headers)).status == 200
            await app.front.close()

    asyncio.run(check())


def test_a_long_text_is_refused_before_it_is_tokenized(tiny_bundle: Path) -> None:
    async def check() -> None:
        app = InProcess(tiny_bundle)
        for name in ("prompt", "content"):
            for count in (30_000, 3_000_000):
                reply = await app.ask("/tokenize", {name: "long " * (count // 5)})
                assert reply.status == 400, reply.body[:200]
                assert f"your {name} resulted in at least" in reply.json["error"]["message"]
                assert reply.json["error"]["code"] == "context_length_exceeded"
        await app.front.close()

    asyncio.run(check())


def test_small_works_do_not_wait_for_a_large_one(tiny_bundle: Path) -> None:
    """Not even for one of the same tenant. The large work ends only once the small ones have."""

    async def check() -> None:
        front, over = InProcess(tiny_bundle).front, threading.Event()
        large = asyncio.create_task(front.in_thread("a", partial(over.wait, 60), 1 << 20))
        await asyncio.sleep(0)
        for tenant in ("a", "b"):
            assert await front.in_thread(tenant, lambda: not over.is_set(), 1000)
        over.set()
        assert await large
        await front.close()

    asyncio.run(check())


def order(works: list[tuple[str, int, float]]) -> list[str]:
    """The order of works (tenant, bytes, seconds) that come while the first one runs, on a clock that they move."""
    now, went = 0.0, list[str]()
    turns = FairTurns(clock=lambda: now)

    async def one(tenant: str, size: int, seconds: float) -> None:
        nonlocal now
        async with turns.turn(tenant, size):
            went.append(tenant)
            await asyncio.sleep(0)
            now += seconds

    async def all_of_them() -> None:
        await asyncio.gather(*(one(*work) for work in works))

    asyncio.run(all_of_them())
    assert turns._free == 1 and not turns._waiting
    return went


def test_short_works_wait_for_one_long_work_of_another_tenant() -> None:
    works = [("hog", 0, 1.0)] * 3 + [("other hog", 0, 1.0)] * 3 + [("a", 0, 0.01)] * 8
    went = order(works)
    assert went[0] == "hog" and went.index("a") <= 2
    last = len(went) - 1 - went[::-1].index("a")
    assert last <= 9  # all eight, after at most one work of each of the others
    assert sorted(went) == sorted(tenant for tenant, _, _ in works)


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    went = order([("a", 0, 1.0)] * 10 + [("b", 0, 1.0)] * 5)
    assert went[:10].count("b") == 5  # in turn, and not all at once before the others
    assert went[1:4] != ["b", "b", "b"]


def test_a_tenant_s_small_works_go_first() -> None:
    turns = FairTurns()
    went: list[int] = []

    async def one(size: int) -> None:
        async with turns.turn("a", size):
            await asyncio.sleep(0)
            went.append(size)

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, [10, 5 << 20, 1 << 20, 100, 0]))

    asyncio.run(all_of_them())
    assert went == [10, 100, 0, 1 << 20, 5 << 20]
