"""The end of a process with an open stream, and the abilities of a forked one: both end soon, with the right code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

NO_FORK_WARNING = ("-W", "ignore::DeprecationWarning")
"""From Python 3.12 on a fork with threads running warns: of what is tested here."""

PRELUDE = """
import asyncio, atexit, gc, multiprocessing, os, signal, sys, threading, time
from enginewright import LLM, EnginewrightError, SamplingParams

LONG = SamplingParams(max_tokens=500, ignore_eos=True)
stepping, go_on = threading.Event(), threading.Event()  # a step has begun; held ones may go on

def opened(seconds=SECONDS, held_after=None):
    llm = LLM(sys.argv[1], memory="1MiB", threads=2)
    submit, steps = llm._executor.submit, []
    def slow(step):
        stepping.set()
        steps.append(1)
        if held_after is not None and len(steps) > held_after:
            go_on.wait()
        time.sleep(seconds if len(steps) > 25 else min(seconds, 0.01))
        return submit(step)
    llm._executor.submit = slow
    return llm

def forked(work):
    "Calls work in a forked child, whose exit code it returns."
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        work()
        sys.exit(0)  # takes the interpreter apart, as os._exit wouldn't
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(use):
    try:
        use()
    except EnginewrightError as e:
        assert "forked" in str(e) and "LLM(path)" in e.hint, e
    else:
        raise AssertionError("it was not refused")

def in_thread(work, daemon):
    thread = threading.Thread(target=work, daemon=daemon)
    thread.start()
    return thread

def first_piece(llm):
    stream = llm.stream([1, 2], LONG)
    next(stream)
    return stream

async def afirst_piece(llm):
    stream = llm.astream([1, 2], LONG)
    await anext(stream)
    return stream

def ready_when_the_exit_waits():
    "Says so once the main thread is in the loop's stop: a Ctrl-C is handled there."
    def watch():
        def frames():
            frame = sys._current_frames()[threading.main_thread().ident]
            while frame is not None:
                yield os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
                frame = frame.f_back
        while ("engine_loop.py", "stop") not in frames():
            time.sleep(0.001)
        print('ready', flush=True)
    in_thread(watch, True)
