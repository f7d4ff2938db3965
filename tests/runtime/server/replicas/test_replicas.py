"""Replicas on Ray Serve: the same answers, who gets what, and what is lost when one dies."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM
from enginewright.runtime.server.http.engine_options import replica_options
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.server.conftest import START, Reply, Server, alive
from tests.waiting import wait_until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray isn't installed")
LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
SERVE = ("--replicas", "2", "--threads", "1", "--memory", "64MiB")


def children(pid: int) -> set[int]:
    """The processes below a process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(") ")[2].split()[1])
    pids, before = {pid}, 0
    while len(pids) != before:
        before = len(pids)
        pids |= {one for one, parent in parents.items() if parent in pids}
    return pids - {pid}


@contextlib.contextmanager
def serving(*arguments: str | Path, errors: Path) -> Iterator[Server]:
    """A server with replicas; whatever happens, no process of it stays."""
    server, below = Server(*arguments, errors=errors), set[int]()
    try:
        yield server
    finally:
        below |= children(server.process.pid)
        server.stop()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def rows(server: Server) -> dict[str, dict[str, Any]]:
    return {row["replica"]: row for row in server.props()["replicas"]}


def both(server: Server) -> dict[str, dict[str, Any]]:
    """The rows of two replicas that answer."""
    server.wait(lambda: len(rows(server)) == 2)
    return rows(server)


class Asked:
    """A request that waits for its answer."""

    def __init__(self, ask: Callable[[], Reply]) -> None:
        self._found: list[Reply] = []
        self._thread = threading.Thread(target=lambda: self._found.append(ask()))
        self._thread.start()

    def reply(self) -> Reply:
        self._thread.join()
        return self._found[0]


def frozen_request(
    server: Server, ask: Callable[[], Reply] | None = None, **body: object
) -> tuple[Asked, dict[str, Any], dict[str, Any]]:
    """A request that a replica has taken whose engine stands still, as the other one's; the rows of both.

    ``ask`` sends the request; None sends one for an answer, with ``body``.
    """
    for row in both(server).values():
        os.kill(row["engine_pid"], signal.SIGSTOP)
    request_thread = Asked(ask or (lambda: server.complete("a", **LONG, **body)))
    server.wait(lambda: any(row["requests"] for row in rows(server).values()))
    mine, other = sorted(rows(server).values(), key=lambda row: -row["requests"])
    return request_thread, mine, other


