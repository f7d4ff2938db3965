"""Everything that only a GPU can tell, in the order in which it is wanted: facts, kernels, then whole models.

    python benchmarks/gpu_truth.py pack FOLDER                          # here: what is carried
    python benchmarks/gpu_truth.py A --packed FOLDER --output FOLDER2   # there; then B and C

A is facts, roofs, kernels and tiles, B the cuda target from end to end, C narrow products, attention beside others,
engines, and the tests that compile. D times every tile of narrow products; its pack is another (--tiles). E is the
target as a service: what is left after a lost GPU, many requests at once, arrivals; steps of experts and of a hybrid.
F is exact mode: a request's bits alone, beside 6 others and beside 63, and the price. E and F share another pack
(--service).

A stage ends within 9 minutes. Each part of it is a process group of its own with a limit of its own, and in it each
figure stands by itself: one that fails, or that there is no memory for, is a line too, and the next one is measured.
What is found is a line of JSON in STAGE.jsonl as soon as it is known; what parts say goes to STAGE.log as they say it.

--rehearse runs the parts without a GPU, with small sizes: every kernel is looked up in what was packed, as a GPU would,
and nothing is compiled. With "interpreted", Triton's interpreter runs what was found; with "looked-up" nothing runs.
No time of it means anything.

Needs a CUDA build of torch there, and PYTHONPATH=src; gpu_wheels.py packs what else it loads.

An H100 ran it: benchmarks/notes/cuda.md. tests/benchmarks/test_gpu_truth.py rehearses it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from gpu_machine import CAPABILITY, Figure, Machine, Record
from gpu_wheels import pythons, unpack

STAGE_SECONDS = 525
"""The limit of a stage, all parts together: a lent machine ends a command after 600."""

_PATIENCE = 30
"""Times longer may parts take in a rehearsal: a CPU does it, which may be busy."""

_FAILED, _LOST = 74, 75
"""Exit statuses of a part: a figure failed; the GPU answers nothing any more after one, and another process goes on."""

_PR_SET_PDEATHSIG = 1


# ---- parts


def facts(machine: Machine) -> Iterator[Figure]:
    def versions() -> Record:
        import numpy
        import torch
        import transformers
        import triton

        loaded = (numpy, torch, transformers, triton)
        versions_of = {"python": platform.python_version(), **{m.__name__: m.__version__ for m in loaded}}
        return {**versions_of, "cuda": torch.version.cuda, "cores": os.cpu_count()}

    def gpu() -> Record:
        import torch

        from enginewright.plugins.gpu.cuda_driver import load_cuda

        properties = torch.cuda.get_device_properties(0)
        sizes = {
            "bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "L2": properties.L2_cache_size,
        }
        return {"gpu": properties.name, "driver's CUDA": load_cuda().version, **sizes}

    yield {"figure": "versions"}, versions
    if machine.gpu:
        yield {"figure": "gpu"}, gpu
        query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        yield (
            {"figure": "nvidia-smi"},
            lambda: {"said": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")},
        )
    yield {"figure": "packed"}, lambda: json.loads((machine.packed / "packed.json").read_text())


def roofs(machine: Machine) -> Iterator[Figure]:
    """Measures the GPU's peaks."""
    from gpu_kernels import roofs as found

    return found(machine)


def kernels(machine: Machine) -> Iterator[Figure]:
    """Every carried kernel, as machine code and as PTX: loaded by the driver, or refused."""
    from enginewright.plugins.gpu.compile_ahead import read_kernel
    from enginewright.plugins.gpu.cuda_driver import load_cuda
    from enginewright.runtime.shared.errors import EnginewrightError

    by_folder: dict[str, list[Path]] = {}
    for path in sorted(machine.packed.rglob("*-sm*.json")):
        if not path.stem.startswith("tiles"):
            by_folder.setdefault(path.relative_to(machine.packed).parts[0], []).append(path)
    driver = load_cuda() if machine.gpu else None
    device = driver.open(driver.gpus[0]) if driver else None

    def load(paths: Sequence[Path], form: str) -> Record:
        refused = []
        for path in paths:
            kernel = read_kernel(path.parent, path.stem)
            code = kernel.cubin if form == "machine code" else kernel.ptx.encode()
            try:
                if device is not None:
                    device.load_kernel(code, kernel.entry, kernel.shared_memory)
            except EnginewrightError as e:
                refused.append({"kernel": path.stem, "why": e.message})
        return {"loaded": len(paths) - len(refused), "refused": refused[:20], "registers, most": _registers(paths)}

    for folder, paths in by_folder.items():
        yield {"figure": folder, "form": "machine code"}, lambda p=paths: load(p, "machine code")
    for folder, paths in by_folder.items():  # these the driver translates, which takes a while
        yield {"figure": folder, "form": "PTX"}, lambda p=paths[::25]: load(p, "PTX")


