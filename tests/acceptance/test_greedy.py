"""Greedy tokens of the f32 bundle are transformers' on the real model: alone, in one batch, and in chunks of 16.

transformers generates some of the texts itself. Of the others it looks at all tokens in one step, which is many times
faster: what is generated are its greedy tokens if each is its best one behind those before.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.plugins.tvm.section import KernelsName

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 48, 63, 64, 65, 90, 128, 150, 200, 255, 256, 320, 400)
GENERATED = (17, 128)  # by transformers, one token after the other
NEW_TOKENS = 64
TIE = 1e-4  # design rule: where the two best float64 logits are closer, f32 engines may differ

PASSAGE = """The harbour of Saint-Malo lies behind granite walls. In 1534 Jacques Cartier left it with two ships and
sixty-one men, and reached the coast of Newfoundland after twenty days. "We shall find a passage," he wrote, "or we
shall find that there is none." What he found was a river, wide as a sea, and people who called their village kanata.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

1. Melt 50 g of butter in a pan. 2. Add two sliced onions and cook them slowly until golden. 3. Pour in a litre of
stock, season, and simmer for twenty minutes. Serve with toasted bread and grated cheese; a glass of cider goes well.

Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Answer: from 9:40 to 12:40 are
three hours, and twenty-five minutes more, so 3 hours and 25 minutes. Question: And if it is late by a quarter of an
hour? Answer: then it arrives at 13:20. The light in the window went out. Somewhere below, a door closed, softly, as
doors do when someone does not wish to be heard; she counted to ten, and then, because nothing happened, to a hundred.
"""


@pytest.fixture(scope="module")
def original(smollm2_gguf: Path) -> PreTrainedModel:
    """transformers' own reading of the GGUF: shares no code with ours but the block formats."""
    model = AutoModelForCausalLM.from_pretrained(
        str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # go on past the end of a text, as ignore_eos does
    return model


@pytest.fixture(scope="module")
def prompts(smollm2_bundle: Path) -> list[list[int]]:
    with ew.LLM(smollm2_bundle) as llm:
        ids = llm.tokenizer.encode(PASSAGE * 2)
    return [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def generated(original: PreTrainedModel, prompts: list[list[int]]) -> dict[int, list[int]]:
    """The tokens that transformers generates, by the prompt's length."""
    result = {}
    for prompt in (p for p in prompts if len(p) in GENERATED):
        with torch.no_grad():
            out = original.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        result[len(prompt)] = out[0, len(prompt) :].tolist()
    return result


@pytest.fixture(scope="module")
def checked() -> dict[tuple[int, ...], list[int]]:
    """transformers' best tokens behind each of a text's, for the texts that came up so far."""
    return {}


def best_tokens(model: PreTrainedModel, prompt: list[int], got: list[int]) -> list[int]:
    """transformers' best token behind the prompt, and behind it with the first, the first two, ... that were got."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + got[:-1]]), use_cache=False, logits_to_keep=len(got)).logits[0]
    best: list[int] = logits.argmax(-1).tolist()
    return best


def is_tie(model: PreTrainedModel, ids: list[int], first: int, second: int) -> bool:
    """Returns True if the two tokens are the best two after ``ids``, in float64, and closer than TIE."""
    with torch.no_grad():
        logits = _in_float64(model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    best = logits.topk(2)
    return {first, second} == set(best.indices.tolist()) and float(best.values[0] - best.values[1]) < TIE


@cache
def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    import copy

    return copy.deepcopy(model).double()


@pytest.mark.parametrize("way", ["batch", "alone", "chunks of 16"])
def test_greedy_tokens_equal_transformers(
    way: str,
    smollm2_bundle: Path,
    prompts: list[list[int]],
    generated: dict[int, list[int]],
    checked: dict[tuple[int, ...], list[int]],
    original: PreTrainedModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = ew.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with ew.LLM(smollm2_bundle, memory="256MiB", prefill_chunk=16 if way == "chunks of 16" else 512) as llm:
        if way == "alone":
            results = [llm.generate(p, params)[0] for p in prompts]
        else:
            results = llm.generate(prompts, params)
    ties = 0
    for prompt, result in zip(prompts, results, strict=True):
        got = list(result.token_ids)
        assert len(got) == NEW_TOKENS
        text = (*prompt, *got)
        if text not in checked:
            checked[text] = generated.get(len(prompt)) or best_tokens(original, prompt, got)
        expected = checked[text]
        at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
        if at is not None:
            assert is_tie(original, prompt + expected[:at], got[at], expected[at]), (len(prompt), at)
            ties += 1
    with capsys.disabled():
        print(f"\n{way}: {len(prompts)} prompts of {NEW_TOKENS} tokens, the rule for ties was needed {ties} times")
    assert ties <= 2


@pytest.mark.soak
@pytest.mark.parametrize("kernels", [None, "enginewright"])
def test_tvm_s_greedy_tokens_equal_the_cpu_target_s(
    kernels: KernelsName | None, smollm2_gguf: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """Alone and in a batch; with TVM's kernels, and with ours in their place."""
    recipe = load_recipe("f32").model_copy(update={"tvm": TvmOptions(kernels=kernels)})
    export(smollm2_gguf, tmp_path / "b", recipe=recipe, targets=("cpu", "tvm"))
    params = ew.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    tokens = {}
    for target in ("cpu", "tvm"):
        with ew.LLM(tmp_path / "b", target=target, trust="code") as llm:
            assert llm.info()["executor"].get("kernels") == (kernels if target == "tvm" else None)
            alone = [list(llm.generate(prompt, params)[0].token_ids) for prompt in prompts]
            assert alone == [list(result.token_ids) for result in llm.generate(prompts, params)]
            tokens[target] = alone
    assert tokens["tvm"] == tokens["cpu"]
