"""The compiling half of the onnx target."""

from ...emit.target import Target
from .emitter import OnnxEmitter

TARGET = Target(OnnxEmitter(), ("onnx",))
