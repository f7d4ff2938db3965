"""Chooses the tile of an attention kernel on a GPU: the first one that fits when its code is compiled.

Only the compiler knows how much shared memory and how many registers a tile needs: an estimate of the memory was wrong
by up to a factor of 2.7. Tiles that were measured on a GPU (``measured_tiles``) are tried first, then those of a rule.
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
    """The kernels of an attention layer. A step launches ``write``, then a ``prefill`` kernel, or ``decode`` and
    ``combine``.

    The best known kernel of a tuple is the first.
    """

    write: CompiledKernel
    prefill: tuple[CompiledKernel, ...]
    decode: tuple[CompiledKernel, ...]
    combine: CompiledKernel

    def all(self) -> tuple[CompiledKernel, ...]:
        """Returns all kernels, in launch order."""
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
    """Compiles the kernels of an attention layer.

    Args:
        shape: the layer.
        capability: the compute capability; 89 for 8.9.
        split_keys: the keys of one split of a context in decoding.
        shared_memory: the most bytes that a thread block may use; None takes the GPU's limit.
        most: the number of alternative attention kernels for each phase.
        clamp: True if kernels stay within their memory whatever their integers are.
        compiler: compiles one kernel.

    Raises:
        TargetError: the compute capability is unknown, or no tile fits.
        MissingDependencyError: Triton isn't installed.
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
    """Returns the tile of the attention kernel: the measured one, or otherwise the first that fits when it is compiled.

    It fits every GPU that runs this GPU's machine code. Raises the errors of ``compile_attention``.
    """
    case, gpu = shape.tile_case(decode=decode), gpu_of(capability)
    if not shape.exact and case in measured_tiles(capability) and gpu.portable_memory == gpu.shared_memory:
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
    """Compiles attention kernels with the first ``most`` tiles that fit into shared memory and need no stack.

    If all need a stack (float32), it returns the one with the smallest. ``split_keys`` is 0 for prompts. Other
    arguments and errors are those of ``compile_layer``.
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
