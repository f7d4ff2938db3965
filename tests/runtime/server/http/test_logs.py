"""The operator's tools: a log line for each request, JSON if asked for, the printed address, SIGHUP."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.server.http.logs import without_values
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.serve import address, listening
from enginewright.runtime.shared.errors import RequestError
from tests.runtime.server.conftest import START, Server

SECRET = "a secret prompt"


def keys(file: Path, **tenants: str) -> None:
    """Writes a file of keys: tenant -> key. It takes the old one's place at once."""
    rows = [
        f'[[keys]]\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
        for tenant, key in tenants.items()
    ]
    new = file.with_suffix(".new")
    new.write_text("".join(rows))
    new.replace(file)


def ask_oddly(server: Server, **headers: str) -> None:
    """Sends requests of many kinds, whose prompts must not be in the log."""
    # Greedy: two answers that are drawn may end after different numbers of tokens.
    body: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "temperature": 0}
    for more in ({}, {"stream": True}, {"odd": SECRET}, {"stop": [SECRET, 3]}, {"model": "none"}, {"n": 0}):
        server.ask("POST", "/v1/chat/completions", body | more, **headers)
    for prompt in ({SECRET: SECRET}, [SECRET, 3], [[SECRET]], {"a": [SECRET, "it's " + SECRET]}):
        server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 3}, **headers)
    server.ask("POST", "/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}, **headers)
    server.ask("GET", "/health")


def test_a_line_for_each_request(make_server: Callable[..., Server], tiny_bundle: Path, tmp_path: Path) -> None:
    keys(tmp_path / "keys.toml", web="key")
    server = make_server(tiny_bundle, "--api-keys", tmp_path / "keys.toml", "--log-json")
    ask_oddly(server, authorization="Bearer key")
    server.ask("GET", "/v1/models", **{"x-request-id": "mine"})
    assert server.stop() == 0
    text = server.errors.read_text()
    assert "secret" not in text
    every = [json.loads(line) for line in text.splitlines()]
    assert all(one["level"] in ("info", "warning", "error") and one["time"] > 1e9 for one in every)
    lines = [one for one in every if "status" in one]
    assert [one["status"] for one in lines] == [200, 200, 400, 400, 404, *[400] * 6, 200, 401]
    whole = lines[0]
    assert (whole["method"], whole["path"], whole["tenant"]) == ("POST", "/v1/chat/completions", "web")
    assert whole["model"] == "tiny-llama" and whole["prompt_tokens"] > 3 >= whole["completion_tokens"] > 0
    times = [whole[f"{name}_seconds"] for name in ("queue", "prefill", "decode")]
    assert min(times) >= 0 and whole["seconds"] >= sum(times) - 0.001
    counts = ("prompt_tokens", "completion_tokens", "model", "tenant")
    assert [lines[1][name] for name in counts] == [whole[name] for name in counts]
    assert lines[2]["reason"].startswith("'odd': there is no such field")
    assert lines[3]["reason"].startswith("stop[1]: expected") and lines[4]["model"] == "none"
    assert all(one["reason"] for one in lines if one["status"] >= 400)
    assert "tenant" not in lines[-1] and lines[-1]["request_id"] == "mine"


def test_lines_are_text_by_default(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle)
    ask_oddly(server)
    server.ask("GET", "/v1/models/%0aforged")
    server.stop()
    text = server.errors.read_text()
    assert "secret" not in text and " 404 " in text and not any(line.startswith("forged") for line in text.splitlines())
    lines = [line for line in text.splitlines() if " INFO POST /v1/chat/completions " in line]
    assert len(lines) == 7 and " 200 model=tiny-llama " in lines[0] and " prompt_tokens=" in lines[0]
    assert "reason=\"'odd': there is no such field" in lines[2]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("max_tokens: expected `int`, got `str`", "max_tokens: expected `int`, got `str`"),
        ("'odd': there is no such field", "'odd': there is no such field"),
        ("the body isn't JSON", "the body isn't JSON"),
        ("prompt: {'a': 'it\\'s a secret'} isn't a prompt", "prompt: ... isn't a prompt"),
        ("prompt: ['a', \"secret's\"", "prompt: ..."),
        ("messages[0]: 'secret...", "messages[0]: ..."),
        ("a 'secret: more' isn't it", "a ... isn't it"),
        ("chat: message 0: secret", "chat: the template refuses the messages"),
    ],
)
def test_a_reason_has_no_values(message: str, line: str) -> None:
    assert without_values(message) == line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "::1", "localhost", "127.0.0.2"])
