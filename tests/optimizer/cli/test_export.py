from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli import progress
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.cli.export import default_output
from enginewright.runtime.bundle.reader import Bundle
from tests.conftest import make_tiny_model
from tests.optimizer.capture.gguf.test_model import write
from tests.text_models import save_text_model


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("Llama-1B", "Llama-1B.bundle"),
        ("models/Llama-1B/", "Llama-1B.bundle"),
        ("some/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1.bundle"),
        ("organization/name", "name.bundle"),
    ],
)
def test_the_bundle_is_named_after_the_model(source: str, output: str) -> None:
    assert default_output(source) == Path(output)


def test_the_current_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert default_output(".") == Path("../model.bundle")  # not in the model's own folder


@pytest.mark.parametrize("output", [".", "/", "..", os.fsdecode(b"a\xff"), "link"])
def test_an_output_that_can_t_be_taken_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    Path("link").symlink_to("elsewhere")
    result = CliRunner().invoke(app, ["export", str(tiny_folder), "-o", output, "--force"])
    assert result.exit_code == 7 and "error: output: " in result.stderr, result.output
    assert [p.name for p in tmp_path.rglob("*")] == ["empty", "link"]


def test_json_is_the_report(tiny_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.bundle"
    result = CliRunner().invoke(app, ["export", str(tiny_folder), "-o", str(output), "--json", "--quiet"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["path"] == str(output)
    assert report["bundle_bytes"] > 0
    assert {p["name"]: p["matched"] for p in report["passes"]}["fuse_gate_up"] == 2
    assert result.stderr == ""
    assert (output / "manifest.json").is_file()
    (compared,) = report["verification"]
    assert compared["target"] == "cpu"
    assert 0 < compared["random_tokens"]["max_logit_error"] <= compared["tolerance"]


LABELS = ["bundle", "size", "quality", "speed", "took", "next"]


def test_six_lines_say_what_matters(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/optimize"])
    result = CliRunner().invoke(app, ["export", str(tiny_folder)])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines()}
    assert list(lines) == LABELS
    assert lines["bundle"] == "tiny-llama.bundle: tiny-llama, recipe f32, for cpu"
    assert "f32" in lines["size"] and "requests of up to 512 tokens" in lines["size"]
    assert lines["quality"].startswith("The bundle computes what the source does: logits differ by ")
    assert re.fullmatch(r"decode, 1 request: \S+ tokens/s; decode, 8 requests: \S+ .*", lines["speed"])
    assert "fuse_qkv" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama.bundle"]
    program, arguments = lines["next"].split(" ", 1)
    assert program.endswith("optimize")  # the whole path of it where it isn't on PATH
    answer = CliRunner().invoke(app, shlex.split(arguments))  # the command that it says to type works
    assert answer.exit_code == 0, answer.output


def test_the_next_command_for_an_embedding_model_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_text_model(tmp_path / "model", "embed")
    (tmp_path / "texts.txt").write_text("a ship\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", "model", "-o", "a.bundle", "--no-cache"])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines()}
    words = shlex.split(lines["next"])
    assert CliRunner().invoke(app, words[words.index("embed") :]).exit_code == 0
    assert np.load("vectors.npy").shape[0] == 1


BESIDE = ["--kv-cache", "int8", "--context", "64", "--partition", "tensor=2"]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("Q8_0", BESIDE, "gguf, as the file is quantized, for cpu"),
        ("Q5_0", ["--target", "cpu", "--target", "onnx"], "gguf, as the file is quantized, for cpu, onnx"),
        ("Q8_0", ["--recipe", "gguf"], "gguf, for cpu"),
        ("Q8_0", ["--recipe", "f32"], "f32, for cpu"),
        ("F16", [], "f32, for cpu"),
    ],
)
def test_a_quantized_file_keeps_its_integers_and_the_summary_says_why(
    kind: str, options: list[str], said: str, tmp_path: Path
) -> None:
    source = write(make_tiny_model("Llama"), tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    output = tmp_path / "a.bundle"
    result = CliRunner().invoke(app, ["export", str(source), "-o", str(output), "--no-cache", *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == f"bundle   {output}: tiny, recipe {said}"
    manifest = Bundle.open(output).manifest
    assert manifest.recipe["name"] == said.partition(",")[0]
    if options is BESIDE:
        assert manifest.recipe["kv_cache"]["dtype"] == "int8" and manifest.model.context_length == 64
        assert manifest.recipe["cpu"]["partitions"] == ["tensor=2"]


def test_verbose_adds_the_table_of_passes(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["export", str(tiny_folder), "-o", str(tmp_path / "a.bundle"), "--recipe", "bf16", "--verbose"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "fuse_qkv" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[-6:]] == LABELS
    printed = re.search(
        r"on a text of ([\d,]+) tokens, 8 of the package's 60 windows: "
        r"KL (\S+), top-1 (\S+)%, perplexity (\S+), the source's (\S+)",
        result.stdout,
    )
    assert printed is not None, result.stdout
    figures = json.loads((tmp_path / "a.bundle/report/report.json").read_text())["verification"][0]["text"]
    assert printed[1] == f"{figures['tokens']:,}"
    assert float(printed[2]) == pytest.approx(figures["kl_mean"], rel=0.05)
    assert float(printed[3]) == pytest.approx(100 * figures["top1_agreement"], abs=0.05)
    assert float(printed[4]) == pytest.approx(figures["perplexity"], abs=1e-3)
    assert float(printed[5]) == pytest.approx(figures["source_perplexity"], abs=1e-3)


def test_a_budget_that_is_not_kept_has_an_exit_code(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tight.toml"
    weights = '[weights]\ndefault = { storage = "bf16", activation = "bf16" }\n'
    recipe.write_text(f'name = "tight"\n{weights}[budget]\nmax_kl = 1e-9\n')
    arguments = ["export", str(tiny_folder), "-o", str(tmp_path / "a.bundle"), "--recipe", str(recipe), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 11
    assert json.loads(result.stdout)["error"]["type"] == "VerificationError"
    assert [path.name for path in tmp_path.iterdir()] == ["tight.toml"]


def test_verbose_has_nothing_to_say_beside_json(tiny_folder: Path) -> None:
    for other in ("--json", "--quiet"):
        assert CliRunner().invoke(app, ["export", str(tiny_folder), "--verbose", other]).exit_code == 2


def test_a_log_hears_of_an_export_while_it_runs(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.05)
    arguments = ["export", str(tiny_folder), "-o", str(tmp_path / "a.bundle"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)  # progress is on stderr
    assert {"capture", "measure", "passes"} & {line.split("] ")[1].split()[0] for line in result.stderr.splitlines()}


def test_an_existing_bundle_is_replaced_only_with_force(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ["export", str(tiny_folder), "-o", str(tmp_path / "a.bundle"), "--quiet"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    before = (tmp_path / "a.bundle" / "manifest.json").read_bytes()
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 7
    assert "a.bundle" in refused.stderr
    assert "Pass --force to replace it" in refused.stderr
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0
    assert (tmp_path / "a.bundle" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("model", "options", "code", "named"),
    [
        ("absent", [], 3, "absent"),
        ("empty", [], 3, "empty"),
        ("tiny", ["--recipe", "f23"], 5, "f23"),
        ("tiny", ["--target", "hexagon"], 2, "--target: there is no 'hexagon'"),
        ("tiny", ["--kv-cache", "f8"], 2, "--kv-cache: "),
        ("tiny", ["--max-memory", "lots"], 2, "--max-memory: "),
        ("tiny", ["--gpu", "h1000"], 15, "h1000"),
    ],
)
def test_what_goes_wrong_is_named(
    model: str, options: list[str], code: int, named: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    source = tiny_folder if model == "tiny" else tmp_path / model
    result = CliRunner().invoke(app, ["export", str(source), "-o", str(tmp_path / "a.bundle"), "--json", *options])
    assert result.exit_code == code, result.output
    assert named in json.loads(result.stdout)["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_reader_that_is_gone_takes_nothing_from_an_export(tiny_folder: Path, tmp_path: Path) -> None:
    """The reader closes its end as in `optimize export ... | head`: the bundle is there, so the exit code is 0."""
    script = (
        "import os, sys, enginewright\n"
        "from enginewright.optimizer.cli import export\n"
        "from enginewright.optimizer.cli.app import app\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        "enginewright.export = lambda *_, **__: None\n"
        "export._print_summary = lambda *_, **__: print('x' * 100_000)\n"
        "app(['export', sys.argv[1], '-o', sys.argv[2], '--recipe', 'f32'])\n"
    )
    run = [sys.executable, "-c", script, str(tiny_folder), str(tmp_path / "b")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
