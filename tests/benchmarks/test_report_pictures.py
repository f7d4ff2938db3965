"""The docs' pictures are drawn by Chromium in both colour schemes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "report_pictures.py"
PAGE = "<style>@media (prefers-color-scheme: dark) { body { background: black } }</style><body>a page"


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="there is no Chromium here")
def test_light_and_dark_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").write_text(PAGE, encoding="utf-8")
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "--folder", str(tmp_path)], check=True)
    light, dark = ((tmp_path / f"report-{scheme}.png").read_bytes() for scheme in ("light", "dark"))
    assert light.startswith(b"\x89PNG") and dark.startswith(b"\x89PNG") and light != dark
