"""SmolLM2 on the tvm target: the cpu target's greedy tokens of the 24 prompts, alone and in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.export import export
from enginewright.runtime.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams

from .test_greedy import LENGTHS, NEW_TOKENS, PASSAGE


@pytest.mark.soak
def test_tokens_are_the_cpu_target_s(smollm2_gguf: Path, tmp_path: Path) -> None:
    export(smollm2_gguf, tmp_path / "b", recipe="f32", targets=("cpu", "tvm"))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    found = {}
    for target in ("cpu", "tvm"):
        with LLM(tmp_path / "b", target=target) as llm:
            ids = llm.tokenizer.encode(PASSAGE * 2)
            prompts = [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]
            alone = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
            assert alone == [list(result.token_ids) for result in llm.generate(prompts, params)]
            found[target] = alone
    assert found["tvm"] == found["cpu"]
