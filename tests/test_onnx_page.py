"""The scripts of docs/build/onnx.md, which run a bundle's files without Enginewright, run as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.plugins import cpu as kernels
from enginewright.plugins.onnx import kernels as operators
from enginewright.runtime.engine.llm import LLM
from tests.doc_snippets import run_python

PAGE = Path(__file__).parents[1] / "docs" / "build" / "onnx.md"
RECIPE = 'name = "both"\ntargets = ["onnx"]\n[onnx]\nkernels = true\n'


@pytest.fixture
def bundle(tiny_folder: Path, tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime", minversion="1.25")
    (tmp_path / "both.toml").write_text(RECIPE, encoding="utf-8")
    export(tiny_folder, tmp_path / "tiny.bundle", recipe=tmp_path / "both.toml")
    return tmp_path / "tiny.bundle"


def test_the_decode_loop_gives_what_the_bundle_does(bundle: Path, tmp_path: Path) -> None:
    """16 greedy tokens of the standard file, and the first one of the kernels variant."""
    libraries = [
        file for part in (kernels, operators) for folder in part.__path__ for file in Path(folder).glob("lib*.so")
    ]
    assert len(libraries) == 2
    here = tmp_path / "here"
    here.mkdir()
    done = run_python(PAGE, here, {"smollm2.bundle": bundle} | {file.name: file for file in libraries})
    with LLM(bundle, target="onnx", provider="cpu", context=64) as llm:
        ids = llm.tokenizer.encode("The capital of France is")
        (expected,) = llm.generate([ids], ew.SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
        first = llm.tokenizer.decode(expected.token_ids[:1])
    assert done.stdout.rstrip("\n") == f"{expected.text}\n{first}".rstrip("\n")
