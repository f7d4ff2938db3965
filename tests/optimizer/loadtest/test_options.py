from __future__ import annotations

import statistics
from pathlib import Path
from random import Random

import pytest

from enginewright.optimizer.loadtest.options import (
    Goals,
    LoadOptions,
    RequestClass,
    parse_burst,
    parse_lengths,
    read_classes,
)
from enginewright.runtime.shared.errors import RequestError


def draws(text: str, count: int = 4000) -> list[int]:
    lengths, rng = parse_lengths(text, "prompt"), Random(1)
    return [lengths.draw(rng) for _ in range(count)]


def test_lengths_have_the_distribution_that_was_asked_for(tmp_path: Path) -> None:
    assert set(draws("7")) == {7}
    assert set(draws("3-5")) == {3, 4, 5}
    lognormal = draws("lognormal:200:0.5")
    assert statistics.median(lognormal) == pytest.approx(200, rel=0.05)  # 4,000 draws: the seed is fixed
    assert statistics.mean(lognormal) == pytest.approx(200 * 2.718281828 ** (0.5**2 / 2), rel=0.05)
    (file := tmp_path / "lengths.txt").write_text("10\n10\n\n30\n")
    assert draws(str(file)).count(10) / 4000 == pytest.approx(2 / 3, abs=0.05)


@pytest.mark.parametrize("text", ["", "0", "5-3", "-3", "x", "lognormal:0:1", "lognormal:5", "lognormal:9:99", "1.5"])
def test_a_length_that_isn_t_one_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt: "):
        parse_lengths(text, "prompt")


@pytest.mark.parametrize("text", ["", "a\n", "5\n0\n"])
def test_a_file_of_other_things_isn_t_lengths(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(RequestError, match="answer: "):
        parse_lengths(str(file), "answer")


def test_a_burst_is_read_and_can_t_have_more_than_all_requests() -> None:
    burst = parse_burst("5x4s/20s")
    assert (burst.factor, burst.on, burst.every) == (5, 4, 20)
    for text in ("5x5s/20s", "0.5x4s/20s", "5", "5x4/20", "1x5s/4s"):
        with pytest.raises(RequestError, match="burst: "):
            parse_burst(text)


CLASSES = """
[chat]
share = 0.75
prompt = 20
answer = "5-9"
ttft = "500ms"
[chat.body]
request_class = "chat"
[batch]
share = 0.25
leave = 0.5
"""


def test_classes_say_what_differs(tmp_path: Path) -> None:
    (file := tmp_path / "classes.toml").write_text(CLASSES)
    default = RequestClass(goals=Goals(tpot=0.1), body={"ignore_eos": True})
    chat, batch = read_classes(file, default)
    assert (chat.name, chat.share, chat.prompt.text, chat.answer.text, chat.leave) == ("chat", 0.75, "20", "5-9", 0)
    assert chat.goals == Goals(ttft=0.5, tpot=0.1)
    assert chat.body == {"ignore_eos": True, "request_class": "chat"}
    assert (batch.prompt, batch.leave, batch.goals) == (default.prompt, 0.5, Goals(tpot=0.1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nprompts = 3\n", "prompts"),
        ("[a]\nshare = -1\n", "share"),
        ("[a]\nleave = 2\n", "leave"),
        ('[a]\nttft = "soon"\n', "ttft"),
        ("[a]\nbody = 3\n", "body"),
        ("a = 3\n", "a isn't a table"),
        ("[a]\nshare = 0\n", "share"),
        ("", "no class"),
        ("[a\n", "classes.toml"),
    ],
)
def test_a_class_that_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    (file := tmp_path / "classes.toml").write_text(text)
    with pytest.raises(RequestError, match="classes: ") as raised:
        read_classes(file, RequestClass())
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://localhost/v1", "http://[::1]:80", "https://127.9.9.9"]
)
def test_this_machine_needs_no_permission(url: str) -> None:
    LoadOptions(url).check()


@pytest.mark.parametrize("host", ["example.org", "10.0.0.1", "localhost.example.org", "[2001:db8::1]", "0.0.0.0"])
def test_another_machine_needs_its_owner_s_permission(host: str) -> None:
    with pytest.raises(RequestError, match="permission"):
        LoadOptions(f"http://{host}:8000").check()
    LoadOptions(f"http://{host}:8000", remote=True).check()


@pytest.mark.parametrize("url", ["", "x", "ftp://127.0.0.1", "http://", "http://127.0.0.1:x", "http://a:b@127.0.0.1"])
def test_what_isn_t_an_address_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="url: "):
        LoadOptions(url).check()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"clients": 0}, "clients"),
        ({"clients": 2, "rate": 1.0}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"requests": 0}, "requests"),
        ({"seconds": 0.0}, "seconds"),
        ({"prefixes": 0}, "prefixes"),
        ({"classes": (RequestClass(leave=1.5),)}, "leave"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, object], name: str) -> None:
    with pytest.raises(RequestError, match=name):
        LoadOptions("http://127.0.0.1", **options).check()  # type: ignore[arg-type]
