from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.evaluate import evaluate
from enginewright.optimizer.export import export

TEXT = "A short text, with a comma, and another sentence. It goes on for a while; then it ends.\n"
QUESTION = '{"prompt": "The sky is", "choices": ["blue", "loud"], "answer": 0}\n'


def run(bundle: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", str(bundle), "--threads", "1", *arguments])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_it_prints_what_the_library_finds(tiny_bundle: Path, text: Path) -> None:
    result = run(tiny_bundle, "--text", str(text), "--window", "32", "--stride", "9", "--full")
    assert result.exit_code == 0, result.output
    report = evaluate(tiny_bundle, text=text, window=32, stride=9, threads=1)
    assert f"{len(TEXT)} tokens, {len(TEXT) - 1} of them scored" in result.stdout
    assert f"{report.text.windows} of 32 tokens, 9 apart" in result.stdout
    assert f"{report.text.perplexity:.4f}" in result.stdout
    assert "KL" not in result.stdout
    assert "choices" not in result.stdout


def test_three_windows_are_read_unless_all_are_wanted(tiny_bundle: Path, text: Path) -> None:
    options = ("--text", str(text), "--window", "32", "--stride", "9")
    few, every = (json.loads(run(tiny_bundle, *options, *more, "--json").stdout) for more in ((), ("--full",)))
    assert (few["text"]["windows"], few["text"]["windows_in_text"]) == (3, 8)
    assert (every["text"]["windows"], every["text"]["scored"]) == (8, len(TEXT) - 1)
    assert few["text"]["scored"] == 31 + 9 + 9
    report = evaluate(tiny_bundle, text=text, window=32, stride=9, windows=3, threads=1)
    assert few["text"]["nll"] == report.text.nll != every["text"]["nll"]
    assert "3 of 32 tokens, 9 apart; the text has 8: --full reads all" in run(tiny_bundle, *options).stdout


def test_a_comparison_and_questions(tiny_bundle: Path, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text(QUESTION)
    options = ["--text", str(text), "--choices", str(questions), "--against"]
    result = run(tiny_bundle, *options, str(tiny_folder))
    assert result.exit_code == 0, result.output
    assert "100.00% the same" in result.stdout
    assert result.stdout.count("1 question, acc ") == 2
    itself = run(tiny_bundle, *options, str(tiny_bundle))
    assert "0.000e+00 nats a token on average, 0.000e+00 at most" in itself.stdout


SENTENCES = "".join(f"Ship {i} of {i * i % 7} sails past the {'high' if i % 2 else 'low'} cliff.\n" for i in range(24))


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    file = tmp_path / "sentences.txt"
    file.write_text(SENTENCES)
    return file


def test_vectors_beside_those_of_the_source_and_of_another_bundle(
    pooled_bundles: dict[str, Path], sentences: Path, tmp_path: Path
) -> None:
    bundle = pooled_bundles["embed"]
    source, rounded = bundle.parent / "tiny-embed", tmp_path / "int8.bundle"
    export(source, rounded, recipe="int8")
    options = ("--text", str(sentences), "--json", "--quiet", "--against")
    exact, lossy, other = (
        json.loads(run(*pair).stdout)
        for pair in (
            (bundle, *options, str(source)),
            (rounded, *options, str(source)),
            (rounded, *options, str(bundle)),
        )
    )
    assert (exact["task"], exact["texts"], exact["texts_in_file"]) == ("embed", 24, 24)
    assert set(exact["metrics"]) == {"cosine_min", "cosine_mean", "spearman", "top10_overlap"}
    assert exact["metrics"]["cosine_min"] > 1 - 1e-6
    assert exact["metrics"]["top10_overlap"] == 1
    with ew.LLM(bundle) as first, ew.LLM(rounded) as second:
        a, b = (llm.embed(SENTENCES.splitlines()).astype(float) for llm in (first, second))
    cosines = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    assert other["metrics"]["cosine_min"] == pytest.approx(cosines.min(), abs=1e-6)
    assert lossy["metrics"]["cosine_mean"] == pytest.approx(cosines.mean(), abs=1e-5) != exact["metrics"]["cosine_mean"]
    shown = run(rounded, "--text", str(sentences), "--against", str(bundle)).stdout
    assert f"least cosine                {other['metrics']['cosine_min']:.6f}" in shown


def test_scores_and_classes_beside_those_of_the_source(pooled_bundles: dict[str, Path], sentences: Path) -> None:
    for kind, names in (("rerank", {"spearman_scores"}), ("classify", set[str]())):
        bundle = pooled_bundles[kind]
        options = ("--text", str(sentences), "--against", str(bundle.parent / f"tiny-{kind}"), "--json", "--quiet")
        metrics = json.loads(run(bundle, *options).stdout)["metrics"]
        assert set(metrics) == {"kl_mean", "kl_max", "top1_agreement"} | names
        assert metrics["top1_agreement"] == 1 and metrics["kl_max"] < 1e-9


def test_few_texts_have_no_search(pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("One ship.\n\nTwo ships.\n")
    bundle = pooled_bundles["embed"]
    result = run(bundle, "--text", str(tmp_path / "two.txt"), "--against", str(bundle), "--json")
    assert json.loads(result.stdout)["metrics"] == {
        "cosine_min": pytest.approx(1),
        "cosine_mean": pytest.approx(1),
        "spearman": None,
        "top10_overlap": None,
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "which has no perplexity"),
        (["--against", "SELF", "--choices", "built-in"], "choices: it is for models that generate text"),
        (["--against", "SELF", "--window", "8"], "--window: it is for models that generate text"),
        (["--against", "CHAT"], "is a model for text generation"),
        (["--against", "RERANK"], "is a model for rerank"),
        (["--against", "SELF", "--ranks", "2"], "--ranks"),
    ],
)
def test_what_an_embedding_model_does_not_have(
    arguments: list[str], named: str, pooled_bundles: dict[str, Path], tiny_bundle: Path, sentences: Path
) -> None:
    paths = {"SELF": pooled_bundles["embed"], "CHAT": tiny_bundle, "RERANK": pooled_bundles["rerank"]}
    words = [str(paths.get(word, word)) for word in arguments]
    result = run(pooled_bundles["embed"], "--text", str(sentences), *words)
    assert result.exit_code != 0
    assert named in result.stderr
    assert result.stdout == ""


def test_json_is_one_document(tiny_bundle: Path, text: Path) -> None:
    result = run(tiny_bundle, "--text", str(text), "--against", str(tiny_bundle), "--json", "--quiet")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert result.stderr == ""
    report = evaluate(tiny_bundle, text=text, against=tiny_bundle, threads=1).to_json()
    assert data | {"seconds": 0} == report | {"seconds": 0}
    assert data["comparison"]["kl_mean"] == 0
    assert data["choices"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--text", "absent.txt"], 8, "absent.txt"),
        (["--text", "TEXT", "--window", "9999"], 2, "--window"),
        (["--text", "TEXT", "--window", "8", "--stride", "8"], 2, "--stride"),
        (["--text", "TEXT", "--choices", "TEXT"], 8, "text.txt:1: not json"),
        (["--text", "TEXT", "--against", "absent"], 3, "absent"),
        (["--text", "TEXT", "--memory", "1"], 9, "memory"),
        (["--text", "TEXT", "--window", "many"], 2, "--window"),
    ],
)
def test_errors_name_what_is_wrong(arguments: list[str], code: int, named: str, tiny_bundle: Path, text: Path) -> None:
    result = run(tiny_bundle, *(str(text) if a == "TEXT" else a for a in arguments))
    assert result.exit_code == code, result.output
    assert named in result.stderr.lower()
    assert result.stdout == ""


def test_no_bundle(tmp_path: Path) -> None:
    result = run(tmp_path / "absent.bundle", "--json", "--quiet")
    assert result.exit_code == 7
    assert json.loads(result.stdout)["error"]["type"] == "BundleError"


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["eval", "--help"])
    assert result.exit_code == 0
    assert "optimize eval smollm2.bundle" in result.stdout
