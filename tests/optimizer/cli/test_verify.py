from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from enginewright.optimizer import compare_builds
from enginewright.optimizer.build_speed import SpeedPairs
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from tests.plugins.steps import tiny_onnx
from tests.sealed import sealed


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_what_is_printed(tiny_bundle: Path, tiny_folder: Path) -> None:
    code, out, _ = run(tiny_bundle)
    assert code == 0
    assert "all hashes are right" in out
    assert "target cpu: its program is sound (isa " in out
    assert "pass --source MODEL" in out
    code, out, _ = run(tiny_bundle, "--source", tiny_folder, "--target", "cpu")
    assert code == 0
    assert "target cpu, compared with the source on 82 random tokens" in out
    assert "pass --source" not in out
    assert run(tiny_bundle, "--quiet")[:2] == (0, "")


def test_vectors_are_compared_with_the_source(pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    source, bundle = pooled_bundles["embed"].parent / "tiny-embed", tmp_path / "int8.bundle"
    export(source, bundle, recipe="int8")
    code, out, err = run(bundle, "--source", source, "--json")
    assert code == 0, err
    (target,) = json.loads(out)["targets"]
    metrics = target["comparison"]["text"]["metrics"]
    assert set(metrics) == {"cosine_min", "cosine_mean", "spearman", "top10_overlap"}
    assert 0.9 < metrics["cosine_min"] < metrics["cosine_mean"] < 1
    assert 1 - metrics["cosine_mean"] == pytest.approx(target["comparison"]["text"]["kl_mean"], rel=1e-6)
    code, out, _ = run(bundle, "--source", source)
    assert f"least cosine {metrics['cosine_min']:.6f}" in out
    code, out, err = run(bundle, "--against", source, "--json")
    assert code == 0, err
    checks = {one["name"]: one for one in json.loads(out)["against"]["checks"]}
    assert checks["cosine_mean"]["limit"] == pytest.approx(0.95) and checks["cosine_min"]["limit"] is None
    code, out, _ = run(bundle, "--against", pooled_bundles["embed"])
    assert code == 16
    assert " tokens of 64 texts; " in out and "at least 0.9999" in out and "times are of models that generate" in out
    (tmp_path / "budget.toml").write_text("cosine_min = 0.9\ncosine_mean = 0.9\nspearman = 0.9\ntop10_overlap = 0.5\n")
    assert run(bundle, "--against", pooled_bundles["embed"], "--budget", tmp_path / "budget.toml")[0] == 0


def test_prompts_in_json_lines_are_texts(pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    """They are read as in the other commands: each object's text, and not the line."""
    bundle, older = tmp_path / "int8.bundle", pooled_bundles["embed"]
    export(older.parent / "tiny-embed", bundle, recipe="int8")
    texts = [f"the {word} is on the table" for word in ("cat", "cup", "letter", "old blue book")]
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("\n".join(texts))
    lines.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    compared = []
    for file in (plain, lines):
        code, out, err = run(bundle, "--against", older, "--prompts", file, "--json")
        assert code in (0, 16), err
        report = json.loads(out)["against"]
        compared.append((report["prompts"], report["tokens"], [one.get("value") for one in report["checks"]]))
    assert compared[0] == compared[1] and compared[0][0] == len(texts)
    lines.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    code, _, err = run(bundle, "--against", older, "--prompts", lines)
    assert code == 8 and "prompts.jsonl:1: this model reads texts, and no messages" in err


@pytest.mark.parametrize("as_json", [True, False])
def test_damage_has_an_exit_code(as_json: bool, tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "a.bundle"))
    path = bundle / "tokenizer/special_tokens.json"
    path.write_text(path.read_text()[:-1] + " ")  # of the same size, and the same JSON
    code, out, err = run(bundle, *(["--json"] if as_json else []))
    assert code == 7
    assert "special_tokens.json: SHA-256 is not the one" in err
    assert not as_json or json.loads(out)["error"]["type"] == "BundleError"


def test_json(tiny_bundle: Path) -> None:
    code, out, _ = run(tiny_bundle, "--json")
    assert code == 0
    assert [t["target"] for t in json.loads(out)["targets"]] == ["cpu"]


def test_a_provider_is_for_targets_that_have_some(tiny_bundle: Path, tmp_path: Path) -> None:
    code, _, err = run(tiny_bundle, "--provider", "cpu")
    assert code == 2
    assert "--provider: 'cpu' is for target 'onnx' or 'stablehlo', and cpu is looked at" in err
    path = tiny_onnx.write_bundle(tmp_path / "tiny.bundle")
    code, out, _ = run(path, "--provider", "cpu")
    assert code == 0
    assert "provider CPUExecutionProvider" in out
    code, _, err = run(path, "--provider", "cuda")
    assert code == 10
    assert "has no CUDAExecutionProvider" in err
    assert run(path, "--provider", "quantum")[0] == 2
    code, _, err = run(tiny_bundle, "--target", "gpu")
    assert code == 2
    assert "there is no target 'gpu'" in err


def with_model(bundle: Path, to: Path, **fields: object) -> Path:
    """A copy whose manifest says something else of the model."""
    shutil.copytree(bundle, to)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["model"] |= fields
    (to / "manifest.json").write_text(sealed(manifest))
    return to


def test_bundles_with_equal_files_are_neither_run_nor_timed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("equal files aren't timed")

    monkeypatch.setattr(compare_builds, "measure_speed", never)
    same, junit = Path(shutil.copytree(tiny_bundle, tmp_path / "same.bundle")), tmp_path / "verify.xml"
    (same / "report").mkdir(exist_ok=True)
    (same / "report/note.txt").write_text("times of this export")  # no part of the bundle
    code, out, _ = run(same, "--against", tiny_bundle, "--junit", junit)
    assert code == 0 and "within the budget: all files are equal" in out
    [case] = ElementTree.parse(junit).getroot().iter("testcase")
    assert case.get("name") == "bytes" and case.find("skipped") is None
    code, out, _ = run(same, "--against", tiny_bundle, "--json")
    comparison = json.loads(out)["against"]
    assert code == 0 and comparison["within_budget"] and comparison["prompts"] == 0
    assert [(one["name"], one["outcome"]) for one in comparison["checks"]] == [("bytes", "passed")]


def test_against_an_older_build(tiny_bundle: Path, tmp_path: Path) -> None:
    """Speed is left out: it isn't the same twice."""
    budget, junit = tmp_path / "budget.toml", tmp_path / "verify.xml"
    budget.write_text("speed = false\n")
    options = ["--against", tiny_bundle, "--budget", budget, "--junit", junit]
    code, out, _ = run(with_model(tiny_bundle, tmp_path / "same.bundle", name="another-name"), *options)
    assert code == 0
    assert "all hashes are right" in out and "within the budget" in out and "pass --source" not in out
    assert f"against the bundle {tiny_bundle}, on target cpu" in out and "KL by what each layer gets" in out
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    assert run(tmp_path / "same.bundle", *options, "--quiet")[:2] == (0, "")

    other = with_model(tiny_bundle, tmp_path / "other.bundle", eos_token_ids=[2, 3])
    code, out, _ = run(other, *options, "--quiet")
    assert code == 16
    assert "over the budget: 1 of 10 checks: generation" in out and "eos_token_ids [2] became [2, 3]" in out
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    code, out, _ = run(other, *options, "--json")
    document = json.loads(out)
    assert code == 16 and document["against"]["within_budget"] is False and document["files"] > 3
    assert [c["name"] for c in document["against"]["checks"] if c["outcome"] == "failed"] == ["generation"]


def test_speed_that_varies_too_much_has_an_exit_code_of_its_own(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = with_model(tiny_bundle, tmp_path / "same.bundle", name="another-name")
    pairs = ((1.0, 3.0), (3.0, 1.0)) * 5
    monkeypatch.setattr(compare_builds, "measure_speed", lambda *_: SpeedPairs(pairs, pairs))
    code, out, _ = run(same, "--against", tiny_bundle, "--quiet")
    assert code == 18
    assert "inconclusive: times vary too much on this machine: prefill_ratio, decode_ratio" in out
    code, out, _ = run(same, "--against", tiny_bundle, "--json")
    comparison = json.loads(out)["against"]
    assert code == 18 and comparison["within_budget"]
    (check,) = [one for one in comparison["checks"] if one["name"] == "decode_ratio"]
    assert (check["outcome"], check["interval"]) == ("inconclusive", pytest.approx([1 / 3, 3]))


def test_what_is_wrong_with_a_comparison_is_said(tiny_bundle: Path, tmp_path: Path) -> None:
    code, _, err = run(tiny_bundle, "--junit", "out.xml")
    assert code == 2 and "--junit" in err and "it is for --against" in err
    code, _, err = run(tiny_bundle, "--against", tiny_bundle, "-t", "cpu", "-t", "onnx")
    assert code == 2 and "--against compares one target" in err
    (tmp_path / "budget.toml").write_text("kl_maen = 1")
    code, _, err = run(tiny_bundle, "--against", tiny_bundle, "--budget", tmp_path / "budget.toml", "-q")
    assert code == 8 and "budget.toml: kl_maen: unknown key" in err and "Did you mean 'kl_mean'?" in err
    code, _, err = run(tiny_bundle, "--against", tmp_path / "none", "-q")
    assert code == 3 and "against" in err
