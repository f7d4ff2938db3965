"""benchmarks/gpu_truth.py, rehearsed: kernels are looked up in what was packed; what fails stops nothing else."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")

import gpu_kernels
import gpu_models
import gpu_places
import gpu_truth
import numpy as np
from gpu_machine import CAPABILITY, Machine, Record
from gpu_truth import Part

from enginewright.plugins.gpu.tiles import NARROW_PRODUCTS
from enginewright.runtime.shared.contracts import StepInput

NO_COMPILER = '''
"""Where no program but Python can be started: no g++, no ptxas."""
import os, sys

def refuse(event, given):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        if not os.path.basename(str(given[0])).startswith("python"):
            raise PermissionError(f"{given[0]} isn't on the machine with the GPU")

sys.addaudithook(refuse)
'''


def run(repository: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "benchmarks" / "gpu_truth.py"), *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


@pytest.fixture
def bare(repository: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of an environment without a compiler: an empty PATH, and a Python that starts nothing else."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_COMPILER)
    path = f"{folder}:{repository / 'src'}"
    there = {"PYTHONPATH": path, "PATH": str(folder), "CC": "", "CXX": "", "TRITON_CACHE_DIR": str(folder / "cache")}
    tried = subprocess.run(
        [sys.executable, "-c", "import subprocess; subprocess.run(['/bin/true'])"],
        capture_output=True, text=True, env={**os.environ, **there},
    )  # fmt: skip
    assert "isn't on the machine" in tried.stderr
    return there


def lines(output: Path, stage: str) -> list[Record]:
    return [json.loads(line) for line in (output / f"{stage}.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_a_rehearsal_without_a_compiler(repository: Path, tmp_path: Path, bare: dict[str, str]) -> None:
    """Kernels are found, and interpreted: their results, tokens and logits are right."""
    packed, output = tmp_path / "packed", tmp_path / "found"
    done = run(repository, "pack", str(packed), "--tiny")
    assert done.returncode == 0, done.stderr
    for mode in ("looked-up", "interpreted"):
        for stage in "ABC":
            done = run(
                repository, stage, "--packed", str(packed), "--output", str(output / mode), "--rehearse", mode, **bare
            )
            assert done.returncode == 0, (output / mode / f"{stage}.log").read_text()
            assert [r for r in lines(output / mode, stage) if "error" in r] == []
    by_part: dict[str, list[Record]] = {}
    for record in lines(output / "interpreted", "A") + lines(output / "interpreted", "B"):
        if "figure" in record:
            by_part.setdefault(record["part"], []).append(record)
    assert {"facts", "roofs", "kernels", "cases", "tiles", "tokens", "steps 1b", "logits"} <= set(by_part)
    assert [record["right"] for record in by_part["cases"]] == [True] * 2
    assert [record["equal"] for record in by_part["tokens"]] == [True]
    assert [record["right"] for record in by_part["logits"]] == [True]
    assert sum(record["loaded"] for record in by_part["kernels"]) > 100


@pytest.mark.soak
def test_a_rehearsal_of_the_service(repository: Path, tmp_path: Path) -> None:
    """A server survives a lost GPU, answers come in all ways, and arrivals leave nothing behind. Exact steps have the
    same bits in any batch."""
    packed, output = tmp_path / "packed", tmp_path / "found"
    done = run(repository, "pack", str(packed), "--tiny", "--service")
    assert done.returncode == 0, done.stderr
    for stage in "EF":
        done = run(repository, stage, "--packed", str(packed), "--output", str(output), "--rehearse", "interpreted")
        assert done.returncode == 0, (output / f"{stage}.log").read_text()
    figures = {(r["part"], r["figure"], r.get("model"), r.get("way")): r for r in lines(output, "E") if "figure" in r}
    server = figures["survival", "server", None, None]
    assert server["503 after s"] is not None and server["answered"] == server["before"]
    assert all(r.get("right", True) and "error" not in r for r in figures.values()), figures
    for name in ("plain 256", "structured 64", "logprobs 64"):
        assert figures["generate", name, None, None]["warming"]["late_binds"] > 0
    assert figures["arrivals", "arrivals", None, None]["failed"] == 0
    assert {"steps 8b fp8", "steps moe", "steps hybrid", "drawing"} <= {part for part, *_ in figures}
    exact_figures = [record for record in lines(output, "F") if "figure" in record]
    exact = [record for record in exact_figures if record.get("exact") and record["part"] != "exact served"]
    assert [record["right"] for record in exact] == [True] * 9
    served = [record for record in exact_figures if record["part"] == "exact served"]
    assert [record.get("right") for record in served] == [True, None]
    assert all(record["exact ms"] > 0 for record in exact_figures if record["figure"] == "price")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's program, packed."""
    import gpu_pack

    from enginewright.plugins.gpu.compile_workers import KernelCompiler
    from enginewright.runtime.shared.threads import available_threads

    packed = tmp_path_factory.mktemp("packed")
    with KernelCompiler(available_threads()) as compiler:
        gpu_pack._pack_program(packed / "tiny", "tiny", CAPABILITY, compiler)
        gpu_pack.pack_exact(packed / "tiny", CAPABILITY, compiler)
    return packed