def _registers(paths: Sequence[Path]) -> int:
    return max(json.loads(path.read_text()).get("registers", 0) for path in paths)


def cases(machine: Machine) -> Iterator[Figure]:
    """Carried kernels beside the references, bf16 first."""
    import torch
    from gpu_kernels import cases as every

    # A rehearsal's sizes are the GPU's, as kernels depend on them; where nothing runs they have no memory.
    place = machine.place("meta" if machine.mode == "looked-up" else "cpu")
    launcher = machine.launcher("kernels", place)

    def run(name: str) -> Record:
        torch.manual_seed(0)
        works, difference, most = every()[name](launcher, place)
        for work in works:
            work()
        if machine.mode == "looked-up":
            return {"launches": len(works)}
        apart = difference()
        return {"launches": len(works), "difference": apart, "most": most, "right": apart <= most}

    for name in json.loads((machine.packed / "packed.json").read_text())["cases"]:
        yield {"figure": name}, lambda name=name: run(name)


def sanitizer(machine: Machine) -> Iterator[Figure]:
    """The first of these cases under compute-sanitizer, where that is."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [
        tool,
        "--print-limit",
        "20",
        "--error-exitcode",
        "99",
        sys.executable,
        __file__,
        "A",
        "--part",
        "cases",
        "--most",
        "4",
    ]
    yield {"figure": "memcheck"}, lambda: _said([*command, "--packed", str(machine.packed)])


def tiles(machine: Machine) -> Iterator[Figure]:
    """Each case's candidates, which were compiled where they were packed."""
    import tile_sweep

    place = machine.place("meta")
    launcher = machine.launcher("tiles", place)
    timer, apart = tile_sweep.gpu_timer(launcher, place)

    def run(case: Any, candidates: Sequence[Any]) -> Record:
        times = tile_sweep.times_of(case, candidates, timer, lambda: True)
        record = {**tile_sweep.record_of(case, times), "candidates": len(candidates)}
        refused = {str(tile): why for tile, why in apart.items() if isinstance(why, str)}
        differences = [far for far in apart.values() if not isinstance(far, str)]
        return {**record, "largest difference": max(differences, default=0.0), "refused": refused}

    for case, candidates in tile_sweep.packed(machine.packed / "tiles").items():
        yield {"figure": str(asdict(case))}, lambda case=case, c=candidates: run(case, c)


def tokens(machine: Machine) -> Iterator[Figure]:
    """Tiny models' tokens: the cpu target's, carried, and the cuda target's here, with graphs and without."""
    from gpu_models import compare_tokens

    expected = json.loads((machine.packed / "tokens.json").read_text())
    for name, tokens_of in expected.items():
        for graphs in (True, False) if machine.gpu else (False,):
            place = None if machine.gpu else machine.place()
            run = lambda n=name, w=tokens_of, p=place, g=graphs: compare_tokens(machine, n, w, p, graphs=g)  # noqa: E731
            yield {"figure": name, "graphs": graphs}, run


def served(machine: Machine) -> Iterator[Figure]:
    """Requests in each other's company, with prefixes in common and every way of drawing, beside the cpu target's."""
    from gpu_models import compare_served

    for name, answers in json.loads((machine.packed / "served.json").read_text()).items():
        yield {"figure": name}, lambda n=name, w=answers: compare_served(machine, n, w)


def _steps(name: str) -> Callable[[Machine], Iterator[Figure]]:
    def part(machine: Machine) -> Iterator[Figure]:
        """Steps of a model of random weights, small ones first and each without graphs before it has them."""
        from gpu_models import Steps

        return Steps(machine, name).figures()

    return part


def few_steps(name: str) -> Callable[[Machine], Iterator[Figure]]:
    def part(machine: Machine) -> Iterator[Figure]:
        """Fewer of a model's steps, with graphs."""
        from gpu_models import Steps

        return Steps(machine, name).few()

    return part


