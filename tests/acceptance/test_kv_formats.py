"""Every weight format with every KV cache: bit for bit the same in any batch, and as close as its bits allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.cpu.compile.step_runner import cache_memory
from enginewright.plugins.native.executable import isas
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.kv_formats import CacheDtype

from .driver import Driver
from .test_formats import RECIPES
from .test_invariance import run

WEIGHTS = ("f32", "bf16", "int8", "int4", "offsets", "fp8")
CACHES: dict[CacheDtype, float] = {"f32": 0.0, "bf16": 0.02, "i8": 0.04, "fp8": 0.15}
"""And how far a logit may be from those of 32-bit caches, as a share of the largest: some times their rounding."""
AFTER_ROUNDING = 3
"""Times that, where activations are rounded too: what a cache changes has some of them fall to the other side, which in
a random model of 64 channels shows (0.045 at most was seen, of bf16 and i8)."""

# Around the tile of 32 keys and the split of 512, where an order could slip.
LENGTHS = (1, 31, 33, 100, 513, 530)


@pytest.fixture(scope="module", params=WEIGHTS)
def bundle(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp(f"kv-{request.param}-") / "one.bundle"
    model = tiny_model("Llama", max_position_embeddings=1024)
    export(model, path, recipe=RECIPES.get(request.param, request.param), targets=["cpu"], kv_cache="f32")
    return path


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("cache", list(CACHES))
def test_alone_in_a_batch_and_in_chunks(cache: CacheDtype, isa: str, bundle: Path) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(3, 256, n).tolist() for n in LENGTHS]
    alone = run(bundle, texts, chunk=4096, together=False, threads=1, isa=isa, cache=cache)
    for chunk, together, threads in ((4096, True, 2), (16, False, 1), (37, True, 2)):
        other = run(bundle, texts, chunk=chunk, together=together, threads=threads, isa=isa, cache=cache)
        for a, b in zip(alone, other, strict=True):
            assert a.tobytes() == b.tobytes()
    some = [text[:40] for text in texts]
    decoded = run(bundle, some, chunk=1, together=True, threads=2, isa=isa, cache=cache)
    for a, b in zip(alone, decoded, strict=True):
        assert a[:40].tobytes() == b.tobytes()
    exact = run(bundle, texts, chunk=4096, together=False, threads=1, isa=isa, cache="f32")
    off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(alone, exact, strict=True))
    exact_activations = bundle.parent.name.startswith(("kv-f32", "kv-fp8"))
    assert off <= CACHES[cache] * (1 if exact_activations else AFTER_ROUNDING)
    assert (off > 0) == (cache != "f32")


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("size", [16, 64, 256])
def test_ends_of_8_bits_alone_in_a_batch_and_in_chunks(
    size: int, isa: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """Queries on both sides of a run's border are in one chunk, or in several."""
    model = tiny_model("Llama", head_dim=size, max_position_embeddings=1024)
    for cache in ("f32", "k4v4"):
        export(model, tmp_path / cache, recipe="f32", targets=["cpu"], kv_cache=cache)
    rng = np.random.default_rng(4)
    texts = [rng.integers(3, 256, n).tolist() for n in (33, 384, 513, 700)]
    alone = run(tmp_path / "k4v4", texts, chunk=4096, together=False, threads=1, isa=isa)
    for chunk, together, threads in ((4096, True, 2), (16, False, 1), (37, True, 2), (129, True, 1)):
        other = run(tmp_path / "k4v4", texts, chunk=chunk, together=together, threads=threads, isa=isa)
        for a, b in zip(alone, other, strict=True):
            assert a.tobytes() == b.tobytes()
    exact = run(tmp_path / "f32", texts, chunk=4096, together=False, threads=1, isa=isa)
    off = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(alone, exact, strict=True)]
    assert 0 < off[1] < 0.05, "384 tokens have 8 bits"
    assert off[3] < 0.3, "and of 700, some have 4"


@pytest.mark.parametrize(("size", "kv_heads"), [(64, 1), (128, 2), (256, 4)])
def test_one_step_writes_both_caches_as_four_steps_do(
    size: int, kv_heads: int, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """The write that is fused with the rotation leaves the same bytes in both caches, and logits have the same bits."""
    model = tiny_model("Llama", head_dim=size, num_key_value_heads=kv_heads, max_position_embeddings=1024)
    recipe = load_recipe("f32")
    for name, passes in (("fused", {}), ("apart", {"fuse_rope_kv_write": False})):
        chosen = recipe.model_copy(update={"passes": passes})
        export(model, tmp_path / name, recipe=chosen, targets=["cpu"], kv_cache="k4v4")
    writes = {
        name: [
            (step.op, step.attrs.get("has_ends", False))
            for step in Bundle.open(tmp_path / name).program("cpu").steps
            if step.op in ("rope", "kv_write", "rope_kv_write")
        ]
        for name in ("fused", "apart")
    }
    layers = model.config.num_hidden_layers
    assert writes["fused"] == [("rope_kv_write", True)] * layers
    assert sorted(writes["apart"]) == [("kv_write", False)] * 2 * layers + [("rope", False)] * 2 * layers
    text = np.random.default_rng(6).integers(3, 256, 1 + 3 + 17 + 64 + 500 + 1).tolist()
    for isa in isas():
        results = []
        for name in writes:
            with Driver(tmp_path / name, 1, len(text) // 32 + 1, threads=2, isa=isa) as driver:
                rest, rows = list(text), []
                for count in (1, 3, 17, 64, 500, 1):
                    rows.append(driver.step({0: rest[:count]})[0])
                    rest = rest[count:]
                results.append([array.tobytes() for array in (*rows, *cache_memory(driver.program))])
        assert results[0] == results[1], isa


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bf16"), ("int8", "i8"), ("fp8", "fp8")])
def test_an_export_measures_what_its_cache_costs(
    name: str, dtype: CacheDtype, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    report = export(tiny_model("Llama"), tmp_path / "b", recipe="int8", kv_cache=name)
    (rounding,) = (p for p in report.passes if p.name == "round_kv_cache")
    assert (rounding.target, rounding.matched > 0) == ("cpu", True)
    assert rounding.measurement is not None and not rounding.measurement.unchanged
    assert {g.dtype for g in Bundle.open(tmp_path / "b").program("cpu").cache_groups} == {dtype}


def test_a_cache_that_costs_more_than_the_recipe_allows(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    tight = RECIPES["offsets"]
    assert not isinstance(tight, str)
    strict = tight.model_copy(
        update={"weights": type(tight.weights)(), "budget": tight.budget.model_copy(update={"max_kl": 1e-9})}
    )
    with pytest.raises(VerificationError, match="round_kv_cache"):
        export(tiny_model("Llama"), tmp_path / "b", recipe=strict, kv_cache="fp8")
    assert not list(tmp_path.iterdir())
