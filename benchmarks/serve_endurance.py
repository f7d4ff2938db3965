"""The endurance of a server: many clients for minutes, an engine killed often, hostile clients, a simulated day.

    python benchmarks/serve_endurance.py BUNDLE [--clients 200] [--seconds 300] [--kills 10] [--json FILE] [--plot FILE]
    python benchmarks/serve_endurance.py BUNDLE --parts hostile [--seconds 300] [--memory 600] [--json FILE]
    python benchmarks/serve_endurance.py --random qwen3_next --parts answers --clients 100 --seconds 120 [--json FILE]
    python benchmarks/serve_endurance.py BUNDLE --parts texts --embed BUNDLE --rerank BUNDLE --seconds 120 [--json FILE]

- load: so many clients at a time, of two classes and mixed lengths; one in ten leaves before its answer's end. Then all
  blocks must be free again. Memory of front end and engine is read each second.
- answers: clients of OpenAI's package. Each complete answer must be the one that the request gets alone, and all blocks
  be free again. See ``official_clients``.
- kills: the engine is killed under some requests. Each must end, with an answer or an error, and the server come back.
- hostile: the server on one core, all clients on another. 20 hostile clients, at most 20 requests a second, next to 8
  honest ones; then 20 well-behaved clients that send as many bytes in as many requests, next to the same honest ones.
  All honest answers must come and be right, the longest (p99) be at most twice as long next to hostile clients, and
  the server's memory stay below a limit. See ``hostile_clients``.
- texts, with ``--embed`` and ``--rerank``: one server of a chat model, an embedding model and a reranker. So many
  clients ask for vectors, next to some who chat and some who rank. Each request must have its answer, no engine die.
- day: 24 hours of requests in ``tests/simulator``, at some rate: all must end, all blocks be free.

``--random`` makes a small random model of a family instead: a folder, which ``optimize export`` compiles.

What must hold ends the program with 1 where it doesn't. Times are told, and nothing is asked of them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import http.client
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import hostile_clients
import official_clients
from loads import day, simulate
from peers.machine import commit, machine

from enginewright.optimizer.loadtest.own_server import start, stop
from enginewright.runtime.scheduler.options import Scheduling

CLASSES = """
[chat]
share = 0.8
prompt = "lognormal:{chat}:0.7"
answer = "lognormal:{answer}:0.7"
tpot = "400ms"
leave = 0.1
[chat.body]
request_class = "chat"
[batch]
share = 0.2
prompt = "lognormal:{batch}:0.5"
answer = "lognormal:{answer}:0.5"
leave = 0.1
[batch.body]
request_class = "batch"
"""
SCHEDULING = """
max_waiting = 100000
refuse = false
[classes.chat]
tpot = "400ms"
[classes.batch]
priority = 1
"""
PAGE = os.sysconf("SC_PAGE_SIZE")
PARTS = ("load", "answers", "kills", "hostile", "texts", "day")
CHATS, RANKS = 8, 4
"""Clients who chat, and who rank, next to those who ask for vectors."""
HOSTILE, HONEST, HOSTILE_RATE, SLOWER = 20, 8, 20.0, 2.0
"""Hostile and honest clients; requests a second of the hostile ones together; how much longer honest p99 may be."""
HOSTILE_KEYS = ("hostile-1", "hostile-2")
CONVERSATIONS = 150
"""The different conversations of official clients."""
AT_A_TIME = 4
"""The prompts and answers that a hostile key may have at a time. On one core every row of a step costs, so this limit
decides how much longer others wait: with 16 a key, honest p99 was 4.6 times as long."""


class Server:
    """``optimize serve`` of a bundle, with options. ``key``: of an operator, where keys are needed."""

    def __init__(self, bundle: Path, *options: str | Path, key: str = "") -> None:
        self._process, about = start(bundle, *options)
        self.url: str = about["url"]
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    @classmethod
    def scheduled(cls, bundle: Path, folder: Path) -> Server:
        """One with two classes of requests."""
        (folder / "scheduling.toml").write_text(SCHEDULING)
        return cls(bundle, "--scheduling", folder / "scheduling.toml", "--max-waiting", "100000")

    @classmethod
    def with_keys(cls, bundle: Path, folder: Path) -> Server:
        """One with keys of an honest tenant, of hostile ones and of an operator."""
        entries = [("operator", "admin = true"), ("honest", "")]
        entries += [(name, f"requests = {AT_A_TIME}") for name in HOSTILE_KEYS]
        lines = [
            f'[[keys]]\nhash = "sha256:{hashlib.sha256(name.encode()).hexdigest()}"\ntenant = "{name}"\n{more}\n'
            for name, more in entries
        ]
        (folder / "keys.toml").write_text("\n".join(lines))
        (folder / "server.toml").write_text('stall_seconds = 10.0\n[llm]\nthreads = 1\nmemory = "88MiB"\n')
        return cls(bundle, "--config", folder / "server.toml", "--api-keys", folder / "keys.toml", key="operator")

    @property
    def engine(self) -> int | None:
        """The engine's process."""
        return next((one for one in self.children() if b"engine_process" in _read(f"/proc/{one}/cmdline")), None)

    def children(self) -> list[int]:
        """The front end's processes, those too whose end it hasn't noticed."""
        pid = self._process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def megabytes(self) -> tuple[float, float]:
        """Resident, of the front end and of the engine."""
        return tuple(  # type: ignore[return-value]
            int((_read(f"/proc/{pid}/statm").split() or [b"0"] * 2)[1]) * PAGE / 1e6
            for pid in (self._process.pid, self.engine)
        )

    def tree_megabytes(self) -> dict[str, float]:
        """Resident, of its processes by what they are, with shared pages divided among them."""
        pids, megabytes = [self._process.pid], dict.fromkeys(("front_end", "engine", "others"), 0.0)
        for pid in pids:
            pids += [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in _read(task).split()]
            lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
            kilobytes = next((int(line.split()[1]) for line in lines if line.startswith(b"Pss:")), None)
            resident = int((_read(f"/proc/{pid}/statm").split() or [b"0"] * 2)[1]) * PAGE / 1e6
            name = {self._process.pid: "front_end", self.engine: "engine"}.get(pid, "others")
            megabytes[name] += resident if kilobytes is None else kilobytes / 1e3
        return megabytes

    def processor_seconds(self) -> dict[str, float]:
        """Processor time so far: of the front end, of the engine, and of this process, which is the clients'."""
        processes = {"front_end": self._process.pid, "engine": self.engine, "clients": os.getpid()}
        ticks = {name: _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[11:13] for name, pid in processes.items()}
        return {name: sum(map(int, both)) / os.sysconf("SC_CLK_TCK") for name, both in ticks.items()}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """A status, and what JSON says."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"))
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def props(self, model: str = "") -> dict[str, Any]:
        """A model's entry in ``/props``; "" for the first one's."""
        models = self.ask("GET", "/props")[1]["models"]
        return models[model or next(iter(models))]  # type: ignore[no-any-return]

    def idle(self, model: str = "") -> bool:
        """Waits until no request of a model runs; whether no block is held then."""
        since = time.monotonic()
        while (state := self.props(model))["requests"] or state["waiting"] or state.get("kv_cache_used"):
            if state["requests"]:
                since = time.monotonic()
            elif time.monotonic() - since > 30:
                return False
            time.sleep(0.5)
        return True

    def stop(self) -> int:
        """Ends it, and gives its exit code."""
        return stop(self._process)


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def load(server: Server, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Many clients for so many seconds."""
    scale = min(server.props()["context_length"] / 4096, 1.0)  # so that no prompt is longer than the model takes
    lengths = {"chat": int(80 * scale), "batch": int(300 * scale), "answer": int(48 * scale)}
    (folder / "classes.toml").write_text(CLASSES.format(**lengths))
    memory: list[tuple[float, float]] = []
    program = [sys.executable, "-m", "enginewright", "loadtest", server.url, "--clients", str(options.clients)]
    program += ["--seconds", str(options.seconds), "--requests", "1000000", "--classes", str(folder / "classes.toml")]
    program += ["--timeout", "600s", "--json", "--quiet"]
    program += [] if options.plot is None else ["--plot", str(options.plot)]
    with _each_second(lambda: memory.append(server.megabytes())):
        text = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True).stdout
    result = json.loads(text)
    third = max(len(memory) // 3, 1)
    grown = [
        sum(one[i] for one in memory[-third:]) / third - sum(one[i] for one in memory[third : 2 * third]) / third
        for i in (0, 1)
    ]
    return {
        "clients": options.clients,
        "result": result,
        "all_blocks_free": server.idle(),
        "megabytes": {
            "front_end": {"first": memory[0][0], "last": memory[-1][0], "last_third_less_middle": grown[0]},
            "engine": {"first": memory[0][1], "last": memory[-1][1], "last_third_less_middle": grown[1]},
        },
    }


def answers(server: Server, bundle: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Official clients for so many seconds, whose answers are compared. The clients have a process of their own."""
    conversations = official_clients.questions(bundle, CONVERSATIONS)
    (model,) = (entry["id"] for entry in server.ask("GET", "/v1/models")[1]["data"])
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        arguments = (server.url, model, conversations, options.clients, options.seconds)
        tally = pool.submit(official_clients.run, *arguments).result()
    free, about = server.idle(), server.props()
    return {
        "clients": options.clients,
        "conversations": len(conversations),
        "answers": dict(tally.answers),
        "left": tally.left,
        "tokens": tally.tokens,
        "seconds": {"p50": _quantile(tally.seconds, 0.5), "p99": _quantile(tally.seconds, 0.99)},
        "wrong": tally.wrong[:20],
        "all_blocks_free": free,
        "deaths": about["deaths"],
        "cached": round(tally.cached / max(tally.prompts, 1), 3),
    }


def texts(options: argparse.Namespace) -> dict[str, Any]:
    """Runs clients of embeddings, of chats and of rerankers against one server, for a number of seconds."""
    models = {"chat": options.bundle, "embed": options.embed, "rerank": options.rerank}
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    server = Server(*named, "--max-waiting", "100000")
    longest = {name: server.props(name)["context_length"] for name in models}
    vectors = ("--embed", "--model", "embed", "--texts", "1-8", "--prompt", f"2-{min(longest['embed'] // 8, 128)}")
    chats = ("--model", "chat", "--prompt", f"10-{min(longest['chat'] // 8, 200)}", "--answer", "8-48")
    programs = {"embed": (*vectors, "--clients", options.clients), "chat": (*chats, "--clients", CHATS)}
    command = (
        sys.executable,
        "-m",
        "enginewright",
        "loadtest",
        server.url,
        "--requests",
        "1000000",
        "--json",
        "--quiet",
    )
    common = ("--seconds", str(options.seconds), "--timeout", "600s")
    figures: dict[str, Any] = {"seconds": options.seconds, "load_average": {"before": os.getloadavg()[0]}}
    with concurrent.futures.ThreadPoolExecutor(RANKS) as pool:
        running = {
            name: subprocess.Popen([*command, *common, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
            for name, arguments in programs.items()
        }
        ranked = [*pool.map(partial(_ranks, server, options.seconds), range(RANKS))]
        for name, process in running.items():
            figures[name] = json.loads(process.communicate()[0])
    figures["load_average"]["after"] = os.getloadavg()[0]
    took = [seconds for one, _ in ranked for seconds in one]
    figures["rerank"] = {
        "clients": RANKS,
        "finished": len(took),
        "errors": [error for _, errors in ranked for error in errors],
        "end_to_end": {name: _quantile(took, q) for name, q in (("p50", 0.5), ("p99", 0.99))},
    }
    figures["all_blocks_free"] = all(server.idle(name) for name in models)
    figures["deaths"] = sum(server.props(name)["deaths"] for name in models)
    figures["exit"] = server.stop()
    return figures


def _ranks(server: Server, seconds: float, client: int) -> tuple[list[float], list[str]]:
    """A client who ranks eight documents again and again. Returns the time of each answer, and what was wrong."""
    took, wrong = list[float](), list[str]()
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        documents = [f"{'the tide ' * (1 + i)}{client} {len(took)}"[:40] for i in range(8)]
        status, answer = server.ask("POST", "/v1/rerank", {"model": "rerank", "query": "tide", "documents": documents})
        if status == 200 and sorted(row["index"] for row in answer["results"]) == list(range(8)):
            took.append(time.monotonic() - began)
        else:
            wrong.append(f"{status}: {str(answer)[:200]}")
    return took, wrong


@contextmanager
def _each_second(call: Any) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(1.0):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def kills(server: Server, count: int, requests: int = 20) -> dict[str, Any]:
    """The engine is killed under some requests, so many times."""
    statuses: dict[str, int] = {}
    back: list[float] = []
    for round_ in range(count):
        with concurrent.futures.ThreadPoolExecutor(requests) as pool:
            body = {"max_tokens": 200, "ignore_eos": True, "request_class": "chat"}
            futures = [
                pool.submit(server.ask, "POST", "/v1/completions", body | {"prompt": f"{round_} {i}", "seed": i})
                for i in range(requests)
            ]
            while server.props()["requests"] < requests // 2 and not all(one.done() for one in futures):
                time.sleep(0.01)
            if (pid := server.engine) is not None:
                os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            for one in futures:
                status = str(one.result()[0])
                statuses[status] = statuses.get(status, 0) + 1
            while pid in server.children():  # it still counts as healthy
                time.sleep(0.01)
            while server.ask("GET", "/health")[0] != 200:
                time.sleep(0.05)
            back.append(round(time.monotonic() - began, 2))
    status, _ = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
    return {"kills": count, "requests": count * requests, "statuses": statuses, "back_seconds": back, "then": status}


def hostile(bundle: Path, folder: Path, seconds: float, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """Hostile clients next to honest ones, then well-behaved clients next to honest ones; see the module."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    server = Server.with_keys(bundle, folder)  # its processes are children, and stay on that core
    os.sched_setaffinity(0, cores[-1:])
    figures: dict[str, Any] = {"seconds": seconds, "cores": [cores[0], cores[-1]]}
    if kinds:
        figures["kinds"] = list(kinds)
    try:
        about = hostile_clients.Server(int(server.url.rpartition(":")[2]), "honest", HOSTILE_KEYS)
        expected = {}
        for number in range(8):
            status, body = hostile_clients.ask(about, json.dumps(hostile_clients.chat(number)).encode())
            assert status == 200, body
            expected[number] = hostile_clients.text_of(body)
        figures["megabytes_idle"] = server.tree_megabytes()
        work = partial(hostile_clients.hostile, about, HOSTILE, seconds, HOSTILE_RATE, kinds)
        figures["hostile"], tally = _next_to_honest(server, about, expected, seconds, work)
        requests = max(1, sum(tally.requests.values()))
        work = partial(
            hostile_clients.well_behaved, about, HOSTILE, seconds, requests / seconds, tally.sent // requests
        )
        figures["well_behaved"], _ = _next_to_honest(server, about, expected, seconds, work)
        figures["all_blocks_free"], figures["deaths"] = server.idle(), server.props()["deaths"]
    finally:
        figures["exit"] = server.stop()
        os.sched_setaffinity(0, cores)
    return figures


def _next_to_honest(
    server: Server, about: hostile_clients.Server, expected: dict[int, str], seconds: float, work: Any
) -> tuple[dict[str, Any], hostile_clients.Tally]:
    """Runs other clients next to honest ones, which have a process of their own so that nothing here delays them."""
    memory: list[dict[str, float]] = []
    spawn = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(1, spawn) as pool,
        _each_second(lambda: memory.append(server.tree_megabytes())),
    ):
        pool.submit(os.getpid).result()
        before = server.processor_seconds()
        honest = pool.submit(_honest, about, seconds, expected)
        others = work()
        took, wrong = honest.result()
        spent = {name: round(now - before[name], 2) for name, now in server.processor_seconds().items()}
    third = max(len(memory) // 3, 1)
    sums = [sum(one.values()) for one in memory]
    return {
        "honest": {"requests": len(took), **{name: _quantile(took, q) for name, q in (("p50", 0.5), ("p99", 0.99))}},
        "others": {"requests": sum(others.requests.values()), "bytes": others.sent, "statuses": others.statuses},
        "processor_seconds": spent,
        "wrong": (wrong + others.wrong)[:20],
        "megabytes": {
            "most": max(sums),
            "most_by_process": {name: round(max(one[name] for one in memory), 1) for name in memory[0]},
            "each_10_seconds": [{name: round(value) for name, value in one.items()} for one in memory[::10]],
            "last_third_less_middle": sum(sums[-third:]) / third - sum(sums[third : 2 * third]) / third,
        },
    }, others


def _honest(about: hostile_clients.Server, seconds: float, expected: dict[int, str]) -> tuple[list[float], list[str]]:
    tally = hostile_clients.honest(about, HONEST, seconds, expected)
    return tally.seconds, tally.wrong


def _quantile(values: list[float], q: float) -> float:
    return round(sorted(values)[min(int(len(values) * q), len(values) - 1)], 3)


def simulated(rate: float, seed: int = 0) -> dict[str, Any]:
    """A day of requests."""
    scheduling = Scheduling(classes={"chat": {"ttft": 1.0, "tpot": 0.04}, "batch": {"priority": 1}})
    arrivals = day(rate, seed)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    served = simulate(arrivals, scheduling, seed)
    late = [one for one in served if one.first is None]
    return {
        "requests": len(arrivals),
        "refused": len(late),
        "ended_after_hours": max(one.ended for one in served) / 3600,
        "seconds": round(time.perf_counter() - began, 1),
        "megabytes_grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
    }


def random_bundle(family: str, folder: Path) -> Path:
    """Makes a small random model of a family with a token for each byte, and has ``optimize export`` compile it."""
    from large_model import export, make_tokenizer

    from tests.acceptance.tiny_configs import tiny_family

    tokenizer = make_tokenizer()
    model = tiny_family(family, vocab_size=len(tokenizer), max_position_embeddings=1024)
    for one in (model, tokenizer):
        one.save_pretrained(folder / family)
    bundle = folder / f"{family}.bundle"
    export([str(folder / family), "--output", str(bundle), "--recipe", "f32", "--target", "cpu"])
    return bundle


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts, and says what didn't hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("bundle", type=Path, nargs="?")
    model.add_argument("--random", metavar="FAMILY", help="a small random model of one of transformers' model types")
    for kind in ("embed", "rerank"):
        parser.add_argument(f"--{kind}", type=Path, metavar="BUNDLE", help=f"of the kind {kind}, for the part texts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    names = [kind.__name__ for kind in hostile_clients.KINDS]
    parser.add_argument("--kinds", nargs="+", choices=names, default=[], help="hostile clients; by default all kinds")
    parser.add_argument("--memory", type=float, default=600.0, help="megabytes of the server next to hostile clients")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second of the simulated day; 0: no day")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG file with the times")
    options = parser.parse_args(arguments)
    if options.embed is None or options.rerank is None:
        options.parts = [part for part in options.parts if part != "texts"]
    results: dict[str, Any] = {"date": date.today().isoformat(), "commit": commit(), "machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        if options.random:
            options.bundle, results["random"] = random_bundle(options.random, Path(name)), options.random
        if {"load", "answers", "kills"} & {*options.parts}:
            server = Server.scheduled(options.bundle, Path(name))
            try:
                if "load" in options.parts:
                    results["load"] = load(server, Path(name), options)
                if "answers" in options.parts:
                    results["answers"] = answers(server, options.bundle, options)
                if "kills" in options.parts:
                    results["kills"] = kills(server, options.kills)
            finally:
                results["exit"] = server.stop()
        if "hostile" in options.parts:
            results["hostile"] = hostile(options.bundle, Path(name), options.seconds, options.kinds)
            results["hostile"]["memory"] = options.memory
        if "texts" in options.parts:
            results["texts"] = texts(options)
    if options.rate and "day" in options.parts:
        results["day"] = simulated(options.rate)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return int(bool(problems(results)))


def problems(found: dict[str, Any]) -> list[str]:
    """The requirements that weren't met, a line each; printed too."""
    wrong = []
    if "load" in found:
        if found["load"]["result"]["errors"]:
            wrong.append(f"errors under load: {found['load']['result']['errors']}")
        if not found["load"]["all_blocks_free"]:
            wrong.append("blocks are lost")
    if "answers" in found:
        wrong += found["answers"]["wrong"]
        if not found["answers"]["all_blocks_free"] or found["answers"]["deaths"]:
            wrong.append("blocks are lost, or an engine died, under official clients")
    if "kills" in found:
        kills = found["kills"]
        if sum(kills["statuses"].values()) != kills["requests"] or set(kills["statuses"]) - {"200", "503"}:
            wrong.append(f"requests under a kill: {kills['statuses']}")
        if kills["then"] != 200:
            wrong.append("it doesn't answer after the kills")
    if "hostile" in found:
        wrong += _hostile_problems(found["hostile"])
    if "texts" in found:
        wrong += _text_problems(found["texts"])
    if found.get("exit"):
        wrong.append("it doesn't end well")
    for line in wrong:
        print(line, file=sys.stderr)
    return wrong


def _text_problems(found: dict[str, Any]) -> list[str]:
    names = ("embed", "chat", "rerank")
    wrong = [f"{name}: errors: {found[name]['errors']}" for name in names if found[name]["errors"]]
    wrong += [f"{name}: requests without an end" for name in names if found[name].get("unfinished")]
    wrong += [f"{name}: no request had an answer" for name in names if not found[name]["finished"]]
    if not found["all_blocks_free"] or found["deaths"] or found["exit"]:
        wrong.append("blocks are lost, an engine died, or it doesn't end well, under clients with texts")
    return wrong


def _hostile_problems(found: dict[str, Any]) -> list[str]:
    wrong = [f"next to {name} clients: {one}" for name in ("hostile", "well_behaved") for one in found[name]["wrong"]]
    slow, usual = (found[name]["honest"]["p99"] for name in ("hostile", "well_behaved"))
    if slow > SLOWER * usual:
        wrong.append(f"honest p99 next to hostile clients: {slow} s, next to well-behaved ones {usual} s")
    most = max(found[name]["megabytes"]["most"] for name in ("hostile", "well_behaved"))
    if most > found["memory"]:
        wrong.append(f"memory: {most:.0f} MB, and {found['memory']:.0f} are the limit")
    if not found["all_blocks_free"] or found["deaths"] or found["exit"]:
        wrong.append("blocks are lost, an engine died, or it doesn't end well")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
