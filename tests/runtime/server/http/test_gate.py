"""The checks before the routes, as browsers, load balancers and other programs meet them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tests.runtime.server.conftest import Server

ORIGIN = "http://localhost:3000"
MACHINES = ("/health", "/ping", "/version", "/api/version")


@pytest.fixture(scope="module")
def open_server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that a site's pages may ask, and that needs a key."""
    folder = tmp_path_factory.mktemp("open")
    hashed = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # of "key"
    (folder / "keys.toml").write_text(f'[[keys]]\nhash = "sha256:{hashed}"\ntenant = "web"\nadmin = true\n')
    options = ("--allowed-origin", ORIGIN, "--api-keys", folder / "keys.toml", "--tenant-metrics", "2")
    running = Server(tiny_bundle, *options, errors=folder / "stderr")
    yield running
    assert running.stop() == 0, running.errors.read_text()


def in_browser(server: Server, request: httpx2.Request) -> httpx2.Response:
    """Returns what a page of ``ORIGIN`` sees of a response: a browser asks first for leave, and hides headers."""
    header_names = sorted(
        name for name in request.headers if name not in ("accept", "accept-encoding", "connection", "host")
    )
    with httpx2.Client() as browser:
        leave = browser.options(
            request.url,
            headers={
                "origin": ORIGIN,
                "access-control-request-method": request.method,
                "access-control-request-headers": ",".join(header_names),
            },
        )
        assert leave.status_code == 200 and leave.headers["access-control-allow-origin"] == ORIGIN
        allowed = {name.strip() for name in leave.headers["access-control-allow-headers"].lower().split(",")}
        assert allowed >= {*header_names} - {"content-length", "user-agent"}, "a browser would stop here"
        assert request.method in leave.headers["access-control-allow-methods"].split(", ")
        request.headers["origin"] = ORIGIN
        response = browser.send(request)
    assert response.headers["access-control-allow-origin"] == ORIGIN and "Origin" in response.headers["vary"]
    seen = {name.strip() for name in response.headers["access-control-expose-headers"].split(",")}
    seen |= {"content-type", "content-length"}
    headers = {name: value for name, value in response.headers.items() if name in seen}
    return httpx2.Response(response.status_code, headers=headers, content=response.content, request=request)


def test_the_official_client_works_in_a_page_of_an_allowed_origin(open_server: Server) -> None:
    transport = httpx2.MockTransport(lambda request: in_browser(open_server, request))
    with openai.OpenAI(
        base_url=f"{open_server.url}/v1",
        api_key="key",
        max_retries=0,
        default_headers={"x-title": "a", "openai-beta": "b"},
        http_client=httpx2.Client(transport=transport),
    ) as client:
        messages = [{"role": "user", "content": "Hi"}]
        raw = client.chat.completions.with_raw_response.create(
            model="tiny-llama", messages=messages, max_tokens=1, user="u"
        )
        assert raw.request_id is not None and raw.request_id.startswith("req_")
        assert raw.headers["x-enginewright-ignored"] == "user"
        with pytest.raises(openai.NotFoundError) as failed:
            client.models.retrieve("odd")
        assert failed.value.request_id is not None


def test_a_page_of_an_allowed_origin_reads_when_to_ask_again(open_server: Server) -> None:
    headers = {"origin": ORIGIN, "authorization": "Bearer key"}
    shown = open_server.ask("GET", "/v1/models", **headers).headers["access-control-expose-headers"].split(", ")
    assert "x-request-id" in shown and "content-type" not in shown
    refused = open_server.ask("GET", "/v1/responses", origin=ORIGIN, authorization="Bearer key", upgrade="websocket")
    assert refused.status == 426 and "upgrade" in refused.headers["access-control-expose-headers"]


