"""Everything that only a GPU can tell, in the order in which it is wanted: facts, kernels, then whole models.

    python benchmarks/gpu_truth.py pack FOLDER                            # here: what is carried, below 64 MiB
    python benchmarks/gpu_truth.py A --packed FOLDER --output FILE.jsonl  # there; then B and C

A is facts, roofs, kernels and tiles, B the cuda target from end to end, C attention beside others, with 8-bit caches.
Each part is a process of its own with a limit of its own; what it finds is a line of JSON, written as it comes. A part
that fails, or takes too long, is a line too, and the next one runs. --rehearse runs the parts that can on a CPU, with
interpreted kernels and tiny sizes: it shows that they run, and no figure of it means anything.

Needs a CUDA build of torch with Triton there, and PYTHONPATH=src; gpu_wheels.py packs what else it loads.

Not run yet: no GPU was at hand. tests/benchmarks/test_gpu_truth.py rehearses it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_wheels import pythons, unpack

Record = dict[str, Any]
Run = Callable[[], object]

CAPABILITY = "9.0"
"""What is packed is compiled for."""

MODELS: dict[str, dict[str, int]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
}
"""Llamas of random weights, which are made on the GPU."""

PROMPTS = ([1, 5, 9, 44, 100, 7], [1, 200, 3], [1, *range(10, 60)])


@dataclass(frozen=True)
class Machine:
    """Where parts run. ``rehearse``: on a CPU, with tiny sizes."""

    packed: Path
    rehearse: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


# ---- parts


def facts(machine: Machine) -> Iterator[Record]:
    import torch
    import triton

    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    yield {**versions, "cuda": torch.version.cuda, "cores": os.cpu_count()}
    if not machine.rehearse:
        found = torch.cuda.get_device_properties(0)
        yield {"gpu": found.name, "bytes": found.total_memory, "processors": found.multi_processor_count}
        query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        yield {"nvidia-smi": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")}
    yield {"commit": _output("git", "describe", "--always", "--dirty")}


def roofs(machine: Machine) -> Iterator[Record]:
    """What the GPU does at most: bytes a second, products a second, launches, copies from and to the host."""
    import torch

    size = (1 << 16) if machine.rehearse else (1 << 30)
    a, b = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    yield {"copy GB/s": 2 * size / _seconds(machine, lambda: b.copy_(a)) / 1e9}
    words = a.view(torch.int64)
    yield {"read GB/s": size / _seconds(machine, lambda: words.max()) / 1e9}
    n = 64 if machine.rehearse else 8192
    for dtype in (torch.bfloat16, torch.float16):
        x, y, out = (torch.randn(n, n, device=machine.device).to(dtype) for _ in range(3))
        multiply = partial(torch.mm, x, y, out=out)
        yield {f"{dtype} products TFLOP/s": 2 * n**3 / _seconds(machine, multiply) / 1e12}
    small = torch.zeros(1, device=machine.device)
    yield {"launch us": _seconds(machine, lambda: small.add_(1)) * 1e6}
    for pinned in (False, True):
        for megabytes in (0.01, 1, 64):
            count = int(megabytes * 1e6)
            host = torch.empty(count, dtype=torch.uint8, pin_memory=pinned and not machine.rehearse)
            there = torch.empty(count, dtype=torch.uint8, device=machine.device)
            for way, to, source in (("to", there, host), ("from", host, there)):
                seconds = _seconds(machine, lambda to=to, source=source: to.copy_(source, non_blocking=True))
                yield {"copy": way, "pinned": pinned, "MB": megabytes, "us": seconds * 1e6}


def kernels(machine: Machine) -> Iterator[Record]:
    """Every carried kernel: loaded by the driver, or refused."""
    from enginewright.plugins.shared.errors import EnginewrightError
    from enginewright.runtime.executors.carried_kernels import read_by_stem
    from enginewright.runtime.executors.cuda_driver import load_cuda

    stems = [path for path in sorted(machine.packed.rglob("*-sm*.json")) if not path.stem.startswith("tiles")]
    read = [(path, read_by_stem(path.parent, path.stem)) for path in stems]
    if machine.rehearse:
        yield {"read": len(read)}
        return
    driver = load_cuda()
    device, refused = driver.open(driver.gpus[0]), []
    for path, kernel in read:
        try:
            device.load_kernel(kernel.cubin, kernel.entry, kernel.shared_memory)
        except EnginewrightError as e:
            refused.append({"kernel": path.stem, "why": e.message})
    yield {"driver": driver.version, "loaded": len(read) - len(refused), "refused": refused}


def gpu_tests(machine: Machine, under: Sequence[str] = (), which: Sequence[str] = ("tests/gpu",)) -> Iterator[Record]:
    """tests/gpu, whose failures say by how much; ``under`` another program."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-rs", "--confcutdir=tests/gpu"]
    done = subprocess.run([*under, *pytest, *which], capture_output=True, text=True)
    yield {"rc": done.returncode, "tail": (done.stdout + done.stderr)[-6000:]}


