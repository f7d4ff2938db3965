"""Against a computation with transformers and torch that shares no code with ours."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from enginewright.optimizer.evaluate import EvaluationReport, evaluate
from enginewright.optimizer.export import export
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RequestError, SourceError
from enginewright.runtime.shared.progress import ProgressEvent

from .conftest import TEXT, Pair, save_with_tokenizer

# Logits of both engines are f32 and differ by some 1e-6; a log-likelihood by as much, its mean by less.
NLL_TOLERANCE = 1e-5
# The square of that for KL of equal models; 1e-4 of the logits of different ones.
SAME_KL = 1e-9
KL_TOLERANCE = 1e-4


def scored_log_probabilities(model: torch.nn.Module, ids: list[int], window: int, stride: int) -> torch.Tensor:
    """[n, V] in float64 before each scored token: the loop of transformers' guide on perplexity."""
    rows, done = [], 1
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[begin:end]]), use_cache=False).logits[0].double()
        rows.append(torch.log_softmax(logits, -1)[done - begin - 1 : end - begin - 1])
        done = end
        if end == len(ids):
            break
    return torch.cat(rows)


def token_ids(pair: Pair) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(pair.folder)(TEXT)["input_ids"]
    return ids


@pytest.mark.parametrize(("window", "stride"), [(32, 8), (32, 31), (400, 200)])
def test_perplexity_equals_transformers(pair: Pair, text: Path, window: int, stride: int) -> None:
    report = evaluate(pair.bundle, text=text, window=window, stride=stride, threads=1)
    ids = token_ids(pair)
    expected = scored_log_probabilities(pair.model(), ids, window, stride)
    nll = -float(expected[torch.arange(len(ids) - 1), ids[1:]].mean())
    assert report.text.tokens == len(ids)
    assert report.text.scored == len(expected) == len(ids) - 1
    assert (report.text.window, report.text.stride) == (window, stride)
    assert report.text.nll == pytest.approx(nll, abs=NLL_TOLERANCE)
    assert report.text.perplexity == pytest.approx(math.exp(nll), rel=NLL_TOLERANCE)
    assert report.comparison is None
    assert report.choices is None


def perturbed(pair: Pair, place: Path, strength: float) -> Pair:
    """A copy of the model with noise on the output of its first feed-forward block."""
    model = pair.model()
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    with torch.no_grad():
        weight += strength * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    folder = save_with_tokenizer(model, pair.folder, place / "perturbed")
    export(folder, place / "perturbed.bundle")
    return Pair(folder, place / "perturbed.bundle")


@pytest.mark.parametrize("reference", ["folder", "bundle"])
def test_divergence_of_a_perturbed_model_equals_torch(pair: Pair, text: Path, reference: str, tmp_path: Path) -> None:
    other = perturbed(pair, tmp_path, 0.05)
    report = evaluate(other.bundle, text=text, against=getattr(pair, reference), window=64, stride=32, threads=1)
    comparison = report.comparison
    assert comparison is not None
    ids = token_ids(pair)
    p = scored_log_probabilities(pair.model(), ids, 64, 32)
    q = scored_log_probabilities(other.model(), ids, 64, 32)
    kl = (p.exp() * (p - q)).sum(-1)
    assert comparison.kl_mean == pytest.approx(float(kl.mean()), rel=KL_TOLERANCE)
    assert comparison.kl_max == pytest.approx(float(kl.max()), rel=KL_TOLERANCE)
    assert comparison.kl_mean > 100 * SAME_KL
    assert comparison.top1_agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert comparison.top1_agreement < 1
    assert comparison.nll == pytest.approx(-float(p[torch.arange(len(ids) - 1), ids[1:]].mean()), abs=NLL_TOLERANCE)
    assert report.text.nll == pytest.approx(-float(q[torch.arange(len(ids) - 1), ids[1:]].mean()), abs=NLL_TOLERANCE)
    assert comparison.max_logit_difference > 0.01