@pytest.mark.parametrize("names", ["", "a/b", "a: b", "x" * 5000])
def test_names_of_headers_that_are_none_do_not_come_back(open_server: Server, names: str) -> None:
    headers = {"access-control-request-method": "POST", "access-control-request-headers": names}
    reply = open_server.ask("OPTIONS", "/v1/models", origin=ORIGIN, **headers)
    assert reply.status == 200 and "access-control-allow-headers" not in reply.headers
    other = open_server.ask("OPTIONS", "/v1/models", origin="http://localhost:3001", **headers)
    assert other.status == 403 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", ["/", *MACHINES, "/v1/models", "/v1/models/tiny-llama", "/metrics", "/props", "/odd"])
def test_head_is_get_without_a_body(open_server: Server, path: str) -> None:
    get, head = (open_server.ask(method, path, authorization="Bearer key") for method in ("GET", "HEAD"))
    assert head.status == get.status and head.body == b""
    assert head.headers.get("content-type") == get.headers.get("content-type")
    if path not in ("/metrics", "/props"):  # these change from one request to the next
        assert head.headers["content-length"] == str(len(get.body))
    assert open_server.ask("HEAD", "/v1/completions", authorization="Bearer key").status == 405


def test_nothing_of_a_body_follows_the_headers_of_head(open_server: Server) -> None:
    two = (b"HEAD /health HTTP/1.1\r\n", b"GET /ping HTTP/1.1\r\nConnection: close\r\n")
    with open_server.connect() as link, link.makefile("rb") as answers:
        link.sendall(b"".join(head + b"Host: localhost\r\n\r\n" for head in two))
        lines = answers.readlines()
    assert [line for line in lines if b"HTTP/1.1" in line] == [b"HTTP/1.1 200 OK\r\n"] * 2
    assert b"{" not in b"".join(lines)


@pytest.mark.parametrize("path", MACHINES)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("head", ["HTTP/1.1\r\nHost: 10.1.2.3:8000", "HTTP/1.0", "HTTP/1.0\r\nHost: odd.example"])
def test_load_balancers_get_an_answer(server: Server, path: str, method: str, head: str) -> None:
    with server.connect() as link:
        link.sendall(f"{method} {path} {head}\r\nConnection: close\r\n\r\n".encode())
        with link.makefile("rb") as answer:
            assert b" 200 " in answer.readline()


def test_other_paths_are_still_kept_from_other_hosts(server: Server) -> None:
    for path in ("/", "/v1/models", "/metrics", "/api/tags", "/health/../v1/models", "/healthz", "//health"):
        assert server.ask("GET", path, host="evil.example").status == 403, path
    for origin in ("https://evil.example", "null"):
        assert server.ask("GET", "/health", origin=origin).status == 403
    with server.connect() as link, link.makefile("rb") as answer:
        link.sendall(b"GET /health HTTP/1.1\r\n\r\n")  # HTTP/1.1 has a Host
        assert b" 400 " in answer.readline()


def test_programs_that_compare_versions_of_ollama_are_content(open_server: Server) -> None:
    reply = open_server.ask("GET", "/api/version")  # without a key, as a program looks for a server
    assert tuple(map(int, reply.json["version"].split("."))) >= (0, 13, 4)
    assert reply.json["enginewright"] == open_server.ask("GET", "/version").json["version"]


def test_the_metrics_have_what_a_tenant_used(open_server: Server) -> None:
    key = {"authorization": "Bearer key"}

    def used() -> list[int]:
        page = open_server.ask("GET", "/metrics", **key).body.decode()
        names = ("requests", "prompt_tokens", "generation_tokens")
        routes = [
            re.search(rf"^enginewright_tenant_{name}_total\{{.*tenant=\"web\"\}} (\S+)$", page, re.M) for name in names
        ]
        return [0 if one is None else int(float(one[1])) for one in routes]

    before = used()
    for stream in (False, True):
        body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "ignore_eos": True, "stream": stream}
        assert open_server.ask("POST", "/v1/completions", body, **key).status == 200
    assert [new - old for new, old in zip(used(), before, strict=True)] == [4, 10, 16]
