"""Has coding agents do a task against ``optimize serve``: their protocol is tried, not a model.

    python benchmarks/agents.py [--only codex opencode ...] [--json FILE]

npm and pip fetch the agents (``AGENTS``) into build/bench/agents. They ask a server of ours, whose tokens, chat
template, formats, cache and protocols are the real ones; but what the model says is a script: calls of the agent's own
tools, or for aider files, then a sentence. A task has five turns, each in a new process of the agent's, which continues
the conversation. In the third the model's call breaks off before its end, and in the fourth a tool's result is a
picture. The task is done where every turn ends well, the tools did their work, and the last sentence is shown.

Of each request the prompt's tokens and those that were found in the cache are noted. The first request of a turn begins
with all that was said in the turn before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from peers.machine import commit

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parent.parent
BUILD = REPOSITORY / "build" / "bench" / "agents"
AGENTS = {
    "codex": ("@openai/codex@0.171.0",),
    "codex --oss": ("@openai/codex@0.171.0",),
    "opencode": ("opencode-ai@1.18.33",),
    "AI SDK": ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7"),
    "aider": ("aider-chat==0.86.2",),
}
"""Agent -> the packages of npm, or of pip, that it is."""
CONTEXT = 65536
ASSISTANT = "<|im_start|>assistant\n"
SENTENCE = "Hello, how are you? It is 18 degrees and clear."
Replies = Sequence[tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]]
"""Questions, patterns, and the calls that answer each: a pattern of the tool's name, and arguments."""
NOTE = "omitted: this model reads text only]"
"""The end of what the server writes in a picture's place."""
SECONDS = 300
"""A turn may take so long: an agent that waits for what never comes is ended."""

TEMPLATE = """
{%- if tools %}<|im_start|>system
{%- for m in messages %}{% if m.role in ('system', 'developer') and loop.first %}
{{ m.content }}{% endif %}{% endfor %}

# Tools
<file_sep>
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

A call: <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and m.role in ('system', 'developer')) %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PICTURE = "picture.png"


@dataclass(frozen=True)
class Step:
    """A turn of the task.

    Attributes:
        prompt: what the user says.
        command: of the call that answers it; empty: the call that looks at the picture, or none.
        sentence: what the model says of the call's result.
        file: what is in a.txt afterwards.
        cut: whether the call breaks off first, before it is made as a whole.
        looks: whether the call looks at the picture.
    """

    prompt: str
    command: str
    sentence: str
    file: str
    cut: bool = False
    looks: bool = False


STEPS = (
    Step("Write hello into a.txt, and show it.", "printf hello > a.txt && cat a.txt", "a.txt says hello now.", "hello"),
    Step(
        "Add a space and the word world.", "printf ' world' >> a.txt; cat a.txt", "I have added world.", "hello world"
    ),
    Step(
        "Add an exclamation mark.", "printf '!' >> a.txt; cat a.txt", "It ends with a mark.", "hello world!", cut=True
    ),
    Step(f"Look at {PICTURE}.", "", "I was told that it is a picture.", "hello world!", looks=True),
    Step("How many bytes has a.txt?", "wc -c < a.txt", "It has 12 bytes: the task is done.", "hello world!"),
)


@dataclass(frozen=True)
class Agent:
    """The way to start an agent.

    Attributes:
        tool, argument: its tool that runs a command, and the parameter that takes it; ``more``: other parameters.
            An agent without tools has "": its model writes files.
        look: the tool that shows a picture, and the parameter that takes its path.
        settings: its configuration files, by their path in a home folder, with {url}.
        command: the command of a turn; ``again`` is in it from the second turn on.
        variables: environment variables, with {url}.
    """

    tool: str
    argument: str
    more: Mapping[str, Any]
    look: tuple[str, str]
    settings: Mapping[str, str]
    command: Callable[[str, bool], list[str]]
    variables: Mapping[str, str] = field(default_factory=dict)


CODEX = """model = "scripted"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
OPENCODE = {
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"scripted": {"tool_call": True, "limit": {"context": CONTEXT, "output": 4096}}},
        }
    },
    "model": "local/scripted",
    "autoupdate": False,
    "share": "disabled",
}


def _codex(prompt: str, again: bool, *more: str) -> list[str]:
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *more, *(["resume", "--last"] if again else []), *options, prompt]


def _aider(prompt: str, again: bool) -> list[str]:
    options = ["--model", "openai/scripted", "--yes-always", "--no-git", "--no-check-update", "--no-analytics"]
    options += ["--no-show-model-warnings", "--no-pretty", "--edit-format", "whole", "--restore-chat-history"]
    files = ["a.txt", *([PICTURE] if PICTURE in prompt else [])]
    return ["aider", *options, "--message", prompt, *files]