def exact_steps(name: str) -> Callable[[Machine], Iterator[Figure]]:
    def part(machine: Machine) -> Iterator[Figure]:
        """A model's bits in exact steps of 1, 7 and 64 requests, and the price of these steps."""
        from gpu_models import Steps

        return Steps(machine, name).exact()

    return part


def drawing(machine: Machine) -> Iterator[Figure]:
    """Measures the cost of sampling next to a step of a full batch."""
    from gpu_models import Steps

    return Steps(machine, "8b-fp8").drawn()


def _of_service(name: str) -> Callable[[Machine], Iterator[Figure]]:
    def part(machine: Machine) -> Iterator[Figure]:
        """A part of gpu_served.py."""
        import gpu_served

        figures: Callable[[Machine], Iterator[Figure]] = getattr(gpu_served, name)
        return figures(machine)

    return part


def logits(machine: Machine) -> Iterator[Figure]:
    """A model's logits beside transformers': of the 1B, on a GPU."""
    from gpu_models import compare_logits

    name = "1b" if machine.gpu else "tiny"
    yield {"figure": f"logits {name}"}, lambda: compare_logits(machine, name)


def transformers_beside(machine: Machine) -> Iterator[Figure]:
    """Measures transformers' continuous batching at the same sizes, after a round that isn't counted."""
    from gpu_models import transformers_figures

    return transformers_figures(machine, ("1b", "8b"))


def _attention(caches: Sequence[str]) -> Callable[[Machine], Iterator[Figure]]:
    def part(machine: Machine) -> Iterator[Figure]:
        """Attention alone, small ones first, beside torch's."""
        import gpu_attention

        place = machine.place("meta")
        launcher = machine.launcher("kernels", place)
        for names, of in gpu_attention.figures(caches):
            label = {"figure": "attention", **names}
            yield label, lambda of=of: gpu_attention.measure(of, launcher, place, machine.free_bytes())

    return part


def products(machine: Machine) -> Iterator[Figure]:
    """Products with weights of 4 and 8 bits, in one piece and with K in parts, beside torch's in bf16."""
    from gpu_kernels import narrow

    return narrow(machine)


def product_tiles(machine: Machine) -> Iterator[Figure]:
    """Every tile that a product of few rows with narrow weights may have."""
    from gpu_kernels import tiled

    return tiled(machine)


def engines(machine: Machine) -> Iterator[Figure]:
    """The packed engines of TensorRT-RTX, where it is installed and builds for this GPU."""
    from gpu_models import compare_engines

    for path in sorted(machine.packed.glob("engines-*.bundle")):
        yield {"figure": path.name}, lambda p=path: compare_engines(machine, p)


def gpu_tests(machine: Machine) -> Iterator[Figure]:
    """tests/gpu, whose kernels are compiled there: a line each as they finish."""
    pytest = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "-n", "12", "--confcutdir=tests/gpu"]
    yield {"figure": "tests/gpu"}, lambda: _said([*pytest, "-p", "no:cacheprovider", "tests/gpu"])


@dataclass(frozen=True)
class Part:
    """``seconds``: the limit. ``rehearsed``: whether it runs without a GPU."""

    figures: Callable[[Machine], Iterator[Figure]]
    seconds: int
    rehearsed: bool = True


STAGES: dict[str, dict[str, Part]] = {
    "A": {
        "facts": Part(facts, 40),
        "roofs": Part(roofs, 50),
        "kernels": Part(kernels, 60),
        "cases": Part(cases, 90),
        "tiles": Part(tiles, 170),
        "sanitizer": Part(sanitizer, 110, rehearsed=False),
    },
    "B": {
        "tokens": Part(tokens, 60),
        "served": Part(served, 55),
        "steps 1b": Part(_steps("1b"), 50),
        "logits": Part(logits, 60),
        "steps 8b": Part(_steps("8b"), 60),
        "steps 8b int8": Part(_steps("8b-int8"), 60),
        "steps 8b int4": Part(_steps("8b-int4"), 60),
        "transformers": Part(transformers_beside, 120, rehearsed=False),  # minutes for a token on a CPU
    },
    "C": {
        "products": Part(products, 60),
        "attention": Part(_attention(("bf16",)), 90),
        "attention 8 bits": Part(_attention(("fp8", "int8")), 65),
        "engines": Part(engines, 60),
        "tests": Part(gpu_tests, 250, rehearsed=False),
    },
    "D": {"product tiles": Part(product_tiles, 300)},
    "E": {
        "facts": Part(facts, 20),
        "survival": Part(_of_service("survival"), 100),
        "generate": Part(_of_service("generate"), 90),
        "steps 8b fp8": Part(few_steps("8b-fp8"), 40),
        "steps moe": Part(few_steps("moe"), 35),
        "steps hybrid": Part(few_steps("hybrid"), 40),
        "drawing": Part(drawing, 35),
        "arrivals": Part(_of_service("arrivals"), 100),
    },
    "F": {
        "facts": Part(facts, 20),
        "exact 8b": Part(exact_steps("8b"), 100),
        "exact 8b fp8": Part(exact_steps("8b-fp8"), 100),
        "exact moe": Part(exact_steps("moe"), 80),
        "exact served": Part(_of_service("exact"), 80),
    },
}


