"""The lines of a report; it knows passes and metrics by their names, without loading them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from enginewright.optimizer.report import lines
from enginewright.optimizer.report.bundle_report import open_report
from enginewright.optimizer.report.document import ReportDocument
from enginewright.optimizer.report.lines import already_quantized_lines, candidate_lines, engine_lines, quality_sentence
from enginewright.optimizer.search.report import Candidate
from enginewright.passes.framework.records import StoredWeight
from enginewright.passes.sparsity import fit_removed, prune_channels, prune_heads
from enginewright.passes.sparsity.drop_layers import DropLayers
from enginewright.plugins.emit.engine_report import EngineReport
from enginewright.runtime.bundle.manifest import Manifest, ModelSection, SourceSection
from tests.runtime.tensorrt_bundles import plan, section, write_engines


def test_what_is_said_of_weights_that_the_source_had_quantized() -> None:
    of = [("AWQ of 4 bits", True), ("FP8", True), ("FP8", False), ("NVFP4", False), ("AWQ of 4 bits", True)]
    document = ReportDocument(already_quantized=tuple(StoredWeight(f"w{i}", *one) for i, one in enumerate(of)))
    assert already_quantized_lines(document) == [
        "2 of AWQ of 4 bits: values kept",
        "2 of FP8: values kept in 1, the others stored anew",
        "1 of NVFP4: read as floats and stored anew",
    ]
    assert already_quantized_lines(ReportDocument()) == []


def test_what_is_said_of_an_engine() -> None:
    engine = EngineReport(
        target="tensorrt-rtx",
        file="targets/tensorrt-rtx/model.plan",
        seconds=16.62,
        peak_rss_bytes=3 << 29,
        file_bytes=271 << 20,
        compute_capabilities=("8.6", "8.9"),
        profiles=("1 to 16 requests of 1 token", "1 to 4 prompts of 1 to 512 tokens"),
        attentions=30,
    )
    assert engine_lines(ReportDocument(engines=(engine,))) == [
        "tensorrt-rtx: targets/tensorrt-rtx/model.plan: 271.0 MiB for compute capability 8.6, 8.9, built in 16.6 s "
        "with 1.5 GiB of memory",
        "tensorrt-rtx: steps of 1 to 16 requests of 1 token; 1 to 4 prompts of 1 to 512 tokens",
    ]
    assert engine_lines(ReportDocument()) == []


def test_the_size_of_a_bundle_that_is_engines_alone(tmp_path: Path) -> None:
    model = ModelSection(name="a", architecture="b", vocab_size=3, context_length=4, parameters=1000)
    manifest = Manifest(model=model, source=SourceSection(kind="module", name="a"), targets=())
    path = write_engines(tmp_path / "b", manifest, section(plan()), plan())
    assert open_report(path).size_line() == "4.0 KiB: engines, which have the weights in them"


def test_what_was_taken_comes_first() -> None:
    alone = Candidate("formats alone", 97_000_000, 0.0, 0.018, False)
    both = Candidate("less of the model", 95_500_000, 0.006, 0.0175, True)
    assert candidate_lines(ReportDocument(ways=(alone, both))) == [
        "less of the model: 91.1 MiB, KL 0.0175, of which 0.006 for its shape (taken)",
        "formats alone: 92.5 MiB, KL 0.018",
    ]


def test_a_candidate_that_failed_says_why() -> None:
    alone = Candidate("formats alone", 9_000, 0.0, 0.018, True)
    nothing = Candidate("less of the model", None, 0.0, None, False, "nothing that may go is within max_kl = 0.007")
    assert candidate_lines(ReportDocument(ways=(nothing, alone)))[1:] == [f"{nothing.name}: {nothing.reason}"]
    assert candidate_lines(ReportDocument()) == []


RANDOM = {"tokens": 82, "max_logit_error": 1.5, "largest_logit": 30.0, "kl_mean": 0.02, "kl_max": 0.1}
RANDOM |= {"top1_agreement": 0.9}
TEXT = RANDOM | {"tokens": 1533, "windows": 3, "windows_in_text": 18, "perplexity": 34.1, "source_perplexity": 33.9}
TEXT |= {"kl_mean": 0.0054, "top1_agreement": 0.9615, "text": "built in", "window": 512}
REST = {"seed": 0, "tolerance": None, "max_kl": None, "text": None, "text_omitted": None, "seconds": 1.0}
REST |= {"peak_rss_bytes": 1}


def of(*entries: dict[str, object]) -> str | None:
    return quality_sentence(ReportDocument.model_validate({"verification": [REST | entry for entry in entries]}))


def test_a_lossy_bundle_is_judged_by_its_text() -> None:
    assert of({"target": "cpu", "exact": False, "max_kl": 0.05, "random_tokens": RANDOM, "text": TEXT}) == (
        "The bundle picks the same token as the source in 96.2 % of 1,533 positions of a text; "
        "KL 0.0054 of 0.05 allowed: what the source would say is 0.54 % less likely here."
    )


def test_without_a_text_random_tokens_are_named() -> None:
    sentence = of({"target": "cpu", "exact": False, "max_kl": None, "random_tokens": RANDOM})
    assert sentence is not None
    assert "in 90.0 % of 82 positions of random tokens; KL 0.02: " in sentence


@pytest.mark.parametrize("kl", [0.001, 0.3])
def test_the_share_is_what_kl_means(kl: float) -> None:
    sentence = of({"target": "cpu", "exact": False, "random_tokens": RANDOM, "text": TEXT | {"kl_mean": kl}})
    assert sentence is not None
    assert f"is {100 * (1 - math.exp(-kl)):.2g} % less likely" in sentence


def test_an_exact_bundle_says_what_rounding_left() -> None:
    sentences = of(
        {"target": "cpu", "exact": True, "tolerance": 0.01, "random_tokens": RANDOM | {"max_logit_error": 2e-4}}
    )
    assert sentences == (
        "The bundle computes what the source does: logits differ by 0.0002 at most in 82 positions of random tokens, "
        "where rounding explains 0.01."
    )


def test_the_worst_of_several_targets_counts() -> None:
    exact = {"target": "cpu", "exact": True, "tolerance": 0.01, "random_tokens": RANDOM}
    good = {"target": "onnx", "exact": False, "random_tokens": RANDOM, "text": TEXT}
    bad = good | {"target": "far", "text": TEXT | {"kl_mean": 0.2}}
    sentence = of(exact, good, bad)
    assert sentence is not None
    assert "KL 0.2: " in sentence
    assert sentence.endswith(" (target far, the farthest of 3).")


def test_nothing_compared_says_nothing() -> None:
    assert of() is None


def test_names_are_those_of_the_passes() -> None:
    assert DropLayers.name == lines.DROP_LAYERS
    assert prune_heads.PruneHeads.name == lines.PRUNE_HEADS
    assert prune_channels.PruneChannels.name == lines.PRUNE_CHANNELS
    assert (lines.HEADS, lines.HEADS_KEPT) == (prune_heads.HEADS, prune_heads.KEPT)
    assert (lines.CHANNELS, lines.CHANNELS_KEPT) == (prune_channels.CHANNELS, prune_channels.KEPT)
    assert lines.ERROR == fit_removed.ERROR