RUN = {
    "codex": Agent("exec_command", "cmd", {}, ("view_image", "path"), {".codex/config.toml": CODEX}, _codex),
    "codex --oss": Agent(
        "exec_command",
        "cmd",
        {},
        ("view_image", "path"),
        {},
        lambda prompt, again: _codex(prompt, again, "--oss", "--local-provider", "ollama", "--model", "scripted"),
        {"CODEX_OSS_BASE_URL": "{url}/v1"},
    ),
    "opencode": Agent(
        "bash",
        "command",
        {"timeout": 20000, "description": "Runs it"},
        ("read", "filePath"),
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
        lambda prompt, again: ["opencode", "run", *(["--continue"] if again else []), prompt],
    ),
    "AI SDK": Agent(
        "run",
        "command",
        {},
        ("look", "path"),
        {},
        lambda prompt, again: ["node", str(HERE.parent / "clients" / "ai_sdk_agent.mjs"), prompt],
        {"SERVED_URL": "{url}"},
    ),
    "aider": Agent("", "", {}, ("", ""), {}, _aider, {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none"}),
}


def answers(agent: Agent, step: Step, folder: Path) -> list[str]:
    """Returns what the model says in a turn, one answer after the other."""
    if not agent.tool:
        return ["I will write a file nam" if step.cut else f"a.txt\n```\n{step.file}\n```\n{step.sentence}"]
    call = {"name": agent.tool, "arguments": {agent.argument: step.command, **agent.more}}
    if step.looks:
        call = {"name": agent.look[0], "arguments": {agent.look[1]: str(folder / PICTURE)}}
    written = f"I will do that.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    cut = [written[: written.index("printf") + 9]] if step.cut else []
    return [*cut, written, step.sentence]


# The server


class Scripted:
    """An executor whose answer follows from the prompt, by ``said``.

    Tokens are read from the slots of its cache, as a model's keys are.
    """

    def __init__(self, tokenizer: Any, said: Callable[[str], str], blocks: int, end: int) -> None:
        from enginewright.runtime.shared.contracts import CacheGroup, ExecutorCaps

        self.caps = ExecutorCaps(shared_blocks=True)
        group = CacheGroup("all", (0,), kv_heads=1, key_head_size=1, value_head_size=1, block_size=32, window=0)
        self.cache_groups = (group,)
        self.blocks = {"all": blocks}
        self._memory = np.zeros(blocks * 32, np.int32)
        self._end = end
        self._begin = np.array(tokenizer.encode(ASSISTANT, add_special_tokens=False), np.int32)
        self._tokenizer, self._said = tokenizer, said
        self._known: dict[bytes, list[int]] = {}

    def submit(self, step: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self.run(step))
        return done

    def run(self, step: Any) -> Any:
        """A step: see ``executors.base.Executor``."""
        from enginewright.runtime.shared.contracts import StepOutput

        pairs = step.copies.get("all")
        blocks = self._memory.reshape(-1, 32)
        if pairs is not None:
            blocks[pairs[:, 1]] = blocks[pairs[:, 0]]
        self._memory[step.slots["all"]] = step.ids
        owner = np.searchsorted(step.q_start, step.rows, side="right") - 1
        tokens = []
        for b, row in zip(owner, step.rows, strict=True):
            places = np.arange(int(step.positions[row]) + 1)
            slots = step.block_tables["all"][b][places // 32] * 32 + places % 32
            tokens.append(self._next(self._memory[slots]))
        return StepOutput(tokens=np.array(tokens, np.int32))

    def _next(self, seen: npt.NDArray[np.int32]) -> int:
        width = len(self._begin)
        windows = np.lib.stride_tricks.sliding_window_view(seen, width) if len(seen) >= width else np.zeros((0, width))
        begins = np.flatnonzero((windows == self._begin).all(axis=1))
        if not len(begins):
            return self._end
        answer = self._answer(seen[: int(begins[-1])])
        written = len(seen) - int(begins[-1]) - width
        return answer[min(written, len(answer) - 1)]

    def _answer(self, prompt: npt.NDArray[np.int32]) -> list[int]:
        if (answer := self._known.get(key := prompt.tobytes())) is None:
            text = self._said(self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False))
            answer = [*self._tokenizer.encode(text, add_special_tokens=False), self._end]
            self._known[key] = answer
        return answer

    def describe(self) -> dict[str, str | int]:
        return {"target": "cpu"}

    def close(self) -> None:
        """Nothing runs between steps."""


def turn(prompt: str, agent: Agent, folder: Path) -> str:
    """Returns the reply to a prompt of a task: the next answer of the step whose prompt was written last.

    A conversation without tools gets a title, but for an agent that has none.
    """
    last = max(STEPS, key=lambda step: prompt.rfind(step.prompt))
    at = prompt.rfind(last.prompt)
    if at < 0 or (agent.tool and "<tools>" not in prompt):
        return "A small file"
    texts = answers(agent, last, folder)
    return texts[min(prompt.count(ASSISTANT, at), len(texts) - 1)]


def reply(prompt: str, replies: Replies) -> str:
    """The scripted answer to a prompt of ``TEMPLATE``, chosen by the first pattern found in the last message.

    Calls if tools are offered, the first call's arguments as JSON if none are, and a sentence to any other question. A
    call's name is a pattern too: the first such name that is offered is called.
    """
    last = prompt.rpartition("<|im_start|>user\n")[2]
    calls = next((calls for question, calls in replies if re.search(question, last)), [])
    offered = re.findall(r'"name": "(\w+)"', prompt.partition("<tools>")[2].partition("</tools>")[0])
    if not calls or (not offered and not calls[0][1]):
        return SENTENCE
    if not offered:
        return json.dumps(calls[0][1], ensure_ascii=False)
    parts = []
    for pattern, arguments in calls:
        name = next((one for one in offered if re.fullmatch(pattern, one)), pattern)
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{call}\n</tool_call>")
    return "\n".join(parts)


def engine(socket: int) -> None:
    """The engine's process, with a script in place of a model. Notes each prompt and what of it was cached."""
    from enginewright import LLM
    from enginewright.runtime.bundle.reader import Bundle
    from enginewright.runtime.server.engines import engine_process
    from enginewright.runtime.text.tokenizer import Tokenizer

    tokenizers: list[Tokenizer] = []

    def scripted(path: str, **options: Any) -> LLM:
        bundle = Bundle.open(path)
        tokenizer = Tokenizer(bundle.tokenizer_files())
        tokenizers.append(tokenizer)
        blocks, end = 4 * CONTEXT // 32, bundle.model.eos_token_ids[0]
        script: Callable[[str], str]
        if "REPLIES" in os.environ:
            replies = json.loads(Path(os.environ["REPLIES"]).read_text(encoding="utf-8"))
            script = partial(reply, replies=replies)
        else:
            script = partial(turn, agent=RUN[os.environ["AGENT"]], folder=Path(os.environ["WORK"]))
        executor = Scripted(tokenizer, script, blocks, end)
        llm = LLM.from_executor(executor, bundle.model, tokenizer, max_requests=8)  # type: ignore[arg-type]
        llm._bundle = bundle
        return llm

    ended = engine_process._ended

    def noted(number: int, result: Any, whole: bool) -> Any:
        with open(os.environ["NOTES"], "a", encoding="utf-8") as notes:
            ids = result.prompt_token_ids
            row = {"prompt": len(ids), "cached": result.num_cached_tokens or 0, "answer": len(result.token_ids)}
            row["pictures"] = tokenizers[-1].decode(ids).count(NOTE)
            notes.write(json.dumps(row) + "\n")
        return ended(number, result, whole)

    engine_process.LLM = scripted  # type: ignore[assignment,misc]
    engine_process._ended = noted
    engine_process.main(socket)


def serve(bundle: str) -> None:
    """``optimize serve`` of a bundle, whose engine is ``engine``."""
    from enginewright.__main__ import main as optimize
    from enginewright.runtime.server.engines.records import Engine

    Engine.program = (str(HERE), "--engine")
    sys.argv = ["optimize", "serve", bundle, "--port", "0", "--json"]
    optimize()


# What it is run with


def scripted_bundle() -> Path:
    """The bundle that a scripted engine is started with, made where there is none."""
    bundle = BUILD / "scripted.bundle"
    if not bundle.exists():
        command = [sys.executable, str(REPOSITORY / "examples" / "fetch_model.py")]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        made_bundle(Path(printed), bundle)
    return bundle


def made_bundle(model: Path, path: Path) -> None:
    """Exports a tiny random model with the tokens of a GGUF file, a template with tools, and a long context."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from enginewright.optimizer.capture.gguf.file import open_gguf
    from enginewright.optimizer.capture.gguf.model import read_tokenizer
    from enginewright.optimizer.export import export
    from enginewright.runtime.text.tokenizer import library_tokenizer

    files, _ = read_tokenizer(open_gguf(model))
    assert files is not None and files.tokenizer_json is not None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library_tokenizer(files.tokenizer_json),
        bos_token=files.special_tokens["bos_token"],
        eos_token=files.special_tokens["eos_token"],
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    export(LlamaForCausalLM(config).eval(), path, tokenizer=tokenizer, recipe="f32", targets=["cpu"])


def installed(name: str) -> Path:
    """The folder of an agent's programs, fetched where that wasn't done before."""
    packages = AGENTS[name]
    folder = BUILD / re.sub(r"\W+", "-", packages[0])
    stamp = folder / "packages.txt"
    pip = "==" in packages[0]
    if not stamp.exists() or stamp.read_text() != "\n".join(packages):
        print(f"fetches {', '.join(packages)}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        if pip:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
        else:
            subprocess.run(["npm", "install", "--silent", "--prefix", str(folder), *packages], check=True)
        stamp.write_text("\n".join(packages))
    return folder / ("bin" if pip else "node_modules/.bin")


@contextmanager
def server(bundle: Path, environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """The address of a server with a scripted engine."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(HERE), "--serve", str(bundle)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if line.rstrip() == "}":
                    break
            if "url" not in (about := json.loads(printed or "{}")):
                raise SystemExit(f"the server doesn't start: {printed or log.read_text()}")
            yield str(about["url"])
        finally:
            process.terminate()
            process.wait()


def task(name: str, bundle: Path, folder: Path) -> dict[str, Any]:
    """Has an agent do the task: what came of each turn, and the requests that it made."""
    agent, programs = RUN[name], installed(name)
    home, work, notes = folder / "home", folder / "work", folder / "notes.jsonl"
    work.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(work)], check=True)
    (work / PICTURE).write_bytes(picture())
    environment = {
        "AGENT": name,
        "NOTES": str(notes),
        "WORK": str(work),
        "HOME": str(home),
        "PWD": str(work),
        "CODEX_HOME": str(home / ".codex"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "NODE_PATH": str(programs.parent),
    }
    (home / ".codex").mkdir(parents=True)
    turns = []
    with server(bundle, environment, folder / "server.log") as url:
        for place, text in agent.settings.items():
            file = home / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("{url}", url), encoding="utf-8")
        environment |= {key: value.replace("{url}", url) for key, value in agent.variables.items()}
        for number, step in enumerate(STEPS):
            before = len(_notes(notes))
            command = agent.command(step.prompt, number > 0)
            try:
                done = subprocess.run(
                    command,
                    check=False,
                    capture_output=True,
                    text=True,
                    cwd=work,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    timeout=SECONDS,
                )
                code, output = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as e:
                code, output = -1, str(e.stdout or "") + str(e.stderr or "")
            file = work / "a.txt"
            requests = _notes(notes)[before:]
            text = file.read_text(encoding="utf-8").removesuffix("\n") if file.exists() else None
            row = {"exit_code": code, "said": step.sentence in output, "requests": requests, "file": text}
            whole = step.cut and not agent.tool  # without tools there is no second answer
            row["done"] = code == 0 and (whole or (row["said"] and text == step.file))
            if not row["done"]:
                row["output"] = output[-1500:]
                row["server"] = (folder / "server.log").read_text(encoding="utf-8")[-1500:]
            turns.append(row)
    return {"agent": AGENTS[name][0], "turns": turns, **judged(turns)}


