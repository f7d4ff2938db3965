"""Compiles the Triton kernels without a GPU: PTX, cubin, and the facts that a launch needs.

The same kernel gives the same bytes on every machine with the same Triton: paths and line numbers are left out. Triton
appends two pointers to scratch memory to a kernel's parameters. They are removed if the kernel doesn't use them, so
that a launch needs only the kernel's own arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, TargetError

from .specs import (
    TILE_CONSTANTS,
    AttentionShape,
    Constant,
    KernelSpec,
    attention_spec,
    kernel_function,
    taken_constants,
)
from .tiles import FEWEST_ROWS, Tile, gpu_of

FORMAT = 1
"""The version of a compiled kernel's metadata."""

THREADS_OF_WARP = 32


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code, and the facts that a launch needs.

    Attributes:
        spec: the specification for which it was compiled.
        entry: its name in the code.
        ptx, cubin: its PTX and its machine code.
        shared_memory: the bytes of dynamic shared memory that a launch must provide.
        compiler: the name and version of the compiler.
        registers, stack: the registers of a thread, and the bytes of its stack in the GPU's memory, on which values are
            that have no register. Both are 0 if a bundle doesn't have the numbers.
        architecture: the target of the machine code, such as "sm_100f"; "" if a bundle doesn't have it.
    """

    spec: KernelSpec
    entry: str
    ptx: str
    cubin: bytes
    shared_memory: int
    compiler: str
    registers: int = 0
    stack: int = 0
    architecture: str = ""

    @property
    def for_family(self) -> bool:
        """True if later GPUs of the same family also run the machine code."""
        return self.architecture.endswith("f")

    @property
    def threads(self) -> int:
        """The number of threads of a block, along x."""
        return self.spec.warps * THREADS_OF_WARP

    def constant(self, name: str) -> Constant:
        """Returns the value of a constant for which the kernel was compiled. Raises KeyError for an unknown name."""
        return dict(self.spec.constants)[name]


def compile_kernel(spec: KernelSpec) -> CompiledKernel:
    """Compiles one kernel, or reads it from our folder in Triton's cache (TRITON_CACHE_DIR).

    Raises MissingDependencyError without Triton. Raises TargetError if Triton can't compile the kernel, or if this
    process uses Triton as an interpreter.
    """
    if interprets():
        raise TargetError(
            f"{spec.kernel}: Triton interprets kernels in this process, and compiles none",
            hint="Unset TRITON_INTERPRET and start anew.",
        )
    check_triton(f"{spec.kernel}: compiling it")
    import triton
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    function = kernel_function(spec.kernel)
    names: list[str] = function.arg_names
    types, constants = dict(spec.arguments), taken_constants(spec.kernel, dict(spec.constants))
    aligned = {name for name, of in spec.arguments if of.startswith("*")} - set(spec.unaligned)
    aligned |= set(spec.aligned)
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(i,): constants.get(name) for i, name in enumerate(names) if name not in types},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    cache_folder = Path(triton.knobs.cache.dir, f"enginewright-{_version()}")
    try:
        try:
            compiled = _compile(spec, source, cache_folder)
        except (OSError, ValueError, KeyError):  # a cache that can't be written, or whose files are damaged
            with tempfile.TemporaryDirectory() as folder:
                compiled = _compile(spec, source, Path(folder))
    except (CompilationError, RuntimeError) as e:  # a pass of the compiler that fails is the latter
        raise TargetError(
            f"{spec.kernel} can't be compiled for compute capability {spec.capability}: {e}",
            hint="Use the version of Triton that pyproject.toml names.",
        ) from e
    metadata = compiled.metadata
    return CompiledKernel(
        spec=spec,
        entry=str(metadata.name),
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        shared_memory=int(metadata.shared),
        compiler=f"triton {triton.__version__}",
        registers=int(metadata.registers),
        stack=int(metadata.stack),
        architecture=str(metadata.architecture),
    )


def interprets() -> bool:
    """Returns True if Triton interprets kernels in this process, as an environment variable says."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_triton(what: str) -> None:
    """Raises MissingDependencyError if Triton isn't installed; ``what`` is the work that needs it, for the message."""
    if importlib.util.find_spec("triton") is None:
        raise MissingDependencyError(
            f"{what} needs triton, which is not installed", hint="Install it with: pip install 'enginewright[cuda]'"
        )


