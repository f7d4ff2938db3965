"""Tokens and log-probabilities that are drawn and computed on the device, and steps that are refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from enginewright.plugins.cuda.serve.steps import logprobs_of
from enginewright.plugins.gpu.call import Call
from enginewright.plugins.gpu.jit_launcher import JitLauncher
from enginewright.plugins.native.sampling import RowSampler
from enginewright.runtime.requests.logit_rules import PLAIN, sampling_batch
from enginewright.runtime.shared.contracts import NO_TOKEN
from enginewright.runtime.shared.errors import RequestError
from tests.passes.small_programs import Steps, random_sequences
from tests.plugins.cuda.serve import cuda_cases as cases
from tests.triton_interpreter import interpreter as interpreter


def drawn() -> list[tuple[list[int], list[int]]]:
    """Tokens of each step, by the executor and by the cpu target's sampler from the executor's logits."""
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")
    options = [
        {},
        {"temperature": 0.8, "seed": 1, "counter": 3},
        {"temperature": 1.2, "top_k": 5, "seed": 2},
        {"temperature": 0.9, "top_p": 0.7, "min_p": 0.02, "seed": 2**63 + 5, "counter": 9},
    ]
    steps, stepper = cases.steps_of(lowering, 256), Steps(["full"], cases.BLOCKS)
    tokens = []
    for chunks in ({str(i): [3 + i, 9, 40 + i] for i in range(4)}, {str(i): [7 + i] for i in range(4)}):
        step = cases.step_input(stepper.step(chunks), cases.as_options(options))
        step.outputs = ("logits",)
        assert step.sampling is not None
        step.sampling.logprobs = 2
        output = steps.start(step).result()
        assert output.tokens is not None
        assert output.logits is not None
        assert output.token_logprobs is not None
        assert output.top_logprobs is not None
        expected = RowSampler(1).sample(output.logits, step.sampling)
        assert expected.tokens is not None
        np.testing.assert_allclose(output.token_logprobs, expected.token_logprobs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(output.top_ids, expected.top_ids)
        np.testing.assert_allclose(output.top_logprobs, expected.top_logprobs, rtol=0, atol=1e-5)
        tokens.append((output.tokens.tolist(), expected.tokens.tolist()))
    return tokens


def test_tokens_are_drawn_on_the_device(interpreter: ProcessPoolExecutor) -> None:
    for ours, theirs in interpreter.submit(drawn).result():
        assert ours == theirs


def in_parts() -> float:
    """The largest difference between a step of 9 requests in parts of 8, and requests' own."""
    program, context = cases.program_of("Llama")
    lowering = cases.lowered(program, context, "f32")
    sequences = random_sequences([3, 1, 4, 2, 1, 2, 1, 3, 2], 250)
    stepper = Steps(["full"], cases.BLOCKS)
    many = cases.steps_of(lowering, 256).start(
        cases.step_input(stepper.step({str(i): sequence for i, sequence in enumerate(sequences)}))
    )
    logits, worst = many.result().logits, 0.0
    assert logits is not None
    alone = cases.steps_of(lowering, 256)
    for i, sequence in list(enumerate(sequences))[::4]:
        logits_alone = (
            alone.start(cases.step_input(Steps(["full"], cases.BLOCKS).step({"x": sequence}))).result().logits
        )
        assert logits_alone is not None
        worst = max(worst, float(np.abs(logits_alone[0] - logits[i]).max()))
    return worst


