"""Requests of the cuda target share blocks, in the interpreter."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import ExecutorCaps
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.triton_interpreter import interpreter as interpreter


class _Served:
    """``CudaSteps`` as an engine takes them."""

    def __init__(self, lowering: Any) -> None:
        self._steps = cases.steps_of(lowering, 256, blocks=8)
        self.cache_groups = lowering.program.cache_groups
        self.blocks = {group.name: 8 for group in self.cache_groups}
        self.caps = ExecutorCaps(max_tokens=128, max_requests=8, shared_blocks=True)
        self.submit = self._steps.start


def with_prefixes(case: str) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Greedy tokens of requests that begin alike, without the prefix cache and with it; what that did."""
    program, context = cases.program_of(case)
    lowering = cases.lowered(program, context, "f32")
    shared = np.random.default_rng(5).integers(3, 256, 50).tolist()
    prompts = [[*shared[:n], 7, n] for n in (50, 50, 40, 20, 45)]
    logits, use = [], None
    for on in (False, True):
        engine = Engine(_Served(lowering), SchedulerConfig(2, 64, prefix_cache=on))  # type: ignore[arg-type]
        requests = [Generation(prompt, SamplingParams(max_tokens=3, ignore_eos=True)) for prompt in prompts]
        for request in requests:
            engine.add_request(request)
        while engine.has_work():
            engine.step()
        logits.append([request.tokens[request.prompt_length :] for request in requests])
        use = engine.scheduler.cache.statistics(())
    assert use is not None
    return logits[0], logits[1], use


@pytest.mark.parametrize("case", ["Llama", "Gemma2"])
def test_blocks_are_shared_copied_and_given_back(case: str, interpreter: ProcessPoolExecutor) -> None:
    """Gemma2 has a window of 8 tokens in every second layer: tables have holes there."""
    plain, shared, use = interpreter.submit(with_prefixes, case).result()
    assert shared == plain
    assert use["hits"] == 4
    assert use["copied_blocks"] > 0