@cache
def _version() -> str:
    """Returns a hash of this module. Triton's cache key has Triton and the kernels, but not the changes that this
    module makes.
    """
    return sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _compile(spec: KernelSpec, source: Any, cache_folder: Path) -> Any:
    """Compiles a kernel with Triton, with Triton's last two stages replaced by ours."""
    import triton
    from triton.backends.compiler import GPUTarget

    def add_stages(*given: Any) -> tuple[str, str]:
        if given:
            stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = given[1]
            translate = stages["ptx"]
            stages["ptx"] = lambda module, metadata: _without_scratch(spec, translate(module, metadata), metadata)
            stages["cubin"] = lambda ptx, metadata: _assembled(spec, ptx, metadata)
        return "", ""  # what it adds to the key of Triton's cache: the folder says it

    knobs = triton.knobs
    options = {"num_warps": spec.warps, "num_stages": spec.stages, "enable_fp_fusion": True}
    options["ptx_version"] = gpu_of(spec.capability).ptx  # by default the newest that Triton's assembler knows
    with knobs.compilation.scope(), knobs.cache.scope(), knobs.runtime.scope():
        knobs.compilation.disable_line_info, knobs.compilation.store_binary_only = True, False
        knobs.cache.dir = str(cache_folder)
        knobs.runtime.add_stages_inspection_hook = add_stages
        return triton.compile(source, target=GPUTarget("cuda", spec.capability, THREADS_OF_WARP), options=options)


def _without_scratch(spec: KernelSpec, ptx: str, metadata: Mapping[str, Any]) -> str:
    """Returns the PTX without the two parameters that Triton appends. Raises TargetError if the kernel uses them."""
    entry = metadata["name"]
    declared = re.findall(rf"\.param [^\n]*\b({re.escape(entry)}_param_\d+)\b", ptx)
    last = declared[-2:]
    used = any(len(re.findall(rf"\b{name}\b", ptx)) != 1 for name in last)
    if metadata["global_scratch_size"] or metadata["profile_scratch_size"] or used:
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


_FAMILY_PTX = "8.8"
"""The first version of PTX that has families of GPUs (PTX ISA, "Release Notes")."""

_STACK = r"(\d+) bytes stack frame"


def _number(pattern: str, said: str) -> int:
    match = re.search(pattern, said)
    assert match is not None, said
    return int(match[1])


def _assembled(spec: KernelSpec, ptx: str, metadata: dict[str, Any]) -> bytes:
    """Returns the machine code, and stores its target and its numbers of registers and stack bytes in ``metadata``.

    The PTX of a bundle keeps Triton's target and its old version, for drivers that don't know families.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    assembler, architecture = get_ptxas(spec.capability).path, gpu_of(spec.capability).architecture
    if architecture.endswith("f"):
        ptx = re.sub(r"^\.version .*$", f".version {_FAMILY_PTX}", ptx, count=1, flags=re.MULTILINE)
        ptx = re.sub(r"^\.target .*$", f".target {architecture}", ptx, count=1, flags=re.MULTILINE)
    cubin, log = _assemble(spec, ptx, assembler, architecture, "--regAllocOptLevel=2")  # as Triton does
    if _number(_STACK, log):  # it goes for few registers, and may put some on a stack that would have had room
        again, said_again = _assemble(spec, ptx, assembler, architecture)
        if _number(_STACK, said_again) < _number(_STACK, log):
            cubin, log = again, said_again
    metadata |= {"registers": _number(r"Used (\d+) registers", log), "stack": _number(_STACK, log)}
    metadata["architecture"] = architecture
    return cubin


def _assemble(spec: KernelSpec, ptx: str, assembler: str, architecture: str, *flags: str) -> tuple[bytes, str]:
    """Assembles PTX with Triton's ptxas; returns the cubin and ptxas's log. Raises TargetError.

    ``architecture`` is the target, ``flags`` are further options of ptxas.
    """
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
    """Writes the files of each kernel into ``folder``, STEM.ptx, STEM.cubin and STEM.json. Returns their paths,
    sorted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = set()
    for kernel in kernels:
        for name, content in files_of(kernel).items():
            (folder / name).write_bytes(content)
            written.add(folder / name)
    return sorted(written)


