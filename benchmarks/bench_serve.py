"""The costs of serving over HTTP, and goodput compared with other servers: the same requests for each, alternately.

    python benchmarks/bench_serve.py [--models smollm2] [--servers enginewright llama-server] [--quick] [--json FILE]
    python benchmarks/bench_serve.py --from-json FILE --page PAGE.md

Three parts, the first two by `optimize loadtest`:

- through: 16 clients, each of which waits for its answer, through HTTP; beside the runtime's own speed, `LLM.generate`
  of the same requests, 16 at a time, in a process of its own. A round has both, and the peers too; the median of the
  rounds' ratios counts. The processor time of front end, engine and load tool is measured, in microseconds a token.
- goodput: requests that arrive as a Poisson process at some rates; how many are answered within targets.
- start: from nothing to the first token of a short prompt, by `optimize generate` and by `optimize serve` with one
  request, in turn, once before that for the file cache.

Formats have as many bits a weight: our recipe int8, and Q8_0 for the peers. A peer that can't be made ready is left
out, and the result says why. What is there already is used again (build/bench); making it takes half an hour at first,
more for the large model. What was measured so far is in the file after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from peers.engines import OURS
from peers.loading import BENCHMARKS, BUILD
from peers.machine import commit, machine
from peers.marked_table import MarkedTable
from peers.models import MODELS
from peers.pages import write_anew
from peers.prepare import export, quietly, source_of
from peers.processes import environment
from peers.servers import LLAMA_CPP_PYTHON, MOST_SECONDS, SERVERS, Serving, about, asked, ready, serving_with
from peers.tables import markdown

PARTS = ("through", "goodput", "start")
CLIENTS = 16
WARM_UP = ("--clients", "4", "--requests", "8", "--seed", "999999", "--prompt", "30", "--answer", "16")
START_PROMPT = "Name a colour."


@dataclass(frozen=True)
class Sizes:
    """The load for a model. ``prompt`` and ``answer`` are lengths in the notation of `optimize loadtest`.

    Attributes:
        requests: total of the 16 clients.
        rates: requests a second, for ``seconds``.
        ttft, tpot: the targets.
        patience: seconds of silence after which a request counts as failed.
        context: most tokens of a request that peers are started for.
    """

    prompt: str = "30-120"
    answer: str = "32-96"
    requests: int = 160
    rates: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0)
    seconds: float = 25.0
    ttft: str = "500ms"
    tpot: str = "50ms"
    patience: str = "15s"
    context: int = 1024


SIZES = {
    "smollm2": Sizes(),
    "llama-1b": Sizes(requests=64, rates=(0.25, 0.5, 1.0, 2.0), seconds=40.0, ttft="2s", tpot="100ms", patience="30s"),
}


@dataclass(frozen=True)
class Job:
    """The measurements of one model."""

    model: str
    sizes: Sizes
    serving: Serving
    servers: Sequence[str]
    rounds: int


QUICK = {"requests": 16, "rates": (2.0,), "seconds": 6.0, "patience": "10s"}


def main(arguments: list[str] | None = None) -> int:
    """Prepares, measures, writes the result, prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["smollm2"])
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the peers")
    parser.add_argument("--quick", action="store_true", help="one round of few requests: to see that it works")
    parser.add_argument("--prepare", action="store_true", help="install, convert and export, but measure nothing")
    parser.add_argument("--keep", action="store_true", help="take our bundles as they are, though the code has changed")
    parser.add_argument("--json", type=Path, help="where the result goes; default in benchmarks/results")
    parser.add_argument("--from-json", type=Path, help="measure nothing: take this result")
    parser.add_argument("--page", type=Path, help="whose table is made anew, between marks")
    parser.add_argument("--own", nargs=2, help=argparse.SUPPRESS)  # a bundle, and what is asked of it: see `own`
    options = parser.parse_args(arguments)
    if options.own:
        print(json.dumps(own(Path(options.own[0]), json.loads(options.own[1]))))
        return 0
    if options.from_json:
        return finish(json.loads(options.from_json.read_text(encoding="utf-8")), options.page)
    begin = time.monotonic()
    missing = []
    for name in options.servers:
        if (why := ready(name, tell)) is not None:
            missing.append({"server": name, "reason": why})
            tell(f"{name} is left out: {why}")
    servers = [name for name in options.servers if name not in {one["server"] for one in missing}]
    files = {model: made(model, peers=servers != [OURS], keep=options.keep) for model in options.models}
    tell(f"prepared in {time.monotonic() - begin:.0f} s")
    if options.prepare:
        return 0
    cores = len(os.sched_getaffinity(0))
    folder = BUILD if options.quick else BENCHMARKS / "results"
    of = "-".join(["serve", *(["quick"] if options.quick else []), *options.models])
    name = f"{of}-{cores}-threads-{date.today().isoformat()}.json"
    path = options.json or folder / name
    result: dict[str, Any] = {
        "measured": {
            "date": date.today().isoformat(),
            "commit": commit(),
            "command": " ".join(["benchmarks/bench_serve.py", *(arguments or sys.argv[1:])]),
            "rounds": 1 if options.quick else options.rounds,
            "load_before": os.getloadavg(),
        },
        "machine": machine(),
        "missing": missing,
        "models": {},
    }
    begin = time.monotonic()
    if result["measured"]["load_before"][0] > 0.5:
        tell(f"the machine is busy: {result['measured']['load_before'][0]:.1f} processes; figures will be too slow")
    for model in options.models:
        sizes = Sizes(**(asdict(SIZES[model]) | (QUICK if options.quick else {})))
        serving = Serving(*files[model], options.threads, CLIENTS, sizes.context)
        figures: dict[str, Any] = {"sizes": asdict(sizes), "commands": {one: about(one, serving) for one in servers}}
        result["models"][model] = figures
        job = Job(model, sizes, serving, servers, result["measured"]["rounds"])
        for part in options.parts:
            for _ in PART[part](figures, job):
                result["measured"]["seconds"] = round(time.monotonic() - begin)
                write(path, result)
    tell(f"the result is in {path}")
    return finish(result, options.page)


