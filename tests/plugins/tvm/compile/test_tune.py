"""Schedules of the tvm target: no bit depends on them, the same records give the same bytes, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.native.processor import processor_features
from enginewright.plugins.steps.timed_steps import Case, Timed
from enginewright.plugins.steps.x86_levels import FEATURES, LEVELS, LevelName
from enginewright.plugins.tvm.compile import tune as module
from enginewright.plugins.tvm.compile.schedules import OWN, Schedule, from_json, products_of, to_json
from enginewright.plugins.tvm.compile.tune import CANDIDATES, fits, tune
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.errors import BundleError, CapacityError, RequestError, TargetError
from tests.conftest import make_tiny_model

OTHER = Schedule(rows=4, row_block=7, groups=3, streams=2, unroll=3)
"""None of it divides the sizes of the model."""
PROMPTS = [np.random.default_rng(7).integers(3, 250, n).tolist() for n in (1, 5, 12, 13, 70)]


LEVEL: LevelName = "v2"
TVM = ("--target", "tvm", "--trust", "code")
"""Compiled the fastest: it has the smallest blocks of sums."""


def exported(path: Path, name: str = "f32", level: LevelName = LEVEL) -> Path:
    recipe = load_recipe(name).model_copy(update={"tvm": TvmOptions(levels=(level,))})
    export(make_tiny_model("Llama"), path, recipe=recipe, targets=("tvm",))
    return path


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("tvm") / "tiny.bundle")


@pytest.fixture
def bundle(fresh: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fresh, tmp_path / "own.bundle")


def logits(bundle: Path) -> list[FloatArray]:
    with LLM(bundle, target="tvm", trust="code", threads=2) as llm:
        return [llm.logits(prompt) for prompt in PROMPTS]


def records_for(bundle: Path, path: Path, schedule: Schedule = OTHER) -> Path:
    path.write_text(to_json(dict.fromkeys(products_of(Bundle.open(bundle, trust="code").program("tvm")), schedule)))
    return path


def of_tvm(bundle: Path) -> set[str]:
    folder = bundle / "targets/tvm"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def check_bits(bundle: Path, tmp_path: Path, level: LevelName = LEVEL) -> None:
    before = logits(bundle)
    tuned = tune(Bundle.open(bundle, trust="code"), records=records_for(bundle, tmp_path / "records.json"))
    assert tuned.path is not None and tuned.path.is_file() and set(tuned.records.values()) == {OTHER}
    assert (bundle / f"targets/tvm/step-{level}.so").read_bytes() != tuned.path.read_bytes()
    Bundle.open(bundle, trust="code").verify_hashes()
    for one, other in zip(before, logits(bundle), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.matrix
def test_no_bit_depends_on_records_which_give_the_same_bytes_each_time(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy.bundle")
    check_bits(bundle, tmp_path)
    tune(Bundle.open(copy, trust="code"), records=tmp_path / "records.json")
    assert of_tvm(copy) == of_tvm(bundle)
    for name in of_tvm(copy):
        assert (copy / "targets/tvm" / name).read_bytes() == (bundle / "targets/tvm" / name).read_bytes(), name
    name_kept = next(name for name in of_tvm(bundle) if name.startswith(f"schedules-{LEVEL}-"))
    assert (bundle / "targets/tvm" / name_kept).read_bytes() == (tmp_path / "records.json").read_bytes()
    again = records_for(bundle, tmp_path / "again.json", Schedule(unroll=2))
    tune(Bundle.open(bundle, trust="code"), records=again)
    assert len(of_tvm(bundle)) == len(of_tvm(copy)) and name_kept not in of_tvm(bundle)  # what was tuned before is gone
    Bundle.open(bundle, trust="code").verify_hashes()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "level"),
    [("f32", "v3"), ("f32", "v4"), ("bf16", "v3"), ("fp8", "v3"), ("int8", "v3"), ("int8", "v4-vnni"), ("int4", "v3")],
)
def test_no_bit_depends_on_records_of_other_levels_and_types(name: str, level: LevelName, tmp_path: Path) -> None:
    if not FEATURES[level] <= set(processor_features()):
        pytest.skip(f"this processor isn't of x86-64-{level}")
    check_bits(exported(tmp_path / "b", name, level), tmp_path, level)


def pretend(monkeypatch: pytest.MonkeyPatch, *, last: float) -> None:
    """Four steps at once are faster everywhere; the whole program is by ``last``. What is timed runs."""
    pairs = iter([1.2 if (name, value) == ("unroll", 4) else 1.0 for _ in range(9) for name, value in values()])

    def compared(one: Timed, other: Timed, cases: Sequence[Case], rounds: int) -> dict[str, float]:
        assert all(contender.time(i) > 0 for contender in (one, other) for i in range(len(cases)))
        gain = last if rounds == module._LAST_ROUNDS else next(pairs)
        return {case.name: gain for case in cases}

    monkeypatch.setattr(module, "compare", compared)
    monkeypatch.setattr(module, "_SECONDS", 1e-6)


def values() -> list[tuple[str, int]]:
    return [(n, v) for n, of in CANDIDATES.items() for v in of if fits("linear f32 1x1", n, v, LEVELS[LEVEL])]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two choices a product."""
    monkeypatch.setattr(module, "CANDIDATES", {"unroll": (2, 4)})
    monkeypatch.setitem(globals(), "CANDIDATES", {"unroll": (2, 4)})


