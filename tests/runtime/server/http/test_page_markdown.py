"""Markdown on the page: what is shown of it, and that no text becomes markup or runs."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.runtime.server.chromium import Browser, needs_chromium, show_chat

PAYLOADS = (
    "<script>ran++</script>",
    "<img src=x onerror=ran++>",
    "<svg onload=ran++>",
    "<svg><script>ran++</script></svg>",
    "<details open ontoggle=ran++>x</details>",
    '<iframe srcdoc="<script>parent.ran++</script>"></iframe>',
    "<iframe src=javascript:parent.ran++></iframe>",
    "<a href=javascript:ran++>x</a>",
    "<form action=javascript:ran++><button>x</button></form>",
    "<input autofocus onfocus=ran++>",
    "<style>@import 'http://evil.test/x'; body { display: none }</style>",
    "<link rel=stylesheet href=http://evil.test/x>",
    "<meta http-equiv=refresh content=0;url=http://evil.test>",
    "<base href=http://evil.test/>",
    "<object data=http://evil.test/x></object>",
    "<embed src=http://evil.test/x>",
    "<math><mtext><img src=x onerror=ran++></mtext></math>",
    "<!--><img src=x onerror=ran++>-->",
    "<![CDATA[><img src=x onerror=ran++>]]>",
    "&lt;img src=x onerror=ran++&gt;",
    "&#60;script&#62;ran++&#60;/script&#62;",
    "[x](javascript:ran++)",
    "[x](JaVaScRiPt&colon;ran++)",
    "[x](java\tscript:ran++)",
    "[x](&#106;avascript:ran++)",
    "[x](data:text/html,<script>ran++</script>)",
    "[x](vbscript:ran++)",
    '[x](https://a.test "onmouseover=ran++")',
    '![x](https://a.test/"onerror="ran++)',
    "![x](javascript:ran++)",
    "<javascript:ran++>",
    "[x][r]\n\n[r]: javascript:ran++",
    r"$\href{javascript:ran++}{x}$",
    r"$\htmlData{x=1}{y}\includegraphics{http://evil.test/x.png}$",
    r"$\url{javascript:ran++}$ $\class{evil}{x}$ $\style{color:red}{x}$",
    '```"><img src=x onerror=ran++>\nx\n```',
    "```html\n<img src=x onerror=ran++>\n```",
    "`<img src=x onerror=ran++>`",
    "<x onclick=ran++ style=position:fixed;inset:0>x</x>",
    "<div id=say><button id=send>x</button></div>",
)
PLACES = ("{}", "> {}", "- {}", "| a |\n|-|\n| {} |", "**{}** # {}\n\n# {}")
HOSTILE_TEXTS = [place.replace("{}", payload) for payload, place in itertools.product(PAYLOADS, PLACES)]
RENDER = """(async (texts) => {
    window.ran = 0;
    const { Markdown } = await import('/assets/markdown.js'), host = document.querySelector('#turns'), wrong = [];
    for (const name of ['katex/katex.min', 'highlight/highlight.min']) await import(`/assets/vendor/${name}.js`);
    const allowed = new Set(('A BLOCKQUOTE BR BUTTON CODE DEL DIV EM H3 H4 H5 H6 HR INPUT LI OL P PRE SPAN STRONG TABLE'
        + ' TBODY TD TH THEAD TR UL').split(' '));
    for (const text of texts) {
        const body = document.createElement('div'), markdown = new Markdown(body);
        host.append(body);
        for (let at = 5; at < text.length; at += 11) markdown.update(text.slice(0, at), false);
        markdown.update(text, true);
        for (const node of body.querySelectorAll('*')) {
            if (!allowed.has(node.tagName) && !node.closest('.math')) wrong.push([text, node.tagName]);
            for (const { name, value } of node.attributes) {
                if (/^on|^src|^action|^formaction|^srcdoc|^id$/.test(name)) wrong.push([text, name, value]);
                if (name === 'href' && !/^(https?|mailto):/.test(value)) wrong.push([text, name, value]);
            }
            node.addEventListener('click', (event) => event.preventDefault());
            const click = new MouseEvent('click', { bubbles: true, cancelable: true });
            if (node.tagName !== 'BUTTON') node.dispatchEvent(click);
            for (const type of ['mouseover', 'focus', 'toggle', 'load', 'error']) node.dispatchEvent(new Event(type));
        }
    }
    await new Promise((done) => setTimeout(done, 50));
    const loaded = performance.getEntriesByType('resource').map((one) => one.name);
    return { wrong, ran: window.ran, count: texts.length, loaded };
})"""


@needs_chromium
def test_other_places_where_a_model_or_a_file_says_something(browser: Browser) -> None:
    """Names of tools, files and models, results, reasoning, problems and titles: all of them are text."""
    attack = "<img src=x onerror=ran++><script>ran++</script>"
    browser.run("window.ran = 0")
    answer = {"role": "assistant", "content": attack, "model": attack, "problem": attack, "reasoning": attack}
    call = {"id": attack, "name": attack, "arguments": attack}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": attack, "files": [{"name": attack, "text": attack}]},
        answer | {"calls": [call], "finish": attack, "seed": attack},
        {"role": "tool", "content": attack, "name": attack, "call": attack},
        answer | {"json": True, "calls": [call]},
    ]
    show_chat(browser, turns)
    browser.until(f"document.querySelector('#chats .open span')?.textContent.startsWith({json.dumps(attack[:20])})")
    assert browser.run("document.querySelectorAll('#turns :is(img, script), #chats :is(img, script)').length") == 0
    shown = browser.run("document.querySelector('#turns').textContent")
    assert shown.count(attack) > 10 and browser.run("window.ran") == 0


MARKDOWN = r"""# Title