def finish(result: Mapping[str, Any], page: Path | None) -> int:
    """Prints the result, and puts it on a page if asked to."""
    text = "\n".join(tables(result)).strip()
    print(text)
    if page is not None:
        MarkedTable("bench_serve.py").put(page, text)
    return 0


def made(model: str, *, peers: bool, keep: bool) -> tuple[Path, Path]:
    """The bundle and the GGUF file of a model, made if they aren't there."""
    folder = BUILD / model
    tell(f"make {model}")
    kinds = (["source"] if MODELS[model].random else []) + (["q8_0"] if peers else [])
    if kinds:
        quietly([sys.executable, "-m", "peers.make_models", model, str(folder), "--kinds", *kinds])
    folder.mkdir(parents=True, exist_ok=True)
    if not (keep and (folder / "int8.bundle").exists()):
        export(source_of(folder), folder / "int8.bundle", "int8", None)
    files = folder / "int8.bundle", folder / "q8_0.gguf"
    for file in files:
        if file.exists():
            write_anew(file)  # so that the file cache keeps all in pages of one size
    return files


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Writes what was measured so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


# Through HTTP, and without


def asks(sizes: Sizes) -> list[str]:
    """Options of the load tool that all parts have."""
    lengths = ["--prompt", sizes.prompt, "--answer", sizes.answer]
    return ["--api", "completions", "--param", "ignore_eos=true", *lengths]


