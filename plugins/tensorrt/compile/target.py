"""The compiling half of the tensorrt target."""

from enginewright.runtime.shared.kv_formats import SCALED_CACHES

from ...emit.target import Target
from ...engines.gpus import KERNELS_FOR, check_kernels
from .emitter import TensorRtEmitter

TARGET = Target(
    TensorRtEmitter(),
    ("onnx", "triton"),
    gpus=KERNELS_FOR,
    check_gpus=check_kernels,
    caches=lambda engines: SCALED_CACHES if engines.caches != "ordered" else (),
    cache_instructions=("fp8",),
    no_cache='writes that are "ordered" have none (caches in [engines])',
)
