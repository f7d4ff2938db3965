from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from enginewright.optimizer.report.diffs import DiffSection, ProgramDiff
from enginewright.optimizer.report.document import ReportDocument, SavedReport, read_report
from enginewright.optimizer.report.machine import Machine
from enginewright.optimizer.report.page import fit, layers, render_page
from enginewright.optimizer.report.roofline import Roofline, ShapeCosts, StepTime, measure
from enginewright.plugins.shared.step_costs import StepCost
from enginewright.runtime.bundle.reader import Bundle

from .conftest import HOSTILE

SECTIONS = ["overview", "quality", "passes", "formats", "layers", "bytes", "roofline", "calibration", "export"]
VOID = {"meta", "link", "br", "img", "input", "hr"}
DIFF = ProgramDiff(0, "fuse_qkv", 1, 2, (DiffSection(0, (1, 2), ("@@ -1 +1 @@", f"-{HOSTILE}", f"+{HOSTILE}"), 7),))

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"


class Outline(HTMLParser):
    """What is open, which ids there are, and where elements lead."""

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
        if found := values.get("id"):
            self.ids.append(found)
        if found := values.get("aria-controls"):
            self.controls.append(found)
        self.outside += [v for k in ("src", "href", "srcset", "action") if (v := values.get(k)) and v[0] != "#"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    assert found.open == []
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.controls) <= set(found.ids)
    return found


@pytest.fixture
def everything(int8_bundle: Bundle, document: ReportDocument) -> str:
    timed = measure(int8_bundle, seconds=0.2, measured="export", threads=1)
    return render_page(int8_bundle, SavedReport(document, (DIFF,)), [timed])


def test_every_section_is_there_and_nothing_is_fetched(everything: str) -> None:
    found = outline(everything)
    assert [i for i in found.ids if i in SECTIONS] == SECTIONS
    assert found.outside == ["data:,"]  # the icon
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|<script src", everything)
    assert "default-src 'none'" in everything


def test_what_fusions_save(everything: str) -> None:
    assert "+4.2 % to +5.8 %" in everything
    assert everything.count("within noise") == 1  # a prompt that took 1.1 % longer isn't a regression
    assert "−1.1 %" not in everything
    assert "differs from itself by up to 1.1 % in a decode step and 2.3 % in a prompt" in everything
    assert "2 ms" in everything and "1.9 ms" in everything


def test_whatever_a_model_calls_its_modules_is_text(everything: str) -> None:
    assert "<script>alert" not in everything
    assert everything.count("&lt;script&gt;alert") > 20
    assert everything.count("<script>") == 1


def test_the_page_of_an_export(int8_bundle: Bundle) -> None:
    page = (int8_bundle.path / "report/report.html").read_text()
    found = outline(page)
    assert [i for i in found.ids if i in SECTIONS] == ["overview", "quality", "passes", "bytes", "roofline", "export"]
    assert page.index("The bundle picks the same token as the source in ") < page.index('<dl class="tiles">')
    assert "and just so in layers 1 and 2" in page
    assert "ew.quantized_linear" in page
    assert "self_attn.q_proj+k_proj+v_proj" in page
    assert "taken during the export" in page
    assert len(page) < 1_000_000
    assert render_page(int8_bundle, read_report(int8_bundle)) == page


def test_a_bundle_without_a_report_has_a_page_too(int8_bundle: Bundle) -> None:
    page = render_page(int8_bundle, SavedReport(None, ()))
    found = outline(page)
    assert [i for i in found.ids if i in SECTIONS] == ["overview", "passes", "bytes", "roofline", "export"]
    assert "has no report of its export" in page
    assert "Nothing was timed" in page
    assert "fuse_qkv" in page


def test_a_report_of_an_earlier_version(int8_bundle: Bundle) -> None:
    old = ReportDocument.model_validate({"seconds": 14.0, "passes": [{"name": "fuse_qkv", "matched": 3}]})
    assert "fuse_qkv" in render_page(int8_bundle, SavedReport(old, ()))


def test_layers_and_names_as_a_page_says_them() -> None:
    assert layers((4,)) == "in layer 4"
    assert layers((1, 2)) == "in layers 1 and 2"
    assert layers((1, 2, 3, 4, 7, 9, 10)) == "in layers 1 to 4, 7 and 9 and 10"
    assert fit("mlp.down_proj", 1000) == "mlp.down_proj"
    assert fit("mlp.down_proj", 40) == "mlp.…"


def in_chromium(page: str, folder: Path, width: int = 1280) -> tuple[str, list[str]]:
    """The document once its script has run, and what went to the console."""
    assert CHROMIUM is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *QUIET.split()]
        command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
        command += [f"--window-size={width},900"]
        done = subprocess.run([*command, f"file://{folder}/page.html"], capture_output=True, text=True, timeout=120)
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
        for (const box of document.querySelectorAll("#roofline details .scroll"))
            box.setAttribute("data-cut", box.scrollWidth - box.clientWidth); });"""
    dom, _ = in_chromium(page.replace('"use strict";', f'"use strict"; {script}'), tmp_path)
    assert re.findall(r'data-cut="(-?\d+)"', dom) == ["0"]
