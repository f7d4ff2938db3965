"""Packs what ``gpu_truth.py`` takes to a machine with a GPU: tiny bundles, and programs of larger models."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from gpu_wheels import download
from transformers import LlamaConfig, LlamaForCausalLM

from enginewright.optimizer.capture.capture_model import capture_shapes
from enginewright.optimizer.emit.cuda.emitter import CudaEmitter, lower_for_gpus
from enginewright.optimizer.export import export
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.plugins.cpu.threads import available_threads
from enginewright.plugins.shared.lowered_program import LoweredProgram
from enginewright.plugins.triton.compile_ahead import files_of
from enginewright.plugins.triton.compile_workers import KernelCompiler
from enginewright.runtime.bundle.cuda_section import CudaSection
from enginewright.runtime.executors.cuda_kernels import TILES_FILE, SpecCollector, specs_of

Generate = Callable[[Path, str], tuple[list[list[int]], float]]

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
MOST = 64 << 20
"""Bytes that are carried."""


def pack(
    folder: Path,
    models: Mapping[str, Mapping[str, int]],
    recipes: Sequence[str],
    capability: str,
    generate: Generate,
    pythons: Sequence[str] = (),
) -> int:
    """Writes ``tokens.json`` with tiny bundles of ``recipes`` and the cpu target's tokens, and a folder for each of
    ``models``, sizes of Llamas, with its program and kernels; the bytes of all. ValueError if these are too many.

    ``generate(bundle, target)`` gives tokens. The folder ``rehearsal`` is a tiny model's program without kernels.
    ``wheels`` has those of gpu_wheels.py for ``pythons``.
    """
    folder.mkdir(parents=True)
    expected: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        LlamaForCausalLM(_config(TINY, 2, 256)).save_pretrained(scratch)
        for recipe in recipes:
            name = f"tiny-{recipe}.bundle"
            export(scratch, folder / name, recipe=recipe, targets=("cpu", "cuda"), gpus=[capability])
            expected[name], _ = generate(folder / name, "cpu")
    (folder / "tokens.json").write_text(json.dumps(expected, indent=1))
    _write(folder / "rehearsal", _program(_config(TINY, 2, 256)))
    for name, sizes in models.items():
        program = _program(_config(sizes, 8, 128256))
        _write(folder / name, program)
        _write_kernels(folder / name, program, capability)
    if pythons:
        download(folder / "wheels", pythons)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST:
        raise ValueError(f"{folder}: {size:,} bytes, and {MOST:,} can be carried")
    return size


def _config(sizes: Mapping[str, int], kv_heads: int, vocab: int) -> LlamaConfig:
    config = LlamaConfig(**sizes, num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=8192)
    config.architectures = ["LlamaForCausalLM"]
    return config


def _program(config: LlamaConfig) -> LoweredProgram:
    """As the cuda target has it, in bf16; of the weights only shapes are looked at."""
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        program, _ = capture_shapes(Path(scratch))
    context = PassContext()
    PassManager(default_pipeline(), context).run(program)
    PassManager([one for one in CudaEmitter().passes() if one.wanted(context)], context).run(program)
    return lower_for_gpus(program, "bf16").program


def _write(folder: Path, program: LoweredProgram) -> None:
    folder.mkdir()
    (folder / "program.json").write_text(program.to_json())


def _write_kernels(folder: Path, program: LoweredProgram, capability: str) -> None:
    section = CudaSection(compute_capabilities=(capability,), dtype="bf16", requests=256, chunk=512)
    number = int(capability.replace(".", ""))
    with KernelCompiler(available_threads()) as compiler:
        launched = specs_of(program, section, SpecCollector(number, compiler.compile, compiler.start))
        (folder / TILES_FILE.format(number)).write_text(launched.tiles_json())
        for spec in launched.found:
            for file, content in files_of(compiler.compile(spec)).items():
                if not file.endswith(".ptx"):
                    (folder / file).write_bytes(content)
