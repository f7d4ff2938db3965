"""Runs requests and waits for them, in threads and in coroutines, with a progress bar."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import TYPE_CHECKING

from ..requests.outputs import StreamPiece
from ..requests.request import Request
from ..shared.errors import EnginewrightError, MissingDependencyError, RequestError, shown
from ..tasks.base import Prepared, Result
from ..tasks.generate import PreparedPrompt
from .engine_loop import EngineLoop

if TYPE_CHECKING:
    import asyncio

Event = StreamPiece | EnginewrightError
Advance = Callable[[int, bool], None]
"""A function that moves the progress bar. Its arguments: the number of new tokens, and True if a request has ended."""

MANY_PROMPTS = 8
"""The number of prompts from which on a terminal shows a bar, if ``progress`` is None."""


def run_all(engine: EngineLoop, requests: Sequence[Request], progress: bool | None = False) -> None:
    """Runs requests and returns when all have ended. If it is interrupted, they are aborted.

    ``progress``: True shows a bar; None shows it on a terminal, for many requests. Raises an engine's error, but not a
    single request's.
    """
    with closing(_pieces(engine, requests)) as pieces:
        if not _shows_bar(len(requests), progress):
            for _ in pieces:
                pass
            return
        with progress_bar(len(requests)) as advance:
            for piece in pieces:
                advance(len(piece.token_ids), piece.finish_reason is not None)


async def arun_all(engine: EngineLoop, requests: Sequence[Request]) -> None:
    """Runs ``run_all`` as a coroutine, without a progress bar."""
    async with aclosing(_apieces(engine, requests)) as pieces:
        async for _ in pieces:
            pass


def _pieces(engine: EngineLoop, requests: Sequence[Request]) -> Generator[StreamPiece, None, None]:
    """Runs requests and yields their pieces; closing the generator aborts them."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    try:
        engine.submit(events.put, *requests)
        unfinished = len(requests)
        while unfinished:
            piece = _piece(events.get())
            unfinished -= piece.finish_reason is not None
            yield piece
    except BaseException:  # also where the generator is closed
        for request in requests:
            engine.abort(request)
        raise


async def _apieces(engine: EngineLoop, requests: Sequence[Request]) -> AsyncGenerator[StreamPiece, None]:
    """Yields the pieces of requests as ``_pieces`` does, for coroutines."""
    events, put = _async_queue()
    try:
        engine.submit(put, *requests)
        unfinished = len(requests)
        while unfinished:
            piece = _piece(await events.get())
            unfinished -= piece.finish_reason is not None
            yield piece
    except BaseException:
        for request in requests:
            engine.abort(request)
        raise


def answers(
    engine: EngineLoop, tasks: Sequence[Prepared[Result]], raise_errors: bool, progress: bool | None = False
) -> list[Result]:
    """Runs the requests of some tasks and returns their results, in order; the arguments are those of ``run_all`` and
    ``results``.
    """
    run_all(engine, [request for one in tasks for request in one.requests], progress)
    return results(tasks, raise_errors)


async def answers_async(engine: EngineLoop, tasks: Sequence[Prepared[Result]], raise_errors: bool) -> list[Result]:
    """Runs ``answers`` as a coroutine, without a progress bar."""
    await arun_all(engine, [request for one in tasks for request in one.requests])
    return results(tasks, raise_errors)


def stream(engine: EngineLoop, asked: PreparedPrompt) -> Generator[StreamPiece, None, None]:
    """Yields the pieces of a prompt's requests; closing the generator aborts them. Raises the error of a request."""
    _check_streamed(asked)
    return _stream(engine, asked)


def _stream(engine: EngineLoop, asked: PreparedPrompt) -> Generator[StreamPiece, None, None]:
    with closing(_pieces(engine, asked.requests)) as pieces:
        for piece in pieces:
            _check_piece(piece, asked)
            yield piece


