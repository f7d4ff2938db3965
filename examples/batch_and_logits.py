"""A request's numbers don't depend on the batch: the same tokens alone and in a batch, and logits for tools.

python examples/batch_and_logits.py smollm2.bundle
"""

from __future__ import annotations

import sys

import numpy as np

import enginewright as ew


def main(bundle: str) -> None:
    """Prints perplexity and tokens, and fails if company made a difference."""
    params = ew.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    with ew.LLM(bundle) as llm:
        prompts = [llm.tokenizer.encode(text) for text in ("The sky is", "Water boils at", "One, two, three,")]

        together = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
        assert [r.logprobs for r in together] == [r.logprobs for r in alone]  # bit for bit
        print("the same alone and together:", [result.text for result in together])

        ids = list(together[0].prompt_token_ids + together[0].token_ids)
        logits = llm.logits(ids).astype(np.float64)  # [S, V]
        logprobs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= logits.max(-1, keepdims=True)
        print("perplexity:", np.exp(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean()))
        print("what is loaded:", llm.info())


if __name__ == "__main__":
    main(sys.argv[1])
