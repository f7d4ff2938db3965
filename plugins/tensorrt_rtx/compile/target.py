"""The compiler's half of the tensorrt-rtx target."""

from ...emit.target import SCALED, Target
from ...engines.gpus import DEFAULT, check_suited
from .emitter import TensorRtRtxEmitter

TARGET = Target(
    TensorRtRtxEmitter(),
    ("onnx", "tensorrt_rtx"),
    gpus=DEFAULT,
    check_gpus=check_suited,
    caches=lambda engines: SCALED if engines.form == "segments" else (),
    no_cache="engines of the whole model have none; segments do (form in [engines])",
)
