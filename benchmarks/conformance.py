"""Runs what others wrote to test a server of this kind against ``optimize serve``, and writes each test's outcome.

    python benchmarks/conformance.py BUNDLE [--embed BUNDLE --rerank BUNDLE --classify BUNDLE --token-classify BUNDLE]
        [--only SUITE ...] [--seconds 60] [--json FILE]

- openai: the tests that come with OpenAI's own client (its source package), of chat, completions, models and
  responses; with ``--embed`` also of embeddings.
- pooled, with ``--embed`` and ``--rerank``: clients of embeddings and rerankers, and LangChain's standard tests of
  embeddings (``clients/pooled_cases.py``).
- anthropic: the tests that come with Anthropic's own client, of messages.
- open-responses: answers of /v1/responses, whole and streamed, checked by the types of Open Responses.
- langchain: LangChain's standard tests of chat models, by its clients of OpenAI's two protocols and Anthropic's.
- canitoolcall: scenarios with tools, each streamed and whole, by ``canitoolcall probe``.
- llama.cpp: the tests of llama.cpp's server (in the source package of llama-cpp-python), those that concern the
  protocol. They start a server for each test: ``--as-llama-server`` makes ``optimize serve`` of its flags.
- lm-eval: log-likelihoods by ``local-completions``, compared with ``LLM``'s and with those of ``optimize eval``.
- schemathesis: requests made at random from /openapi.json, for ``--seconds``.
- clients: what docs/use/clients.md has for each client, tools in two rounds, a structured answer, and a prompt that is
  too long (``clients/``). The tables in the notes are made of JSON files that have these, or pooled and openai:
  ``--page benchmarks/notes/conformance.md``.
- agents: coding agents do a task of five turns (``agents.py``).

pip downloads what is needed into ``--folder``: packages into environments of their own, tests beside them. None of it
is shipped. A test that asks for what isn't there must fail as ``conformance.toml`` says, with the reason that it gives;
one that fails otherwise has failed. Exits with 1 where one has.

A small model can't be relied on to call a tool. So langchain, canitoolcall and clients ask the server of ``agents.py``,
in which a script stands for the model and answers what these tests ask. Protocols, chat template, chat format and cache
are the real ones.

BUNDLE should be SmolLM2's (examples/fetch_model.py): llama.cpp's tests take some seconds each with it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import agents
from conformance_tables import CASES, put
from peers.machine import commit, machine

from enginewright.optimizer.loadtest.own_server import start, stop

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parent.parent
REASONS = HERE.with_suffix(".toml")
QUESTIONS = REPOSITORY / "optimizer" / "measure" / "choices.jsonl"

OPENAI = "3.54.0"
ANTHROPIC = "2.13.0"
ANTHROPIC_CLIENTS = (
    *(f"anthropic[aiohttp]=={ANTHROPIC}", "pytest==9.2.0", "pytest-asyncio==1.5.0", "rich==15.0.0"),
    *("inline-snapshot", "http-snapshot[httpx]", "respx", "dirty-equals", "time-machine"),
)
LANGCHAIN = (
    "langchain-tests==1.1.9",
    "langchain-openai==1.7.4",
    "langchain-anthropic==1.7.10",
    "pytest-asyncio==1.5.0",
)
CANITOOLCALL = ("canitoolcall==0.1.1",)
OPEN_RESPONSES = ("openresponses-types==2.4.0",)
LLAMA = "0.3.36"
"""The version of llama-cpp-python, whose source package has llama.cpp's."""
CLIENTS = (
    *(f"openai[aiohttp]=={OPENAI}", "pytest==9.2.0", "pytest-asyncio==1.5.0", "rich==15.0.0", "requests==2.34.2"),
    *("filelock", "wget==3.2", "numpy", "schemathesis==4.32.5"),
)
POOLED = (
    *(
        "cohere==5.21.1",
        "huggingface_hub==2.4.0",
        "ollama==0.6.3",
        "langchain-cohere==0.6.0",
        "langchain-ollama==1.1.0",
    ),
    *("langchain-openai==1.7.4", "langchain-tests==1.1.9", "llama-index-embeddings-openai-like==0.4.0"),
    *("llama-index-embeddings-text-embeddings-inference==0.6.0", "llama-index-postprocessor-jinaai-rerank==0.6.0"),
    *("numpy", "openai==3.54.0", "pytest-asyncio==1.5.0"),
)
LM_EVAL = ("lm-eval[api]==0.4.13",)