def kill(row: dict[str, Any]) -> None:
    os.kill(row["pid"], signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(row["engine_pid"], signal.SIGCONT)  # it sees that its socket is closed, and ends


@pytest.mark.matrix
@needs_ray
def test_two_replicas(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a server without; a conversation stays where it is; a request is tried again; nothing stays."""
    plain = Server(tiny_bundle, "--threads", "1", errors=tmp_path / "plain")
    expected = plain.complete("a", **LONG, seed=1).text
    plain.stop()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (config := tmp_path / "server.toml").write_text("silence_seconds = 3600.0\n")  # no engine dies of standing still
    with serving(tiny_bundle, *SERVE, "--config", config, errors=tmp_path / "stderr") as server:
        before = both(server)
        assert not list(tmp_path.rglob("auth_token"))  # which others could read
        assert server.complete("a", **LONG, seed=1, stream=True).text == expected
        prompt = list(range(40, 140))
        first = server.complete(prompt, max_tokens=2)
        second = server.complete([*prompt, *prompt], max_tokens=2)
        cached = [one.json["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
        assert cached[0] == 0 and cached[1] >= 96, cached

        thread, mine, other = frozen_request(server, seed=1)
        kill(mine)
        server.wait(lambda: server.props()["retried"] == 1)
        os.kill(other["engine_pid"], signal.SIGCONT)
        assert thread.reply().text == expected
        assert server.props()["deaths"] >= 1, server.errors.read_text()
        after = both(server)  # Ray Serve has started another one
        assert mine["replica"] not in after and other["replica"] in after and before.keys() != after.keys()
        assert "enginewright_replicas" in server.ask("GET", "/metrics").body.decode()
        below = children(server.process.pid) | {row["engine_pid"] for row in after.values()}
        assert server.stop() == 0, server.errors.read_text()
        wait_until(lambda: not any(map(alive, below)))


@pytest.mark.matrix
@needs_ray
@pytest.mark.parametrize("kind", ["embed", pytest.param("token_classify", marks=pytest.mark.soak)])
def test_texts_go_to_replicas(kind: str, pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    """The numbers are those of ``LLM``, on every replica, and when one dies that has some of a body's texts."""
    texts = [f"{'ab ' * (i % 20)}c{i % 7}" for i in range(300)]
    path, field = {"embed": ("/v1/embeddings", "embedding"), "token_classify": ("/pooling", "data")}[kind]
    with LLM(pooled_bundles[kind]) as llm:
        numbers = llm.embed(texts) if kind == "embed" else [one.scores for one in llm.classify(texts)]
    expected = [one.tolist() for one in numbers]
    (config := tmp_path / "server.toml").write_text("silence_seconds = 3600.0\n")  # no engine dies of standing still
    options = ("--replicas", "2", "--threads", "1", "--config", config)
    with serving(pooled_bundles[kind], *options, errors=tmp_path / "stderr") as server:

        def rows_of(reply: Reply) -> list[Any]:
            assert reply.status == 200, reply.body
            return [row[field] for row in reply.json["data"]]

        def ask() -> Reply:
            return server.ask("POST", path, {"input": texts})

        assert rows_of(ask()) == expected
        threads = [Asked(ask) for _ in range(4)]
        assert all(rows_of(thread.reply()) == expected for thread in threads)
        thread, mine, other = frozen_request(server, ask)
        kill(mine)
        server.wait(lambda: server.props()["retried"] > 0)
        os.kill(other["engine_pid"], signal.SIGCONT)
        assert rows_of(thread.reply()) == expected
        both(server)  # Ray Serve has started another one
        assert rows_of(ask()) == expected
        message = server.ask("POST", path, {"input": ["a", "ab " * 100]}).json["error"]["message"]
        assert "input[1]" in message


@pytest.fixture(scope="module")
def replicated(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_bundle, *SERVE, errors=tmp_path_factory.mktemp("replicas") / "stderr") as server:
        yield server


@pytest.mark.soak
@needs_ray
def test_what_has_streamed_ends_with_an_error(replicated: Server) -> None:
    server = replicated
    body = {"prompt": "a", "stream": True, "n": 64, "temperature": 1, "max_tokens": 120, "ignore_eos": True}
    while True:  # until the engine stands still within the stream
        engines = [row["engine_pid"] for row in both(server).values()]
        link = http.client.HTTPConnection("127.0.0.1", server.port)
        link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = link.getresponse()
        response.readline()
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        mine = [row for row in rows(server).values() if row["requests"]]
        for row in mine:
            kill(row)
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        rest = response.read()
        link.close()
        if mine:
            break
    assert response.status == 200 and b"was lost" in rest and b"[DONE]" in rest
    both(server)
    assert server.complete("a", max_tokens=1).status == 200


@pytest.mark.soak
@needs_ray
def test_a_request_that_was_there_at_two_deaths_is_not_tried_again(replicated: Server) -> None:
    server = replicated
    retried = server.props()["retried"]
    thread, mine, other = frozen_request(server, seed=77)
    kill(mine)
    server.wait(lambda: server.props()["retried"] == retried + 1)
    server.wait(lambda: rows(server).get(other["replica"], other)["requests"] == 1)
    kill(other)
    reply = thread.reply()
    assert reply.status == 503 and "was lost" in reply.json["error"]["message"]
    both(server)
    again = server.complete("a", **LONG, seed=77)
    assert again.status == 400 and "died 2 times" in again.json["error"]["message"]
    assert server.complete("b", **LONG, seed=77).status == 200


@pytest.mark.soak
@needs_ray
def test_an_engine_that_dies_comes_back_in_its_replica(replicated: Server) -> None:
    server = replicated
    thread, mine, other = frozen_request(server, seed=5)
    os.kill(mine["engine_pid"], signal.SIGKILL)
    os.kill(other["engine_pid"], signal.SIGCONT)
    assert thread.reply().status == 200
    after = both(server)
    assert after[mine["replica"]]["pid"] == mine["pid"] and after[mine["replica"]]["engine_pid"] != mine["engine_pid"]


@pytest.mark.soak
@needs_ray
def test_a_client_that_leaves_frees_its_replica(replicated: Server) -> None:
    server = replicated
    engines = [row["engine_pid"] for row in both(server).values()]
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    link = http.client.HTTPConnection("127.0.0.1", server.port)
    link.request("POST", "/v1/completions", json.dumps({"prompt": "a", **LONG}), {"content-type": "application/json"})
    server.wait(lambda: any(row["requests"] for row in rows(server).values()))
    link.close()
    server.wait(lambda: not any(row["requests"] for row in rows(server).values()))
    for pid in engines:
        os.kill(pid, signal.SIGCONT)
    server.wait(lambda: not any(row["kv_cache_used"] for row in rows(server).values()))


@pytest.mark.soak
@needs_ray
def test_a_stranger_gets_nothing(replicated: Server) -> None:
    """Anybody may find the port of replicas; the key is secret."""
    both(replicated)
    ports = _listening(replicated.process.pid) - {replicated.port}
    assert ports
    for port in ports:
        for data in (b"\0\0\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\x10\0\0\0" + b"x" * 16, b"\xff" * 4000):
            with socket.create_connection(("127.0.0.1", port)) as link, contextlib.suppress(OSError):
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                while link.recv(100):
                    pass
    assert replicated.complete("a", max_tokens=1).status == 200
    assert len(both(replicated)) == 2


def _listening(pid: int) -> set[int]:
    """The ports of 127.0.0.1 where a process listens."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(one[1].rpartition(":")[2], 16) for one in lines if one[3] == "0A" and one[9] in sockets}


@pytest.mark.soak
@needs_ray
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_bundle_is_replaced_without_a_lost_request(
    replicas: str, tiny_bundle: Path, turns_bundle: Path, tmp_path: Path
) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'[models]\nm = "{tiny_bundle}"\n')
    arguments = ("--config", config, *SERVE[2:], "--replicas", replicas)
    with serving(*arguments, errors=tmp_path / "stderr") as server:
        old = server.props()
        stop, replies = threading.Event(), list[Reply]()

        def ask(stream: bool) -> None:
            while not stop.is_set():
                replies.append(server.complete("a", max_tokens=40, ignore_eos=True, seed=1, stream=stream))

        threads = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(4)]
        for thread in threads:
            thread.start()
        config.write_text(f'[models]\nm = "{turns_bundle}"\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait(lambda: server.props()["bundle"] != old["bundle"])
        new = server.props()["bundle"]
        server.wait(lambda: {row["bundle"] for row in server.props()["replicas"]} == {new})
        server.wait(lambda: len(server.props()["replicas"]) == int(replicas))
        stop.set()
        for thread in threads:
            thread.join()
        assert {reply.status for reply in replies} == {200}, [r.body for r in replies if r.status != 200][:3]
        assert not [reply for reply in replies if b'"error"' in reply.body]
        prints = {
            (reply.events[0] if "event" in reply.headers["content-type"] else reply.json)["system_fingerprint"]
            for reply in replies
        }
        assert len(prints) == 2
        assert server.chat("Hi", max_tokens=2).status == 200  # the new bundle has a template

        config.write_text(f'[models]\nm = "{tmp_path / "none.bundle"}"\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait(lambda: "nothing is replaced" in server.errors.read_text())
        assert server.chat("Hi", max_tokens=2).status == 200


@pytest.mark.soak
@needs_ray
def test_replicas_are_added_where_there_is_much_to_do(tiny_bundle: Path, tmp_path: Path) -> None:
    scaling = ("--replicas", "1", "--max-replicas", "2", "--target-requests", "1", *SERVE[2:])
    with serving(tiny_bundle, *scaling, errors=tmp_path / "stderr") as server:
        assert len(server.props()["replicas"]) == 1
        (row,) = rows(server).values()
        os.kill(row["engine_pid"], signal.SIGSTOP)
        threads = [Asked(lambda: server.complete("a", **LONG)) for _ in range(8)]
        server.wait(lambda: len(rows(server)) == 2)
        os.kill(row["engine_pid"], signal.SIGCONT)
        assert {one.reply().status for one in threads} == {200}


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[int]:
    """The port of a Ray cluster of this machine. `ray stop` would end those of others as well."""
    process, port = begin_cluster(folder / "ray")
    while process.poll() is not None:  # Ray waits 30 s for its own processes, and a machine may be busier
        process, port = begin_cluster(folder / "ray")
    try:
        yield port
    finally:
        below = children(process.pid)
        process.terminate()
        process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def begin_cluster(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--port", str(port)]
    with log.open("w") as file:
        options = ["--num-cpus", "2", "--include-dashboard", "false"]
        process = subprocess.Popen([*start, *options], stdout=file, stderr=file)
    wait_until(lambda: process.poll() is not None or "will now block" in log.read_text(), log.read_text)
    return process, port


@pytest.mark.soak
@needs_ray
def test_a_cluster_is_joined_and_left(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follows the page: `ray start`, then --ray with the address. A front end that dies is replaced by another."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token := secrets.token_hex(32))
    with cluster(tmp_path) as port:
        address = f"127.0.0.1:{port}"
        arguments = (tiny_bundle, *SERVE, "--ray", address)
        with serving(*arguments, errors=tmp_path / "one") as server:
            before = both(server)
            server.process.kill()
            server.process.wait()
        with serving(*arguments, errors=tmp_path / "two") as server:
            assert server.complete("a", max_tokens=2).status == 200
            engines = {row["engine_pid"] for row in both(server).values()}
            assert server.stop() == 0
        engines |= {row["engine_pid"] for row in before.values()}
        wait_until(lambda: not any(map(alive, engines)))
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        stranger = _command(tiny_bundle, *SERVE, "--ray", address)
        assert stranger.returncode == 2 and "RAY_AUTH_MODE" in stranger.stderr, stranger.stderr[-2000:]
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        many = _command(tiny_bundle, "--replicas", "3", "--threads", "1", "--ray", address)
        assert many.returncode == 2 and "3 of 1 CPUs each are 3, and the cluster has 2" in many.stderr, many.stderr


APPLICATION = """
import json, sys
import ray
from ray import serve
from enginewright.runtime.server.ingress import application
ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
serve.run(application(json.loads(sys.argv[1])), route_prefix="/")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.soak
@needs_ray
def test_the_application_of_a_rayservice(tiny_bundle: Path, tmp_path: Path) -> None:
    plain = Server(tiny_bundle, "--threads", "1", errors=tmp_path / "plain")
    expected = plain.complete("a", **LONG, seed=1).text
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        plain.port, port = free.getsockname()[1], plain.port
    args = {
        "models": {"m": str(tiny_bundle)},
        "replicas": 2,
        "insecure": True,
        "llm": {"threads": 1, "memory": "64MiB"},
    }
    program = [sys.executable, "-c", APPLICATION, json.dumps(args), str(plain.port)]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert any(line == "ready\n" for line in process.stdout), (tmp_path / "stderr").read_text()
        for stream in (False, True):
            assert plain.complete("a", **LONG, seed=1, stream=stream).text == expected
        assert len(both(plain)) == 2 and plain.props()["state"] == "ready"
        assert plain.complete("a", temperature=-1).json["error"]["param"] == "temperature"
    finally:
        below = children(process.pid)
        process.stdin.close()
        process.wait()
        plain.port = port
        plain.stop()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", START, "serve", *map(str, arguments), "--port", "0"]
    return subprocess.run(program, capture_output=True, text=True, check=False)


@pytest.mark.soak
@needs_ray
@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:1", "can't be reached"), ("nonsense", "isn't an address"), ("ray://127.0.0.1:1", "isn't an address")],
)
def test_an_address_where_nobody_is(address: str, said: str, tiny_bundle: Path) -> None:
    completed = _command(tiny_bundle, "--replicas", "1", "--ray", address)
    assert completed.returncode == 2 and said in completed.stderr and "ray start --head" in completed.stderr, (
        completed.stderr
    )


def test_without_ray_the_extra_is_named(tiny_bundle: Path) -> None:
    hidden = "import sys; sys.modules['ray'] = None; import importlib.util as u; found = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *more: None if name == 'ray' else found(name, *more)\n"
    program = [sys.executable, "-c", hidden + START, "serve", str(tiny_bundle), "--replicas", "2"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 10 and "enginewright[ray]" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": -1}, "replicas: expected `int` >= 0"),
        ({"replicas": 2, "target_requests": 0.0}, "target_requests: expected `float` > 0.0"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas: 2, with 4"),
        ({"max_replicas": 2}, "max_replicas: 2, with 0"),
        ({"replicas": 2, "routing": "random"}, "routing: invalid enum value 'random'"),
        ({"replicas": 2, "max_loaded": 1}, "max_loaded: replicas stay loaded"),
    ],
)
def test_options_that_are_wrong(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ServerOptions(models={"a": "a"}, **given).check()


def test_threads_and_memory_are_a_replica_s_own() -> None:
    models = {"a": "a", "b": "b"}
    options = ServerOptions(models=models, replicas=3, llm={"threads": 4, "memory": "100MiB", "seed": 1})
    assert replica_options(options) == {"threads": 2, "memory": 50 << 20, "seed": 1}
    whole = replica_options(ServerOptions(models={"a": "a"}, replicas=1))["memory"]
    share = replica_options(ServerOptions(models=models, replicas=1, max_replicas=4))["memory"]
    assert 0 < share < whole / 6  # free memory differs from one moment to the next
    assert "memory" not in replica_options(ServerOptions(models=models, replicas=3, ray="auto"))
