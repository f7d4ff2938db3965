"""Pictures of a bundle's report for the docs, drawn by Chromium: its top in light and in dark, and more of it.

    optimize export $(python examples/fetch_model.py) -o smollm2.bundle --recipe int8
    python benchmarks/report_pictures.py smollm2.bundle

They show what the export measured: make the bundle on an idle machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "use" / "images"
PICTURES = {"report-light.png": (True, 690), "report-dark.png": (False, 690), "report.png": (True, 1440)}
"""Name: whether it is light, and its height; all are 1,120 pixels wide."""
WIDTH = 1120


def draw(page: Path, picture: Path, *, light: bool, height: int) -> None:
    """Raises CalledProcessError, or FileNotFoundError without Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    with tempfile.TemporaryDirectory() as folder:
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}", f"--window-size={WIDTH},{height}", f"--screenshot={picture}"]
        command += [f"--blink-settings=preferredColorScheme={int(light)}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(arguments: list[str]) -> int:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where they go")
    options = parser.parse_args(arguments)
    for name, (light, height) in PICTURES.items():
        draw(options.bundle / "report" / "report.html", options.folder / name, light=light, height=height)
        print(f"{options.folder / name}: {(options.folder / name).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
