"""Packs what ``gpu_truth.py`` takes to a machine with a GPU: tiny bundles, programs of larger models, kernels alone.

Which kernels is said by what launches them: programs are bound, and cases described, with a launcher that notes calls.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_attention
import numpy as np
import tile_sweep
import torch
import transformers
import triton
from gpu_kernels import cases, narrow_described, note, tiled_described
from gpu_machine import EXACT
from gpu_models import generate, serve
from gpu_places import section_of
from gpu_served import INDEX
from gpu_wheels import DISTRIBUTIONS, SERVER, download
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from enginewright.optimizer.capture.capture_model import capture_shapes
from enginewright.optimizer.export import export
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.plan.planner import planned_model
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.verify.measure import SourceLogits
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.lowering.lower_program import Lowering
from enginewright.plugins.cuda.compile.emitter import CudaEmitter, lower_for_gpus
from enginewright.plugins.cuda.section import CudaSection
from enginewright.plugins.cuda.serve.kernels import TILES_FILE, SpecCollector, specs_of
from enginewright.plugins.engines.gpus import DEFAULT as ENGINE_GPUS
from enginewright.plugins.gpu.compile_ahead import files_of
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.gpu.tiles import TileCase, gpu_of, number_of
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.threads import available_threads

MOST = 52 << 20
"""Bytes that are packed: 64 MiB are carried, and the tree has 9."""

ARCHIVE = "packed.tar.gz"
"""The archive in a pack's folder."""

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
}
"""Llamas whose programs are packed."""

NARROW = {"8b-int8": ("8b", "int8"), "8b-int4": ("8b", "int4"), "8b-fp8": ("8b", "fp8")}
"""Programs with weights of fewer bits: of which Llama, by which recipe."""

BUNDLES: dict[str, dict[str, Any]] = {
    "f32": {"recipe": "f32"},
    "window": {"recipe": "f32"},
    "experts": {"recipe": "f32"},
    "hybrid": {"recipe": "f32"},
    "cache-int8": {"recipe": "f32", "kv_cache": "int8"},
    "cache-fp8": {"recipe": "f32", "kv_cache": "fp8"},
    "int8": {"recipe": "int8"},
    "int4": {"recipe": "int4"},
    "fp8": {"recipe": "fp8"},
}
"""Tiny models, exported with these options; of another family where ``_model`` says so."""

MIXTURE = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
"""A mixture of experts: of 48 layers as Qwen3-30B-A3B has them, four."""

HYBRID_LAYERS = 8
"""Layers of a hybrid, of 32 as Qwen3.5-9B has them: three with a gated delta rule, then one with attention."""

SMOL = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9}
SMOL |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}
"""A Llama of SmolLM2's sizes."""

SERVED, REQUESTS = ("window", "experts", "hybrid", "llama"), 120
"""Tiny models (``_model``) that many requests are asked of, and how many."""

_TINY_TILES = (TileCase(64, 1, "bf16", "int8", decode=True),)
LONG = 1500
"""Tokens of the longest prompt: three parts of a context."""


