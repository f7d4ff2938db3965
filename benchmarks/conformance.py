"""Runs what others wrote to test a server of this kind against ``optimize serve``, and writes each test's outcome.

    python benchmarks/conformance.py BUNDLE [--only openai llama.cpp lm-eval schemathesis] [--seconds 60] [--json FILE]

- openai: the tests that come with OpenAI's own client (its source package), of chat, completions and models.
- llama.cpp: the tests of llama.cpp's server (in the source package of llama-cpp-python), those that concern the
  protocol. They start a server for each test: ``--as-llama-server`` makes ``optimize serve`` of its flags.
- lm-eval: log-likelihoods by ``local-completions``, compared with ``LLM``'s and with those of ``optimize eval``.
- schemathesis: requests made at random from /openapi.json, for ``--seconds``.

pip downloads what is needed into ``--folder``: packages into environments of their own, tests beside them. None of it
is shipped. A test that asks for what isn't there must fail as ``conformance.toml`` says, with the reason that it gives;
one that fails otherwise has failed. Exits with 1 where one has.

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

from peers.machine import commit, machine

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parent.parent
REASONS = HERE.with_suffix(".toml")
QUESTIONS = REPOSITORY / "optimizer" / "measure" / "choices.jsonl"

OPENAI = "3.54.0"
LLAMA = "0.3.36"
"""Of llama-cpp-python, whose source package has llama.cpp's."""
CLIENTS = (
    *(f"openai[aiohttp]=={OPENAI}", "pytest==9.2.0", "pytest-asyncio==1.5.0", "rich==15.0.0", "requests==2.34.2"),
    *("filelock", "wget==3.2", "numpy", "schemathesis==4.32.5"),
)
LM_EVAL = ("lm-eval[api]==0.4.13",)

LOOPBACK_ORIGINS = [
    f"http://{name}{port}" for name in ("localhost", "127.0.0.1", "[::1]") for port in ("", ":3000", ":8080")
]
"""What llama-server's origin "localhost" stands for in its tests: there it is any port."""

