from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from enginewright.optimizer.report.diffs import DiffSection, ProgramDiff
from enginewright.optimizer.report.document import ReportDocument, SavedReport, read_report
from enginewright.optimizer.report.page import fit, layers, losses, pieces, render_page, roofline_view, tiles, verdicts
from enginewright.optimizer.report.roofline import Roofline, ShapeCosts, StepTime, measure
from enginewright.optimizer.shared.export_records import Measurement, PassSummary
from enginewright.plugins.cpu.compile.machine import Machine
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.step_costs import StepCost
from tests.waiting import HANG

from .conftest import HOSTILE

SECTIONS = ["overview", "quality", "roofline", "bytes", "formats", "layers", "passes", "calibration", "export"]
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
DIFF = ProgramDiff(0, "fuse_qkv", 1, 2, (DiffSection(0, (1, 2), ("@@ -1 +1 @@", f"-{HOSTILE}", f"+{HOSTILE}"), 7),))

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"


class Outline(HTMLParser):
    """The open elements, the ids, and the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.controls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        if name := values.get("id"):
            self.ids.append(name)
        if name := values.get("aria-controls"):
            self.controls.append(name)
        self.outside += [v for k in ("src", "href", "srcset", "action") if (v := values.get(k)) and v[0] != "#"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    assert len(set(parser.ids)) == len(parser.ids)
    assert set(parser.controls) <= set(parser.ids)
    return parser


@pytest.fixture
def everything(int8_bundle: Bundle, document: ReportDocument) -> str:
    timed = measure(int8_bundle, seconds=0.2, measured="export", threads=1)
    return render_page(int8_bundle, SavedReport(document, (DIFF,)), [timed])


def test_every_section_is_there_and_nothing_is_fetched(everything: str) -> None:
    outline_of = outline(everything)
    assert [i for i in outline_of.ids if i in SECTIONS] == SECTIONS
    assert outline_of.outside == ["data:,"]  # the icon
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<script src", everything)
    assert "default-src 'none'" in everything


def test_what_fusions_save(everything: str) -> None:
    assert "+4.2 % to +5.8 %" in everything
    assert everything.count("within noise") == 1  # a prompt that took 1.1 % longer isn't a regression
    assert "−1.1 %" not in everything
    assert "differs from itself by up to 1.1 % in a decode step and 2.3 % in a prompt" in everything
    assert "2 ms" in everything and "1.9 ms" in everything


def test_a_budget_of_time_and_what_a_token_takes(everything: str) -> None:
    assert "(5 ms a token)" in everything
    assert "A token takes 5.12 ms on " in everything and "4.9 ms were predicted" in everything


def test_whatever_a_model_calls_its_modules_is_text(everything: str) -> None:
    assert "<script>alert" not in everything
    assert everything.count("&lt;script&gt;alert") > 20
    assert everything.count("<script>") == 1


def test_the_page_of_an_export(int8_bundle: Bundle) -> None:
    page = (int8_bundle.path / "report/report.html").read_text()
    outline_of = outline(page)
    shown = ["overview", "quality", "roofline", "bytes", "layers", "passes", "calibration", "export"]
    assert [i for i in outline_of.ids if i in SECTIONS] == shown
    assert page.index("The bundle picks the same token as the source in ") < page.index('<dl class="tiles">')
    assert "and just so in layers 1 and 2" in page
    assert "ew.quantized_linear" in page
    assert "self_attn.q_proj+k_proj+v_proj" in page
    assert "taken during the export" in page
    assert len(page) < 1_000_000
    assert render_page(int8_bundle, read_report(int8_bundle)) == page


def test_the_top_says_what_was_made_where_and_whether_it_is_good(int8_bundle: Bundle, document: ReportDocument) -> None:
    page = render_page(int8_bundle, SavedReport(document, ()))
    top = page[page.index("<header") : page.index("</dl>")]
    assert "2026-11-23 07:50 UTC" in top
    assert "A processor of &lt;script&gt;" in top and "2 cores" in top
    assert '<span class="badge pass">✓ Pass</span>' in top
    assert "<b>0.004</b> of 0.05 allowed" in top and 'class="pass" style="width:8.0%"' in top
    tile_list = tiles(int8_bundle, document, [])
    assert [t.label for t in tile_list] == [
        "Size",
        "KL from the source",
        "Same likeliest token",
        "Perplexity",
        "Export",
    ]
    assert (tile_list[0].beside, tile_list[0].own, tile_list[0].source) == ("source 276.6 MiB", 50.0, 100.0)


def test_a_speed_stands_beside_the_source_s_only_where_that_was_measured(
    int8_bundle: Bundle, document: ReportDocument
) -> None:
    timed = measure(int8_bundle, seconds=0.1, measured="export", threads=1)
    speeds = [t for t in tiles(int8_bundle, document, [roofline_view(timed)]) if t.unit == "tokens/s"]
    assert [bool(t.beside) for t in speeds] == [True, False, False]
    assert speeds[0].beside == "source 38.2"
    later = roofline_view(replace(timed, measured="report"))  # when the machine may have been faster
    assert not any(t.beside for t in tiles(int8_bundle, document, [later]) if t.unit == "tokens/s")
    unmeasured = document.model_copy(
        update={"verification": tuple(replace(v, source_speed=None) for v in document.verification)}
    )
    assert not any(t.beside for t in tiles(int8_bundle, unmeasured, [roofline_view(timed)]) if t.unit == "tokens/s")


def test_more_than_is_allowed_is_a_fail(document: ReportDocument, int8_bundle: Bundle) -> None:
    (v,) = document.verification
    random = replace(v, text=None, random_tokens=replace(v.random_tokens, kl_mean=0.06))
    bad = document.model_copy(update={"verification": (random,)})
    assert [(x.passed, x.share) for x in verdicts(bad)] == [(False, pytest.approx(1.2))]
    assert '<span class="badge fail">✗ Fail</span>' in render_page(int8_bundle, SavedReport(bad, ()))
    exact = replace(v, exact=True, tolerance=2.0, max_kl=None)
    assert [(x.passed, x.share) for x in verdicts(document.model_copy(update={"verification": (exact,)}))] == [
        (True, 0.5)
    ]


def test_passes_that_lost_precision_are_named_with_what_each_cost() -> None:
    def after(name: str, kl: float, unchanged: bool = False) -> PassSummary:
        return PassSummary(name, 1, measurement=Measurement(9, 1.0, 9.0, kl, kl, 1.0, None, None, 0.1, unchanged))

    rows = losses([after("fuse", 1e-9), after("round", 0.006), after("round", 0.006, True), after("cache", 0.008)])
    assert [(x.name, x.kl, x.start, x.length) for x in rows] == [
        ("round", 0.006, 0.0, 75.0),
        ("cache", 0.008, 75.0, 25.0),
    ]


def test_a_bundle_without_a_report_has_a_page_too(int8_bundle: Bundle) -> None:
    page = render_page(int8_bundle, SavedReport(None, ()))
    outline_of = outline(page)
    assert [i for i in outline_of.ids if i in SECTIONS] == ["overview", "roofline", "bytes", "passes", "export"]
    assert "has no report of its export" in page
    assert "Nothing was timed" in page
    assert "fuse_qkv" in page.replace("<wbr>", "")


def test_a_report_of_an_earlier_version(int8_bundle: Bundle) -> None:
    old = ReportDocument.model_validate({"seconds": 14.0, "passes": [{"name": "fuse_qkv", "matched": 3}]})
    assert "fuse_qkv" in render_page(int8_bundle, SavedReport(old, ())).replace("<wbr>", "")


def test_layers_and_names_as_a_page_says_them() -> None:
    assert layers((4,)) == "in layer 4"
    assert layers((1, 2)) == "in layers 1 and 2"
    assert layers((1, 2, 3, 4, 7, 9, 10)) == "in layers 1 to 4, 7 and 9 and 10"
    assert fit("mlp.down_proj", 1000) == "mlp.down_proj"
    assert fit("mlp.down_proj", 40) == "mlp.…"
    assert pieces("self_attn.q_proj+k_proj") == ["self_", "attn.", "q_", "proj+", "k_", "proj"]
    assert "".join(pieces("..a__b")) == "..a__b"


def in_chromium(page: str, folder: Path, width: int = 1280, *options: str) -> tuple[str, list[str]]:
    """The document once its script has run, and what went to the console."""
    assert CHROMIUM is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *QUIET.split()]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
        command += [f"--window-size={width},900", *options]
        done = subprocess.run([*command, f"file://{folder}/page.html"], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@needs_chromium
@pytest.mark.parametrize("kind", ["everything", "export", "none"])
def test_it_opens_in_chromium_without_an_error(kind: str, everything: str, int8_bundle: Bundle, tmp_path: Path) -> None:
    pages: dict[str, Callable[[], str]] = {
        "everything": lambda: everything,
        "export": lambda: (int8_bundle.path / "report/report.html").read_text(),
        "none": lambda: render_page(int8_bundle, SavedReport(None, ())),
    }
    dom, console = in_chromium(pages[kind](), tmp_path)
    assert console == []
    assert re.search(r'<button id="theme"[^>]*>(Dark|Light)<', dom)  # the script ran to its end
    assert re.search(r'<button id="idle"[^>]*>Show \d+ that changed nothing<', dom)
    assert bool(re.search(r'class="more" id="pass-\d+" hidden', dom)) == (kind != "none")


@needs_chromium
@pytest.mark.parametrize("fault", ["nothere();", "console.error('planted');"])
def test_an_error_would_be_seen(fault: str, int8_bundle: Bundle, tmp_path: Path) -> None:
    page = render_page(int8_bundle, replace(read_report(int8_bundle), diffs=()))
    _, console = in_chromium(page.replace('"use strict";', f'"use strict"; {fault}'), tmp_path)
    assert len(console) == 1


LOOK = """addEventListener("load", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    const wrong = [], seen = document.documentElement;
    if (seen.scrollWidth > innerWidth) wrong.push("the page is " + seen.scrollWidth + " wide");
    const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    for (const e of document.querySelectorAll("body *:not(script):not(title)")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()), box = e.getBoundingClientRect();
        if (!own || !box.width) continue;
        const svg = e.closest("svg"), frame = svg ? svg.getBoundingClientRect() : null;
        const outside = frame ? box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
            || box.bottom > frame.bottom + 1 : box.left < -1 || (box.right > innerWidth + 1 && !scrolls(e));
        const style = getComputedStyle(e);
        const cut = /hidden|clip/.test(style.overflowX) && e.scrollWidth > e.clientWidth + 1;
        if (outside || cut) wrong.push((outside ? "outside: " : "cut: ") + e.textContent.slice(0, 60));
    }
    for (const chart of document.querySelectorAll(".chart"))
        if (chart.scrollWidth > chart.clientWidth) wrong.push("a chart scrolls");
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    parent.postMessage([innerWidth, dark, getComputedStyle(document.body).backgroundColor, wrong], "*"); });"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_no_text_is_cut(scheme: str, width: int, everything: str, tmp_path: Path) -> None:
    """In a frame, as a window without a screen isn't as narrow as a telephone."""
    named = everything.replace('"use strict";', f'"use strict"; {LOOK}')
    (tmp_path / "report.html").write_text(named, encoding="utf-8")
    frame = f"""<!doctype html><body><iframe src="report.html" style="width:{width}px;height:800px;border:0"></iframe>
    <script>addEventListener("message", (e) => {{
        document.body.setAttribute("data-found", JSON.stringify(e.data)); }});</script>"""
    dom, console = in_chromium(frame, tmp_path, 1400, f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    assert console == []
    match = re.search(r'data-found="([^"]*)"', dom)
    assert match is not None
    seen, dark, background, wrong = json.loads(unescape(match[1]))
    assert (seen, dark) == (width, scheme == "dark")
    assert background == ("rgb(15, 19, 26)" if dark else "rgb(246, 247, 249)")
    assert wrong == []


@needs_chromium
def test_no_table_of_steps_is_cut_off(int8_bundle: Bundle, tmp_path: Path) -> None:
    """1,280 pixels wide, with names and times as long as a large model's."""
    steps = [
        StepTime(
            "quantized_linear",
            f"model.layers.{layer}.self_attn.q_proj+k_proj+v_proj",
            StepCost(weights=12_345_678, products={"i8": 123_456_789}),
            1.234e-3,
        )
        for layer in (10, 11)
    ]
    machine = Machine("avx512_vnni", 16, bandwidth=1e10, peaks={"i8": 4e11, "f32": 1e11})
    shape = ShapeCosts("decode, 1 request", 1, 1, 64, 3, 2.468e-3, None, steps)
    page = render_page(int8_bundle, SavedReport(None, ()), [Roofline("cpu", "report", machine, [shape])])
    script = """addEventListener("load", () => {
        for (const d of document.querySelectorAll("details")) d.open = true;
        for (const box of document.querySelectorAll("#roofline details .scroll"))
            box.setAttribute("data-cut", box.scrollWidth - box.clientWidth); });"""
    dom, _ = in_chromium(page.replace('"use strict";', f'"use strict"; {script}'), tmp_path)
    assert re.findall(r'data-cut="(-?\d+)"', dom) == ["0"]