@pytest.mark.matrix
@pytest.mark.usefixtures("few")
def test_what_is_faster_is_compiled_and_kept(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_tvm(bundle)
    pretend(monkeypatch, last=1.1)
    result = CliRunner().invoke(app, ["tune", str(bundle), *TVM, "--seconds", "600", "--threads", "1"])
    assert result.exit_code == 0, result.output
    products = products_of(Bundle.open(bundle, trust="code").program("tvm"))
    new = sorted(of_tvm(bundle) - before)
    assert [name.partition(f"-{LEVEL}-")[0] for name in new] == ["schedules", "step"]
    records = from_json((bundle / "targets/tvm" / new[0]).read_bytes(), "records")
    assert records == dict.fromkeys(products, OWN.model_copy(update={"unroll": 4}))
    assert result.stdout.count("1.200x  faster") == len(products) and "unroll 4" in result.stdout
    assert result.stdout.rstrip().endswith(f"{new[1]} for x86-64-{LEVEL}")
    with LLM(bundle, target="tvm", trust="code") as llm:
        assert llm.logits([5, 6, 7]).shape[0] == 3


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("arguments", "last"),
    [pytest.param((), 1.0, marks=pytest.mark.matrix), pytest.param(("--dry-run",), 1.1, marks=pytest.mark.soak)],
)
def test_the_bundle_stays_as_it_was(
    arguments: tuple[str, ...], last: float, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the whole program isn't faster, or nothing is to be written."""
    before = of_tvm(bundle), (bundle / "targets/tvm/manifest.json").read_bytes()
    pretend(monkeypatch, last=last)
    options = [*TVM, "--seconds", "600", "--threads", "1", "--json", *arguments]
    result = CliRunner().invoke(app, ["tune", str(bundle), *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (
        document["path"] is None and bool(document["records"]) == (last > 1) and document["gain"] == pytest.approx(last)
    )
    assert (of_tvm(bundle), (bundle / "targets/tvm/manifest.json").read_bytes()) == before


@pytest.mark.matrix
def test_a_full_disk_leaves_the_bundle_as_it_was(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_tvm(bundle)

    def full(root: Path, target: str, manifest: object) -> None:
        raise CapacityError("no space")

    monkeypatch.setattr(module, "replace_manifest", full)
    with pytest.raises(CapacityError):
        tune(Bundle.open(bundle, trust="code"), records=records_for(bundle, tmp_path / "records.json"))
    assert of_tvm(bundle) == before
    Bundle.open(bundle, trust="code").verify_hashes()


def test_too_short_a_time_measures_nothing_more(bundle: Path) -> None:
    before = of_tvm(bundle)
    result = CliRunner().invoke(app, ["tune", str(bundle), *TVM, "--seconds", "0.001"])
    assert result.exit_code == 0, result.output
    count = len(products_of(Bundle.open(bundle, trust="code").program("tvm"))) * len(values())
    assert f"0.001 seconds were too short for {count} of {count} choices: pass a larger --seconds" in result.stdout
    assert of_tvm(bundle) == before


@pytest.mark.matrix
def test_records_of_a_product(fresh: Path) -> None:
    products = products_of(Bundle.open(fresh, trust="code").program("tvm"))
    assert all(name.split()[:2] == ["linear", "f32"] for name in products) and len(products) > 3


def test_candidates_that_are_no_other_schedule_are_left_out() -> None:
    wide, narrow = LEVELS["v4"], LEVELS["v2"]
    assert fits("linear f32 3x5", "streams", 2, wide) and fits("quantized_linear i8 3x5", "unroll", 2, narrow)
    assert not fits("quantized_linear i8 3x5", "streams", 2, wide) and not fits("linear f32 3x5", "streams", 2, narrow)
    assert fits("linear f32 3x5", "rows", 8, wide) and not fits("linear f32 3x5", "rows", 4, narrow)


def test_refusals(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle, trust="code")
    with pytest.raises(RequestError, match="seconds: 0 is out of range"):
        tune(opened, seconds=0)
    with pytest.raises(BundleError, match=r"absent\.json: No such file"):
        tune(opened, records=tmp_path / "absent.json")
    (tmp_path / "other.json").write_text('{"linear f32 3x5": {"rows": 2}}')
    with pytest.raises(BundleError, match=r"other\.json: the bundle has no product linear f32 3x5\n"):
        tune(opened, records=tmp_path / "other.json")
    for text in ("[]", "{", '{"a": {"rows": 0}}', '{"a": {"columns": 1}}', '{"a": 3}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BundleError, match=r"bad\.json: not records of optimize tune --target tvm"):
            tune(opened, records=tmp_path / "bad.json")
    result = CliRunner().invoke(app, ["tune", str(bundle), "--target", "onnx"])
    assert result.exit_code == 7 and "no target 'onnx'; it has tvm" in result.output.replace("\n", " ")


@pytest.mark.matrix
def test_our_kernels_have_no_schedules(tmp_path: Path) -> None:
    recipe = load_recipe("f32").model_copy(update={"tvm": TvmOptions(levels=(LEVEL,), kernels="enginewright")})
    export(make_tiny_model("Llama"), tmp_path / "b", recipe=recipe, targets=("tvm",))
    with pytest.raises(TargetError, match=r"products of target tvm are enginewright's kernels.*\n.*target cpu"):
        tune(Bundle.open(tmp_path / "b", trust="code"))