def pack(
    folder: Path,
    capability: str,
    pythons: Sequence[str] = (),
    *,
    tiny: bool = False,
    tiles: bool = False,
    service: bool = False,
) -> int:
    """Writes ``ARCHIVE`` with what stages A to C take into a new folder; its bytes. ValueError if these are too many.

    ``*.bundle`` and ``tokens.json``: tiny models, and the cpu target's tokens. A folder for each of ``SIZES`` and
    ``NARROW``: a program, its kernels, and where its weights come from. ``kernels``: of cases and of attention alone;
    ``products``: of those with narrow weights. ``tiles``: the candidates of tile_sweep.py. ``served.json``: tokens of
    many requests. ``engines-*.bundle``: of TensorRT-RTX, where that is installed. ``wheels``: those of gpu_wheels.py
    for ``pythons``. ``tiny``: a little of each but engines, as a test needs it. With ``tiles`` there are wheels, and
    ``product-tiles``: products with every tile. With ``service`` it is what stages E and F take: ``tiny.bundle``,
    ``smol.bundle`` without its weights, programs, all of these but one also with exact steps, and a server's wheels.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if tiles:
            _fill_tiles(Path(scratch), capability)
        elif service:
            _fill_service(Path(scratch), capability, tiny=tiny)
        else:
            _fill(Path(scratch), capability, tiny=tiny)
        if pythons:
            download(Path(scratch, "wheels"), pythons, {**DISTRIBUTIONS, **SERVER} if service else DISTRIBUTIONS)
        folder.mkdir(parents=True)
        with tarfile.open(folder / ARCHIVE, "w:gz") as archive:  # machine code and PTX: two fifths of it are left
            archive.add(scratch, arcname=".")
    size = (folder / ARCHIVE).stat().st_size
    if size > MOST:
        raise ValueError(f"{folder}: {size:,} bytes, and {MOST:,} can be carried")
    return size


def _fill_tiles(folder: Path, capability: str) -> None:
    (folder / "product-tiles").mkdir()
    with KernelCompiler(available_threads()) as compiler:
        note(folder / "product-tiles", gpu_of(number_of(capability)), compiler, tiled_described)


def _fill_service(folder: Path, capability: str, *, tiny: bool) -> None:
    _say_what(folder, capability, ())
    for end in ("", EXACT):
        _pack_served(folder / f"tiny{end}.bundle", {**SIZES["tiny"], "num_key_value_heads": 1}, 300, capability)
        if not tiny:
            bundle = folder / f"smol{end}.bundle"
            _pack_served(bundle, SMOL, SMOL["vocab_size"], capability)
            for blob in json.loads((bundle / INDEX).read_text())["blobs"]:
                (bundle / blob["file"]).unlink()
    with KernelCompiler(available_threads()) as compiler:
        for name in ("tiny",) if tiny else ("tiny", "moe", "hybrid", "8b", "8b-fp8"):
            (_pack_narrow if name in NARROW else _pack_program)(folder / name, name, capability, compiler)
            if name != "hybrid":  # whose states a step changes, so that figures don't repeat it
                pack_exact(folder / name, capability, compiler)


def pack_exact(folder: Path, capability: str, compiler: KernelCompiler) -> None:
    """Writes the kernels of exact steps of a packed program into a folder beside it."""
    beside = folder.with_name(folder.name + EXACT)
    beside.mkdir()
    program = LoweredProgram.from_json((folder / "program.json").read_bytes())
    _write_kernels(beside, program, section_of(capability, exact=True), compiler)


def _pack_served(bundle: Path, sizes: Mapping[str, Any], vocab: int, capability: str) -> None:
    """A bundle of a random Llama with a tokenizer, by int8; of exact steps if its name says so."""
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": vocab}, **special, tie_word_embeddings=True)).to(
            torch.bfloat16
        ).save_pretrained(scratch)
        _tokenizer(vocab).save_pretrained(scratch)
        recipe = load_recipe("int8")
        weights = recipe.weights.model_copy(update={"smooth": False})  # of random weights nothing is to be gained
        engines = EnginesSection(exact=bundle.stem.endswith(EXACT))
        measure = SourceLogits.measure
        with patch.object(SourceLogits, "measure", lambda *given: measure(*given[:3], 8)):  # nobody reads the report
            export(
                scratch,
                bundle,
                recipe=recipe.model_copy(update={"weights": weights, "engines": engines}),
                targets=("cuda",),
                gpus=[capability],
            )


def _tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """One of bytes and of pairs and triples of printable ones, as many as there is room for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ("<pad>", "<s>", "</s>")
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    printable = [chr(code) for code in range(33, 127)]
    merges = []
    for parts in itertools.chain(
        itertools.product(printable, printable),
        itertools.product(map("".join, itertools.product(printable, printable)), printable),
    ):
        if len(names) >= vocab:
            break
        merges.append(parts)
        names.append("".join(parts))
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_names)


def _say_what(folder: Path, capability: str, names: Sequence[str]) -> None:
    record = {"capability": capability, "commit": _commit(), "cases": list(names)}
    record |= {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    (folder / "packed.json").write_text(json.dumps(record, indent=1) + "\n")


def _fill(folder: Path, capability: str, *, tiny: bool) -> None:
    gpu, names = gpu_of(number_of(capability)), list(cases())
    names = names[:2] if tiny else names
    _say_what(folder, capability, names)
    _pack_bundles(folder, ("window",) if tiny else tuple(BUNDLES), capability)
    with KernelCompiler(available_threads()) as compiler:
        for name in ("tiny",) if tiny else SIZES:
            _pack_program(folder / name, name, capability, compiler)
        for name in () if tiny else ("8b-int8", "8b-int4"):
            _pack_narrow(folder / name, name, capability, compiler)

        def described(launcher: Any, place: Any) -> None:
            for name in names:
                cases()[name](launcher, place)
            gpu_attention.described(launcher, place)

        (folder / "kernels").mkdir()
        note(folder / "kernels", gpu, compiler, described)
        (folder / "products").mkdir()
        note(folder / "products", gpu, compiler, narrow_described)
        tile_sweep.pack(folder / "tiles", gpu, compiler, _TINY_TILES if tiny else tile_sweep.CASES)
    if not tiny:
        _pack_engines(folder)


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _pack_bundles(folder: Path, names: Sequence[str], capability: str) -> None:
    ids = np.random.default_rng(0).integers(1, 256, LONG).tolist()
    expected = {}
    for name in names:
        bundle, prompts = f"tiny-{name}.bundle", [ids[:6], ids[50:100], ids]
        _export(name, folder / bundle, targets=("cpu", "cuda"), gpus=[capability], **BUNDLES[name])
        generated = generate(folder / bundle, "cpu", prompts)
        expected[bundle] = {"prompts": prompts, "rehearse all": name == "window"}
        expected[bundle] |= {key: generated[key] for key in ("tokens", "margins")}
    (folder / "tokens.json").write_text(json.dumps(expected) + "\n")
    served = {}
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch, "served.toml")  # activations are float32, so that draws hardly ever differ
        recipe.write_text('name = "served"\ntargets = ["cpu", "cuda"]\n\n[engines]\ndtype = "f32"\n')
        for name in SERVED[: len(names)]:
            bundle = f"served-{name}.bundle"
            _export(name, folder / bundle, recipe=recipe, gpus=[capability])
            served[bundle] = {"rounds": serve(folder / bundle, "cpu", REQUESTS)["rounds"]}
    (folder / "served.json").write_text(json.dumps(served) + "\n")


