"""Compiles the Triton kernels for GPUs that aren't there: PTX, cubin, and what must be known to launch them.

The same kernel gives the same bytes on every machine with the same Triton: what would tell (paths, line numbers) is
left out. Triton appends two pointers to scratch memory to a kernel's parameters; where a kernel has no use for them
they are taken off again, so that it can be launched by its arguments alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginewright.plugins.shared.errors import BundleError, MissingDependencyError, TargetError

from .specs import AttentionShape, Constant, KernelSpec, attention_spec, combine_spec, write_spec
from .tiles import SPLIT_KEYS, FloatType, attention_tiles, gpu_of

FORMAT = 1
"""Of a compiled kernel's metadata."""

THREADS_OF_WARP = 32


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code and how to launch it.

    ``entry`` is its name in the code, ``shared_memory`` the bytes of dynamic shared memory that a launch must give it,
    ``compiler`` what compiled it.
    """

    spec: KernelSpec
    entry: str
    ptx: str
    cubin: bytes
    shared_memory: int
    compiler: str

    @property
    def threads(self) -> int:
        """Of a block, along x."""
        return self.spec.warps * THREADS_OF_WARP

    def constant(self, name: str) -> Constant:
        """What the kernel was compiled with; KeyError for a name that it lacks."""
        return dict(self.spec.constants)[name]


@dataclass(frozen=True)
class LayerKernels:
    """All that an attention layer launches: a write, then ``prefill``, or ``decode`` and ``combine``."""

    write: CompiledKernel
    prefill: CompiledKernel
    decode: CompiledKernel
    combine: CompiledKernel

    def all(self) -> tuple[CompiledKernel, ...]:
        """In the order in which they are launched."""
        return self.write, self.prefill, self.decode, self.combine


def compile_layer(
    shape: AttentionShape, capability: int, *, split_keys: int = SPLIT_KEYS, shared_memory: int | None = None
) -> LayerKernels:
    """The kernels of a layer, with the first tiles that fit.

    Args:
        capability: 89 for 8.9.
        split_keys: keys of a part of the context when decoding.
        shared_memory: bytes that a block may use at most; None: what the GPU has.

    Raises:
        TargetError: for a capability that isn't known, or where no tile fits.
        MissingDependencyError: without Triton.
    """
    return LayerKernels(
        write=compile_kernel(write_spec(shape, capability)),
        prefill=compile_attention(shape, capability, decode=False, split_keys=0, shared_memory=shared_memory),
        decode=compile_attention(shape, capability, decode=True, split_keys=split_keys, shared_memory=shared_memory),
        combine=compile_kernel(combine_spec(shape, capability)),
    )


def compile_attention(
    shape: AttentionShape, capability: int, *, decode: bool, split_keys: int, shared_memory: int | None = None
) -> CompiledKernel:
    """The attention kernel with the first tile whose code fits; arguments and errors as ``compile_layer`` has them."""
    gpu = gpu_of(capability)
    limit = gpu.shared_memory if shared_memory is None else min(shared_memory, gpu.shared_memory)
    dtype: FloatType = shape.dtype
    for tile in attention_tiles(shape.group, shape.width, dtype, gpu, decode=decode, shared_memory=limit):
        compiled = compile_kernel(attention_spec(shape, capability, tile, split_keys))
        if compiled.shared_memory <= limit:
            return compiled
    raise TargetError(
        f"paged attention for compute capability {capability}: heads of {shape.width} elements of {dtype} don't fit "
        f"{limit} bytes of shared memory",
        hint="Use float16 or bfloat16, or a GPU with more shared memory.",
    )


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """Compiles one kernel; Triton's own caches are neither read nor written.

    Raises MissingDependencyError without Triton, TargetError where it can't compile the kernel, or where this process
    has Triton as an interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise TargetError(
            f"{spec.kernel}: Triton interprets kernels in this process, and compiles none",
            hint="Unset TRITON_INTERPRET and start anew.",
        )
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
        from triton.compiler import ASTSource
        from triton.compiler.errors import CompilationError
    except ModuleNotFoundError as e:
        raise MissingDependencyError(
            f"{spec.kernel}: compiling it needs {e.name}, which is not installed",
            hint="Install it with: pip install 'enginewright[triton]'",
        ) from e

    from .attention_kernels import combine_splits_kernel, paged_attention_kernel
    from .cache_kernels import kv_write_kernel

    function = {
        "kv_write": kv_write_kernel,
        "paged_attention": paged_attention_kernel,
        "combine_splits": combine_splits_kernel,
    }[spec.kernel]
    names: list[str] = function.arg_names
    types, constants = dict(spec.arguments), dict(spec.constants)
    given = {name for name, of in spec.arguments if of.startswith("*")} | set(spec.aligned)
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(i,): constants.get(name) for i, name in enumerate(names) if name not in types},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in given},
    )
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
        knobs.compilation.disable_line_info = True
        knobs.compilation.always_compile = True
        knobs.cache.dir = folder
        options = {"num_warps": spec.warps, "num_stages": spec.stages, "enable_fp_fusion": True}
        options["ptx_version"] = gpu_of(spec.capability).ptx  # by default the newest that Triton's assembler knows
        try:
            compiled = triton.compile(source, target=GPUTarget("cuda", spec.capability, 32), options=options)
        except CompilationError as e:
            raise TargetError(
                f"{spec.kernel} can't be compiled for compute capability {spec.capability}: {e}",
                hint="Use the version of Triton that pyproject.toml names.",
            ) from e
    entry = str(compiled.metadata.name)
    ptx = _without_scratch(spec, entry, compiled.asm["ptx"], compiled.metadata)
    assembler, architecture = get_ptxas(spec.capability).path, sm_arch_from_capability(spec.capability)
    return CompiledKernel(
        spec=spec,
        entry=entry,
        ptx=ptx,
        cubin=_assemble(spec, ptx, assembler, architecture),
        shared_memory=int(compiled.metadata.shared),
        compiler=f"triton {triton.__version__}",
    )