def files_of(kernel: CompiledKernel) -> dict[str, bytes]:
    """Returns a kernel's files, name -> content: PTX, cubin, and metadata as JSON."""
    stem = kernel.spec.stem
    contents = {".ptx": kernel.ptx.encode(), ".cubin": kernel.cubin, ".json": _metadata(kernel).encode()}
    return {stem + suffix: content for suffix, content in contents.items()}


def spec_document(spec: KernelSpec) -> dict[str, Any]:
    """Returns a specification as values that JSON can represent; ``spec_of`` reverses it."""
    return {
        "kernel": spec.kernel,
        "capability": spec.capability,
        "arguments": [list(argument) for argument in spec.arguments],
        "constants": dict(spec.constants),
        "aligned": list(spec.aligned),
        "unaligned": list(spec.unaligned),
        "warps": spec.warps,
        "stages": spec.stages,
    }


def spec_of(document: Any) -> KernelSpec:
    """Returns the specification from the result of ``spec_document``, or from a kernel's metadata."""
    return KernelSpec(
        kernel=document["kernel"],
        capability=document["capability"],
        arguments=tuple((name, of) for name, of in document["arguments"]),
        constants=tuple(document["constants"].items()),
        aligned=tuple(document["aligned"]),
        warps=document["warps"],
        stages=document["stages"],
        unaligned=tuple(document.get("unaligned", ())),
    )


def _metadata(kernel: CompiledKernel) -> str:
    document = {
        "format": FORMAT,
        "kernel": kernel.spec.kernel,
        "entry": kernel.entry,
        **spec_document(kernel.spec),
        "threads": kernel.threads,
        "shared_memory": kernel.shared_memory,
        "compiler": kernel.compiler,
        "registers": kernel.registers,
        "stack": kernel.stack,
        "architecture": kernel.architecture,
    }
    return json.dumps(document, indent=1) + "\n"


def read_kernel(
    folder: Path, stem: str, *, read: Callable[[Path], bytes] = Path.read_bytes, with_ptx: bool = True
) -> CompiledKernel:
    """Reads a kernel that ``write_kernels`` wrote.

    Args:
        folder: the folder of the files.
        stem: the name of the files, without suffix.
        read: returns the bytes of a file.
        with_ptx: False leaves ``ptx`` empty.

    Raises:
        BundleError: it is missing or damaged, or its specification doesn't match its name.
    """
    path = folder / f"{stem}.json"
    try:
        document = json.loads(read(path))
        kernel = CompiledKernel(
            spec=spec_of(document),
            entry=document["entry"],
            ptx=read(path.with_suffix(".ptx")).decode() if with_ptx else "",
            cubin=read(path.with_suffix(".cubin")),
            shared_memory=document["shared_memory"],
            compiler=document["compiler"],
            registers=document.get("registers", 0),
            stack=document.get("stack", 0),
            architecture=document.get("architecture", ""),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise BundleError(f"{path}: the kernel can't be read: {e}", hint="Export the bundle again.") from e
    if kernel.spec.stem != stem:
        raise BundleError(f"{path}: made for something else than its name says", hint="Export the bundle again.")
    return kernel


def read_attention(
    folder: Path, shape: AttentionShape, capability: int, split_keys: int, *, clamp: bool = False
) -> tuple[CompiledKernel, ...]:
    """Reads all attention kernels in ``folder`` for a layer. They may differ in their tiles.

    ``split_keys`` is 0 for prompts, otherwise the keys of a split in decoding; ``clamp`` is as for ``attention_spec``.
    Raises BundleError if there is none, or one is damaged.
    """
    any_tile = Tile(1, FEWEST_ROWS, FEWEST_ROWS, 1, 1)
    spec = attention_spec(shape, capability, any_tile, split_keys, clamp=clamp)
    every = [read_kernel(folder, path.stem) for path in sorted(folder.glob(f"{spec.kernel}-sm{capability}-*.json"))]
    matching = tuple(kernel for kernel in every if _without_tile(kernel.spec) == _without_tile(spec))
    if not matching:
        raise BundleError(
            f"{folder}: no attention kernel for compute capability {capability} and {shape}",
            hint="Export again, with that capability among the GPUs.",
        )
    return matching


def _without_tile(spec: KernelSpec) -> KernelSpec:
    constants = tuple((name, of) for name, of in spec.constants if name not in TILE_CONSTANTS)
    return replace(spec, constants=constants, warps=0, stages=0)
