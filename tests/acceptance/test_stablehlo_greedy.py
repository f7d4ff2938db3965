"""SmolLM2 as StableHLO modules: the cpu target's greedy tokens for 24 prompts, alone and in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.stablehlo.recipe import StableHloOptions

from .test_greedy import LENGTHS, NEW_TOKENS, PASSAGE, TIE

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

RECIPE = Recipe(
    name="f32",
    targets=("cpu", "stablehlo"),
    buckets=BucketsSection(tokens=(32, 128, 512), batch=(1, 8, 24)),
    engines=EnginesSection(context=639),
)


@pytest.mark.soak
@pytest.mark.parametrize("kernels", [None, "enginewright"])
def test_tokens_are_the_cpu_target_s(
    kernels: Literal["enginewright"] | None, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """At a difference, the two best logits of the cpu target are closer than f32 can distinguish."""
    path = tmp_path / "smollm2.bundle"
    export(smollm2_gguf, path, recipe=RECIPE.model_copy(update={"stablehlo": StableHloOptions(kernels=kernels)}))
    params = ew.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with ew.LLM(path, target="cpu", trust="code") as cpu:
        ids = cpu.tokenizer.encode(PASSAGE * 2)
        prompts = [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]
        greedy_tokens = [list(result.token_ids) for result in cpu.generate(prompts, params)]
        with ew.LLM(path, target="stablehlo", trust="code", max_requests=24) as modules:
            together = [list(result.token_ids) for result in modules.generate(prompts, params)]
            alone = [list(modules.generate(prompt, params)[0].token_ids) for prompt in prompts]
        ties = 0
        for results in (together, alone):
            for prompt, tokens, expected in zip(prompts, results, greedy_tokens, strict=True):
                if tokens == expected:
                    continue
                place = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
                best = np.sort(cpu.logits(prompt + expected[:place])[-1])[-2:]
                assert best[1] - best[0] < TIE, (len(prompt), place)
                ties += 1
    print(f"{len(LENGTHS)} prompts, alone and in one batch: {ties} differ at a tie")
