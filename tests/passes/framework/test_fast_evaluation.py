"""The fast way against the references of the ops, on whole programs and on single calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.node import Node

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework import fast_evaluation
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache, decoded
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Concat, Source
from enginewright.passes.quantization.dequantize_products import DequantizeProducts
from tests.passes.captured import captured

ew = torch.ops.ew

EPSILON = 2**-23
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
OFFSETS = WeightFormat(storage="int4", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
PER_ROW = WeightFormat(storage="int8", group_size=0, activation="int8", activation_group_size=0)


def exported(family: str, wanted: WeightFormat, **overrides: Any) -> Program:
    program = captured(family, **overrides)
    PassManager(default_pipeline(), PassContext(recipe=PassOptions(weights=WeightFormats(default=wanted)))).run(program)
    return program


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 250, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("limit", [0, 1 << 30])
@pytest.mark.parametrize(("hidden", "lengths"), [(64, (40, 7, 65)), (96, (33,))])
def test_every_call_gives_what_its_reference_gives(
    hidden: int, lengths: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call by call, on the same arguments: what a rounding does behind a quantization is not asked for.

    Two orders of a float32 sum of K terms differ by a random walk of sqrt(K) roundings of the result's size.
    """
    monkeypatch.setattr(fast_evaluation, "_PIECE", 5 * hidden)  # without a cache weights are decoded by 5 rows
    program = exported("Gemma2", INT8, hidden_size=hidden)
    fast, seen = FastEvaluation(program, WeightCache(limit)), set()

    def both(node: Node, args: Any, kwargs: Any) -> Any:
        expected, result = node.target(*args, **kwargs), fast.compute(node, args, kwargs)  # type: ignore[operator]
        if isinstance(expected, torch.Tensor) and expected.is_floating_point():
            tolerance = 8 * EPSILON * (2 * hidden) ** 0.5 * float(expected.abs().max())
            torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)
            seen.add(node.target)
        return expected

    program.evaluate(packed_inputs(program, sequences(*lengths)), compute=both)
    assert {ew.quantized_linear.default, ew.quantized_embedding.default, ew.paged_attention.default} <= seen


def test_floats_made_of_a_weight_with_offsets() -> None:
    program = exported("Llama", OFFSETS)
    PassManager([DequantizeProducts()], PassContext()).run(program)
    fast, seen = FastEvaluation(program), []

    def both(node: Node, args: Any, kwargs: Any) -> Any:
        expected = node.target(*args, **kwargs)  # type: ignore[operator]
        if node.target is ew.dequantize.default:
            assert torch.equal(fast.compute(node, args, kwargs), expected)
            seen.append(bound_arguments(node).get("offsets"))
        return expected

    program.evaluate(packed_inputs(program, sequences(5)), compute=both)
    assert any(offsets is not None for offsets in seen)


@pytest.mark.parametrize("wanted", [WeightFormat(storage="bf16", activation="bf16"), PER_ROW])
def test_a_program_with_experts_captured_and_lowered(wanted: WeightFormat) -> None:
    """Logits are about 1. Values that quantization rounds otherwise move them by a part of its own error of 1 %."""
    program = captured("Mixtral")
    inputs = packed_inputs(program, sequences(20, 9))
    torch.testing.assert_close(FastEvaluation(program).evaluate(inputs)[0], program.evaluate(inputs)[0])
    PassManager(default_pipeline(), PassContext(recipe=PassOptions(weights=WeightFormats(default=wanted)))).run(program)
    inputs = packed_inputs(program, sequences(20, 9))
    result, expected = FastEvaluation(program).evaluate(inputs)[0], program.evaluate(inputs)[0]
    torch.testing.assert_close(result, expected, rtol=0, atol=5e-3)
    experts = program.nodes_of(ew.quantized_grouped_linear.default)
    assert bool(experts) == (wanted.storage == "int8")