def sanitizer(machine: Machine) -> Iterator[Record]:
    """Small launches under compute-sanitizer, where that is."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    yield from gpu_tests(machine, [tool], ["tests/gpu/test_triton_attention.py", "-x", "-k", "bf16"])


def tokens(machine: Machine) -> Iterator[Record]:
    """A tiny model's tokens: the cpu target's, carried, and the cuda target's here."""
    expected = json.loads((machine.packed / "tokens.json").read_text())
    for name, wanted in expected.items():
        found, seconds = _generate(machine.packed / name, "cuda")
        yield {"bundle": name, "equal": found == wanted, "seconds": seconds, "found": found, "wanted": wanted}


def _steps(name: str) -> Callable[[Machine], Iterator[Record]]:
    def part(machine: Machine) -> Iterator[Record]:
        """Decode steps of a random model, with graphs and without: the time of a whole step, as a request sees it."""
        for graphs in (True, False):
            for batch in (1, 2) if machine.rehearse else (1, 16, 64, 256):
                for context in (40,) if machine.rehearse else (128, 2048):
                    times, nbytes = _decode_times(machine, name, batch, context, graphs=graphs)
                    found = {"model": name, "graphs": graphs, "batch": batch, "context": context}
                    yield {**found, "ms": statistics.median(times) * 1e3, "weight GB": nbytes / 1e9}

    return part


