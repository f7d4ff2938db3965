"""The compiling half of the cuda target."""

from enginewright.runtime.shared.kv_formats import KV_FORMATS, ROTATED_CACHES

from ...emit.target import Target
from ...engines.gpus import CUDA_DEFAULT, check_kernels
from ...gpu.tiles import ROTATED_CODES
from .emitter import FLOATS, CudaEmitter, lower_for_gpus

TARGET = Target(
    CudaEmitter(),
    ("triton",),
    gpus=CUDA_DEFAULT,
    check_gpus=check_kernels,
    caches=lambda engines: KV_FORMATS.keys() - set(ROTATED_CACHES) | ROTATED_CODES.keys(),
    floats=FLOATS,
    instructions=(),
    states=True,
    exact=True,
    latent_caches=True,
    lower=lambda program, options: lower_for_gpus(program, options.engines.dtype or FLOATS),
)
