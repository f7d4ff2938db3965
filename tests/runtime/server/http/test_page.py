"""The page, driven in Chromium through its own protocol: what a person does, and what there is to see then."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from enginewright.runtime.server.http.page import FOLDER
from enginewright.runtime.server.protocols.bodies import ChatBody
from tests.runtime.server.chromium import (
    BUSY,
    HOSTILE,
    LAST,
    NAME,
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
from tests.runtime.server.http.test_page_markdown import HOSTILE_TEXTS, RENDER
from tests.waiting import wait_until

VENDOR = FOLDER / "vendor"


# ---- What is sent --------------------------------------------------------------------------------------------------


def test_headers_and_files(served: Server) -> None:
    page = served.ask("GET", "/")
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'self';" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff" and page.headers["x-frame-options"] == "DENY"
    for name, kind in (
        *(("main.js", "text/javascript"), ("page.css", "text/css"), ("icon.svg", "image/svg+xml")),
        ("vendor/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
    ):
        file = served.ask("GET", f"/assets/{name}")
        assert file.status == 200 and file.headers["content-type"].startswith(kind)
        assert file.headers["content-security-policy"] == policy
        again = served.ask("GET", f"/assets/{name}", **{"if-none-match": file.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    for wrong in ("none.js", "vendor/pins.toml", "vendor/", "..%2Fpage.py", "%2e%2e/page.py", "index.html%00"):
        assert served.ask("GET", f"/assets/{wrong}").status == 404
    assert served.ask("POST", "/").status == 405


def test_the_page_names_nothing_elsewhere_and_has_nothing_inline() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert len(files) > 15
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|//[a-z]+\.|@import|url\(|\bstyle=|\bon[a-z]+=|innerHTML|outerHTML|insertAdjacentHTML|eval\(",
            text,
        ), path
        imports = re.findall(r"""(?m)^import (?:.* from )?"(.+)";$|\bimport\("(.+?)"\)""", text)
        names = [one or other for one, other in imports]
        assert len(names) == len(re.findall(r"(?m)^import |\bimport\(", text)) or path.suffix != ".js"
        assert all((FOLDER / name).is_file() and name.startswith("./") for name in names), path
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)", page) == [""] and "<style" not in page


def test_number_fields_of_the_dialog_are_fields_of_a_body() -> None:
    dialog = (FOLDER / "index.html").read_text().partition('<dialog id="settings"')[2].partition("</dialog>")[0]
    names = re.findall(r'<input name="(\w+)" type="number"', dialog)
    assert "min_p" in names and set(names) <= set(ChatBody.__struct_fields__)


def test_files_of_others_are_those_that_are_pinned() -> None:
    pins = tomllib.loads((VENDOR / "pins.toml").read_text())
    assert {path.name for path in VENDOR.iterdir() if path.is_dir()} == set(pins)
    notices = (FOLDER.resolve().parents[3] / "THIRD_PARTY_LICENSES").read_text()
    for name, pin in pins.items():
        files = {
            path.relative_to(VENDOR / name).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (VENDOR / name).rglob("*")
            if path.is_file()
        }
        assert files == pin["files"], name
        title = {"highlight": "highlight.js", "katex": "KaTeX"}.get(name, name)
        assert re.search(rf"^{re.escape(title)} {re.escape(pin['version'])}\b.*\({pin['licence']}\)$", notices, re.M), (
            name
        )


def test_live_is_counts_and_states(served: Server) -> None:
    served.chat("a secret prompt", temperature=0, max_tokens=3, cache_salt="a secret salt")
    state = served.ask("GET", "/live")
    assert state.status == 200 and state.headers["cache-control"] == "no-store"
    assert state.json["model"] == "tiny" and set(state.json["models"]) == {"tiny", NAME}
    assert state.json["engine"]["tokens"] >= 3
    assert b"secret" not in state.body
    assert served.ask("GET", "/live?model=none").status == 400


# ---- What a person does --------------------------------------------------------------------------------------------


@needs_chromium
def test_a_message_is_answered_edited_and_answered_again(browser: Browser, served: Server, page_url: str) -> None:
    parameters(browser, temperature="0", max_tokens="24")
    assert "temperature 0" in browser.run("document.querySelector('#set').textContent")
    browser.say("Hello")
    one, reply = answered(browser, 2)
    expected = served.chat("Hello", temperature=0, max_tokens=24).text
    assert (one, reply) == ("Hello", expected)
    assert "24 tokens" in browser.run("document.querySelector('.about').textContent")
    assert browser.run("document.querySelector('#say').value") == ""
    browser.until("document.querySelector('#said').textContent.startsWith('tiny said: ')")
    # A second turn, with a line's end in it.
    browser.run("document.querySelector('#say').focus()")
    browser.type("again")
    browser.press("Enter", modifiers=8)
    browser.type("please")
    browser.press("Enter")
    texts = answered(browser, 4)
    assert texts[:3] == ["Hello", reply, "again\nplease"]
    # The last answer anew: of temperature 0 it is the same.
    browser.click("#turns article:nth-child(4) [aria-label^=Regenerate]")
    browser.until(f"!{BUSY}")
    assert answered(browser, 4) == texts
    # The first message is changed, and what came after it goes.
    browser.click("#turns article:nth-child(1) [aria-label^=Edit]")
    browser.run("document.activeElement.select()")
    browser.type("Tell me of ships")
    browser.press("Enter", modifiers=2)
    edited, other = answered(browser, 2)
    assert edited == "Tell me of ships" and other != reply
    assert other == served.chat("Tell me of ships", temperature=0, max_tokens=24).text
    # An answer is changed in its place; Escape leaves it.
    for key, text in (("Escape", other), ("Enter", "another")):
        browser.click("#turns article:nth-child(2) [aria-label^=Edit]")
        browser.run("document.activeElement.select()")
        browser.type("another")
        browser.press(key, modifiers=2 * (key == "Enter"))
        assert browser.run(TEXTS)[1] == text
    # What a tab has, it has after a reload, too.
    browser.open(page_url, at=READY)
    assert browser.run(TEXTS) == ["Tell me of ships", "another"]
    browser.click("#new")
    assert browser.run(TEXTS) == [] and browser.run("!document.querySelector('#empty').hidden")


@needs_chromium
@pytest.mark.parametrize("by", ["mouse", "keyboard"])
def test_an_answer_is_shown_as_it_comes_and_can_be_stopped(by: str, browser: Browser, served: Server) -> None:
    """The engine is stopped and continued for a moment again and again, so that an answer lasts until it is shown."""
    parameters(browser, temperature="0")
    engine = served.engines()[0]  # the first model's
    os.kill(engine, signal.SIGSTOP)
    try:
        browser.say("Hello")
        browser.until(BUSY)
        while not browser.run(LAST).strip("…"):
            os.kill(engine, signal.SIGCONT)
            time.sleep(0.001)
            os.kill(engine, signal.SIGSTOP)
            browser.run("fetch('version').then((response) => response.text())")
        assert browser.run(BUSY)
        assert browser.run("document.querySelector('#turns article:last-child').getAttribute('aria-busy')") == "true"
        if by == "mouse":
            browser.click("#stop")
        else:
            browser.press("Escape")
        browser.until(f"!{BUSY}")
    finally:
        os.kill(engine, signal.SIGCONT)
    part = browser.run(TEXTS)[1]
    whole = served.chat("Hello", temperature=0).text
    assert part and part != whole and whole.startswith(part.rstrip("\ufffd"))
    assert "stopped" in browser.run("document.querySelector('.about').textContent")
    served.wait(lambda: served.props("tiny")["requests"] == 0)
    browser.say("again")
    assert len(answered(browser, 4)) == 4


@needs_chromium
def test_whatever_is_said_is_text(browser: Browser) -> None:
    """A user's message, a model's name, and what a model might be brought to write, in pieces and with code."""
    browser.run("window.ran = 0, window.alert = () => { window.ran++; }")
    browser.run(f"document.querySelector('#model').value = {json.dumps(NAME)}")
    browser.run("document.querySelector('#model').dispatchEvent(new Event('change', { bubbles: true }))")
    assert browser.run("document.querySelector('#empty-model').textContent") == NAME
    reply = (
        f"# {HOSTILE}\n\n- {HOSTILE}\n- `{HOSTILE}` **{HOSTILE}**\n\n```html\n{HOSTILE}\n```\n<script>alert(2)</script>"
    )
    pieces = [{"content": piece} for piece in re.findall(r"(?s).{1,7}", reply)]
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream(*pieces)):
        browser.say(f"{HOSTILE} and a word")
        answered(browser, 2)
    article = "document.querySelector('article.assistant')"
    browser.until(f"Boolean({article}.querySelector('.code'))")
    text = browser.run("document.querySelector('article.user .body').textContent")
    got = browser.run(f"{article}.querySelector('.body').textContent")
    assert text == f"{HOSTILE} and a word"
    assert got.count(HOSTILE) == 5 and "<script>alert(2)</script>" in got
    assert browser.run(f"{article}.querySelector('h2').textContent") == NAME
    assert browser.run("document.querySelectorAll('#turns img, #turns b, #turns script').length") == 0
    tags = f"[...{article}.querySelectorAll('.body > *, .body li > *')].map((one) => one.tagName)"
    assert browser.run(tags) == ["H3", "UL", "CODE", "STRONG", "DIV", "P"]
    assert browser.run("window.ran") == 0
    # And if the page had a mistake, the browser would refuse: no markup of a text, no script or style within the page.
    refused = "(() => { try { document.body.innerHTML = '<i>x</i>'; return false; } catch { return true; } })()"
    assert browser.run(refused)
    (problem,) = browser.problems
    assert "TrustedHTML" in problem
    browser.problems.clear()
    # A failure is said with the answer, and can be tried again.
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream(*pieces, end=False)):
        browser.click("#turns article:last-child [aria-label^=Regenerate]")
        browser.until("document.querySelector('article .problem')?.textContent.startsWith('The connection was lost')")
    error = json.dumps({"error": {"message": HOSTILE, "type": "x", "param": None, "code": 400}})
    with browser.answering("*/v1/chat/completions", "text/event-stream", f"data: {error}\n\ndata: [DONE]\n\n"):
        browser.click("#turns article:last-child [aria-label^=Try]")
        browser.until(f"document.querySelector('article .problem')?.textContent === {json.dumps(HOSTILE)}")
    button = "document.querySelector('article:last-child [aria-label^=Try]')"
    assert browser.run(f"{button}.textContent") == "Try again"


@needs_chromium
def test_200_texts_that_would_run_run_nothing(browser: Browser, page_url: str) -> None:
    assert len(HOSTILE_TEXTS) == 200
    count = browser.run(f"{RENDER}({json.dumps(HOSTILE_TEXTS)})")
    assert count["count"] == 200 and count["ran"] == 0 and count["wrong"] == []
    assert all(name.startswith(page_url) for name in count["loaded"])


@needs_chromium
def test_reasoning_is_folded_and_says_how_long_it_took(browser: Browser, page_url: str) -> None:
    deltas = [{"reasoning": text, "reasoning_content": text} for text in ("First ", HOSTILE)] + [{"content": "Rain."}]
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream(*deltas)):
        browser.say("Why?")
        assert answered(browser, 2) == ["Why?", "Rain."]
    details = "document.querySelector('article.assistant details')"
    for _ in range(2):  # also after a reload
        assert re.fullmatch(r"Reasoned for \d+\.\d\d s", browser.run(f"{details}.querySelector('summary').textContent"))
        assert browser.run(f"{details}.open") is False
        assert browser.run(f"{details}.querySelector('div').textContent") == "First " + HOSTILE
        assert browser.run(f"{details}.querySelectorAll('img, b').length") == 0
        browser.click("article.assistant summary")
        browser.until(f"{details}.open && {details}.querySelector('div').offsetHeight > 0")
        browser.click("article.assistant summary")
        browser.until(f"!{details}.open")
        browser.open(page_url, at=READY)
    # The reasoning of earlier answers isn't a part of the conversation that is sent.
    keep = "window.fetch = (...all) => (window.sent.push(all[1]?.body ?? ''), window.real(...all))"
    browser.run(f"window.sent = [], window.real = window.fetch, {keep}, 0")
    with browser.answering("*/v1/chat/completions", "text/event-stream", stream()):
        browser.say("And?")
        answered(browser, 4)
    body = next(text for text in browser.run("window.sent") if "messages" in text)
    assert "Rain." in body and "First" not in body


@needs_chromium
def test_parameters_are_sent_as_they_are(browser: Browser, served: Server) -> None:
    seed = str((1 << 63) + 12345)  # more than a number of JavaScript holds
    parameters(browser, seed=seed, max_tokens="8", top_k="40", top_p="0.9", stop="</s>\nnever", system="Be brief.")
    browser.say("Hello")
    _, got = answered(browser, 2)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options = {"seed": int(seed), "max_tokens": 8, "top_k": 40, "top_p": 0.9, "stop": ["</s>", "never"]}
    assert got == served.chat(messages, **options).text
    assert f"seed {seed}" in browser.run("document.querySelector('.about').textContent")
    parameters(browser, top_k="0000000000")  # 400000000000: the server's words are shown
    browser.click("#turns article:last-child [aria-label^=Regenerate]")
    browser.until("Boolean(document.querySelector('article .problem'))")
    assert "top_k" in browser.run("document.querySelector('article .problem').textContent")
    browser.click("#set")
    browser.click("#reset")
    browser.click("#settings .main")
    assert browser.run("document.querySelector('#set').textContent") == "Parameters"
    browser.problems[:] = [one for one in browser.problems if "status of 400" not in one]


@needs_chromium
def test_a_conversation_is_exported(browser: Browser, tmp_path: Path) -> None:
    browser.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    parameters(browser, temperature="0", max_tokens="5")
    browser.say("Hello")
    _, reply = answered(browser, 2)
    for kind, name in (("json", "conversation.json"), ("markdown", "conversation.md")):
        browser.click("#export summary")
        browser.click(f"#export-{kind}")
        browser.until("!document.querySelector('#export').open")
        wait_until(lambda path=tmp_path / name: path.exists() and path.stat().st_size)  # type: ignore[misc]
    conversation = json.loads((tmp_path / "conversation.json").read_text())
    assert [one["role"] for one in conversation["messages"]] == ["user", "assistant"]
    assert conversation["messages"][1]["content"] == reply
    assert conversation["parameters"] == {"temperature": 0, "max_tokens": 5}
    assert (
        conversation["messages"][1]["usage"]["completion_tokens"] == 5
        and conversation["messages"][1]["system_fingerprint"]
    )
    text = (tmp_path / "conversation.md").read_text()
    assert text.startswith("# Hello\n\n## User\n\nHello\n\n## tiny\n\n") and "5 tokens" in text


# ---- What there is to see ------------------------------------------------------------------------------------------


@needs_chromium
def test_the_view_of_the_engine_has_its_numbers(browser: Browser, served: Server) -> None:
    for i in range(3):
        served.chat(f"A beginning that all of them have, and then {i}", temperature=0, max_tokens=40)
    served.wait(lambda: not served.ask("GET", "/live").json["engine"]["running"])  # what is shown may be a moment old
    live = served.ask("GET", "/live").json["engine"]
    (blocks,) = live["blocks"].values()
    by_state = [sum(length for state, length in blocks["runs"] if state == which) for which in range(4)]
    assert by_state[3] > 0 and live["prefix_cache"]["reused"] > 0
    assert not browser.run("document.querySelector('#engine').getClientRects().length")  # until it is asked for
    browser.click("#toggle")
    legend = "[...document.querySelectorAll('#maps .legend b')].map((b) => Number(b.textContent.replaceAll(',', '')))"
    browser.until(f"JSON.stringify({legend}) === {json.dumps(json.dumps(by_state, separators=(',', ':')))}")
    label = browser.run("document.querySelector('#maps canvas').getAttribute('aria-label')")
    assert label == f"{blocks['total']:,} blocks: {by_state[0]} free, 0 in use, 0 shared, {by_state[3]} kept"
    (row,) = [one for one in live["classes"] if one["name"] == ""]
    assert f"{row['ended']} ended" in browser.run("document.querySelector('#classes').textContent")
    assert browser.run("document.querySelector('#running').textContent") == "0"
    drafted = live["speculation"]["drafted"]
    hits = f"of {drafted:,} tokens ahead were right." if drafted else "No token was computed ahead yet."
    assert browser.run("document.querySelector('#hits').textContent").endswith(hits)


@needs_chromium
def test_a_busy_engine_as_it_is_shown(browser: Browser, served: Server) -> None:
    """Figures as ``Live`` gives them (test_live.py), of an engine that is never idle at the wrong moment."""
    requests = [
        {"id": str(i), "class": "chat", "state": state, "prompt": 100, "cached": 64, "read": 80, "written": 100}
        | {"drafted": 9, "accepted": 5, "blocks": 7, "seconds": 1.5}
        for i, state in enumerate(["writes", "reads", "pauses", "waits"] * 3)
    ]
    runs = [[2, 2], [1, 30], [3, 17], [0, 975]]
    live = served.ask("GET", "/live").json
    live["engine"] |= {"running": 9, "waiting": 3, "requests": requests, "preemptions": 1}
    live["engine"]["batch"] = {"decodes": 6, "drafted": 12, "prompt": 300}
    live["engine"]["blocks"] = {"full": {"block_size": 32, "total": 1024, "evictions": 5, "runs": runs}}
    live["engine"]["speculation"] |= {"drafted": 200, "accepted": 150}
    live["engine"]["classes"] = [
        {"name": HOSTILE, "priority": 0, "running": 9, "waiting": 3, "ended": 1234, "ttft_target": 0.5}
        | {"tpot_target": None, "queued": [0.0, 0.1], "ttft": [0.0123, 0.4], "tpot": None}
    ]
    browser.click("#toggle")
    with browser.answering("*/live?*", "application/json", json.dumps(live)):
        browser.until("document.querySelector('#running').textContent === '9'")
        assert browser.run("document.querySelector('#waiting').textContent") == "3"
        assert browser.run("document.querySelector('#batch').textContent").endswith(
            "6 answers, 12 tokens ahead, 300 prompt tokens."
        )
        rows = browser.run("[...document.querySelectorAll('#requests li')].map((row) => row.textContent)")
        assert rows[:2] == ["#0 chat100 written · 7 blocks", "#1 chatreads 80/100 · 7 blocks"] and len(rows) == 6
        assert browser.run("document.querySelector('#more').textContent") == "and 6 more"
        width = "document.querySelector('#requests .k-written').getBoundingClientRect().width"
        bar = "document.querySelector('#requests .bar').getBoundingClientRect().width"
        assert browser.run(f"{width} / {bar}") == pytest.approx(0.5, abs=0.02)
        hits = browser.run("document.querySelector('#hits').textContent")
        assert hits == "75\u00a0% of 200 tokens ahead were right."
        cells = browser.run("[...document.querySelectorAll('#classes td')].map((cell) => cell.textContent)")
        assert cells == ["93 waiting", "12.3 · 400target 500", "–"]
        colors = browser.run(
            "(() => { const canvas = document.querySelector('#maps canvas'), context = canvas.getContext('2d'),"
            " data = context.getImageData(0, 0, canvas.width, 3).data, seen = [];"
            " for (let i = 0; i < data.length; i += 4) { const color = [...data.slice(i, i + 4)].join();"
            "   if (data[i + 3] === 255 && seen.at(-1) !== color) seen.push(color); } return seen; })()"
        )
        assert colors[:3] == ["15,131,99,255", "49,89,214,255", "217,162,89,255"]  # shared, in use, kept
        browser.click("#toggle")
        assert browser.run("document.querySelector('#toggle').getAttribute('aria-expanded')") == "false"
        assert not browser.run("document.querySelector('#engine').getClientRects().length")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_all_can_be_read(
    scheme: str, width: int, browser: Browser, served: Server, page_url: str
) -> None:
    long = f"{'word ' * 40}\n\n```\n{'x' * 300}\n```\n{'y' * 300}\n\n1. one\n2. two `code` **strong**"
    turns = [
        {"role": "user", "content": long},
        {
            "role": "assistant",
            "content": long,
            "model": "a-model-of-a-long-name-" * 4,
            "seed": "1",
            "problem": "y" * 200,
        },
    ]
    show_chat(browser, turns)
    browser.open(page_url, width, 844, scheme, at=READY)
    assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    background = "rgb(15, 19, 26)" if scheme == "dark" else "rgb(246, 247, 249)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == background
    assert browser.run(LOOK) == []
    if width == 390:
        assert not browser.run("document.querySelector('#engine').getClientRects().length")
        browser.click("#toggle")
        assert not browser.run("document.querySelector('#chat').getClientRects().length")
    else:
        browser.click("#toggle")
    browser.until("document.querySelector('#maps canvas') && document.querySelector('#classes').textContent")
    assert browser.run(LOOK) == []
    browser.click("#engine-close")
    if width == 390:
        browser.click("#history-toggle")
        assert browser.run(LOOK) == []
        browser.click("#history-close")
    for opened, closed in (("#set", "#settings .main"), ("#form", "#form-cancel")):
        browser.click(opened)
        assert browser.run(LOOK) == []
        browser.click(closed)


LOOK = """(() => {
    const wrong = [], page = document.documentElement;
    if (page.scrollWidth > innerWidth) wrong.push("the page is " + page.scrollWidth + " wide");
    const light = (color) => { const of = color.match(/[\\d.]+/g).map(Number).slice(0, 3).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * of[0] + 0.7152 * of[1] + 0.0722 * of[2]; };
    const behind = (e) => { for (; e; e = e.parentElement) { const color = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$/.test(color)) return color; } return "rgb(255, 255, 255)"; };
    const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) && !/^(chat|engine)$/.test(e.id)
        || scrolls(e.parentElement));
    const seen = (e) => !e.closest(".unseen, .skip, option") && e.checkVisibility({ visibilityProperty: true });
    for (const e of document.querySelectorAll("body *")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()), box = e.getBoundingClientRect();
        if (!own || !box.width || !seen(e)) continue;
        if ((box.left < -1 || box.right > innerWidth + 1) && !scrolls(e))
            wrong.push("outside: " + e.textContent.slice(0, 50));
        if (getComputedStyle(e).clipPath !== "none" || e.closest(":disabled")) continue;
        const [one, other] = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
        if ((one + 0.05) / (other + 0.05) < 4.5) wrong.push("pale: " + e.textContent.slice(0, 50));
    }
    return wrong; })()"""


@needs_chromium
def test_all_that_can_be_used_has_a_name_and_a_place_in_the_order_of_keys(browser: Browser) -> None:
    browser.say("Hello")
    answered(browser, 2)
    browser.click("#set")
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "combobox", "checkbox", "spinbutton", "dialog", "log", "image", "region"}
    used = [one for one in nodes if not one.get("ignored") and one["role"]["value"] in roles]
    assert len(used) > 15
    assert [one for one in used if not one.get("name", {}).get("value")] == []
    browser.press("Escape")
    browser.until("!document.querySelector('#settings').open")
    browser.run("document.activeElement.blur(), document.querySelector('.skip').focus()")
    seen = []
    for _ in range(60):
        seen.append(browser.run("((e) => e.id || e.ariaLabel || e.tagName)(document.activeElement)"))
        browser.press("Tab")
    order = ["history-toggle", "model", "new", "SUMMARY", "toggle", "search", "Rename Hello", "Delete Hello", "log"]
    order += ["Edit, message 1", "Regenerate, message 2", "say", "send", "attach", "form", "set"]
    places = [seen.index(name) for name in order]
    assert places == sorted(places)
    assert browser.run("document.querySelector('#log').getAttribute('aria-live')") == "off"  # else each piece is spoken
    assert browser.run("document.querySelector('#said').getAttribute('aria-live')") == "polite"


@needs_chromium
def test_an_engine_that_doesn_t_answer_is_said(browser: Browser, served: Server) -> None:
    live = served.ask("GET", "/live").json | {"engine": None}
    note = "document.querySelector('#engine-note').textContent"
    browser.click("#toggle")
    with browser.answering("*/live?*", "application/json", json.dumps(live)):
        browser.until(f'{note} === "The engine doesn\'t answer now."')
        assert not browser.run("document.querySelector('#engine-views').getClientRects().length")
    browser.until(f"{note} === ''")


@needs_chromium
def test_where_keys_are_needed_the_page_asks_for_one(
    chromium: Browser, make_server: Callable[..., Server], tiny_bundle: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    hashes = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("of-admin", "of-user")}
    keys.write_text(
        f'[[keys]]\nhash = "sha256:{hashes["of-admin"]}"\ntenant = "a"\nadmin = true\n'
        f'[[keys]]\nhash = "sha256:{hashes["of-user"]}"\ntenant = "b"\n'
    )
    server = make_server("--model", f"tiny={tiny_bundle}", "--api-keys", keys)
    assert server.ask("GET", "/live").status == 401
    assert server.ask("GET", "/live", authorization="Bearer of-user").status == 403
    assert server.ask("GET", "/live", authorization="Bearer of-admin").status == 200
    assert server.ask("GET", "/").status == server.ask("GET", "/assets/main.js").status == 200
    opened = "document.querySelector('#ask-key').open"
    chromium.open(f"{server.url}/", at=opened)
    chromium.type("a wrong one")
    chromium.press("Enter")
    chromium.until(f"{opened} && document.querySelector('#key-why').textContent.includes('know that key')")
    chromium.type("of-user")
    chromium.press("Enter")
    chromium.until(READY)
    chromium.click("#toggle")
    chromium.until("document.querySelector('#engine-note').textContent.includes('admin = true')")
    parameters(chromium, max_tokens="5")
    chromium.say("Hello")
    assert len(answered(chromium, 2)) == 2
    assert chromium.run("sessionStorage.getItem('enginewright-key')") == '"of-user"'
    assert chromium.run("localStorage.length === 0 && document.cookie === ''")
    chromium.click("#key")
    chromium.type("of-admin")
    chromium.press("Enter")
    chromium.until("document.querySelector('#engine-note').hidden && Boolean(document.querySelector('#maps canvas'))")
    key = "document.querySelector('#key-field')"
    assert chromium.run(f"{key}.type === 'password' && {key}.value === 'of-admin' || {key}.value === ''")
