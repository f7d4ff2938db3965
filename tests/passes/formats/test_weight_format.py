"""The formats as recipes and passes name them; test_recipe.py has the errors of recipes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from enginewright.passes.formats.weight_format import WeightFormat

INT4 = WeightFormat(storage="int4", activation="int8")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"storage": "int8"}, "goes with activation 'int8', not 'float'"),
        ({"storage": "bf16", "activation": "bf16", "group_size": 32}, "has no scales"),
        ({"storage": "int4", "activation": "int8", "group_size": 64, "activation_group_size": 32}, "must be the same"),
        ({"storage": "fp8", "sparsity": "2:4"}, "can't be made for storage 'fp8'"),
        ({"scale": 1}, "Extra inputs"),
    ],
)
def test_what_can_not_be_made_is_no_format_anywhere(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        WeightFormat.model_validate(given)


@pytest.mark.parametrize("size", [40, 576])
def test_one_scale_a_channel_of_4_bits_is_a_group_of_all_inputs(size: int) -> None:
    """More values than a recipe's groups may have."""
    whole = INT4.for_inputs(size)
    assert (whole.group_size, whole.activation_group_size) == (size, size)
    assert whole.for_inputs(size) is whole and WeightFormat().for_inputs(size) == WeightFormat()


def test_formats_are_keys_and_have_short_names() -> None:
    sparse = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32, sparsity="2:4")
    assert len({INT4, INT4.model_copy(), INT4.model_copy(update={"zero_point": True}), sparse}) == 3
    assert [str(f) for f in (WeightFormat(), INT4, sparse)] == ["f32", "int4-a:int8", "int8-g32-a:int8:g32-2:4"]
    assert str(INT4.model_copy(update={"zero_point": True})) == "int4-zp-a:int8"
