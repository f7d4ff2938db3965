"""Reads the results of a request from the rows of a step's output."""

from __future__ import annotations

from enginewright.runtime.requests.outputs import TokenLogprobs
from enginewright.runtime.requests.request import Generation, Request

from ..shared.contracts import StepOutput
from ..shared.errors import EnginewrightError, RequestError


def not_finite(request: Request, at_prompt: int | None = None) -> EnginewrightError:
    """Makes the error of a request whose logits are NaN or infinite, or leave it no token.

    ``at_prompt``: the position of the prompt token with these logits; None for the logits of the next new token.
    """
    where = f"for new token {request.output_length}" if at_prompt is None else f"at token {at_prompt} of its prompt"
    if request.rules is not None and at_prompt is None:
        grammar = request.rules.grammar
        if grammar is not None and grammar.error is not None:
            return grammar.error
        return RequestError(
            f"request: no token may come as new token {request.output_length}: allowed_token_ids, logit_bias, "
            "bad_words, min_tokens and structured_outputs ban all, or the model's logits are NaN or infinite",
            hint="Allow more. Other requests went on.",
        )
    return EnginewrightError(
        f"request: the model's logits {where} are NaN or infinite",
        hint="Check the bundle with `optimize verify`: its weights are damaged, or numbers overflow in its format. "
        "Other requests went on.",
    )


def top(output: StepOutput, row: int, count: int) -> list[tuple[int, float]]:
    """Returns the ``count`` most probable tokens of a row with their log-probabilities, best first."""
    assert output.top_ids is not None and output.top_logprobs is not None
    return list(zip(output.top_ids[row, :count].tolist(), output.top_logprobs[row, :count].tolist(), strict=True))


def scored(request: Generation, output: StepOutput, start: int, first: int, count: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the prompt tokens at positions ``start`` + 1 to ``start`` + ``count``.

    Args:
        request: the request.
        output: the output of the step.
        start: the position of the first computed token.
        first: the row of that token in ``output``.
        count: the number of computed tokens.
    """
    following = request.tokens[start + 1 : min(start + 1 + count, request.prompt_length)]
    if not following:  # the new token comes after the prompt's last one
        return []
    assert output.token_logprobs is not None
    most = request.params.prompt_logprobs or 0
    logprobs = output.token_logprobs[first : first + count].tolist()
    return [TokenLogprobs(token, logprobs[i], tuple(top(output, first + i, most))) for i, token in enumerate(following)]


def logprobs_of(request: Generation, output: StepOutput, row: int) -> TokenLogprobs | None:
    """Returns the log-probabilities of the new token of a row; None if the request doesn't want them."""
    n = request.params.logprobs
    if n is None:
        return None
    assert output.tokens is not None and output.token_logprobs is not None
    return TokenLogprobs(int(output.tokens[row]), float(output.token_logprobs[row]), tuple(top(output, row, n)))
