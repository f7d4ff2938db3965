"""Every family's logits through capture, passes, the bundle and the CPU engine are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.plugins.cpu.executable import isas

from .driver import Driver

# Both sides are f32 with sums in another order, over 2 layers and logits of a few units: the difference is some
# 1e-6; a wrong window, norm or rotation moves logits by 1e-2 and more.
TOLERANCE = 1e-4


def expected_logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("isa", ["best", "portable"])
def test_prefill_and_decode_equal_transformers(
    tiny_family: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path, isa: str
) -> None:
    model = tiny_model(tiny_family)
    export(model, tmp_path / "tiny.bundle")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 256, n).tolist() for n in (37, 5, 1)]
    texts = [p + rng.integers(3, 256, 8).tolist() for p in prompts]
    with Driver(tmp_path / "tiny.bundle", len(prompts), 2, isa=isas()[0] if isa == "best" else isa) as driver:
        got = {r: [logits] for r, logits in driver.step(dict(enumerate(prompts))).items()}
        for i in range(8):  # decode, all requests together
            for r, logits in driver.step({r: [text[len(prompts[r]) + i]] for r, text in enumerate(texts)}).items():
                got[r].append(logits)
    for r, text in enumerate(texts):
        np.testing.assert_allclose(np.concatenate(got[r]), expected_logits(model, text), atol=TOLERANCE, rtol=0)


def test_tolerance_would_show_a_wrong_window(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    export(tiny_model("Mistral", sliding_window=9), tmp_path / "tiny.bundle")
    ids = np.random.default_rng(2).integers(3, 256, 30).tolist()
    with Driver(tmp_path / "tiny.bundle", 1, 1) as driver:
        got = driver.step({0: ids})[0]
    assert np.abs(got - expected_logits(tiny_model("Mistral"), ids)).max() > 10 * TOLERANCE