"""
STEP = 0.3
"""Seconds that a step takes, but for the first few, so that a stream of 500 tokens takes longer than LIMIT."""
LIMIT = 120.0
"""Seconds, for what takes one or two: a script that waited for its stream to end would take longer."""

EXITS = {
    "a stream is open": "llm = opened(); s = first_piece(llm)",
    "a stream was not begun": "llm = opened(); s = llm.stream([1, 2], LONG)",
    "a stream was dropped": "llm = opened(); first_piece(llm); del llm",
    "a stream is in a cycle": "llm = opened(); a = [first_piece(llm)]; a.append(a); del a, llm",
    "many streams are open": "llm = opened(); s = [first_piece(llm) for _ in range(20)]",
    "two models are open": "a, b = opened(), opened(); s = first_piece(a), first_piece(b)",
    "a step is running": "llm = opened(0); s = first_piece(llm); time.sleep(0.01)",
    "a stream in a function": "def main():\n  llm = opened(); s = first_piece(llm)\nmain()",
    "a stream within with": "with opened() as llm:\n  s = first_piece(llm)",
    "a stream after with": "with opened() as llm:\n  s = first_piece(llm)\n"
    "try: list(s)\nexcept EnginewrightError: pass",
    "closed twice": "llm = opened(); s = first_piece(llm); llm.close(); llm.close()",
    "a collected stream": "llm = opened(0.001); s = first_piece(llm); del s; gc.collect(); llm.generate([1])",
    "sys.exit": "llm = opened(); s = first_piece(llm); sys.exit(0)",
    "a daemon thread streams": "llm = opened(); in_thread(lambda: list(llm.stream([1], LONG)), True); stepping.wait()",
    "a daemon thread generates": "llm = opened(); in_thread(lambda: llm.generate([1], LONG), True); stepping.wait()",
    "daemon threads of a dropped model": "llm = opened()\nfor _ in range(9): in_thread(first_piece.__get__(llm), True)",
    "a thread finishes after the script": "llm = opened(0.001)\n"
    "def work():\n  threading.main_thread().join(); print(len(llm.generate([1], LONG)[0].token_ids))\n"
    "in_thread(work, False)",
    "atexit closes the model": "llm = opened(); atexit.register(llm.close); s = first_piece(llm)",
    "atexit generates": "llm = opened(0); s = first_piece(llm)\n"
    "atexit.register(lambda: print(len(llm.generate([1], SamplingParams(max_tokens=3))[0].token_ids)))",
    "an async stream is open": "llm = opened()\nasync def main():\n  global s; s = await afirst_piece(llm)\n"
    "asyncio.run(main())",
    "an async stream is left": "llm = opened()\nasync def main():\n  async for _ in llm.astream([1], LONG): break\n"
    "asyncio.run(main())",
    "an async task is running": "llm = opened()\nasync def main():\n  t = asyncio.create_task(afirst_piece(llm))\n"
    "  await asyncio.to_thread(stepping.wait)\nasyncio.run(main())",
    "a loop without its streams": "llm = opened(); l = asyncio.new_event_loop()\n"
    "s = l.run_until_complete(afirst_piece(llm)); l.close()",
    "a loop that isn't closed": "llm = opened(); l = asyncio.new_event_loop()\n"
    "s = l.run_until_complete(afirst_piece(llm))",
    "an async loop in a daemon thread": "llm = opened()\n"
    "async def main():\n  s = await afirst_piece(llm); await asyncio.sleep(600)\n"
    "in_thread(lambda: asyncio.run(main()), True); stepping.wait()",
    "an executor's thread": "import concurrent.futures\nllm = opened(0.001)\n"
    "concurrent.futures.ThreadPoolExecutor().submit(llm.generate, [1], LONG)",
    "logits in a daemon thread": "llm = opened(); in_thread(lambda: llm.logits([1] * 9), True)",
}
ENDED_BY = {
    "an exception": ("llm = opened(); s = first_piece(llm); raise ValueError", 1),
    "an exception within with": ("with opened() as llm:\n  s = first_piece(llm); raise ValueError", 1),
    "an exception in a coroutine": (
        "llm = opened()\nasync def main():\n  s = await afirst_piece(llm); raise ValueError\nasyncio.run(main())",
        1,
    ),
    "sys.exit(3)": ("llm = opened(); s = first_piece(llm); sys.exit(3)", 3),
    "sys.exit(3) within with": ("with opened() as llm:\n  s = first_piece(llm); sys.exit(3)", 3),
    "Ctrl-C": ("llm = opened(); s = first_piece(llm); print('ready', flush=True); list(s)", -signal.SIGINT),
    "Ctrl-C within with": (
        "with opened() as llm:\n  s = first_piece(llm); print('ready', flush=True); list(s)",
        -signal.SIGINT,
    ),
    "Ctrl-C in generate": (
        "llm = opened(); s = first_piece(llm); print('ready', flush=True); llm.generate([1], LONG)",
        -signal.SIGINT,
    ),
    "Ctrl-C in a coroutine": (
        "llm = opened()\nasync def main():\n  s = await afirst_piece(llm); print('ready', flush=True)\n"
        "  async for _ in s: pass\nasyncio.run(main())",
        -signal.SIGINT,
    ),
    "Ctrl-C at exit": (  # the step that runs takes longer than anybody waits
        "llm = opened(); llm.generate([1], SamplingParams(max_tokens=1))\n"
        "llm._executor.submit = lambda step: (stepping.set(), time.sleep(600))\n"
        "stepping.clear(); s = in_thread(lambda: llm.generate([1]), True); stepping.wait()\n"
        "ready_when_the_exit_waits()",
        -signal.SIGINT,
    ),
    "Ctrl-C while a thread works": (
        "llm = opened(0.002); in_thread(lambda: llm.generate([1], LONG), False); stepping.wait()\n"
        "print('ready', flush=True); time.sleep(600)",
        -signal.SIGINT,
    ),
    "SIGTERM": ("llm = opened(); s = first_piece(llm); print('ready', flush=True); list(s)", -signal.SIGTERM),
}
FORKS = {
    "generate": "refused(lambda: llm.generate([1]))",
    "generate text": "refused(lambda: llm.generate('a text'))",
    "chat": "refused(lambda: llm.chat([{'role': 'user', 'content': 'x'}]))",
    "stream": "refused(lambda: list(llm.stream([1])))",
    "the parent's stream": "refused(lambda: list(s))",
    "astream": "refused(lambda: asyncio.run(afirst_piece(llm)))",
    "logits": "refused(lambda: llm.logits([1, 2]))",
    "the parent's stream, closed": "s.close()",
    "the model, closed": "llm.close(); llm.close()",
    "the model, within with": "with llm: pass",
    "the model, dropped": "global llm, s; del llm, s; gc.collect()",
    "info": "assert llm.info()['parameters'] > 0 and llm.tokenizer.encode('a')",
    "its own model": "assert len(opened(0).generate([1], SamplingParams(max_tokens=3))[0].token_ids) == 3",
    "a child of its own": "assert forked(lambda: refused(lambda: llm.generate([1]))) == 0",
    "an error": "os.close(2); raise ValueError",
}
FORK_WHEN = {
    "idle": "llm.generate([1, 2], SamplingParams(max_tokens=20)); s = llm.stream([1])",
    "with a stream": "s = first_piece(llm)",
    "in a step": "s = first_piece(llm); [in_thread(lambda: llm.generate([1], LONG), True) for _ in range(3)]",
}
HELD_AFTER = {"idle": None, "with a stream": 100, "in a step": 1}
"""Steps that run freely. The next one waits until the children are gone, so that no stream ends before them."""


MULTIPROCESSING = """
def work(pipe):
    try: llm.generate([1])
    except EnginewrightError as e: pipe.send(str(e))