def astream(engine: EngineLoop, asked: PreparedPrompt) -> AsyncGenerator[StreamPiece, None]:
    """Runs ``stream`` as a coroutine."""
    _check_streamed(asked)
    return _astream(engine, asked)


async def _astream(engine: EngineLoop, asked: PreparedPrompt) -> AsyncGenerator[StreamPiece, None]:
    async with aclosing(_apieces(engine, asked.requests)) as pieces:
        async for piece in pieces:
            _check_piece(piece, asked)
            yield piece


def results(tasks: Sequence[Prepared[Result]], raise_errors: bool) -> list[Result]:
    """Returns the results of tasks whose requests have ended, in order.

    With ``raise_errors``, raises the first error.
    """
    failed = next((one.error for one in tasks if one.error is not None), None)
    if failed is not None and raise_errors:
        raise failed
    return [one.result() for one in tasks]


def wanted(progress: bool | None, use_tqdm: bool | Callable[..., object] | None) -> bool | None:
    """Returns ``run_all``'s argument ``progress``: True shows a bar, False shows none, None depends on the terminal.

    Args:
        progress: our argument; None if it isn't set.
        use_tqdm: vLLM's argument, used if ``progress`` is None.

    Raises RequestError for a wrong type.
    """
    for name, value in (("progress", progress), ("use_tqdm", use_tqdm)):
        if value is not None and not isinstance(value, bool) and not (name == "use_tqdm" and callable(value)):
            raise RequestError(
                f"{name}: {shown(value)} isn't True, False or None", hint="None shows a bar on terminals."
            )
    shows = use_tqdm if progress is None else progress
    return True if callable(shows) else shows  # vLLM takes what makes a bar, too: it gets ours


def _shows_bar(prompts: int, show: bool | None) -> bool:
    """Returns True if a bar is shown for ``prompts`` prompts; ``show`` is the argument ``progress`` of ``run_all``."""
    if show is not None:
        return show
    on_terminal = prompts >= MANY_PROMPTS and sys.stderr is not None and sys.stderr.isatty()
    return on_terminal and importlib.util.find_spec("rich") is not None


@contextmanager
def progress_bar(prompts: int) -> Iterator[Advance]:
    """Shows a progress bar that counts finished prompts, and tokens per second. Yields the function that advances it.

    ``prompts``: the number of prompts.
    """
    with MissingDependencyError.of(("rich",), "progress: a bar", "cli", "leave progress out"):
        from rich.console import Console  # 50 ms that nobody else waits for
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("", total=prompts, speed="")
        tokens_so_far = 0

        def advance(tokens: int, ended: bool) -> None:
            nonlocal tokens_so_far
            tokens_so_far += tokens
            seconds = bar.tasks[0].elapsed or 0.0
            speed = f"{tokens_so_far / seconds:,.0f} tokens/s" if seconds > 0 else ""
            bar.update(task, advance=int(ended), speed=speed)

        yield advance


def _async_queue() -> tuple[asyncio.Queue[Event], Callable[[Event], None]]:
    """Returns a queue of the running event loop, and a function that puts events into it from any thread."""
    import asyncio  # here, because callers without coroutines don't need it, and its import takes time

    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop was closed: nobody listens any more
            loop.call_soon_threadsafe(events.put_nowait, event)

    return events, put


def _check_streamed(asked: PreparedPrompt) -> None:
    params = asked.params
    for name, wrong in (("best_of", params.best_of is not None), ("num_beams", params.num_beams > 1)):
        if wrong:
            raise RequestError(
                f"{name}: which answers are given is known at their end, so they can't be streamed",
                hint="Call generate or chat, or leave it out.",
            )


def _check_piece(piece: StreamPiece, asked: PreparedPrompt) -> None:
    if piece.finish_reason == "error":
        error = asked.requests[piece.index].error
        assert error is not None
        raise error


def _piece(event: Event) -> StreamPiece:
    if isinstance(event, EnginewrightError):
        raise event
    return event
