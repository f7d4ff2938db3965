"""Channels that add nothing, or what others can compensate for, go without a trace; how many go, and which can't."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.pruning import PruneOverride, Pruning
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import Part
from enginewright.passes.sparsity.feed_forwards import feed_forwards
from enginewright.passes.sparsity.fit_removed import ERROR, PLAIN_ERROR
from enginewright.passes.sparsity.prune_channels import KEPT, PruneChannels
from enginewright.runtime.shared.errors import PassError, RecipeError
from tests.passes.small_programs import Shape, decoder
from tests.passes.sparsity.pruned import Change, assert_lossless, changed, logits, normal, prune

CLOSING = {"Llama": "mlp.down_proj.weight", "Phi3": "mlp.down_proj.weight", "GPTNeoX": "mlp.dense_4h_to_h.weight"}
OPENING = {"Llama": "mlp.up_proj.weight", "Phi3": "mlp.gate_up_proj.weight", "GPT2": "mlp.c_fc.weight"}
DEAD = range(5, 101, 3)  # 32 of 128


def widths(program: Program) -> list[int]:
    return [network.width for network in feed_forwards(program)[0]]


def zero_columns(value: torch.Tensor) -> None:
    value[:, list(DEAD)] = 0


def zero_rows_of_up(value: torch.Tensor) -> None:
    value[[i + len(value) - 128 for i in DEAD]] = 0


def nearly_twice(value: torch.Tensor) -> None:
    noise = torch.randn(64, value.shape[1], generator=torch.Generator().manual_seed(3))
    value[64:] = value[:64] + 0.02 * noise


ALIKE: dict[str, Change] = {"gate_proj.weight": nearly_twice, "up_proj.weight": nearly_twice}
"""Every channel has another that is nearly the same."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {CLOSING["Llama"]: zero_columns}),
        ("Llama", {OPENING["Llama"]: zero_rows_of_up}),
        ("Phi3", {OPENING["Phi3"]: zero_rows_of_up}),
        ("GPTNeoX", {CLOSING["GPTNeoX"]: zero_columns}),
    ],
)
def test_dead_channels_go_without_a_trace(family: str, changes: dict[str, Change]) -> None:
    program = changed(family, changes)
    # Products of the same numbers in other groups: rounding of float32.
    record = assert_lossless(program, PruneChannels(), Pruning(channels=0.25), 2e-5)
    assert widths(program) == [96, 96]
    left = [i for i in range(128) if i not in DEAD]
    for name in program.weights:
        if name.endswith(("gate_proj.weight", "up_proj.weight", "dense_h_to_4h.weight", "dense_h_to_4h.bias")):
            sources = [i for p in program.weights[name].parts(0) for i in range(p.start, p.stop)]
            assert sources == left + ([128 + i for i in left] if family == "Phi3" else [])
    assert record.parameters_removed == 2 * 32 * (64 * (2 if family == "GPTNeoX" else 3) + (family == "GPTNeoX"))


def test_dead_channels_of_a_wider_transposed_network() -> None:
    def change(value: torch.Tensor) -> None:  # GPT2 has [K, N]
        value[:64] = 0

    program = changed("GPT2", {"mlp.c_proj.weight": change})
    assert_lossless(program, PruneChannels(), Pruning(channels=0.25), 2e-5)
    assert widths(program) == [192, 192]


def test_channels_that_are_others_over_again_are_made_up_for() -> None:
    def same_gate(value: torch.Tensor) -> None:
        value[list(DEAD)] = value[[0, 1] * 16]

    def multiples_of_up(value: torch.Tensor) -> None:
        value[list(DEAD)] = value[[0, 1] * 16] * torch.linspace(-2, 2, 32)[:, None]

    changes: dict[str, Change] = {"gate_proj.weight": same_gate, "up_proj.weight": multiples_of_up}
    program = changed("Llama", changes)
    whole = program.copy()
    # Solved with a damping of 1e-7 of the mean moment, which is what is lost.
    record = assert_lossless(program, PruneChannels(), Pruning(channels=0.25), 1e-4)
    assert widths(program) == [96, 96]
    errors = {f.where: f.value for f in record.metrics if f.name == ERROR}
    assert len(errors) == 2 and max(errors.values()) < 1e-7
    assert min(f.value for f in record.metrics if f.name == PLAIN_ERROR) > 1e-5

    expected = logits(whole)[0]
    prune(whole, PruneChannels(), Pruning(channels=0.25, correct=False))
    assert float((logits(whole)[0] - expected).abs().max()) > 1e-3  # left alone, they are missed


def test_what_is_made_up_for_is_nearer_on_tokens_that_were_not_fitted() -> None:
    errors = []
    for correct in (True, False):
        program = changed("Llama", ALIKE)
        expected = logits(program)
        prune(program, PruneChannels(), Pruning(channels=0.5, correct=correct))
        assert widths(program) == [64, 64]
        errors.append(sum(float((a - b).square().sum()) for a, b in zip(logits(program), expected, strict=True)))
    assert errors[0] < 0.5 * errors[1]


def test_weights_that_make_up_stay_lazy_and_say_where_they_are_from() -> None:
    program = changed("Llama", ALIKE)
    prune(program, PruneChannels(), Pruning(channels=0.5))
    expr = program.weights["model.layers.1.mlp.down_proj.weight"]
    assert expr.parts(0) == (Part("model.layers.1.mlp.down_proj.weight", 0, 64),)
    columns = [i for p in expr.parts(1) for i in range(p.start, p.stop)]
    rows = [i for p in program.weights["model.layers.1.mlp.up_proj.weight"].parts(0) for i in range(p.start, p.stop)]
    assert columns == rows and len(rows) == 64


@pytest.mark.parametrize(
    ("share", "groups", "kept"), [(1 / 3, 1, 96), (1 / 3, 64, 64), (0.13, 1, 96), (0.6, 32, 64), (0.75, 1, 32)]
)
def test_what_is_left_can_be_stored(share: float, groups: int, kept: int) -> None:
    program = normal("Llama")
    record = prune(program, PruneChannels(), Pruning(channels=share, multiple=groups))
    assert widths(program) == [kept, kept]
    assert [f.value for f in record.metrics if f.name == KEPT] == [kept, kept]


def test_a_width_that_is_no_multiple_of_a_panel_loses_single_channels() -> None:
    program = decoder(Shape(vocabulary=256))  # 48 channels
    prune(program, PruneChannels(), Pruning(channels=0.3))
    assert widths(program) == [34, 34]


def test_overrides_by_layer() -> None:
    program = normal("Llama")
    overrides = (PruneOverride(layers="model.layers.0", channels=0.5), PruneOverride(layers="*.1.mlp.*", channels=0.0))
    prune(program, PruneChannels(), Pruning(overrides=overrides))
    assert widths(program) == [64, 128]
    with pytest.raises(RecipeError, match=r"'\*\.7\.\*' matches nothing"):
        prune(program, PruneChannels(), Pruning(overrides=(PruneOverride(layers="*.7.*", channels=0.5),)))


def test_what_must_not_be_pruned() -> None:
    program = normal("Llama")
    with pytest.raises(PassError, match=r"leaves model\.layers\.0\.mlp\.down_proj none of its 128 channels"):
        prune(program, PruneChannels(), Pruning(channels=0.9))
    with pytest.raises(PassError, match="no channel of this model can go"):
        prune(program, PruneChannels(), Pruning(channels=0.05))
    with pytest.raises(PassError, match="no calibration tokens"):
        PruneChannels().run(program, PassContext(recipe=PassOptions(prune=Pruning(channels=0.5))))
    assert widths(program) == [128, 128]
