"""The table of padding is made anew: what the page says is what the sizes leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "benchmarks" / "notes" / "cpu.md"


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "buckets.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_page_has_what_comes_out(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    done = benchmark("--update-docs", "--page", str(tmp_path / "page.md"))
    assert done.returncode == 0, done.stderr  # also says that ours beat powers of two in every row
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert done.stdout.count("\n| ") == 10 and "10,000 requests" in done.stdout


def test_other_requests_and_a_page_without_marks(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing")
    done = benchmark(
        "--requests", "200", "--context-length", "512", "--update-docs", "--page", str(tmp_path / "page.md")
    )
    assert done.returncode == 1 and "the marks" in done.stderr and "200 requests, up to 512 tokens" in done.stdout