def test_a_bundle_is_nowhere_from_itself(pair: Pair, text: Path) -> None:
    report = evaluate(pair.bundle, text=text, against=pair.bundle, window=48, threads=1)
    comparison = report.comparison
    assert comparison is not None
    assert (comparison.kl_mean, comparison.kl_max, comparison.max_logit_difference, comparison.top1_agreement) == (
        0.0,
        0.0,
        0.0,
        1.0,
    )
    assert (comparison.nll, comparison.perplexity) == (report.text.nll, report.text.perplexity)


def test_a_bundle_is_close_to_its_source(pair: Pair, text: Path) -> None:
    comparison = evaluate(pair.bundle, text=text, against=pair.folder, threads=1).comparison
    assert comparison is not None
    assert 0 <= comparison.kl_mean <= comparison.kl_max < SAME_KL
    assert comparison.top1_agreement == 1
    assert 0 < comparison.max_logit_difference < 1e-4  # f32 sums in another order, of logits of a few units


def test_windows_that_hold_all_that_a_token_sees_change_nothing(mistral: Pair, text: Path) -> None:
    """Two layers that see 8 tokens each see 15; rope is relative, so it does not matter where a window begins."""

    def nll(window: int, stride: int) -> float:
        return evaluate(mistral.bundle, text=text, window=window, stride=stride, threads=1).text.nll

    whole = nll(400, 200)
    assert nll(64, 48) == pytest.approx(whole, abs=NLL_TOLERANCE)
    assert nll(64, 49) == pytest.approx(whole, abs=NLL_TOLERANCE)
    assert abs(nll(16, 15) - whole) > 10 * NLL_TOLERANCE  # these do not hold it all


def test_a_full_context_needs_long_windows(tiny_bundle: Path, text: Path) -> None:
    short, long = (evaluate(tiny_bundle, text=text, window=w, stride=10, threads=1).text.nll for w in (24, 400))
    assert abs(short - long) > 10 * NLL_TOLERANCE


def test_only_a_window_s_logits_are_made(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = LLM.logits

    def logits(self: LLM, ids: list[int]) -> np.ndarray:
        rows.append(len(ids))
        return original(self, ids)

    monkeypatch.setattr(LLM, "logits", logits)
    file = tmp_path / "long.txt"
    file.write_text(TEXT * 10)
    report = evaluate(tiny_bundle, text=file, window=64, stride=60, threads=1)
    assert len(rows) == report.text.windows > 30
    assert max(rows) == 64
    assert report.text.tokens > 2000


def test_progress_counts_up(tiny_bundle: Path, text: Path) -> None:
    events: list[ProgressEvent] = []
    report = evaluate(
        tiny_bundle, text=text, against=tiny_bundle, choices="built-in", window=128, threads=1, progress=events.append
    )
    windows = [(e.done, e.total) for e in events if e.stage == "text"]
    assert windows == [(i, report.text.windows) for i in range(report.text.windows + 1)]
    answered = [e.done for e in events if e.stage not in ("text", "load")]
    assert answered == [*range(1, 41), *range(1, 41)]  # of the bundle, and of the reference
    assert report.comparison is not None
    assert report.comparison.choices == report.choices
    assert json.loads(json.dumps(report.to_json()))["text"]["scored"] == report.text.scored


def test_a_start_token_begins_every_window(pair: Pair, text: Path, tmp_path: Path) -> None:
    copied = Pair(pair.folder, tmp_path / "bos.bundle")
    _copy_with(pair.bundle, copied.bundle, {"add_bos": True})
    report = evaluate(copied.bundle, text=text, window=33, stride=32, threads=1)
    ids, model = token_ids(pair), pair.model()
    total = 0.0
    for begin in range(0, len(ids), 32):  # the size less the token before it: windows touch, and share nothing
        window = ids[begin : begin + 32]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[1, *window]]), use_cache=False).logits[0].double()
        total += float(torch.log_softmax(logits, -1)[torch.arange(len(window)), window].sum())
    assert report.text.scored == report.text.tokens == len(ids)
    assert report.text.nll == pytest.approx(-total / len(ids), abs=NLL_TOLERANCE)


