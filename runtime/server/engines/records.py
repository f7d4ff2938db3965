"""Messages of the front end and an engine's process: msgspec records, each with its length, through a socket.

    front end -> engine    Open, then Submit, Abort, Ask and Close
    engine -> front end    Opened or Failed, then Events (all tokens of a step in one), Answer, Beat

The front end makes a pair of sockets, of which the engine inherits one; no other process can reach them. The module
imports little, because the command starts its engines before it imports the front end.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import socket
import subprocess
import sys
from typing import Any, ClassVar

import msgspec

from ...engine.pulse import Pulse
from ...requests.outputs import Logprobs, RequestMetrics
from ...requests.request_options import RequestOptions
from ...shared.errors import KINDS, EnginewrightError

Attribute = bool | int | float | str | None

LENGTH_BYTES = 4
MOST_BYTES = 1 << 28
"""The most bytes of a message."""


class Problem(msgspec.Struct, array_like=True):
    """An ``EnginewrightError`` as a message: the name of its class, and its attributes that are numbers or text."""

    kind: str
    message: str
    hint: str | None = None
    attributes: dict[str, Attribute] = {}

    @classmethod
    def from_error(cls, error: EnginewrightError) -> Problem:
        known = next(kind for kind in type(error).__mro__ if KINDS.get(kind.__name__) is kind)
        others = {name: value for name, value in vars(error).items() if name not in ("message", "hint")}
        attributes = {name: value for name, value in others.items() if isinstance(value, Attribute)}
        return cls(known.__name__, error.message, error.hint, attributes)

    def error(self) -> EnginewrightError:
        """Returns the error."""
        return KINDS.get(self.kind, EnginewrightError).restored(self.message, self.hint, self.attributes)


class Open(msgspec.Struct, tag=True):
    """Opens a bundle. ``options``: arguments of ``LLM``."""

    path: str
    options: dict[str, Any]


class Submit(msgspec.Struct, tag=True):
    """Starts the requests of a task.

    Attributes:
        task: a record of ``tasks.table``, which the engine's process reads and checks.
        options: the options of its requests.
        whole: True sends the result alone, without pieces.
        version: hash of the bundle that the prompt was made for.
    """

    number: int
    task: Any
    options: RequestOptions = RequestOptions()
    whole: bool = False
    version: str = ""


class Abort(msgspec.Struct, tag=True):
    """Ends a request. The engine sends nothing more for it."""

    number: int


class Ask(msgspec.Struct, tag=True):
    """Asks the engine's process a question; ``Answer`` has the same number.

    Attributes:
        topic: a key of ``engine_process.ANSWERS``.
    """

    number: int
    topic: str


class Close(msgspec.Struct, tag=True):
    """Ends the process, after prefixes and grammars that are to be kept are written."""


ToEngine = Open | Submit | Abort | Ask | Close


class Opened(msgspec.Struct, tag=True):
    """Reports that the bundle is open. ``hash``: its hash; ``model``: fields of ModelInfo; ``info``: ``LLM.info``."""

    hash: str
    target: str
    model: dict[str, Any]
    info: dict[str, Any]
    pid: int


class Greeting(msgspec.Struct, tag=True):
    """The first message of a replica to the front end that called it.

    ``key``: the front end's secret, which it sent the replica through Ray. ``node``: the replica's machine. ``pid``:
    the replica's process, which is the parent of the engine.
    """

    key: bytes
    replica: str
    node: str
    pid: int
    opened: Opened


class Failed(msgspec.Struct, tag=True):
    """Reports that the bundle can't be opened."""

    problem: Problem


class Piece(msgspec.Struct, array_like=True):
    """A ``StreamPiece`` of a request."""

    number: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    logprobs: tuple[Logprobs, ...] | None = None


class Ended(msgspec.Struct, array_like=True):
    """A task has ended: with its result, or with a problem before the first token.

    Attributes:
        result: the result, as ``tasks.table.received_result`` reads it.
        metrics: times and counts of the task's first request.
        prompt_tokens: the tokens of the prompts of all its requests.
    """

    number: int
    result: Any = None
    problem: Problem | None = None
    metrics: RequestMetrics = RequestMetrics(0.0)
    prompt_tokens: int = 0


class Events(msgspec.Struct, tag=True):
    """The new tokens and the ended requests of a step."""

    pieces: list[Piece] = []
    ended: list[Ended] = []


class Answer(msgspec.Struct, tag=True):
    """The answer to the ``Ask`` with this number; empty if a replica has none."""

    number: int
    value: dict[str, Any]


class Beat(msgspec.Struct, tag=True):
    """The engine's load, sent each second."""

    pulse: Pulse


ToFrontEnd = Opened | Failed | Events | Answer | Beat

Sent = ToEngine | ToFrontEnd | Greeting


def _plain(value: Any) -> Any:
    """Converts an array to its shape, type and bytes, and any other value to its text. numpy isn't imported here."""
    return (value.shape, value.dtype.str, value.tobytes()) if hasattr(value, "tobytes") else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def digest(task: Any) -> bytes:
    """Returns a digest of a task, by which it is recognised when a client sends it again."""
    return hashlib.sha256(_encoder.encode(task)).digest()


def packed(message: Sent) -> bytes:
    """Returns a message's length and bytes, for the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Engine:
    """An engine's process. It opens its bundle when it starts.

    Args:
        path, options: see ``Open``.

    Attributes:
        program: Python's arguments that start the process; the number of the inherited socket follows.
        process: the process.
        socket: the front end's end of the pair of sockets.
    """

    program: ClassVar[tuple[str, ...]] = ("-m", "enginewright.runtime.server.engines.engine_process")

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            program = [sys.executable, *self.program, str(theirs.fileno())]
            self.process = subprocess.Popen(program, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        with contextlib.suppress(OSError):  # it has died already, as who reads from the socket sees
            self.socket.sendall(packed(Open(path, options)))
        self.socket.setblocking(False)

    def kill(self) -> None:
        """Ends the process at once, if it runs."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
