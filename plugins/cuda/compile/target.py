"""The compiler's half of the cuda target."""

from ...emit.target import Target
from ...engines.gpus import CUDA_DEFAULT, check_kernels
from .emitter import CudaEmitter

TARGET = Target(
    CudaEmitter(),
    ("triton",),
    gpus=CUDA_DEFAULT,
    check_gpus=check_kernels,
    narrow_caches=True,
    floats="bf16",
    instructions=(),
)
