"""The history of the page: what it keeps, finds, exports and imports, and what a person is told when it can't."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.chromium import (
    BUSY,
    LAST,
    READY,
    TEXTS,
    Browser,
    answered,
    needs_chromium,
    parameters,
    show_chat,
    stream,
)
from tests.runtime.server.conftest import Server
from tests.waiting import wait_until

NOTICE = "document.querySelector('#notice').hidden ? '' : document.querySelector('#notice-text').textContent"
TITLES = "[...document.querySelectorAll('#chats .open span')].map((one) => one.textContent)"
HEADER = '{"format": "enginewright-history", "version": 1}\n'


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def says(browser: Browser, text: str) -> None:
    browser.until(f"({NOTICE}).includes({json.dumps(text)})")


def lists(browser: Browser, *titles: str) -> None:
    browser.until(f"JSON.stringify({TITLES}) === {json.dumps(json.dumps(list(titles), separators=(',', ':')))}")


def opened(browser: Browser, title: str) -> None:
    """Opens a chat of the list by its title."""
    browser.until(f"{TITLES}.includes({json.dumps(title)})")
    browser.run(f"document.querySelectorAll('#chats .open')[{TITLES}.indexOf({json.dumps(title)})].click(), 0")


@needs_chromium
def test_chats_are_listed_searched_renamed_deleted_and_brought_back(browser: Browser, page_url: str) -> None:
    for first, second in (("Of lighthouses", "They shine."), ("Of boats", "They float on water.")):
        with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": second})):
            browser.click("#new")
            browser.say(first)
            answered(browser, 2)
    lists(browser, "Of boats", "Of lighthouses")
    opened(browser, "Of lighthouses")
    browser.until(f"document.querySelectorAll('#turns article').length === 2 && {LAST}.includes('shine')")
    # A reload shows the same chat, with the list.
    browser.open(page_url, at=f"{READY} && {LAST}.includes('shine')")
    lists(browser, "Of boats", "Of lighthouses")
    browser.run("document.querySelector('#search').focus()")
    browser.type("FLOAT")
    lists(browser, "Of boats")
    browser.type(" nowhere")
    browser.until("document.querySelector('#no-chats').textContent === 'No chat has this text.'")
    browser.run("document.querySelector('#search').select()")
    browser.type("light")
    lists(browser, "Of lighthouses")
    browser.click("#chats [aria-label^=Rename]")
    browser.type("Towers")
    browser.press("Enter")
    lists(browser)
    browser.run("document.querySelector('#search').select()")
    browser.press("Backspace")
    browser.until(f"{TITLES}.includes('Towers')")
    browser.open(page_url, at=READY)
    browser.until(f"{TITLES}.includes('Towers')")
    browser.click('#chats [aria-label="Delete Towers"]')
    lists(browser, "Of boats")
    assert browser.run(TEXTS) == []  # it was shown
    says(browser, "“Towers” is deleted.")
    browser.click("#notice-actions button")
    browser.until(f"{TITLES}.includes('Towers')")
    opened(browser, "Towers")
    browser.until(f"{LAST}.includes('shine')")


@needs_chromium
def test_an_opened_chat_selects_the_model_that_answered_it(browser: Browser, page_url: str) -> None:
    models = {"data": [{"id": name, "object": "model", "max_model_len": 64} for name in ("small", "large")]}
    with browser.answering("*/v1/models", "application/json", json.dumps(models)):
        browser.open(page_url, at="document.querySelector('#model')?.value === 'small'")
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "Yes."})):
        for model in ("large", "small"):
            browser.click("#new")
            browser.run(f"document.querySelector('#model').value = '{model}', 0")
            browser.say(f"To {model}")
            answered(browser, 2)
    for model in ("large", "small"):
        opened(browser, f"To {model}")
        browser.until(f"document.querySelector('#model').value === '{model}'")


@needs_chromium
def test_models_that_write_no_text_are_not_offered(browser: Browser, page_url: str) -> None:
    kinds = {"vectors": "embed", "small": "generate", "scores": "rerank"}
    models = {"data": [{"id": name, "max_model_len": 64, "kind": kind} for name, kind in kinds.items()]}
    with browser.answering("*/v1/models", "application/json", json.dumps(models)):
        browser.open(page_url, at="document.querySelector('#model')?.value === 'small'")
    assert browser.run("[...document.querySelectorAll('#model option')].map(({ value }) => value)") == ["small"]


@needs_chromium
def test_a_history_is_exported_and_imported(browser: Browser, page_url: str, tmp_path: Path) -> None:
    browser.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    parameters(browser, system="Be brief.", temperature="0")
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    answer = {"role": "assistant", "content": "Hé\n\n</script>", "model": "tiny", "seed": str(2**63), "usage": usage}
    turns = [{"role": "user", "content": "One", "files": [{"name": "a.txt", "text": "text"}]}, answer]
    show_chat(browser, turns)
    browser.run("import('/assets/chat.js').then(({ current }) => { current.chat.settings = { system: 'Be brief.' }; })")
    show_chat(browser, chat("Two", "second"))
    browser.click("#export summary")
    browser.click("#export-all")
    file = tmp_path / "history.jsonl"
    wait_until(lambda: file.exists() and file.stat().st_size)
    says(browser, "2 chats exported")
    lines = file.read_text().splitlines()
    assert json.loads(lines[0]) == json.loads(HEADER) and len(lines) == 3
    # The same file again adds nothing; in an empty history it brings everything.
    browser.choose_files("#import-file", file)
    says(browser, "0 chats imported; 2 of the file were here already.")
    browser.forget(page_url)
    browser.open(page_url, at=READY)
    browser.choose_files("#import-file", file)
    says(browser, "2 chats imported.")
    browser.until(f"{TITLES}.length === 2")
    opened(browser, "One")
    browser.until(f"{LAST}.includes('Hé')")
    shown = browser.run("import('/assets/chat.js').then(({ current }) => current.turns)")
    assert shown == [turns[0], answer | {"finish": "closed"}]
    # One chat's JSON is imported, too, and so are messages as requests have them.
    single = tmp_path / "single.json"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "system", "content": "Be kind."}, *chat("Three"), {"role": "assistant", "tool_calls": [call]}]
    single.write_text(json.dumps({"messages": messages}, indent=1))
    browser.choose_files("#import-file", single)
    says(browser, "1 chat imported.")
    opened(browser, "Three")
    browser.until("document.querySelector('.call h3')?.textContent === 'Calls f'")
    browser.click("#set")
    assert browser.run("document.querySelector('#system').value") == "Be kind."


WRONG = {
    "empty.jsonl": (b"", "it is empty"),
    "picture.png": (b"\x89PNG\r\n\x1a\n\xff\xfe", "isn't text"),
    "other.json": (b'[{"title": "x", "mapping": {}}]', "it isn't a history of this page: choose a file that"),
    "words.txt": (b"Hello\nworld\n", "it isn't a history of this page"),
    "newer.jsonl": (HEADER.replace("1}", "2}").encode(), "version 2 of the format"),
    "broken.jsonl": ((HEADER + '{"turns": []}\n{"turns": [').encode(), "line 3 isn't JSON"),
    "no-chat.jsonl": ((HEADER + '{"title": "x"}\n').encode(), "line 2 isn't a chat"),
    "role.jsonl": ((HEADER + '{"turns": [{"role": "root", "content": "x"}]}\n').encode(), "line 2, message 1, isn't a"),
    "content.jsonl": ((HEADER + '{"turns": [{"role": "user", "content": 5}]}\n').encode(), "content that isn't text"),
    "single.json": (b'{"messages": [1]}', "it, message 1, isn't a message"),
}


@needs_chromium
def test_files_that_are_no_history_are_refused_in_one_line_and_add_nothing(browser: Browser, tmp_path: Path) -> None:
    show_chat(browser, chat("Here before", "yes"))
    lists(browser, "Here before")
    for name, (data, problem) in WRONG.items():
        (tmp_path / name).write_bytes(data)
        browser.choose_files("#import-file", tmp_path / name)
        says(browser, f"{name} isn't imported: ")
        says(browser, problem)
        assert "\n" not in browser.run(NOTICE)
    lists(browser, "Here before")
    # Fields of another kind than this page writes are left out, and can't break it.
    odd = {
        "role": "assistant",
        "content": "x",
        "usage": "much",
        "reasoning": 5,
        "calls": [1],
        "files": "x",
        "seconds": {},
    }
    odd |= {"thought": None, "unfolded": {}, "finish": 7}
    row = {
        "turns": [odd],
        "settings": {"format": {"kind": "schema", "schema": "{"}, "x": {}},
        "title": 9,
        "id": {},
        "updated": 1e300,
    }
    row["updated"] = 1e300
    (tmp_path / "odd.jsonl").write_text(HEADER + json.dumps(row) + "\n")
    browser.choose_files("#import-file", tmp_path / "odd.jsonl")
    says(browser, "1 chat imported.")
    opened(browser, "Chat")
    browser.until(f"{LAST} === 'x'")


@contextmanager
def slow_answer(browser: Browser, served: Server) -> Iterator[None]:
    """An answer that has begun, of an engine that is stopped."""
    engine = served.engines()[0]
    os.kill(engine, signal.SIGSTOP)
    try:
        browser.say("Hello")
        browser.until(BUSY)
        while len(browser.run(LAST).strip("…")) < 3:
            os.kill(engine, signal.SIGCONT)
            time.sleep(0.001)
            os.kill(engine, signal.SIGSTOP)
            browser.run("fetch('version').then((response) => response.text())")
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


@needs_chromium
@pytest.mark.parametrize("end", ["closed", "reloaded"])
def test_nothing_is_lost_when_a_tab_ends_in_the_middle_of_an_answer(
    end: str, browser: Browser, served: Server, page_url: str
) -> None:
    parameters(browser, temperature="0")
    first = browser.tab
    if end == "closed":
        browser.new_tab()
        browser.open(page_url, at=READY)
        parameters(browser, temperature="0")
    with slow_answer(browser, served):
        text = browser.run(TEXTS)[1]
        if end == "closed":
            browser.close_tab()
            assert browser.tab == first
            browser.open(page_url, at=READY)
            opened(browser, "Hello")
            browser.until("document.querySelectorAll('#turns article').length === 2")
        else:
            browser.open(page_url, at=f"{READY} && document.querySelectorAll('#turns article').length === 2")
        assert browser.run(TEXTS) == ["Hello", text] and text
        assert "its tab was closed" in browser.run("document.querySelector('.about').textContent")
    served.wait(lambda: served.props("tiny")["requests"] == 0)
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": " and more"})):
        browser.click("[aria-label^=Continue]")
        assert answered(browser, 2) == ["Hello", text + " and more"]
    assert browser.run("localStorage.length") == 0


# A transaction on both stores that goes on until its page ends: later saves wait for it.
HELD = """(async () => {
  const request = indexedDB.open("enginewright", 1);
  await new Promise((resolve) => { request.onsuccess = resolve; });
  const chats = request.result.transaction(["chats", "messages"], "readwrite").objectStore("chats");
  await new Promise((resolve) => {
    const again = () => { chats.get("none").onsuccess = () => { again(); resolve(); }; };
    again();
  });
})()"""


@needs_chromium
def test_a_save_that_is_under_way_when_the_page_is_reloaded_is_not_lost(browser: Browser, page_url: str) -> None:
    browser.run(HELD)
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "there"})):
        browser.say("Hello")
        assert answered(browser, 2) == ["Hello", "there"]
    # This timer ends after the page's own one, which starts the save: then nothing is left that isn't being written.
    browser.run("new Promise((resolve) => setTimeout(resolve, 500))")
    browser.open(page_url, at=f"{READY} && document.querySelectorAll('#turns article').length === 2")
    assert browser.run(TEXTS) == ["Hello", "there"]
    lists(browser, "Hello")
    assert browser.run("localStorage.length") == 0


@needs_chromium
def test_two_tabs_with_a_chat_see_each_other_and_overwrite_nothing(browser: Browser, page_url: str) -> None:
    show_chat(browser, chat("Hello", "there"))
    lists(browser, "Hello")
    first = browser.tab
    other = browser.new_tab()
    browser.open(page_url, at=READY)
    opened(browser, "Hello")
    browser.until(f"{LAST} === 'there'")
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "second"})):
        browser.say("More")
        answered(browser, 4)
    browser.use(first)
    browser.until(f"document.querySelectorAll('#turns article').length === 4 && {LAST} === 'second'")
    # Both write at the same time: the tab that comes later continues with a copy.
    browser.run("import('/assets/chat.js').then(({ current }) => { current.chat.version -= 1; })")
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "mine"})):
        browser.say("From the first")
        answered(browser, 6)
    says(browser, "Another tab has changed “Hello”.")
    lists(browser, "Hello (copy)", "Hello")
    browser.use(other)
    lists(browser, "Hello (copy)", "Hello")
    assert len(browser.run(TEXTS)) == 4
    # A chat that another tab deletes stays in the tab that shows it, which saves it again when it goes on.
    browser.use(first)
    browser.click('#chats [aria-label="Delete Hello"]')
    lists(browser, "Hello (copy)")
    browser.use(other)
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "still here"})):
        browser.say("Are you there?")
        answered(browser, 6)
    lists(browser, "Hello (copy)", "Hello (copy)")
    browser.close_tab()


@needs_chromium
def test_a_full_storage_is_said_and_loses_nothing(browser: Browser, page_url: str) -> None:
    browser.forget(page_url)  # the browser looks at the quota when it opens the history
    origin = page_url.rstrip("/")
    browser.send("Storage.overrideQuotaForOrigin", origin=origin, quotaSize=1)
    browser.open(page_url, at=READY)
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "y" * 1000})):
        browser.say("New")
        answered(browser, 2)
    says(browser, "The browser's storage is full, so this chat isn't saved. Delete chats")
    browser.click("#new")
    lists(browser, "New")  # it isn't saved, and can be shown again
    browser.send("Storage.overrideQuotaForOrigin", origin=origin)
    show_chat(browser, chat("Old", "there was room for it"))
    lists(browser, "New", "Old")
    browser.click('#chats [aria-label="Delete Old"]')
    lists(browser, "New")
    wait_until(lambda: browser.run("import('/assets/chat.js').then((page) => !page.unsavedRows().length)"))
    browser.open(page_url, at=READY)
    opened(browser, "New")
    browser.until(f"{LAST} === {json.dumps('y' * 1000)}")


@needs_chromium
@pytest.mark.parametrize("how", ["throws", "refuses", "is missing"])
def test_without_storage_the_page_works_and_says_what_it_means(how: str, browser: Browser, page_url: str) -> None:
    script = {
        "throws": "{ get() { throw new DOMException('denied', 'SecurityError'); } }",
        "refuses": "{ value: { open() { const request = {}; request.error = new DOMException('no', 'UnknownError');"
        " setTimeout(() => request.onerror()); return request; } } }",
        "is missing": "{ value: undefined }",
    }[how]
    script = f"Object.defineProperty(window, 'indexedDB', {script})"
    number = browser.send("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
    browser.open(page_url, at=READY)
    says(browser, "This browser keeps no history")
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream({"content": "answer"})):
        browser.say("Hello")
        answered(browser, 2)
    lists(browser, "Hello")
    # What a closing tab has left for the history stays for a visit that has one.
    left = {"chat": {"id": "left", "title": "Left", "version": 0, "settings": {}}, "from": 0, "turns": chat("a", "b")}
    browser.run(f"localStorage.setItem('enginewright-left-left', {json.dumps(json.dumps(left))})")
    browser.open(page_url, at=READY)
    assert browser.run("localStorage.length") == 1
    browser.send("Page.removeScriptToEvaluateOnNewDocument", identifier=number)
    browser.open(page_url, at=READY)
    lists(browser, "Left")
    assert browser.run("localStorage.length") == 0


@needs_chromium
def test_a_history_of_500_megabytes(browser: Browser, tmp_path: Path) -> None:
    """Files of 500 MB: one of another format is refused, and a history is imported, piece by piece."""
    other = tmp_path / "other.json"
    with other.open("w") as file:
        file.write('{"data": "')
        for _ in range(500):
            file.write("x" * 1_000_000)
    browser.choose_files("#import-file", other)
    says(browser, "it isn't a history of this page")
    other.unlink()
    large = tmp_path / "large.jsonl"
    with large.open("w") as file:
        file.write(HEADER)
        for i in range(500):
            row = {
                "id": f"chat{i}",
                "title": f"Chat {i}",
                "created": i,
                "updated": i,
                "turns": chat("Hi", "y" * 999_800),
            }
            file.write(json.dumps(row) + "\n")
    browser.choose_files("#import-file", large)
    says(browser, "500 chats imported.")
    browser.until(f"{TITLES}.length === 500")
    large.unlink()
