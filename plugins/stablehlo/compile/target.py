"""The compiling half of the stablehlo target."""

from ...emit.target import Target
from .emitter import StableHloEmitter

TARGET = Target(StableHloEmitter(), ("onnx", "jaxlib"))
