from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from enginewright.optimizer.cli.app import app

SMALL = ("--gpu", "h100", "--batch", "1,4", "--context", "256")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_tables_and_a_plot(tiny_bundle: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    goals = ("--tpot", "20ms", "--ttft", "0.5s")
    result = run(str(tiny_bundle), *SMALL, "--gpu", "rtx4090,l4", *goals, "--plot", str(plot))
    assert result.exit_code == 0, result.output
    for words in ("H100: 3,350 GB/s", "RTX 4090: ", "L4: ", "a prediction, not a measurement"):
        assert words in result.stdout
    for words in ("75% of the bandwidth", "most requests", "largest batch within the goals", "TTFT", "!: later than"):
        assert words in result.stdout
    assert plot.read_text().lstrip().startswith("<svg")


def test_json(tiny_bundle: Path) -> None:
    result = run(str(tiny_bundle), *SMALL, "--json", "--quiet", "--memory", "1GiB", "--bandwidth-share", "0.5")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["format_version"] == 1
    assert document["options"] == {"batches": [1, 4], "context": 256, "prompt": 256, "tpot": None, "ttft": None}
    (device,) = document["devices"]
    assert device["name"] == "H100" and not device["measured"] and device["room"] == 1 << 30
    assert device["shares"]["bandwidth"] == 0.5 and device["source"].startswith("https://")
    (plan,) = document["plans"]
    assert plan["recipes"] == ["f32"] and [s["batch"] for s in plan["speeds"]] == [1, 4]


def test_a_late_batch_is_marked_and_no_room_is_said(tiny_bundle: Path) -> None:
    result = run(str(tiny_bundle), *SMALL, "--tpot", "1us", "--memory", "8MB")
    assert result.exit_code == 0, result.output
    assert " !" in result.stdout and "none" in result.stdout and "the TPOT" in result.stdout
    assert "too big" in run(str(tiny_bundle), "--gpu", "l4", "--memory", "8MB", "--batch", "4096").stdout


def test_the_longest_request_is_the_context_s_or_the_memory_s(tiny_bundle: Path) -> None:
    """The tiny model's context is 512 tokens; its weights take 0.43 MB, and 512 tokens of its cache 0.26."""
    ranks = ("--ranks", "2", "--partition", "tensor=2", "--link", "nvlink")
    for more in ((), ranks):
        assert "512 tokens, the context" in run(str(tiny_bundle), *SMALL, *more).stdout
        small = run(str(tiny_bundle), *SMALL, *more, "--context", "32", "--memory", "1MB").stdout
        assert "tokens, by memory" in small, small


def test_ranks(tiny_bundle: Path) -> None:
    arguments = (str(tiny_bundle), *SMALL, "--quiet", "--ranks", "2")
    result = run(*arguments, "--link", "nvlink", "--tpot", "1us")
    assert result.exit_code == 0, result.output
    for words in ("links: NVLink 4 within a machine: 450 GB/s", "tensor=2", "pipeline=2", "weights a rank", "!"):
        assert words in result.stdout
    assert "2 ranks: none fits and meets the goals" in result.stdout
    assert "2 ranks: the shortest time per token " in run(*arguments, "--link", "nvlink").stdout
    result = run(*arguments, "--link", "pcie4,ndr", "--per-machine", "1", "--partition", "tensor=2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["format_version"] == 1 and document["links"]["H100"]["between"]["name"] == "InfiniBand NDR"
    (plan,) = document["plans"]
    assert plan["partition"] == "tensor=2" and plan["collectives"][0]["between"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--gpu", "h1000"], 15, "Did you mean h100?"),
        (["--tpot", "20"], 2, "--tpot: '20' isn't a time"),
        (["--ttft", "soon"], 2, "--ttft: 'soon' isn't a time"),
        (["--batch", "4,x"], 2, "not a list of numbers"),
        (["--batch", "0"], 2, "--batch: 0 is out of range"),
        (["--context", "100000"], 2, "--context: 100000 is out of range"),
        (["--prompt", "-1"], 2, "--prompt: -1 is out of range"),
        (["--memory", "lots"], 2, "isn't a size"),
        (["--bandwidth-share", "1.5"], 2, "--bandwidth-share: 1.5 is out of range"),
        (["--compute-share", "0"], 2, "--compute-share: 0 is out of range"),
        (["--memory", "1KiB"], 9, "doesn't fit on H100"),
        (["--recipe", "int8"], 7, "has the recipe that it was exported with"),
        (["--plot", "absent/a.svg"], 7, "no such folder"),
        (["--ranks", "2"], 8, "link: what joins H100s isn't given"),
        (["--ranks", "2", "--link", "nvlonk"], 15, "link: 'nvlonk' isn't a known link"),
        (["--ranks", "99", "--link", "nvlink"], 2, "--ranks: 99 is out of range"),
        (["--ranks", "2", "--link", "nvlink", "--link-share", "2"], 2, "--link-share: 2 is out of range"),
        (["--ranks", "2", "--link", "nvlink", "--plot", "a.svg"], 8, "plot: ranks aren't drawn"),
        (["--partition", "tensor=8", "--link", "nvlink"], 8, "more than the 4 query heads"),
        (["--link", "nvlink"], 2, "--link: there are no ranks that it would join"),
    ],
)
def test_errors(arguments: list[str], code: int, named: str, tiny_bundle: Path, tmp_path: Path) -> None:
    arguments = [a.replace("absent", str(tmp_path / "absent")) for a in arguments]
    words = arguments if "--gpu" in arguments else ["--gpu", "h100", *arguments]
    result = run(str(tiny_bundle), *words)
    assert result.exit_code == code, result.output
    assert named in result.stderr


@pytest.mark.parametrize("command", ["plan", "export"])
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path / "nothing")])
    assert result.exit_code == 3 and "doesn't exist" in result.stderr
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text("{}")
    for typed, meant in (("tiny.ggu", "tiny.gguf"), ("lama", "llama")):
        result = CliRunner().invoke(app, [command, str(tmp_path / typed)])
        assert result.exit_code == 3 and f"Did you mean {tmp_path / meant}?" in result.stderr, result.stderr


def test_a_model_that_computes_whole_texts_is_refused(pooled_bundles: dict[str, Path]) -> None:
    bundle = pooled_bundles["embed"]
    for model, code in ((bundle, 8), (bundle.with_suffix(""), 4)):  # the bundle, and the folder that it is made of
        result = run(str(model), "--gpu", "h100")
        assert result.exit_code == code and "is a model for embed" in result.stderr, result.output
