"""The compiler's half of the tvm target."""

from ...emit.target import Target
from .emitter import TvmEmitter

TARGET = Target(TvmEmitter(), ("apache-tvm",))