KINDS = ("embed", "rerank", "classify", "token_classify")
"""Kinds of further bundles, which are the names of their models."""
LOOPBACK_ORIGINS = [
    f"http://{name}{port}" for name in ("localhost", "127.0.0.1", "[::1]") for port in ("", ":3000", ":8080")
]
"""The origins that llama-server's tests mean by "localhost": any port."""

Row = dict[str, Any]
"""A test: its name, its outcome (passed, not applicable, skipped, failed), and the reason where it didn't pass."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the suites, prints what came of them, and writes it."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--as-llama-server"]:
        return as_llama_server(words[1:])
    suites: dict[str, Callable[[argparse.Namespace], Row]] = {
        "openai": openai_tests,
        "pooled": pooled_tests,
        "anthropic": anthropic_tests,
        "open-responses": open_responses,
        "langchain": langchain_tests,
        "canitoolcall": canitoolcall,
        "llama.cpp": llama_tests,
        "lm-eval": lm_eval,
        "schemathesis": schemathesis,
        "clients": client_scripts,
        "agents": agent_tasks,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for kind in KINDS:
        parser.add_argument(
            f"--{kind.replace('_', '-')}",
            type=Path,
            metavar="BUNDLE",
            help=f"a bundle of the kind {kind}, served as well",
        )
    parser.add_argument("--only", nargs="+", choices=suites, default=list(suites))
    parser.add_argument("--seconds", type=int, default=60, help="how long schemathesis asks")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "conformance")
    parser.add_argument("--json", type=Path, help="where the outcomes go; what it has of other suites stays")
    parser.add_argument(
        "--page", type=Path, help="a page to put the tables of clients on, by the JSON file; runs nothing"
    )
    options = parser.parse_args(words)
    if options.embed is None or options.rerank is None:
        options.only = [name for name in options.only if name != "pooled"]
    if options.page is not None:
        put(options.page, json.loads(options.json.read_text()))
        return 0
    options.bundle, options.folder = options.bundle.resolve(), options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    results |= {"machine": machine(), "enginewright": metadata.version("enginewright")}
    failed = 0
    for name in options.only:
        began = time.monotonic()
        suite = suites[name](options)
        counts = Counter(row["outcome"] for row in suite["tests"])
        suite = {
            "counts": dict(counts),
            "commit": commit(),
            "bundle": "scripted" if name in ("langchain", "canitoolcall", "agents") else options.bundle.name,
            "seconds": round(time.monotonic() - began),
            **suite,
        }
        failed += counts["failed"]
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
        for row in suite["tests"]:
            if row["outcome"] == "failed":
                print(f"  {row['name']}: {row['reason'][:300]}")
        results[name] = suite
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 1 if failed else 0


def openai_tests(options: argparse.Namespace) -> Row:
    """The client's own tests, loose and strict, sync and async. Most set no limit: a short context ends answers."""
    folder = source("openai", OPENAI, f"openai-{OPENAI}", ("tests/", "pyproject.toml"), options)
    names = ("chat/test_completions", "test_completions", "test_models", "test_responses")
    names += ("responses/test_input_items", "responses/test_input_tokens")
    names += () if options.embed is None else ("test_embeddings",)
    files = [f"tests/api_resources/{name}.py" for name in names]
    with serving(options, "--any-model", "--context", "256") as url:
        tests = pytest(
            environment("clients", CLIENTS, options),
            folder,
            ["-o", "filterwarnings=", *files],
            {"TEST_API_BASE_URL": f"{url}/v1"},
        )
    return {"of": f"openai {OPENAI}", "tests": judged("openai", tests)}