def test_exact_steps_have_the_same_bits_in_any_batch(
    program: Path, repository: Path, tmp_path: Path, bare: dict[str, str]
) -> None:
    """Looked up in all sizes, then interpreted."""
    by_mode: dict[str, list[Record]] = {}
    for mode in ("looked-up", "interpreted"):
        arguments = ("F", "--only", "exact 8b", "--packed", str(program), "--output", str(tmp_path / mode))
        done = run(repository, *arguments, "--rehearse", mode, **bare)
        assert done.returncode == 0, (tmp_path / mode / "F.log").read_text()
        by_mode[mode] = [record for record in lines(tmp_path / mode, "F") if "figure" in record]
    prices = [record for record in by_mode["looked-up"] if record["figure"] == "price"]
    assert [record.get("batch") for record in prices] == [1, 16, 64, 256, None]
    assert all(record["exact ms"] > 0 for record in prices)
    bits = [record for record in by_mode["interpreted"] if record["figure"] == "bits"]
    assert [record.get("right") for record in bits] == [True] * 3 + [None] * 3


def test_bits_that_depend_on_the_batch_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_pack

    class Steps:
        """Steps whose logits are one number, that of their requests."""

        def start(self, step: StepInput) -> Any:
            return SimpleNamespace(result=lambda: SimpleNamespace(logits=np.full((1, 5), len(step.kv_len), np.float32)))

        def close(self) -> None:
            pass

    (tmp_path / "tiny").mkdir()
    lowering = gpu_pack._lowered(gpu_pack._config("tiny"))
    (tmp_path / "tiny/program.json").write_text(lowering.program.to_json())
    monkeypatch.setattr(gpu_places, "products_in_order", nullcontext)  # nothing is interpreted here
    monkeypatch.setattr(gpu_models.Steps, "opened", lambda *_, **__: Steps())
    for figure, measure in gpu_models.Steps(Machine(tmp_path, "interpreted"), "8b").exact():
        if figure["figure"] == "bits":
            record = measure()
            assert record["1"]["other bits"] == 0 and record["4"]["other bits"] == 5
            assert record.get("right") == (False if figure["exact"] else None)


