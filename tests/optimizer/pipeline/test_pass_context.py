"""An export asks its passes, those of other packages included, if they need calibration tokens, and gives them some."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.export import export
from enginewright.optimizer.pipeline.pass_context import needs_tokens, pass_context
from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe, with_cache
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.progress import silent
from tests.passes.small_programs import decoder

PACKAGE = '''
"""A package's pass that looks at what the model gives for calibration tokens."""

from enginewright.passes.framework.base import Metric, Pass, PassContext, PassResult
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program


class LargestLogit(Pass):
    """Measures the largest logit of the calibration tokens, unless weights are to be rounded."""

    name = "largest_logit"

    def needs_tokens(self, context: PassContext) -> bool:
        return context.recipe.weights.exact

    def call(self, program: Program, context: PassContext) -> PassResult:
        if not context.recipe.weights.exact:
            return PassResult()
        largest = max(program.evaluate(packed_inputs(program, [s]))[0].abs().max().item() for s in context.calibration)
        tokens = sum(map(len, context.calibration))
        return PassResult(1, metrics=[Metric("model", "tokens", tokens), Metric("model", "largest logit", largest)])
'''

RECIPE = """
name = "{name}"

[calibration]
tokens = 160
sequence_length = 40

[weights]
default = {{ storage = "{storage}", activation = "{activation}" }}

[passes]
largest_logit = {on}
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package as pip leaves it: a module, and what it declares."""
    site = tmp_path / "site"
    declared = site / "largest_logit-1.0.dist-info"
    declared.mkdir(parents=True)
    (site / "largest_logit.py").write_text(PACKAGE)
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: largest-logit\nVersion: 1.0\n")
    (declared / "entry_points.txt").write_text("[enginewright.passes]\nlargest_logit = largest_logit:LargestLogit\n")
    monkeypatch.syspath_prepend(site)


def recipe(folder: Path, name: str, storage: str = "f32", activation: str = "float", on: bool = True) -> Recipe:
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(name=name, storage=storage, activation=activation, on=str(on).lower()))
    return load_recipe(path)


@pytest.mark.usefixtures("outside")
def test_a_pass_of_another_package_gets_the_tokens_that_it_needs(tiny_folder: Path, tmp_path: Path) -> None:
    report = export(tiny_folder, tmp_path / "b", recipe=recipe(tmp_path, "on"))
    (measured,) = (p for p in report.passes if p.name == "largest_logit")
    values = {m.name: m.value for m in measured.figures}
    assert report.calibration is not None and report.calibration.origin == "sampled from the model, seed 0"
    assert values["tokens"] == report.calibration.coverage.tokens == 160
    assert values["largest logit"] > 0


@pytest.mark.usefixtures("outside")
def test_only_a_pass_that_is_on_is_asked_and_sees_its_options(tmp_path: Path) -> None:
    assert needs_tokens(recipe(tmp_path, "on"), ("cpu",))
    assert not needs_tokens(recipe(tmp_path, "off", on=False), ("cpu",))
    assert not needs_tokens(recipe(tmp_path, "rounded", storage="bf16", activation="bf16"), ("cpu",))


@pytest.mark.usefixtures("outside")
def test_without_tokens_the_pass_and_the_page_are_named(tmp_path: Path) -> None:
    passes, _ = choose_passes(recipe(tmp_path, "on").passes)
    (added,) = (p for p in passes if p.name == "largest_logit")
    with pytest.raises(PassError, match="the pass largest_logit has no calibration tokens") as caught:
        added.run(decoder(), PassContext())
    assert "calibration.md" in str(caught.value.hint)


def test_a_pass_reads_the_recipes_own_sections(tmp_path: Path) -> None:
    sections = "adaptive_context = { best = 64 }\nengines = { offsets = 'refuse' }\nattention = { kv_heads = 1 }\n"
    (tmp_path / "mine.toml").write_text(f"name = 'mine'\n{sections}")
    recipe = load_recipe(tmp_path / "mine.toml")
    read = pass_context(recipe, frozenset(), (), scratch=None, progress=silent).recipe
    resolved = {"kv_cache": CacheOptions(dtype="f32")}
    assert {n: getattr(read, n) for n in PassOptions.model_fields} == {
        n: resolved.get(n, getattr(recipe, n)) for n in PassOptions.model_fields
    }
    assert read.cache == "f32" and with_cache(recipe, "int8").kv_cache == CacheOptions(dtype="int8")


INT4 = "{ storage = 'int4', group_size = 32, activation = 'int8', activation_group_size = 32 }"
SPARSE = "{ storage = 'bf16', activation = 'bf16', sparsity = '2:4' }"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prune = { drop = ['model.layers.0'] }", False),
        ("prune = { layers = 1 }", True),
        ("prune = { channels = 0.5 }", True),
        ("prune = { heads = 0.5 }", True),
        (f"weights = {{ method = 'gptq', default = {INT4} }}", True),
        (f"weights = {{ method = 'awq', default = {INT4} }}", True),
        (f"weights = {{ sparsify = 'magnitude', default = {SPARSE} }}", False),
        (f"weights = {{ sparsify = 'wanda', default = {SPARSE} }}", True),
    ],
)
def test_our_passes_need_tokens_by_their_options(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"name = 'mine'\n{text}\n")
    assert needs_tokens(load_recipe(tmp_path / "mine.toml"), ("cpu",)) == expected
