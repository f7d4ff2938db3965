"""What the front end and an engine's process tell each other: msgspec records, each with its length, through a socket.

    front end -> engine    Open, then Submit, Abort, Ask, Look, Forget and Close
    engine -> front end    Opened or Failed, then Events (all tokens of a step in one), Answer, Beat

The socket is a pair that the front end makes, and the engine inherits one end of: nobody else can reach it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..requests.outputs import TokenLogprobs
from ..shared.errors import BundleError, CapacityError, EnginewrightError, OverloadError, RequestError, TrustError

LENGTH_BYTES = 4
MOST_BYTES = 1 << 28
"""The most bytes of a message."""

Logprobs = tuple[int, float, tuple[tuple[int, float], ...]]
"""``TokenLogprobs`` as plain values."""

_KINDS: Mapping[str, type[EnginewrightError]] = {
    kind.__name__: kind
    for kind in (EnginewrightError, RequestError, CapacityError, OverloadError, BundleError, TrustError)
}


class Problem(msgspec.Struct, array_like=True):
    """An ``EnginewrightError`` on its way."""

    kind: str
    message: str
    hint: str | None = None
    retry_after: float | None = None

    @classmethod
    def from_error(cls, error: EnginewrightError) -> Problem:
        known = next(kind for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind)
        return cls(known.__name__, error.message, error.hint, getattr(error, "retry_after", None))

    def error(self) -> EnginewrightError:
        """The error again."""
        if self.kind == OverloadError.__name__:
            return OverloadError(self.message, retry_after=self.retry_after or 1.0)
        return _KINDS.get(self.kind, EnginewrightError)(self.message, hint=self.hint)


class Open(msgspec.Struct, tag=True):
    """Opens a bundle; ``options`` are ``LLM``'s."""

    path: str
    options: dict[str, Any]


class Submit(msgspec.Struct, tag=True):
    """Starts a request. ``params``: fields of SamplingParams. ``whole``: nobody wants pieces, but the answers alone."""

    number: int
    prompt: Sequence[int]
    params: dict[str, Any]
    tenant: str = ""
    priority: int | None = None
    request_class: str | None = None
    whole: bool = False


class Abort(msgspec.Struct, tag=True):
    """Ends a request: nothing more comes of it."""

    number: int


class Ask(msgspec.Struct, tag=True):
    """Asks for ``LLM.info``."""

    number: int


class Look(msgspec.Struct, tag=True):
    """Asks for what the engine is doing: ``Live.now``."""

    number: int


class Forget(msgspec.Struct, tag=True):
    """Forgets the prefixes of a tenant."""

    number: int
    tenant: str


class Close(msgspec.Struct, tag=True):
    """Ends the process once what is kept is written."""


ToEngine = Open | Submit | Abort | Ask | Look | Forget | Close


class Opened(msgspec.Struct, tag=True):
    """The bundle is open. ``hash`` is the bundle's, ``model`` are fields of ModelInfo, ``info`` is ``LLM.info``."""

    hash: str
    target: str
    model: dict[str, Any]
    info: dict[str, Any]
    pid: int


class Failed(msgspec.Struct, tag=True):
    """The bundle can't be opened."""

    problem: Problem


class Piece(msgspec.Struct, array_like=True):
    """A ``StreamPiece`` of a request."""

    number: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    logprobs: tuple[Logprobs, ...] | None = None


class Finished(msgspec.Struct, array_like=True):
    """One answer of a request that has ended. ``text``, ``token_ids`` and ``logprobs`` are whole only where no pieces
    were asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    score: float | None = None


class Ended(msgspec.Struct, array_like=True):
    """A request has ended: with its answers, or with a problem before the first token.

    ``times``: seconds it waited, read its prompt, and wrote; ``drafted``, ``accepted``: see ``RequestMetrics``.
    """

    number: int
    answers: tuple[Finished, ...] = ()
    problem: Problem | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    drafted: int = 0
    accepted: int = 0


class Events(msgspec.Struct, tag=True):
    """What a step brought."""

    pieces: list[Piece] = []
    ended: list[Ended] = []


class Answer(msgspec.Struct, tag=True):
    """Answers ``Ask``, ``Look`` or ``Forget``."""

    number: int
    value: dict[str, Any]


class Beat(msgspec.Struct, tag=True):
    """Comes each second. ``step_seconds``: how long the step that runs has taken, 0 for none; ``expected_seconds``: how
    long it should take, 0 where that isn't known."""

    step_seconds: float
    expected_seconds: float
    running: int
    waiting: int
    blocks_used: float
    steps: int
    preemptions: int


ToFrontEnd = Opened | Failed | Events | Answer | Beat

_encoder = msgspec.msgpack.Encoder(enc_hook=str)


def packed(message: ToEngine | ToFrontEnd) -> bytes:
    """A message as it goes through the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def plain_logprobs(entries: tuple[TokenLogprobs, ...] | None) -> tuple[Logprobs, ...] | None:
    """``TokenLogprobs`` as plain values."""
    return None if entries is None else tuple((one.token_id, one.logprob, one.top) for one in entries)
