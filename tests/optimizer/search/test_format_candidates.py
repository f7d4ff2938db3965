"""The candidates if a recipe names none: formats that kernels read, except those that others beat."""

from __future__ import annotations

from enginewright.optimizer.search.format_candidates import Tried, try_formats, undominated, writable_formats
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.runtime.shared.weight_formats import FORMATS
from tests.optimizer.search.formats_prepared import BF16, F32, INT4_32, INT8, before_formats


def test_every_format_with_a_kernel_and_only_common_ones_where_a_target_reads_no_others() -> None:
    every, common = (set(writable_formats(common=c, method="gptq")) for c in (False, True))
    assert {f.storage for f in every} == {name for name, of in FORMATS.items() if of.layout is not None}
    assert {F32, BF16, INT4_32, INT8} <= common < every
    assert all(f.everywhere for f in common)
    assert {f.scale_block for f in every} == {0, 8, 16}
    assert all(not (f.scale_block and f.storage == "int4") for f in writable_formats(common=False, method="awq"))


def test_what_another_is_better_than_is_left_out() -> None:
    tried = try_formats(before_formats("Llama"), (INT4_32, INT8, BF16, F32, WeightFormat(storage="fp8", group_size=32)))
    assert [t.format.storage for t in undominated(tried)] == ["int4", "int8", "bf16", "f32"], "int8 is closer than fp8"


def test_what_fewer_weights_can_have_beats_none_that_more_can_have() -> None:
    some = Tried(INT4_32, ((10, 0.1), None))
    every = Tried(INT8, ((20, 0.1), (20, 0.1)))
    assert every.beaten_by(Tried(BF16, ((19, 0.1), (20, 0.1))))
    assert not every.beaten_by(some)
    assert not every.beaten_by(every)
    assert some.beaten_by(Tried(BF16, ((10, 0.05), None)))
    assert not some.beaten_by(Tried(BF16, ((10, 0.0995), None))), "errors that are alike say nothing"