@pytest.mark.parametrize(("size", "group"), [(64, 32), (40, 32), (7, 0)])
def test_decoding(size: int, group: int) -> None:
    width = group or size
    values = torch.randint(-8, 8, (3, size), dtype=torch.int8)
    scales, offsets = (torch.randn(3, -(-size // width)).half() for _ in range(2))
    for k in range(size):
        expected = values[:, k].float() * scales[:, k // width].float()
        assert torch.equal(decoded(values, scales, group=group)[:, k], expected)
        with_offsets = decoded(values, scales, offsets, group=group)[:, k]
        assert torch.equal(with_offsets, expected + offsets[:, k // width].float())
    assert values.dtype == torch.int8  # what is given stays as it is


def counted(program: Program) -> dict[str, int]:
    """Counts the reads of each source tensor from now on."""
    reads: dict[str, int] = {}

    def counting(name: str, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            reads[name] = reads.get(name, 0) + 1
            return value

        return read

    for name in program.weights:
        value = program.weights[name].evaluate()
        read = counting(name, value)
        program.weights._by_name[name] = Source(f"counted:{name}", tuple(value.shape), value.dtype, read)
    return reads


def size_of(program: Program) -> int:
    return sum(4 * torch.Size(program.weights[n].shape).numel() for n in program.weights)


def test_weights_are_read_once_while_there_is_room() -> None:
    program = captured("Llama")
    reads, inputs = counted(program), packed_inputs(program, sequences(5))
    cache = WeightCache()
    for one in (program, program, program.copy()):
        FastEvaluation(one, cache).evaluate(inputs)
    assert set(reads.values()) == {1}
    cache.clear()
    FastEvaluation(program, cache).evaluate(inputs)
    assert set(reads.values()) == {2}


def test_a_cache_keeps_to_its_limit() -> None:
    program = captured("Llama")
    inputs = packed_inputs(program, sequences(5))
    expected = program.evaluate(inputs)[0]
    reads, cache = counted(program), WeightCache(size_of(program) // 2)
    for _ in range(3):
        assert torch.equal(FastEvaluation(program, cache).evaluate(inputs)[0], expected)
        assert cache._bytes <= cache.limit
    assert set(reads.values()) == {1, 3}  # those that are kept, and those that there is no room for


def test_what_a_program_no_longer_has_makes_room() -> None:
    program = captured("Llama")
    inputs = packed_inputs(program, sequences(5))
    cache = WeightCache(size_of(program))
    FastEvaluation(program, cache).evaluate(inputs)
    reads = counted(program)  # and so they are others
    for _ in range(2):
        FastEvaluation(program, cache).evaluate(inputs)
        assert cache._bytes <= cache.limit
    assert set(reads.values()) == {1}


def test_what_else_reads_integers_or_scales_has_them() -> None:
    program = exported("Llama", INT8)
    embedding = program.nodes_of(ew.quantized_embedding.default)[0]
    table, scales = embedding.args[1], embedding.args[2]
    assert isinstance(table, Node) and isinstance(scales, Node)
    with program.inserting_before(embedding):
        doubled = program.call(torch.ops.aten.mul.Tensor, scales, 2, where=("test",))
        both = program.call(torch.ops.aten.cat.default, [scales, doubled], where=("test",))
    fast, results = FastEvaluation(program), dict[Node, torch.Tensor]()
    assert fast.read(str(table.target)).is_meta
    fast.evaluate(packed_inputs(program, sequences(5)), lambda node, value: results.update({node: value}))
    expected = program.weights[str(scales.target)].evaluate()
    assert torch.equal(results[both], torch.cat((expected, expected * 2)))


@pytest.mark.parametrize("hidden", [64, 96])
def test_weights_that_a_pass_puts_together_are_not_read_again(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pass to pass each tensor is read once; what stands for others takes their place in the cache."""
    reads: Counter[str] = Counter()
    evaluate = Source.evaluate

    def counted(source: Source) -> torch.Tensor:
        reads[source.name] += 1
        return evaluate(source)

    monkeypatch.setattr(Source, "evaluate", counted)
    program, cache = captured("Llama", hidden_size=hidden), WeightCache()
    inputs = packed_inputs(program, sequences(20, 9))
    before = FastEvaluation(program, cache).evaluate(inputs)[0]
    PassManager([one for one in default_pipeline() if one.wanted(PassContext())]).run(program)
    reads.clear()
    cache.forget_all_but(program)
    inputs = packed_inputs(program, sequences(20, 9))
    after = FastEvaluation(program, cache).evaluate(inputs)[0]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    weights = {name for name in reads if name.endswith("proj.weight")}
    assert not weights
    assert any(isinstance(program.weights[name], Concat) for name in program.weights)
    cache.forget_all_but(program)
    names = {key[0] for key in cache._values}
    assert names == {program.weights[name] for name in program.weights}
    for expr in names:
        assert cache._values[expr,].numpy().tobytes() == expr.evaluate().contiguous().numpy().tobytes()
