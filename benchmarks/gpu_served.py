"""The cuda target as a service, for stage E of gpu_truth.py: what is left after a lost GPU, and many requests at once.

Models are random. Of the larger one a bundle is carried without its weights, which are made where it runs.
"""

from __future__ import annotations

import heapq
import http.client
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_machine import EXACT, Figure, Machine, NotMeasuredError, Record
from gpu_places import placed

INDEX = "weights/index.json"

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer"},
        "of": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    },
    "required": ["name", "tags", "count"],
}
"""The schema of structured answers."""

START = """
import json, sys
from enginewright.runtime.server.http.options import ServerOptions
from enginewright.runtime.server.serve import serve

llm = {"target": "cuda", "trust": "code", "context": 128, "memory": "64MiB", "max_requests": 4}
options = ServerOptions(models={"tiny": sys.argv[1]}, llm=llm, port=0)
serve(options, lambda url, front: print(json.dumps({"url": url}), flush=True))
"""
"""A server; the command would load more than a machine with a GPU has."""


# ---- weights


def write_weights(bundle: Path) -> int:
    """Makes the weight files of a bundle that was carried without them; their bytes. Does nothing where they are.

    Matrices are random with a deviation of some 0.02, and vectors are ones.
    """
    index = json.loads((bundle / INDEX).read_text())
    rng, total = np.random.default_rng(0), 0
    for number, blob in enumerate(index["blobs"]):
        path = bundle / blob["file"]
        if path.exists():
            continue
        data = np.zeros(blob["bytes"], np.uint8)
        for entry in index["tensors"].values():
            if entry["blob"] == number:
                data[entry["offset"] : entry["offset"] + entry["bytes"]] = _random(rng, entry)
        path.write_bytes(data.tobytes())
        total += blob["bytes"]
    return total