# ---- what parts stand on


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as e:
        return f"not run: {e}"


def _said(command: Sequence[str]) -> Record:
    """Runs a program; what it prints goes to the log as it comes, and its end is kept."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=_die_too
    )
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        lines.append(line)
    status = child.wait()
    return {"rc": status, "tail": "".join(lines)[-3000:], "right": status == 0}


def _die_too() -> None:
    """Has this process end with its parent: a session of one's own is ended by nobody else."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- a part, in its process


def run_part(part: Part, machine: Machine, after: int, most: int | None) -> int:
    """Prints each figure behind the first ``after`` ones as a line of JSON; the exit status.

    A figure that raises is a line with ``error``, one that there is no memory for with ``left out``.
    """
    from gpu_machine import NotMeasuredError

    failed = False
    for number, (label, measure) in enumerate(part.figures(machine), 1):
        if number <= after or (most is not None and number > most):
            continue
        record: Record
        try:
            record = measure()
        except NotMeasuredError as e:
            record = {"left out": str(e)}
        except Exception as e:  # noqa: BLE001  whatever a figure raises must not cost the others
            traceback.print_exc()
            record = {"error": f"{type(e).__name__}: {e}"[:2000]}
        wrong = "error" in record or record.get("right") is False
        failed |= wrong
        print(json.dumps({"number": number, **label, **record}), flush=True)
        if wrong and machine.gpu and not _answers():
            return _LOST
    return _FAILED if failed else 0


def _answers() -> bool:
    """Returns True if the GPU still works; after an illegal access, a process's context doesn't."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


# ---- a stage


class Kept:
    """Lines of JSON, on the disk as soon as they are known."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._lock = file, threading.Lock()

    def __call__(self, record: Record) -> None:
        line = json.dumps(record)
        with self._lock:
            print(line[:400], flush=True)
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def run_stage(
    stage: str, machine: Machine, output: Path, only: Sequence[str] = (), seconds: float | None = None
) -> int:
    """Runs the parts of a stage; how many failed. Writes STAGE.jsonl and STAGE.log into the folder ``output``."""
    patience = 1 if machine.gpu else _PATIENCE
    failed, until = 0, time.monotonic() + (patience * STAGE_SECONDS if seconds is None else seconds)
    output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as modules,
        (output / f"{stage}.jsonl").open("a", encoding="utf-8") as lines,
        (output / f"{stage}.log").open("a", encoding="utf-8") as log,
    ):
        keep, environment = Kept(lines), {**os.environ, "PYTHONUNBUFFERED": "1"}
        if not machine.gpu:
            # Then Triton compiles nothing, and the target needs no GPU. Threads would only wait for one another.
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        unpacked = unpack(machine.packed / "wheels", Path(modules), environment)
        keep({"part": "wheels", "unpacked": unpacked})
        for name, part in STAGES[stage].items():
            if (only and name not in only) or (not machine.gpu and not part.rehearsed):
                continue
            begin = time.monotonic()
            error = _run_child(stage, name, part, machine, environment, keep, log, until)
            took = round(time.monotonic() - begin, 1)
            keep({"part": name, "seconds": took, "ended": error or "well"})
            failed += error is not None
        keep({"part": stage, "failed": failed})
    return failed


