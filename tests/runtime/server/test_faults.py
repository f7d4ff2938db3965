"""Clients that leave or don't read, engines that die or hang, signals, ports, keys: nobody else notices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.server.http.engine_options import model_options, options_for
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.http.tenants import Key, Tenant
from enginewright.runtime.shared import threads
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.memory import free_memory
from tests.runtime.server.conftest import START, Reply, Server, alive
from tests.waiting import wait_until

MakeServer = Callable[..., Server]
LONG = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}


def slow_config(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "server.toml"
    file.write_text(text)
    return file


def begin(server: Server, stream: bool = True, buffer: int = 0, **body: object) -> tuple[object, object]:
    """A request that has been sent; for a stream also its first piece."""
    link = server.connect(buffer)
    data = json.dumps({"prompt": "a", "stream": stream, **LONG, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(data)}\r\n\r\n"
    link.sendall(head.encode() + data)
    file = link.makefile("rb")
    if stream:
        while not file.readline().startswith(b"data: "):
            pass
    return link, file


def children(pid: int) -> list[int]:
    """Process ids of a process's children, of each of its threads."""
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def freeze(server: Server) -> int:
    (pid,) = server.engines()
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_client_that_leaves_frees_its_blocks(make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle)
    pid = freeze(server)
    links = []
    for stream in (False, False):
        link, file = begin(server, stream)
        links.append((link, file))
    server.wait(lambda: server.props()["requests"] == 2)
    for link, file in links:
        file.close()  # type: ignore[attr-defined]
        link.close()  # type: ignore[attr-defined]
    server.wait(lambda: server.props()["requests"] == 0)
    os.kill(pid, signal.SIGCONT)
    server.wait(lambda: server.props()["kv_cache_used"] == 0 and server.props()["waiting"] == 0)
    assert server.complete("a", max_tokens=2).status == 200


def test_an_engine_that_is_killed_ends_its_requests_and_comes_back(make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle)
    expected = server.complete("b", **LONG, seed=1).text
    results = []
    for deaths in (1, 2):
        pid = freeze(server)
        thread = threading.Thread(target=lambda: results.append(server.complete("a", **LONG, seed=3)))
        thread.start()
        server.wait(lambda: server.props()["requests"] == 1)
        os.kill(pid, signal.SIGKILL)
        thread.join()
        assert results[-1].status == 503 and "was lost: signal 9" in results[-1].json["error"]["message"]
        server.wait(lambda: server.ask("GET", "/health").status == 200)
        assert server.props()["deaths"] == deaths
        assert server.complete("b", **LONG, seed=1).text == expected
    reply = server.complete("a", **LONG, seed=3)  # was there at both
    assert reply.status == 400 and "died 2 times" in reply.json["error"]["message"]


@pytest.mark.parametrize(("kills", "seconds"), [(1, 0.0), pytest.param(30, 1.0, marks=pytest.mark.soak)])
def test_an_engine_that_dies_while_its_bundle_is_away_comes_back(
    kills: int, seconds: float, make_server: MakeServer, tiny_bundle: Path, tmp_path: Path
) -> None:
    place, away = tmp_path / "model.bundle", tmp_path / "away.bundle"
    shutil.copytree(tiny_bundle, place)
    server = make_server(place)

    def starts() -> int:
        return server.errors.read_text().count("it is started again")

    for number in range(1, kills + 1):
        (pid,) = server.engines()
        before = starts()
        place.rename(away)
        os.kill(pid, signal.SIGKILL)
        server.wait(lambda before=before: starts() >= before + 2)  # it was killed, and couldn't be opened again
        time.sleep(seconds)
        reply = server.complete("a", max_tokens=1)
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert str(tmp_path) not in reply.body.decode()
        away.rename(place)
        server.wait(lambda: server.ask("GET", "/health").status == 200)
        assert server.props()["deaths"] == number
        assert server.complete("a", max_tokens=1).status == 200


