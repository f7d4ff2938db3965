"""Replicas on Ray Serve beside bare servers, one that is killed under load, and who gets which request.

    python benchmarks/replicas.py BUNDLE [--parts pair,kill,routing] [--rounds 3] [--clients 4] [--json FILE]

Needs `pip install 'enginewright[ray]'`. All engines have one thread.

- pair: two bare servers, each under a load tool of its own, against one server of two replicas under one load tool with
  as many clients in all. Rounds alternate. What is compared is the sum of tokens a second; processor time is told by
  process.
- kill: under load, the process of one replica is killed. Each request must end, those that hadn't streamed with an
  answer; the others are at most as many as the replica had.
- routing: an agent's trace (conversations of several turns, with a long beginning that all share), with requests routed
  by prefix, by load and round robin, each by a fresh server: tokens found in the prefix cache, and times.

The load tool takes processor time from the same cores, in all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from peers.machine import commit, machine

from enginewright.optimizer.loadtest.own_server import start, stop

PARTS = ("pair", "kill", "routing")
ONE = ("--threads", "1", "--memory", "512MiB")
POLICIES = ("prefix", "load", "round-robin")
TICK = os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints what came of it, and writes the figures. 1 where a request was lost that shouldn't be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4, help="of each replica")
    parser.add_argument("--requests", type=int, default=24, help="of each replica and round")
    parser.add_argument("--prompt", default="128")
    parser.add_argument("--answer", default="64")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--shared", type=int, default=1000, help="tokens that all conversations begin with")
    parser.add_argument("--json", type=Path)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    results: dict[str, Any] = {
        "workload": [options.bundle.name, *words[1:]],
        "commit": commit(),
        "date": date.today().isoformat(),
        "machine": machine(),
        "load_average": os.getloadavg(),
    }
    parts = {"pair": pair, "kill": kill, "routing": routing}
    for name in options.parts.split(","):
        results[name] = parts[name](options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return int("kill" in results and not results["kill"]["fine"])


@contextmanager
def served(bundle: Path, *arguments: str) -> Iterator[tuple[int, str]]:
    """A server's process and address; none of its processes stays."""
    process, about = start(bundle, *ONE, *arguments)
    try:
        yield process.pid, about["url"]
    finally:
        below = below_of(process.pid)
        stop(process)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def replicated(bundle: Path, *arguments: str) -> Iterator[tuple[int, str]]:
    """A server of two replicas, once both answer."""
    with served(bundle, "--replicas", "2", *arguments) as (pid, url):
        while len(props(url)["replicas"]) < 2:
            time.sleep(0.1)
        yield pid, url


def ask(url: str, path: str) -> bytes:
    """The body of the response to a GET."""
    link = http.client.HTTPConnection(url.removeprefix("http://"))
    try:
        link.request("GET", path)
        return link.getresponse().read()
    finally:
        link.close()


def props(url: str) -> dict[str, Any]:
    """The model's entry in ``/props``."""
    return next(iter(json.loads(ask(url, "/props"))["models"].values()))  # type: ignore[no-any-return]


def load(url: str, *arguments: str | int, wait: bool = True) -> subprocess.Popen[str]:
    """The load tool, under way or at its end."""
    program = [sys.executable, "-m", "enginewright", "loadtest", url, *map(str, arguments), "--json", "--quiet"]
    process = subprocess.Popen([*program, "--timeout", "600s"], stdout=subprocess.PIPE, text=True)
    if wait:
        process.wait()
    return process


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of the load tool, from its stdout."""
    return json.loads(process.communicate()[0])  # type: ignore[no-any-return]


def below_of(pid: int) -> list[int]:
    """A process and those below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(") ")[2].split()[1])
    pids = [pid]
    for one in pids:
        pids += [child for child, parent in parents.items() if parent == one]
    return pids


def cpu_seconds(pids: Sequence[int]) -> dict[str, float]:
    """Processor time of servers by what their processes are."""
    seconds: dict[str, float] = {}
    for top in pids:
        for pid in below_of(top):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
                kind = "front end" if pid == top else "engines" if b"engine_process" in words else "Ray and others"
                kind = "replicas" if words.startswith(b"ray::ServeReplica") else kind
                seconds[kind] = seconds.get(kind, 0.0) + sum(map(int, times)) / TICK
    return seconds


def measured(pids: Sequence[int], urls: Sequence[str], clients: int, requests: int, options: Any) -> dict[str, Any]:
    """One round: all servers under load at the same time."""
    before, began = cpu_seconds(pids), time.monotonic()
    sizes = ("--clients", clients, "--requests", requests, "--prompt", options.prompt, "--answer", options.answer)
    tools = [load(url, *sizes, "--seed", n, wait=False) for n, url in enumerate(urls)]
    results = [result(tool) for tool in tools]
    seconds = time.monotonic() - began
    after = cpu_seconds(pids)
    assert not any(one["failed"] for one in results)
    return {
        "tokens_per_second": sum(one["tokens_per_second"] for one in results),
        "tokens": sum(one["tokens"] for one in results),
        "ttft_p50": median(one["ttft"]["p50"] for one in results),
        "tpot_p50": median(one["tpot"]["p50"] for one in results),
        "seconds": seconds,
        "cpu_seconds": {kind: round(value - before.get(kind, 0.0), 2) for kind, value in after.items()}
        | {"load tools": round(sum(one["load_tool"]["cpu_seconds"] for one in results), 2)},
    }


