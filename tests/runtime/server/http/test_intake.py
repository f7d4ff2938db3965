"""The clients that have to go if connections or bodies take too much, and those that stay."""

from __future__ import annotations

import pytest

from enginewright.runtime.server.http.errors import ApiError
from enginewright.runtime.server.http.intake import FREE_BYTES, GRACE_SECONDS, IncomingBody, Intake, body_deadline
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.http.tenants import Key, Tenant
from enginewright.runtime.shared.errors import RequestError

MB = 1 << 20


def intake(**options: int) -> Intake:
    limits = {"max_body": 16 * MB, "max_held": 64 * MB, "max_tenant_held": 32 * MB} | options
    return Intake(ServerOptions(models={"m": "m"}, **limits))  # type: ignore[arg-type]


def tenant(name: str, requests: int | None = None, tokens: int | None = None) -> Tenant:
    return Tenant(name, Key("sha256:" + 64 * "0", name, requests=requests, tokens_per_minute=tokens))


class Connection:
    def __init__(self, idle: bool = True) -> None:
        self.idle, self.dropped = idle, False

    def drop(self) -> None:
        self.dropped = True


def test_the_oldest_stranger_goes_first_then_the_oldest_idle_connection() -> None:
    door = intake(max_connections=4)
    busy, idle, again, stranger = Connection(idle=False), Connection(), Connection(), Connection(idle=False)
    for one in (stranger, busy, idle, again):
        assert door.connect(one)
    everybody, late = Tenant(""), [Connection(idle=i == 0) for i in range(4)]
    for one in (busy, idle, again, idle):  # what was used last goes last
        door.enter(one, everybody)
    for leaves, comes in ((stranger, 0), (again, 1), (idle, 2), (late[0], 3)):
        assert door.connect(late[comes]) and leaves.dropped
        door.enter(late[comes], everybody)
    assert not door.connect(Connection()) and door.connections == 4  # all are being answered
    door.disconnect(busy)
    assert door.connect(Connection())


def test_a_tenant_has_so_many_connections() -> None:
    door = intake(max_connections=10, max_tenant_connections=2)
    mine = [Connection(idle=i == 1) for i in range(4)]
    for one in mine:
        door.connect(one)
    owner = tenant("a")
    for one in mine[:3]:
        door.enter(one, owner)
    assert [one.dropped for one in mine] == [False, True, False, False]
    with pytest.raises(ApiError, match="2 connections") as failure:
        door.enter(mine[3], owner)
    assert failure.value.status == 429 and "retry-after" in failure.value.headers
    door.enter(mine[3], tenant("b"))


def test_connections_leave_room_for_other_files() -> None:
    options = ServerOptions(models={"m": "m"}, max_connections=1000)
    door = Intake(options, most_files=66)
    assert [door.connect(Connection(idle=False)) for _ in range(2)] == [True, True]
    assert door.connect(Connection()) and door.connections == 2


def fill(door: Intake, owner: Tenant, size: int, finish: bool = False) -> IncomingBody:
    body = door.begin(owner)
    for _ in range(size // MB):
        door.add(body, MB)
    if finish:
        door.finish(body)
    return body


def test_the_largest_unfinished_body_of_whoever_holds_most_goes() -> None:
    door = intake(max_held=40 * MB, max_tenant_held=32 * MB)
    hog, other = tenant("hog"), tenant("other")
    hogs = [fill(door, hog, size * MB) for size in (9, 11, 10)]
    woken: list[int] = []
    for i, one in enumerate(hogs):
        one.wake = lambda i=i: woken.append(i)  # type: ignore[misc]
    small = fill(door, other, 8 * MB)
    assert woken == []
    fill(door, other, 4 * MB)
    assert woken == [1] and hogs[1].refused is not None and small.refused is None
    assert hogs[1].refused.status == 503 and "retry-after" in hogs[1].refused.headers
    with pytest.raises(ApiError, match="take too much"):
        door.add(hogs[1], MB)
    for one in hogs:
        door.end(one)
    assert door.bytes == 12 * MB - 2 * FREE_BYTES


def test_small_bodies_are_always_taken() -> None:
    door = intake(max_held=16 * MB)
    full = [fill(door, Tenant(""), 8 * MB, finish=True) for _ in range(2)]
    for _ in range(100):
        door.add(door.begin(Tenant("")), FREE_BYTES)
    late = door.begin(Tenant(""))
    door.add(late, FREE_BYTES)
    with pytest.raises(ApiError, match="all requests take too much") as failure:
        door.add(late, MB)  # those that are being answered stay
        door.add(late, MB)
    assert failure.value.status == 503 and full[0].refused is None


def test_a_tenant_s_bodies_take_a_share() -> None:
    door = intake(max_held=64 * MB, max_tenant_held=32 * MB)
    hog = tenant("hog")
    first = fill(door, hog, 16 * MB, finish=True)
    second = fill(door, hog, 16 * MB)
    with pytest.raises(ApiError, match="this tenant's bodies") as failure:
        fill(door, hog, 2 * MB)
        door.add(second, 1)
    assert failure.value.status == 429 and second.refused is failure.value and first.refused is None
    fill(door, tenant("other"), 16 * MB)
    one = intake(max_body=100 * MB)  # one body always fits
    fill(one, hog, 99 * MB)


def test_unfinished_bodies_are_requests_of_their_key() -> None:
    door, owner = intake(), tenant("a", requests=2)
    first, second = door.begin(owner), door.begin(owner)
    with pytest.raises(ApiError, match="may have 2 at a time") as failure:
        door.begin(owner)
    assert failure.value.status == 429 and "retry-after" in failure.value.headers
    door.finish(first)
    owner.begin()  # its request runs now
    with pytest.raises(ApiError, match="may have 2 at a time"):
        door.begin(owner)
    door.end(second)
    door.begin(owner)
    spent = tenant("b", tokens=60)
    spent.begin()
    spent.end(1000)
    with pytest.raises(ApiError, match="tokens a minute"):
        door.begin(spent)


def test_a_body_comes_at_its_slowest_rate_at_least() -> None:
    assert body_deadline(0, 4096, 60.0) == GRACE_SECONDS
    assert body_deadline(40_960, 4096, 60.0) == GRACE_SECONDS + 10
    assert body_deadline(1 << 30, 4096, 60.0) == 60.0
    assert body_deadline(0, 0, 60.0) == 60.0


@pytest.mark.parametrize("name", ["max_held", "max_tenant_held", "max_connections", "max_tenant_connections"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name}: expected `int` >= 1\n.*It is 0\."):
        ServerOptions(models={"m": "m"}, **{name: 0}).check()  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="body_rate: expected `int` >= 0"):
        ServerOptions(models={"m": "m"}, body_rate=-1).check()
