"""The page at its two widths, in light and in dark: axe, targets for fingers, and how smoothly a long chat scrolls."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest

from tests.runtime.server.chromium import READY, Browser, needs_chromium, show_chat
from tests.runtime.server.http.test_page_markdown import MARKDOWN

ANSWER: dict[str, Any] = {"role": "assistant", "model": "tiny", "content": MARKDOWN}
CALL = {"id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello", "files": [{"name": "a.txt", "text": "some text"}]},
    ANSWER | {"reasoning": "Why?", "thought": {"first": 0, "last": 2}, "finish": "length", "seed": "1"},
    {"role": "user", "content": "And?"},
    ANSWER | {"content": "", "problem": "It failed.", "code": "context_length_exceeded"},
    ANSWER | {"content": "", "calls": [CALL]},
    {"role": "tool", "name": "weather", "call": "a", "content": '{"degrees": 3}'},
    ANSWER | {"content": '{"degrees": 3}', "json": True},
    ANSWER | {"content": "", "calls": [CALL], "context": 10**6},
]
SERIOUS = """axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations
    .filter(({ impact }) => ['serious', 'critical'].includes(impact))
    .map(({ id, nodes }) => [id, nodes.map((node) => node.html)]))"""
SMALL = """[...document.querySelectorAll('button, summary, select, input, textarea')]
    .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest('.unseen, .body'))
    .map((one) => [one.id || one.name || one.textContent, (one.closest('.check') ?? one).getBoundingClientRect()])
    .filter(([, box]) => box.width && (box.width < 44 || box.height < 44)).map(([name]) => name)"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_fingers_find_their_targets(
    scheme: str, width: int, browser: Browser, page_url: str
) -> None:
    pytest.importorskip("axe_core_python")
    axe = (resources.files("axe_core_python") / "axe.min.js").read_text()
    show_chat(browser, TURNS)
    browser.open(page_url, width, 844, scheme, at=f"{READY} && document.querySelector('.katex, .hl-keyword')")
    browser.run(f"{axe};0")

    def check() -> None:
        assert browser.run(SERIOUS) == []
        if width == 390:
            assert browser.run(SMALL) == []

    check()
    assert browser.run("document.querySelector('header').getBoundingClientRect().height") < 64  # one row
    assert not browser.run("document.querySelector('#engine').getClientRects().length")  # it is behind its button
    browser.run("document.querySelector('#chat').scrollTop = 0")
    check()
    views = [("#export summary", "#export summary"), ("#set", "#settings .main"), ("#toggle", "#engine-close")]
    views += [("#history-toggle", "#history-close")] * (width == 390)
    for opened, closed in views:
        browser.click(opened)
        check()
        browser.click(closed)
    browser.click("#form")
    browser.click("#answer-form [value=schema]")
    browser.click("#schema-add")
    check()


SCROLL = """(async () => {
    const chat = document.querySelector('#chat'), gaps = [];
    chat.scrollTop = 0;
    let last = await new Promise(requestAnimationFrame);
    for (let frame = 0; frame < 240; frame++) {
        chat.scrollTop += 150;
        const now = await new Promise(requestAnimationFrame);
        gaps.push(now - last);
        last = now;
    }
    return gaps.sort((one, other) => one - other);
})()"""


@needs_chromium
def test_2000_messages_are_laid_out_where_they_are_seen(browser: Browser, page_url: str) -> None:
    """Formats few of them, which is why they scroll smoothly; how smoothly depends on the machine."""
    turns = [{"role": "user", "content": f"Question {i}"} if i % 2 == 0 else ANSWER for i in range(2000)]
    show_chat(browser, turns)
    browser.open(page_url, at=f"{READY} && document.querySelectorAll('#turns article').length === 2000")
    browser.until("document.querySelector('article:last-child .code')")
    assert browser.run("document.querySelectorAll('#turns .code').length") < 100
    gaps = browser.run(SCROLL)
    assert len(gaps) == 240 and browser.run("document.querySelectorAll('#turns .code').length") < 400
    assert browser.run("document.querySelector('#chat').scrollTop") > 10_000
    print(f"median frame {gaps[120]:.1f} ms, 95th percentile {gaps[228]:.1f} ms")