def _random(rng: np.random.Generator, entry: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a tensor of the index."""
    kind, count = entry["dtype"], entry["bytes"]
    if kind in ("i8", "i4", "u4"):
        return rng.integers(0, 256, count, np.uint8)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[kind]
    size = count // dtype.itemsize
    if kind == "f16":  # scales of whole numbers up to 127
        values = rng.uniform(1e-4, 4.5e-4, size)
    elif len(entry["shape"]) == 1:
        values = np.ones(size)
    else:
        values = rng.normal(0, 0.02, size)
    return torch.from_numpy(values.astype(np.float32)).to(dtype).view(torch.uint8).numpy()


# ---- after a lost GPU


def survival(machine: Machine) -> Iterator[Figure]:
    """A planted illegal access: what ``LLM`` says, and what a server's /health does."""
    yield {"figure": "LLM"}, partial(_lost_model, machine)
    yield {"figure": "server"}, partial(_lost_server, machine)


def _executed(machine: Machine) -> None:
    if machine.mode == "looked-up":
        raise NotMeasuredError("nothing is computed where kernels are looked up alone")


def _lost_model(machine: Machine) -> Record:
    _executed(machine)
    command = [sys.executable, str(Path(__file__).parent / "gpu_fault.py"), str(machine.packed / "tiny.bundle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 if machine.gpu else 900)
    print(done.stderr[-4000:], file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-1500:]}")
    record = json.loads(lines[-1])
    right = "tokens" in record["before"] and bool(record["behind it"]["lost"]) and not record["closed"]
    right &= "tokens" not in record["behind it"] and "untyped" not in record["behind it"]["error"]
    return {**record, "right": right}


class _Server:
    """``optimize serve`` in a process group of its own, whose engine waits for a file to lose its GPU by."""

    def __init__(self, bundle: Path, scratch: Path) -> None:
        import gpu_fault

        (scratch / "sitecustomize.py").write_text(gpu_fault.SITE)
        about = scratch / "enginewright-0.dist-info"  # the server says which version it is, and isn't installed there
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: enginewright\nVersion: 0\n")
        self.fault, self.log = scratch / "fault", scratch / "server.log"
        path = os.pathsep.join(filter(None, (str(scratch), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, gpu_fault.FILE_VARIABLE: str(self.fault)}
        command = [sys.executable, "-c", START, str(bundle)]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the server ended: {self.log.read_text()[-1500:]}")
        self._port = int(json.loads(line)["url"].rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, seconds: float = 60.0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=seconds)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, seconds: float = 60.0) -> tuple[int, Any]:
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        return self.ask("POST", "/v1/completions", body, seconds)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _lost_server(machine: Machine) -> Record:
    _executed(machine)
    longest = 45.0 if machine.gpu else 600.0
    with tempfile.TemporaryDirectory() as scratch:
        begin = time.perf_counter()
        server = _Server(machine.packed / "tiny.bundle", Path(scratch))
        try:
            until = time.monotonic() + longest
            while server.ask("GET", "/health")[0] != 200 and time.monotonic() < until:
                time.sleep(0.05)
            record: Record = {"ready s": round(time.perf_counter() - begin, 2)}
            status, before = server.complete(longest)
            record |= {"before": [status, _text(before)]}
            record |= _watched(server, longest)
            record["same text"] = record["answered"] == record["before"]
            record["props"] = server.ask("GET", "/props")[1]["models"]
        finally:
            server.stop()
            print(server.log.read_text()[-6000:], file=sys.stderr)
    right = record["answered"][0] == 200 and record["same text"] and record["503 after s"] is not None
    if machine.gpu and right:
        right = record["503 after s"] <= 2
    return {**record, "right": right}


def _text(answer: Any) -> Any:
    return answer["choices"][0]["text"] if "choices" in answer else answer


def _watched(server: _Server, longest: float) -> Record:
    """Plants the fault: what requests and /health say from then on, in seconds since the first request that failed."""
    requests: list[tuple[float, int, str]] = []
    stop = threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            with suppress(OSError, ValueError):
                status, answer = server.complete(longest)
                requests.append((time.monotonic(), status, json.dumps(answer)[:300]))
            stop.wait(0.1)

    server.fault.touch()
    while server.fault.exists():
        time.sleep(0.01)
    planted, seen = time.monotonic(), []
    asking = threading.Thread(target=ask_on, daemon=True)
    asking.start()
    try:
        while time.monotonic() - planted < longest:
            status, _ = server.ask("GET", "/health")
            if not seen or seen[-1][1] != status:
                seen.append((time.monotonic(), status))
            if [one for _, one in seen][-2:] == [503, 200]:
                break
            time.sleep(0.02)
    finally:
        stop.set()
        asking.join(longest)
    failed = next((when for when, status, _ in requests if status != 200), None)
    gone = next((when for when, status in seen if status == 503), None)
    back = next((when for when, status in seen if status == 200 and gone is not None and when > gone), None)
    since = planted if failed is None else failed
    status, answer = server.complete(longest)
    return {
        "first request failed s after the fault": None if failed is None else round(failed - planted, 3),
        "503 after s": None if gone is None else round(max(gone - since, 0.0), 3),
        "200 again after s": None if back is None else round(back - since, 3),
        "answers meanwhile": {status: sum(1 for _, one, _ in requests if one == status) for _, status, _ in requests},
        "first failure": next((text for _, status, text in requests if status != 200), None),
        "answered": [status, _text(answer)],
    }


# ---- many requests at once


class StepTimes:
    """Notes of each step of a model when it was submitted, and how long its result and the GPU were waited for."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.results: list[float] = []
        self.waits: list[float] = []

    @contextmanager
    def of(self, llm: Any) -> Iterator[StepTimes]:
        executor, submit, wait = llm._executor, llm._executor.submit, torch.cuda.Event.synchronize
        waited = 0.0

        def synchronize(event: Any) -> None:
            nonlocal waited
            begin = time.perf_counter()
            wait(event)
            waited += time.perf_counter() - begin

        def timed(step: Any) -> Any:
            self.begun.append(time.perf_counter())
            pending = submit(step)
            result = pending.result

            def finish() -> Any:
                nonlocal waited
                begin = time.perf_counter()
                output = result()
                self.results.append(time.perf_counter() - begin)
                self.waits.append(waited)
                waited = 0.0
                return output

            pending.result = finish
            return pending

        with patch.object(torch.cuda.Event, "synchronize", synchronize), patch.object(executor, "submit", timed):
            yield self

    def record(self) -> Record:
        """Medians, in milliseconds. ``host``: of a step's time what the GPU wasn't waited for."""
        if len(self.begun) < 3:
            return {"steps": len(self.begun)}
        periods = np.diff(self.begun)
        host = periods - np.array(self.waits[: len(periods)])
        return {
            "steps": len(self.begun),
            "ms": round(float(np.median(periods)) * 1e3, 3),
            "host ms": round(float(np.median(host)) * 1e3, 3),
            "waited ms": round(statistics.median(self.waits) * 1e3, 3),
            "result ms": round(statistics.median(self.results) * 1e3, 3),
            "longest ms": round(float(periods.max()) * 1e3, 1),
        }


def _prompts(count: int, shortest: int, longest: int, seed: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def late(llm: Any) -> Record:
    """The executor's counters of buffers bound and graphs captured while requests ran; empty if it has none."""
    about = llm.info()["executor"]
    return {key: value for key, value in about.items() if str(key).startswith("late")}


@contextmanager
def _opened(machine: Machine, requests: int, *, exact: bool = False) -> Iterator[Any]:
    """The larger model; the tiny one where it is interpreted."""
    from enginewright import LLM

    name = "tiny" if machine.mode == "interpreted" else "smol"
    bundle = machine.packed / f"{name}{EXACT * exact}.bundle"
    write_weights(bundle)
    context, memory = (1024, "6GiB") if machine.mode != "interpreted" else (128, "64MiB")
    place = None if machine.gpu else machine.place()
    options = {"context": context, "memory": memory, "max_requests": requests, "verify": False, "speculate": None}
    with placed(place), LLM(bundle, target="cuda", trust="code", **options) as llm:
        yield llm


def generate(machine: Machine) -> Iterator[Figure]:
    """Plain requests, structured ones and some with logprobs: a round that warms, then one that counts."""
    small = not machine.gpu
    counts = {"plain 256": 256, "plain 64": 64, "structured 64": 64, "logprobs 64": 64}
    if small:
        counts = dict.fromkeys(counts, 2)
    tokens = 3 if small else 128
    ways: dict[str, Record] = {
        "structured 64": {"structured_outputs": {"json": SCHEMA}},
        "logprobs 64": {"logprobs": 5},
    }
    opened = None if machine.mode == "looked-up" else _Kept(machine, max(counts.values()))
    for name, count in counts.items():
        yield {"figure": name}, partial(_rounds, machine, opened, count, tokens, ways.get(name, {}))


class _Kept:
    """A model that is opened by who uses it first, and stays open for all figures of a part."""

    def __init__(self, machine: Machine, requests: int) -> None:
        self._opening = _opened(machine, requests)
        self._llm: Any = None

    def __call__(self) -> Any:
        if self._llm is None:
            self._llm = self._opening.__enter__()
        return self._llm


def _rounds(machine: Machine, opened: _Kept | None, count: int, tokens: int, how: Record) -> Record:
    from enginewright import SamplingParams

    if opened is None:
        _executed(machine)
    assert opened is not None
    llm, by_round = opened(), {}
    vocab = llm.model.vocab_size
    longest = 256 if machine.gpu else 12
    for number, name in enumerate(("warming", "counted")):
        params = [
            SamplingParams(max_tokens=tokens, temperature=0.8, seed=n, ignore_eos="json" not in str(how), **how)
            for n in range(count)
        ]
        prompts, before, times = _prompts(count, longest // 8, longest, number, vocab), late(llm), StepTimes()
        if machine.gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with times.of(llm):
            answers = llm.generate(prompts, params, progress=False)
        seconds, after = time.perf_counter() - begin, late(llm)
        tokens_total = sum(len(answer.token_ids) for answer in answers)
        by_round[name] = {
            "tokens": tokens_total,
            "tokens/s": round(tokens_total / seconds, 1),
            "seconds": round(seconds, 3),
            **times.record(),
            **{key: after[key] - before[key] for key in after if isinstance(after[key], (int, float))},
        }
        if machine.gpu:
            by_round[name]["most MiB"] = torch.cuda.max_memory_allocated() >> 20
        if wrong := [answer.error for answer in answers if answer.error is not None]:
            by_round[name]["errors"] = [str(error)[:200] for error in wrong[:3]]
    return {"requests": count, **by_round, "right": "errors" not in by_round["counted"]}


# ---- arrivals


def arrivals(machine: Machine) -> Iterator[Figure]:
    """Requests at random times, some of which are aborted, and the memory before and afterwards."""
    yield {"figure": "arrivals"}, partial(_arrivals, machine)


def _arrivals(machine: Machine) -> Record:
    _executed(machine)
    warm, seconds, rate = (6.0, 60.0, 40.0) if machine.gpu else (0.5, 2.0, 3.0)
    with _opened(machine, 128 if machine.gpu else 4) as llm:
        _run_arrivals(llm, warm, rate, seed=1, small=not machine.gpu)
        llm.delete_prefixes()
        before, counted = _memory(llm, machine), late(llm)
        record = _run_arrivals(llm, seconds, rate, seed=2, small=not machine.gpu)
        llm.delete_prefixes()
        after, last = _memory(llm, machine), late(llm)
        record |= {key: last[key] - counted[key] for key in last if isinstance(last[key], (int, float))}
    record |= {"before": before, "after": after}
    return {**record, "right": record["failed"] == 0 and before["blocks free"] == after["blocks free"]}


def _memory(llm: Any, machine: Machine) -> Record:
    record: Record = {"blocks free": llm.info()["kv_blocks_free"]}
    record["most resident MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    record["resident MiB"] = resident >> 20
    if machine.gpu:
        free, _ = torch.cuda.mem_get_info()
        record |= {"GPU free MiB": free >> 20, "allocated MiB": torch.cuda.memory_allocated() >> 20}
        record["reserved MiB"] = torch.cuda.memory_reserved() >> 20
    return record


class _Arrival:
    """A request that came: when, and when its first and last tokens did."""

    def __init__(self) -> None:
        self.came = time.perf_counter()
        self.first = self.last = 0.0
        self.tokens, self.error, self.ended = 0, "", threading.Event()

    def __call__(self, event: Any) -> None:
        self.last = time.perf_counter()
        if isinstance(event, Exception):
            self.error = str(event)[:200]
        else:
            self.first = self.first or self.last
            self.tokens += len(event.token_ids)
        if isinstance(event, Exception) or event.finish_reason is not None:
            self.ended.set()


def _run_arrivals(llm: Any, seconds: float, rate: float, *, seed: int, small: bool) -> Record:
    """Poisson arrivals for so many seconds, one of six of which is aborted; returns when all have ended."""
    from enginewright import SamplingParams
    from enginewright.runtime.tasks.generate import Generate

    rng, vocab = np.random.default_rng(seed), llm.model.vocab_size
    longest, most = (12, 6) if small else (600, 200)
    at = float(rng.exponential(1 / rate))
    begin, leaving, came, aborted = time.perf_counter(), [], [], 0
    while at < seconds or leaving:
        nearest = min([at] * (at < seconds) + [when for when, *_ in leaving[:1]])
        time.sleep(max(0.0, begin + nearest - time.perf_counter()))
        if leaving and leaving[0][0] <= nearest:
            _, number, prepared = heapq.heappop(leaving)
            if not came[number].ended.is_set():
                llm.abort(prepared)
                came[number].ended.set()
                aborted += 1
            continue
        prompt = rng.integers(4, vocab, int(rng.integers(1, longest))).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(1, most)), temperature=1.0, seed=len(came), ignore_eos=True)
        arrival, prepared = _Arrival(), llm.prepare(Generate(prompt, params))
        llm.submit(prepared, arrival)
        if rng.random() < 1 / 6:
            heapq.heappush(leaving, (at + float(rng.exponential(0.3)), len(came), prepared))
        came.append(arrival)
        at += float(rng.exponential(1 / rate))
    for arrival in came:
        arrival.ended.wait(60 if not small else 600)
    took = time.perf_counter() - begin
    firsts = sorted(one.first - one.came for one in came if one.first)
    between = sorted((one.last - one.first) / (one.tokens - 1) for one in came if one.tokens > 4 and not one.error)
    return {
        "requests": len(came),
        "aborted": aborted,
        "failed": sum(1 for one in came if one.error or not one.ended.is_set()),
        "errors": sorted({one.error for one in came if one.error})[:3],
        "tokens/s": round(sum(one.tokens for one in came) / took, 1),
        "first token ms": _quantiles(firsts),
        "between tokens ms": _quantiles(between),
        "seconds": round(took, 1),
    }


def _quantiles(values: Sequence[float]) -> Record:
    if not values:
        return {}
    return {str(q): round(float(np.quantile(values, q)) * 1e3, 2) for q in (0.5, 0.9, 0.99, 1.0)}


# ---- exact mode


def exact(machine: Machine) -> Iterator[Figure]:
    """Greedy tokens of one request of the served model alone and beside others, exact and not."""
    for is_exact in (True, False):
        yield {"figure": "tokens", "exact": is_exact}, partial(_same_tokens, machine, exact=is_exact)


def _same_tokens(machine: Machine, *, exact: bool) -> Record:
    """Greedy tokens and log-probabilities of one request in several batches: where they differ first from those
    alone."""
    from enginewright import SamplingParams

    _executed(machine)
    counts, tokens = ((1, 7, 64), 64) if machine.gpu else ((1, 2), 3)
    with _opened(machine, max(counts), exact=exact) as llm:
        vocab = llm.model.vocab_size
        first_prompt = _prompts(1, 8, 8, 3, vocab)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        by_count = {}
        for count in counts:
            llm.delete_prefixes()
            others = _prompts(count - 1, 8, 200 if machine.gpu else 12, 4, vocab)
            answer = llm.generate(first_prompt + others, params)[0]
            by_count[count] = list(answer.token_ids), [one.logprob for one in answer.logprobs or ()]
    tokens_alone, logprobs_alone = by_count[1]
    result: Record = {}
    for count, (ids, logprobs) in by_count.items():
        apart = next((n for n, (a, b) in enumerate(zip(ids, tokens_alone, strict=True)) if a != b), None)
        same = ids[:apart] if apart is not None else ids
        bits = sum(a != b for a, b in zip(logprobs[: len(same)], logprobs_alone, strict=False))
        result[str(count)] = {"first other token": apart, "logprobs with other bits": bits, "of": len(same)}
    right = {"right": all(of == by_count[1] for of in by_count.values())} if exact else {}
    return {"requests": counts, **result, **right}
