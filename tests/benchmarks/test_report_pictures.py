"""The docs' pictures are drawn by Chromium in both colour schemes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "report_pictures.py"
PAGE = "<style>@media (prefers-color-scheme: dark) { body { background: black } }</style><body>a page"


FIGURES = {
    "recipe": "gguf",
    "bundle_bytes": 99_996_170,
    "exported": {"date": "2026-11-28T17:25:17+00:00", "processor": "A processor", "cores": 2},
    "verification": [{"text": {"top1_agreement": 0.96086, "tokens": 1533}}],
    "rooflines": [{"shapes": [{"name": "decode, 8 requests", "tokens": 8, "seconds": 0.0087478}]}],
}
README = "before\n<!-- table: benchmarks/report_pictures.py -->\nold\n<!-- end of table -->\nafter\n"


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="there is no Chromium here")
def test_light_and_dark_are_drawn_and_the_table_has_the_report_s_figures(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").write_text(PAGE, encoding="utf-8")
    (tmp_path / "report" / "report.json").write_text(json.dumps(FIGURES), encoding="utf-8")
    (tmp_path / "manifest.json").write_text('{"model": {"name": "SmolLM2"}}', encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text(README, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--folder", str(tmp_path), "--readme", str(readme)]
    subprocess.run(command, check=True)
    light, dark = ((tmp_path / f"report-{scheme}.png").read_bytes() for scheme in ("light", "dark"))
    assert light.startswith(b"\x89PNG") and dark.startswith(b"\x89PNG") and light != dark
    assert "| SmolLM2, gguf | 95.4 MiB | 96.1% of 1,533 | 915 |" in readme.read_text(encoding="utf-8")
