"""Layers that add nothing go without a trace; of others those go that are missed least; caches keep their numbers."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.ir.program import Program
from enginewright.passes.sparsity.drop_layers import KL, SIMILARITY, DropLayers
from enginewright.passes.sparsity.layers import find_layers
from enginewright.runtime.shared.errors import PassError, RecipeError
from tests.passes.small_programs import Shape, decoder
from tests.passes.sparsity.pruned import Change, assert_lossless, changed, logits, normal, prune


def paths(program: Program) -> list[str]:
    return [layer.path for layer in find_layers(program)[0]]


def zero(value: torch.Tensor) -> None:
    value.zero_()


def of_layer(name: str, *ends: str) -> dict[str, Change]:
    return {f"{name}.{end}": zero for end in ends}


@pytest.mark.parametrize(
    ("family", "dead", "changes"),
    [
        ("Llama", "model.layers.1", of_layer("layers.1", "self_attn.o_proj.weight", "mlp.down_proj.weight")),
        (
            "GPTNeoX",
            "gpt_neox.layers.0",
            of_layer("layers.0", "dense.weight", "dense.bias", "dense_4h_to_h.weight", "dense_4h_to_h.bias"),
        ),
    ],
)
def test_a_layer_that_adds_nothing_goes_without_a_trace(family: str, dead: str, changes: dict[str, Change]) -> None:
    ends = {end.removeprefix("layers.0.").removeprefix("layers.1."): change for end, change in changes.items()}
    number = dead.rsplit(".", 1)[1]
    modules = {"GPTNeoX": {"dense": "attention.", "dense_4h_to_h": "mlp."}}.get(family, {})
    named = {f"layers.{number}.{modules.get(e.split('.')[0], '')}{e}": c for e, c in ends.items()}
    program = changed(family, named, num_hidden_layers=3)
    record = assert_lossless(program, DropLayers(), Pruning(layers=1), 0.0)
    assert len(paths(program)) == 2 and dead not in paths(program)
    figures = {f.name: f.value for f in record.metrics}
    assert figures[KL] == 0 and figures[SIMILARITY] == pytest.approx(1)


def test_what_is_left_keeps_its_numbers_and_its_cache() -> None:
    program = decoder(Shape(windows=(0, 8, 0, 8), vocabulary=256))
    prune(program, DropLayers(), Pruning(drop=("layers.1",)))
    assert paths(program) == ["layers.0", "layers.2", "layers.3"]
    LowerAttention().run(program, PassContext())
    assert [(g.name, g.layers) for g in program.cache_groups] == [("full", (0, 2)), ("window8", (3,))]
    assert {n for n in program.inputs if n.startswith("k_cache:")} == {"k_cache:0", "k_cache:2", "k_cache:3"}


@pytest.mark.matrix
def test_the_layers_that_are_missed_least_go() -> None:
    def small(value: torch.Tensor) -> None:
        value.mul_(0.01)

    shrunk = {f"layers.{i}.{end}": small for i in (1, 3) for end in ("self_attn.o_proj.weight", "mlp.down_proj.weight")}
    program = changed("Llama", shrunk, num_hidden_layers=5)
    expected = logits(program)
    record = prune(program, DropLayers(), Pruning(layers=2))
    assert paths(program) == ["model.layers.0", "model.layers.2", "model.layers.4"]
    costs = [f.value for f in record.metrics if f.name == KL]
    assert 0 < costs[0] < costs[1] < 0.01
    for now, before in zip(logits(program), expected, strict=True):
        assert 0 < float((now - before).abs().max()) < 0.5
    # 2 of q and o, 2 of k and v of half the heads, 3 of the feed-forward network, two norms
    assert record.parameters_removed == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)


@pytest.mark.parametrize("family", ["Gemma2", "GPT2"])
def test_layers_are_found_in_every_spelling(family: str) -> None:
    program = normal(family)
    layers, rejected = find_layers(program)
    assert len(layers) == 2 and not rejected
    assert layers[1].before is layers[0].behind


def test_what_must_not_be_dropped() -> None:
    program = normal("Llama")
    with pytest.raises(PassError, match="2 layers are to go, and the model has 2"):
        prune(program, DropLayers(), Pruning(layers=2))
    with pytest.raises(RecipeError, match=r"prune\.drop: the pattern 'model\.layers\.9' matches nothing"):
        prune(program, DropLayers(), Pruning(drop=("model.layers.9",)))
    with pytest.raises(PassError, match="drop_layers has no calibration tokens"):
        DropLayers().run(program, PassContext(recipe=PassOptions(prune=Pruning(layers=1))))