llm = opened(0.005, held_after=20); s = first_piece(llm)
ours, theirs = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=work, args=[theirs])
child.start(); child.join(); go_on.set(); print(child.exitcode, ours.recv())
"""
SAMPLE = {
    "a stream is open",
    "a step is running",
    "a daemon thread generates",
    "a thread finishes after the script",
    "atexit generates",
    "an async stream is open",
    "an exception within with",
    "Ctrl-C",
    "Ctrl-C at exit",
}
"""The rest takes half a minute."""


def cases(table: Mapping[str, Any]) -> list[Any]:
    marks = {name: () if name in SAMPLE else (pytest.mark.soak,) for name in table}
    return [pytest.param(value, marks=marks[name], id=name) for name, value in table.items()]


def python(code: str, bundle: Path, *, send: signal.Signals | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a script; ``send`` is sent to it once it has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, *NO_FORK_WARNING, "-c", PRELUDE.replace("SECONDS", str(STEP)) + code, str(bundle)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    hangs = threading.Timer(LIMIT, os.killpg, [process.pid, signal.SIGKILL])
    hangs.start()
    try:
        if send is not None:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(send)
        out, err = process.communicate()
    finally:
        hangs.cancel()
    return process.returncode, out, err


@pytest.mark.parametrize("code", cases(EXITS))
def test_a_script_ends_by_itself(code: str, tiny_bundle: Path) -> None:
    assert python(code, tiny_bundle)[::2] == (0, "")


@pytest.mark.parametrize("ending", cases(ENDED_BY))
def test_what_ended_it_is_its_code(ending: tuple[str, int], tiny_bundle: Path) -> None:
    code, expected = ending
    send = signal.Signals(-expected) if expected < 0 else None
    assert python(code, tiny_bundle, send=send)[0] == expected


@pytest.mark.matrix
@pytest.mark.parametrize("when", FORK_WHEN)
def test_forked_children(when: str, tiny_bundle: Path) -> None:
    code = f"llm = opened(0.005, held_after={HELD_AFTER[when]})\n{FORK_WHEN[when]}\n"
    for use, lines in FORKS.items():
        body = "\n".join(f"  {line}" for line in lines.splitlines())
        code += f"def work():\n{body}\nprint({use!r}, forked(work))\n"
    code += "go_on.set()\nassert len(llm.generate([1], SamplingParams(max_tokens=3))[0].token_ids) == 3\n"
    returncode, out, err = python(code, tiny_bundle)
    assert (returncode, err) == (0, "")
    assert out.splitlines() == [f"{use} {int(use == 'an error')}" for use in FORKS]


def test_a_process_of_multiprocessing(tiny_bundle: Path) -> None:
    returncode, out, err = python(MULTIPROCESSING, tiny_bundle)
    assert (returncode, err) == (0, "") and out.startswith("0 this process was forked")
