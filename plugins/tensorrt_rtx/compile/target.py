"""The compiling half of the tensorrt-rtx target."""

from enginewright.runtime.shared.kv_formats import SCALED_CACHES

from ...emit.target import Target
from ...engines.gpus import DEFAULT, check_suited
from .emitter import TensorRtRtxEmitter

TARGET = Target(
    TensorRtRtxEmitter(),
    ("onnx", "tensorrt_rtx"),
    gpus=DEFAULT,
    check_gpus=check_suited,
    caches=lambda engines: SCALED_CACHES if engines.form == "segments" else (),
    no_cache="engines of the whole model have none; segments do (form in [engines])",
)
