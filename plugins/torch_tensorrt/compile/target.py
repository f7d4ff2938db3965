"""The compiling half of the torch-tensorrt target."""

from ...emit.target import Target
from .emitter import TorchTensorRtEmitter, check_machine

TARGET = Target(TorchTensorRtEmitter(), ("torch_tensorrt",), check=check_machine)