@pytest.mark.parametrize("more", [{}, {"allowed_hosts": ["models.example.org"]}])
def test_the_printed_address_is_one_that_is_answered(host: str, more: dict[str, Any]) -> None:
    options = ServerOptions(models={"a": "a"}, host=host, port=0, insecure=True, **more)
    try:
        listener = listening(options)
    except RequestError:
        pytest.skip("this machine has no such address")
    with listener:
        url = address(options, listener)
        name, port = url.removeprefix("http://").rpartition(":")[::2]
        assert options.fixed_hosts is None or name.strip("[]") in options.fixed_hosts
        socket.create_connection((name.strip("[]"), int(port))).close()


def test_the_address_of_all_interfaces_answers(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--host", "0.0.0.0", "--insecure")
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        assert answer.status == 200


def test_a_file_of_tls_that_cannot_be_used_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for certificate, key, named in ((tmp_path / "none.pem", text, "none.pem"), (text, text, "text.pem")):
        arguments = [str(tiny_bundle), "--tls-certificate", str(certificate), "--tls-key", str(key), "--port", "0"]
        done = subprocess.run([sys.executable, "-c", START, "serve", *arguments], capture_output=True, text=True)
        assert done.returncode in (2, 8) and "Traceback" not in done.stderr
        assert "tls-certificate" in done.stderr.replace("_", "-") and named in done.stderr


def test_a_hang_up_reads_keys_and_options_and_never_stops_the_server(
    make_server: Callable[..., Server], tiny_bundle: Path, tmp_path: Path
) -> None:
    file, config = tmp_path / "keys.toml", tmp_path / "server.toml"
    keys(file, web="first")
    config.write_text("max_waiting = 9\n")
    server = make_server(tiny_bundle, "--api-keys", file, "--log-json", "--config", config)

    def status(key: str) -> int:
        return server.ask("GET", "/v1/models", authorization=f"Bearer {key}").status

    def hang_up(said: str) -> None:
        count = server.errors.read_text().count(said)
        for pid in (server.process.pid, *server.engines()):
            os.kill(pid, signal.SIGHUP)
        server.wait(lambda: server.errors.read_text().count(said) > count)

    assert (status("first"), status("second")) == (200, 401)
    keys(file, web="second")
    hang_up("keys are read again")
    assert (status("first"), status("second")) == (401, 200)
    file.write_text("[[keys]]")
    hang_up("keys stay as they were")
    assert status("second") == 200
    keys(file, web="second")

    body, key = {"prompt": "a", "max_tokens": 1, "odd": 1, "model": "other"}, {"authorization": "Bearer second"}
    assert server.ask("POST", "/v1/completions", body, **key).status == 404
    more = 'step_seconds = 70.0\nunknown_fields = "ignore"\nmax_waiting = 7\n[aliases]\nother = "tiny-llama"\n'
    config.write_text(more)
    hang_up("options are read again; changed: aliases, max_waiting, unknown_fields")
    server.wait(lambda: "a restart is needed to change: step_seconds" in server.errors.read_text())
    assert server.ask("POST", "/v1/completions", body, **key).headers["x-enginewright-ignored"] == "odd"
    for wrong in ("max_waiting = ", "max_waiting = -1", 'odd = "a"', more.replace("tiny-llama", "none"), "\0"):
        config.write_text(wrong)
        hang_up("options stay as they were")
        assert server.ask("POST", "/v1/completions", body, **key).status == 200
    config.unlink()
    hang_up("options stay as they were")

    reply = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, authorization="Bearer second")
    assert reply.status == 200 and server.stop() == 0
    for line in server.errors.read_text().splitlines():
        json.loads(line)
    assert "it is started again" not in server.errors.read_text()


def test_what_engines_and_errors_write_is_json_too(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--log-json")
    (engine,) = server.engines()
    os.kill(engine, signal.SIGABRT)
    server.wait(lambda: "it is started again" in server.errors.read_text())
    arguments = [str(tiny_bundle), "--port", str(server.port), "--log-json"]
    completed = subprocess.run([sys.executable, "-c", START, "serve", *arguments], capture_output=True, text=True)
    assert completed.returncode == 8
    lines = [json.loads(line) for text in (completed.stderr, server.errors.read_text()) for line in text.splitlines()]
    assert any("Address already in use" in line.get("message", "") for line in lines)
