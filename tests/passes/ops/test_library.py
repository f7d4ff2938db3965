"""The op registry against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes import ops
from enginewright.passes.ops.library import accumulate_dtype, register


@pytest.mark.parametrize("name", sorted(ops.REFERENCES))
def test_every_op_is_pure_and_registered_with_its_reference(name):
    schema = getattr(torch.ops.ew, name).default._schema
    assert not any(a.alias_info for a in (*schema.arguments, *schema.returns))
    assert ops.REFERENCES[name].__module__.startswith(ops.__name__)
    assert ops.REFERENCES[name].__name__ == name


@pytest.mark.parametrize(
    "schema",
    [
        'ew::grouped_linear(Tensor x, Tensor starts, Tensor weight, Tensor? bias, str activation="") -> Tensor',
        "ew::route_experts(Tensor expert_ids, int experts) -> (Tensor, Tensor, Tensor)",
    ],
)
def test_a_schema_is_the_signature_of_the_reference(schema):
    name = schema.partition("(")[0].removeprefix("ew::")
    assert str(getattr(torch.ops.ew, name).default._schema) == schema


def test_a_fake_takes_the_arguments_that_it_names_with_their_defaults():
    values = torch.empty((4, 32), dtype=torch.int8, device="meta")
    scales = torch.empty((4, 1), dtype=torch.float16, device="meta")
    by_position = torch.ops.ew.dequantize(values, scales, 32)
    by_name = torch.ops.ew.dequantize(group_size=32, scales=scales, values=values)
    assert by_position.shape == by_name.shape == (4, 32)
    with pytest.raises(RuntimeError, match="weights of 7 bits"):  # offsets are left to their default
        torch.ops.ew.dequantize(values, scales, 32, bits=7)


def test_a_fake_that_names_what_the_schema_lacks_is_turned_down():
    def misnamed(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(TypeError, match=r"the fake of ew\.misnamed takes \['y'\]"):
        register(misnamed, fake=lambda y: y)
    assert "misnamed" not in ops.REFERENCES


def test_accumulation_is_at_least_float32():
    assert accumulate_dtype(torch.empty(0, dtype=torch.bfloat16)) is torch.float32
    assert accumulate_dtype(torch.empty(0, dtype=torch.float64)) is torch.float64