Row = dict[str, Any]
"""A test: its name, its outcome (passed, not applicable, skipped, failed), and the reason where it didn't pass."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the suites, prints what came of them, and writes it."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--as-llama-server"]:
        return as_llama_server(given[1:])
    suites: dict[str, Callable[[argparse.Namespace], Row]] = {
        "openai": openai_tests,
        "llama.cpp": llama_tests,
        "lm-eval": lm_eval,
        "schemathesis": schemathesis,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--only", nargs="+", choices=suites, default=list(suites))
    parser.add_argument("--seconds", type=int, default=60, help="how long schemathesis asks")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "conformance")
    parser.add_argument("--json", type=Path, help="where the outcomes go; what it has of other suites stays")
    options = parser.parse_args(given)
    options.bundle, options.folder = options.bundle.resolve(), options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    found |= {"machine": machine(), "enginewright": metadata.version("enginewright")}
    failed = 0
    for name in options.only:
        began = time.monotonic()
        suite = suites[name](options)
        counts = Counter(row["outcome"] for row in suite["tests"])
        suite = {
            "counts": dict(counts),
            "commit": commit(),
            "bundle": options.bundle.name,
            "seconds": round(time.monotonic() - began),
            **suite,
        }
        failed += counts["failed"]
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
        for row in suite["tests"]:
            if row["outcome"] == "failed":
                print(f"  {row['name']}: {row['reason'][:300]}")
        found[name] = suite
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 1 if failed else 0


def openai_tests(options: argparse.Namespace) -> Row:
    """The client's own tests, loose and strict, sync and async. Most set no limit: a short context ends answers."""
    folder = source("openai", OPENAI, f"openai-{OPENAI}", ("tests/", "pyproject.toml"), options)
    files = [f"tests/api_resources/{name}.py" for name in ("chat/test_completions", "test_completions", "test_models")]
    with serving(options, "--any-model", "--context", "256") as url:
        tests = pytest(
            environment("clients", CLIENTS, options),
            folder,
            ["-o", "filterwarnings=", *files],
            {"TEST_API_BASE_URL": f"{url}/v1"},
        )
    return {"of": f"openai {OPENAI}", "tests": judged("openai", tests)}


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
    given = ["serve", "--model", f"{name}={os.environ['CONFORMANCE_BUNDLE']}", "--port", values["--port"]]
    given += ["--host", values["--host"].partition(",")[0], "--any-model", "--max-requests", str(slots)]
    given += ["--threads", os.environ["CONFORMANCE_THREADS"]]
    if "--ctx-size" in values:
        given += ["--context", str(int(values["--ctx-size"]) // slots)]
    for origin in values.get("--cors-origins", "").split(","):
        for one in LOOPBACK_ORIGINS if origin == "localhost" else [origin] if origin else []:
            given += ["--allowed-origin", one]
    if "--api-key" in values:
        digest = hashlib.sha256(values["--api-key"].encode()).hexdigest()
        with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
            file.write(f'[[keys]]\nhash = "sha256:{digest}"\ntenant = "tests"\nadmin = true\n')
        given += ["--api-keys", file.name]
    os.execv(sys.executable, [sys.executable, "-m", "enginewright", *given])


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
            for given, answer in zip(row["arguments"].values(), row["filtered_resps"], strict=True):
                context, choice = given["arg_0"], given["arg_1"]
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
    """Whether lm-eval's sum for a choice is the one of the library's log-probabilities."""
    context, choice = context.rstrip(), context[len(context.rstrip()) :] + choice
    ids = llm.tokenizer.encode(context + choice, add_special_tokens=False)
    own = len(ids) - len(llm.tokenizer.encode(context, add_special_tokens=False))
    (result,) = llm.generate([ids], params(max_tokens=1, prompt_logprobs=1, temperature=0), progress=False)
    assert result.prompt_logprobs is not None
    ours = sum(entry.logprob for entry in result.prompt_logprobs[-own:])
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
        said = done.stdout
        tests = judged("schemathesis", cases(report))
        with contextlib.closing(connect(url)) as connection:
            connection.request("GET", "/props")
            deaths = [one["deaths"] for one in json.loads(connection.getresponse().read())["models"].values()]
    tests.append(
        {"name": "no engine died", "outcome": "passed" if not any(deaths) else "failed", "reason": str(deaths)}
    )
    asked = re.search(r"(\d[\d,]*) generated", said)
    requests = 0 if asked is None else int(asked[1].replace(",", ""))
    return {"of": CLIENTS[-1], "asked_seconds": options.seconds, "requests": requests, "tests": tests}


def connect(url: str) -> Any:
    """A connection to a server."""
    import http.client

    return http.client.HTTPConnection(url.partition("://")[2])


@contextlib.contextmanager
def serving(options: argparse.Namespace, *flags: str) -> Iterator[str]:
    """Address of a server that runs within."""
    command = [
        sys.executable,
        "-m",
        "enginewright",
        "serve",
        "--model",
        f"bundle={options.bundle}",
        "--port",
        "0",
        "--json",
    ]
    command += ["--threads", str(options.threads), *flags]
    with (options.folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                break
        yield json.loads("".join(lines))["url"]
        assert process.poll() is None, f"the server has ended: {log.name}"
    finally:
        process.terminate()
        process.wait()


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
        wanted = [one for one in archive if one.name.startswith(tuple(f"{base}/{part}" for part in parts))]
        archive.extractall(options.folder, wanted, filter="data")
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
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        row: Row = {"name": name.replace("tests.api_resources.", "").replace("unit.", ""), "outcome": "passed"}
        for kind in ("skipped", "failure", "error"):
            if (one := case.find(kind)) is not None:
                message = (one.get("message") or "") + "\n" + (one.text or "")
                row |= {"outcome": "skipped" if kind == "skipped" else "failed", "reason": message.strip()}
        found.append(row)
    return found


def judged(suite: str, tests: list[Row]) -> list[Row]:
    """The tests, where one that failed as was foreseen isn't applicable, for the reason that is given."""
    rules = tomllib.loads(REASONS.read_text()).get(suite, [])
    for row in tests:
        if row["outcome"] != "failed":
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