def _run_child(
    stage: str,
    name: str,
    part: Part,
    machine: Machine,
    environment: dict[str, str],
    keep: Kept,
    log: IO[str],
    until: float,
) -> str | None:
    """Runs a part, again behind each figure that cost it its GPU; what went wrong, if anything did."""
    done, error = 0, None
    ends = min(time.monotonic() + part.seconds * (1 if machine.gpu else _PATIENCE), until)
    while True:
        left = ends - time.monotonic()
        if left <= 0:
            return f"no time left behind figure {done}"
        command = [sys.executable, __file__, stage, "--part", name, "--packed", str(machine.packed)]
        command += ["--after", str(done), "--free", str(machine.free)]
        command += [] if machine.gpu else ["--rehearse", machine.mode]
        log.write(f"---- {stage} {name}, behind figure {done}\n")
        log.flush()
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        numbers: list[int] = []
        reader = threading.Thread(target=_read, args=(child.stdout, name, keep, numbers), daemon=True)
        reader.start()
        try:
            status = child.wait(timeout=left)
        except subprocess.TimeoutExpired:
            error = f"stopped after {left:.0f} s, behind figure {max(numbers, default=done)}"
            status = 0
        _kill_group(child)
        reader.join(timeout=5)
        done = max(numbers, default=done)
        if status == _LOST and numbers:
            error = "the GPU was lost, and taken anew"
            continue
        if status not in (0, _FAILED, _LOST):
            return f"exit status {status} behind figure {done}: {stage}.log has what it said"
        return error or ("a figure failed" if status else None)


def _read(pipe: IO[str], name: str, keep: Kept, numbers: list[int]) -> None:
    for line in pipe:
        if line.startswith("{"):
            record = json.loads(line)
            numbers.append(record["number"])
            keep({"part": name, **record})
        elif line.strip():
            keep({"part": name, "said": line.rstrip()})


def _kill_group(child: subprocess.Popen[str]) -> None:
    """Ends a part and all that it started: nothing of it runs beside the next one's timings."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=[*STAGES, "pack"])
    parser.add_argument("folder", nargs="?", type=Path, help="of pack: where to, a folder that isn't there yet")
    parser.add_argument("--packed", type=Path, help="the folder that was packed")
    parser.add_argument("--output", type=Path, default=Path("gpu-truth"), help="a folder: STAGE.jsonl is added to")
    parser.add_argument("--only", action="append", default=[], help="a part; may be repeated")
    parser.add_argument("--seconds", type=float, help="of the stage, at most")
    parser.add_argument("--rehearse", choices=["looked-up", "interpreted"], help="without a GPU")
    parser.add_argument("--free", type=int, default=139 << 30, help="of a rehearsal: bytes that a GPU would have free")
    parser.add_argument("--tiles", action="store_true", help="of pack: what stage D takes, and nothing else")
    parser.add_argument("--service", action="store_true", help="of pack: what stages E and F take, and nothing else")
    parser.add_argument("--tiny", action="store_true", help="of pack: tiny models alone, as a test has them")
    for hidden in ("--part", "--after", "--most"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, type=str if hidden == "--part" else int)
    options = parser.parse_args(arguments)
    if options.stage == "pack":
        if options.folder is None or options.folder.exists():
            parser.error("pack needs a FOLDER that isn't there yet")
        from gpu_pack import pack

        wheels = () if options.tiny else pythons()
        size = pack(options.folder, CAPABILITY, wheels, tiny=options.tiny, tiles=options.tiles, service=options.service)
        print(f"{options.folder}: {size / (1 << 20):.1f} MiB")
        return 0
    if options.packed is None or not options.packed.is_dir():
        parser.error("--packed FOLDER: the folder doesn't exist; make it with: gpu_truth.py pack FOLDER")
    if unknown := set(options.only) - set(STAGES[options.stage]):
        parser.error(f"--only: stage {options.stage} has no {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as scratch:
        packed = _unpacked(options.packed.resolve(), Path(scratch))
        machine = Machine(packed, options.rehearse or "gpu", options.free)
        if options.part:
            _die_too()
            return run_part(STAGES[options.stage][options.part], machine, options.after or 0, options.most)
        return 1 if run_stage(options.stage, machine, options.output, options.only, options.seconds) else 0


def _unpacked(packed: Path, scratch: Path) -> Path:
    """The folder of a pack's files: ``packed`` itself if a stage has unpacked them already, otherwise ``scratch``."""
    if not (packed / "packed.tar.gz").exists():
        return packed
    with tarfile.open(packed / "packed.tar.gz") as archive:
        archive.extractall(scratch, filter="data")
    return scratch


if __name__ == "__main__":
    sys.exit(main())
