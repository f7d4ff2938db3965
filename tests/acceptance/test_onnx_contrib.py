"""The contrib variant through the export, the bundle and the scheduler: the standard file's tokens, in any batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.plugins.onnx.recipe import OnnxSection
from enginewright.plugins.onnx.serve.session import PROVIDERS, load_onnxruntime, open_session
from enginewright.plugins.onnx.serve.slot_caches import LENGTH_STEP, SlotCaches
from enginewright.plugins.steps.linear_io import LinearIo, Variant, linear_io
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import open_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.errors import BundleError

from .test_onnx_families import LENGTHS, NEW_TOKENS, TOLERANCE
from .tiny_configs import tiny_family

CONTEXT = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma2: layers with windows and without, a softcap, groups of two heads."""
    folder = tmp_path_factory.mktemp("contrib") / "b"
    recipe = Recipe(name="contrib", targets=("onnx",), onnx=OnnxSection(contrib=True))
    report = export(tiny_family("gemma2"), folder, recipe=recipe)
    assert [v.target for v in report.verification] == ["onnx (standard)", "onnx (contrib)"]
    return folder


def opened(path: Path, variant: Variant | None, chunk: int | None = None, requests: int = 8) -> LLM:
    bundle = Bundle.open(path)
    executor = open_executor(
        bundle,
        "onnx",
        CONTEXT,
        Placement(threads=1, variant=variant),
        SchedulerConfig(requests),
        memory=1 << 26,
        buckets=False,
    )
    return LLM.from_executor(executor, bundle.model, max_requests=requests, prefill_chunk=chunk)


def check_tokens(path: Path, variant: Variant) -> None:
    """A bundle's default variant is this one, and its tokens are the standard file's: alone, together and in chunks."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 256, length).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with opened(path, "standard") as llm:
        assert llm.info()["executor"]["variant"] == "standard"
        greedy_tokens = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
        expected = llm.logits(prompts[-1])
    with opened(path, None) as llm:  # what a user gets
        assert llm.info()["executor"]["variant"] == variant
        alone = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
        together = [list(result.token_ids) for result in llm.generate(prompts, params)]
        logits = llm.logits(prompts[-1])
    with opened(path, variant, chunk=16, requests=3) as llm:
        in_chunks = [list(result.token_ids) for result in llm.generate(prompts, params)]
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)
    assert alone == greedy_tokens
    assert together == greedy_tokens
    assert in_chunks == greedy_tokens


def test_tokens_are_those_of_the_standard_file(path: Path) -> None:
    check_tokens(path, "contrib")


def test_both_files_have_the_same_weights(path: Path) -> None:
    places = []
    for name in ("model.onnx", "model.contrib.onnx"):
        model = onnx.load(path / name, load_external_data=False)
        external = (t for t in model.graph.initializer if t.external_data)
        places.append({t.name: tuple(e.value for e in t.external_data) for t in external})
    assert places[0] == places[1]


def test_a_variant_that_is_not_there(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "b")
    manifest = tmp_path / "b" / "targets/onnx/manifest.json"
    io = Bundle.open(path).target("onnx").section(LinearIo)
    assert io is not None and io.contrib is not None and io.contrib.standard == ()
    text = manifest.read_text()
    assert '"file": "model.contrib.onnx"' in text
    manifest.write_text(text.replace('"file": "model.contrib.onnx"', '"file": ""'))
    with pytest.raises(BundleError, match="target 'onnx' has no variant 'contrib'; it has standard"):
        opened(tmp_path / "b", "contrib")
    with opened(tmp_path / "b", None) as llm:
        assert llm.info()["executor"]["variant"] == "standard"


@pytest.mark.parametrize(("variant", "length"), [("standard", LENGTH_STEP), ("contrib", 1001)])
def test_slots_are_as_long_as_may_be_where_attention_takes_no_mask(path: Path, variant: Variant, length: int) -> None:
    io, module = linear_io(Bundle.open(path), "onnx").of_variant(variant), load_onnxruntime()
    session = open_session(path / io.file, PROVIDERS["cpu"], 1, module, io.accuracy_level)
    caches = SlotCaches(session, io, path / io.file, slots=2, capacity=1001, vocab=256, device="cpu", module=module)
    assert caches.length == length