def test_figures_ask_for_no_kernel_that_was_not_packed(
    program: Path, repository: Path, tmp_path: Path, bare: dict[str, str]
) -> None:
    """Each batch, context and prompt is asked for; then one is missing, and only what launches it fails."""

    def measured(to: str, free: int) -> tuple[int, list[Record]]:
        output = tmp_path / to
        arguments = ("B", "--only", "steps 1b", "--packed", str(program), "--output", str(output), "--free", str(free))
        done = run(repository, *arguments, "--rehearse", "looked-up", **bare)
        return done.returncode, [record for record in lines(output, "B") if "figure" in record]

    status, figures = measured("whole", 139 << 30)
    assert status == 0 and len(figures) > 12
    assert all("ms" in record or "wall ms" in record for record in figures), figures
    assert {record.get("batch") for record in figures} == {None, 1, 16, 64, 256}
    status, small = measured("small", 2_300_000_000)  # as where a GPU has less memory
    assert status == 0
    left_out = [record for record in small if "left out" in record]
    assert 0 < len(left_out) < len(small) / 2 and left_out[-1]["batch"] == 256

    for kernel in (program / "tiny").glob("listed_attention-*.json"):
        kernel.rename(kernel.with_suffix(".gone"))
    status, figures = measured("without", 139 << 30)
    failed = [record for record in figures if "error" in record]
    assert status == 1
    assert all("listed_attention" in record["error"] for record in failed)
    assert 0 < len(failed) < len(figures) - 3
    assert "ms" in next(record for record in figures if record.get("prompt") == 8192)


def figures_of(*measures: Callable[[], Record]) -> Part:
    return Part(lambda machine: iter([({"figure": n}, measure) for n, measure in enumerate(measures)]), 10)


def test_each_figure_stands_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu_machine import NotMeasuredError

    def fails() -> Record:
        raise RuntimeError("no such kernel")

    def large() -> Record:
        raise NotMeasuredError("needs 87 GB")

    part = figures_of(fails, large, lambda: {"ms": 1}, lambda: {"right": False})
    assert gpu_truth.run_part(part, Machine(tmp_path, "looked-up"), 0, None) == 74
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["number"] for record in rows] == [1, 2, 3, 4]
    assert rows[0]["error"] == "RuntimeError: no such kernel" and rows[1]["left out"] == "needs 87 GB"
    assert rows[2]["ms"] == 1
    assert gpu_truth.run_part(part, Machine(tmp_path, "looked-up"), 2, 3) == 0
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [3]