def _copy_with(bundle: Path, place: Path, special: dict[str, bool]) -> None:
    """A copy of a bundle with other entries in its special_tokens.json."""
    import hashlib
    import shutil

    shutil.copytree(bundle, place)
    file, manifest = place / "tokenizer" / "special_tokens.json", place / "manifest.json"
    data = json.dumps(json.loads(file.read_text()) | special).encode()
    file.write_bytes(data)
    listed = json.loads(manifest.read_text())
    section = listed["files"]["tokenizer/special_tokens.json"]
    section |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(listed))


def test_other_vocabularies_and_tokenizers_are_refused(
    tiny_folder: Path, tiny_bundle: Path, mistral: Pair, text: Path, tmp_path: Path
) -> None:
    for other in (mistral.bundle, mistral.folder):
        with pytest.raises(RequestError, match=r"vocabulary of 301 tokens, .* one of 259"):
            evaluate(tiny_bundle, text=text, against=other, threads=1)
    _copy_with(tiny_bundle, tmp_path / "bos.bundle", {"add_bos": True})
    with pytest.raises(RequestError, match=r"another tokenizer .* token 0"):
        evaluate(tiny_bundle, text=text, against=tmp_path / "bos.bundle", threads=1)


def test_a_source_without_a_tokenizer_takes_the_bundle_s(pair: Pair, text: Path, tmp_path: Path) -> None:
    pair.model().save_pretrained(tmp_path / "bare")
    bare = evaluate(pair.bundle, text=text, against=tmp_path / "bare", threads=1).comparison
    assert bare is not None
    assert bare.kl_max < SAME_KL


def test_bad_input_is_named(tiny_bundle: Path, tmp_path: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a")
    with pytest.raises(RequestError, match="too short: it has 1 token"):
        evaluate(tiny_bundle, text=short, threads=1)
    with pytest.raises(RequestError, match="window: 513"):
        evaluate(tiny_bundle, text=text, window=513, threads=1)
    with pytest.raises(SourceError, match=r"against: .*absent doesn't exist"):
        evaluate(tiny_bundle, text=text, against=tmp_path / "absent", threads=1)
    with pytest.raises(SourceError, match=r"config\.json"):
        evaluate(tiny_bundle, text=text, against=tmp_path, threads=1)
    with pytest.raises(BundleError):
        evaluate(tmp_path, text=text, threads=1)


def test_logits_that_are_not_finite_end_it(tiny_bundle: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(self: LLM, ids: list[int]) -> np.ndarray:
        result = np.zeros((len(ids), 259), np.float32)
        result[4, 7] = np.nan
        return result

    monkeypatch.setattr(LLM, "logits", logits)
    with pytest.raises(EnginewrightError, match="after 5 tokens are not finite"):
        evaluate(tiny_bundle, text=text, threads=1)


def test_a_bundle_alone_needs_no_torch(tiny_bundle: Path, text: Path) -> None:
    probe = (
        "import sys\n"
        "from enginewright.optimizer.evaluate import evaluate\n"
        "evaluate(sys.argv[1], text=sys.argv[2], against=sys.argv[1], choices='built-in', threads=1)\n"
        "print(*sorted({'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", probe, str(tiny_bundle), str(text)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "\n"


def test_the_built_in_text_is_the_default(tiny_bundle: Path) -> None:
    report: EvaluationReport = evaluate(tiny_bundle, window=512, stride=508, threads=1)
    assert report.text.source == "built-in"
    assert report.text.tokens > 30_000  # the tiny tokenizer's tokens are bytes
