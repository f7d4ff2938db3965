"""Chooses the tile of an attention kernel on a GPU: the first that its code fits with, by compiling it.

How much shared memory a tile takes and how many registers is the compiler's affair: an estimate of the former was up to
2.7 times what it came to. Tiles that were timed on a GPU come first (``measured_tiles``), then those of the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from enginewright.runtime.shared.errors import TargetError

from .compile_ahead import CompiledKernel, compile_kernel
from .specs import AttentionShape, KernelSpec, attention_spec, combine_spec, write_spec
from .tiles import SPLIT_KEYS, Tile, attention_tiles, gpu_of, measured_tiles

Compile = Callable[[KernelSpec], CompiledKernel]


@dataclass(frozen=True)
class LayerKernels:
    """All that an attention layer launches: a write, then one of ``prefill``, or one of ``decode`` and ``combine``.

    Of several the first is the best known.
    """

    write: CompiledKernel
    prefill: tuple[CompiledKernel, ...]
    decode: tuple[CompiledKernel, ...]
    combine: CompiledKernel

    def all(self) -> tuple[CompiledKernel, ...]:
        """Returns the kernels in the order in which they are launched."""
        return self.write, *self.prefill, *self.decode, self.combine


def compile_layer(
    shape: AttentionShape,
    capability: int,
    *,
    split_keys: int = SPLIT_KEYS,
    shared_memory: int | None = None,
    most: int = 1,
    clamp: bool = False,
    compiler: Compile = compile_kernel,
) -> LayerKernels:
    """The kernels of a layer.

    Args:
        capability: 89 for 8.9.
        split_keys: keys of a part of the context when decoding.
        shared_memory: bytes that a block may use at most; None: what the GPU has.
        most: attention kernels for each phase, to choose among.
        clamp: True keeps them within their memory whatever their integers are.
        compiler: ``compile_kernel``, or what stands for it.

    Raises:
        TargetError: for a capability that isn't known, or where no tile fits.
        MissingDependencyError: without Triton.
    """

    def attention(split_keys: int) -> tuple[CompiledKernel, ...]:
        return compile_attention(
            shape,
            capability,
            split_keys=split_keys,
            shared_memory=shared_memory,
            most=most,
            clamp=clamp,
            compiler=compiler,
        )

    return LayerKernels(
        write=compiler(write_spec(shape, capability)),
        prefill=attention(0),
        decode=attention(split_keys),
        combine=compiler(combine_spec(shape, capability)),
    )


def choose_tile(shape: AttentionShape, capability: int, *, decode: bool, compiler: Compile = compile_kernel) -> Tile:
    """The attention kernel's, by what is compiled where nothing was measured; the same however keys are split.

    It fits every GPU that runs this one's machine code. Raises what ``compile_attention`` raises.
    """
    case, gpu = shape.tile_case(decode=decode), gpu_of(capability)
    if case in measured_tiles(capability) and gpu.portable_memory == gpu.shared_memory:
        return next(attention_tiles(case, gpu))
    split_keys, limit = SPLIT_KEYS if decode else 0, gpu.portable_memory
    return compile_attention(shape, capability, split_keys=split_keys, shared_memory=limit, compiler=compiler)[
        0
    ].spec.tile


def compile_attention(
    shape: AttentionShape,
    capability: int,
    *,
    split_keys: int,
    shared_memory: int | None = None,
    most: int = 1,
    clamp: bool = False,
    compiler: Compile = compile_kernel,
) -> tuple[CompiledKernel, ...]:
    """The attention kernels with the first ``most`` tiles whose code fits and needs no stack.

    Where all need one (float32), that with the least. ``split_keys``: 0 for prompts, else for decoding. Other arguments
    and errors as ``compile_layer`` has them.
    """
    gpu = gpu_of(capability)
    limit = gpu.shared_memory if shared_memory is None else min(shared_memory, gpu.shared_memory)
    # Several blocks of a decoding kernel share a multiprocessor: one copies while another multiplies.
    preferred = min(limit, gpu.shared_memory // 2) if split_keys else limit
    fitting: list[CompiledKernel] = []
    others: list[CompiledKernel] = []
    refused: TargetError | None = None
    for tile in attention_tiles(shape.tile_case(decode=split_keys > 0), gpu, limit):
        try:
            compiled = compiler(attention_spec(shape, capability, tile, split_keys, clamp=clamp))
        except TargetError as e:  # a tile at which a pass of Triton's fails
            refused = e
            continue
        if compiled.shared_memory <= limit:
            (fitting if compiled.shared_memory <= preferred and not compiled.stack else others).append(compiled)
        if len(fitting) == most:
            break
    if not fitting and not others and refused is not None:
        raise refused
    if not fitting and not others:
        raise TargetError(
            f"paged attention for compute capability {capability}: heads of {shape.width} elements of {shape.dtype} "
            f"don't fit {limit} bytes of shared memory",
            hint="Use float16 or bfloat16, or a GPU with more shared memory.",
        )
    return tuple(fitting) or (min(others, key=lambda kernel: kernel.stack),)