def pair(options: argparse.Namespace) -> dict[str, Any]:
    """Two bare servers against two replicas, in turn."""
    rounds: dict[str, list[dict[str, Any]]] = {"bare": [], "replicas": []}
    with contextlib.ExitStack() as stack:
        bare = [stack.enter_context(served(options.bundle)) for _ in range(2)]
        both = stack.enter_context(replicated(options.bundle))
        bare_pids, bare_urls = zip(*bare, strict=True)
        each, count = options.clients, options.requests
        for index in range(options.rounds + 1):  # the first one warms
            for name in ("bare", "replicas") if index % 2 else ("replicas", "bare"):
                if name == "bare":
                    row = measured(bare_pids, bare_urls, each, count, options)
                else:
                    row = measured([both[0]], [both[1]], 2 * each, 2 * count, options)
                if index:
                    rounds[name].append(row)
    shares = [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(*rounds.values(), strict=True)]
    for name, rows in rounds.items():
        speed = median(row["tokens_per_second"] for row in rows)
        print(f"{name:<9}{speed:>8.1f} tokens/s, processor seconds of the last round: {rows[-1]['cpu_seconds']}")
    print(f"replicas have {median(shares):.2f} of two bare servers' tokens a second (rounds: {sorted(shares)})")
    return {**rounds, "shares": shares, "share": median(shares)}


def kill(options: argparse.Namespace) -> dict[str, Any]:
    """One of two replicas is killed under load."""
    with replicated(options.bundle) as (_, url), tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        sizes = ("--clients", 2 * options.clients, "--requests", 4 * options.requests)
        lengths = ("--prompt", options.prompt, "--answer", options.answer, "--records", records)
        tool = load(url, *sizes, *lengths, wait=False)
        while sum(row["requests"] > 0 for row in props(url)["replicas"]) < 2:
            time.sleep(0.05)
        time.sleep(1.0)
        victim = max(props(url)["replicas"], key=lambda row: row["requests"])
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.monotonic()
        seen: list[float] = []
        watch = threading.Thread(target=lambda: seen.append(_both(url) - killed))
        watch.start()
        figures = result(tool)
        watch.join()
        after = props(url)
    row = {
        "requests": figures["finished"] + figures["failed"],
        "finished": figures["finished"],
        "failed": figures["failed"],
        "errors": figures["errors"],
        "victim_had": victim["requests"],
        "tried_again": after["retried"],
        "seconds_until_two_again": seen[0],
    }
    row["fine"] = figures["failed"] <= 2 * options.clients and row["requests"] == 4 * options.requests
    print(f"killed under {victim['requests']} requests: {figures['failed']} of {row['requests']} failed, "
          f"{after['retried']} were tried again; two replicas again after {seen[0]:.1f} s")  # fmt: skip
    return row


def _both(url: str) -> float:
    while props(url)["deaths"] < 1 or len(props(url)["replicas"]) < 2:
        time.sleep(0.1)
    return time.monotonic()


def routing(options: argparse.Namespace) -> dict[str, Any]:
    """An agent's trace by each policy, in turn."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in POLICIES}
    sizes = ("--clients", options.conversations, "--requests", options.conversations, "--turns", options.turns)
    lengths = ("--shared-prefix", options.shared, "--prompt", 60, "--answer", 24)
    for index in range(options.rounds):
        for name in POLICIES[index % 3 :] + POLICIES[: index % 3]:
            with replicated(options.bundle, "--routing", name) as (_, url):
                row = result(load(url, *sizes, *lengths, "--seed", index))
            assert not row["failed"], row["errors"]
            keys = ("requests_per_second", "tokens_per_second", "prompt_tokens", "cached_tokens", "seconds")
            times = {kind: row[kind] for kind in ("ttft", "end_to_end")}
            rounds[name].append({key: row[key] for key in keys} | times)
    for name, rows in rounds.items():
        hits = median(row["cached_tokens"] / row["prompt_tokens"] for row in rows)
        first, late = (median(row["ttft"][key] for row in rows) for key in ("p50", "p95"))
        print(f"{name:<12}{hits:>7.1%} of prompt tokens found, first token {first:.3f} s (p95 {late:.3f}), "
              f"{median(row['seconds'] for row in rows):.1f} s in all")  # fmt: skip
    return rounds


if __name__ == "__main__":
    sys.exit(main())