def test_an_engine_that_loses_a_rank_comes_back(make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--ranks", "2", "--threads", "1")
    assert server.props()["executor"]["ranks"] == 2
    (engine,) = server.engines()
    for rank in children(engine):
        os.kill(rank, signal.SIGKILL)
    server.wait(lambda: server.props()["deaths"] == 1 and server.ask("GET", "/health").status == 200)
    assert server.complete("a", max_tokens=2).status == 200


@pytest.mark.matrix
def test_an_engine_that_hangs_is_killed(make_server: MakeServer, tiny_bundle: Path, tmp_path: Path) -> None:
    server = make_server(tiny_bundle, "--config", slow_config(tmp_path, "silence_seconds = 3.0\n"))
    freeze(server)
    states = set()

    def back() -> bool:
        reply = server.ask("GET", "/health")
        states.add(reply.status)
        return bool(server.props()["deaths"] == 1) and reply.status == 200

    server.wait(back)
    assert 503 in states  # health told
    assert server.complete("a", max_tokens=1).status == 200


def test_a_stream_s_error_is_an_event(make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle)
    (pid,) = server.engines()
    # So many answers that the stream is there when the engine dies, however fast the machine is.
    link, file = begin(server, n=64, temperature=1, max_tokens=120)
    os.kill(pid, signal.SIGKILL)
    rest = b"".join(iter(file.readline, b"0\r\n"))  # type: ignore[attr-defined]
    assert b"was lost" in rest or b"[DONE]" in rest
    assert b"[DONE]" in rest
    link.close()  # type: ignore[attr-defined]


@pytest.mark.matrix
def test_a_signal_lets_answers_end_and_a_second_does_not(make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--ranks", "2", "--threads", "1")
    pid = freeze(server)
    results = []
    thread = threading.Thread(target=lambda: results.append(server.complete("a", **LONG)))
    thread.start()
    server.wait(lambda: server.props()["requests"] == 1)
    ranks = children(pid)
    assert ranks
    for process in (server.process.pid, pid, *ranks):  # as to a whole group of processes, by `timeout` or a supervisor
        os.kill(process, signal.SIGTERM)
    server.wait(lambda: server.ask("GET", "/health").status == 503)
    late = server.complete("b", max_tokens=1)
    assert late.status == 503 and "stopping" in late.json["error"]["message"] and "retry-after" in late.headers
    os.kill(pid, signal.SIGCONT)
    thread.join()
    assert results[0].status == 200
    assert server.process.wait() == 0
    wait_until(lambda: not any(map(alive, (pid, *ranks))))

    server = make_server(tiny_bundle)
    pid = freeze(server)
    link, _ = begin(server, stream=False)
    server.wait(lambda: server.props()["requests"] == 1)
    server.process.send_signal(signal.SIGINT)
    server.wait(lambda: server.ask("GET", "/health").status == 503)
    server.process.send_signal(signal.SIGINT)
    os.kill(pid, signal.SIGCONT)
    server.process.wait()
    link.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("ended", ["front end", "engine"])
def test_what_dies_leaves_nothing_below_it(ended: str, make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--ranks", "2", "--threads", "1")
    (engine,) = server.engines()
    ranks = children(engine)
    assert ranks
    if ended == "engine":
        os.kill(engine, signal.SIGKILL)
    else:
        server.process.kill()
        server.process.wait()
    wait_until(lambda: not any(map(alive, (engine, *ranks))))


def sockets(server: Server) -> int:
    """Sockets that the front end has open."""
    count = 0
    for one in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it may be closed meanwhile
            count += os.readlink(one).startswith("socket:")
    return count


def test_a_client_that_reads_nothing_is_cut_off(make_server: MakeServer, tiny_bundle: Path, tmp_path: Path) -> None:
    config = slow_config(tmp_path, "stall_seconds = 1.0\n")
    server = make_server(tiny_bundle, "--config", config)
    before = sockets(server)
    long = {"n": 100, "temperature": 1, "max_tokens": 120, "logprobs": 20}  # more than sockets hold
    for stream in (True, False):
        link, file = begin(server, stream, buffer=8192, **long)
        server.wait(lambda: server.props()["requests"] == 1)
        server.wait(lambda: server.props()["requests"] == 0)
        wait_until(lambda: sockets(server) == before)  # and nothing of it is left
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := file.read(1 << 20):  # type: ignore[attr-defined]
                answer += piece
        length = re.search(rb"content-length: (\d+)", answer)
        assert not answer.endswith(b"0\r\n\r\n") if length is None else len(answer) < int(length[1])
        link.close()  # type: ignore[attr-defined]
    assert server.complete("a", max_tokens=1).status == 200


def test_slow_and_idle_connections(make_server: MakeServer, tiny_bundle: Path, tmp_path: Path) -> None:
    config = slow_config(tmp_path, "header_seconds = 2.0\nbody_seconds = 1.0\nmax_body = 2000\n")
    server = make_server(tiny_bundle, "--config", config)
    idle = [server.connect() for _ in range(300)]
    assert server.complete("a", max_tokens=1).status == 200
    for link in idle:
        link.settimeout(60)
        assert link.recv(1) == b""  # it was closed
        link.close()
    with server.connect() as link:
        link.settimeout(60)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 50\r\n\r\n{{"
        link.sendall(head.encode())
        assert b" 408 " in link.recv(4096)
    assert server.complete("a" * 3000, max_tokens=1).status == 413


def test_more_than_may_wait_get_429(make_server: MakeServer, tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--max-requests", "1", "--max-waiting", "1")
    pid = freeze(server)
    links = [begin(server, stream=False) for _ in range(2)]
    server.wait(lambda: server.props()["requests"] == 2)
    reply = server.complete("a", max_tokens=1)
    assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
    os.kill(pid, signal.SIGCONT)
    for link, file in links:
        assert b" 200 " in file.readline()  # type: ignore[attr-defined]
        link.close()  # type: ignore[attr-defined]


def test_keys_tenants_and_quotas(make_server: MakeServer, tiny_bundle: Path, tmp_path: Path) -> None:
    def entry(key: str, more: str) -> str:
        return f'[[keys]]\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\n{more}\n'

    keys = tmp_path / "keys.toml"
    keys.write_text(
        entry("one", 'tenant = "a"\nrequests = 1\nadmin = true') + entry("two", 'tenant = "b"\ntokens_per_minute = 60')
    )
    server = make_server(tiny_bundle, "--api-keys", keys)
    body = {"prompt": "word " * 20, "max_tokens": 1}

    def ask(key: str, path: str = "/v1/completions", method: str = "POST", **more: object) -> object:
        return server.ask(method, path, body | more if method == "POST" else None, authorization=f"Bearer {key}")

    assert server.complete("a").status == 401 and ask("three").status == 401  # type: ignore[attr-defined]
    assert server.ask("GET", "/health").status == 200
    assert ask("one", "/metrics", "GET").status == 200 and ask("two", "/metrics", "GET").status == 403  # type: ignore[attr-defined]
    assert server.ask("GET", "/v1/models", **{"x-api-key": "two"}).status == 200
    for key, status in (("three", b" 401 "), ("one", b" 413 ")):  # nothing is read after a refusal
        with server.connect() as link:
            link.settimeout(60)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            link.sendall(f"{head}Content-Length: 100000000\r\n\r\n".encode() + b"x" * 1000)
            assert status in read_all(link)
    with server.connect() as link:  # an unfinished body is a request
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
        link.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        server.wait(lambda: ask("one").status == 429)  # type: ignore[attr-defined]
    server.wait(lambda: ask("one", prompt="none of the others").status == 200)  # type: ignore[attr-defined]
    for key in ("one", "two"):  # nothing that one tenant computed is another's
        assert ask(key).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[attr-defined]
    reply = ask("one")
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # type: ignore[attr-defined]
    salted = ask("one", cache_salt="s")
    assert salted.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[attr-defined]
    over = ask("two")  # it has taken more than 60 tokens
    assert over.status == 429 and "tokens a minute" in over.json["error"]["message"]  # type: ignore[attr-defined]
    keys.write_text(entry("new", 'tenant = "a"'))
    os.utime(keys, (1, 1))
    server.wait(lambda: ask("new").status == 200)  # type: ignore[attr-defined]
    assert ask("one").status == 401  # type: ignore[attr-defined]
    keys.write_text("[[keys")  # what is wrong leaves the keys as they are
    os.utime(keys, (2, 2))
    time.sleep(0)
    assert ask("new").status == 200  # type: ignore[attr-defined]


def read_all(link: socket.socket) -> bytes:
    """The bytes received until the connection is closed."""
    data = b""
    while piece := link.recv(65536):
        data += piece
    return data


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, "serve", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def documented_exit_codes() -> list[int]:
    """The codes in serve.md's table of exit codes, which has one row for each."""
    page = Path(__file__).parents[3] / "docs" / "use" / "commands" / "serve.md"
    table = page.read_text(encoding="utf-8").partition("\n## Exit codes\n")[2]
    return [int(code) for code in re.findall(r"^\| .+ \| (\d+) \|$", table, re.M)]


def test_what_can_not_be_served_is_said_at_once_by_the_documented_exit_codes(
    make_server: MakeServer, tiny_bundle: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    code = make_server(tiny_bundle).stop()
    server = make_server(tiny_bundle)
    damaged, none = tmp_path / "damaged.bundle", tmp_path / "none"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{}")
    keys, odd, text = tmp_path / "keys.toml", tmp_path / "odd.toml", tmp_path / "text.pem"
    keys.write_text('[[keys]]\nhash = "secret"\ntenant = "a"\n')
    odd.write_text("max_bodies = 3\n")
    text.write_text("no certificate")
    value = slow_config(tmp_path, f"max_waiting = -1\n[models]\na = {str(tiny_bundle)!r}\n")
    taken_port = tmp_path / "taken.toml"
    taken_port.write_text(f"port = {server.port}\n")
    blocked = "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n == {!r} else find(n)\n"
    cases: dict[int, list[tuple[list[str | Path], str, str]]] = {
        2: [  # no bundle, an unknown option, or a wrong value of an option
            ([], "", "nothing to serve"),
            (["--model", "x"], "", "NAME=BUNDLE"),
            (["--model", "x=x", "--alias", "y"], "", "NAME=MODEL"),
            ([tiny_bundle, "--odd"], "", "--odd"),
            ([tiny_bundle, "--host", "0.0.0.0"], "", "--insecure"),
            ([tiny_bundle, "--max-waiting", "0"], "", "--max-waiting"),
        ],
        5: [([tiny_folder, "--recipe", "int9"], "", "int9")],
        7: [([none], "", "none"), ([damaged], "", "damaged.bundle")],
        8: [  # the address is in use, or a file of options, keys or TLS is wrong
            ([tiny_bundle, "--port", str(server.port)], "", f"{server.port}: Address already in use"),
            ([tiny_bundle, "--config", taken_port], "", f"{server.port}: Address already in use"),
            ([tiny_bundle, "--config", odd], "", "max_bodies"),
            ([tiny_bundle, "--config", value], "", "max_waiting"),
            ([tiny_bundle, "--config", none], "", "none"),
            ([tiny_bundle, "--port", "0", "--api-keys", keys], "", "sha256"),
            ([tiny_bundle, "--port", "0", "--tls-certificate", text, "--tls-key", text], "", "text.pem"),
        ],
        10: [  # an extra isn't installed
            ([tiny_bundle], blocked.format("starlette"), "enginewright[serve]"),
            ([tiny_bundle, "--replicas", "1"], blocked.format("ray"), "enginewright[ray]"),
        ],
    }
    assert code == 0
    assert documented_exit_codes() == [code, *cases]
    for expected, commands in cases.items():
        for arguments, before, named in commands:
            program = [sys.executable, "-c", before + START, "serve", *map(str, arguments)]
            done = subprocess.run(program, capture_output=True, text=True, check=False)
            assert done.returncode == expected, (arguments, done.returncode, done.stderr)
            assert named in done.stderr and "Traceback" not in done.stderr, (arguments, done.stderr)


def test_the_configuration_that_is_printed_is_one(tiny_bundle: Path, tmp_path: Path) -> None:
    first = run(tiny_bundle, "--max-waiting", "7", "--allowed-host", "a.example", "--threads", "1", "--print-config")
    assert first.returncode == 0 and re.search(r"^max_waiting = 7$", first.stdout, re.M)
    again = run("--config", slow_config(tmp_path, first.stdout), "--print-config")
    assert again.stdout == first.stdout


def test_several_models_and_one_that_is_loaded_when_it_is_asked_for(
    make_server: MakeServer, tiny_bundle: Path, turns_bundle: Path
) -> None:
    server = make_server("--model", f"a={tiny_bundle}", "--model", f"b={turns_bundle}", "--max-loaded", "1")
    assert server.props("a")["state"] == "ready" and server.props("b")["state"] == "unloaded"
    reply = server.chat("Hi", model="b", max_tokens=2)
    assert reply.status == 200 and reply.json["model"] == "b"
    assert server.props("a")["state"] == "unloaded" and server.props("b")["state"] == "ready"
    (pid,) = server.engines()
    os.kill(pid, signal.SIGSTOP)
    link, _ = begin(server, stream=False, model="b")
    server.wait(lambda: server.props("b")["requests"] == 1)
    busy = server.chat("Hi", model="a", max_tokens=1)
    assert busy.status == 503 and "busy" in busy.json["error"]["message"]
    os.kill(pid, signal.SIGCONT)
    link.close()  # type: ignore[attr-defined]
    server.wait(lambda: server.props("b")["requests"] == 0)
    assert server.chat("Hi", model="a", max_tokens=1).status == 200


def test_a_model_is_exported_first_and_once(
    make_server: MakeServer, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = make_server(tiny_folder, "--recipe", "f32")
    expected = first.complete("A ship", max_tokens=8, seed=1)
    assert expected.status == 200 and expected.json["model"] == tiny_folder.name
    (entry,) = (tmp_path / "cache" / "enginewright" / "exports").iterdir()
    manifest = (entry / "bundle" / "manifest.json").stat()
    again = make_server("--model", f"mine={tiny_folder}", "--recipe", "f32")
    reply = again.complete("A ship", max_tokens=8, seed=1)
    assert reply.text == expected.text and reply.json["model"] == "mine"
    assert reply.json["system_fingerprint"] == expected.json["system_fingerprint"]
    assert (entry / "bundle" / "manifest.json").stat() == manifest  # it was served from there, and not written again
    wrong = run(tiny_folder, "--recipe", "int9")
    assert wrong.returncode == 5 and "int9" in wrong.stderr


def test_models_have_shares_of_threads_and_memory() -> None:
    models = {"a": "a.bundle", "b": "b.bundle", "c": "c.bundle"}
    options = ServerOptions(models=models, llm={"threads": 8, "memory": "300MiB"})
    assert model_options(options) == {"threads": 2, "memory": 100 << 20}
    options = ServerOptions(models=models, llm={"threads": 1, "memory": "300MiB"}, max_loaded=2)
    assert model_options(options) == {"threads": 1, "memory": 150 << 20}
    assert model_options(ServerOptions(models={"a": "a.bundle"}, llm={"seed": 3})) == {"seed": 3}
    options = ServerOptions(models=models, llm={"threads": 3, "memory": "3MiB", "prefix_memory": "6MiB"})
    assert model_options(options) == {"threads": 1, "memory": 1 << 20, "prefix_memory": 2 << 20}
    assert 0 < model_options(ServerOptions(models=models))["memory"] < free_memory() // 4


def test_models_share_the_threads_of_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    models = {"a": "a.bundle", "b": "b.bundle"}
    for quota, each in ((None, 32), (5, 2), (1, 1)):
        monkeypatch.setattr(threads, "cpu_quota", lambda root, quota=quota: quota)
        assert model_options(ServerOptions(models=models))["threads"] == each


def test_options_of_answers_are_for_models_that_write_text(tiny_bundle: Path, pooled_bundles: dict[str, Path]) -> None:
    llm = {"context": 256, "speculate": "lookup", "prefix_folder": "p", "states_memory": "1MiB", "threads": 1}
    chat, vectors = str(tiny_bundle), str(pooled_bundles["embed"])
    both = ServerOptions(models={"chat": chat, "embed": vectors})
    assert options_for(chat, llm, both) == llm and options_for(vectors, llm, both) == {"threads": 1}
    assert options_for(vectors, llm, ServerOptions(models={"embed": vectors})) == llm


def test_a_key_s_requests_do_not_overtake_others() -> None:
    key = Key("sha256:" + 64 * "0", "a", of_class="batch", priority=3)
    tenant = Tenant("a", key)
    assert tenant.ranked(RequestOptions()) == RequestOptions("", 3, "batch")
    assert tenant.ranked(RequestOptions("", 1, "batch")) == RequestOptions("", 3, "batch")
    assert tenant.ranked(RequestOptions("", 7)) == RequestOptions("", 7, "batch")
    with pytest.raises(RequestError, match="request_class: this key's requests are of the class 'batch'"):
        tenant.ranked(RequestOptions(request_class="chat"))
    assert Tenant("").ranked(RequestOptions("", 1, "chat")) == RequestOptions("", 1, "chat")


def _signed_rank(one: list[float], two: list[float]) -> float:
    """Wilcoxon's statistic of pairs as a normal deviate: how much longer ``two`` take than ``one``."""
    differences = sorted((b - a for a, b in zip(one, two, strict=True)), key=abs)
    rank_sum = sum(rank for rank, value in enumerate(differences, 1) if value > 0)
    n = len(differences)
    return float((rank_sum - n * (n + 1) / 4) / (n * (n + 1) * (2 * n + 1) / 24) ** 0.5)


@pytest.mark.soak
def test_another_tenant_s_prompts_can_not_be_told_by_time(
    make_server: MakeServer, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Each prompt of one tenant is asked by the other, and a new one beside it, in random order. Were prefixes shared,
    the first would take less time, as it does for the tenant itself. At 5 deviates chance fails one run in a million.
    """
    keys = tmp_path / "keys.toml"
    hashes = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("a", "b")}
    keys.write_text("".join(f'[[keys]]\nhash = "sha256:{h}"\ntenant = "{key}"\n' for key, h in hashes.items()))
    server = make_server(tiny_bundle, "--api-keys", keys)
    rng = random.Random(7)

    def seconds(key: str, prompt: list[int]) -> float:
        began = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 1}
        assert server.ask("POST", "/v1/completions", body, authorization=f"Bearer {key}").status == 200
        return time.perf_counter() - began

    def prompt() -> list[int]:
        return [rng.randrange(40, 200) for _ in range(500)]

    times: dict[str, tuple[list[float], list[float]]] = {"a": ([], []), "b": ([], [])}
    for _ in range(400):
        for key in ("b", "a"):
            known = prompt()
            seconds("a", known)
            prompts = [(0, known), (1, prompt())]
            for which, one in rng.sample(prompts, 2):
                times[key][which].append(seconds(key, one))
    assert abs(_signed_rank(*times["b"])) < 5
    assert _signed_rank(*times["a"]) > 5  # what is cached can be told: the test would see it


def test_every_prompt_and_answer_counts_for_a_key(make_server: MakeServer, tiny_bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"one").hexdigest()
    quotas = "requests = 4\ntokens_per_minute = 100\nadmin = true"
    keys.write_text(f'[[keys]]\nhash = "sha256:{digest}"\ntenant = "a"\n{quotas}\n')
    server = make_server(tiny_bundle, "--api-keys", keys)

    def ask(prompts: int, n: int, words: int = 1) -> Reply:
        body = {"prompt": ["a" + " b" * words] * prompts, "n": n, "max_tokens": 1}
        return server.ask("POST", "/v1/completions", body, authorization="Bearer one")

    assert ask(2, 3).status == 429 and ask(5, 1).status == 429
    assert ask(2, 2).status == 200 and ask(4, 1).status == 200  # and none is counted any more
    pid = freeze(server)
    link = server.connect()
    body = json.dumps({"prompt": "a b " * 60, **LONG}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer one\r\n"
    link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def requests() -> int:
        props = server.ask("GET", "/props", authorization="Bearer one").json
        return int(next(iter(props["models"].values()))["requests"])

    server.wait(lambda: requests() == 1)
    link.close()  # it leaves, and its prompt counts all the same
    server.wait(lambda: requests() == 0)
    os.kill(pid, signal.SIGCONT)
    assert "tokens a minute" in ask(1, 1).json["error"]["message"]


@pytest.mark.matrix
def test_a_bundle_that_is_replaced_is_served_from_the_next_start_on(
    make_server: MakeServer, tiny_bundle: Path, turns_bundle: Path, tmp_path: Path
) -> None:
    place = tmp_path / "model.bundle"
    shutil.copytree(tiny_bundle, place)
    server = make_server(place)
    before = server.props()
    expected = server.complete("a", max_tokens=8, seed=1).text
    place.rename(tmp_path / "old.bundle")
    shutil.copytree(turns_bundle, tmp_path / "new.bundle")
    (tmp_path / "new.bundle").rename(place)
    assert server.complete("a", max_tokens=8, seed=1).text == expected
    (pid,) = server.engines()
    os.kill(pid, signal.SIGKILL)
    server.wait(lambda: server.props()["deaths"] == 1 and server.ask("GET", "/health").status == 200)
    after = server.props()
    assert after["bundle"] != before["bundle"] and after["system_fingerprint"] != before["system_fingerprint"]
    assert server.chat("Hi", max_tokens=2).status == 200


STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    "/v1/responses": {"input": "a"},
    "/api/chat": {"model": "tiny-turns", "messages": [{"role": "user", "content": "a"}]},
}


def last_error(path: str, answer: bytes) -> str:
    """The message of a stream's last event, which is an error in the form of its protocol."""
    head, _, body = answer.partition(b"\r\n\r\n")
    pieces = re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", body) if b"chunked" in head.lower() else [body]
    text = b"".join(pieces).decode()
    if path == "/api/chat":  # nothing is sent before the first token, so the status is an error's
        assert head.startswith(b"HTTP/1.1 503 ")
        return str(json.loads(text)["error"])
    assert head.startswith(b"HTTP/1.1 200 ")
    done = "data: [DONE]"
    lines = [line for line in text.splitlines() if line and line != done]
    event = json.loads(lines[-1].removeprefix("data: "))
    if path == "/v1/messages":
        assert lines[-2] == "event: error" and event["type"] == "error"
        assert event["error"]["type"] == "overloaded_error"
        return str(event["error"]["message"])
    assert text.rstrip().endswith(done)
    if path == "/v1/responses":
        assert lines[-2] == "event: response.failed" and event["response"]["status"] == "failed"
        return str(event["response"]["error"]["message"])
    assert event["error"]["type"] == "server_error"
    return str(event["error"]["message"])


def test_a_drained_stream_ends_with_an_error_of_its_protocol(
    make_server: MakeServer, turns_bundle: Path, tmp_path: Path
) -> None:
    config = slow_config(tmp_path, "keep_alive_seconds = 0.05\ndrain_seconds = 0.05\n")
    server = make_server(turns_bundle, "--config", config)
    pid = freeze(server)
    files = {}
    for path, body in STREAMS.items():
        data = json.dumps({**body, "stream": True}).encode()
        link = server.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        link.sendall(head.encode() + data)
        files[path] = link.makefile("rb")
    begun = {path: b"" if path == "/api/chat" else files[path].readline() for path in files}  # by a comment, or a ping
    server.wait(lambda: server.props()["requests"] == len(STREAMS))
    server.process.send_signal(signal.SIGTERM)
    for path, file in files.items():
        message = last_error(path, begun[path] + file.read())
        assert "the server stopped before the answer's end" in message, (path, message)
    os.kill(pid, signal.SIGCONT)
    assert server.process.wait() == 0
