from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.optimizer.verify.held_out import held_out
from enginewright.runtime.shared.errors import RequestError


@pytest.mark.parametrize("count", [2, 5])
def test_no_sequence_is_measured_and_checked(count: int, tiny_model: Callable[..., PreTrainedModel]) -> None:
    captured = capture(tiny_model("Llama"))
    sequences = [torch.full((20,), i) for i in range(count)]
    measuring, checks = held_out(captured, sequences, "auto")
    checked = {int(s[0]) for s in checks[0].sequences}
    assert {int(s[0]) for s in measuring} == set(range(0, count, 2)) and checked == set(range(1, count, 2))
    with pytest.raises(RequestError, match=r"\[auto\] measures with one half .* there is only one"):
        held_out(captured, sequences[:1], "auto")
