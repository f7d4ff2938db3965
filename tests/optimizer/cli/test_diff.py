from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_what_is_printed_and_the_exit_codes(tiny_bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_bundle, tmp_path / "b.bundle"))
    code, out, _ = run(tiny_bundle, other)
    assert code == 0
    assert out.startswith("equal: ") and "report/ was not compared" in out
    assert run(tiny_bundle, other, "--quiet")[:2] == (0, "")

    path = other / "tokenizer/special_tokens.json"
    path.write_text(path.read_text()[:-1] + " ")  # the same JSON
    (other / "more.txt").write_text("x")
    code, out, _ = run(tiny_bundle, other)
    assert code == 14
    assert "different: 2 of " in out
    assert "more.txt: only in B" in out
    assert f"special_tokens.json: {path.stat().st_size:,} bytes, not the same\n  from byte " in out
    assert run(tiny_bundle, other, "--quiet")[:2] == (14, "")
    code, out, _ = run(tiny_bundle, other, "--json")
    assert code == 14
    assert [d["path"] for d in json.loads(out)["differences"]] == ["more.txt", "tokenizer/special_tokens.json"]


def test_what_is_no_bundle_has_an_exit_code_of_its_own(tiny_bundle: Path, tmp_path: Path) -> None:
    code, out, err = run(tiny_bundle, tmp_path / "none", "--json")
    assert code == 7
    assert "none doesn't exist" in err
    assert json.loads(out)["error"]["type"] == "BundleError"