def load(url: str, *options: str) -> dict[str, Any]:
    """Runs the load tool and returns its result. Raises RuntimeError."""
    command = [sys.executable, "-m", "enginewright", "loadtest", url, "--json", "--quiet", *options]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment(), timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired as e:
        raise RuntimeError(f"the load took more than {MOST_SECONDS:.0f} s") from e
    if done.returncode:
        raise RuntimeError(f"the load tool failed: {done.stderr.strip()[-300:] or done.stdout.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    if isinstance(result.get("model"), str):  # llama.cpp's servers call it by its path on this machine
        result["model"] = Path(result["model"]).name
    return result


def through(found: dict[str, Any], job: Job) -> Iterator[None]:
    """Closed loop: measures rounds of the runtime alone and of each server; yields after each."""
    rows: list[dict[str, Any]] = found.setdefault("through", [])
    for number in range(job.rounds):
        order = ["runtime", *job.servers]
        order = order[number % len(order) :] + order[: number % len(order)]
        row: dict[str, Any] = {}
        rows.append(row)
        for name in order:
            if name == LLAMA_CPP_PYTHON and number:
                continue  # one request after the other takes minutes, and is far from the others
            tell(f"{job.model}: {CLIENTS} clients, round {number + 1} of {job.rounds}: {name}")
            try:
                if name == "runtime":
                    row[name] = alone(job.serving, job.sizes, number)
                else:
                    row[name] = closed(name, job.serving, job.sizes, number)
            except RuntimeError as e:
                row[name] = {"error": str(e)}
                tell(str(e))
            yield


def closed(name: str, serving: Serving, sizes: Sizes, seed: int) -> dict[str, Any]:
    """A server with 16 clients, who wait for their answers."""
    with serving_with(name, serving) as server:
        load(server.url, *asks(sizes), *WARM_UP)
        before = server.cpu_seconds()
        result = load(
            server.url,
            *asks(sizes),
            *("--clients", str(CLIENTS), "--requests", str(sizes.requests), "--seed", str(seed)),
        )
        cpu = {part: seconds - before[part] for part, seconds in server.cpu_seconds().items()}
        peak = server.peak_bytes()
    tokens = result["tokens"] or 1
    each = {part: seconds / tokens * 1e6 for part, seconds in cpu.items()}
    keys = ("seconds", "tokens", "tokens_per_second", "tokens_counted_by", "finished", "failed", "errors", "notes")
    times = {name: result[name] and result[name]["p50"] for name in ("ttft", "tpot", "end_to_end")}
    return {
        **{key: result[key] for key in keys},
        "p50": times,
        "cpu_microseconds_per_token": each | {"load_tool": result["load_tool"]["cpu_microseconds_per_token"]},
        "peak_bytes": peak,
    }


def alone(serving: Serving, sizes: Sizes, seed: int) -> dict[str, Any]:
    """The runtime's own speed, in a process of its own."""
    asked_for = json.dumps({"sizes": asdict(sizes), "seed": seed})
    command = [sys.executable, __file__, "--own", str(serving.bundle), asked_for]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), cwd=BENCHMARKS)
    if done.returncode:
        raise RuntimeError(f"the runtime failed: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def own(bundle: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """`LLM.generate` of the requests that the load tool sends, as many at a time as it has clients."""
    from enginewright import LLM, SamplingParams
    from enginewright.optimizer.loadtest.options import LoadOptions, RequestClass, parse_lengths
    from enginewright.optimizer.loadtest.workload import Workload

    sizes, seed = Sizes(**given["sizes"]), given["seed"]

    def requests(count: int, seed: int, prompt: str, answer: str) -> tuple[list[str], list[SamplingParams]]:
        lengths = RequestClass(prompt=parse_lengths(prompt, "prompt"), answer=parse_lengths(answer, "answer"))
        options = LoadOptions("http://127.0.0.1", clients=CLIENTS, requests=count, seed=seed, classes=(lengths,))
        asked_for = [one.turns[0] for one in Workload(options)]
        params = [SamplingParams(max_tokens=t.answer, ignore_eos=True, temperature=0.0) for t in asked_for]
        return [str(turn.prompt) for turn in asked_for], params

    with LLM(bundle, max_requests=CLIENTS) as llm:
        llm.generate(*requests(8, 999999, "30", "16"), progress=False)
        prompts, params = requests(sizes.requests, seed, sizes.prompt, sizes.answer)
        cpu, start = time.process_time(), time.perf_counter()
        results = llm.generate(prompts, params, progress=False)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "cpu_microseconds_per_token": {"process": cpu / tokens * 1e6},
    }


# Goodput


def goodput(found: dict[str, Any], job: Job) -> Iterator[None]:
    """Open loop: measures each server at each rate, started anew; yields after each."""
    rows: list[dict[str, Any]] = found.setdefault("goodput", [])
    sizes, servers = job.sizes, job.servers
    for number, rate in enumerate(sizes.rates):
        order = [*servers[number % len(servers) :], *servers[: number % len(servers)]]
        for name in order:
            tell(f"{job.model}: {rate:g} requests a second, {name}")
            row: dict[str, Any] = {"server": name, "rate": rate}
            try:
                with serving_with(name, job.serving) as server:
                    load(server.url, *asks(sizes), *WARM_UP)
                    row |= load(
                        server.url,
                        *asks(sizes),
                        *("--rate", str(rate), "--seconds", str(sizes.seconds), "--seed", str(number)),
                        *("--ttft", sizes.ttft, "--tpot", sizes.tpot, "--timeout", sizes.patience),
                    )
            except RuntimeError as e:
                row["error"] = str(e)
                tell(str(e))
            rows.append(row)
            yield


# Start


def start(found: dict[str, Any], job: Job) -> Iterator[None]:
    """Measures the time from nothing to a first token; yields after each round."""
    rows: list[dict[str, float]] = found.setdefault("start", [])
    if OURS not in job.servers:
        return
    tell(f"{job.model}: start to first answer")
    for number in range(job.rounds + 1):  # the first is for the file cache
        ways = {"generate": generate_seconds, "serve": serve_seconds}
        order = random.Random(number).sample(list(ways), len(ways))
        try:
            row = {name: ways[name](job.serving) for name in order}
        except RuntimeError as e:
            tell(str(e))
            return
        if number:
            rows.append(row)
            yield


def generate_seconds(serving: Serving) -> float:
    """Gives the seconds of `optimize generate` until it has printed a first token."""
    command = [sys.executable, "-m", "enginewright", "generate", str(serving.bundle), START_PROMPT, "-n", "1", "-q"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
        assert process.stdout is not None
        if not os.read(process.stdout.fileno(), 1):
            raise RuntimeError("optimize generate printed nothing")
        seconds = time.perf_counter() - begin
    return seconds


def serve_seconds(serving: Serving) -> float:
    """Gives the seconds of `optimize serve` until it has answered one token, asked for as soon as it listens."""
    begin = time.perf_counter()
    body = {"messages": [{"role": "user", "content": START_PROMPT}], "max_tokens": 1, "temperature": 0}
    with serving_with(OURS, serving) as server:
        status = asked(int(server.url.rpartition(":")[2]), "POST", "/v1/chat/completions", body)
        seconds = time.perf_counter() - begin
    if status != 200:
        raise RuntimeError(f"optimize serve answered with {status}")
    return seconds


PART = {"through": through, "goodput": goodput, "start": start}


# What is printed


def tables(result: Mapping[str, Any]) -> list[str]:
    """All figures, as Markdown."""
    lines: list[str] = []
    for model, figures in result["models"].items():
        lines += [f"### {MODELS[model].title}", ""]
        if figures.get("through"):
            lines += [*through_lines(figures["through"]), ""]
        if figures.get("goodput"):
            lines += [*goodput_lines(figures), ""]
        if figures.get("start"):
            times = {name: median(row[name] for row in figures["start"]) for name in ("generate", "serve")}
            ratio = median(row["serve"] / row["generate"] for row in figures["start"])
            lines += [
                f"Start to first answer: `optimize generate` {times['generate']:.2f} s, `optimize serve` "
                f"{times['serve']:.2f} s, {ratio:.2f} times as long.",
                "",
            ]
    lines += [f"{one['server']} is left out: {one['reason']}" for one in result["missing"]]
    return lines


def through_lines(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """The closed loop: medians, and the ratio to the runtime's own speed in the same round."""
    rows = [("16 clients", "tokens/s", "of the runtime's own", "processor, µs a token", "first token", "failed")]
    for name in dict.fromkeys(name for one in rounds for name in one):
        good = [one for one in rounds if "tokens_per_second" in one.get(name, {})]
        if not good:
            rows.append((name, "failed", "", "", "", ""))
            continue
        speeds = [one[name]["tokens_per_second"] for one in good]
        ratios = [
            speed / one["runtime"]["tokens_per_second"]
            for one, speed in zip(good, speeds, strict=True)
            if "tokens_per_second" in one.get("runtime", {})
        ]
        parts = {key: [one[name]["cpu_microseconds_per_token"][key] for one in good] for key in _parts(good[0][name])}
        took = ", ".join(f"{key.replace('_', ' ')} {median(values):.0f}" for key, values in parts.items())
        first = [time for one in good if (time := one[name].get("p50", {}).get("ttft")) is not None]
        failed = sum(one[name].get("failed", 0) for one in good)
        ratio = f"{median(ratios):.1%}" if ratios and name != "runtime" else ""
        shown = f"{median(first) * 1e3:.0f} ms" if first else ""
        rows.append((name, f"{median(speeds):.0f}", ratio, took, shown, str(failed) if first else ""))
    return markdown(rows)


def _parts(found: Mapping[str, Any]) -> list[str]:
    return list(found["cpu_microseconds_per_token"])


def goodput_lines(found: Mapping[str, Any]) -> list[str]:
    """The open loop: at each rate who answers how many within the targets."""
    sizes = found["sizes"]
    titles = ("within targets", "requests/s", "first token p50", "p99", "per token p50", "p99", "failed")
    rows: list[Sequence[str]] = [("rate, server", *titles)]
    for one in found["goodput"]:
        if "goodput" not in one:
            rows.append((f"{one['rate']:g}, {one['server']}", "failed", *[""] * 6))
            continue
        good = one["goodput"]
        times = [one[name] and one[name][key] for name in ("ttft", "tpot") for key in ("p50", "p99")]
        shown = ["" if time is None else f"{time * 1e3:,.0f} ms" for time in times]
        share, rate = f"{good['share']:.1%}", f"{good['per_second']:.2f}"
        rows.append((f"{one['rate']:g}, {one['server']}", share, rate, *shown, str(one["failed"])))
    goals = f"Targets: {sizes['ttft']} to the first token, {sizes['tpot']} for each further one."
    return [*markdown(rows), "", goals]


def tell(text: str) -> None:
    """Tells who watches."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