A [link](https://example.org/a?b=1&c) and <b>no tag</b>, 1 &lt; 2 &rarr; ~~gone~~.
The same paragraph.

| name | value |
|:-----|------:|
| a<br>b | `x` |

> A quote
>
> - with a list

1. one
   - inner
     1. deep
2. two

- [x] done

Costs $5 and $6, but $x^2$ and \(y\) are formulas.

$$\frac{1}{2}$$

$\nosuchcommand{$

```python
def f(x):  # why
    return "<b>"
```

![A picture](https://example.org/a.png)
"""


@needs_chromium
def test_markdown_is_complete(browser: Browser) -> None:
    show_chat(browser, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARKDOWN}])
    browser.until("document.querySelectorAll('.katex').length === 3 && document.querySelector('.hl-keyword')")

    def texts(selector: str) -> Any:
        return browser.run(f"[...document.querySelectorAll('.assistant .body {selector}')].map((e) => e.textContent)")

    assert texts("> h3") == ["Title"] and texts("del") == ["gone"]
    assert texts("> p")[0] == "A link and <b>no tag</b>, 1 < 2 → gone.The same paragraph."
    link = "document.querySelector('.assistant a')"
    assert browser.run(f"[{link}.href, {link}.rel]") == ["https://example.org/a?b=1&c", "noopener noreferrer nofollow"]
    assert texts("th") == ["name", "value"] and texts("td") == ["ab", "x"]
    assert browser.run("getComputedStyle(document.querySelectorAll('.body td')[1]).textAlign") == "right"
    assert texts("blockquote p") == ["A quote"] and texts("blockquote li") == ["with a list"]
    assert texts("ol > li > ul > li > ol > li") == ["deep"]
    assert browser.run(
        "document.querySelector('.task input').checked && document.querySelector('.task input').disabled"
    )
    labels = "[...document.querySelectorAll('.math[role=img]')].map((one) => one.getAttribute('aria-label'))"
    assert browser.run(labels) == ["x^2", "y", r"\frac{1}{2}"]
    assert "Costs $5 and $6, but " in texts("> p")[1] and texts("> p")[2] == r"\nosuchcommand{"
    assert texts(".code-head span") == ["python"] and texts("pre") == ['def f(x):  # why\n    return "<b>"']
    assert texts("pre .hl-keyword") == ["def", "return"] and texts("pre .hl-comment") == ["# why"]
    assert browser.run("document.querySelectorAll('.body img').length") == 0 and "A picture (picture)" in texts("a")


@needs_chromium
def test_texts_that_take_markdown_long_are_shown_as_they_are(browser: Browser) -> None:
    texts = ["_a" * 30_000, ">" * 5_000 + "a", "- " * 4_000 + "a", "word " * 100_000]
    script = """(async (texts) => {
        const { Markdown } = await import('/assets/markdown.js'), body = document.createElement('div');
        return texts.map((text) => { new Markdown(body).update(text, true); return body.textContent; }); })"""
    shown = browser.run(f"{script}({json.dumps(texts)})")
    assert [one == text for one, text in zip(shown, texts, strict=True)] == [True] * 4


PASTED = "document.querySelector('#say').value"


def paste(browser: Browser) -> str:
    """Returns what the clipboard has, pasted into the message field."""
    browser.run("document.querySelector('#say').value = '', document.querySelector('#say').focus()")
    event = {"key": "v", "code": "KeyV", "windowsVirtualKeyCode": 86, "modifiers": 2}
    browser.send("Input.dispatchKeyEvent", type="keyDown", commands=["paste"], **event)
    browser.send("Input.dispatchKeyEvent", type="keyUp", **event)
    browser.until(f"{PASTED} !== ''")
    return browser.run(PASTED)  # type: ignore[no-any-return]


@needs_chromium
def test_code_is_copied_over_plain_http(browser: Browser) -> None:
    show_chat(browser, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a\n\n```py\nx = 1\n```"}])
    assert browser.run("isSecureContext === false && navigator.clipboard === undefined")
    browser.click(".code-head button")
    browser.until("document.querySelector('.code-head button').textContent === 'Copied'")
    assert paste(browser) == "x = 1"
    browser.click(".user .actions [aria-label^=Copy]")
    assert paste(browser) == "Hi"
    # Where that fails as well, one line says what to do, and the text is selected.
    browser.run("document.execCommand = () => false, 0")
    browser.click(".assistant .actions [aria-label^=Copy]")
    browser.until("document.querySelector('#notice-text').textContent.includes('press Ctrl+C')")
    assert "x = 1" in browser.run("getSelection().toString()")