def _decode_times(machine: Machine, name: str, batch: int, context: int, *, graphs: bool) -> tuple[list[float], int]:
    """Seconds of decode steps behind ``context`` tokens (of zeros in the cache), and the bytes of the weights."""
    import numpy as np

    from enginewright.plugins.shared.contracts import SamplingBatch, StepInput

    blocks = -(-(context + 64) // 32)
    steps, nbytes = _random_steps(machine, name, batch, blocks, graphs=graphs and not machine.rehearse)
    table = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
    off, none = np.zeros(batch, np.float32), np.zeros(batch, np.uint64)
    greedy = SamplingBatch(off, off.astype(np.int32), off + 1, off, none, none)
    starts = np.arange(batch + 1, dtype=np.int32)
    times = []
    for at in range(context, context + (4 if machine.rehearse else 40)):
        length = np.full(batch, at + 1, np.int32)
        slots = table[:, at // 32] * 32 + at % 32
        step = StepInput(starts[:-1], length - 1, starts, length, {"full": table}, {"full": slots}, starts[:-1], greedy)
        begin = time.perf_counter()
        steps.start(step).result()
        times.append(time.perf_counter() - begin)
    return times[len(times) // 4 :], nbytes


def transformers_beside(machine: Machine) -> Iterator[Record]:
    """The same random 8B by transformers' continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    config = LlamaConfig(**MODELS["8b"], vocab_size=128256, num_key_value_heads=8)
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    options = GenerationConfig(max_new_tokens=64, do_sample=False, eos_token_id=-1)
    for batch in (1, 16, 64, 256):
        begin = time.perf_counter()
        model.generate_batch(inputs=[[1] * 16] * batch, generation_config=options)
        seconds = time.perf_counter() - begin
        yield {"batch": batch, "seconds": seconds, "tokens/s": batch * options.max_new_tokens / seconds}


# ---- what parts stand on


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as e:
        return f"not run: {e}"


def _seconds(machine: Machine, run: Run, repeats: int = 20) -> float:
    """The median time of repeated runs, some before them not counted."""
    import torch

    for _ in range(3):
        run()
    if machine.rehearse:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events) / 1e3


def _script(name: str, *options: str) -> Callable[[Machine], Iterator[Record]]:
    def part(machine: Machine) -> Iterator[Record]:
        target = Path(tempfile.mkdtemp()) / "result.json"
        command = [sys.executable, str(Path(__file__).with_name(name)), "--output", str(target), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        result = target.read_text() if target.exists() else ""
        yield {"rc": done.returncode, "result": result, "tail": (done.stdout + done.stderr)[-3000:]}

    return part


def _generate(bundle: Path, target: str) -> tuple[list[list[int]], float]:
    """Greedy tokens of PROMPTS, and how long they took with loading."""
    from enginewright import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(bundle, target=target, context=128, max_requests=4)
    options = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = [list(result.token_ids) for result in llm.generate([list(p) for p in PROMPTS], options)]
    llm.close()
    return found, time.perf_counter() - begin


def _random_steps(machine: Machine, name: str, batch: int, blocks: int, *, graphs: bool) -> tuple[Any, int]:
    """Steps of a packed program with random weights, and the weights' bytes."""
    import torch

    from enginewright.plugins.shared.lowered_program import LoweredProgram
    from enginewright.plugins.triton.jit_launcher import JitLauncher
    from enginewright.runtime.bundle.cuda_section import CudaSection
    from enginewright.runtime.executors import cuda_blocks
    from enginewright.runtime.executors.cuda_program import TORCH_DTYPES, CudaProgram
    from enginewright.runtime.executors.cuda_steps import CudaSteps
    from enginewright.runtime.executors.packed_steps import StepLimits

    folder = machine.packed / ("rehearsal" if machine.rehearse else name)
    program = LoweredProgram.from_json((folder / "program.json").read_bytes())
    section = CudaSection(compute_capabilities=(CAPABILITY,), dtype="bf16", requests=256, chunk=512)
    place: Any = cuda_blocks.place_of(section)
    place.enter()
    launcher = JitLauncher() if machine.rehearse else place.launcher(folder, section)
    weights = {}
    for use in program.weights:
        weight = torch.randn(use.shape, device=place.device) * 0.02
        weights[use.name] = weight.to(TORCH_DTYPES[use.dtype])
    bound = CudaProgram(
        program,
        weights,
        device=place.device,
        gpu=place.gpu,
        launcher=launcher,
        blocks={group.name: batch * blocks for group in program.cache_groups},
        limits=StepLimits(tokens=max(batch, 16), requests=batch, rows=batch, blocks=blocks),
        processors=place.processors,
    )
    vocab = program.outputs["logits"].shape[1].constant
    return CudaSteps(bound, vocab, launcher, place.capture if graphs else None), sum(w.nbytes for w in weights.values())


@dataclass(frozen=True)
class Part:
    """``seconds``: the limit. ``rehearsed``: whether it runs without a GPU."""

    run: Callable[[Machine], Iterator[Record]]
    seconds: int
    rehearsed: bool = True


_NARROW_CACHES = ("--cache", "int8", "--cache", "fp8")

STAGES: dict[str, dict[str, Part]] = {
    "A": {
        "facts": Part(facts, 40),
        "roofs": Part(roofs, 60),
        "kernels": Part(kernels, 30),
        "tests": Part(gpu_tests, 150, rehearsed=False),
        "sanitizer": Part(sanitizer, 60, rehearsed=False),
        "tiles": Part(_script("tile_sweep.py", "--minutes", "2.5"), 180, rehearsed=False),
    },
    "B": {
        "tokens": Part(tokens, 90),
        "steps 1b": Part(_steps("1b"), 120),
        "steps 8b": Part(_steps("8b"), 180),
        "transformers": Part(transformers_beside, 150, rehearsed=False),
    },
    "C": {
        "attention": Part(_script("gpu_attention.py", "--minutes", "2.5"), 180, rehearsed=False),
        "attention 8 bits": Part(_script("gpu_attention.py", "--minutes", "2", *_NARROW_CACHES), 150, rehearsed=False),
    },
}


# ---- running


def run_stage(stage: str, machine: Machine, output: Path, only: Sequence[str] = ()) -> int:
    """Runs the parts of a stage; how many failed. Each finding is a line of ``output`` as soon as it is known."""
    failed, modules = 0, tempfile.TemporaryDirectory()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if machine.rehearse else {})
    with output.open("a", encoding="utf-8") as file:

        def keep(record: Record) -> None:
            line = json.dumps(record)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

        keep({"part": "wheels", "unpacked": unpack(machine.packed / "wheels", Path(modules.name), environment)})
        for name, part in STAGES[stage].items():
            if (only and name not in only) or (machine.rehearse and not part.rehearsed):
                continue
            begin = time.monotonic()
            command = [sys.executable, __file__, stage, "--part", name, "--packed", str(machine.packed)]
            command += ["--rehearse"] if machine.rehearse else []
            with tempfile.TemporaryFile("w+") as errors:
                child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
                try:
                    printed, _ = child.communicate(timeout=part.seconds)
                except subprocess.TimeoutExpired:
                    child.kill()
                    printed, _ = child.communicate()
                    keep({"part": name, "error": f"stopped after {part.seconds} s"})
                    failed += 1
                errors.seek(0)
                said = errors.read()[-3000:]
            for line in printed.splitlines():
                keep({"part": name, **json.loads(line)} if line.startswith("{") else {"part": name, "said": line})
            if child.returncode not in (0, -9):
                keep({"part": name, "error": f"exit {child.returncode}", "stderr": said})
                failed += 1
            keep({"part": name, "seconds": round(time.monotonic() - begin, 1)})
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=[*STAGES, "pack"])
    parser.add_argument("folder", nargs="?", type=Path, help="of pack: where to, a folder that isn't there yet")
    parser.add_argument("--packed", type=Path, help="the folder that was packed")
    parser.add_argument("--output", type=Path, default=Path("gpu-truth.jsonl"), help="lines of JSON are added to it")
    parser.add_argument("--only", action="append", default=[], help="a part; may be repeated")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    options = parser.parse_args(arguments)
    if options.stage == "pack":
        if options.folder is None or options.folder.exists():
            parser.error("pack needs a FOLDER that isn't there yet")
        from gpu_pack import pack

        models, recipes = ({}, ("f32",)) if options.rehearse else (MODELS, ("f32", "int8", "int4", "fp8"))
        size = pack(options.folder, models, recipes, CAPABILITY, _generate, () if options.rehearse else pythons())
        print(f"{options.folder}: {size / (1 << 20):.1f} MiB")
        return 0
    if options.packed is None or not options.packed.is_dir():
        parser.error("--packed FOLDER: the folder doesn't exist; make it with: gpu_truth.py pack FOLDER")
    machine = Machine(options.packed.resolve(), options.rehearse)
    if options.part:
        for record in STAGES[options.stage][options.part].run(machine):
            print(json.dumps(record), flush=True)
        return 0
    if unknown := set(options.only) - set(STAGES[options.stage]):
        parser.error(f"--only: stage {options.stage} has no {', '.join(sorted(unknown))}")
    return 1 if run_stage(options.stage, machine, options.output, options.only) else 0


if __name__ == "__main__":
    sys.exit(main())