def _without_scratch(spec: KernelSpec, entry: str, ptx: str, metadata: Any) -> str:
    """The code without Triton's two trailing parameters; TargetError where the kernel uses them."""
    declared = re.findall(rf"\.param [^\n]*\b({re.escape(entry)}_param_\d+)\b", ptx)
    last = declared[-2:]
    used = any(len(re.findall(rf"\b{name}\b", ptx)) != 1 for name in last)
    if metadata.global_scratch_size or metadata.profile_scratch_size or used:
        raise TargetError(
            f"{spec.kernel} for compute capability {spec.capability} needs scratch memory, which no launch gives it",
            hint="Use the version of Triton that pyproject.toml names.",
        )
    if len(declared) != len(spec.arguments) + 2:
        raise TargetError(
            f"{spec.kernel} has {len(declared)} parameters, not {len(spec.arguments)} and 2 of scratch memory",
            hint="Use the version of Triton that pyproject.toml names.",
        )
    for name in last:
        ptx = re.sub(rf",\s*\.param [^\n]*\b{name}\b", "", ptx)
    return ptx


def _assemble(spec: KernelSpec, ptx: str, assembler: str, architecture: str) -> bytes:
    """PTX to a cubin by Triton's own ptxas, with the flag that Triton gives it."""
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [assembler, "--regAllocOptLevel=2", f"--gpu-name={architecture}", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(
                f"{spec.kernel}: ptxas refused the code for {architecture}: {done.stderr.strip()}",
                hint="Use the version of Triton that pyproject.toml names.",
            )
        return result.read_bytes()


def write_kernels(folder: Path, kernels: Iterable[CompiledKernel]) -> list[Path]:
    """Writes STEM.ptx, STEM.cubin and STEM.json of each into ``folder``; what was written, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    written = set()
    for kernel in kernels:
        for name, content in files_of(kernel).items():
            (folder / name).write_bytes(content)
            written.add(folder / name)
    return sorted(written)


def files_of(kernel: CompiledKernel) -> dict[str, bytes]:
    """A kernel's three files, by name."""
    stem = kernel.spec.stem
    contents = {".ptx": kernel.ptx.encode(), ".cubin": kernel.cubin, ".json": _metadata(kernel).encode()}
    return {stem + suffix: content for suffix, content in contents.items()}


def _metadata(kernel: CompiledKernel) -> str:
    spec = kernel.spec
    document = {
        "format": FORMAT,
        "kernel": spec.kernel,
        "entry": kernel.entry,
        "capability": spec.capability,
        "arguments": [list(argument) for argument in spec.arguments],
        "constants": dict(spec.constants),
        "aligned": list(spec.aligned),
        "warps": spec.warps,
        "stages": spec.stages,
        "threads": kernel.threads,
        "shared_memory": kernel.shared_memory,
        "compiler": kernel.compiler,
    }
    return json.dumps(document, indent=1) + "\n"


def read_kernel(folder: Path, spec: KernelSpec) -> CompiledKernel:
    """What ``write_kernels`` wrote for ``spec``; BundleError where it is missing, damaged or for something else."""
    path = folder / f"{spec.stem}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        kernel = CompiledKernel(
            spec=spec,
            entry=document["entry"],
            ptx=path.with_suffix(".ptx").read_text(encoding="utf-8"),
            cubin=path.with_suffix(".cubin").read_bytes(),
            shared_memory=document["shared_memory"],
            compiler=document["compiler"],
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BundleError(
            f"{path}: the kernel {spec.kernel} for compute capability {spec.capability} can't be read: {e}",
            hint="Export again, with that capability among the GPUs.",
        ) from e
    if _metadata(kernel) != path.read_text(encoding="utf-8"):
        raise BundleError(f"{path}: made for something else than its name says", hint="Export again.")
    return kernel
