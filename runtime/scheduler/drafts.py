"""Speculation: tokens that are likely next are computed together with the last known one, and drawn as always.

Logits are bit for bit the same however rows are batched, and each position has its own random number, so what is drawn
behind a draft is what plain decoding would have drawn there: a draft is accepted as far as it is equal to that. Nothing
but time depends on it. Keys and values of what wasn't accepted lie behind the request's last token, where nobody looks,
until they are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginewright.plugins.shared.contracts import NO_TOKEN, ExecutorCaps, StepOutput
from enginewright.plugins.shared.errors import RequestError
from enginewright.runtime.requests.lookup import Lookup
from enginewright.runtime.requests.request import Request

from .base import Chunk
from .step_outputs import logprobs_of

ROWS = 16
"""Rows of all requests that decode in a step, drafts among them: more cost as much as they bring."""


class Drafts:
    """Of all requests. Raises RequestError if the executor can't compute several rows of a request ahead.

    Attributes:
        drafted, accepted: tokens so far.
    """

    def __init__(self, caps: ExecutorCaps) -> None:
        if not caps.verifies:
            raise RequestError(
                "speculate: this target doesn't promise a token's bits with others behind it",
                hint="Use the cpu target.",
            )
        self.drafted = self.accepted = 0

    def describe(self) -> dict[str, int]:
        """For ``LLM.info``."""
        return {"drafted": self.drafted, "accepted": self.accepted}

    def of(self, request: Request, running: int) -> list[int]:
        """A draft for a request that decodes beside others; empty where there is none."""
        most = min(ROWS // running - 1, request.max_tokens - request.output_length - 1)
        if most < 1 or request.search is not None or (request.rules is not None and request.rules.changing):
            return []
        if request.drafts is None:
            request.drafts = Lookup(request.tokens, ROWS - 1)
        return request.drafts.next(most)

    def verify(self, chunk: Chunk, tokens: Sequence[int], output: StepOutput, first: int) -> None:
        """Gives a request what was drawn, ``tokens`` in rows from ``first`` on, as far as its draft is equal to it."""
        request, count = chunk.request, 0
        for at, token in enumerate(tokens):
            if token == NO_TOKEN:
                break
            request.accept(token, logprobs_of(request, output, first + at))
            count += 1
            if request.finished or at == len(chunk.draft) or token != chunk.draft[at]:
                break
        request.computed = chunk.start + count
        accepted = count - 1
        self.drafted, self.accepted = self.drafted + len(chunk.draft), self.accepted + accepted
        request.drafted, request.accepted = request.drafted + len(chunk.draft), request.accepted + accepted
        assert request.drafts is not None
        request.drafts.took(len(chunk.draft), accepted)
