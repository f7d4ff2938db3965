"""When a request ends, and what it gives out."""

from __future__ import annotations

import numpy as np
import pytest

from enginewright.runtime.requests.outputs import TokenLogprobs
from enginewright.runtime.requests.request import Generation, PromptRequest
from enginewright.runtime.requests.sampling import SamplingParams, seed_of
from enginewright.runtime.shared.contracts import StepOutput
from enginewright.runtime.tasks.base import Rows
from enginewright.runtime.text.output_text import OutputText
from enginewright.runtime.text.tokenizer import Tokenizer

EOS = 257


def feed(request: Generation, data: bytes | list[int]) -> Generation:
    for token in data:
        if not request.finished:
            request.accept(token)
    return request


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "text"),
    [
        (SamplingParams(max_tokens=3), 3, "length", "abc"),
        (SamplingParams(), 5, "stop", "abcd"),
        (SamplingParams(ignore_eos=True, max_tokens=6), 6, "length", "abcde"),
        (SamplingParams(stop_token_ids=(ord("c"),)), 3, "stop", "ab"),
        (SamplingParams(stop_token_ids=(ord("c"),), ignore_eos=True), 3, "stop", "ab"),
        (SamplingParams(stop=("cd",)), 4, "stop", "ab"),
        (SamplingParams(stop=("cdx",)), 5, "stop", "abcd"),
        (SamplingParams(stop=("cdx",), max_tokens=3), 3, "length", "abc"),
    ],
)
def test_the_end(tokenizer: Tokenizer, params: SamplingParams, tokens: int, reason: str, text: str) -> None:
    output = OutputText(tokenizer.detokenizer(), params.stop)
    request = feed(Generation([1, 2], params, end_token_ids=[EOS], text=output), [*b"abcd", EOS, ord("e")])
    piece = request.take_piece()
    result = request.to_output()
    assert (len(result.token_ids), result.finish_reason, result.text) == (tokens, reason, text)
    assert (piece.text, piece.finish_reason, piece.token_ids) == (text, reason, result.token_ids)
    assert result.prompt_token_ids == (1, 2)


def test_pieces_add_up(tokenizer: Tokenizer) -> None:
    request = Generation([1], SamplingParams(logprobs=1, max_tokens=4), text=OutputText(tokenizer.detokenizer(), ()))
    pieces = []
    for token in "é!x".encode():
        request.accept(token, TokenLogprobs(token, -1.0, ((token, -1.0),)))
        pieces.append(request.take_piece())
    assert [p.text for p in pieces] == ["", "é", "!", "x"]
    assert [p.token_ids for p in pieces] == [(t,) for t in "é!x".encode()]
    result = request.to_output()
    assert result.text == "é!x"
    assert result.logprobs == tuple(lp for p in pieces for lp in p.logprobs or ())


def test_a_request_without_text() -> None:
    request = feed(Generation([1], SamplingParams(max_tokens=2)), b"ab")
    assert request.take_piece().text == request.to_output().text == ""


def test_a_stop_string_that_the_end_completes(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("\ufffd",), max_tokens=2)
    request = feed(Generation([1], params, text=OutputText(tokenizer.detokenizer(), params.stop)), b"a\xc3")
    assert (request.finish_reason, request.take_piece().text) == ("stop", "a")


def test_seeds() -> None:
    assert Generation([4, 5], SamplingParams()).seed == seed_of([4, 5])
    assert Generation([4, 5], SamplingParams(seed=0)).seed == 0


@pytest.mark.parametrize("chunks", [(5,), (2, 3), (1, 1, 1, 1, 1)])
def test_scoring(chunks: tuple[int, ...]) -> None:
    logits = np.arange(10, dtype=np.float32).reshape(5, 2)
    output = StepOutput(None, {"logits": logits})
    rows = Rows(5)
    request = PromptRequest(range(5), ("logits",), rows.take)
    assert request.most_cached == 5
    for count in chunks:
        assert not request.finished
        request.accept_rows(request.computed, output, slice(request.computed, request.computed + count))
        request.computed += count
    assert request.finished
    np.testing.assert_array_equal(rows.values["logits"], logits)
