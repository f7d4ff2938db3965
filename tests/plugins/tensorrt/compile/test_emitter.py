from __future__ import annotations

import pytest

from enginewright.passes.ir.program import Program
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tensorrt.compile.emitter import TensorRtEmitter, profiles_of
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RecipeError, TargetError
from enginewright.runtime.shared.progress import silent
from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import lowered
from tests.plugins.tensorrt.compile.conftest import MakeBundle


@pytest.mark.parametrize(("context", "blocks"), [(512, 16), (33, 2)])
def test_profiles_hold_what_engines_says(context: int, blocks: int) -> None:
    decode, prefill = profiles_of(EnginesSection(requests=8, chunk=100), context)
    assert (decode.phase, decode.T, decode.B) == ("decode", (1, 4, 8), (1, 4, 8))
    assert (prefill.phase, prefill.T, prefill.B[2]) == ("prefill", (1, 100, 100), 8)
    assert decode.M == prefill.M == (1, blocks, blocks)
    assert prefill.holds(100, 8, 100, blocks) and not prefill.holds(101, 1, 1, 1)
    assert not decode.holds(9, 9, 9, 1)
    assert decode.P == prefill.P == (1, 1024, 1 << 22)
    assert profiles_of(EnginesSection(blocks=700), context)[0].P == (1, 700, 700)


def test_a_context_longer_than_the_model_s_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"engines\.context: 513 tokens are more than the model's context of 512"):
        profiles_of(EnginesSection(context=513), 512)


def test_a_gpu_without_kernels_is_refused_before_anything_is_written(tmp_path: object) -> None:
    options = EmitOptions(engines=EnginesSection.model_validate({"gpus": ["7.5", "8.9"]}), context_length=64)
    program: Program = lowered(tiny_family("llama"))
    with BundleWriter(f"{tmp_path}/b") as writer:
        with pytest.raises(TargetError, match=r"no kernels are compiled for compute capability 7\.5"):
            TensorRtEmitter().emit(program, writer, silent, options)
        assert writer.bytes_written == 0


def test_the_manifest_says_what_is_needed(make_bundle: MakeBundle) -> None:
    bundle = Bundle.open(make_bundle(lowered(tiny_family("gemma2"))))
    target = bundle.targets["tensorrt"]
    assert target.state == "needs-build"
    assert target.needs == "TensorRT 11.4 or newer and a GPU of compute capability 8.9"
    assert target.section(TensorRtSection) is not None and target.section(TensorRtSection).paged is not None
    assert (target.section(TensorRtSection).flavour, target.section(TensorRtSection).engines) == ("tensorrt", ())
    groups = target.section(TensorRtSection).paged.cache_groups
    assert [group.dtype for group in groups] == ["f16"] * len(groups)
    assert {layer for group in groups for layer in group.layers} == {0, 1}
    assert {group.window for group in groups} == {0, 8} or len(groups) == 1
