"""What Ollama's clients ask before they ask for text: what there is, and an honest 404 for what isn't served."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from enginewright.runtime.server.ollama import NOT_SERVED
from tests.runtime.server.conftest import Server


def test_what_there_is(server: Server, tiny_bundle: Path) -> None:
    (tag,) = server.ask("GET", "/api/tags").json["models"]
    (row,) = server.ask("GET", "/v1/models").json["data"]
    assert tag["name"] == tag["model"] == row["id"]
    assert "sha256:" + tag["digest"] == server.props()["bundle"]
    listed = sum(file.stat().st_size for file in tiny_bundle.rglob("*") if file.name != "manifest.json")
    assert 0 < tag["size"] <= listed
    assert tag["details"]["family"] == "llama" and tag["details"]["quantization_level"] == "f32"
    written = (tiny_bundle / "manifest.json").stat().st_mtime
    assert datetime.fromisoformat(tag["modified_at"]).timestamp() == pytest.approx(written, abs=1e-5)  # microseconds
    (loaded,) = server.ask("GET", "/api/ps").json["models"]
    assert loaded["digest"] == tag["digest"] and loaded["context_length"] == row["max_model_len"]
    assert server.ask("GET", "/api/version").json == server.ask("GET", "/version").json


@pytest.mark.parametrize("body", [{"model": "tiny-llama"}, {"name": "tiny-llama:latest", "verbose": True}])
def test_what_is_known_of_a_model(server: Server, body: dict[str, object]) -> None:
    shown = server.ask("POST", "/api/show", body).json
    (row,) = server.ask("GET", "/v1/models").json["data"]
    assert shown["capabilities"] == ["completion"] and "messages" in shown["template"]
    assert shown["model_info"]["llama.context_length"] == row["max_model_len"]
    assert shown["model_info"]["general.parameter_count"] > 0 and shown["details"]["parameter_size"]


def test_only_loaded_models_are_listed_as_loaded(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server("--model", f"a={tiny_bundle}", "--model", f"b={tiny_bundle}", "--max-loaded", "1")
    assert [one["name"] for one in server.ask("GET", "/api/tags").json["models"]] == ["a", "b"]
    assert [one["name"] for one in server.ask("GET", "/api/ps").json["models"]] == ["a"]


@pytest.mark.parametrize("path", NOT_SERVED)
def test_what_is_not_served_says_why(server: Server, path: str) -> None:
    reply = server.ask("POST", path, {"model": "tiny-llama", "input": "a"})
    assert reply.status == 404
    error = reply.json["error"]
    assert NOT_SERVED[path] in (error if path.startswith("/api/") else error["message"])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "odd"}, 404, "there is no 'odd'"),
        ({}, 400, "model: it is missing"),
        ({"model": 3}, 400, "model: expected `str"),
        ({"model": "tiny-llama", "odd": 1}, 400, "odd"),
        (b"{", 400, "isn't JSON"),
    ],
)
def test_errors_have_ollama_s_shape(server: Server, body: object, status: int, said: str) -> None:
    reply = server.ask("POST", "/api/show", body)
    assert reply.status == status and said in reply.json["error"]


def test_a_method_that_is_not_taken_says_which_are(server: Server) -> None:
    for path, taken in (("/v1/models", "GET"), ("/v1/chat/completions", "POST"), ("/ping", "GET, POST")):
        reply = server.ask("DELETE", path)
        assert reply.status == 405 and sorted(reply.headers["allow"].split(", ")) == taken.split(", ")
