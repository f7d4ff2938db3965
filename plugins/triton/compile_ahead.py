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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginewright.plugins.shared.errors import BundleError, MissingDependencyError, TargetError

from .specs import TILE_CONSTANTS, AttentionShape, Constant, KernelSpec, attention_spec
from .tiles import FEWEST_ROWS, Tile, gpu_of

FORMAT = 1
"""Of a compiled kernel's metadata."""

THREADS_OF_WARP = 32


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code and how to launch it.

    ``entry`` is its name in the code, ``shared_memory`` the bytes of dynamic shared memory that a launch must give it,
    ``compiler`` what compiled it. ``registers`` and bytes of ``stack`` are a thread's, as the assembler says: on the
    stack, in the GPU's memory, is what there weren't enough registers for. Both are 0 where a bundle doesn't say.
    """

    spec: KernelSpec
    entry: str
    ptx: str
    cubin: bytes
    shared_memory: int
    compiler: str
    registers: int = 0
    stack: int = 0

    @property
    def threads(self) -> int:
        """Of a block, along x."""
        return self.spec.warps * THREADS_OF_WARP

    def constant(self, name: str) -> Constant:
        """What the kernel was compiled with; KeyError for a name that it lacks."""
        return dict(self.spec.constants)[name]


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

    from .kernel_table import kernel_function

    function = kernel_function(spec.kernel)
    names: list[str] = function.arg_names
    types, constants = dict(spec.arguments), dict(spec.constants)
    given = {name for name, of in spec.arguments if of.startswith("*")} - set(spec.unaligned)
    given |= set(spec.aligned)
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
        except (CompilationError, RuntimeError) as e:  # a pass of the compiler that fails is the latter
            raise TargetError(
                f"{spec.kernel} can't be compiled for compute capability {spec.capability}: {e}",
                hint="Use the version of Triton that pyproject.toml names.",
            ) from e
    entry = str(compiled.metadata.name)
    ptx = _without_scratch(spec, entry, compiled.asm["ptx"], compiled.metadata)
    assembler, architecture = get_ptxas(spec.capability).path, sm_arch_from_capability(spec.capability)
    cubin, said = _assemble(spec, ptx, assembler, architecture, "--regAllocOptLevel=2")  # as Triton does
    if _number(_STACK, said):  # it goes for few registers, and may put some on a stack that would have had room
        again, said_again = _assemble(spec, ptx, assembler, architecture)
        if _number(_STACK, said_again) < _number(_STACK, said):
            cubin, said = again, said_again
    return CompiledKernel(
        spec=spec,
        entry=entry,
        ptx=ptx,
        cubin=cubin,
        shared_memory=int(compiled.metadata.shared),
        compiler=f"triton {triton.__version__}",
        registers=_number(r"Used (\d+) registers", said),
        stack=_number(_STACK, said),
    )


_STACK = r"(\d+) bytes stack frame"


def _number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    assert found is not None, said
    return int(found[1])


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


def _assemble(spec: KernelSpec, ptx: str, assembler: str, architecture: str, *flags: str) -> tuple[bytes, str]:
    """PTX to a cubin by Triton's own ptxas, and what ptxas says of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        command = [assembler, "-v", *flags, f"--gpu-name={architecture}", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise TargetError(
                f"{spec.kernel}: ptxas refused the code for {architecture}: {done.stderr.strip()}",
                hint="Use the version of Triton that pyproject.toml names.",
            )
        return result.read_bytes(), done.stderr


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
        "unaligned": list(spec.unaligned),
        "warps": spec.warps,
        "stages": spec.stages,
        "threads": kernel.threads,
        "shared_memory": kernel.shared_memory,
        "compiler": kernel.compiler,
        "registers": kernel.registers,
        "stack": kernel.stack,
    }
    return json.dumps(document, indent=1) + "\n"


def read_kernel(folder: Path, spec: KernelSpec) -> CompiledKernel:
    """What ``write_kernels`` wrote for ``spec``; BundleError where it is missing, damaged or for something else."""
    path = folder / f"{spec.stem}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        kernel = CompiledKernel(
            spec=_spec_of(document),
            entry=document["entry"],
            ptx=path.with_suffix(".ptx").read_text(encoding="utf-8"),
            cubin=path.with_suffix(".cubin").read_bytes(),
            shared_memory=document["shared_memory"],
            compiler=document["compiler"],
            registers=document.get("registers", 0),
            stack=document.get("stack", 0),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise BundleError(
            f"{path}: the kernel {spec.kernel} for compute capability {spec.capability} can't be read: {e}",
            hint="Export again, with that capability among the GPUs.",
        ) from e
    if kernel.spec != spec or kernel.threads != document["threads"]:
        raise BundleError(f"{path}: made for something else than its name says", hint="Export again.")
    return kernel


def read_attention(folder: Path, shape: AttentionShape, capability: int, split_keys: int) -> tuple[CompiledKernel, ...]:
    """The attention kernels that ``folder`` has for a layer, whatever their tiles are: who exports chooses those.

    ``split_keys``: 0, or how many keys a part has when decoding. Raises BundleError where there is none, or one is
    damaged.
    """
    any_tile = Tile(1, FEWEST_ROWS, FEWEST_ROWS, 1, 1)
    wanted = attention_spec(shape, capability, any_tile, split_keys)
    found = []
    for path in sorted(folder.glob(f"{wanted.kernel}-sm{capability}-*.json")):
        try:
            spec = _spec_of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise BundleError(f"{path}: the kernel can't be read: {e}", hint="Export again.") from e
        if _without_tile(spec) == _without_tile(wanted):
            found.append(read_kernel(folder, spec))
    if not found:
        raise BundleError(
            f"{folder}: there is no attention kernel for compute capability {capability} and {shape}",
            hint="Export again, with that capability among the GPUs.",
        )
    return tuple(found)


def _spec_of(document: Any) -> KernelSpec:
    """What a kernel's metadata says that it was made for."""
    return KernelSpec(
        kernel=document["kernel"],
        capability=document["capability"],
        arguments=tuple((name, of) for name, of in document["arguments"]),
        constants=tuple(document["constants"].items()),
        aligned=tuple(document["aligned"]),
        warps=document["warps"],
        stages=document["stages"],
    )


def _without_tile(spec: KernelSpec) -> KernelSpec:
    constants = tuple((name, of) for name, of in spec.constants if name not in TILE_CONSTANTS)
    return replace(spec, constants=constants, warps=0, stages=0)
