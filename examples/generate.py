"""Completes two prompts together, greedily, and a third with sampling.

python examples/generate.py smollm2.bundle
"""

from __future__ import annotations

import sys

import enginewright as ew


def main(bundle: str) -> None:
    """Prints what the model makes of each prompt."""
    prompts = ["The capital of France is", "Two plus two is"]
    with ew.LLM(bundle) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, ew.SamplingParams(max_tokens=16)), strict=True):
            print(f"{prompt!r} -> {result.text!r} ({len(result.token_ids)} tokens, {result.finish_reason})")

        sampled = ew.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16)
        print(llm.generate("Once upon a time", sampled)[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