def _pack_engines(folder: Path) -> None:
    """For GPUs that TensorRT-RTX builds for ahead: those of a data center's newer GPUs aren't among them."""
    try:
        import tensorrt_rtx  # noqa: F401
    except ImportError:
        return
    prompts, name = [[1, 5, 9, 44], list(range(10, 60))], "engines-whole.bundle"
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch, "engines.toml")
        sizes = "requests = 4\nprompts = 2\nchunk = 32\n"
        listed = json.dumps(list(ENGINE_GPUS))
        engine = f'[engines]\nform = "whole"\ndtype = "f16"\ngpus = {listed}\n{sizes}'
        recipe.write_text(f'name = "engines"\ntargets = ["cpu", "tensorrt-rtx"]\n\n{engine}')
        _export("engines", folder / name, recipe=recipe, context_length=256)
    generated = generate(folder / name, "cpu", prompts)
    (folder / "engines.json").write_text(json.dumps({name: {"prompts": prompts, "tokens": generated["tokens"]}}) + "\n")


def _export(name: str, bundle: Path, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        _model(name).save_pretrained(scratch)
        export(scratch, bundle, **options)


def _model(name: str) -> Any:
    sizes = {**SIZES["tiny"], "vocab_size": 256, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    if name == "window":
        return transformers.MistralForCausalLM(MistralConfig(**sizes, sliding_window=600))
    if name == "experts":
        return transformers.MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, sliding_window=None))
    if name == "hybrid":
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 64}
        kinds = ["linear_attention", "full_attention"]
        return transformers.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, layer_types=kinds))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def _config(name: str) -> PretrainedConfig:
    if name == "moe":
        mixture = Qwen3MoeConfig(**MIXTURE, max_position_embeddings=16384)
        mixture.architectures = ["Qwen3MoeForCausalLM"]
        return mixture
    if name == "hybrid":
        hybrid = Qwen3_5TextConfig(num_hidden_layers=HYBRID_LAYERS)
        hybrid.architectures = ["Qwen3_5ForCausalLM"]
        return hybrid
    heads, vocab = (1, 256) if name == "tiny" else (8, 128256)
    config = LlamaConfig(**SIZES[name], num_key_value_heads=heads, vocab_size=vocab, max_position_embeddings=16384)
    config.architectures = ["LlamaForCausalLM"]
    return config


def _lowered(config: PretrainedConfig) -> Lowering:
    """Lowers a model for the cuda target in bf16, from the shapes of its weights."""
    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        program, _ = capture_shapes(Path(scratch))
    context = PassContext()
    PassManager(default_pipeline(), context).run(program)
    PassManager([one for one in CudaEmitter().passes() if one.wanted(context)], context).run(program)
    return lower_for_gpus(program, "bf16")


def _pack_program(folder: Path, name: str, capability: str, compiler: KernelCompiler) -> None:
    folder.mkdir()
    config = _config(name)
    config.save_pretrained(folder)
    lowering = _lowered(config)
    (folder / "program.json").write_text(lowering.program.to_json())
    if isinstance(config, LlamaConfig):  # those whose logits are compared with transformers'
        (folder / "weights.json").write_text(json.dumps(_sources_of(lowering)) + "\n")
    _write_kernels(folder, lowering.program, section_of(capability), compiler)


def _pack_narrow(folder: Path, name: str, capability: str, compiler: KernelCompiler) -> None:
    folder.mkdir()
    size, recipe = NARROW[name]
    _config(size).save_pretrained(folder)
    program = planned_model(folder, [recipe], targets=("cuda",)).programs[0].program
    assert program is not None
    (folder / "program.json").write_text(program.to_json())
    _write_kernels(folder, program, section_of(capability), compiler)


def _sources_of(lowering: Lowering) -> Mapping[str, Any]:
    """Gives for each weight the source's tensors, whose rows follow one another, or the values of one that was
    computed."""
    sources: dict[str, Any] = {}
    for name, expression in lowering.weights.items():
        parts = expression.parts(0)
        if any(part.source.startswith("computed:") for part in parts):
            sources[name] = {"values": expression.evaluate().float().tolist()}
        else:
            sources[name] = {"sources": list(dict.fromkeys(part.source for part in parts))}
    return sources


def _write_kernels(folder: Path, program: LoweredProgram, section: CudaSection, compiler: KernelCompiler) -> None:
    number = number_of(section.compute_capabilities[0])
    collector = SpecCollector(number, compiler.compile, compiler.start)
    launched = specs_of(program, section, collector)
    (folder / TILES_FILE.format(number)).write_text(launched.tiles_json())
    for spec in launched.found:
        for file, content in files_of(compiler.compile(spec)).items():
            (folder / file).write_bytes(content)