def pooled_tests(options: argparse.Namespace) -> Row:
    """Each client's vectors and orders, and LangChain's own tests."""
    folder = options.folder / "pooled-tests"
    folder.mkdir(exist_ok=True)
    python, script = environment("pooled", POOLED, options), HERE.parent / "clients" / "pooled_cases.py"
    with serving(options) as url:
        tests = pytest(python, folder, ["-o", "asyncio_mode=auto", str(script)], {"TEST_API_BASE_URL": url})
    return {"of": "clients/pooled_cases.py", "packages": POOLED, "tests": judged("pooled", tests)}


def anthropic_tests(options: argparse.Namespace) -> Row:
    """The client's own tests of messages, loose and strict, sync and async."""
    folder = source("anthropic", ANTHROPIC, f"anthropic-{ANTHROPIC}", ("tests/", "pyproject.toml"), options)
    with serving(options, "--any-model", "--context", "256") as url:
        tests = pytest(
            environment("anthropic", ANTHROPIC_CLIENTS, options),
            folder,
            ["-o", "filterwarnings=", "tests/api_resources/test_messages.py"],
            {"TEST_API_BASE_URL": url},
        )
    return {"of": f"anthropic {ANTHROPIC}", "tests": judged("anthropic", tests)}


RESPONSES: dict[str, Row] = {
    "a text": {"input": "Name a colour."},
    "instructions": {"input": "Name a colour.", "instructions": "Be brief."},
    "messages of all roles": {
        "input": [
            {"type": "message", "role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Name a colour."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Red."}]},
            {"type": "message", "role": "user", "content": "Another."},
        ]
    },
    "a form": {
        "input": "Name a colour.",
        "text": {"format": {"type": "json_schema", "name": "colour", "schema": {"enum": ["red", "blue"]}}},
    },
    "log-probabilities": {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "nothing is stored": {"input": "Hi", "store": False, "metadata": {"a": "b"}},
}


CHECK_RESPONSES = """
import json, sys
import openresponses_types as types
data = sys.stdin.buffer.read().decode()
if sys.argv[1] == "whole":
    types.ResponseResource.model_validate_json(data)
    raise SystemExit
kinds = {}
for name in dir(types):
    if name.endswith("StreamingEvent"):
        field = getattr(types, name).model_fields["type"]
        kinds[[*field.annotation][0].value] = getattr(types, name)
lines = [line[6:] for line in data.splitlines() if line.startswith("data: ")]
assert lines[-1] == "[DONE]", lines[-1]
for line in lines[:-1]:
    kinds[json.loads(line)["type"]].model_validate_json(line)
assert len(lines) > 6, lines
"""
"""Checks standard input by the types of Open Responses: a response, or the events of a stream."""


def open_responses(options: argparse.Namespace) -> Row:
    """Bodies of the shapes that Open Responses' compliance cases have; each answer and event must be of its types."""
    python = environment("open-responses", OPEN_RESPONSES, options)
    tests = []
    with serving(options, "--any-model", "--context", "512") as url:
        for name, body in RESPONSES.items():
            for stream in (False, True):
                payload = {"model": "bundle", "max_output_tokens": 16, "stream": stream, **body}
                with contextlib.closing(connect(url)) as connection:
                    data = json.dumps(payload).encode()
                    connection.request("POST", "/v1/responses", data, {"content-type": "application/json"})
                    answer = connection.getresponse().read()
                checked = subprocess.run(
                    [python, "-c", CHECK_RESPONSES, "stream" if stream else "whole"],
                    input=answer,
                    capture_output=True,
                    check=False,
                )
                how = f"{name}, {'streamed' if stream else 'whole'}"
                row = {"name": how, "outcome": "failed" if checked.returncode else "passed"}
                tests.append(row | ({"reason": checked.stderr.decode()[-2000:]} if checked.returncode else {}))
    return {"of": OPEN_RESPONSES[0], "tests": judged("open-responses", tests)}


JOKE = {"setup": "Why do cats sit on keyboards?", "punchline": "They like the mouse."}
EVENT = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
REPLIES: agents.Replies = (
    ("magic_function_no_args", [("magic_function_no_args", {})]),
    (r"magic_function\(3\)|^Hello!", [("magic_function", {"input": 3})]),
    ("Pirate greeting", [("greeting_generator", {"answer_style": "Pirate"})]),
    (r"3 \+ 4", [("my_adder_tool", {"a": 3, "b": 4})]),
    ("joke about cats", [("Joke.*|final_result", JOKE)]),
    ("你好啊集团", [("unicode_customer", {"customer_name": "你好啊集团", "description": "a technology company"})]),
    ("こんにちは株式会社", [("unicode_customer", {"customer_name": "こんにちは株式会社", "description": "日本"})]),
    ("weather in San Francisco", [("get_weather", {"location": "San Francisco, CA"})]),
    ("weather in Paris and in Tokyo", [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})]),
    ("weather in Paris right now", [("get_weather|GetWeather", {"city": "Paris"})]),
    ("Lisbon", [("get_weather", {"city": "Lisbon"})]),
    ("Design review", [("create_event", EVENT)]),
    ("Save a note", [("save_note", {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"})]),
    ("What time is it", [("get_server_time", {})]),
    ("9.11 or 9.9", [("record_answer", {"answer": "9.9"})]),
)
"""The scripted answers to questions of LangChain's tests and canitoolcall's scenarios: see ``agents.reply``."""

LANGCHAIN_MODELS = """
import os

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ["SERVED_URL"]
LONG = "The quick brown fox jumps over the lazy dog. " * 40


class Cached(ChatModelIntegrationTests):
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        model = self.chat_model_class(**self.chat_model_params)
        for _ in range(2):
            if stream:
                first, *others = model.stream(LONG)
                said = sum(others, start=first)
            else:
                said = model.invoke(LONG)
        assert said.usage_metadata["input_token_details"]["cache_read"] > 300
        return said


class TestChat(Cached):
    chat_model_class = ChatOpenAI
    chat_model_params = {"model": "scripted", "base_url": URL + "/v1", "api_key": "none", "max_retries": 0}
    chat_model_params["stream_usage"] = True  # else it doesn't ask servers other than OpenAI's
    supports_json_mode = True
    model_override_value = "scripted"


class TestResponses(TestChat):
    chat_model_params = {**TestChat.chat_model_params, "use_responses_api": True}


class TestMessages(Cached):
    chat_model_class = ChatAnthropic
    chat_model_params = {"model": "scripted", "base_url": URL, "api_key": "none", "max_retries": 0, "max_tokens": 256}
    supports_anthropic_inputs = True
    model_override_value = "scripted"


class TestMessagesForm(TestMessages):
    structured_output_kwargs = {"method": "json_schema"}
"""
"""A module of tests: LangChain's own, of the three protocols; that prompts are read from the cache is ours."""


def langchain_tests(options: argparse.Namespace) -> Row:
    """LangChain's standard tests of a chat model: chat completions, responses and messages."""
    python = environment("langchain", LANGCHAIN, options)
    folder = options.folder / "langchain-tests"
    folder.mkdir(exist_ok=True)
    (folder / "test_langchain.py").write_text(LANGCHAIN_MODELS)
    with scripted(options) as url:
        tests = pytest(
            python,
            folder,
            [*("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"), "test_langchain.py"],
            {"SERVED_URL": url},
        )
    return {"of": ", ".join(LANGCHAIN[:3]), "tests": judged("langchain", tests)}


def canitoolcall(options: argparse.Namespace) -> Row:
    """Runs ``canitoolcall probe``, whose scenarios compare whole and streamed answers, and judges each."""
    python = environment("canitoolcall", CANITOOLCALL, options)
    report = options.folder / "canitoolcall.json"
    report.unlink(missing_ok=True)
    with scripted(options) as url:
        command = [python, "-m", "canitoolcall", "probe", "--base-url", f"{url}/v1", "--model", "scripted"]
        subprocess.run([*command, "--json", report], check=False, capture_output=True)
    return {"of": CANITOOLCALL[0], "tests": judged("canitoolcall", probed(json.loads(report.read_text())))}


def probed(report: Row) -> list[Row]:
    """The outcomes of canitoolcall's report."""
    tests = []
    for one in report["outcomes"]:
        how = "streamed" if one["stream"] else "whole"
        if one["check"] != "scenario":
            how = "streamed as whole"
        outcome = {"pass": "passed", "skip": "skipped"}.get(one["status"], "failed")
        row = {"name": f"{one['scenario_id']}, {how}", "outcome": outcome}
        tests.append(row | ({"reason": one["detail"]} if outcome != "passed" else {}))
        if one["warnings"]:
            tests[-1]["warnings"] = one["warnings"]
    return tests


@contextlib.contextmanager
def scripted(options: argparse.Namespace) -> Iterator[str]:
    """Gives the address of a server whose engine says ``REPLIES``."""
    replies, notes = options.folder / "replies.json", options.folder / "notes.jsonl"
    replies.write_text(json.dumps(REPLIES))
    about = {"REPLIES": str(replies), "NOTES": str(notes)}
    with agents.server(agents.scripted_bundle(), about, options.folder / "server.log") as url:
        yield url


def llama_tests(options: argparse.Namespace) -> Row:
    """Tests of llama.cpp's server. Its paths without /v1 become ours, and headers compare as HTTP has them."""
    base = f"llama_cpp_python-{LLAMA}/vendor/llama.cpp/tools/server/tests"
    folder = source("llama-cpp-python", LLAMA, base, ("",), options)
    for file in folder.glob("unit/*.py"):
        text = file.read_text()
        for path in ("/chat/completions", "/models"):
            text = text.replace(f'"{path}"', f'"/v1{path}"')
        file.write_text(text.replace('{server.server_port}")', '{server.server_port}/v1")'))
    shared = folder / "utils.py"  # names of headers compare without case, as in HTTP
    shared.write_text(shared.read_text().replace("dict(response.headers)", "response.headers"))
    reasons = tomllib.loads(REASONS.read_text())["llama-not-run"]
    python = environment("clients", CLIENTS, options)
    shim = options.folder / "llama-server"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" --as-llama-server "$@"\n')
    shim.chmod(0o755)
    about = {
        "LLAMA_SERVER_BIN_PATH": str(shim),
        "CONFORMANCE_BUNDLE": str(options.bundle),
        "CONFORMANCE_THREADS": str(options.threads),
        "PORT": "8477",
    }
    run, tests = [], []
    for name in listing(python, folder, about):
        why = next((rule["reason"] for rule in reasons if re.search(rule["test"], name)), None)
        if why is None:
            run.append(f"unit/{name}")
        else:
            tests.append({"name": name.replace(".py::", "::"), "outcome": "not applicable", "reason": why})
    tests += judged("llama", pytest(python, folder, run, about))
    return {"of": f"llama.cpp, from llama-cpp-python {LLAMA}", "tests": tests}


def as_llama_server(flags: list[str]) -> int:
    """Becomes ``optimize serve`` with what llama-server's flags mean here. Others have no meaning here."""
    values: dict[str, str] = {}
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        if flag.startswith("--"):
            values[flag] = value
    slots = int(values.get("--parallel", "1"))
    name = values.get("--alias", "llama").partition(",")[0]
    command = ["serve", "--model", f"{name}={os.environ['CONFORMANCE_BUNDLE']}", "--port", values["--port"]]
    command += ["--host", values["--host"].partition(",")[0], "--any-model", "--max-requests", str(slots)]
    command += ["--threads", os.environ["CONFORMANCE_THREADS"]]
    if "--ctx-size" in values:
        command += ["--context", str(int(values["--ctx-size"]) // slots)]
    for origin in values.get("--cors-origins", "").split(","):
        for one in LOOPBACK_ORIGINS if origin == "localhost" else [origin] if origin else []:
            command += ["--allowed-origin", one]
    if "--api-key" in values:
        digest = hashlib.sha256(values["--api-key"].encode()).hexdigest()
        with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
            file.write(f'[[keys]]\nhash = "sha256:{digest}"\ntenant = "tests"\nadmin = true\n')
        command += ["--api-keys", file.name]
    os.execv(sys.executable, [sys.executable, "-m", "enginewright", *command])


def lm_eval(options: argparse.Namespace) -> Row:
    """Log-likelihoods of the choices that ``optimize eval --choices built-in`` has, by lm-eval through the server."""
    from enginewright import LLM, SamplingParams
    from enginewright.optimizer.evaluate import evaluate

    torch = metadata.version("torch").partition("+")[0]
    python = environment("lm-eval", (f"torch=={torch}", *LM_EVAL), options)
    folder = options.folder / "tasks"
    folder.mkdir(exist_ok=True)
    (folder / "questions.yaml").write_text(
        "task: questions\noutput_type: multiple_choice\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {QUESTIONS}}}}}\ntest_split: test\n"
        'doc_to_text: "{{prompt}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    with serving(options) as url, tempfile.TemporaryDirectory() as output:
        arguments = f"model=bundle,base_url={url}/v1/completions,num_concurrent=4,tokenized_requests=True"
        subprocess.run(
            [
                *(python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments),
                *("--tasks", "questions", "--include_path", folder, "--output_path", output, "--log_samples"),
            ],
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(options.folder / "hf")},
        )
        (samples,) = Path(output).rglob("samples_*.jsonl")
        (results,) = Path(output).rglob("results_*.json")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        scores = json.loads(results.read_text())["results"]["questions"]
    report = evaluate(options.bundle, text=QUESTIONS, choices=QUESTIONS, threads=options.threads).choices
    assert report is not None
    tests = []
    with LLM(options.bundle, threads=options.threads) as llm:
        assert llm.tokenizer is not None
        for row in rows:
            for fields, answer in zip(row["arguments"].values(), row["filtered_resps"], strict=True):
                context, choice = fields["arg_0"], fields["arg_1"]
                tests.append(compared(llm, SamplingParams, context, choice, float(answer[0])))
    for name, theirs, ours in (
        ("acc", scores["acc,none"], report.acc),
        ("acc_norm", scores["acc_norm,none"], report.acc_norm),
    ):
        same = abs(theirs - ours) < 1e-9
        tests.append(
            {
                "name": f"{name} is optimize eval's",
                "outcome": "passed" if same else "failed",
                "lm_eval": theirs,
                "optimize_eval": ours,
                **({} if same else {"reason": f"{theirs} is not {ours}"}),
            }
        )
    return {"of": LM_EVAL[0], "tests": tests}


def compared(llm: Any, params: Any, context: str, choice: str, theirs: float) -> Row:
    """Compares lm-eval's sum for a choice with the library's log-probabilities."""
    context, choice = context.rstrip(), context[len(context.rstrip()) :] + choice
    ids = llm.tokenizer.encode(context + choice, add_special_tokens=False)
    count = len(ids) - len(llm.tokenizer.encode(context, add_special_tokens=False))
    (result,) = llm.generate([ids], params(max_tokens=1, prompt_logprobs=1, temperature=0), progress=False)
    assert result.prompt_logprobs is not None
    ours = sum(entry.logprob for entry in result.prompt_logprobs[-count:])
    row = {"name": f"{context}|{choice}", "outcome": "passed" if ours == theirs else "failed", "log_likelihood": theirs}
    return row if ours == theirs else row | {"reason": f"lm-eval has {theirs}, LLM {ours}"}


def schemathesis(options: argparse.Namespace) -> Row:
    """Requests at random. Each operation counts as a test; an answer of 500 and more fails it, and so does what breaks
    the document that the server publishes, but for bodies that fit it and are refused: a model's limits aren't in it.
    """
    python = environment("clients", CLIENTS, options)
    report = options.folder / "schemathesis.xml"
    with serving(options, "--request-seconds", "5") as url:
        command = [
            *(python.with_name("schemathesis"), "run", f"{url}/openapi.json", "--max-time", str(options.seconds)),
            *("--phases", "coverage,fuzzing", "-c", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--continue-on-failure", "--report", "junit", "--report-junit-path", report, "--no-color"),
            *("--request-timeout", "60", "--suppress-health-check", "all"),
        ]
        done = subprocess.run(command, check=False, cwd=options.folder, capture_output=True, text=True)
        printed = done.stdout
        tests = judged("schemathesis", cases(report))
        with contextlib.closing(connect(url)) as connection:
            connection.request("GET", "/props")
            deaths = [one["deaths"] for one in json.loads(connection.getresponse().read())["models"].values()]
    tests.append(
        {"name": "no engine died", "outcome": "passed" if not any(deaths) else "failed", "reason": str(deaths)}
    )
    match = re.search(r"(\d[\d,]*) generated", printed)
    requests = 0 if match is None else int(match[1].replace(",", ""))
    return {"of": CLIENTS[-1], "asked_seconds": options.seconds, "requests": requests, "tests": tests}


SCRIPTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0", "pydantic==2.14.4"),
    "anthropic": ("anthropic==2.14.0",),
    "ollama": ("ollama==0.6.3",),
    "LangChain": ("langchain==1.5.2", "langchain-openai==1.7.4"),
    "LlamaIndex": ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
    "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "instructor": ("instructor==1.17.0", "openai==3.3.0"),
    "litellm": ("litellm==1.110.2",),
    "AI SDK": ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141", "zod@4.6.7"),
}
"""Client -> its packages, of PyPI or of npm."""
PAGE = REPOSITORY / "docs" / "use" / "clients.md"
"""The page with each client's first script."""
NOTES = REPOSITORY / "benchmarks" / "notes" / "conformance.md"
"""The page with the tables of outcomes."""


def client_scripts(options: argparse.Namespace) -> Row:
    """Each client's scripts: the page's with the bundle, the others with the scripted engine."""
    tests = []
    with serving(options, "--any-model") as url, scripted(options) as scripted_url:
        for name, packages in SCRIPTS.items():
            programs = client_packages(packages, options)
            suffix = ".py" if "==" in packages[0] else ".mjs"
            for case, title in CASES.items():
                script, arguments = script_of(name, suffix), [scripted_url, case]
                if case == "first":
                    first, arguments = options.folder / f"first{suffix}", []
                    first.write_text(first_script(PAGE.read_text(), name).replace("http://127.0.0.1:8000", url))
                    script = first
                row = ran(programs, script, arguments)
                tests.append({"name": f"{name}: {title}", **row})
    return {"of": "docs/use/clients.md", "packages": SCRIPTS, "tests": tests}


def script_of(name: str, suffix: str) -> Path:
    """The file of a client's cases."""
    return HERE.parent / "clients" / f"with_{re.sub(r'[^a-z]+', '_', name.lower())}{suffix}"


def first_script(page: str, name: str) -> str:
    """The first block of code under a client's heading."""
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    return section.partition("\n```")[2].partition("\n")[2].partition("\n```")[0] + "\n"


def client_packages(packages: tuple[str, ...], options: argparse.Namespace) -> Path:
    """Installs packages and returns the place to run scripts with them: a Python, or npm's folder of modules."""
    name = re.sub(r"\W+", "-", packages[0])
    if "==" in packages[0]:
        return environment(name, packages, options)
    folder = options.folder / name
    modules, stamp = folder / "node_modules", folder / "packages.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(packages):
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, *packages], check=True)
        stamp.write_text("\n".join(packages))
    return modules


def ran(programs: Path, script: Path, arguments: list[str]) -> Row:
    """Runs a script; it has passed where it ends well and has said something."""
    command: list[str | Path] = [programs, script, *arguments]
    if programs.name == "node_modules":  # modules are looked for from where the script lies
        copy = programs.with_name(script.name)
        copy.write_text(script.read_text())
        command = ["node", copy, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode == 0 and done.stdout.strip():
        return {"outcome": "passed"}
    return {"outcome": "failed", "reason": (done.stdout + done.stderr)[-2000:]}


def agent_tasks(options: argparse.Namespace) -> Row:
    """The task of ``agents.py``, done by each agent."""
    tests = []
    for name in agents.AGENTS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = agents.task(name, agents.scripted_bundle(), Path(folder))
        row: Row = {"name": f"{name}: a task of five turns", "outcome": "passed" if outcome["done"] else "failed"}
        tests.append(row | ({} if outcome["done"] else {"reason": json.dumps(outcome["turns"])[-2000:]}))
    return {"of": "benchmarks/agents.py", "packages": dict(agents.AGENTS), "tests": tests}


def connect(url: str) -> Any:
    """A connection to a server."""
    import http.client

    return http.client.HTTPConnection(url.partition("://")[2])


@contextlib.contextmanager
def serving(options: argparse.Namespace, *flags: str) -> Iterator[str]:
    """Gives the address of a server that runs within."""
    models = {"bundle": options.bundle, **{kind: getattr(options, kind) for kind in KINDS}}
    named = [part for name, path in models.items() if path is not None for part in ("--model", f"{name}={path}")]
    arguments = (*named, "--threads", str(options.threads), *flags)
    with (options.folder / "server.log").open("w") as log:
        process, about = start(*arguments, errors=log)
    try:
        assert "url" in about, f"the server couldn't start: {log.name}"
        yield about["url"]
        assert process.poll() is None, f"the server has ended: {log.name}"
    finally:
        stop(process)


def environment(name: str, packages: tuple[str, ...], options: argparse.Namespace) -> Path:
    """The Python of an environment that has these packages."""
    folder = options.folder / name
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        stamp.write_text("\n".join(packages))
    return python


def source(package: str, version: str, base: str, parts: tuple[str, ...], options: argparse.Namespace) -> Path:
    """Folder ``base`` of a source package, with those of its files that begin with one of ``parts``."""
    packed = options.folder / f"{package.replace('-', '_')}-{version}.tar.gz"
    if not packed.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", options.folder, f"{package}=={version}"], check=True)
    with tarfile.open(packed) as archive:
        members = [one for one in archive if one.name.startswith(tuple(f"{base}/{part}" for part in parts))]
        archive.extractall(options.folder, members, filter="data")
    return options.folder / base


def pytest(python: Path, folder: Path, arguments: list[str], variables: dict[str, str]) -> list[Row]:
    """Runs tests of others; what came of each."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-o", "addopts=", f"--junitxml={report}", "-p", "no:xdist", *arguments]
    with (folder / "report.txt").open("w") as log:
        subprocess.run(command, check=False, cwd=folder, env=os.environ | variables, stdout=log, stderr=log)
    assert report.exists(), f"{folder / 'report.txt'} says why there is none"
    return cases(report)


def listing(python: Path, folder: Path, variables: dict[str, str]) -> list[str]:
    """The names of a folder's tests."""
    command = [python, "-m", "pytest", "-q", "-o", "addopts=", "--collect-only", "-p", "no:xdist", "unit"]
    done = subprocess.run(command, check=False, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    return [line.removeprefix("unit/") for line in done.stdout.splitlines() if line.startswith("unit/")]


def cases(report: Path) -> list[Row]:
    """Tests of a file in JUnit's form, as it has them: passed, skipped or failed."""
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        row: Row = {"name": name.replace("tests.api_resources.", "").replace("unit.", ""), "outcome": "passed"}
        for kind in ("skipped", "failure", "error"):
            if (one := case.find(kind)) is not None:
                message = one.get("message") or ""
                if kind != "skipped":  # the text of these is a place on this machine
                    message += "\n" + (one.text or "")
                row |= {"outcome": "skipped" if kind == "skipped" else "failed", "reason": message.strip()}
        rows.append(row)
    return rows


def judged(suite: str, tests: list[Row]) -> list[Row]:
    """The tests, where one that failed or was skipped as was foreseen isn't applicable, for the reason given."""
    rules = tomllib.loads(REASONS.read_text()).get(suite, [])
    for row in tests:
        if row["outcome"] not in ("failed", "skipped"):
            continue
        for rule in rules:
            if re.search(rule["test"], row["name"]) and re.search(rule["fails"], row["reason"], re.S):
                row |= {"outcome": "not applicable", "reason": rule["reason"]}
                break
        else:
            row["reason"] = row["reason"][:2000]
    return tests


if __name__ == "__main__":
    sys.exit(main())
