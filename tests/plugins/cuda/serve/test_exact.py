"""[engines] exact: a request's bits are the same alone, in batches, and with its prompt in chunks.

Interpreted kernels show the order of tiles and sums. Only a GPU can show what its tensor cores do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.optimizer.export import export
from enginewright.plugins.cuda.compile.emitter import CudaEmitter
from enginewright.plugins.gpu.jit_launcher import products_in_order
from enginewright.runtime.engine.draft_model import DraftModel
from enginewright.runtime.scheduler.step_times import DecodeTimes
from enginewright.runtime.shared.errors import EnginewrightError, RequestError
from tests.conftest import make_tiny_model
from tests.plugins.cuda.serve import exact_logits
from tests.plugins.cuda.serve.test_executor_families import CASES
from tests.triton_interpreter import interpreter as interpreter


@pytest.mark.parametrize("case", ["Llama", "Mixtral"])
def test_families_have_the_same_bits_in_any_batch(case: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(exact_logits.logits_of_batches, case).result() == []


def test_functions_have_the_same_bits_in_steps_of_any_size(repository: Path, interpreter: ProcessPoolExecutor) -> None:
    """All functions that a program may have: a library may compute the last elements of a tensor in another way."""
    source = (repository / "plugins/cpu/kernels/elementwise_functions.h").read_text(encoding="utf-8")
    functions = {fn: int(count) for fn, count in re.findall(r"(?:vector|scalar)\((\w+), (\d),", source)}
    assert len(functions) > 30
    assert interpreter.submit(exact_logits.functions_by_place, functions).result() == []


def test_a_hybrid_has_the_same_bits_in_any_batch(interpreter: ProcessPoolExecutor) -> None:
    """Its gates are elementwise functions of a few numbers for each token."""
    assert interpreter.submit(exact_logits.logits_of_batches, "bailing_hybrid", (7,)).result() == []


@pytest.mark.parametrize("case", CASES)
def test_all_families_have_the_same_bits_in_any_batch(case: str, interpreter: ProcessPoolExecutor) -> None:
    """Batches of 64 differ from these in tiles, which families share: two families are enough for them."""
    assert interpreter.submit(exact_logits.logits_of_batches, case, (7,)).result() == []


@pytest.mark.parametrize(
    ("case", "recipe", "floats", "cache"),
    [
        ("Llama", "f32", "bf16", None),
        ("Llama", "int8", "bf16", "int8"),
        ("Mixtral", "int4", "bf16", None),
        ("Llama", "fp8", "f16", "fp8"),
    ],
)
def test_formats_have_the_same_bits_in_any_batch(
    case: str, recipe: str, floats: Any, cache: str | None, interpreter: ProcessPoolExecutor
) -> None:
    results = interpreter.submit(exact_logits.logits_of_batches, case, (7, 64), recipe, floats, cache).result()
    assert results == []


@pytest.mark.soak
def test_every_number_of_requests_has_the_same_bits(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(exact_logits.logits_of_batches, "Llama", range(1, 65)).result() == []


@pytest.mark.parametrize(
    ("case", "cache"),
    [
        pytest.param("Llama", None, marks=pytest.mark.matrix),
        pytest.param("Mistral", None, marks=pytest.mark.soak),
        pytest.param("Llama", "int8", marks=pytest.mark.soak),
    ],
)
def test_contexts_of_several_parts_have_the_same_bits(
    case: str, cache: str | None, interpreter: ProcessPoolExecutor
) -> None:
    assert interpreter.submit(exact_logits.long_logits, case, 561, cache).result()


RECIPE = """
name = "exact"
[weights]
default = { storage = "f32", activation = "float" }
[engines]
dtype = "f32"
requests = 8
chunk = 64
exact = true
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama's bundle for cuda, exact, whose kernels aren't compiled: they are interpreted."""
    folder = tmp_path_factory.mktemp("exact")
    make_tiny_model("Llama").save_pretrained(folder / "saved")
    (folder / "exact.toml").write_text(RECIPE)
    (folder / "plain.toml").write_text(RECIPE.replace("exact = true", ""))
    with patch.object(CudaEmitter, "_kernels", lambda *_: {}):
        for name in ("exact", "plain"):
            export(folder / "saved", folder / f"{name}.bundle", recipe=folder / f"{name}.toml", targets=["cuda"])
    return folder / "exact.bundle"


@products_in_order()
def answers(
    bundle: Path, batches: list[list[list[int]]], disk: int = 0, **options: Any
) -> tuple[list[list[int]], list[list[float]], Mapping[str, Any] | None]:
    """The tokens of prompts, half of them drawn at random, their logprobs, and what speculation did.

    ``disk``: the tokens of prefixes that must come from a folder.
    """
    params = [
        SamplingParams(max_tokens=8, temperature=0.7 * (i % 2), seed=i, ignore_eos=True, logprobs=1)
        for i in range(sum(map(len, batches)))
    ]
    options = {"context": 96, "verify": False, "speculate": None, **options}
    with (
        patch.object(DecodeTimes, "took", lambda *arguments: None),  # so that drafts don't depend on measured times
        patch.object(DraftModel, "seconds", lambda self, rows: 0.0),
        LLM(bundle, target="cuda", trust="code", memory="2MiB", **options) as llm,
    ):
        results, left = [], iter(params)
        for batch in batches:
            results += llm.generate(batch, [next(left) for _ in batch], progress=False)
        logprobs = [
            [at[token].logprob for token, at in zip(r.outputs[0].token_ids, r.outputs[0].logprobs, strict=True)]
            for r in results
        ]
        about = llm.info()
        assert (about["prefix_cache"] or {}).get("from_disk", 0) == disk
        return [result.outputs[0].token_ids for result in results], logprobs, about["speculation"]


def prompts(number: int) -> list[list[int]]:
    """Prompts that repeat themselves, of which some begin alike."""
    rng = np.random.default_rng(3)
    common = rng.integers(3, 250, 5).tolist()
    return [(common[: 2 + i % 4] + rng.integers(3, 250, 2).tolist()) * (2 + i % 3) for i in range(number)]


def test_answers_are_the_same_alone_in_batches_and_in_chunks(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    one_by_one = [[prompt] for prompt in prompts(7)]
    alone = interpreter.submit(answers, bundle, one_by_one, prefix_cache=False).result()
    for options in ({"prefix_cache": False}, {"prefill_chunk": 5, "max_requests": 5}):
        assert interpreter.submit(answers, bundle, [prompts(7)], **options).result() == alone


def test_speculation_changes_no_bit(bundle: Path, interpreter: ProcessPoolExecutor) -> None:
    """The past answer to the same prompt is looked up, and the model guesses what it would answer itself."""
    batches = [prompts(2), prompts(2)[:1]]
    tokens, logprobs, _ = interpreter.submit(answers, bundle, batches).result()
    for speculate, source in (("auto", "past_answers"), (str(bundle), "model")):
        again, same, did = interpreter.submit(answers, bundle, batches, speculate=speculate).result()
        assert (again, same) == (tokens, logprobs)
        assert did is not None and did["sources"][source]["accepted"] > 0


def test_prefixes_in_a_folder_change_no_bit(bundle: Path, tmp_path: Path, interpreter: ProcessPoolExecutor) -> None:
    """A later process reads a prompt's blocks. A bundle that isn't exact keeps none."""
    long = [[(prompts(1)[0] * 30)[:70]]]
    expected = interpreter.submit(answers, bundle, long, prefix_cache=False).result()
    folder = str(tmp_path / "prefixes")
    for from_disk in (0, 64):
        assert interpreter.submit(answers, bundle, long, prefix_folder=folder, disk=from_disk).result() == expected
    with pytest.raises(RequestError, match="prefix_folder: target 'cuda' keeps no prefixes"):
        interpreter.submit(answers, bundle.with_name("plain.bundle"), long, prefix_folder=folder).result()


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_without_exact_nothing_is_speculated(bundle: Path, speculate: str, interpreter: ProcessPoolExecutor) -> None:
    plain = bundle.with_name("plain.bundle")
    draft_source = speculate if speculate == "lookup" else str(bundle)
    with pytest.raises(RequestError, match=r"(?s)speculate: .*exact = true in \[engines\]"):
        interpreter.submit(answers, plain, [prompts(1)], speculate=draft_source).result()
    if speculate == "lookup":
        assert not interpreter.submit(answers, plain, [prompts(1)], speculate="auto").result()[2]


def test_other_targets_refuse_an_exact_recipe(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "exact.toml").write_text(RECIPE)
    with pytest.raises(EnginewrightError, match=r"target onnx: .*engines\.exact.*target cuda alone") as refusal:
        export(tiny_folder, tmp_path / "out", recipe=tmp_path / "exact.toml", targets=["cuda", "onnx"])
    assert "Leave exact out" in str(refusal.value.hint)
    assert not (tmp_path / "out").exists()
