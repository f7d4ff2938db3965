"""Options of a server: which hosts it answers for, and files of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import uvicorn

from enginewright.runtime.server.http.errors import ApiError, api_error
from enginewright.runtime.server.http.option_files import as_toml, options_from_file
from enginewright.runtime.server.http.options import DECLARED, ServerOptions
from enginewright.runtime.server.serve import _set_times
from enginewright.runtime.shared.errors import RequestError

MODELS = {"a": "a.bundle"}
HERE = {"127.0.0.1", "::1", "localhost"}


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, HERE),
        ({"allowed_hosts": ["Models.example.org"]}, HERE | {"models.example.org"}),
        ({"host": "10.0.0.5", "api_keys": "keys.toml"}, HERE | {"10.0.0.5"}),
        ({"host": "0.0.0.0", "api_keys": "keys.toml"}, None),
        ({"host": "0.0.0.0", "insecure": True}, HERE),
        ({"host": "0.0.0.0", "api_keys": "k", "allowed_hosts": ["m"]}, HERE | {"m", "0.0.0.0"}),
        ({"allowed_hosts": ["*"]}, None),
    ],
)
def test_a_check_on_the_machine_itself_is_always_answered(given: dict[str, Any], hosts: set[str] | None) -> None:
    """A health check asks 127.0.0.1, and no page of another site can have that name."""
    options = ServerOptions(models=MODELS, **given)
    options.check()
    assert options.fixed_hosts == hosts


def test_an_alias_is_another_name_of_a_model(tmp_path: Path) -> None:
    options = ServerOptions(models=MODELS, aliases={"gpt-4o-mini": "a"})
    options.check()
    (tmp_path / "server.toml").write_text(as_toml(options))
    assert ServerOptions(**options_from_file(tmp_path / "server.toml")) == options
    for aliases in ({"b": "none"}, {"a": "a"}, {"": "a"}, {"b": "b"}):
        with pytest.raises(RequestError, match=r"^aliases: "):
            ServerOptions(models=MODELS, aliases=aliases).check()


def test_options_are_the_same_from_their_file(tmp_path: Path) -> None:
    llm = {"threads": 2, "scheduling": {"classes": {"chat": {"ttft": "1s"}}}}
    options = ServerOptions(models={"a b": "a.bundle"}, llm=llm, max_waiting=3, allowed_hosts=["x"], splice=False)
    file = tmp_path / "server.toml"
    file.write_text(as_toml(options))
    assert ServerOptions(**options_from_file(file)) == options
    file.write_text("max_bodies = 3\n")
    with pytest.raises(RequestError, match=r"server\.toml: there is no option 'max_bodies'"):
        options_from_file(file)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("'odd': there is no such field", "odd"),
        ("max_tokens: expected `int`", "max_tokens"),
        ("chat: message 0: it has no content", "messages"),
        ("messages[3]: it has no role", "messages[3]"),
        ("the body isn't JSON", None),
    ],
)
def test_an_error_names_the_field(message: str, param: str | None) -> None:
    error = api_error(RequestError(message)).body_for("/v1/completions")["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", None)


@pytest.mark.parametrize("status", [405, 413, 415, 431])
def test_what_the_client_did_wrong_is_said_to_be_its_mistake(status: int) -> None:
    assert ApiError(status, "no").body_for("")["error"]["type"] == "invalid_request_error"


def test_options_that_change_while_a_server_runs_and_those_that_need_a_restart() -> None:
    old = ServerOptions(models={"m": "a"}, max_waiting=3, port=1)
    new = ServerOptions(models={"m": "b"}, max_waiting=4, port=2, aliases={"n": "m"}, idle_seconds=90.0)
    options, now, later = old.reloaded(new)
    assert set(now) == {"aliases", "max_waiting", "idle_seconds"}
    assert set(later) == {"models", "port"}
    assert options == ServerOptions(models={"m": "a"}, max_waiting=4, port=1, aliases={"n": "m"}, idle_seconds=90.0)
    assert set(later) <= {name for name, option in DECLARED.items() if option.restart} < set(DECLARED)
    with pytest.raises(RequestError, match="aliases: x: there is no model 'other'"):
        old.reloaded(ServerOptions(models={"other": "b"}, aliases={"x": "other"}))
    with pytest.raises(RequestError, match="max_waiting"):
        old.reloaded(ServerOptions(models={"m": "a"}, max_waiting=0))


def test_connections_stay_open_longer_than_load_balancers_keep_theirs() -> None:
    options = ServerOptions(models={"m": "a"})
    config = uvicorn.Config(lambda: None)
    _set_times(config, options)
    assert 60 < options.idle_seconds <= config.timeout_keep_alive