@pytest.mark.matrix
def test_what_is_too_much_for_a_step_runs_in_parts(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(in_parts).result() <= cases.EXACT * 4


def with_penalties_and_many_rows() -> tuple[list[list[int]], list[list[int]], int, float]:
    """Tokens, and tokens with the top logprobs, of a step of 12 rows, more than there is room for, with lists; the same
    by the cpu target's sampler; how often attention ran; and the largest difference of logits from a step with room."""
    program, context = cases.program_of("Llama")
    lowering, ran = cases.lowered(program, context, "f32"), list[str]()

    class Noting(JitLauncher):
        def bind(self, call: Call) -> Callable[[], object]:
            launch = super().bind(call)
            return lambda: (ran.append(call.kernel), launch())

    steps, stepper = cases.steps_of(lowering, 256, launcher=Noting(), rows=4), Steps(["full"], cases.BLOCKS)
    step = cases.step_input(stepper.step({"a": [3, 9, 40, 7, 5, 6], "b": [1, 2, 3, 4, 5, 6]}, rows=range(12)))
    options = [{"temperature": 0.9 * (i % 3 > 0), "top_k": 7 * (i % 2), "seed": i} for i in range(12)]
    step.sampling = cases.as_options(options)
    step.sampling.repetition_penalty = np.linspace(0.5, 3, 12).astype(np.float32)
    step.sampling.seen_start = np.arange(0, 13 * 40, 40).astype(np.int32)
    step.sampling.seen = np.tile(np.arange(40), 12).astype(np.int32)
    step.sampling.typical_p = np.linspace(0.1, 1, 12).astype(np.float32)
    step.sampling.biased_start = np.arange(13, dtype=np.int32)
    step.sampling.biased, step.sampling.bias = np.arange(30, 42, dtype=np.int32), np.full(12, 2.5, np.float32)
    step.sampling.allowed_start = np.array([0, 30, *[30] * 11], np.int32)  # the first row's
    step.sampling.allowed = np.arange(30, dtype=np.int32)
    step.sampling.logprobs, step.outputs = 2, ("logits",)
    output = steps.start(step).result()
    assert output.logits is not None
    whole = cases.steps_of(lowering, 256).start(step.changed(sampling=None)).result().logits
    expected = RowSampler(1).sample(output.logits, step.sampling)
    drawn = [[of.tokens.tolist(), of.top_ids.tolist()] for of in (output, expected)]
    return *drawn, ran.count("paged_attention"), float(np.abs(whole - output.logits).max())


@pytest.mark.matrix
def test_more_rows_than_there_is_room_for(interpreter: ProcessPoolExecutor) -> None:
    """Steps by row run for some rows at a time, and all else once."""
    ours, theirs, ran, apart = interpreter.submit(with_penalties_and_many_rows).result()
    assert ours == theirs
    assert ran == 2  # layers
    assert apart == 0


def after_bad_numbers() -> tuple[list[int], bool, bool]:
    """Tokens of a step one of whose requests' caches is NaN; whether its blocks are zero after a step that clears them,
    and the other's not."""
    program, context = cases.program_of("Llama")
    steps, stepper = cases.steps_of(cases.lowered(program, context, "f32"), 256), Steps(["full"], cases.BLOCKS)
    steps.start(cases.step_input(stepper.step({"a": [4, 5], "b": [6, 7]}), cases.greedy(2))).result()
    bad, good = (stepper.requests[name].blocks["full"][0] for name in "ab")
    for cache in steps._program.caches.values():
        cache.of.keys[bad] = float("nan")
    step = cases.step_input(stepper.step({"a": [9], "b": [9]}), cases.greedy(2))
    tokens = steps.start(step).result().tokens
    assert tokens is not None
    step = cases.step_input(stepper.step({"b": [9]}), cases.greedy(1))
    step.clears = {"full": np.array([bad], np.int32)}
    steps.start(step).result()
    keys = [cache.of.keys for cache in steps._program.caches.values()]
    return tokens.tolist(), not any(k[bad].any() for k in keys), all(bool(k[good].any()) for k in keys)


def test_numbers_that_are_not_finite_stay_with_their_request(interpreter: ProcessPoolExecutor) -> None:
    tokens, cleared, others = interpreter.submit(after_bad_numbers).result()
    assert tokens[0] == NO_TOKEN
    assert tokens[1] != NO_TOKEN
    assert cleared
    assert others


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"top_p": 1.5}, "row 1 has a top_p"), ({"temperature": -1.0}, "row 1 has a temperature"), ({}, "no tokens")],
)
def test_what_is_wrong_with_a_step_is_said(
    changed: dict[str, float], message: str, interpreter: ProcessPoolExecutor
) -> None:
    with pytest.raises(RequestError, match=message):
        interpreter.submit(refused, changed).result()


def refused(changed: dict[str, float]) -> None:
    program, context = cases.program_of("Llama")
    steps, stepper = cases.steps_of(cases.lowered(program, context, "f32"), 256), Steps(["full"], cases.BLOCKS)
    step = cases.step_input(stepper.step({"a": [1], "b": [2]}), cases.as_options([{}, changed]))
    if not changed:
        step.arrays["ids"] = step.ids[:0]
    steps.start(step)


def test_a_scored_token_s_logprob_is_given_in_place_of_the_drawn_one_s() -> None:
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, NO_TOKEN, 5, 6], dtype=torch.int32)
    scores = logprobs_of(logits, tokens, sampling_batch([PLAIN] * 4, (), 2, {0: [7, 8]}))["token_logprobs"]
    expected = logits.log_softmax(-1)
    assert scores[1].isnan()
    torch.testing.assert_close(scores[[0, 2, 3]], expected[[0, 2, 3], [7, 5, 6]])


@pytest.mark.parametrize("changed", [False, True])
def test_top_logprobs_are_those_of_a_whole_sort(changed: bool) -> None:
    """Equal ones are in the order of their tokens, as on the cpu target; also those of tokens that can't be. Rows of
    a beam search with a form have theirs from the changed logits: there they may be positive."""
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(37, 300, generator=random).mul(4).round() / 2  # many are equal
    logits[5], logits[8] = 0.0, -0.0
    logits[8, 7::3] = 0.0
    logits[6, 3:] = -torch.inf
    before, sampling, drawn_from, of_top = logits.clone(), sampling_batch([PLAIN] * 37, (), 20), None, logits
    if changed:
        sampling.top_allowed = (np.arange(37) % 2).astype(np.int32)
        drawn_from = torch.where(torch.rand(37, 300, generator=random) < 0.5, logits + 20, -torch.inf)
        of_top = torch.where(torch.from_numpy(sampling.top_allowed)[:, None] != 0, drawn_from, logits)
    rows = logprobs_of(logits, torch.arange(37, dtype=torch.int32), sampling, drawn_from)
    values, ids = of_top.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(rows["top_ids"].long(), ids[:, :20])
    torch.testing.assert_close(rows["top_logprobs"], values[:, :20] - logits.logsumexp(-1, keepdim=True))
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
