"""Answers on the page: continued, started again, with reasoning switched, as JSON, with tools and with files."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.runtime.server.chromium import (
    BUSY,
    LAST,
    READY,
    TEXTS,
    Browser,
    answered,
    needs_chromium,
    parameters,
    refused,
    show_chat,
    stream,
)
from tests.runtime.server.conftest import Server
from tests.runtime.server.http.test_page_history import chat, lists, opened, says, slow_answer

CHAT = "*/v1/chat/completions"


def note_requests(browser: Browser) -> None:
    """Has the page keep the bodies that it sends, for ``last_request``."""
    browser.run(
        "window.sent = [], window.real = window.fetch, window.fetch = (path, options) => {"
        " if (options?.body) window.sent.push(options.body); return window.real(path, options); }, 0"
    )


def last_request(browser: Browser) -> dict[str, Any]:
    return json.loads(browser.run("window.sent.at(-1)"))  # type: ignore[no-any-return]


@needs_chromium
def test_an_answer_that_ended_at_its_limit_is_continued(browser: Browser, served: Server) -> None:
    note_requests(browser)
    parameters(browser, temperature="0", max_tokens="5")
    browser.say("Hello")
    _, first = answered(browser, 2)
    assert "ended at the limit" in browser.run("document.querySelector('.about').textContent")
    browser.click("[aria-label^=Continue]")
    browser.until(f"!{BUSY} && document.querySelector('.about').textContent.startsWith('10 tokens')")
    _, both = browser.run(TEXTS)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}]
    assert last_request(browser) | {"messages": messages, "continue_final_message": True} == last_request(browser)
    rest = served.chat(messages, continue_final_message=True, temperature=0, max_tokens=5).text
    assert both == first + rest and rest


@needs_chromium
def test_the_time_to_the_first_token_has_the_wait_for_the_server(browser: Browser) -> None:
    wait = "new Promise((done) => setTimeout(done, 400))"
    browser.run(f"window.real = window.fetch, window.fetch = (...given) => {wait}.then(() => window.real(...given)), 0")
    parameters(browser, temperature="0", max_tokens="5")  # no draw ends it before
    browser.say("Hello")
    browser.until(f"!{BUSY} && document.querySelector('.about')?.textContent.startsWith('5 tokens')")
    turn = "import('/assets/chat.js').then((page) => page.current.turns.at(-1)"
    first = browser.run(f"{turn}.seconds.first)")
    assert first >= 0.4
    browser.click("[aria-label^=Continue]")
    browser.until(f"!{BUSY} && document.querySelector('.about').textContent.startsWith('10 tokens')")
    assert browser.run(f"{turn}.seconds.first)") == first
    assert browser.run(f"{turn}.seconds.last)") >= first + 0.4


@needs_chromium
def test_a_full_context_has_a_way_out(browser: Browser) -> None:
    note_requests(browser)
    show_chat(browser, chat("First", "one", "Second", "two"))
    status, body = refused("This model's maximum context length is 64 tokens.", "context_length_exceeded")
    with browser.answering(CHAT, "application/json", body, status):
        browser.say("Third")
        browser.until("document.querySelector('article .problem')?.textContent.includes('maximum context length')")
    with browser.answering(CHAT, "text/event-stream", stream({"content": "three"}, usage=(10**6, 1))):
        browser.click(".problem button")
        assert answered(browser, 2) == ["Third", "three"]
    assert last_request(browser)["messages"] == [{"role": "user", "content": "Third"}]
    lists(browser, "Third", "First")  # the whole chat stays
    # The row below the field says how full it is, and starts a chat with the last exchange.
    assert browser.run("document.querySelector('#context').textContent").startswith("1,000,001 of ")
    browser.click("#restart")
    lists(browser, "Third", "Third", "First")
    assert browser.run(TEXTS) == ["Third", "three"] and browser.run("document.querySelector('#restart').hidden")
    opened(browser, "First")
    browser.until("document.querySelectorAll('#turns article').length === 6")
    with browser.answering(CHAT, "text/event-stream", stream({"content": "shorter"})):
        browser.click("article:nth-child(3) [aria-label^='New chat from here']")
        assert answered(browser, 4) == ["Second", "two", "Third", "shorter"]
    browser.problems[:] = [one for one in browser.problems if "status of 400" not in one]


@needs_chromium
def test_reasoning_is_switched_where_the_template_can(browser: Browser, served: Server, page_url: str) -> None:
    assert served.props()["reasoning_switches"] == []
    browser.until("document.querySelector('#reasoning').disabled")
    props = served.ask("GET", "/props").json
    for model in props["models"].values():
        model["reasoning_switches"] = ["enable_thinking"]
    with browser.answering("*/props", "application/json", json.dumps(props)):
        browser.open(page_url, at=READY)
        browser.until("!document.querySelector('#reasoning').disabled")
    note_requests(browser)
    shown = "[...document.querySelector('#reasoning').options].filter((one) => !one.hidden).map((one) => one.value)"
    assert browser.run(shown) == ["", "none", "on"]
    for value in ("none", "on", ""):
        browser.fill("#reasoning", value)
        with browser.answering(CHAT, "text/event-stream", stream({"content": "x"})):
            browser.click("#new")
            browser.say("Hello")
            answered(browser, 2)
        assert last_request(browser).get("reasoning_effort", "") == value


@needs_chromium
def test_an_answer_has_the_form_of_a_schema(browser: Browser) -> None:
    parameters(browser, temperature="0", max_tokens="200")
    note_requests(browser)
    browser.click("#form")
    browser.click("#answer-form [value=schema]")
    browser.click("#answer-form .main")
    browser.until("!document.querySelector('#schema-problem').hidden")  # there is no schema yet
    for name, kind in (("done", "yes or no"), ("size", "whole number")):
        browser.click("#schema-add")
        browser.type(name)
        select = "document.querySelector('#schema-fields li:last-child select')"
        browser.run(
            f"{select}.value = {json.dumps(kind)}, {select}.dispatchEvent(new Event('input', {{ bubbles: true }}))"
        )
    browser.click("#answer-form .main")
    browser.until("!document.querySelector('#answer-form').open")
    assert browser.run("document.querySelector('#form').textContent") == "JSON form: on"
    browser.say("Hello")
    _, text = answered(browser, 2)
    properties = {"done": {"type": "boolean"}, "size": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["done", "size"], "additionalProperties": False}
    form = last_request(browser)["response_format"]
    assert form == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    if "ended at the limit" not in browser.run("document.querySelector('.about').textContent"):
        assert set(json.loads(text)) == {"done", "size"}
    browser.until("document.querySelector('.assistant .code-head span')?.textContent === 'json'")
    # The text of a schema that rows can't describe is used as it is; one that isn't JSON says so.
    browser.click("#form")
    for value, rows in (('{"type": "array"}', 0), (json.dumps(schema), 2), ("{", 0)):
        browser.fill("#answer-form [name=schema]", value)
        assert browser.run("document.querySelectorAll('#schema-fields li').length") == rows
    browser.click("#answer-form .main")
    assert "isn't JSON" in browser.run("document.querySelector('#schema-problem').textContent")
    browser.click("#form-cancel")


@needs_chromium
def test_calls_of_tools_are_shown_and_answered(browser: Browser) -> None:
    note_requests(browser)
    browser.click("#set")
    for text, wrong in (("[{]", True), ('[{"name": "weather", "parameters": {}}]', False)):
        browser.fill("#settings [name=tools]", text)
        browser.click("#settings .main")
        browser.until(f"document.querySelector('#settings').open === {json.dumps(wrong)}")
        assert browser.run("document.querySelector('#tools-problem').hidden") is not wrong
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Oslo"}'}}
    calls = stream({"tool_calls": [call]}, {"tool_calls": [rest]}, finish="tool_calls")
    with browser.answering(CHAT, "text/event-stream", calls):
        browser.say("Weather?")
        answered(browser, 2)
    function = {"name": "weather", "parameters": {}}
    assert last_request(browser)["tools"] == [{"type": "function", "function": function}]
    assert browser.run("document.querySelector('.call h3').textContent") == "Calls weather"
    assert browser.run("document.querySelector('.call pre').textContent") == '{\n  "city": "Oslo"\n}'
    browser.run("document.querySelector('.call textarea').focus()")
    browser.type('{"degrees": 3}')
    with browser.answering(CHAT, "text/event-stream", stream({"content": "It is cold."})):
        browser.click(".call .main")
        assert answered(browser, 4) == ["Weather?", "", '{"degrees": 3}', "It is cold."]
    sent = last_request(browser)["messages"][1:]
    assert sent[0]["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]
    assert sent[1] == {"role": "tool", "content": '{"degrees": 3}', "tool_call_id": "call-1"}
    assert browser.run("document.querySelectorAll('.call textarea').length") == 0


@needs_chromium
def test_presets_of_the_system_message(browser: Browser, page_url: str) -> None:
    browser.click("#set")
    presets = "document.querySelector('#presets')"
    names = f"[...{presets}.options].map((one) => one.textContent)"
    assert browser.run(f"{names}.length") > 3 and browser.run("document.querySelector('#preset-delete').disabled")
    browser.run("document.querySelector('#system').focus()")
    browser.type("Speak like a sailor.")
    browser.run("document.querySelector('#preset-name').focus()")
    browser.type("Sailor")
    browser.click("#preset-save")
    browser.open(page_url, at=READY)
    browser.click("#set")
    browser.fill("#presets", "Brief")
    assert "three sentences" in browser.run("document.querySelector('#system').value")
    browser.fill("#presets", "Sailor")
    assert browser.run("document.querySelector('#system').value") == "Speak like a sailor."
    browser.click("#preset-delete")
    assert "Sailor" not in browser.run(names)
    browser.click("#settings .main")
    assert browser.run("document.querySelector('#set').textContent") == "Parameters: system message"


BROKEN = {
    "picture.png": (b"\x89PNG\r\n\x1a\n\xff\xfe", "isn't text in UTF-8"),
    "zeros.bin": (b"a\0b", "isn't a text file"),
    "empty.txt": (b" \n", "is empty"),
    "large.txt": (b"x" * 2_000_001, "attach at most"),
}


@needs_chromium
def test_text_files_are_attached(browser: Browser, tmp_path: Path) -> None:
    note_requests(browser)
    good = tmp_path / "notes.md"
    good.write_text("# Notes\n```\ncode\n```\n")
    for name, (data, problem) in BROKEN.items():
        (tmp_path / name).write_bytes(data)
        browser.choose_files("#attach-files", tmp_path / name)
        says(browser, name)
        says(browser, problem)
    gone = tmp_path / "gone.txt"
    gone.write_text("soon gone")
    browser.run("document.querySelector('#attach-files').addEventListener('change', (e) => { window.files = 1; })")
    browser.choose_files("#attach-files", good, tmp_path / "picture.png")  # the good one of several stays
    browser.until("document.querySelectorAll('#files li').length === 1")
    browser.choose_files("#attach-files", gone)
    browser.until("document.querySelectorAll('#files li').length === 2")
    browser.click("#files li:last-child button")
    with browser.answering(CHAT, "text/event-stream", stream({"content": "Read."})):
        browser.say("Sum up.")
        answered(browser, 2)
    (message,) = last_request(browser)["messages"]
    assert message["content"] == f"File notes.md:\n````\n{good.read_text()}\n````\n\nSum up."
    assert browser.run("document.querySelector('.user .file summary').textContent").startswith("notes.md, ")
    assert browser.run("document.querySelectorAll('#files li').length") == 0


@needs_chromium
def test_an_engine_that_restarts_loses_nothing(browser: Browser, served: Server) -> None:
    parameters(browser, temperature="0")
    with slow_answer(browser, served):
        text = browser.run(TEXTS)[1]
        os.kill(served.engines()[0], signal.SIGKILL)
    browser.until(f"!{BUSY} && Boolean(document.querySelector('article .problem'))")
    assert browser.run(TEXTS)[1].startswith(text) and text
    served.wait(lambda: served.props("tiny")["deaths"] == 1 and served.props("tiny")["state"] == "ready")
    browser.click("[aria-label^=Continue]")
    browser.until(f"!{BUSY} && !document.querySelector('article .problem') && {LAST} !== ''")
    assert browser.run(TEXTS)[1].startswith(text)
    browser.problems.clear()  # what the browser says of requests that failed
