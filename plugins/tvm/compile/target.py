"""The compiling half of the tvm target."""

from ...emit.target import Target
from .emitter import TvmEmitter, lower_for_tvm

TARGET = Target(TvmEmitter(), ("apache-tvm",), lower=lambda program, options: lower_for_tvm(program))