def judged(took: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns if the task was done, which share of a turn's beginning was in the cache, and how many pictures came."""
    shares = []
    for before, turn in pairwise(took):
        if before["requests"] and turn["requests"]:
            last, first = longest(before["requests"]), longest(turn["requests"][:2])
            known = last["prompt"] + last["answer"] - 1  # the last token never gets into a cache
            shares.append(min(first["cached"] / known, 1.0))
    done = len(took) == len(STEPS) and all(turn["done"] for turn in took)
    pictures = max((request.get("pictures", 0) for turn in took for request in turn["requests"]), default=0)
    return {"done": done, "cached_of_the_turn_before": shares, "pictures": pictures}


def picture() -> bytes:
    """A red square, as a PNG."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    size = 32
    rows = (b"\0" + b"\xff\0\0" * size) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")


def longest(requests: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """The request with the longest prompt: the conversation, not the one for a title."""
    return max(requests, key=lambda one: one["prompt"])


def _notes(file: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main() -> int:
    """Runs the tasks, prints what came of them, and exits with 1 where one wasn't done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        engine(options.engine)
        return 0
    if options.serve is not None:
        serve(options.serve)
        return 0
    bundle = scripted_bundle()
    result: dict[str, Any] = {"date": date.today().isoformat(), "commit": commit(), "agents": {}}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            result["agents"][name] = found_of = task(name, bundle, Path(folder))
        shares = ", ".join(f"{share:.2%}" for share in found_of["cached_of_the_turn_before"])
        print(f"{name}: {'done' if found_of['done'] else 'NOT done'}; cached of the turn before: {shares}")
        if not found_of["done"]:
            print(json.dumps(found_of, indent=1))
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["done"] for one in result["agents"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
