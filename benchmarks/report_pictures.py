"""Pictures for README and the docs, drawn by Chromium: a bundle's report, and the page of `optimize serve`.

README has the report's figures in a table too.

    make pictures

or, for a bundle that is there:

    python benchmarks/report_pictures.py smollm2.bundle [--page]

They show what the export measured, and with ``--page`` a conversation next to four other clients, beside the engine's
view: run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers.marked_table import MarkedTable, line

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGES = REPOSITORY / "docs" / "use" / "images"
QUESTIONS = ("Name three uses of a lighthouse, as a list.", "Write a Python function that adds two numbers.")
OTHERS, LOAD_SECONDS, SEEN_SECONDS = 4, 600, 15
"""Clients beside the conversation, how long they ask at most, and the seconds of them that the picture shows."""
PICTURES = {"report-light.png": (True, 690), "report-dark.png": (False, 690), "report.png": (True, 1440)}
"""Name: whether it is light, and its height; all are 1,120 pixels wide."""
WIDTH = 1120
TABLE = MarkedTable("report_pictures.py")


def table(bundle: Path) -> str:
    """Returns the figures that the picture of a bundle's report shows, as a table of Markdown."""
    figures = json.loads((bundle / "report" / "report.json").read_text(encoding="utf-8"))
    model = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["model"]["name"]
    text, exported = figures["verification"][0]["text"], figures["exported"]
    names, cells = ["model", "bundle", "same token as the source"], [f"{model}, {figures['recipe']}"]
    cells += [f"{figures['bundle_bytes'] / 2**20:.1f} MiB", f"{text['top1_agreement']:.1%} of {text['tokens']:,}"]
    for shape in figures["rooflines"][0]["shapes"]:
        names.append(f"{shape['name']}, tok/s")
        cells.append(f"{shape['tokens'] / shape['seconds']:,.0f}")
    where = f"{exported['cores']} cores of {exported['processor']}, {exported['date'][:10]}."
    return "\n".join([line(names), line(["---", *["---:"] * (len(names) - 1)]), line(cells), "", where])


def draw(page: Path, picture: Path, *, light: bool, height: int) -> None:
    """Raises CalledProcessError, or FileNotFoundError without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    with tempfile.TemporaryDirectory() as folder:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}", f"--window-size={WIDTH},{height}", f"--screenshot={picture}"]
        command += [f"--blink-settings=preferredColorScheme={int(light)}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def draw_page(bundle: Path, folder: Path) -> None:
    """Draws the page of a server with two questions answered, in light and in dark."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.runtime.server.chromium import READY, Browser, answered, parameters
    from tests.runtime.server.conftest import Server

    with tempfile.TemporaryDirectory() as name:
        server = Server("--model", f"SmolLM2-135M={bundle}", errors=Path(name) / "stderr")
        load = [sys.executable, "-m", "enginewright", "loadtest", server.url, "--clients", str(OTHERS), "--quiet"]
        load += ["--seconds", str(LOAD_SECONDS), "--requests", "1000000"]
        others = subprocess.Popen(load, stdout=subprocess.DEVNULL)
        browser = Browser(Path(name) / "profile")
        try:
            for scheme in ("light", "dark"):
                browser.forget(f"{server.url}/")
                browser.open(f"{server.url}/", 1280, 940, scheme, at=READY)
                parameters(browser, temperature="0", max_tokens="300")
                for number, question in enumerate(QUESTIONS, 1):
                    browser.say(question)
                    answered(browser, 2 * number)
                browser.click("#toggle")
                time.sleep(SEEN_SECONDS)
                browser.picture(folder / f"serve-{scheme}.png")
        finally:
            browser.close()
            others.kill()
            others.wait()
            server.stop()


def main(arguments: list[str]) -> int:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where they go")
    parser.add_argument("--readme", type=Path, default=REPOSITORY / "README.md", help="the file that has the table")
    parser.add_argument("--page", action="store_true", help="the page of optimize serve too")
    options = parser.parse_args(arguments)
    for name, (light, height) in PICTURES.items():
        draw(options.bundle / "report" / "report.html", options.folder / name, light=light, height=height)
        print(f"{options.folder / name}: {(options.folder / name).stat().st_size:,} bytes")
    TABLE.put(options.readme, table(options.bundle))
    if options.page:
        draw_page(options.bundle, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
