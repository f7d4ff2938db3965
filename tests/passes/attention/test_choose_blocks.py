"""ChooseBlocks: which layers choose, and that a chunk's tokens choose alone."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes.attention.choose_blocks import ChooseBlocks
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.fusion.fuse_rope_kv_write import FuseRopeKvWrite
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.errors import RecipeError
from tests.passes.small_programs import PagedEvaluation, Shape, decoder, random_sequences

ew = torch.ops.ew


def choosing(shape: Shape, options: ContextOptions | None) -> Program:
    program = decoder(shape)
    LowerAttention().run(program, PassContext())
    ChooseBlocks().run(program, PassContext(recipe=PassOptions(adaptive_context=options)))
    return program


def test_layers_without_a_window_choose_but_the_first() -> None:
    program = choosing(Shape(windows=(0, 8, 0, 0)), ContextOptions(best=96, whole_layers=1, below=50))
    choices = [bound_arguments(n)["choice"] for n in program.nodes_of(ew.paged_attention.default)]
    assert choices == [None, None, [2, 8, 3, 50], [2, 8, 3, 50]]
    FuseRopeKvWrite().run(program, PassContext())
    lowered = lower_program(program).program
    assert {g.name: g.summaries for g in lowered.cache_groups} == {"full": True, "window8": False}
    steps = [s.attrs for s in lowered.steps if s.op == "paged_attention"]
    assert [s.get("best_blocks") for s in steps] == [None, None, 3, 3]
    assert (steps[2]["first_blocks"], steps[2]["last_blocks"], steps[2]["all_below"]) == (2, 8, 50)


def test_nothing_is_chosen_where_nobody_asks() -> None:
    program = choosing(Shape(), None)
    assert not ChooseBlocks().wanted(PassContext())
    assert all(bound_arguments(n)["choice"] is None for n in program.nodes_of(ew.paged_attention.default))
    assert not any(group.summaries for group in program.cache_groups)


def test_summaries_take_their_share_of_a_cache() -> None:
    (plain,) = choosing(Shape(), None).cache_groups
    (group,) = choosing(Shape(), ContextOptions(best=32, whole_layers=1)).cache_groups
    channels = -(-group.key_head_size // 16) * 16
    more = len(group.layers) * group.kv_heads * 2 * 2 * channels  # the least and the greatest, in bf16
    assert cache_block_bytes(group) == cache_block_bytes(plain) + more


def test_chunks_change_nothing_and_the_choice_something() -> None:
    shape, (sequence,) = Shape(windows=(0, 0)), random_sequences((150,), 67)
    options = ContextOptions(best=32, first=0, last=0, whole_layers=0)
    whole, chunked = (PagedEvaluation(choosing(shape, options), seed=i) for i in (0, 1))
    expected = whole.run({"a": sequence})
    for part in (sequence[:70], sequence[70:71], sequence[71:149]):
        chunked.run({"a": part})
    torch.testing.assert_close(chunked.run({"a": sequence[149:]})[-1], expected[-1], rtol=1e-4, atol=1e-4)
    plain = PagedEvaluation(choosing(shape, None)).run({"a": sequence})
    assert (plain[-1] - expected[-1]).abs().max() > 1e-2
    everything = options.model_copy(update={"best": 4096})
    torch.testing.assert_close(PagedEvaluation(choosing(shape, everything)).run({"a": sequence}), plain)


def test_a_section_without_an_effect_is_refused() -> None:
    with pytest.raises(RecipeError, match="adaptive_context: no layer of the model would choose anything"):
        choosing(Shape(windows=(0, 8)), ContextOptions(best=32, whole_layers=1))


@pytest.mark.parametrize("name", ["best", "first", "last"])
def test_numbers_of_whole_blocks(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 100, which isn't a multiple of 32"):
        ContextOptions.model_validate({"best": 64, name: 100})