FAKE = """
import json, os, subprocess, sys, time
after = int(sys.argv[sys.argv.index("--after") + 1])
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[Record]]]:
    """Runs one part in whose place a program is."""

    def start(code: str, seconds: float = 600) -> tuple[int, list[Record]]:
        script = tmp_path / "fake.py"
        script.write_text(FAKE + code)
        monkeypatch.setattr(gpu_truth, "__file__", str(script))
        monkeypatch.setattr(gpu_truth, "STAGES", {"A": {"one": Part(lambda m: iter(()), 600)}})
        machine = Machine(tmp_path, "looked-up")
        return gpu_truth.run_stage("A", machine, tmp_path / "out", seconds=seconds), lines(tmp_path / "out", "A")

    return start


CHILD = 'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10000)"])\n'


def test_nothing_of_a_part_runs_beside_the_next(stage: Any) -> None:
    failed, rows = stage(CHILD + 'print(json.dumps({"number": 1, "pid": child.pid}), flush=True)')
    pid = next(record["pid"] for record in rows if "pid" in record)
    assert failed == 0
    while running(pid):  # a process that was killed ends soon, not at once
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Returns True if a process runs and isn't a zombie, which nothing here waits for."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_part_ends_at_its_limit(stage: Any) -> None:
    failed, rows = stage("time.sleep(10000)", seconds=0.5)
    assert failed == 1
    assert "stopped after" in rows[-2]["ended"] and rows[-1] == {"part": "A", "failed": 1}


def test_behind_a_lost_gpu_another_process_goes_on(stage: Any) -> None:
    code = 'print(json.dumps({"number": after + 1, "error": "illegal access"}), flush=True)\nsys.exit(75 * (after < 2))'
    failed, rows = stage(code)
    assert failed == 1
    assert [record["number"] for record in rows if "number" in record] == [1, 2, 3]
    assert "taken anew" in next(record["ended"] for record in rows if "ended" in record)


def test_a_part_that_dies_is_said(stage: Any) -> None:
    failed, rows = stage('print("what is this?", flush=True)\nos.abort()')
    assert failed == 1
    assert {"part": "one", "said": "what is this?"} in rows
    assert "exit status -6 behind figure 0: A.log has" in next(r["ended"] for r in rows if "ended" in r)


def test_what_is_missing_is_said(repository: Path, tmp_path: Path) -> None:
    assert "the folder doesn't exist" in run(repository, "A", "--packed", str(tmp_path / "none")).stderr
    assert "isn't there yet" in run(repository, "pack", str(tmp_path)).stderr
    done = run(repository, "A", "--packed", str(tmp_path), "--only", "roof")
    assert "stage A has no roof" in done.stderr


def test_each_stage_ends_within_nine_minutes() -> None:
    assert gpu_truth.STAGE_SECONDS < 9 * 60
    seconds = {stage: sum(part.seconds for part in parts.values()) for stage, parts in gpu_truth.STAGES.items()}
    assert max(seconds.values()) <= gpu_truth.STAGE_SECONDS
    assert max(seconds["E"], seconds["F"]) < 8 * 60


def test_tiles_of_products_are_among_those_that_a_gpu_times() -> None:
    """Each is timed by calls of its own, and those of the table are there."""
    place = Machine(Path("none"), "looked-up").place("meta")
    for (form, rows, number), name in itertools.product(
        (("int8", 16, 0), ("uint4", 32, 1), ("fp8", 64, 2), ("uint4", 64, 2)), ("down", "gate and up")
    ):
        columns, depth = gpu_kernels.NARROW[name]
        weight = gpu_kernels._narrow(form, columns, depth, place.device)
        calls = gpu_kernels.tiled_calls(weight, rows, columns, depth, place)
        described = [tuple((call.spec(90), call.grid) for call in of) for of in calls.values()]
        assert len(set(described)) == len(described) >= 20
        chosen = NARROW_PRODUCTS[form][number]
        assert chosen in gpu_kernels.product_tiles(rows) and chosen.rows == rows


def test_make_counts_the_status_of_every_stage(repository: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$2" >> {tmp_path}/ran\n[ "$2" != "$FAILS" ]\n')
    fake.chmod(0o755)
    for fails, status in (("A", 2), ("C", 2), ("none", 0)):
        command = ["make", "--silent", "gpu-check", f"PYTHON={fake}", "PACKED=there"]
        done = subprocess.run(command, cwd=repository, env={**os.environ, "FAILS": fails}, capture_output=True)
        assert done.returncode == status
    assert (tmp_path / "ran").read_text().split() == ["A", "B", "C"] * 3


def test_weights_that_were_not_carried_are_made(tmp_path: Path) -> None:
    """Whole numbers anywhere, scales and vectors of one sign; a file that is there stays."""
    import gpu_served

    kinds = {
        "codes": ("i8", [4, 8], 32),
        "scales": ("f16", [4], 8),
        "norm": ("f32", [4], 16),
        "table": ("bf16", [4, 4], 32),
    }
    tensors = {
        name: {"blob": 0, "offset": 64 * n, "bytes": size, "dtype": dtype, "shape": shape}
        for n, (name, (dtype, shape, size)) in enumerate(kinds.items())
    }
    index = {"blobs": [{"file": "weights/0.bin", "bytes": 256}], "tensors": tensors}
    (tmp_path / "weights").mkdir()
    (tmp_path / gpu_served.INDEX).write_text(json.dumps(index))
    assert gpu_served.write_weights(tmp_path) == 256
    data = (tmp_path / "weights/0.bin").read_bytes()
    scales, norm = np.frombuffer(data[64:72], np.float16), np.frombuffer(data[128:144], np.float32)
    assert len(set(data[:32])) > 16 and (scales > 0).all() and (norm == 1).all()
    assert gpu_served.write_weights(tmp_path) == 0
